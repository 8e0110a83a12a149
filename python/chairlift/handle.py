"""What `submit` returns: a request whose outputs can be waited for, awaited or iterated."""

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any

from chairlift.deadline import Deadline
from chairlift.outputs import GenerationOutput

if TYPE_CHECKING:
    from chairlift.manager import ContinuousBatchingManager

# A loop that was closed is noticed this soon.
_LOOK_S = 1.0


class RequestHandle:
    """A request of a manager, and the only reader of its outputs.

    `result()` waits for its end, `await handle` does so in an event loop; `for output in handle` and `async for output
    in handle` go through its outputs as they come, up to the last. Each output comes once, whoever asks; the last one
    stays. Once it was used in an event loop, that loop has to run for outputs to come.

    A handle that is dropped leaves what it did not take to the other readers of the manager.
    """

    def __init__(
        self, manager: "ContinuousBatchingManager", label: str, sequence: int, children: tuple["RequestHandle", ...]
    ) -> None:
        """Of a sequence whose outputs are claimed for it."""
        self._manager = manager
        self._label = label
        self._sequence = sequence
        self._children = children
        self._last: GenerationOutput | None = None
        self._reading = threading.Lock()
        self._ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._come: deque[GenerationOutput] = deque()
        self._waiters: set[asyncio.Future[None]] = set()
        self._unclaim = weakref.finalize(self, manager._engine.unclaim, sequence)
        self._unclaim.atexit = False

    @property
    def request_id(self) -> str:
        """The request's label."""
        return self._label

    @property
    def children(self) -> tuple["RequestHandle", ...]:
        """The other sequences of a request of several (`num_return_sequences`)."""
        return self._children

    def done(self) -> bool:
        """Whether the last output was taken."""
        return self._last is not None

    def cancel(self) -> None:
        """Ends the request; with several sequences, all of them. Their last outputs come with `finish_reason`
        `cancelled`. One that ended already is left alone."""
        self._manager._engine.cancel(self._sequence)

    def result(self, timeout: float | None = None) -> GenerationOutput:
        """Waits for the end.

        Args:
            timeout: How long, in seconds. None: for ever.

        Returns:
            The last output, with all that was generated, whatever ended it: see its `finish_reason`.

        Raises:
            TimeoutError: The request did not end in time. It goes on.
            RuntimeError: The manager does not run, so that nothing can come; or this was called in the event loop that
                the handle was used in.
        """
        deadline = Deadline(timeout)
        while self._last is None:
            if self._loop is None or self._loop.is_closed():
                self._stop_listening()
                if self._take(deadline) is None:
                    raise TimeoutError(f"request {self._label!r} did not end within {timeout} s; it goes on")
                continue
            if _running_loop() is self._loop:
                raise RuntimeError("result() would stop the event loop that outputs come through: await the handle")
            left = deadline.left_up_to(_LOOK_S)
            if not self._ended.wait(left) and not left:
                raise TimeoutError(f"request {self._label!r} did not end within {timeout} s; it goes on")
        return self._last

    def __iter__(self) -> Iterator[GenerationOutput]:
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("the handle was used in an event loop: iterate with 'async for'")
        self._stop_listening()
        while self._last is None:
            output = self._take(Deadline(None))
            if output is not None:
                yield output

    def _take(self, deadline: Deadline) -> GenerationOutput | None:
        """The next output, outside of event loops; None, when time is up."""
        left = deadline.left
        if not self._reading.acquire(timeout=-1 if left is None else min(left, threading.TIMEOUT_MAX)):
            return None
        try:
            if self._last is not None:
                return self._last
            output = self._manager._readers.take_for(self._sequence, deadline)
            if output is None and left is None:
                raise RuntimeError(f"request {self._label!r} has no output: the manager is not started")
            if output is not None and output.is_finished():
                self._end(output)
            return output
        finally:
            self._reading.release()

    # ------------------------------------------------------------ in an event loop

    def __await__(self) -> Generator[Any, None, GenerationOutput]:
        return self._wait_for_last().__await__()

    async def _wait_for_last(self) -> GenerationOutput:
        self._listen()
        while self._last is None:
            await self._news()
        return self._last

    async def __aiter__(self) -> AsyncIterator[GenerationOutput]:
        self._listen()
        while self._come or self._last is None:
            while not self._come and self._last is None:
                await self._news()
            if self._come:
                yield self._come.popleft()

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        if self._last is not None or self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("the handle was used in another event loop, which its outputs come through")
        if not self._reading.acquire(blocking=False):
            raise RuntimeError("another thread waits for an output of the handle")
        try:
            if self._last is None:
                self._loop = loop
                with self._manager._lock:
                    self._manager._handlers.add(self._sequence, loop, self._arrived)
        finally:
            self._reading.release()

    def _stop_listening(self) -> None:
        """After its event loop was closed outputs come to whoever waits, again."""
        if self._loop is not None:
            with self._manager._lock:
                self._manager._handlers.remove(self._sequence)
            self._loop = None

    async def _news(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _arrived(self, output: GenerationOutput) -> None:
        self._come.append(output)
        if output.is_finished():
            self._end(output)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _end(self, output: GenerationOutput) -> None:
        self._last = output
        self._ended.set()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
