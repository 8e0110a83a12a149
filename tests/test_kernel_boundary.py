"""Packed layers and row programs through the binding: what does not fit is refused, nothing read or written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from chairlift import _native

WEIGHT = torch.arange(24, dtype=torch.float32).view(4, 6)


def layer(weight: torch.Tensor = WEIGHT, isa: str | None = None) -> _native.PackedLinear:
    return _native.PackedLinear(to_dlpack(weight), 2, isa)


def doubled() -> _native.RowProgram:
    """Adds three groups of four to themselves."""
    instructions: list[Any] = [("add", [(0, 3, 4), (0, 3, 4)], 3, 4, "float32", 0)]
    return _native.RowProgram([(3, 4, 1)], instructions, [(1, 3, 4, 1)], 2)


@pytest.mark.parametrize("isa", _native.instruction_sets())
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_a_layer_takes_rows_at_any_equal_distance(isa: str, rows: int) -> None:
    wide = torch.randn(rows, 9, generator=torch.Generator().manual_seed(rows))
    out = torch.full((rows, 7), float("nan"))
    layer(isa=isa).multiply(to_dlpack(wide[:, 2:8]), to_dlpack(out[:, 1:5]))
    torch.testing.assert_close(out[:, 1:5], wide[:, 2:8] @ WEIGHT.T, rtol=1e-5, atol=1e-5)
    assert out[:, [0, 5, 6]].isnan().all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: multiplied(torch.ones(2, 5)), ValueError, r"the input is \[2, 5\]: \[2, 6\] is expected"),
        (lambda: multiplied(torch.ones(3, 6)), ValueError, r"the input is \[3, 6\]: \[2, 6\] is expected"),
        (lambda: multiplied(torch.ones(2, 6), torch.ones(2, 3)), ValueError, r"the output is \[2, 3\]: \[2, 4\]"),
        (lambda: multiplied(torch.ones(2, 6), bias=torch.ones(3)), ValueError, r"the bias is \[1, 3\]: \[1, 4\]"),
        (lambda: multiplied(torch.ones(2, 6).bfloat16()), TypeError, "input is of Bf16, and the weight of F32"),
        (lambda: multiplied(torch.ones(2, 6).double()), TypeError, "input: float32, bfloat16 or float16 is expected"),
        (lambda: multiplied(torch.ones(6, 2).T), ValueError, "the last dimension of input has stride 2, not 1"),
        (lambda: multiplied(torch.ones(3, 2, 6)[:, :1].expand(3, 2, 6)), ValueError, "rows of input do not lie"),
        (lambda: multiplied(torch.tensor(1.0)), ValueError, "input is a number, not rows of them"),
        (lambda: layer(torch.ones(0, 6)), ValueError, r"a weight of \[0, 6\]: nothing can be packed of it"),
        (lambda: layer(isa="mmx"), ValueError, '"mmx" is unknown or not of this machine'),
    ],
)
def test_a_layer_refuses_what_does_not_fit(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("rows", [1, 9, 200])
def test_joined_layers_give_what_they_give_apart(rows: int) -> None:
    wide = torch.randn(rows, 9, generator=torch.Generator().manual_seed(rows))
    out = torch.full((rows, 7), float("nan"))
    joined().multiply(to_dlpack(wide[:, 2:8]), to_dlpack(out[:, 1:5]), [None, to_dlpack(torch.ones(4))])
    once = wide[:, 2:8] @ WEIGHT.T
    torch.testing.assert_close(out[:, 1:5], once * (once + 1), rtol=1e-5, atol=1e-4)
    assert out[:, [0, 5, 6]].isnan().all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: joined(layer()), ValueError, "2 inputs and 1 outputs for 1 layers"),
        (lambda: joined(layer(), layer(WEIGHT[:, :3].contiguous())), ValueError, "all must be of the same shape"),
        (lambda: joined(*[layer()] * 5), ValueError, "5 layers: 1 to 4 can be joined"),
        (lambda: _native.JoinedLinears([layer()], doubled()), ValueError, "does not compute each of 4 columns"),
        (lambda: multiplied_joined(torch.ones(3, 6)), ValueError, r"the input is \[3, 6\]: \[2, 6\] is expected"),
        (lambda: multiplied_joined(torch.ones(2, 6), None), ValueError, "1 biases of 2 layers"),
        (lambda: multiplied_joined(torch.ones(2, 6).double()), TypeError, "input: float32, bfloat16 or float16"),
        (lambda: multiplied_joined(torch.ones(2, 6), None, torch.ones(3)), ValueError, r"the bias is \[1, 3\]"),
        (lambda: multiplied_joined(torch.ones(2, 6), None, torch.ones(4).half()), TypeError, "a bias is of F16"),
    ],
)
def test_joined_layers_refuse_what_does_not_fit(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def joined(*layers: _native.PackedLinear) -> _native.JoinedLinears:
    """Their product."""
    instructions: list[Any] = [("mul", [(0, 1, 4), (1, 1, 4)], 1, 4, "float32", 0)]
    program = _native.RowProgram([(1, 4, 1), (1, 4, 1)], instructions, [(2, 1, 4, 1)], 2)
    return _native.JoinedLinears(list(layers) or [layer(), layer()], program)


def multiplied_joined(input: torch.Tensor, *biases: torch.Tensor | None) -> None:
    given = [None if bias is None else to_dlpack(bias) for bias in biases or (None, None)]
    joined().multiply(to_dlpack(input), to_dlpack(torch.ones(2, 4)), given)


def multiplied(input: torch.Tensor, out: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> None:
    out = torch.ones(2, 4) if out is None else out
    layer().multiply(to_dlpack(input), to_dlpack(out), None if bias is None else to_dlpack(bias))


def test_a_program_takes_rows_before_or_behind_groups() -> None:
    x = torch.randn(1, 5, 3, 4)
    out = torch.empty(1, 5, 3, 4)
    doubled().run([to_dlpack(x)], [to_dlpack(out)])
    assert torch.equal(out, 2 * x)
    behind = _native.RowProgram([(3, 4, 2)], [("copy", [(0, 3, 4)], 3, 4, "float32", 0)], [(1, 3, 4, 1)], 2)
    behind.run([to_dlpack(x.transpose(1, 2))], [to_dlpack(out)])
    assert torch.equal(out, x)


@pytest.mark.parametrize(
    ("inputs", "outputs", "error", "message"),
    [
        ([], [torch.ones(1, 5, 3, 4)], ValueError, "0 inputs and 1 outputs: 1 and 1 are expected"),
        ([torch.ones(1, 5, 3, 4)], [torch.ones(1, 6, 3, 4)], ValueError, "tensors of 5 and of 6 rows"),
        ([torch.ones(1, 5, 4, 4)], [torch.ones(1, 5, 3, 4)], ValueError, r"\[1, 5, 4, 4\].*3 groups of 4 are expected"),
        ([torch.ones(1, 5, 3, 5)], [torch.ones(1, 5, 3, 4)], ValueError, r"\[1, 5, 3, 5\].*3 groups of 4 are expected"),
        ([torch.ones(2, 5, 3, 4)], [torch.ones(1, 5, 3, 4)], ValueError, r"\[2, 5, 3, 4\].*3 groups of 4 are expected"),
        ([torch.ones(5)], [torch.ones(1, 5, 3, 4)], ValueError, r"\[5\].*3 groups of 4 are expected"),
        ([torch.ones(1, 5, 3, 4).long()], [torch.ones(1, 5, 3, 4)], TypeError, "float32, bfloat16 or float16"),
        ([torch.ones(1, 5, 4, 3).mT], [torch.ones(1, 5, 3, 4)], ValueError, "has stride 3, not 1"),
    ],
)
def test_a_program_refuses_what_does_not_fit(
    inputs: list[torch.Tensor], outputs: list[torch.Tensor], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        doubled().run([*map(to_dlpack, inputs)], [*map(to_dlpack, outputs)])


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        (("sin", [(0, 1, 8)], 1, 8, "float32", 0), 'no operation "sin" of 1 such operands'),
        (("add", [(0, 1, 8)], 1, 8, "float32", 0), 'no operation "add" of 1 such operands'),
        (("copy", [(0, 1, 8)], 1, 8, "int64", 0), "a result of int64: float32, bfloat16 and float16 are possible"),
        (("slice", [(0, 1, 8)], 1, 2, "float32", 2**64 - 1), "elements from 18446744073709551615 on of 8"),
        (("cat", [(0, 1, 8), 2.0], 1, 9, "float32", 0), "2 is no part of a cat"),
        (("copy", [(7, 1, 8)], 1, 8, "float32", 0), "register 7 is read as 1 groups of 8, and holds 0"),
        (("copy", [(0, 2**33, 2**31)], 2**33, 2**31, "float32", 0), "register 0 is read as"),
    ],
)
def test_a_program_that_is_none_is_refused(instruction: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.RowProgram([(1, 8, 0)], [instruction], [], 1)


@pytest.mark.parametrize(
    ("of", "out", "error", "message"),
    [
        (torch.ones(2, 3), torch.zeros(3, dtype=torch.int64), ValueError, r"\[2, 3\] for 3 results"),
        (torch.ones(2, 0), torch.zeros(2, dtype=torch.int64), ValueError, r"\[2, 0\] for 2 results"),
        (torch.ones(2, 3).double(), torch.zeros(2, dtype=torch.int64), TypeError, "of: float32, bfloat16 or float16"),
        (torch.ones(2, 3), torch.zeros(2, dtype=torch.int32), TypeError, "out: int64 is expected"),
        (torch.ones(2, 3), torch.zeros(4, dtype=torch.int64)[::2], ValueError, "out is not contiguous"),
        (torch.ones(3, 2).T, torch.zeros(2, dtype=torch.int64), ValueError, "last dimension of of has stride 2"),
    ],
)
def test_the_largest_refuses_what_does_not_fit(
    of: torch.Tensor, out: torch.Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _native.largest(to_dlpack(of), to_dlpack(out), 2)
    assert not out.any()
