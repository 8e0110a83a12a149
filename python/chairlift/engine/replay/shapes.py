"""Values of a recorded forward as rows: a token's part of a tensor, groups of elements."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from chairlift.engine.replay.agreement import Law
from chairlift.engine.replay.instructions import Instruction

# The dtypes that the kernels know, with their names there.
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Rows are the tokens of a step, or its sampled ones.
TOKENS: Law = (1, 0, 0, 1)
SAMPLED: Law = (0, 1, 0, 1)
_ONE: Law = (0, 0, 1, 1)


class Shape(NamedTuple):
    """A tensor as rows of groups of elements. Dimensions are counted from the last one, which is 1."""

    groups: int
    length: int  # elements of a group, in the last dimension
    rows: Law | None  # None: the same for all rows
    row_dim: int
    group_dim: int  # 0 where there is one group
    rank: int

    @property
    def is_rows_first(self) -> bool:
        """Whether rows come one behind the other, the groups of each together."""
        return self.groups == 1 or self.row_dim > self.group_dim

    def broadcasts_to(self, result: "Shape") -> bool:
        """Whether torch takes each row of this, and no other, to that row of the result."""
        same_groups = self.groups == 1 or (self.groups, self.group_dim) == (result.groups, result.group_dim)
        same_rows = self.rows is None or (self.rows, self.row_dim) == (result.rows, result.row_dim)
        return same_groups and same_rows and self.length in (1, result.length)


def shapes_of(
    instructions: Sequence[Instruction], constants: Mapping[int, torch.Tensor], *, one_token: bool
) -> dict[int, Shape]:
    """The shapes of those values that are rows of numbers which the kernels know.

    Args:
        instructions: A forward.
        constants: Values that no call makes.
        one_token: It is one of single tokens.
    """
    shapes = {value: shape for value, tensor in constants.items() if (shape := _shape_of_constant(tensor)) is not None}
    for instruction in instructions:
        for value, dtype, sizes in instruction.made():
            shape = _shape(sizes, one_token=one_token)
            if shape is not None and dtype in DTYPES:
                shapes[value] = shape
    return shapes


def _shape(sizes: Sequence[Law], *, one_token: bool) -> Shape | None:
    """Sizes as rows of groups; None where they are none."""
    rank = len(sizes)
    if rank < 2:
        return None
    counts = [b if a == c == 0 and divisor == 1 else None for a, c, b, divisor in sizes]
    if 0 in counts:
        return None
    rows: list[tuple[Law, int]] = [
        (law, rank - index) for index, law in enumerate(sizes[:-1]) if law in (TOKENS, SAMPLED)
    ]
    if not rows and one_token and 1 in counts[:-1]:
        # Of one row, any dimension of size 1 is that of the rows.
        rows = [(_ONE, next(dim for dim in range(2, rank + 1) if counts[rank - dim] == 1))]
    length = counts[-1]
    if len(rows) != 1 or length is None:
        return None
    law, row_dim = rows[0]
    others = [(count, rank - index) for index, count in enumerate(counts[:-1]) if rank - index != row_dim]
    groups = [(count, dim) for count, dim in others if count != 1]
    if len(groups) > 1 or (groups and groups[0][0] is None):
        return None
    count, group_dim = groups[0] if groups else (1, 0)
    return Shape(count or 1, length, law, row_dim, group_dim, rank)


def _shape_of_constant(tensor: torch.Tensor) -> Shape | None:
    """A constant that is the same for all rows: a number or a vector along the last dimension."""
    if tensor.dtype not in DTYPES or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    if any(size != 1 for size in tensor.shape[:-1]) or tensor.numel() == 0:
        return None
    return Shape(1, tensor.numel(), None, 0, 0, tensor.dim())
