"""Result handlers: callbacks that get a request's outputs, each on its own event loop.

An event loop takes what is there for it by itself. One thread, which lives while there are handlers, only tells a loop
that something is there, so that nothing is lost with a loop that is closed: it stays for the other readers.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from transformers.utils import logging

from chairlift import _native
from chairlift.outputs import GenerationOutput

logger = logging.get_logger(__name__)

Handler = Callable[[GenerationOutput], object]

# Outputs that are handed out in one go, before an event loop has its turn with other things.
_AT_ONCE = 256
# Loops that were closed are looked for this often.
_LOOK_S = 1.0


@dataclass(eq=False)
class _Listener:
    """An event loop, and its handlers by the sequences that they are for."""

    number: int
    loop: asyncio.AbstractEventLoop
    handlers: dict[int, Handler] = field(default_factory=dict)


class Handlers:
    """The result handlers of a manager."""

    def __init__(
        self,
        engine: _native.Engine,
        lock: AbstractContextManager[object],
        output_of: Callable[[_native.Event], GenerationOutput],
    ) -> None:
        """
        Args:
            engine: Where events come from.
            lock: Of the books. Methods are called under it, unless they say otherwise.
            output_of: Makes outputs of events.
        """
        self._engine = engine
        self._lock = lock
        self._output_of = output_of
        self._listeners: dict[int, _Listener] = {}
        self._of_loop: dict[asyncio.AbstractEventLoop, _Listener] = {}
        self._of_sequence: dict[int, _Listener] = {}
        self._awaited: dict[str, tuple[asyncio.AbstractEventLoop, Handler]] = {}
        self._numbers = itertools.count()
        self._teller: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._of_sequence) + len(self._awaited)

    @property
    def awaits(self) -> bool:
        """Whether there are handlers for requests that are still to come."""
        return bool(self._awaited)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._of_sequence

    def add(self, sequence: int, loop: asyncio.AbstractEventLoop, handler: Handler) -> None:
        """Gives a sequence a handler, in the place of one that it has."""
        self.remove(sequence)
        listener = self._of_loop.get(loop)
        if listener is None:
            listener = self._of_loop[loop] = _Listener(next(self._numbers), loop)
            self._listeners[listener.number] = listener
        listener.handlers[sequence] = handler
        self._of_sequence[sequence] = listener
        self._engine.listen(sequence, listener.number)
        if self._teller is None:
            self._teller = threading.Thread(target=self._tell, name="chairlift-handlers", daemon=True)
            self._teller.start()

    def remove(self, sequence: int) -> None:
        """Takes a sequence's handler away; what it did not get yet is for other readers."""
        if sequence in self._of_sequence:
            self._engine.unlisten(sequence)
            self._forget(sequence)

    def await_label(self, label: str, loop: asyncio.AbstractEventLoop, handler: Handler) -> None:
        """Keeps a handler for a request that is still to come."""
        self._awaited[label] = (loop, handler)

    def stop_awaiting(self, label: str) -> bool:
        """Drops such a handler, and tells whether there was one."""
        return self._awaited.pop(label, None) is not None

    def come(self, label: str, sequence: int) -> None:
        """A sequence of that label has come."""
        if (awaited := self._awaited.pop(label, None)) is not None:
            self.add(sequence, *awaited)

    def clear(self) -> None:
        """Forgets handlers of requests that will not come."""
        self._awaited.clear()

    def _forget(self, sequence: int) -> None:
        listener = self._of_sequence.pop(sequence)
        del listener.handlers[sequence]
        if not listener.handlers:
            del self._listeners[listener.number], self._of_loop[listener.loop]

    def _tell(self) -> None:
        """The thread: tells event loops that something is there."""
        closed = False
        while True:
            try:
                numbers = self._engine.wait_heard(_LOOK_S)
            except _native.EngineClosed:
                numbers, closed = [], True
            with self._lock:
                for number in numbers:
                    if number in self._listeners:
                        self._call(self._listeners[number])
                for listener in [listener for listener in self._listeners.values() if listener.loop.is_closed()]:
                    self._give_up(listener)
                if closed or not self._listeners:
                    # Handlers that are there wait for nothing that this thread would have to tell them.
                    self._teller = None
                    return

    def _call(self, listener: _Listener) -> None:
        try:
            listener.loop.call_soon_threadsafe(self._hand_out, listener)
        except RuntimeError:  # it was closed just now
            self._give_up(listener)

    def _give_up(self, listener: _Listener) -> None:
        count = len(listener.handlers)
        logger.warning(
            f"An event loop was closed with {count} result handlers still registered on it: what they did not get can "
            "be taken otherwise."
        )
        for sequence in list(listener.handlers):
            self.remove(sequence)

    def _hand_out(self, listener: _Listener) -> None:
        """Takes what is there for an event loop, on that loop, not under the lock."""
        for _ in range(_AT_ONCE):
            with self._lock:
                event = self._engine.take_heard(listener.number)
                if event is None:
                    return
                handler = listener.handlers[event.request]
                output = self._output_of(event)
                if output.is_finished():
                    self._forget(event.request)
            try:
                handler(output)
            except Exception as error:
                message = f"the result handler of request {output.request_id!r} raised an exception"
                listener.loop.call_exception_handler({"message": message, "exception": error})
        listener.loop.call_soon(self._hand_out, listener)
