"""Pauses: the loop rests between two steps, and the model is the caller's."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from chairlift import _native
from chairlift.deadline import Deadline
from chairlift.engine.loop import IDLE_WAIT_S, StopRequest, is_over

InFlight = Literal["keep", "wait", "abort"]
Kv = Literal["keep", "recompute"]

# Whoever waits for a rest looks this often whether the loop still lives.
_LOOK_S = 0.05


@dataclass(frozen=True, eq=False)
class Asked:
    """What somebody asked a pause for."""

    requests: InFlight
    kv: Kv
    release_memory: bool
    thread: int

    @classmethod
    def of(cls, requests: InFlight, kv: Kv | None, *, release_memory: bool) -> "Asked":
        """By this thread; see `ContinuousBatchingManager.pause`."""
        _check("requests", requests, get_args(InFlight))
        if kv is not None:
            _check("kv", kv, get_args(Kv))
        if release_memory and kv == "keep":
            raise ValueError(
                "kv is 'keep', but release_memory gives the memory away that K and V are in: leave kv out, or say "
                "'recompute'"
            )
        kv = kv or ("recompute" if release_memory else "keep")
        return cls(requests, kv, release_memory, threading.get_ident())


class Pause:
    """A pause of a manager that somebody holds: until `resume`, or the end of a `with` block."""

    def __init__(self, manager: Any, asked: Asked) -> None:
        """Made by a manager."""
        self._manager = manager
        self.asked = asked

    def resume(self) -> None:
        """Ends the pause. After the last of several that are held the loop goes on, with the weights as they are then.
        May be called again.

        Raises:
            MemoryError, RuntimeError: Memory that was released cannot be had again. The loop has died then, and its
                requests have failed with that cause.
        """
        self._manager.resume(self)

    def __enter__(self) -> "Pause":
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()


def _check(name: str, value: object, possible: tuple[str, ...]) -> None:
    if value not in possible:
        names = ", ".join(map(repr, possible[:-1]))
        raise ValueError(f"{name} is {value!r}, but must be {names} or {possible[-1]!r}")


class Gate:
    """Where the loop rests while pauses are held. It holds no manager: one that is dropped with its pauses is ended."""

    def __init__(self, engine: _native.Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._held: list[Asked] = []
        self._rests = False
        self._error: BaseException | None = None

    @property
    def rests(self) -> bool:
        """Whether the loop rests in a pause that is held."""
        return self._rests and bool(self._held)

    @property
    def held(self) -> list[Asked]:
        """The pauses that are held, the oldest first."""
        with self._changed:
            return self._held[:]

    def hold(self, pause: Asked, is_running: Callable[[], bool], deadline: Deadline) -> bool:
        """Asks the loop to rest, and waits until it does and the pause has what it waits for.

        Returns:
            Whether the pause is held; not, when the loop ended or time is up.
        """
        with self._changed:
            self._held.append(pause)
            self._tell()
            held = False
            try:
                while not (held := self._rests and self._has_come(pause)) and is_running():
                    left = deadline.left_up_to(_LOOK_S)
                    if not left:
                        break
                    self._changed.wait(left)
            finally:
                if not held:
                    self._held.remove(pause)
                    self._tell()
            return held

    def let_go(self, pause: Asked, error: BaseException | None = None) -> None:
        """The pause is over. After the last one the loop goes on, or dies of an error."""
        with self._changed:
            self._held.remove(pause)
            self._error = error
            self._tell()

    def is_due(self) -> bool:
        """Whether the loop is to rest."""
        # What holds nothing, as nearly always, costs no lock.
        if not self._held:
            return False
        with self._changed:
            return any(map(self._has_come, self._held))

    def rest(self, stop: StopRequest) -> bool:
        """Rests as long as a pause is held. Meanwhile cancellations go their way.

        Returns:
            Whether the loop goes on; not, when it is to end in the midst of the pause.

        Raises:
            BaseException: What kept the holder of the last pause from making everything ready.
        """
        while True:
            with self._changed:
                if self._error is not None:
                    raise self._error
                rests = any(map(self._has_come, self._held))
                ends = rests and is_over(self._engine, stop)
                self._rests = rests and not ends
                self._changed.notify_all()
                if not self._rests:
                    return not ends
            self._engine.wait_for_work(IDLE_WAIT_S)
            self._engine.advance(None, None, time.perf_counter())

    def end(self) -> None:
        """The loop has ended, wherever it was."""
        with self._changed:
            self._rests = False
            self._changed.notify_all()

    def _has_come(self, pause: Asked) -> bool:
        return pause.requests != "wait" or not self._engine.admitted

    def _tell(self) -> None:
        # Nobody fresh is let in while somebody waits for those that were let in before.
        self._engine.let_in(not self._held)
        self._engine.wake()
