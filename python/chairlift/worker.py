"""The thread that runs the loop: its start, its pauses and its end.

It knows nothing of the manager, so that a manager that nobody holds any more can be collected, and the thread ended.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable

from transformers import PreTrainedModel
from transformers.utils import logging

from chairlift.deadline import Deadline
from chairlift.derived import Derived
from chairlift.engine.loop import StopLevel, StopRequest, run_sync
from chairlift.engine.modes import CallersModes
from chairlift.engine.openmp import release_team
from chairlift.engine.session import Session
from chairlift.evaluation import evaluating
from chairlift.pause import Asked, Gate

logger = logging.get_logger(__name__)


class Worker:
    """Runs a session in a thread of its own."""

    def __init__(self, model: PreTrainedModel, session: Session, derived: Derived) -> None:
        """Of a model. The loop will run in the thread-local modes of this thread."""
        self._model = model
        self._session = session
        self._derived = derived
        self._engine = session.engine
        self._modes = CallersModes()
        self._gate = Gate(session.engine)
        self._recomputes = False  # after the pause, if weights changed in it
        self._thread: threading.Thread | None = None
        self._stop_request = StopRequest()
        self._control = threading.Lock()  # starting, pausing and ending
        self._at_end: Callable[[], None] | None = None
        self._rests = True
        self._ended = threading.Event()
        self._destroyed = False
        self._is_copy = False  # of one in the process that this one was forked from
        self.error: BaseException | None = None

    # ------------------------------------------------------------- start and end

    @property
    def is_running(self) -> bool:
        """Whether the loop runs."""
        return not self._rests

    @property
    def can_start(self) -> bool:
        """Whether another start may follow."""
        return not self._destroyed and self.error is None

    @property
    def is_free(self) -> bool:
        """Whether it rests and can be started, and nobody holds a pause."""
        return self.can_start and not self.is_running and not self._gate.held and not self._is_copy

    def fail_if_dead(self) -> None:
        """
        Raises:
            RuntimeError: The loop died (its cause is chained).
        """
        if self.error is not None:
            kind = type(self.error).__name__
            raise RuntimeError(f"the loop died: {kind}: {self.error}; make a new manager") from self.error

    def fail_if_forked(self) -> None:
        """
        Raises:
            RuntimeError: This process was forked from the one that it runs in. What the loop's thread had locked then
                stays locked here for ever.
        """
        if self._is_copy:
            raise RuntimeError("the manager runs in the process that this one was forked from: make a new one here")

    def left_by_its_thread(self) -> None:
        """This process was forked: the thread is not here."""
        self._is_copy = self._rests = True
        self._ended.set()

    def fail_if_over(self) -> None:
        """
        Raises:
            RuntimeError: It was destroyed, or the loop died (its cause is chained), or lives in another process.
        """
        self.fail_if_forked()
        if self._destroyed:
            raise RuntimeError("the manager was destroyed: make a new one")
        self.fail_if_dead()

    def enter_modes_of_this_thread(self) -> None:
        """The loop will run in these from the next start on."""
        self._modes = CallersModes()

    def start(self, *, once: bool) -> bool:
        """Starts the thread, once a stop that is under way has come to its end; see the manager.

        Returns:
            Whether it did; not, when it runs already.
        """
        while True:
            with self._control:
                self.fail_if_over()
                if self._rests:
                    self._launch(once)
                    return True
                if self._stop_request.level is StopLevel.NONE:
                    return False
                ended = self._ended
            ended.wait()

    def _launch(self, once: bool) -> None:
        self._session.cache.take_again()
        self._derived.notice_weights(once=once)
        with self._modes.entered():
            self._derived.notice_model(always=True)
        self._stop_request = StopRequest()
        self._at_end, self._ended = None, threading.Event()
        release_team()  # this thread probed the model; from here on the loop's computes
        self._engine.reopen()
        # An interrupt may come when the thread is there already: it looks first whether it is wanted.
        called_off = threading.Event()
        thread = threading.Thread(target=self._run, args=(self._ended, called_off), name="chairlift-loop", daemon=True)
        try:
            self._rests, self._thread = False, thread
            _alive.add(self)
            thread.start()
        except BaseException:
            called_off.set()
            self._rests, self._thread = True, None
            _alive.discard(self)
            self._ended.set()
            self._engine.close_outbox("the manager is not started")
            raise

    def stop(self, level: StopLevel, *, waits: bool, at_end: Callable[[], None] | None) -> bool:
        """Takes no more requests, and asks the loop to end.

        Args:
            level: How soon.
            waits: The caller will wait for the end.
            at_end: Called when the loop has ended, or now, where it has.

        Returns:
            Whether it was ever started; if not, requests that were submitted have failed.

        Raises:
            RuntimeError: The caller holds a pause and would wait for requests that stand still in it.
        """
        self.fail_if_forked()
        with self._control:
            paused_here = any(pause.thread == threading.get_ident() for pause in self._gate.held)
            if paused_here and waits and level is not StopLevel.HARD and not self._engine.is_idle:
                raise RuntimeError(
                    "stop() would wait for requests that stand still while this thread holds a pause: resume it first, "
                    "or stop with hard_stop=True"
                )
            self._engine.close_inbox("the manager is stopped: call start() first")
            if self._thread is None:
                self._engine.fail_all("the manager was stopped before it was started", time.perf_counter())
                return False
            self.ask_to_end(level)
            rests = self._rests
            if not rests:
                self._at_end = at_end
        if rests and at_end is not None:
            at_end()
        return True

    def ask_to_end(self, level: StopLevel) -> None:
        """Asks the loop to end; for what nobody started that is nothing."""
        if self._is_copy:
            return
        self._stop_request.ask(level)
        self._engine.wake()

    def join(self, deadline: Deadline) -> bool:
        """Waits for the end of the thread; whether it came in time."""
        thread, ended = self._thread, self._ended
        if thread is None:
            return True
        # Not by `Thread.join`: interrupted, that of Python 3.11 takes the thread for ended.
        if not ended.wait(deadline.left):
            return False
        thread.join()
        with self._control:
            if self._thread is thread:
                self._thread = None
        return True

    def destroy(self) -> None:
        """Ends at once and for good."""
        if self.is_running:
            self.stop(StopLevel.HARD, waits=True, at_end=None)
            self.join(Deadline(None))
        if self._is_copy:
            self._destroyed = True
            return
        with self._control:
            self._destroyed = True
            self._derived.release()
            self._engine.close_inbox("the manager was destroyed")
            self._engine.fail_all("the manager was destroyed", time.perf_counter())

    # -------------------------------------------------------------------- pauses

    @property
    def is_paused(self) -> bool:
        """Whether the loop rests in a pause that is held."""
        return self._gate.rests

    def hold(self, pause: Asked, timeout: float | None) -> None:
        """Waits until the loop rests for a pause; see `ContinuousBatchingManager.pause`."""
        deadline = Deadline(timeout)
        if threading.current_thread() is self._thread:
            raise RuntimeError("pause() was called by the loop itself, which cannot wait for itself")
        self.fail_if_over()
        if not self.is_running:
            raise RuntimeError("the manager does not run: there is nothing to pause, and start() looks at the weights")
        if not self._gate.hold(pause, lambda: self.is_running, deadline):
            self.fail_if_over()
            if deadline.left != 0:  # whether or not somebody started it again meanwhile
                raise RuntimeError("the manager was stopped before the loop came to rest")
            raise TimeoutError(f"the loop did not come to rest within {timeout} s (requests={pause.requests!r})")
        try:
            with self._control:
                self._recomputes |= pause.kv == "recompute"
                if self._gate.rests:
                    self._begin(pause)
        except BaseException:
            self.let_go(pause)
            raise

    def _begin(self, pause: Asked) -> None:
        """Does what a pause asks for while the loop rests."""
        if pause.requests == "abort":
            self._engine.cancel_all(time.perf_counter())
        if pause.release_memory:
            self._engine.recompute_all()
            self._derived.release()
            self._session.cache.give_back()

    def let_go(self, pause: Asked) -> None:
        """A pause is over; see `Pause.resume`."""
        release_team()  # this thread may have trained; from here on the loop's computes
        with self._control:
            held = self._gate.held
            if pause not in held:
                return
            failed = None
            if held == [pause] and self._gate.rests:
                try:
                    self._session.cache.take_again()
                    if self._derived.notice_weights(in_pause=True) and self._recomputes:
                        self._engine.recompute_all()
                    with self._modes.entered():
                        self._derived.notice_model()
                except BaseException as error:
                    failed = error
                self._recomputes = False
            self._gate.let_go(pause, failed)
        if failed is not None:
            raise failed

    # ---------------------------------------------------------------- the thread

    def _run(self, ended: threading.Event, called_off: threading.Event) -> None:
        with self._control:  # the start has come to its end, or was interrupted
            if called_off.is_set():
                return
        cause = "the manager is stopped"
        try:
            with self._modes.entered():
                while self._gate.rest(self._stop_request):
                    with evaluating(self._model):
                        if not run_sync(self._session, self._stop_request, self._gate.is_due):
                            break
                    release_team()  # whoever holds the pause may compute now
            self._derived.keep_recordings()
        except BaseException as error:
            logger.error("the loop died", exc_info=error)
            self.error = error
            self._derived.release()  # no start will follow
            cause = f"the loop died: {type(error).__name__}: {error}"
            self._engine.reopen()  # the cause of a death comes before that of a stop
            self._engine.close_inbox(cause)
            self._engine.fail_all(cause, time.perf_counter())
        finally:
            # Whatever happened above, no reader waits for what will not come.
            self._gate.end()
            self._engine.close_outbox(cause)
            _alive.discard(self)
            with self._control:
                self._rests = True
                at_end, self._at_end = self._at_end, None
            try:
                if at_end is not None:
                    at_end()
            finally:
                ended.set()


# A process that ends must not tear torch down under a loop that runs.
_alive: "weakref.WeakSet[Worker]" = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for worker in list(_alive):
        worker.ask_to_end(StopLevel.HARD)
    deadline = Deadline(10)
    for worker in list(_alive):
        worker.join(deadline)


def _after_fork() -> None:
    for worker in list(_alive):
        worker.left_by_its_thread()
    _alive.clear()


os.register_at_fork(after_in_child=_after_fork)
