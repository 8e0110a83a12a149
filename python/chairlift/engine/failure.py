"""Steps that raise: what it is about, the device, the memory or some row, and what follows."""

import time

import torch
from transformers.utils import logging

from chairlift import _native

logger = logging.get_logger(__name__)

# What torch's allocators and libraries say that raise no `OutOfMemoryError`.
_NO_MEMORY = ("DefaultCPUAllocator", "STATUS_ALLOC_FAILED", "out of memory")


def is_of_device(error: Exception) -> bool:
    """Whether nothing that follows on the device can be trusted."""
    accelerator_error = getattr(torch, "AcceleratorError", None)
    return accelerator_error is not None and isinstance(error, accelerator_error)


def is_out_of_memory(error: Exception) -> bool:
    """Whether less would have fitted."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


class Failure:
    """A step that raised."""

    def __init__(self, step: _native.Step, error: Exception) -> None:
        """Tells whoever reads the log; keeps no frame."""
        self._tokens = step.tokens
        self._out_of_memory = is_out_of_memory(error)
        self._cause = f"{type(error).__name__}: {error}"
        if step.tokens == 1 or (step.rows == 1 and not self._out_of_memory):
            logger.error("a request fails, as a step of it alone failed", exc_info=error)
        elif not self._out_of_memory:
            logger.warning(
                f"a step of {step.rows} requests failed ({self._cause}); they are tried in halves, to find which it is"
            )

    def settle(self, engine: _native.Engine, slot: int) -> None:
        """Has the rows of the step planned anew; one that is alone at fault fails."""
        cause = f"the step failed: {self._cause}"
        engine.abandon(slot, time.perf_counter(), cause, out_of_memory=self._out_of_memory)
        if self._out_of_memory:
            # What torch keeps for later may be what the next step lacks.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            most = engine.stats()["max_step_tokens"]
            logger.warning(
                f"a step of {self._tokens} tokens ran out of memory ({self._cause}); steps have at most {most} for now"
            )
