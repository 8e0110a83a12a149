"""`ContinuousBatchingManager`: requests in, outputs out, and the thread that runs the loop between them."""

import atexit
import contextlib
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from chairlift import _native
from chairlift.attention.choice import choose_backend
from chairlift.config import ContinuousBatchingConfig
from chairlift.engine.cache import geometry_of
from chairlift.engine.check import check_packed
from chairlift.engine.loop import StopLevel, StopRequest, run_sync
from chairlift.engine.openmp import release_team
from chairlift.engine.session import Session
from chairlift.engine.sizing import batch_cost, resolve
from chairlift.outputs import GenerationOutput, RequestStatus, Stats, WorkloadHints
from chairlift.probe import evaluating, learn
from chairlift.prompts import Prompt, prompt_array
from chairlift.sampling.options import GenerationOptions, eos_tuple

logger = logging.get_logger(__name__)

_STATUS = {
    "stop": RequestStatus.FINISHED,
    "length": RequestStatus.FINISHED,
    "cancelled": RequestStatus.CANCELLED,
    "error": RequestStatus.FAILED,
}


@dataclass
class _Record:
    """What the manager keeps of a request until its terminal event is taken."""

    label: str
    prompt: list[int]
    created: float
    record_timestamps: bool
    # What a streaming request produced so far.
    tokens: list[int]
    logprobs: list[float]
    timestamps: list[float]


class ContinuousBatchingManager:
    """Serves one model: `start`, add requests from any thread, take their outputs, `stop`.

    The model stays the caller's: it is not changed, and other threads may call it while the manager runs. While it
    runs the model is in evaluation mode; afterwards it is as it was before.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: WorkloadHints | None = None,
    ) -> None:
        """Learns the model, resolves the config and allocates the cache. No thread is started.

        Args:
            model: A causal language model of transformers.
            generation_config: How requests generate unless they say otherwise. None: the model's.
            continuous_batching_config: Ours or transformers' own. None: the defaults.
            workload_hints: What is known of the requests to come.

        Raises:
            TypeError: An argument of the wrong type.
            ValueError: The model cannot be served (and why), or a value is out of bounds or not served yet.
        """
        config = ContinuousBatchingConfig.of(continuous_batching_config)
        self.model = model
        self.facts = learn(model)
        self.generation_config = generation_config if generation_config is not None else model.generation_config
        self.options = GenerationOptions.resolve(
            model, generation_config, drop_unsupported_processors=config.drop_unsupported_processors
        )
        self.geometry = geometry_of(self.facts.calls, config.page_size)
        backend = choose_backend(model.config._attn_implementation, model.device, config.page_size)
        check_packed(model, self.facts, self.geometry, backend)
        hints = WorkloadHints.of(workload_hints)
        largest_call = max(call.kind.token_bytes for call in self.facts.calls)
        longest = hints.max_prompt_length + hints.max_generated_length or self.facts.limit or config.page_size
        self.batch_cost = batch_cost(self.facts, backend.scratch_bytes(largest_call, longest))
        self.config = resolve(config, hints, self.facts, self.geometry, self.batch_cost)
        self.attention = backend.name
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
        )
        self._engine = self._session.engine
        self._thread: threading.Thread | None = None
        self._stop_request = StopRequest()
        self._lock = threading.Lock()
        self._records: dict[int, _Record] = {}
        self._ids: dict[str, int] = {}
        self._next_label = 0
        self._destroyed = False
        self.fatal_error: BaseException | None = None
        self._refuse("the manager is not started: call start() first")

    # ------------------------------------------------------------------ control

    def is_running(self) -> bool:
        """Whether the loop's thread lives."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Starts the loop's thread, in this thread's autocast, default device and inference mode.

        Raises:
            RuntimeError: The manager was destroyed, or its loop died.
        """
        if self._destroyed:
            raise RuntimeError("the manager was destroyed and cannot be started again: make a new one")
        if self.fatal_error is not None:
            raise RuntimeError(
                "the manager's loop died and cannot be started again: make a new one"
            ) from self.fatal_error
        if self.is_running():
            warnings.warn("the manager runs already", UserWarning, stacklevel=2)
            return
        self._stop_request = StopRequest()
        self._engine.reopen()
        _running.add(self)
        release_team()  # this thread probed the model; from here on the loop's computes
        self._thread = threading.Thread(target=self._run, args=(_CallersModes(),), name="chairlift-loop", daemon=True)
        self._thread.start()

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
            keep_for_next_session: Not served yet.
            hard_stop: Queued and running requests fail.

        Raises:
            ValueError: `keep_for_next_session` is set.
        """
        if keep_for_next_session:
            raise ValueError("keep_for_next_session=True is not served yet: keep the manager and call start() again")
        if self._thread is None:
            logger.warning("The manager is not started.")
            return
        self._refuse("the manager is stopped: call start() first")
        self._stop_request.ask(StopLevel.HARD if hard_stop else StopLevel.DRAIN)
        self._engine.wake()
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
        else:
            self._thread = None

    def destroy(self) -> None:
        """Stops at once and for good. May be called again."""
        if self.is_running():
            self.stop(hard_stop=True)
        self._destroyed = True
        self._refuse("the manager was destroyed")

    def _refuse(self, cause: str) -> None:
        self._engine.close_inbox(cause)

    # ----------------------------------------------------------------- requests

    def add_request(
        self,
        input_ids: Prompt,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
    ) -> str:
        """Hands a request over.

        Args:
            input_ids: The prompt: a flat sequence of token ids (list, numpy array or tensor).
            request_id: Its label. None: `req_N`.
            max_new_tokens: Bound on the generated tokens. None: the generation config's.
            streaming: An output for each token, not only at the end.
            record_timestamps: Keep the time of each token.
            eos_token_id: Tokens that end it. None: the generation config's; negative: none.

        Returns:
            The label.

        Raises:
            TypeError: An argument of the wrong type.
            ValueError: A prompt that is empty, has an id outside the vocabulary or cannot fit; a bound below 1; a
                label that is in flight or whose output nobody took yet.
            QueueFull: `max_queue_size` requests wait already.
            RuntimeError: The loop died; its cause is chained.
            EngineClosed: The manager does not run.
        """
        prompt = prompt_array(input_ids)
        if max_new_tokens is None:
            max_new_tokens = self.options.new_tokens_for(len(prompt), self._token_limit)
        elif isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int):
            raise TypeError(f"max_new_tokens is {max_new_tokens!r}, but must be an integer of at least 1")
        eos = self.options.eos_token_ids if eos_token_id is None else eos_tuple(eos_token_id)
        if request_id is not None and not isinstance(request_id, str):
            raise TypeError(f"request_id is {request_id!r}, but must be a string or None")
        with self._lock:
            label = self._free_label() if request_id is None else request_id
            if label in self._ids:
                raise ValueError(
                    f"request_id {label!r} is taken: a request of that name is in flight or waits to be collected"
                )
            created = time.perf_counter()
            with self._chained_to_the_cause():
                ordinal = self._engine.submit(
                    prompt,
                    max_new_tokens=min(max_new_tokens, 2**62),
                    eos=list(eos),
                    sampling=self.options.sampling,
                    streaming=streaming,
                    record_timestamps=record_timestamps,
                    record_logprobs=self.config.return_logprobs,
                )
            self._ids[label] = ordinal
            self._records[ordinal] = _Record(label, prompt.tolist(), created, record_timestamps, [], [], [])
        return label

    def add_requests(
        self,
        inputs: Sequence[Prompt],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
    ) -> list[str]:
        """Hands several requests over; all are checked before the first is.

        Args:
            inputs: The prompts.
            max_new_tokens: See `add_request`; so the others.
            streaming: See `add_request`.
            record_timestamps: See `add_request`.

        Returns:
            The labels, in order.

        Raises:
            TypeError, ValueError: As `add_request`, naming the prompt.
        """
        prompts = [prompt_array(prompt, f"inputs[{index}]") for index, prompt in enumerate(inputs)]
        for index, prompt in enumerate(prompts):
            bound = max_new_tokens
            if bound is None:
                bound = self.options.new_tokens_for(len(prompt), self._token_limit)
            try:
                self._engine.check(prompt, bound)
            except ValueError as error:
                raise ValueError(f"inputs[{index}]: {error}") from None
        return [
            self.add_request(
                prompt,
                max_new_tokens=max_new_tokens,
                streaming=streaming,
                record_timestamps=record_timestamps,
            )
            for prompt in prompts
        ]

    def cancel_request(self, request_id: str) -> None:
        """Ends a request; its output comes with `finish_reason` `cancelled`. One that ended is left alone.

        Raises:
            KeyError: No request of that label is in flight or has an output to be taken.
        """
        self._engine.cancel(self._ordinal(request_id))

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
            RuntimeError: The loop died; its cause is chained.
        """
        try:
            if request_id is None:
                event = self._engine.take_next(timeout)
            else:
                event = self._engine.take_for(self._ordinal(request_id), timeout)
        except _native.EngineClosed as closed:
            if self.fatal_error is not None:
                raise RuntimeError(str(closed)) from self.fatal_error
            return None
        return None if event is None else self._output(event)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come, until the manager is stopped and the last is taken."""
        while True:
            output = self.get_result(timeout=0.1)
            if output is not None:
                yield output
            elif not self.is_running() and not self._engine.undelivered:
                return

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Outputs of one request as they come, until its last.

        Raises:
            KeyError: No request of that label is in flight or has an output to be taken.
        """
        self._ordinal(request_id)
        while True:
            output = self.get_result(request_id)
            if output is None:
                return
            yield output
            if output.is_finished():
                return

    def _output(self, event: _native.Event) -> GenerationOutput:
        reason = event.finish_reason
        with self._lock:
            record = self._records[event.request]
            if reason is not None:
                del self._records[event.request], self._ids[record.label]
        output = GenerationOutput(record.label, record.prompt, created_time=record.created)
        if reason is None:
            record.tokens.extend(event.tokens)
            record.logprobs.extend(event.logprobs)
            record.timestamps.extend(event.timestamps)
            output.generated_tokens, output.logprobs = record.tokens[:], record.logprobs[:]
            output.status = RequestStatus.DECODING
            output.timestamps = record.timestamps[:] if record.record_timestamps else None
            return output
        output.generated_tokens, output.logprobs = event.tokens, event.logprobs
        output.timestamps = event.timestamps if record.record_timestamps else None
        output.finish_reason = reason  # type: ignore[assignment]  # one of the four
        output.status = _STATUS[reason]
        output.error = event.error
        started, ended = event.started, event.ended
        output.lifespan = (-1 if started is None else started, -1 if ended is None else ended)
        return output

    # ------------------------------------------------------------------- facts

    def stats(self) -> Stats:
        """Counters and gauges, read without stopping the engine."""
        return Stats(**self._engine.stats())

    def describe(self) -> str:
        """What was learned and chosen, one fact a line."""
        facts, geometry, config = self.facts, self.geometry, self.config
        blocks = _resolved(config.num_blocks)
        batch = self.batch_cost.of(_resolved(config.max_batch_tokens), _resolved(config.max_requests_per_batch))
        shared = sum(call.reads_from != call.ordinal for call in facts.calls)
        lines = {
            "model": f"{type(self.model).__name__}, {self.model.dtype}, {self.model.device}",
            "attention calls": f"{len(facts.calls)} ({shared} read the pages of another)",
            "kinds": len({call.kind for call in facts.calls}),
            "groups": geometry.num_groups,
            "attention backend": self.attention,
            "page_size": config.page_size,
            "num_blocks": blocks,
            "cache": f"{blocks * geometry.page_size:,} tokens, {self.cache_bytes / 2**20:,.1f} MiB",
            "padding": f"{geometry.padding_bytes / geometry.model_block_bytes:.1%} of a block",
            "max_batch_tokens": config.max_batch_tokens,
            "max_requests_per_batch": config.max_requests_per_batch,
            "a full batch": f"at most {batch / 2**20:,.1f} MiB beside the cache",
            "scheduler_type": config.scheduler_type,
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
        capacity = _resolved(self.config.num_blocks) * self.config.page_size
        bounds = (capacity, self.facts.max_positions, self.facts.limit)
        return min(bound for bound in bounds if bound is not None)

    def _ordinal(self, request_id: str) -> int:
        with self._lock:
            if request_id not in self._ids:
                raise KeyError(f"no request {request_id!r}: it was never added, or its last output was taken")
            return self._ids[request_id]

    def _free_label(self) -> str:
        while True:
            label = f"req_{self._next_label}"
            self._next_label += 1
            if label not in self._ids:
                return label

    @contextlib.contextmanager
    def _chained_to_the_cause(self) -> Iterator[None]:
        try:
            yield
        except _native.EngineClosed as closed:
            if self.fatal_error is not None:
                raise RuntimeError(str(closed)) from self.fatal_error
            raise

    # -------------------------------------------------------------- the thread

    def _run(self, modes: "_CallersModes") -> None:
        try:
            with modes.entered(), evaluating(self.model):
                run_sync(self._session, self._stop_request)
            cause = "the manager is stopped"
        except BaseException as error:
            logger.error("the loop died", exc_info=error)
            self.fatal_error = error
            cause = f"the loop died: {type(error).__name__}: {error}"
            self._engine.reopen()  # the cause of a death comes before that of a stop
            self._engine.close_inbox(cause)
            self._engine.fail_all(cause, time.perf_counter())
        finally:
            _running.discard(self)
        self._engine.close_outbox(cause)


class _CallersModes:
    """The thread-local modes of the thread that made it, to be entered in another."""

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._default_device = torch.get_default_device()
        device_types = {"cpu", torch.get_default_device().type}
        self._autocast = [
            (device_type, torch.get_autocast_dtype(device_type))
            for device_type in sorted(device_types)
            if torch.is_autocast_enabled(device_type)
        ]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.no_grad())
            if self._default_device.type != "cpu":
                stack.enter_context(self._default_device)
            for device_type, dtype in self._autocast:
                stack.enter_context(torch.autocast(device_type, dtype=dtype))
            yield


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
