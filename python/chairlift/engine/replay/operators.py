"""Which torch calls work row by row, and what they compute."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from chairlift.engine.replay.agreement import Law
from chairlift.engine.replay.calls import NUMBER, TENSOR, Pattern
from chairlift.engine.replay.instructions import Instruction
from chairlift.engine.replay.shapes import Shape


@dataclass(frozen=True)
class Operation:
    """A call that works row by row.

    Attributes:
        result: The value that it makes.
        name: The kernel's operation; or `view`: the elements of the operand as they are.
        operands: Values; numbers as floats.
        start: Of a slice.
    """

    result: int
    name: str
    operands: tuple[int | float, ...]
    start: int = 0

    @property
    def values(self) -> list[int]:
        """The operands that are values."""
        return [operand for operand in self.operands if isinstance(operand, int)]


class _Value(NamedTuple):
    value: int


class _Bent:
    """A number that is not always the same."""


def recognise(instruction: Instruction, shapes: Mapping[int, Shape]) -> Operation | None:
    """What a call computes row by row; None where it does something else, or may.

    Args:
        instruction: The call.
        shapes: Of the values that are rows of numbers which the kernel knows.
    """
    call = instruction.call
    kind = _KINDS.get(call.func)
    if kind is None or call.several or len(call.results) != 1:
        return None
    result = call.results[0]
    if result is None or result not in shapes:
        return None
    values, laws = iter(call.values), iter(instruction.laws)
    _, args_pattern, kwargs_pattern = call.pattern
    args = _rebuilt(args_pattern, values, laws)
    kwargs = _rebuilt(kwargs_pattern, values, laws)
    found = _READERS.get(kind, _read_unary)(kind, args, kwargs)
    if found is None:
        return None
    operation = Operation(result, found.name, found.operands, found.start)
    return operation if _fits(operation, found, shapes) else None


class _Found(NamedTuple):
    """What the arguments of a call say."""

    name: str
    operands: tuple[int | float, ...]
    start: int = 0
    keeps_order: bool = False  # of a view: whatever the shapes, a row's elements stay in their order
    rank: int | None = None  # that the operand must have


def _fits(operation: Operation, found: _Found, shapes: Mapping[int, Shape]) -> bool:
    """Whether shapes are such that rows are taken to rows."""
    result = shapes[operation.result]
    if not operation.values or any(value not in shapes for value in operation.values):
        return False
    operands = [shapes[value] for value in operation.values]
    if all(operand.rows is None for operand in operands):
        return False
    first = operands[0]
    if found.rank not in (None, first.rank):
        return False
    same_rows = all((operand.rows, operand.row_dim) == (result.rows, result.row_dim) for operand in operands)
    same_groups = all((operand.groups, operand.group_dim) == (result.groups, result.group_dim) for operand in operands)
    match operation.name:
        case "view":
            in_order = found.keeps_order or (first.is_rows_first and result.is_rows_first)
            same_size = first.groups * first.length == result.groups * result.length
            return in_order and same_size and first.rows == result.rows
        case "mean":
            return same_rows and same_groups and result.length == 1
        case "slice":
            return same_rows and same_groups and operation.start + result.length <= first.length
        case "cat":
            return same_rows and same_groups and sum(operand.length for operand in operands) == result.length
    # Row by row, and no larger than what is computed for.
    return all(operand.broadcasts_to(result) for operand in operands)


# ------------------------------------------------------------------ arguments


def _rebuilt(pattern: Pattern, values: Iterator[int], laws: Iterator[Law]) -> Any:
    """Arguments, with `_Value` for tensors and `_Bent` for numbers that are not always the same."""
    kind = pattern[0]
    if pattern == TENSOR:
        return _Value(next(values))
    if pattern == NUMBER:
        a, c, b, divisor = next(laws)
        return b if a == c == 0 and divisor == 1 else _Bent()
    if kind == "float":
        return float.fromhex(pattern[1])
    if kind == "plain":
        return pattern[2]
    if kind == "dict":
        return {key: _rebuilt(item, values, laws) for key, item in pattern[1:]}
    items = [_rebuilt(item, values, laws) for item in pattern[1:]]
    if kind == "slice":
        return None if any(isinstance(item, _Bent) for item in items) else slice(*items)
    return items if kind == "list" else tuple(items)


def _number(argument: Any) -> bool:
    return isinstance(argument, int | float) and not isinstance(argument, bool)


def _read_binary(kind: str, args: Any, kwargs: Any) -> _Found | None:
    if kwargs or len(args) != 2:
        return None
    operands: list[int | float] = []
    for argument in args:
        if isinstance(argument, _Value):
            operands.append(argument.value)
        elif _number(argument):
            operands.append(float(argument))
        else:
            return None
    if kind.startswith("r"):
        operands.reverse()
    return _Found(kind.removeprefix("r"), tuple(operands))


def _read_unary(kind: str, args: Any, kwargs: Any) -> _Found | None:
    if len(args) != 1 or not isinstance(args[0], _Value) or kwargs.get("inplace") or set(kwargs) - {"inplace"}:
        return None
    return _Found(kind, (args[0].value,))


def _read_gelu(_: str, args: Any, kwargs: Any) -> _Found | None:
    if len(args) != 1 or not isinstance(args[0], _Value) or kwargs != {"approximate": "tanh"}:
        return None
    return _Found("gelu_tanh", (args[0].value,))


def _read_power(_: str, args: Any, kwargs: Any) -> _Found | None:
    if kwargs or len(args) != 2 or not isinstance(args[0], _Value) or not _number(args[1]):
        return None
    name = {2: "square", 0.5: "sqrt", -0.5: "rsqrt"}.get(args[1])
    return None if name is None else _Found(name, (args[0].value,))


def _read_cast(_: str, args: Any, kwargs: Any) -> _Found | None:
    to = [*args[1:], *kwargs.values()]
    if not isinstance(args[0], _Value) or set(kwargs) - {"dtype"} or not all(isinstance(d, torch.dtype) for d in to):
        return None
    return _Found("copy", (args[0].value,))


def _read_mean(_: str, args: Any, kwargs: Any) -> _Found | None:
    named = dict(zip(("dim", "keepdim"), args[1:], strict=False)) | kwargs
    if set(named) != {"dim", "keepdim"} or named["keepdim"] is not True or not isinstance(args[0], _Value):
        return None
    dim = named["dim"]
    return _Found("mean", (args[0].value,)) if dim in (-1, [-1], (-1,)) else None


def _read_cat(_: str, args: Any, kwargs: Any) -> _Found | None:
    named = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    if set(named) != {"tensors", "dim"} or named["dim"] != -1:
        return None
    parts = named["tensors"]
    if not all(isinstance(part, _Value) for part in parts):
        return None
    return _Found("cat", tuple(part.value for part in parts))


def _read_item(_: str, args: Any, kwargs: Any) -> _Found | None:
    if kwargs or len(args) != 2 or not isinstance(args[0], _Value):
        return None
    index = args[1]
    if _number(index):
        # All of it, where there is one: else the sizes do not fit.
        return _Found("view", (args[0].value,), keeps_order=True)
    if not isinstance(index, tuple):
        return None
    if len(index) != 2 or index[0] is not Ellipsis or not isinstance(index[1], slice):
        return None
    part = index[1]
    if part.step not in (None, 1) or (part.start or 0) < 0:
        return None
    return _Found("slice", (args[0].value,), part.start or 0)


def _read_view(_: str, args: Any, kwargs: Any) -> _Found | None:
    return None if kwargs or not isinstance(args[0], _Value) else _Found("view", (args[0].value,))


def _read_unsqueeze(_: str, args: Any, kwargs: Any) -> _Found | None:
    if kwargs or len(args) != 2 or not isinstance(args[0], _Value):
        return None
    return _Found("view", (args[0].value,), keeps_order=True)


def _read_transpose(_: str, args: Any, kwargs: Any) -> _Found | None:
    # Dimensions 1 and 2 of four: the elements of the last one stay where they are.
    if kwargs or not isinstance(args[0], _Value) or tuple(args[1:]) not in ((1, 2), (2, 1)):
        return None
    return _Found("view", (args[0].value,), keeps_order=True, rank=4)


_READERS: Mapping[str, Callable[[str, Any, Any], _Found | None]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "rsub"), _read_binary),
    "gelu": _read_gelu,
    "pow": _read_power,
    "cast": _read_cast,
    "mean": _read_mean,
    "cat": _read_cat,
    "item": _read_item,
    "view": _read_view,
    "unsqueeze": _read_unsqueeze,
    "transpose": _read_transpose,
}


def _kinds() -> dict[Callable[..., Any], str]:
    names = {
        **{
            name: name for name in ("add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "exp", "tanh", "sigmoid")
        },
        **{name: name for name in ("silu", "relu", "gelu", "mean", "cat", "view", "unsqueeze", "transpose")},
        **{"true_divide": "div", "multiply": "mul", "subtract": "sub", "divide": "div", "negative": "neg"},
        **{"square": "square", "to": "cast", "float": "cast", "bfloat16": "cast", "half": "cast"},
        **{"__getitem__": "item", "reshape": "view", "contiguous": "view", "concat": "cat", "concatenate": "cat"},
        **{"__add__": "add", "__radd__": "add", "__sub__": "sub", "__rsub__": "rsub", "__mul__": "mul"},
        **{"__rmul__": "mul", "__truediv__": "div", "__neg__": "neg", "__pow__": "pow", "rsub": "rsub"},
    }
    found: dict[Callable[..., Any], str] = {}
    for owner in (torch.Tensor, torch, torch.nn.functional):
        for name, kind in names.items():
            function = getattr(owner, name, None)
            if callable(function) and not (kind == "cast" and owner is not torch.Tensor):
                found[function] = kind
    return found


_KINDS: Mapping[Callable[..., Any], str] = _kinds()
