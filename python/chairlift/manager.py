"""`ContinuousBatchingManager`: requests in, outputs out, and the thread that runs the loop between them."""

import asyncio
import contextlib
import math
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from chairlift import _native
from chairlift.attention.choice import choose_backend
from chairlift.books import Books
from chairlift.config import DEFAULT_MAX_BATCH_TOKENS, ContinuousBatchingConfig
from chairlift.deadline import Deadline
from chairlift.derived import Derived
from chairlift.described import described
from chairlift.engine.cache import geometry_of
from chairlift.engine.check import check_packed
from chairlift.engine.free_memory import free_memory_bytes
from chairlift.engine.linear_calls import recorded_weights
from chairlift.engine.linears import plan_linears
from chairlift.engine.loop import StopLevel
from chairlift.engine.session import Session
from chairlift.engine.sizing import batch_cost, resolve
from chairlift.handle import RequestHandle
from chairlift.handlers import Handler, Handlers
from chairlift.kept import keep, let_go
from chairlift.knowledge import keep_knowledge, knowledge_of
from chairlift.outputs import GenerationOutput, GroupStats, Stats, WorkloadHints
from chairlift.pause import Asked, InFlight, Kv, Pause
from chairlift.probe import learn, require_model
from chairlift.prompts import Prompt
from chairlift.readers import Readers
from chairlift.requests import Requests, Terms, check_text
from chairlift.sampling.options import GenerationOptions
from chairlift.views import SCHEDULERS, PagedAttentionCache, Scheduler
from chairlift.worker import Worker

logger = logging.get_logger(__name__)


class ContinuousBatchingManager:
    """Serves one model: `start`, add requests from any thread, take their outputs, `stop`.

    The model stays the caller's: it is not changed, and other threads may call it while the manager runs. While it
    runs the model is in evaluation mode; afterwards it is as it was before.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | GenerationOptions | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: WorkloadHints | None = None,
    ) -> None:
        """Learns the model, resolves the config and allocates the cache. No thread is started.

        The loop will run in the autocast, default device and inference mode of the thread that makes the manager.

        Args:
            model: A causal language model of transformers.
            generation_config: How requests generate unless they say otherwise. None: the model's.
            continuous_batching_config: Ours or transformers' own. None: the defaults.
            workload_hints: What is known of the requests to come.

        Raises:
            TypeError: An argument of the wrong type.
            ValueError: The model cannot be served (and why), or a value is out of bounds or not served yet.
        """
        require_model(model)
        self.model = model
        known = knowledge_of(model)
        learned_something = known.facts is None
        if known.facts is None:
            known.facts = learn(model)
        self.facts = known.facts
        config = ContinuousBatchingConfig.chosen(continuous_batching_config, generation_config, model)
        self.asked_config = config
        self.options = _options(model, generation_config, config)
        self.geometry = geometry_of(self.facts.calls, config.page_size)
        backend = choose_backend(
            model.config._attn_implementation,
            model.device,
            self.geometry,
            {call.kind.dtype for call in self.facts.calls},
            auto_switch=config.auto_switch_to_flash,
        )
        proof = (self.geometry.page_size, backend.name, backend.described)
        if proof not in known.proven:
            with recorded_weights() as used:
                replay = None if config.replay_forward is None else False
                known.give_recordings(check_packed(model, self.facts, self.geometry, backend, replay=replay))
            known.proven.add(proof)
            known.linear_weights = frozenset(name for name, weight in model.named_parameters() if id(weight) in used)
            learned_something = True
        if learned_something:
            # A model may make itself ready in its first forward.
            keep_knowledge(model, known)
        plan = plan_linears(
            model,
            known.linear_weights,
            wanted=config.packed_linears,
            free_bytes=free_memory_bytes(),
            max_rows=config.max_batch_tokens or DEFAULT_MAX_BATCH_TOKENS,
        )
        self._linear_plan = plan
        self.hints = hints = WorkloadHints.of(workload_hints)
        self.batch_cost = batch_cost(self.facts, backend, hints)
        self.config = resolve(
            config,
            hints,
            self.facts,
            self.geometry,
            self.batch_cost,
            attention=backend.name,
            linears=plan,
        )
        self._session = Session(
            model,
            self.facts,
            self.geometry,
            backend,
            num_blocks=_resolved(self.config.num_blocks),
            max_batch_tokens=_resolved(self.config.max_batch_tokens),
            max_requests_per_batch=_resolved(self.config.max_requests_per_batch),
            max_blocks_per_request=_resolved(self.config.max_blocks_per_request),
            safety_margin=self.config.safety_margin or 0.0,
            scheduler_type=self.config.scheduler_type,
            max_queue_size=self.config.max_queue_size,
            max_output_bytes=_bytes(self.config.output_space),
            seed=self.config.seed or 0,
            return_logprobs=self.config.return_logprobs,
            match_unit=self.config.match_unit or 0,
            cache_eviction=self.config.cache_eviction,
            swap_blocks=self.config.swap_blocks,
            tenant_weights=(self.config.tenant_weights or {}) if self.config.fairness else None,
            replay_forward=self.config.replay_forward,
        )
        self._engine = self._session.engine
        derived = Derived(model, self._session, plan, known, shares=bool(self.config.match_unit))
        self._derived = derived
        self._worker = worker = Worker(model, self._session, derived)
        self._lock = threading.Lock()  # of the books
        self._books = Books()
        self._handlers = Handlers(self._engine, self._lock, self._output_of)
        self._readers = Readers(self._engine, self._books, self._lock, self._handlers, worker)
        bounds = (self._engine.token_capacity, self.facts.max_positions, self.facts.limit)
        self._requests = Requests(
            self._engine,
            self._books,
            self._lock,
            self._handlers,
            self.config,
            worker,
            most_tokens=min(bound for bound in bounds if bound is not None),
        )
        # A manager that nobody holds has nobody who could take its outputs.
        weakref.finalize(self, _end, weakref.ref(worker)).atexit = False
        # Requests may come before the start; outputs cannot.
        self._engine.close_outbox("the manager is not started")

    # --------------------------------------------------------- the next session

    def serves(self, config: ContinuousBatchingConfig, hints: WorkloadHints) -> bool:
        """Whether it can be taken up again for another session: it rests, its model is what it was, it was asked for
        with the same config, and what it was sized for is enough."""
        if not self._worker.is_free:
            return False
        return config == self.asked_config and hints.within(self.hints) and knowledge_of(self.model).facts is self.facts

    def take_up(self, generation_config: GenerationConfig | GenerationOptions | None) -> None:
        """Makes a manager that was kept ready for another session, which generates as it says. The loop will run in the
        modes of this thread.

        Outputs of the session before that nobody took are dropped, and a warning says how many.

        Raises:
            TypeError, ValueError: As for the generation config of a new manager.
        """
        options = _options(self.model, generation_config, self.asked_config)
        self.options = options
        left = self._readers.drop_all()
        if left:
            logger.warning(f"{left} outputs of the session before were never taken, and are dropped.")
        self._worker.enter_modes_of_this_thread()

    # ------------------------------------------------------------------ control

    def is_running(self) -> bool:
        """Whether the loop's thread lives."""
        return self._worker.is_running

    @property
    def fatal_error(self) -> BaseException | None:
        """What the loop died of, if it did."""
        return self._worker.error

    def start(self, once: bool = False) -> None:
        """Starts the loop's thread. A stop that is under way comes to its end first.

        Args:
            once: Nothing that this start computes will serve another one, so that the weights need not be read now to
                notice later whether they changed.

        Raises:
            RuntimeError: The manager was destroyed, or its loop died.
        """
        if not self._worker.start(once=once):
            warnings.warn("the manager runs already", UserWarning, stacklevel=2)

    # -------------------------------------------------------------------- pauses

    def pause(
        self,
        requests: InFlight = "keep",
        release_memory: bool = False,
        kv: Kv | None = None,
        timeout: float | None = None,
    ) -> Pause:
        """Lets the loop rest between two steps, so that the model is the caller's: to be trained, to be given other
        weights, or to be called while nobody else computes. Modules that were in training mode are so again meanwhile.

        Several threads may hold pauses; the loop goes on after the last. The manager looks then whether weights
        changed: what others computed is shared no more with requests that come later, and packed copies and recordings
        are made anew. Requests may be added and cancelled during a pause; what is added waits.

        Args:
            requests: What becomes of those in flight: `keep`, they stand still and go on afterwards; `wait`, those that
                were begun come to their end first, the others stay in the queue; `abort`, all of them, the queued ones
                too, end as cancelled.
            release_memory: The cache's memory and packed copies of weights go back to the device (or the system) for
                the time of the pause. What was cached is lost, and requests in flight are computed again from their
                tokens.
            kv: What requests in flight read after weights changed: `keep`, K and V as the old weights computed them for
                their tokens so far; `recompute`, those of the new weights, for which their tokens are computed again.
                None: `keep`, unless the memory is released.
            timeout: How long to wait for the rest, in seconds. None: for ever.

        Returns:
            The pause: `with manager.pause(): ...`, or call its `resume()`.

        Raises:
            ValueError: A value that is none of those named, or `kv="keep"` with `release_memory`.
            RuntimeError: The manager does not run, or the loop ended before it came to rest (the cause of its death is
                chained); or the caller is the loop itself.
            TimeoutError: The loop did not come to rest in time. It goes on.
        """
        asked = Asked.of(requests, kv, release_memory=release_memory)
        self._worker.hold(asked, timeout)
        return Pause(self, asked)

    def is_paused(self) -> bool:
        """Whether the loop rests, as somebody holds a pause."""
        return self._worker.is_paused

    def resume(self, pause: Pause) -> None:
        """Ends a pause; see `Pause.resume`."""
        self._worker.let_go(pause.asked)

    def weights_changed(self, kv: Kv | None = None) -> None:
        """Says that weights are others than before: the next request that comes shares nothing with those before, and
        packed copies and recordings are made anew. A pause and a start find that out by themselves, where values
        differ.

        While the manager runs and no pause is held, it pauses for the moment.

        Args:
            kv: What requests in flight read from here on; see `pause`.

        Raises:
            ValueError, RuntimeError: As `pause`.
        """
        self._worker.fail_if_over()
        with self.pause(kv=kv) if self.is_running() else contextlib.nullcontext():
            self._derived.count_weights_as_changed()

    def reset_prefix_cache(self) -> None:
        """Forgets all K and V that are kept for prompts to come, and all else that was derived from the model: packed
        copies of weights and the recorded forward, too. Nothing that was computed before the call is shared with a
        request that is scheduled after it; requests that run go on undisturbed.

        While the manager runs and no pause is held, it pauses for the moment. Where only weights changed, a pause, a
        start and `weights_changed()` do what is needed.

        Raises:
            RuntimeError: The manager was destroyed, or its loop died (the cause is chained).
        """
        self._worker.fail_if_over()
        with self.pause() if self.is_running() else contextlib.nullcontext():
            self._derived.forget()
            self._engine.new_epoch()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Takes no more requests, and ends the loop: after everything submitted has ended, or at once.

        Outputs that nobody took yet can still be taken. `start` may follow.

        Args:
            block: Wait for the end.
            timeout: How long, in seconds. None: for ever.
            keep_for_next_session: The model keeps this manager: the next one that is asked for with the same batching
                config is this one, with its prefix cache (as far as the weights are the same), its packed weights and
                its recorded forward. `destroy_cached_continuous_batching_manager` lets it go.
            hard_stop: Queued and running requests fail.

        Raises:
            RuntimeError: The caller holds a pause and would wait for requests that stand still in it.
        """
        deadline = Deadline(timeout)
        level = StopLevel.HARD if hard_stop else StopLevel.DRAIN
        at_end = self._keep if keep_for_next_session else None
        if not self._worker.stop(level, waits=block and timeout is None, at_end=at_end):
            unkept = " It is not kept for the next session." if keep_for_next_session else ""
            logger.warning(f"The manager is not started.{unkept}")
        elif block and not self._worker.join(deadline):
            logger.warning(f"The loop did not end within {timeout} s.")

    def _keep(self) -> None:
        """Gives a manager at rest to its model. One that is kept while it still runs would have its requests ended by
        the next."""
        if self._worker.can_start:
            keep(self)

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the loop's thread, at most `timeout` seconds."""
        if not self._worker.join(Deadline(timeout)):
            logger.warning(f"The loop did not end within {timeout} s.")

    def destroy(self) -> None:
        """Stops at once and for good. May be called again."""
        let_go(self)
        self._worker.destroy()
        with self._lock:
            self._handlers.clear()

    # ----------------------------------------------------------------- requests

    def add_request(
        self,
        input_ids: Prompt,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> str:
        """Hands a request over.

        Args:
            input_ids: The prompt: a flat sequence of token ids (list, numpy array or tensor).
            request_id: Its label. None: `req_N`.
            max_new_tokens: Bound on the generated tokens. None: the generation config's.
            streaming: An output for each token, not only at the end.
            record_timestamps: Keep the time of each token.
            eos_token_id: Tokens that end it. None: the generation config's; negative: none.
            priority: Requests of a higher one are admitted first, and lose their blocks last.
            cache_salt: The prompt shares the prefix cache only with prompts of the same salt. None: with those without.
            tenant: Whose it is, with `fairness="tenant"`. None: of those that name none.
            do_sample: Whether its tokens are drawn, or the most probable ones. None: as the generation config says.
            temperature: Of its draws, above 0. None: the generation config's.
            top_k: Its draws are among so many of the most probable tokens; 0: all. None: the generation config's.
            top_p: And of these, among the most probable ones that together have this probability. None: the generation
                config's.

        Returns:
            The label. With `num_return_sequences` of the generation config, sequences beside the first are labelled
            `<label>__child#0` and so on, and to cancel `<label>` cancels all.

        Raises:
            TypeError: An argument of the wrong type.
            ValueError: A prompt that is empty, has an id outside the vocabulary or cannot fit; a bound below 1; a
                label that is in flight or whose output nobody took yet; values of a draw that are out of bounds, or
                where nothing is drawn.
            QueueFull: `max_queue_size` requests wait already, or outputs that nobody took hold more than
                `output_space`.
            RuntimeError: The loop died; its cause is chained.

        A stopped manager takes no requests: it says so in a warning, and the output comes failed at once. One that is
        not started yet takes them, and serves them from its start on.
        """
        terms = Terms(
            max_new_tokens,
            streaming,
            record_timestamps,
            eos_token_id,
            priority,
            cache_salt,
            tenant,
            do_sample,
            temperature,
            top_k,
            top_p,
        )
        labels, _ = self._requests.add(input_ids, request_id, terms, self.options)
        return labels[0]

    def submit(
        self,
        input_ids: Prompt,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> RequestHandle:
        """Hands a request over, as `add_request` does, and returns a handle: `handle.result()`, `await handle`,
        `for output in handle` or `async for output in handle`. Nobody else gets the request's outputs while it is kept.

        Raises:
            As `add_request`.
        """
        terms = Terms(
            max_new_tokens,
            streaming,
            record_timestamps,
            eos_token_id,
            priority,
            cache_salt,
            tenant,
            do_sample,
            temperature,
            top_k,
            top_p,
        )
        labels, first = self._requests.add(input_ids, request_id, terms, self.options, claims=True)
        children = [RequestHandle(self, label, first + nth, ()) for nth, label in enumerate(labels[1:], 1)]
        return RequestHandle(self, labels[0], first, tuple(children))

    def add_requests(
        self,
        inputs: Sequence[Prompt] | npt.NDArray[np.integer[Any]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> list[str]:
        """Hands several requests over: all of them, or none. Those that begin alike are served one after the other, so
        that they share K and V while these are there.

        Args:
            inputs: The prompts; or an array with one in each row.
            max_new_tokens: See `add_request`; so the others.
            streaming: See `add_request`.
            record_timestamps: See `add_request`.
            eos_token_id: See `add_request`.
            priority: See `add_request`.
            cache_salt: See `add_request`.
            tenant: See `add_request`.
            do_sample: See `add_request`.
            temperature: See `add_request`.
            top_k: See `add_request`.
            top_p: See `add_request`.

        Returns:
            The labels, in the order of the inputs.

        Raises:
            TypeError, ValueError: As `add_request`, naming the prompt by its place.
            QueueFull: As `add_request`: there is not room for all of them, and none was taken.
            RuntimeError: The loop died; its cause is chained.
        """
        terms = Terms(
            max_new_tokens,
            streaming,
            record_timestamps,
            eos_token_id,
            priority,
            cache_salt,
            tenant,
            do_sample,
            temperature,
            top_k,
            top_p,
        )
        return self._requests.add_many(inputs, terms, self.options)

    def family(self, label: str) -> list[str]:
        """The labels of a request's sequences, its own first."""
        return self._requests.family(label, self.options)

    def checked(self, inputs: Sequence[Prompt], max_new_tokens: int | None = None) -> list[npt.NDArray[np.int64]]:
        """Prompts as arrays, each fit to be added.

        Raises:
            TypeError, ValueError: As `add_request`, naming the prompt by its index.
        """
        return self._requests.checked(inputs, max_new_tokens, self.options)

    def cancel_request(self, request_id: str) -> None:
        """Ends a request; its output comes with `finish_reason` `cancelled`. One that ended is left alone.

        Raises:
            KeyError: No request of that label is in flight or has an output to be taken.
        """
        with self._lock:
            self._engine.cancel(self._books.id_to_cancel(request_id))

    # ------------------------------------------------------------------ outputs

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Takes an output: the next one, or the next one of a request.

        Args:
            request_id: Of this request only.
            timeout: How long to wait, in seconds. None: until there is one, or none can come.

        Returns:
            None when none came in time, or the manager is stopped and has none.

        Raises:
            KeyError: No request of that label is in flight or has an output to be taken.
            RuntimeError: The loop died (its cause is chained), or the request has a result handler.
        """
        deadline = Deadline(timeout)
        if request_id is None:
            return self._readers.take_next(deadline)
        with self._readers.claimed(request_id) as sequence:
            return self._readers.take_for(sequence, deadline)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come, until the manager is stopped and the last is taken."""
        while True:
            output = self.get_result(timeout=0.1)
            if output is not None:
                yield output
            elif not self.is_running() and not self._engine.undelivered:
                return

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Outputs of one request as they come, until its last. Nobody else gets them meanwhile.

        Raises:
            KeyError: No request of that label is in flight or has an output to be taken.
        """
        with self._readers.claimed(request_id) as sequence:
            while (output := self._readers.take_for(sequence, Deadline(None))) is not None:
                yield output
                if output.is_finished():
                    return

    def register_result_handler(self, request_id: str, callback: Handler) -> None:
        """Gives every output of a request to a callback, on the event loop that runs here: one for each token where it
        streams, else the last. The callback goes with the last output. Nobody else gets them meanwhile.

        It may be registered before the request is added; outputs that are there already come too. A second one takes
        the place of the first. An exception that it raises goes to the event loop's exception handler. Where an event
        loop is closed before the end, outputs that were not handed out are for the other readers.

        Args:
            request_id: The request's label. With several sequences, each has its own.
            callback: Called with each output.

        Raises:
            TypeError: A label that is no string, or a callback that cannot be called.
            RuntimeError: No event loop runs in this thread; or the manager was destroyed, or its loop died.
        """
        check_text("request_id", request_id)
        if not callable(callback):
            raise TypeError(f"callback is {callback!r}, but must be callable with an output")
        self._worker.fail_if_over()
        loop = asyncio.get_running_loop()
        with self._lock:
            if request_id in self._books:
                self._handlers.add(self._books.id_of(request_id), loop, callback)
            else:
                self._handlers.await_label(request_id, loop, callback)

    def unregister_result_handler(self, request_id: str) -> None:
        """Takes a request's handler away: outputs to come are for the other readers.

        Raises:
            KeyError: It has none.
        """
        with self._lock:
            sequence = self._books.id_of(request_id) if request_id in self._books else None
            if sequence is not None and sequence in self._handlers:
                self._handlers.remove(sequence)
            elif not self._handlers.stop_awaiting(request_id):
                raise KeyError(f"request {request_id!r} has no result handler")

    def _output_of(self, event: _native.Event) -> GenerationOutput:
        # Of the manager, so that it stays for as long as somebody has a handler.
        return self._books.output(event)

    # ------------------------------------------------------------------- facts

    @property
    def scheduler(self) -> Scheduler:
        """Who runs and who waits, to be looked at."""
        return SCHEDULERS[self.config.scheduler_type](self)

    @property
    def cache(self) -> PagedAttentionCache:
        """The pool, to be looked at."""
        return PagedAttentionCache(self)

    def stats(self) -> Stats:
        """Counters and gauges, read without stopping the engine."""
        groups = [
            GroupStats(str(reach), *counts)
            for reach, counts in zip(self.geometry.reaches, self._engine.blocks_by_group(), strict=True)
        ]
        return Stats(**self._engine.stats(), groups=tuple(groups))

    def describe(self) -> str:
        """What was learned and chosen, one fact a line, and why: a table to be printed."""
        return described(
            self.model,
            self.facts,
            self.geometry,
            self.config,
            self.batch_cost,
            linears=self._linear_plan.described(),
            forward=self._session.forward.describe(),
            attention=self._session.runner.backend.described,
            cache_bytes=self.cache_bytes,
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pool, trash included."""
        return self._session.cache.nbytes


def _options(
    model: PreTrainedModel,
    generation_config: GenerationConfig | GenerationOptions | None,
    config: ContinuousBatchingConfig,
) -> GenerationOptions:
    options = generation_config
    if not isinstance(options, GenerationOptions):
        options = GenerationOptions.resolve(
            model, options, drop_unsupported_processors=config.drop_unsupported_processors
        )
    if 0 < config.max_queue_size < options.num_return_sequences:
        raise ValueError(
            f"num_return_sequences is {options.num_return_sequences}, but max_queue_size "
            f"{config.max_queue_size}: no request could ever join the queue"
        )
    return options


def _end(worker: weakref.ref[Worker]) -> None:
    # While its thread runs it is there.
    if (running := worker()) is not None:
        running.ask_to_end(StopLevel.HARD)


def _bytes(space: float | None) -> int | None:
    return None if space is None or space == math.inf else int(space * 2**30)


def _resolved(value: int | None) -> int:
    if value is None:
        raise AssertionError("a resolved config leaves no size open")
    return value
