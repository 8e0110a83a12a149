"""The loop: one step after the other, until there is nothing to run and somebody asked it to stop.

Beside this one, which commits a step before it plans the next, the async loop will stand.
"""

import threading
import time
from collections.abc import Callable
from enum import IntEnum

from chairlift import _native
from chairlift.engine.failure import Failure, is_of_device
from chairlift.engine.session import Session

# An idle loop is woken by the inbox; this only bounds how long it sleeps.
IDLE_WAIT_S = 60.0


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


def run_sync(session: Session, stop: StopRequest, is_to_rest: Callable[[], bool]) -> bool:
    """Commits step N, then plans step N + 1.

    Args:
        session: What runs.
        stop: Ends the loop.
        is_to_rest: Interrupts it: looked at between two steps.

    Returns:
        Whether it was interrupted; not, when it ended. No step is in flight then.
    """
    engine, runner, slot = session.engine, session.runner, 0
    done: int | None = None  # a slot whose results have arrived
    while True:
        if stop.level is StopLevel.HARD:
            engine.advance(done, None, time.perf_counter())
            is_over(engine, stop)
            return False
        if is_to_rest():
            engine.advance(done, None, time.perf_counter())
            return True
        step = engine.advance(done, slot, time.perf_counter())
        done = None
        if step is None:
            if is_over(engine, stop):
                return False
            if not is_to_rest():
                engine.wait_for_work(IDLE_WAIT_S)
            continue
        failure = None
        try:
            runner.run(step)
        except Exception as error:
            if is_of_device(error):
                raise
            failure = Failure(step, error)
        if failure is None:
            done = slot
        else:
            # By now the frames of the exception are gone, and the tensors in them.
            failure.settle(engine, slot)


def is_over(engine: _native.Engine, stop: StopRequest) -> bool:
    """Whether a loop without a step in flight is to end; what it leaves undone fails."""
    if stop.level is StopLevel.HARD:
        engine.fail_all("the manager was stopped (hard_stop) before the request ended", time.perf_counter())
    return stop.level is StopLevel.HARD or (stop.level is StopLevel.DRAIN and engine.is_idle)
