"""What a program is written from: the calls that recordings agree on, with the laws of their numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from chairlift.engine.replay.agreement import Agreement, Law
from chairlift.engine.replay.calls import Call, attend, count_numbers


@dataclass(frozen=True)
class Instruction:
    """A call with the laws of its numbers."""

    call: Call
    laws: tuple[Law, ...]  # of its arguments
    sizes: tuple[tuple[Law, ...], ...]  # of each of its tensors

    def made(self) -> Iterator[tuple[int, torch.dtype, tuple[Law, ...]]]:
        """The values that it makes, with dtypes and sizes."""
        values = (value for value in self.call.results if value is not None)
        return zip(values, self.call.dtypes, self.sizes, strict=True)


def instructions_of(agreement: Agreement) -> tuple[list[Instruction], int]:
    """The calls that are needed, and the value that the forward returns."""
    instructions, output = _without_idle_calls(_with_laws(agreement), agreement)
    return _needed(instructions, output), output


def _with_laws(agreement: Agreement) -> list[Instruction]:
    laws = agreement.laws()
    instructions, start = [], 0
    for call in agreement.calls:
        end = start + count_numbers(call.pattern)
        of_arguments = tuple(laws[start:end])
        sizes = []
        for rank in call.ranks:
            sizes.append(tuple(laws[end : end + rank]))
            end += rank
        instructions.append(Instruction(call, of_arguments, tuple(sizes)))
        start += call.num_numbers
    return instructions


def _without_idle_calls(instructions: Sequence[Instruction], agreement: Agreement) -> tuple[list[Instruction], int]:
    """Without calls that only gave back an argument, as a cast does to what has the dtype; and the output's value."""
    same: dict[int, int] = {}
    kept = []
    for instruction in instructions:
        call = instruction.call
        given_back = agreement.unchanged.get(call.results[0] or 0) if len(call.results) == 1 else None
        if given_back is not None and not call.writes:
            same[call.results[0] or 0] = same.get(given_back, given_back)
        else:
            values = tuple(same.get(value, value) for value in call.values)
            kept.append(replace(instruction, call=replace(call, values=values)))
    return kept, same.get(agreement.output, agreement.output)


def _needed(instructions: Sequence[Instruction], output: int) -> list[Instruction]:
    """Without calls that change nothing and whose results nobody uses."""
    needed = {output}
    kept = []
    for instruction in reversed(instructions):
        call = instruction.call
        if call.writes or call.func is attend or needed.intersection(call.results):
            needed.update(call.values)
            kept.append(instruction)
    return kept[::-1]
