"""The way out: whoever asks for outputs gets them here."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from chairlift import _native
from chairlift.books import Books
from chairlift.deadline import Deadline
from chairlift.handlers import Handlers
from chairlift.outputs import GenerationOutput
from chairlift.worker import Worker


class Readers:
    """Takes events from the engine for those that ask, and makes outputs of them."""

    def __init__(
        self,
        engine: _native.Engine,
        books: Books,
        lock: threading.Lock,
        handlers: Handlers,
        worker: Worker,
    ) -> None:
        """
        Args:
            engine: Where events come from.
            books: What makes outputs of them.
            lock: Of the books.
            handlers: Those that get outputs without asking.
            worker: What runs the engine.
        """
        self._engine = engine
        self._books = books
        self._lock = lock
        self._handlers = handlers
        self._worker = worker

    def take_next(self, deadline: Deadline) -> GenerationOutput | None:
        """The next output that nobody claims."""
        while self._waited(lambda: self._engine.wait_next(deadline.left)):
            with self._lock:
                event = self._engine.take_next()
                if event is not None:
                    return self._books.output(event)
        return None

    def take_for(self, sequence: int, deadline: Deadline) -> GenerationOutput | None:
        """The next output of a sequence that is claimed."""
        while self._waited(lambda: self._engine.wait_for(sequence, deadline.left)):
            with self._lock:
                event = self._engine.take_for(sequence)
                if event is not None:
                    return self._books.output(event)
                if not self._books.is_open(sequence):
                    raise KeyError("the last output of the request was taken by another reader")
        return None

    @contextlib.contextmanager
    def claimed(self, request_id: str) -> Iterator[int]:
        """A sequence whose outputs nobody else gets meanwhile."""
        self._worker.fail_if_forked()
        with self._lock:
            # The last output is taken under this lock too: a claim on what has ended cannot come to be.
            sequence = self._books.id_of(request_id)
            if sequence in self._handlers:
                raise RuntimeError(f"request {request_id!r} has a result handler, which gets its outputs")
            self._engine.claim(sequence)
        try:
            yield sequence
        finally:
            self._engine.unclaim(sequence)

    def drop_all(self) -> int:
        """Drops what nobody took; of how many sequences the last output."""
        left = 0
        with self._lock:
            while (event := self._engine.take_next()) is not None:
                left += event.finish_reason is not None
                self._books.output(event)
            self._books.start_anew()
        return left

    def _waited(self, wait: Callable[[], bool]) -> bool:
        """Whether there is something to take; not, when time is up or the manager is stopped."""
        self._worker.fail_if_forked()
        try:
            return wait()
        except _native.EngineClosed:
            self._worker.fail_if_dead()
            return False
