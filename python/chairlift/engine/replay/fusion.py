"""Element-wise calls of a recorded forward in runs, each run one pass over the rows.

Between its linear layers and its attention a model computes norms, rotations, activations and sums, call by call, and
every call writes to memory what the next one reads. Most of them take a token's part of their operands to that token's
part of the result, its row. Such calls are put off until somebody else needs a result of theirs, and all that waits by
then is computed row by row in one call of a kernel, every value rounded as torch would round it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from chairlift import _native
from chairlift.engine.replay.agreement import Law
from chairlift.engine.replay.calls import TENSOR, Call
from chairlift.engine.replay.instructions import Instruction
from chairlift.engine.replay.operators import Operation, recognise
from chairlift.engine.replay.shapes import DTYPES, Shape, shapes_of

# A run of fewer calls is not worth a kernel.
LEAST_CALLS = 2


def fuse(
    instructions: Sequence[Instruction], output: int, constants: Mapping[int, torch.Tensor], *, one_token: bool
) -> list[Instruction]:
    """The same forward, its element-wise calls in runs.

    Args:
        instructions: A forward.
        output: The value that it returns.
        constants: Values that no call makes.
        one_token: It is one of single tokens.
    """
    if any(instruction.call.writes for instruction in instructions):
        # What is written may be seen through another tensor, and runs are computed later.
        return list(instructions)
    return _Fusion(instructions, output, constants, one_token=one_token).run()


class RowRun:
    """A run, as a function of tensors."""

    def __init__(
        self, program: _native.RowProgram, inputs: Sequence[torch.Tensor | int | None], outputs: Sequence["_Output"]
    ) -> None:
        """A run of a program.

        Args:
            program: What is computed.
            inputs: Of each input of the program, the constant, or the dimension of the rows in what the call is given.
            outputs: What is made.
        """
        self.program = program
        self._run = program.run
        constants = [None if isinstance(given, int) else _capsule(given) for given in inputs]
        self._inputs = constants
        self._places = [index for index, constant in enumerate(constants) if constant is None]
        self._row_dim = next(given for given in inputs if isinstance(given, int))
        self._outputs = outputs

    @property
    def has_constants(self) -> bool:
        """Whether it is of more than what a call is given."""
        return len(self._places) < len(self._inputs)

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """The outputs."""
        rows = given[0].shape[self._row_dim]
        inputs = self._inputs.copy()
        for place, tensor in zip(self._places, given, strict=True):
            inputs[place] = to_dlpack(tensor if tensor.stride(-1) == 1 else tensor.contiguous())
        outputs = [output.made(rows) for output in self._outputs]
        self._run(inputs, [to_dlpack(output) for output in outputs])
        return outputs


class _Output(NamedTuple):
    """A tensor to be made; rows come one behind the other in memory, whatever its dimensions."""

    sizes: tuple[int, ...]  # with 1 for the rows
    strides: tuple[int, ...]
    row_dim: int
    dtype: torch.dtype

    def made(self, rows: int) -> torch.Tensor:
        sizes = list(self.sizes)
        sizes[self.row_dim] = rows
        return torch.empty_strided(sizes, self.strides, dtype=self.dtype, device="cpu")


class _Fusion:
    def __init__(
        self,
        instructions: Sequence[Instruction],
        output: int,
        constants: Mapping[int, torch.Tensor],
        *,
        one_token: bool,
    ) -> None:
        self._instructions = instructions
        self._constants = constants
        self._last_use = {value: n for n, made in enumerate(instructions) for value in made.call.values}
        self._last_use[output] = len(instructions)
        self._shapes = shapes_of(instructions, constants, one_token=one_token)
        self._dtypes: dict[int, torch.dtype] = {value: tensor.dtype for value, tensor in constants.items()}
        self._sizes: dict[int, tuple[Law, ...]] = {}
        for made in instructions:
            for value, dtype, sizes in made.made():
                self._dtypes[value], self._sizes[value] = dtype, sizes

    def run(self) -> list[Instruction]:
        done: list[Instruction] = []
        waiting: dict[int, tuple[Operation, Instruction]] = {}  # by result
        for position, instruction in enumerate(self._instructions):
            operation = recognise(instruction, self._shapes)
            if operation is not None:
                waiting[operation.result] = operation, instruction
                continue
            if waiting.keys() & set(instruction.call.values):
                done += self._flushed(waiting, position)
                waiting = {}
            done.append(instruction)
        return [*done, *self._flushed(waiting, len(self._instructions))]

    def _flushed(self, waiting: Mapping[int, tuple[Operation, Instruction]], position: int) -> Iterator[Instruction]:
        """What waits, for those from `position` on: a run for each kind of rows."""
        kinds = dict.fromkeys(self._shapes[value].rows for value in waiting)
        for rows in kinds:
            alike = {value: waits for value, waits in waiting.items() if self._shapes[value].rows == rows}
            yield from self._flushed_run(alike, position)

    def _flushed_run(
        self, waiting: Mapping[int, tuple[Operation, Instruction]], position: int
    ) -> Iterator[Instruction]:
        """One run, then views of what it makes and of what was there."""

        def root(value: int) -> int:
            while value in waiting and waiting[value][0].name == "view":
                value = int(waiting[value][0].operands[0])
            return value

        needed = [value for value in waiting if self._last_use.get(value, -1) >= position]
        outputs = list(dict.fromkeys(base for value in needed if (base := root(value)) in waiting))
        reached: set[int] = set()
        left = list(outputs)
        while left:
            value = left.pop()
            if value not in reached:
                reached.add(value)
                left += [base for operand in waiting[value][0].values if (base := root(operand)) in waiting]
        if len(reached) < LEAST_CALLS:
            yield from (instruction for _, instruction in waiting.values())
            return
        operations = [waiting[value][0] for value in waiting if value in reached]
        yield self._as_one(operations, outputs, root)
        views: set[int] = set()
        for value in needed:
            while value in waiting and waiting[value][0].name == "view":
                views.add(value)
                value = int(waiting[value][0].operands[0])
        yield from (instruction for value, (_, instruction) in waiting.items() if value in views)

    def _as_one(self, operations: Sequence[Operation], outputs: Sequence[int], root: Any) -> Instruction:
        """Operations as one instruction that makes those values."""
        made = {operation.result for operation in operations}
        roots = (root(value) for operation in operations for value in operation.values)
        inputs = list(dict.fromkeys(value for value in roots if value not in made))
        registers = {value: n for n, value in enumerate([*inputs, *(operation.result for operation in operations)])}

        def place(value: int) -> tuple[int, int, int]:
            return registers[root(value)], self._shapes[value].groups, self._shapes[value].length

        def row_dim(value: int) -> int | None:
            shape = self._shapes[value]
            return None if shape.rows is None else shape.rank - shape.row_dim

        program = _native.RowProgram(
            [(self._shapes[value].groups, self._shapes[value].length, row_dim(value)) for value in inputs],
            [
                (
                    operation.name,
                    [operand if isinstance(operand, float) else place(operand) for operand in operation.operands],
                    self._shapes[operation.result].groups,
                    self._shapes[operation.result].length,
                    DTYPES[self._dtypes[operation.result]],
                    operation.start,
                )
                for operation in operations
            ],
            [(*place(value), row_dim(value) or 0) for value in outputs],
            torch.get_num_threads(),
        )
        given = [value for value in inputs if value not in self._constants]
        run = RowRun(
            program,
            [self._constants.get(value, row_dim(value)) for value in inputs],
            [_output(self._shapes[value], self._dtypes[value]) for value in outputs],
        )
        call = Call(
            run,
            ("tuple", ("tuple", *(TENSOR for _ in given)), ("dict",)),
            tuple(given),
            tuple(outputs),
            several=True,
            dtypes=tuple(self._dtypes[value] for value in outputs),
            ranks=tuple(self._shapes[value].rank for value in outputs),
            writes=False,
        )
        return Instruction(call, (), tuple(self._sizes[value] for value in outputs))


def _output(shape: Shape, dtype: torch.dtype) -> _Output:
    width = shape.groups * shape.length
    sizes, strides = [1] * shape.rank, [width] * shape.rank
    sizes[-1], strides[-1] = shape.length, 1
    if shape.group_dim:
        sizes[-shape.group_dim], strides[-shape.group_dim] = shape.groups, shape.length
    return _Output(tuple(sizes), tuple(strides), shape.rank - shape.row_dim, dtype)


def _capsule(constant: torch.Tensor | None) -> Any:
    """A constant for the kernel, which holds it."""
    if constant is None:
        raise AssertionError("what is the same for all rows is a constant")
    return to_dlpack(constant.detach().reshape(-1).contiguous())
