"""Linear layers whose results meet in one run and nowhere else, joined with it into one call.

The gate of an MLP is such: two layers of the same input, and an activation of one times the other. In one call their
results stay near the processor that made them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from chairlift import _native
from chairlift.engine.replay.calls import TENSOR, Call, Pattern, is_plain_linear
from chairlift.engine.replay.fusion import RowRun
from chairlift.engine.replay.instructions import Instruction

_NONE: Pattern = ("plain", type(None), None)


class Joins(Protocol):
    """Linear layers that may be joined."""

    def join(
        self, weights: Sequence[torch.Tensor], program: _native.RowProgram
    ) -> Callable[[torch.Tensor, Sequence[torch.Tensor | None]], torch.Tensor] | None:
        """What computes the layers of these weights of one input, and a program of their results; None: nothing does.

        It takes the input and the layers' biases.
        """
        ...


class JoinedRun:
    """Layers and a run, as a function of tensors."""

    def __init__(self, compute: Callable[[torch.Tensor, Sequence[torch.Tensor | None]], torch.Tensor]) -> None:
        """What computes them."""
        self._compute = compute

    def __call__(self, input: torch.Tensor, *biases: torch.Tensor | None) -> list[torch.Tensor]:
        """The run's output, as a run gives it."""
        return [self._compute(input, biases)]


def join(
    instructions: Sequence[Instruction], output: int, constants: Mapping[int, torch.Tensor], linears: Joins
) -> list[Instruction]:
    """The same forward, with layers joined where they can be.

    Args:
        instructions: A forward, its element-wise calls in runs.
        output: The value that it returns.
        constants: Values that no call makes.
        linears: Knows how.
    """
    makers = {value: n for n, made in enumerate(instructions) for value in made.call.results if value is not None}
    uses: dict[int, int] = {output: 1}
    for instruction in instructions:
        for value in instruction.call.values:
            uses[value] = uses.get(value, 0) + 1
    gone: set[int] = set()
    instead: dict[int, Instruction] = {}
    for n, instruction in enumerate(instructions):
        run = instruction.call.func
        if not isinstance(run, RowRun) or run.has_constants or len(instruction.call.results) != 1:
            continue
        sources = [makers.get(value, -1) for value in instruction.call.values]
        layers = [instructions[source].call for source in sources if source >= 0]
        alone = all(uses[value] == 1 for value in instruction.call.values)
        if not alone or len(layers) != len(sources) or not all(_is_layer(layer, constants) for layer in layers):
            continue
        if len({layer.values[0] for layer in layers}) != 1:
            continue
        compute = linears.join([constants[layer.values[1]] for layer in layers], run.program)
        if compute is not None:
            gone.update(sources)
            instead[n] = _joined(JoinedRun(compute), layers, instruction)
    return [instead.get(n, instruction) for n, instruction in enumerate(instructions) if n not in gone]


def _is_layer(call: Call, constants: Mapping[int, torch.Tensor]) -> bool:
    return is_plain_linear(call) and all(value in constants for value in call.values[1:])


def _joined(func: JoinedRun, layers: Sequence[Call], run: Instruction) -> Instruction:
    biases = [layer.values[2:3] for layer in layers]
    patterns: list[Any] = [TENSOR if bias else _NONE for bias in biases]
    call = Call(
        func,
        ("tuple", ("tuple", TENSOR, *patterns), ("dict",)),
        (layers[0].values[0], *(value for bias in biases for value in bias)),
        run.call.results,
        several=True,
        dtypes=run.call.dtypes,
        ranks=run.call.ranks,
        writes=False,
    )
    return Instruction(call, (), run.sizes)
