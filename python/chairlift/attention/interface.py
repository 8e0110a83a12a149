"""The seam between a model's attention calls and ours.

A step puts itself into the context of the engine's thread for the length of its forward. While it stands there, the
attention calls and mask requests of that thread come to it; those of every other thread, and of this one outside a
step, go where they always went. The model and its config are never touched.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface


class AttentionStep(Protocol):
    """What answers the attention calls of one forward."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """One call. `query` is [1, heads, tokens, head size]; returns [1, tokens, heads, head size of V]."""
        ...

    def mask(self, **kwargs: Any) -> torch.Tensor | None:
        """Stands for the mask that the model would have made. Comes back as a call's `attention_mask`."""
        ...


class _Local(threading.local):
    step: AttentionStep | None = None


_local = _Local()
_lock = threading.Lock()
_registered = False


@contextmanager
def forward_context(step: AttentionStep) -> Iterator[None]:
    """Sends this thread's attention calls to `step` inside the block."""
    register()
    outer = _local.step
    _local.step = step
    try:
        yield
    finally:
        _local.step = outer


def register() -> None:
    """Puts the seam into transformers' two interfaces, once a process."""
    global _registered
    with _lock:
        if _registered:
            return
        _wrap(AttentionInterface, "get_interface", _attention_of)
        _wrap(AttentionMaskInterface, "__getitem__", _mask_of)
        _registered = True


def _attention_of(step: AttentionStep) -> Callable[..., Any]:
    return step.attend


def _mask_of(step: AttentionStep) -> Callable[..., Any]:
    return step.mask


def _wrap(interface: type, name: str, ours: Callable[[AttentionStep], Callable[..., Any]]) -> None:
    original = getattr(interface, name)

    @functools.wraps(original)
    def look_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A compiler tracing somebody's forward must see the model's own attention, and no thread-local state.
        if not torch.compiler.is_compiling():
            step = _local.step
            if step is not None:
                return ours(step)
        return original(self, *args, **kwargs)

    setattr(interface, name, look_up)
