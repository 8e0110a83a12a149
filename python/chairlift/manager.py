"""`ContinuousBatchingManager`: requests in, outputs out, and the thread that runs the loop between them."""

import asyncio
import atexit
import contextlib
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from chairlift import _native
from chairlift.attention.choice import choose_backend
from chairlift.books import Books
from chairlift.config import DEFAULT_MAX_BATCH_TOKENS, ContinuousBatchingConfig
from chairlift.engine.cache import geometry_of
from chairlift.engine.check import check_packed
from chairlift.engine.fingerprint import Fingerprint, fingerprint
from chairlift.engine.free_memory import free_memory_bytes
from chairlift.engine.linear_calls import recorded_weights
from chairlift.engine.linears import pack, plan_linears
from chairlift.engine.loop import StopLevel, StopRequest, run_sync
from chairlift.engine.modes import CallersModes
from chairlift.engine.openmp import release_team
from chairlift.engine.session import Session
from chairlift.engine.sizing import batch_cost, resolve
from chairlift.evaluation import evaluating
from chairlift.handle import RequestHandle
from chairlift.handlers import Handler, Handlers
from chairlift.kept import keep, let_go
from chairlift.knowledge import Knowledge, forget_knowledge, keep_knowledge, knowledge_of
from chairlift.outputs import GenerationOutput, GroupStats, Stats, WorkloadHints
from chairlift.pause import Gate, InFlight, Kv, Pause
from chairlift.probe import learn, require_model
from chairlift.prompts import Prompt, Prompts, packed_prompts, prompt_array
from chairlift.sampling.options import GenerationOptions, eos_tuple
from chairlift.views import SCHEDULERS, PagedAttentionCache, Scheduler

logger = logging.get_logger(__name__)

# No bound that anybody means is beyond it, and it fits the engine's numbers.
_MOST_NEW_TOKENS = 2**62
_MOST_PRIORITY = 2**31 - 1


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
        self._knowledge = known = knowledge_of(model)
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
        self._linear_plan = plan_linears(
            model,
            known.linear_weights,
            wanted=config.packed_linears,
            free_bytes=free_memory_bytes(),
            max_rows=config.max_batch_tokens or DEFAULT_MAX_BATCH_TOKENS,
        )
        self.hints = hints = WorkloadHints.of(workload_hints)
        self.batch_cost = batch_cost(self.facts, backend, hints)
        self.config = resolve(
            config,
            hints,
            self.facts,
            self.geometry,
            self.batch_cost,
            attention=backend.name,
            linears=self._linear_plan,
        )
        self._session = Session(
            model,
            self.facts,
            self.geometry,
            backend,
            num_blocks=_resolved(self.config.num_blocks),
            max_batch_tokens=_resolved(self.config.max_batch_tokens),
            max_requests_per_batch=_resolved(self.config.max_requests_per_batch),
            safety_margin=self.config.safety_margin or 0.0,
            scheduler_type=self.config.scheduler_type,
            max_queue_size=self.config.max_queue_size,
            seed=self.config.seed or 0,
            return_logprobs=self.config.return_logprobs,
            match_unit=self.config.match_unit or 0,
            cache_eviction=self.config.cache_eviction,
            swap_blocks=self.config.swap_blocks,
            tenant_weights=(self.config.tenant_weights or {}) if self.config.fairness else None,
            replay_forward=self.config.replay_forward,
        )
        self._engine = self._session.engine
        self._modes = CallersModes()
        self._thread: threading.Thread | None = None
        self._stop_request = StopRequest()
        self._control = threading.Lock()  # of the thread: starting and ending it
        self._lock = threading.Lock()  # of the books
        self._books = Books()
        self._handlers = Handlers(self._engine, self._lock, self._books.output)
        self._gate = Gate(self._engine)
        self._recomputes = False  # after the pause, if weights changed in it
        self._weights: Fingerprint | None = None
        self._keeps = False  # for the next session, once the loop has ended
        self._rests = True
        self._was_started = False
        self._destroyed = False
        self.fatal_error: BaseException | None = None
        # Requests may come before the start; outputs cannot.
        self._engine.close_outbox("the manager is not started")

    # --------------------------------------------------------- the next session

    def serves(self, config: ContinuousBatchingConfig, hints: WorkloadHints) -> bool:
        """Whether it can be taken up again for another session: it rests, its model is what it was, it was asked for
        with the same config, and what it was sized for is enough."""
        if self.is_running() or self._destroyed or self.fatal_error is not None:
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
        with self._lock:
            self.options = options
            left = 0
            while (event := self._engine.take_next()) is not None:
                left += event.finish_reason is not None
                self._books.output(event)
            self._books.start_anew()
        if left:
            logger.warning(f"{left} outputs of the session before were never taken, and are dropped.")
        self._modes = CallersModes()

    # ------------------------------------------------------------------ control

    def is_running(self) -> bool:
        """Whether the loop's thread lives."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def start(self, once: bool = False) -> None:
        """Starts the loop's thread. A stop that is under way comes to its end first.

        Args:
            once: Nothing that this start computes will serve another one, so that the weights need not be read now to
                notice later whether they changed.

        Raises:
            RuntimeError: The manager was destroyed, or its loop died.
        """
        while True:
            with self._control:
                if self._destroyed:
                    raise RuntimeError("the manager was destroyed and cannot be started again: make a new one")
                if self.fatal_error is not None:
                    message = "the manager's loop died and cannot be started again: make a new one"
                    raise RuntimeError(message) from self.fatal_error
                thread = self._thread
                if thread is None or not thread.is_alive():
                    self._launch(once)
                    return
                if self._stop_request.level is StopLevel.NONE:
                    warnings.warn("the manager runs already", UserWarning, stacklevel=2)
                    return
            thread.join()

    def _launch(self, once: bool) -> None:
        self._session.cache.take_again()
        self._notice_weights(once)
        self._notice_model(always=True)
        self._stop_request = StopRequest()
        self._keeps = self._rests = False
        self._engine.reopen()
        _running.add(self)
        release_team()  # this thread probed the model; from here on the loop's computes
        self._thread = threading.Thread(target=self._run, name="chairlift-loop", daemon=True)
        self._thread.start()

    def _notice_model(self, *, always: bool) -> None:
        """Recordings of another model are worth nothing: takes over what is known of this one."""
        with self._modes.entered():
            known = knowledge_of(self.model)
        if always or known is not self._knowledge:
            self._session.forward.forget(known.take_recordings())
        self._knowledge = known

    def _notice_weights(self, once: bool = False, *, in_pause: bool = False) -> bool:
        """What other weights computed is worth nothing, nor are their packed copies: finds out whether the model's
        changed since the last start or pause."""
        first, self._was_started = not self._was_started, True
        weights = None
        depends = self.config.match_unit or self._linear_plan.least_rows or in_pause
        if depends and not (first and once):
            try:
                weights = fingerprint(self.model)
            except TypeError as error:
                if self.config.match_unit or in_pause:
                    logger.warning(f"Weights count as changed at each start, and after each pause: {error}")
        changed = weights is None or weights != self._weights
        if changed:
            if depends and not first:
                self._engine.new_epoch()
            self._session.runner.linears = None  # gone before the new ones take their place
        runner = self._session.runner
        runner.linears = pack(self.model, self._linear_plan, runner.linears)
        self._weights = weights
        return changed

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
        pause = Pause(self, requests=requests, kv=kv, release_memory=release_memory)
        if threading.current_thread() is self._thread:
            raise RuntimeError("pause() was called by the loop itself, which cannot wait for itself")
        self._fail_if_dead()
        if not self.is_running():
            raise RuntimeError("the manager does not run: there is nothing to pause, and start() looks at the weights")
        if not self._gate.hold(pause, self.is_running, timeout):
            self._fail_if_dead()
            if not self.is_running():
                raise RuntimeError("the manager was stopped before the loop came to rest")
            raise TimeoutError(f"the loop did not come to rest within {timeout} s (requests={requests!r})")
        try:
            with self._control:
                self._recomputes |= pause.kv == "recompute"
                if self._gate.rests:
                    self._begin(pause)
        except BaseException:
            pause.resume()
            raise
        return pause

    def _begin(self, pause: Pause) -> None:
        """Does what a pause asks for while the loop rests."""
        if pause.requests == "abort":
            self._engine.cancel_all(time.perf_counter())
        if pause.release_memory:
            self._engine.recompute_all()
            self._session.runner.linears = None
            self._session.cache.give_back()

    def is_paused(self) -> bool:
        """Whether the loop rests, as somebody holds a pause."""
        return self._gate.rests

    def resume(self, pause: Pause) -> None:
        """Ends a pause; see `Pause.resume`."""
        release_team()  # this thread may have trained; from here on the loop's computes
        with self._control:
            held = self._gate.held
            if pause not in held:
                return
            failed = None
            if held == [pause] and self._gate.rests:
                try:
                    self._session.cache.take_again()
                    if self._notice_weights(in_pause=True) and self._recomputes:
                        self._engine.recompute_all()
                    self._notice_model(always=False)
                except BaseException as error:
                    failed = error
                self._recomputes = False
            self._gate.let_go(pause, failed)
        if failed is not None:
            raise failed

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
        if self.is_running():
            with self.pause(kv=kv):
                self._weights = None
        else:
            self._weights = None

    def _fail_if_dead(self) -> None:
        if self.fatal_error is not None:
            raise RuntimeError("the manager's loop died: make a new one") from self.fatal_error

    def reset_prefix_cache(self) -> None:
        """Forgets all K and V that are kept for prompts to come. Requests that run go on undisturbed; nothing that was
        computed before the call is shared with a request that is scheduled after it.

        Where the weights of a start are others than those of the last one this happens by itself. Weights that change
        while the manager runs are noticed by nobody: call this right after the change. It packs them anew, too, where
        linear layers compute with packed copies of their weights, and the forward is recorded anew.
        """
        with self._control:
            runner = self._session.runner
            if runner.linears is not None:
                runner.linears = None
                runner.linears = pack(self.model, self._linear_plan)
            self._session.forward.forget()
            forget_knowledge(self.model)
            self._knowledge = Knowledge()
            self._weights = None  # the next start cannot tell whether these are they
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
        with self._control:
            paused_here = any(pause.thread == threading.get_ident() for pause in self._gate.held)
            if paused_here and block and timeout is None and not hard_stop and not self._engine.is_idle:
                raise RuntimeError(
                    "stop() would wait for requests that stand still while this thread holds a pause: resume it first, "
                    "or stop with hard_stop=True"
                )
            self._engine.close_inbox("the manager is stopped: call start() first")
            if self._thread is None:
                unkept = " It is not kept for the next session." if keep_for_next_session else ""
                logger.warning(f"The manager is not started.{unkept}")
                self._engine.fail_all("the manager was stopped before it was started", time.perf_counter())
                return
            self._stop_request.ask(StopLevel.HARD if hard_stop else StopLevel.DRAIN)
            self._engine.wake()
            self._keeps = keep_for_next_session
            rests = self._rests
        if rests:
            self._keep_if_asked()
        if block:
            self.join(timeout)

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the loop's thread, at most `timeout` seconds."""
        thread = self._thread
        if thread is None:
            return
        thread.join(timeout)
        if thread.is_alive():
            logger.warning(f"The loop did not end within {timeout} s.")
            return
        with self._control:
            if self._thread is thread:
                self._thread = None

    def destroy(self) -> None:
        """Stops at once and for good. May be called again."""
        let_go(self)
        if self.is_running():
            self.stop(hard_stop=True)
        with self._control:
            self._destroyed = True
            self._session.runner.linears = None
            self._engine.close_inbox("the manager was destroyed")
            self._engine.fail_all("the manager was destroyed", time.perf_counter())
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
            tenant: Whose it is, with `fairness="tenant"`. None: of those that name none.
            cache_salt: The prompt shares the prefix cache only with prompts of the same salt. None: with those without.

        Returns:
            The label. With `num_return_sequences` of the generation config, sequences beside the first are labelled
            `<label>__child#0` and so on, and to cancel `<label>` cancels all.

        Raises:
            TypeError: An argument of the wrong type.
            ValueError: A prompt that is empty, has an id outside the vocabulary or cannot fit; a bound below 1; a
                label that is in flight or whose output nobody took yet.
            QueueFull: `max_queue_size` requests wait already.
            RuntimeError: The loop died; its cause is chained.

        A stopped manager takes no requests: it says so in a warning, and the output comes failed at once. One that is
        not started yet takes them, and serves them from its start on.
        """
        label, _ = self._hand_over(
            input_ids,
            request_id,
            max_new_tokens,
            streaming=streaming,
            record_timestamps=record_timestamps,
            eos_token_id=eos_token_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
        )
        return label

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
    ) -> RequestHandle:
        """Hands a request over, as `add_request` does, and returns a handle: `handle.result()`, `await handle`,
        `for output in handle` or `async for output in handle`. Nobody else gets the request's outputs while it is kept.

        Raises:
            As `add_request`.
        """
        label, first = self._hand_over(
            input_ids,
            request_id,
            max_new_tokens,
            streaming=streaming,
            record_timestamps=record_timestamps,
            eos_token_id=eos_token_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            claims=True,
        )
        names = self.family(label)
        children = [RequestHandle(self, name, first + nth, ()) for nth, name in enumerate(names[1:], 1)]
        return RequestHandle(self, label, first, tuple(children))

    def _hand_over(
        self,
        input_ids: Prompt,
        request_id: str | None,
        max_new_tokens: int | None,
        *,
        streaming: bool,
        record_timestamps: bool,
        eos_token_id: int | list[int] | None,
        priority: int,
        cache_salt: str | None,
        tenant: str | None,
        claims: bool = False,
    ) -> tuple[str, int]:
        """Hands a request over; its label, and the id of its first sequence. With `claims` its events are for those
        that ask for them by name."""
        prompt = prompt_array(input_ids)
        if max_new_tokens is None:
            max_new_tokens = self.options.new_tokens_for(len(prompt), self._token_limit)
        elif isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int):
            raise TypeError(f"max_new_tokens is {max_new_tokens!r}, but must be an integer of at least 1")
        eos = self.options.eos_token_ids if eos_token_id is None else eos_tuple(eos_token_id)
        if request_id is not None and not isinstance(request_id, str):
            raise TypeError(f"request_id is {request_id!r}, but must be a string or None")
        self._check_rules(priority, cache_salt, tenant)
        with self._lock:
            (label,) = self._books.free_labels(1, self.family) if request_id is None else [request_id]
            labels = self.family(label)
            self._check_free(labels)
            first = self._enter(
                lambda: self._engine.submit(
                    prompt,
                    max_new_tokens=min(max_new_tokens, _MOST_NEW_TOKENS),
                    n=len(labels),
                    eos=list(eos),
                    sampling=self.options.sampling,
                    priority=priority,
                    tenant=tenant or "",
                    cache_salt=_salt(cache_salt),
                    streaming=streaming,
                    record_timestamps=record_timestamps,
                    record_logprobs=self.config.return_logprobs,
                ),
                labels,
                [prompt],
                streaming=streaming,
                record_timestamps=record_timestamps,
                numbered=request_id is None,
                claims=claims,
            )
        return label, first

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
    ) -> list[str]:
        """Hands several requests over: all of them, or none.

        Args:
            inputs: The prompts; or an array with one in each row.
            max_new_tokens: See `add_request`; so the others.
            streaming: See `add_request`.
            record_timestamps: See `add_request`.
            eos_token_id: See `add_request`.
            priority: See `add_request`.
            cache_salt: See `add_request`.
            tenant: See `add_request`.

        Returns:
            The labels, in order.

        Raises:
            TypeError, ValueError: As `add_request`, naming the prompt by its place.
            QueueFull: There is not room for all of them; none was taken.
            RuntimeError: The loop died; its cause is chained.
        """
        tokens, lengths, prompts = packed_prompts(inputs)
        if not len(lengths):
            return []
        bounds = self._bounds(lengths, max_new_tokens)
        eos = self.options.eos_token_ids if eos_token_id is None else eos_tuple(eos_token_id)
        self._check_rules(priority, cache_salt, tenant)
        wanted = len(lengths) * self.options.num_return_sequences
        if 0 < self.config.max_queue_size < wanted:
            raise ValueError(
                f"{wanted} sequences can never join a queue of {self.config.max_queue_size} (max_queue_size) at once: "
                "hand over fewer at a time"
            )
        with self._lock:
            labels = self._books.free_labels(len(lengths), self.family)
            n = self.options.num_return_sequences
            every = labels if n == 1 else [name for label in labels for name in self.family(label)]
            self._check_free(every if n > 1 else [])
            self._enter(
                lambda: self._engine.submit_many(
                    tokens,
                    lengths,
                    bounds,
                    n=n,
                    eos=list(eos),
                    sampling=self.options.sampling,
                    priority=priority,
                    tenant=tenant or "",
                    cache_salt=_salt(cache_salt),
                    streaming=streaming,
                    record_timestamps=record_timestamps,
                    record_logprobs=self.config.return_logprobs,
                ),
                every,
                prompts,
                streaming=streaming,
                record_timestamps=record_timestamps,
                numbered=True,
            )
        return labels

    def _enter(
        self,
        submit: Callable[[], int],
        labels: Sequence[str],
        prompts: Prompts,
        *,
        streaming: bool,
        record_timestamps: bool,
        numbered: bool,
        claims: bool = False,
    ) -> int:
        """Submits sequences and enters them into the books; those that come too late get their failed outputs. Returns
        the id of the first."""
        created = time.perf_counter()
        kept = prompts if streaming else None
        try:
            first = submit()
        except _native.EngineClosed as closed:
            first, kept = self._refused(closed, labels, created), prompts
        if isinstance(kept, np.ndarray):
            kept = kept.copy()  # the caller's may change
        self._books.add(
            first,
            labels,
            kept,
            n=len(labels) // len(prompts),
            created=created,
            record_timestamps=record_timestamps,
            numbered=numbered,
        )
        if claims or self._handlers.awaits:
            for sequence, label in enumerate(labels, first):
                if claims:
                    self._engine.claim(sequence)
                self._handlers.come(label, sequence)
        return first

    def _check_rules(self, priority: int, cache_salt: str | None, tenant: str | None) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority is {priority!r}, but must be an integer")
        if abs(priority) > _MOST_PRIORITY:
            raise ValueError(f"priority is {priority}, but must be between -{_MOST_PRIORITY} and {_MOST_PRIORITY}")
        for name, text in (("cache_salt", cache_salt), ("tenant", tenant)):
            if text is not None and not isinstance(text, str):
                raise TypeError(f"{name} is {text!r}, but must be a string or None")
        if tenant is not None and self.config.fairness is None:
            raise ValueError(f"tenant is {tenant!r}, but fairness is None: set fairness='tenant' in the config")

    def _check_free(self, labels: Sequence[str]) -> None:
        for taken in labels:
            if taken in self._books:
                raise ValueError(
                    f"request_id {taken!r} is taken: a request of that name is in flight or waits to be collected"
                )

    def family(self, label: str) -> list[str]:
        """The labels of a request's sequences, its own first."""
        return [label, *(f"{label}__child#{child}" for child in range(self.options.num_return_sequences - 1))]

    def _bounds(self, lengths: npt.NDArray[np.int64], max_new_tokens: int | None) -> npt.NDArray[np.int64]:
        if max_new_tokens is not None:
            if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int):
                raise TypeError(f"max_new_tokens is {max_new_tokens!r}, but must be an integer of at least 1")
            return np.full(len(lengths), min(max_new_tokens, _MOST_NEW_TOKENS), np.int64)
        kinds, of_prompt = np.unique(lengths, return_inverse=True)
        bounds = [min(self.options.new_tokens_for(int(kind), self._token_limit), _MOST_NEW_TOKENS) for kind in kinds]
        return np.array(bounds, np.int64)[of_prompt]

    def _refused(self, closed: _native.EngineClosed, labels: Sequence[str], now: float) -> int:
        """Gives sequences that come too late their failed outputs; the id of the first."""
        if self.fatal_error is not None:
            raise RuntimeError(str(closed)) from self.fatal_error
        logger.warning(f"Request {labels[0]!r} is refused: {closed}")
        return min(self._engine.refuse(str(closed), now) for _ in labels)

    def checked(self, inputs: Sequence[Prompt], max_new_tokens: int | None = None) -> list[npt.NDArray[np.int64]]:
        """Prompts as arrays, each fit to be added.

        Raises:
            TypeError, ValueError: As `add_request`, naming the prompt by its index.
        """
        prompts = [prompt_array(prompt, f"inputs[{index}]") for index, prompt in enumerate(inputs)]
        for index, prompt in enumerate(prompts):
            bound = max_new_tokens
            if bound is None:
                bound = self.options.new_tokens_for(len(prompt), self._token_limit)
            try:
                self._engine.check(prompt, min(bound, _MOST_NEW_TOKENS))
            except ValueError as error:
                raise ValueError(f"inputs[{index}]: {error}") from None
        return prompts

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
        if request_id is not None:
            with self._claimed(request_id) as ordinal:
                return self._take_for(ordinal, timeout)
        deadline = _Deadline(timeout)
        while self._waited(lambda: self._engine.wait_next(deadline.left)):
            with self._lock:
                event = self._engine.take_next()
                if event is not None:
                    return self._books.output(event)
        return None

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
        with self._claimed(request_id) as ordinal:
            while (output := self._take_for(ordinal, None)) is not None:
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
            RuntimeError: No event loop runs in this thread; or the manager was destroyed.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._destroyed:
                raise RuntimeError("the manager was destroyed: make a new one")
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

    @contextlib.contextmanager
    def _claimed(self, request_id: str) -> Iterator[int]:
        with self._lock:
            # The last output is taken under this lock too: a claim on what has ended cannot come to be.
            ordinal = self._books.id_of(request_id)
            if ordinal in self._handlers:
                raise RuntimeError(f"request {request_id!r} has a result handler, which gets its outputs")
            self._engine.claim(ordinal)
        try:
            yield ordinal
        finally:
            self._engine.unclaim(ordinal)

    def _take_for(self, ordinal: int, timeout: float | None) -> GenerationOutput | None:
        deadline = _Deadline(timeout)
        while self._waited(lambda: self._engine.wait_for(ordinal, deadline.left)):
            with self._lock:
                event = self._engine.take_for(ordinal)
                if event is not None:
                    return self._books.output(event)
                if not self._books.is_open(ordinal):
                    raise KeyError("the last output of the request was taken by another reader")
        return None

    def _waited(self, wait: Callable[[], bool]) -> bool:
        """Whether there is something to take; not, when time is up or the manager is stopped."""
        try:
            return wait()
        except _native.EngineClosed as closed:
            if self.fatal_error is not None:
                raise RuntimeError(str(closed)) from self.fatal_error
            return False

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
        """What was learned and chosen, one fact a line."""
        facts, geometry, config = self.facts, self.geometry, self.config
        blocks = _resolved(config.num_blocks)
        batch = self.batch_cost.of(_resolved(config.max_batch_tokens), _resolved(config.max_requests_per_batch))
        host_bytes = config.swap_blocks * geometry.block_bytes
        shared = sum(call.reads_from != call.ordinal for call in facts.calls)
        lines = {
            "model": f"{type(self.model).__name__}, {self.model.dtype}, {self.model.device}",
            "attention calls": f"{len(facts.calls)} ({shared} read the pages of another)",
            "kinds": len({call.kind for call in facts.calls}),
            "groups": geometry.described(),
            "attention backend": f"{config.attention}: {self._session.runner.backend.described}",
            "linear layers": self._linear_plan.described(),
            "forward": self._session.forward.describe(),
            "page_size": config.page_size,
            "num_blocks": blocks,
            "prefix cache": f"shared by {config.match_unit} tokens, {config.cache_eviction}"
            if config.match_unit
            else "off",
            "host memory": f"{config.swap_blocks} blocks ({host_bytes / 2**20:,.1f} MiB) for victims"
            if config.swap_blocks
            else "none for victims",
            "cache": f"{blocks * geometry.page_size:,} tokens, {self.cache_bytes / 2**20:,.1f} MiB",
            "max_batch_tokens": config.max_batch_tokens,
            "max_requests_per_batch": config.max_requests_per_batch,
            "a full batch": f"at most {batch / 2**20:,.1f} MiB beside the cache",
            "scheduler_type": config.scheduler_type,
            "fairness": config.fairness or "by arrival",
            "safety_margin": config.safety_margin,
            "positions": facts.max_positions or "unbounded",
            "seed": config.seed,
        }
        width = max(map(len, lines))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pool, trash included."""
        return self._session.cache.nbytes

    @property
    def _token_limit(self) -> int:
        """Tokens of a sequence that model and pool bear."""
        bounds = (self._engine.token_capacity, self.facts.max_positions, self.facts.limit)
        return min(bound for bound in bounds if bound is not None)

    # -------------------------------------------------------------- the thread

    def _run(self) -> None:
        cause = "the manager is stopped"
        try:
            with self._modes.entered():
                while self._gate.rest(self._stop_request):
                    with evaluating(self.model):
                        if not run_sync(self._session, self._stop_request, self._gate.is_due):
                            break
                    release_team()  # whoever holds the pause may compute now
            self._knowledge.give_recordings(self._session.forward.recordings)
        except BaseException as error:
            logger.error("the loop died", exc_info=error)
            self.fatal_error = error
            self._session.runner.linears = None  # no start will follow
            cause = f"the loop died: {type(error).__name__}: {error}"
            self._engine.reopen()  # the cause of a death comes before that of a stop
            self._engine.close_inbox(cause)
            self._engine.fail_all(cause, time.perf_counter())
        finally:
            # Whatever happened above, no reader waits for what will not come.
            self._gate.end()
            self._engine.close_outbox(cause)
            _running.discard(self)
            with self._control:
                self._rests = True
            self._keep_if_asked()

    def _keep_if_asked(self) -> None:
        """Gives a manager at rest to its model, if the last stop asked for that. One that is kept while it still runs
        would have its requests ended by the next."""
        if self._keeps and not self._destroyed and self.fatal_error is None:
            keep(self)


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


class _Deadline:
    """Seconds that are left of a time-out; None: there is none."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.perf_counter() + timeout

    @property
    def left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.perf_counter())


def _salt(cache_salt: str | None) -> str:
    # An empty salt is a salt, too.
    return "" if cache_salt is None else f"={cache_salt}"


def _resolved(value: int | None) -> int:
    if value is None:
        raise AssertionError("a resolved config leaves no size open")
    return value


# Managers whose loop runs: a process that ends must not tear torch down under them.
_running: "weakref.WeakSet[ContinuousBatchingManager]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for manager in list(_running):
        manager.stop(hard_stop=True, timeout=10)
