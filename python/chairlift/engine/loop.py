"""The loop: one step after the other, until there is nothing to run and somebody asked it to stop.

Beside this one, which commits a step before it plans the next, the async loop will stand.
"""

import threading
import time
from enum import IntEnum

import torch
from transformers.utils import logging

from chairlift.engine.session import Session

logger = logging.get_logger(__name__)

# An idle loop is woken by the inbox; this only bounds how long it sleeps.
_IDLE_WAIT_S = 60.0


class StopLevel(IntEnum):
    """How soon a loop is to end."""

    NONE = 0
    DRAIN = 1  # when everything submitted has ended
    HARD = 2  # after the step that runs


class StopRequest:
    """Asks a loop to end; only ever more urgently."""

    def __init__(self) -> None:
        self._level = StopLevel.NONE
        self._lock = threading.Lock()

    @property
    def level(self) -> StopLevel:
        """What was asked for so far."""
        return self._level

    def ask(self, level: StopLevel) -> None:
        """Asks for at least that."""
        with self._lock:
            self._level = max(self._level, level)


def run_sync(session: Session, stop: StopRequest) -> None:
    """Commits step N, then plans step N + 1."""
    engine, runner, slot = session.engine, session.runner, 0
    step = engine.advance(None, slot, time.perf_counter())
    while True:
        if stop.level is StopLevel.HARD:
            engine.fail_all("the manager was stopped (hard_stop) before the request ended", time.perf_counter())
            return
        if step is None:
            if stop.level is StopLevel.DRAIN and engine.is_idle:
                return
            engine.wait_for_work(_IDLE_WAIT_S)
            step = engine.advance(None, slot, time.perf_counter())
            continue
        try:
            runner.run(step)
        except Exception as error:
            if _is_fault_of_device(error):
                raise
            logger.error("a step failed, and the requests in it with it", exc_info=error)
            engine.abandon(slot, time.perf_counter(), f"the step failed: {type(error).__name__}: {error}")
            step = engine.advance(None, slot, time.perf_counter())
        else:
            step = engine.advance(slot, slot, time.perf_counter())


def _is_fault_of_device(error: Exception) -> bool:
    """Whether nothing that follows on the device can be trusted."""
    accelerator_error = getattr(torch, "AcceleratorError", None)
    return accelerator_error is not None and isinstance(error, accelerator_error)
