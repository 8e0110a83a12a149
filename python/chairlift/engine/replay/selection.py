"""Rows that nobody samples, computed no further than others need them.

A model computes all of its layers for every token and picks the rows whose logits are wanted last. Behind the last
attention no row depends on another one, so the pick can come before everything there: a step with a prompt saves most
of its last layer, and a model whose head knows of no pick saves the head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from chairlift.engine.replay.agreement import Law
from chairlift.engine.replay.calls import NUMBER, TENSOR, Call, is_plain_linear
from chairlift.engine.replay.instructions import Instruction
from chairlift.engine.replay.operators import recognise
from chairlift.engine.replay.recorder import LOGITS_ROWS
from chairlift.engine.replay.shapes import SAMPLED, TOKENS, shapes_of

_ALL = ("slice", *(("plain", type(None), None),) * 3)
_RESHAPES = (torch.Tensor.reshape, torch.Tensor.view, torch.reshape)


def select_early(
    instructions: Sequence[Instruction], output: int, constants: Mapping[int, torch.Tensor]
) -> tuple[list[Instruction], int]:
    """The same forward with an earlier pick of the sampled rows, where that saves a linear layer; and its output.

    Args:
        instructions: A forward of several tokens.
        output: The value that it returns.
        constants: Values that no call makes.
    """
    if any(instruction.call.writes for instruction in instructions):
        # What is written may be seen through another tensor.
        return list(instructions), output
    selection = _Selection(instructions, output, constants)
    return selection.run() if selection.saves_a_linear else (list(instructions), output)


class _Selection:
    def __init__(self, instructions: Sequence[Instruction], output: int, constants: Mapping[int, torch.Tensor]) -> None:
        self._instructions = instructions
        self._output = output
        self._constants = constants
        self._shapes = shapes_of(instructions, constants, one_token=False)
        self._made = {value: (dtype, sizes) for made in instructions for value, dtype, sizes in made.made()}
        # Those whose results are needed in the sampled rows alone, and can be computed from these.
        self._late: set[int] = set()
        self._find_late()

    @property
    def saves_a_linear(self) -> bool:
        return any(self._is_linear(self._instructions[n].call) for n in self._late)

    def run(self) -> tuple[list[Instruction], int]:
        done: list[Instruction] = []
        late = {self._instructions[n].call.results[0] for n in self._late}  # hold the sampled rows from now on
        same: dict[int, int] = {}  # what was picked of these
        picked: dict[int, int] = {}  # by value, its sampled rows
        next_value = 1 + max(
            value
            for made in self._instructions
            for value in (*made.call.values, *made.call.results)
            if value is not None
        )
        for n, instruction in enumerate(self._instructions):
            call = instruction.call
            if self._is_pick(instruction) and call.values[0] in late:
                same[call.results[0] or 0] = call.values[0]
                continue
            if n in self._late:
                for value in call.values:
                    if (
                        value in self._shapes
                        and value not in late
                        and value not in picked
                        and value not in self._constants
                    ):
                        done.append(self._pick(value, next_value))
                        picked[value], next_value = next_value, next_value + 1
                instruction = _in_sampled_rows(instruction)
            renamed = {**same, **picked} if n in self._late else same
            values = tuple(renamed.get(value, value) for value in call.values)
            done.append(replace(instruction, call=replace(instruction.call, values=values)))
        return done, same.get(self._output, self._output)

    def _find_late(self) -> None:
        users: dict[int, list[int]] = {}
        for n, instruction in enumerate(self._instructions):
            for value in instruction.call.values:
                users.setdefault(value, []).append(n)
        for n, instruction in reversed(list(enumerate(self._instructions))):
            call = instruction.call
            if len(call.results) != 1 or call.results[0] is None or call.results[0] == self._output:
                continue
            used_by = users.get(call.results[0], [])
            needed_late = all(user in self._late or self._is_pick(self._instructions[user]) for user in used_by)
            if used_by and needed_late and self._is_row_by_row(instruction):
                self._late.add(n)

    def _is_row_by_row(self, instruction: Instruction) -> bool:
        """Whether it takes a token's row of its operands to that token's row of its result."""
        call = instruction.call
        shape = self._shapes.get(call.results[0] or 0)
        if (
            shape is None
            or shape.rows != TOKENS
            or not all(_is_fixed(law) or law == TOKENS for law in instruction.laws)
        ):
            return False
        if self._is_linear(call):
            operand = self._shapes.get(call.values[0])
            return operand is not None and (operand.rows, operand.row_dim) == (TOKENS, shape.row_dim)
        return recognise(instruction, self._shapes) is not None

    def _is_linear(self, call: Call) -> bool:
        return is_plain_linear(call) and all(value in self._constants for value in call.values[1:])

    def _is_pick(self, instruction: Instruction) -> bool:
        """Whether it takes the sampled rows of a tensor."""
        call = instruction.call
        if call.func is not torch.Tensor.__getitem__ or len(call.values) != 2 or call.values[1] != LOGITS_ROWS:
            return False
        shape, index = self._shapes.get(call.values[0]), call.pattern[1][2]
        if shape is None or shape.rows != TOKENS:
            return False
        parts = [index] if index == TENSOR else list(index[1:])
        row = shape.rank - shape.row_dim
        return parts[row : row + 1] == [TENSOR] and all(part in (TENSOR, _ALL) for part in parts)

    def _pick(self, value: int, result: int) -> Instruction:
        """Takes the sampled rows of a value."""
        shape = self._shapes[value]
        dtype, sizes = self._made[value]
        call = Call(
            torch.index_select,
            ("tuple", ("tuple", TENSOR, NUMBER, TENSOR), ("dict",)),
            (value, LOGITS_ROWS),
            (result,),
            several=False,
            dtypes=(dtype,),
            ranks=(shape.rank,),
            writes=False,
        )
        return Instruction(call, ((0, 0, shape.rank - shape.row_dim, 1),), (_of_sampled(sizes),))


def _in_sampled_rows(instruction: Instruction) -> Instruction:
    """A call that works row by row, on the sampled ones."""
    call, sizes = instruction.call, tuple(_of_sampled(of_one) for of_one in instruction.sizes)
    if call.func in _RESHAPES:
        # Of no rows there is no telling a size that is left open.
        pattern = ("tuple", ("tuple", TENSOR, *(NUMBER for _ in sizes[0])), ("dict",))
        return Instruction(replace(call, func=torch.Tensor.reshape, pattern=pattern), sizes[0], sizes)
    return Instruction(call, _of_sampled(instruction.laws), sizes)


def _of_sampled(laws: Sequence[Law]) -> tuple[Law, ...]:
    return tuple(SAMPLED if law == TOKENS else law for law in laws)


def _is_fixed(law: Law) -> bool:
    a, c, _, divisor = law
    return a == c == 0 and divisor == 1
