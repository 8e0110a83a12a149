"""The seam between a model's linear calls and ours.

Modules look `torch.nn.functional.linear` up at every call. That module is given a class of its own, in which the
look-up is a property: in a thread whose step is being computed it gives the step's function, and in every other thread,
and in this one outside a step, the very object it always gave. Nobody's module is touched, and whoever compares,
scripts, compiles or replaces `torch.nn.functional.linear` meets torch's own.

A `TorchFunctionMode` does the same with less ado, but is asked for every function, method and attribute of a tensor:
2,700 times in a step of SmolLM2 with one row (58 ms became 63), 29,000 times with 64 rows (217 became 264). The
property is asked 211 times, which is lost in the noise.
"""

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

TORCHS_LINEAR: Callable[..., torch.Tensor] = torch._C._nn.linear


class Linear(Protocol):
    """A function with the signature of `torch.nn.functional.linear`."""

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., in] to [..., out], with a weight of [out, in]."""
        ...


class _Local(threading.local):
    linear: Linear | None = None


_local = _Local()
_lock = threading.Lock()
_registered = False


@contextmanager
def linear_context(linear: Linear) -> Iterator[None]:
    """Sends this thread's linear calls to `linear` inside the block."""
    _register()
    outer = _local.linear
    _local.linear = linear
    try:
        yield
    finally:
        _local.linear = outer


@contextmanager
def recorded_weights() -> Iterator[dict[int, torch.Tensor]]:
    """Fills the dictionary with the weights of this thread's linear calls inside the block, by `id`."""
    weights: dict[int, torch.Tensor] = {}

    def linear(*args: Any, **kwargs: Any) -> torch.Tensor:
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        weights[id(weight)] = weight
        # As it came: who records calls sees how they are written.
        return TORCHS_LINEAR(*args, **kwargs)

    with linear_context(linear):
        yield weights


def _register() -> None:
    """Puts the property in, once a process."""
    global _registered
    with _lock:
        if not _registered:
            functional = torch.nn.functional
            functional.__class__ = _with_property(type(functional))
            _registered = True


def _with_property(base: type) -> type:
    class Functional(base):  # type: ignore[misc]
        """The module's class. The module's own dictionary goes on holding what `linear` is elsewhere."""

        @property
        def linear(self) -> Any:
            own = self.__dict__.get("linear")
            step = _local.linear
            # What another library has put there stays in force. A compiler must see no thread-local state.
            if step is not None and own is TORCHS_LINEAR and not torch.compiler.is_compiling():
                return step
            if own is None:
                raise AttributeError(f"module {self.__name__!r} has no attribute 'linear'")
            return own

        @linear.setter
        def linear(self, value: Any) -> None:
            self.__dict__["linear"] = value

        @linear.deleter
        def linear(self) -> None:
            del self.__dict__["linear"]

        def __reduce__(self) -> tuple[Any, ...]:
            # Picklers that know modules know them by their exact class.
            return importlib.import_module, (self.__name__,)

    Functional.__name__ = Functional.__qualname__ = base.__name__
    return Functional
