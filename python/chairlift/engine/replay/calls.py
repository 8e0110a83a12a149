"""A forward as a list of calls, and a call's arguments taken apart: what is fixed, which tensors, which numbers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# A pattern says how arguments are put together again from tensors and numbers, taken in order. It can be compared:
# (kind, ...), where a kind is one of those below.
Pattern = tuple[Any, ...]

TENSOR: Pattern = ("tensor",)
NUMBER: Pattern = ("number",)  # an int: a size, an index, a dimension
_SEQUENCES: dict[type, str] = {tuple: "tuple", list: "list", torch.Size: "size"}
_PLAIN = (str, bool, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format)


class NotRecordable(Exception):
    """Why a forward cannot be recorded."""


def attend() -> None:
    """Stands for an attention call: the next one of the step."""


def mask() -> None:
    """Stands for a mask that the step answers."""


@dataclass(frozen=True)
class Call:
    """A torch call of a forward.

    Values are numbered in the order in which they came to be: the inputs, then constants and results. Two recordings
    of one forward have equal calls.

    Attributes:
        func: What was called.
        pattern: Its arguments, `(args, kwargs)`.
        values: The tensors of the arguments.
        results: The tensors that came back.
        several: They came in a tuple or list; None in it for what is no tensor.
        dtypes: Of the results.
        ranks: Dimensions of the results.
        writes: Whether it changes a tensor that was there before.
    """

    func: Callable[..., Any]
    pattern: Pattern
    values: tuple[int, ...]
    results: tuple[int | None, ...]
    several: bool
    dtypes: tuple[torch.dtype, ...]
    ranks: tuple[int, ...]
    writes: bool

    @property
    def name(self) -> str:
        """How the function is called, for people."""
        return name_of(self.func)

    @property
    def num_numbers(self) -> int:
        """Numbers that belong to it: of its arguments, then the sizes of its results."""
        return count_numbers(self.pattern) + sum(self.ranks)


def is_plain_linear(call: Call) -> bool:
    """Whether it is a linear layer's, with nothing passed by name."""
    return call.func is torch.nn.functional.linear and bool(call.pattern[2] == ("dict",))


def name_of(func: Callable[..., Any]) -> str:
    """How a function is called, for people."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") == "__get__" and owner is not None:
        func = owner  # a property: its name, not that of every getter
    return str(getattr(func, "__name__", func))


def take_apart(arguments: Any, tensors: list[torch.Tensor], numbers: list[int]) -> Pattern:
    """The pattern of arguments; their tensors and numbers are appended.

    Raises:
        NotRecordable: There is something among them that does not bear comparison.
    """
    kind = type(arguments)
    if isinstance(arguments, torch.Tensor):
        tensors.append(arguments)
        return TENSOR
    if kind is int:
        numbers.append(arguments)
        return NUMBER
    if kind is float:
        return ("float", arguments.hex())
    if isinstance(arguments, _PLAIN):
        return ("plain", kind, arguments)
    if kind in _SEQUENCES:
        return (_SEQUENCES[kind], *(take_apart(item, tensors, numbers) for item in arguments))
    if kind is dict:
        return ("dict", *((key, take_apart(item, tensors, numbers)) for key, item in arguments.items()))
    if kind is slice:
        bounds = (arguments.start, arguments.stop, arguments.step)
        return ("slice", *(take_apart(bound, tensors, numbers) for bound in bounds))
    raise NotRecordable(f"a call has an argument of type {kind.__name__}")


def count_numbers(pattern: Pattern) -> int:
    """Numbers that a pattern takes."""
    return sum(leaf is NUMBER or leaf == NUMBER for leaf in _leaves(pattern))


def has_tensors(pattern: Pattern) -> bool:
    """Whether a pattern takes tensors."""
    return any(leaf == TENSOR for leaf in _leaves(pattern))


def _leaves(pattern: Pattern) -> Iterator[Pattern]:
    match pattern[0]:
        case "tuple" | "list" | "size" | "slice":
            for item in pattern[1:]:
                yield from _leaves(item)
        case "dict":
            for _, item in pattern[1:]:
                yield from _leaves(item)
        case _:
            yield pattern
