"""Linear layers joined with the run that their results meet in: the same numbers, and joined only where nobody else
looks."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from chairlift import _native
from chairlift.engine.linears import PackedLinear, PackedLinears
from chairlift.engine.packings import NativeJoin, NativePacking
from chairlift.engine.replay.joining import JoinedRun
from toy_forwards import Forward, Toy, inputs, weights

GATE, UP, DOWN, BIAS = (weights(*shape, seed=seed) for seed, shape in enumerate(((40, 24), (40, 24), (24, 40), (40,))))


def linears_of(least_rows: int = 1, dtype: torch.dtype = torch.float32) -> tuple[PackedLinears, list[torch.Tensor]]:
    """Packed copies of the weights in that dtype, and the weights."""
    given = [weight.to(dtype) for weight in (GATE, UP, DOWN)]
    named = {str(n): weight for n, weight in enumerate(given)}
    by_name = {name: PackedLinear(weight, NativePacking(weight), least_rows) for name, weight in named.items()}
    return PackedLinears(by_name, named), given


def joined_in(forward: Callable[[list[torch.Tensor]], Forward], dtype: torch.dtype, least_rows: int = 1) -> int:
    """Checks a forward with packed layers, and counts what was joined in it."""
    linears, given = linears_of(least_rows, dtype)
    toy = Toy(forward(given), dtype)
    program = toy.program_with(linears)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for tokens in (2, 40, 300):
        args = inputs(tokens, 2)
        torch.testing.assert_close(program.run(None, None, *args), toy(*args), rtol=tolerance, atol=tolerance)
    return sum(isinstance(value, JoinedRun) for value in program.run.__globals__.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gate_is_one_call(dtype: torch.dtype) -> None:
    assert joined_in(lambda w: lambda x, _: F.linear(F.silu(F.linear(x, w[0])) * F.linear(x, w[1]), w[2]), dtype) == 1


def test_with_biases_and_numbers_too() -> None:
    def forward(w: list[torch.Tensor]) -> Forward:
        return lambda x, _: F.linear(torch.tanh(F.linear(x, w[0], BIAS)) * (F.linear(x, w[1]) + 1.5), w[2])

    assert joined_in(forward, torch.float32) == 1


def test_one_layer_and_its_activation() -> None:
    assert joined_in(lambda w: lambda x, _: F.linear(F.silu(F.linear(x, w[0], BIAS)) * 2.0, w[2]), torch.float32) == 1


def test_of_fewer_rows_than_packing_pays_for_each_is_computed_alone() -> None:
    forward = lambda w: lambda x, _: F.silu(F.linear(x, w[0])) * F.linear(x, w[1])  # noqa: E731
    assert joined_in(forward, torch.float32, least_rows=50) == 1


ALONE: dict[str, Callable[[list[torch.Tensor]], Forward]] = {
    "a result that others read": lambda w: (
        lambda x, _: F.linear(F.silu(a := F.linear(x, w[0])) * F.linear(x, w[1]) + F.linear(a, w[2]).mean(), w[2])
    ),
    "layers of two inputs": lambda w: lambda x, _: F.silu(F.linear(x, w[0])) * F.linear(x.cumsum(1), w[1]),
    "a vector for all rows": lambda w: lambda x, _: F.silu(F.linear(x, w[0])) * F.linear(x, w[1]) * BIAS,
    "a norm of the result": lambda w: lambda x, _: (y := F.linear(x, w[0])) * y.mean(-1, keepdim=True),
    "a residual": lambda w: lambda x, _: (F.linear(F.linear(x, w[0]), w[2]) + x) * 0.5,
}


@pytest.mark.parametrize("name", ALONE)
def test_what_is_more_than_columns_of_the_layers_stays_apart(name: str) -> None:
    assert joined_in(ALONE[name], torch.float32) == 0


def test_changed_weights_are_not_joined() -> None:
    linears, given = linears_of()
    toy = Toy(lambda x, _: F.silu(F.linear(x, given[0])) * F.linear(x, given[1]), torch.float32)
    given[1].mul_(2.0)
    program, args = toy.program_with(linears), inputs(9, 2)
    torch.testing.assert_close(program.run(None, None, *args), toy(*args), rtol=1e-4, atol=1e-4)


def test_layers_of_two_shapes_cannot_be_joined() -> None:
    program = _native.RowProgram(
        [(1, 40, 1)] * 2, [("mul", [(0, 1, 40), (1, 1, 40)], 1, 40, "float32", 0)], [(2, 1, 40, 1)], 2
    )
    assert NativeJoin.of([NativePacking(GATE), NativePacking(UP)], program) is not None
    assert NativeJoin.of([NativePacking(GATE), NativePacking(DOWN)], program) is None
    with pytest.raises(ValueError, match="all must be of the same shape"):
        _native.JoinedLinears([NativePacking(GATE).linear, NativePacking(DOWN).linear], program)
