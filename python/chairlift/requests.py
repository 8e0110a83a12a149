"""The way in: what users ask for is checked here and handed to the engine."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers.utils import logging

from chairlift import _native
from chairlift.books import Books
from chairlift.config import ContinuousBatchingConfig
from chairlift.handlers import Handlers
from chairlift.prompts import Prompt, Prompts, packed_prompts, prompt_array
from chairlift.sampling.options import GenerationOptions, SamplingOptions, eos_tuple
from chairlift.worker import Worker

logger = logging.get_logger(__name__)

# No bound that anybody means is beyond it, and it fits the engine's numbers.
_MOST_NEW_TOKENS = 2**62
_MOST_PRIORITY = 2**31 - 1


@dataclass(frozen=True)
class Terms:
    """What is asked for beside the prompt; see `ContinuousBatchingManager.add_request`."""

    max_new_tokens: int | None
    streaming: bool
    record_timestamps: bool
    eos_token_id: int | list[int] | None
    priority: int
    cache_salt: str | None
    tenant: str | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None

    @property
    def sampling(self) -> dict[str, Any]:
        """What is asked for of the choice of tokens."""
        return {name: getattr(self, name) for name in ("do_sample", "temperature", "top_k", "top_p")}

    def __post_init__(self) -> None:
        bound, priority = self.max_new_tokens, self.priority
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
            raise TypeError(f"max_new_tokens is {bound!r}, but must be an integer of at least 1")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority is {priority!r}, but must be an integer")
        if abs(priority) > _MOST_PRIORITY:
            raise ValueError(f"priority is {priority}, but must be between -{_MOST_PRIORITY} and {_MOST_PRIORITY}")
        for name in ("cache_salt", "tenant"):
            check_text(name, getattr(self, name), optional=True)


def check_text(name: str, value: object, *, optional: bool = False) -> None:
    """
    Raises:
        TypeError: Not a string, nor None where that may be.
    """
    if not isinstance(value, str) and not (optional and value is None):
        raise TypeError(f"{name} is {value!r}, but must be a string{' or None' if optional else ''}")


class Requests:
    """Hands requests to the engine and enters them into the books."""

    def __init__(
        self,
        engine: _native.Engine,
        books: Books,
        lock: threading.Lock,
        handlers: Handlers,
        config: ContinuousBatchingConfig,
        worker: Worker,
        most_tokens: int,
    ) -> None:
        """
        Args:
            engine: Where they go.
            books: Where they are entered.
            lock: Of the books.
            handlers: Those that wait for requests to come.
            config: The resolved one.
            worker: What runs the engine.
            most_tokens: Tokens of a sequence that model and pool bear.
        """
        self._engine = engine
        self._books = books
        self._lock = lock
        self._handlers = handlers
        self._config = config
        self._worker = worker
        self._most_tokens = most_tokens
        self._told = False

    def family(self, label: str, options: GenerationOptions) -> list[str]:
        """The labels of a request's sequences, its own first."""
        return [label, *(f"{label}__child#{child}" for child in range(options.num_return_sequences - 1))]

    def add(
        self, input_ids: Prompt, label: str | None, terms: Terms, options: GenerationOptions, *, claims: bool = False
    ) -> tuple[list[str], int]:
        """Hands a request over.

        Args:
            input_ids: The prompt.
            label: The request's label. None: one that is free.
            terms: What is asked for.
            options: How it generates.
            claims: Its outputs are for those that ask for them by name.

        Returns:
            The labels of its sequences, and the id of the first.
        """
        check_text("request_id", label, optional=True)
        prompt = prompt_array(input_ids)
        bound = terms.max_new_tokens
        if bound is None:
            bound = options.new_tokens_for(len(prompt), self._most_tokens)
        common = self._common(terms, options)
        with self._lock:
            (name,) = self._free_labels(1, options) if label is None else [label]
            labels = self.family(name, options)
            self._check_free(labels)
            first = self._enter(
                lambda: self._engine.submit(prompt, max_new_tokens=min(bound, _MOST_NEW_TOKENS), **common),
                labels,
                [prompt],
                terms,
                numbered=label is None,
                claims=claims,
            )
        return labels, first

    def add_many(self, inputs: Any, terms: Terms, options: GenerationOptions) -> list[str]:
        """Hands several requests over: all of them, or none. Returns their labels."""
        tokens, lengths, prompts = packed_prompts(inputs)
        if not len(lengths):
            return []
        bounds = self._bounds(lengths, terms, options)
        common = {**self._common(terms, options), "sorts": bool(self._config.match_unit)}
        n = options.num_return_sequences
        wanted = len(lengths) * n
        if 0 < self._config.max_queue_size < wanted:
            raise ValueError(
                f"{wanted} sequences can never join a queue of {self._config.max_queue_size} (max_queue_size) at once: "
                "hand over fewer at a time"
            )
        with self._lock:
            labels = self._free_labels(len(lengths), options)
            every = labels
            if n > 1:
                every = [name for label in labels for name in self.family(label, options)]
                self._check_free(every)
            self._enter(
                lambda: self._engine.submit_many(tokens, lengths, bounds, **common),
                every,
                prompts,
                terms,
                numbered=True,
            )
        return labels

    def checked(
        self, inputs: Sequence[Prompt], max_new_tokens: int | None, options: GenerationOptions
    ) -> list[npt.NDArray[np.int64]]:
        """Prompts as arrays, each fit to be added."""
        prompts = [prompt_array(prompt, f"inputs[{index}]") for index, prompt in enumerate(inputs)]
        for index, prompt in enumerate(prompts):
            bound = max_new_tokens
            if bound is None:
                bound = options.new_tokens_for(len(prompt), self._most_tokens)
            try:
                self._engine.check(prompt, min(bound, _MOST_NEW_TOKENS))
            except ValueError as error:
                raise ValueError(f"inputs[{index}]: {error}") from None
        return prompts

    def _common(self, terms: Terms, options: GenerationOptions) -> dict[str, Any]:
        """What the engine is told of one request as of many."""
        self._worker.fail_if_forked()
        if terms.tenant is not None and self._config.fairness is None:
            raise ValueError(f"tenant is {terms.tenant!r}, but fairness is None: set fairness='tenant' in the config")
        sampling = options.sampling.with_asked(**terms.sampling)
        self._tell_of_processors(sampling, options)
        eos = options.eos_token_ids if terms.eos_token_id is None else eos_tuple(terms.eos_token_id)
        return {
            "n": options.num_return_sequences,
            "eos": list(eos),
            "sampling": sampling.native(),
            "priority": terms.priority,
            "tenant": terms.tenant or "",
            # An empty salt is a salt, too.
            "cache_salt": "" if terms.cache_salt is None else f"={terms.cache_salt}",
            "streaming": terms.streaming,
            "record_timestamps": terms.record_timestamps,
            "record_logprobs": self._config.return_logprobs,
        }

    def _tell_of_processors(self, sampling: SamplingOptions, options: GenerationOptions) -> None:
        if sampling == options.sampling or self._config.per_request_processors or self._told:
            return
        self._told = True
        logger.warning(
            "per_request_processors is False, but requests ask for values of their own: each gets what it asked for."
        )

    def _free_labels(self, count: int, options: GenerationOptions) -> list[str]:
        return self._books.free_labels(count, lambda label: self.family(label, options))

    def _check_free(self, labels: Sequence[str]) -> None:
        for taken in labels:
            if taken in self._books:
                raise ValueError(
                    f"request_id {taken!r} is taken: a request of that name is in flight or waits to be collected"
                )

    def _bounds(
        self, lengths: npt.NDArray[np.int64], terms: Terms, options: GenerationOptions
    ) -> npt.NDArray[np.int64]:
        if terms.max_new_tokens is not None:
            return np.full(len(lengths), min(terms.max_new_tokens, _MOST_NEW_TOKENS), np.int64)
        kinds, of_prompt = np.unique(lengths, return_inverse=True)
        bounds = [min(options.new_tokens_for(int(kind), self._most_tokens), _MOST_NEW_TOKENS) for kind in kinds]
        return np.array(bounds, np.int64)[of_prompt]

    def _enter(
        self,
        submit: Callable[[], int],
        labels: Sequence[str],
        prompts: Prompts,
        terms: Terms,
        *,
        numbered: bool,
        claims: bool = False,
    ) -> int:
        """Submits sequences and enters them into the books; those that come too late get their failed outputs. Returns
        the id of the first.

        Args:
            submit: Returns it.
            labels: Of the sequences.
            prompts: The prompts, each of as many sequences.
            terms: What is asked for.
            numbered: Whether the labels were given, and not chosen.
            claims: The outputs are for those that ask for them by name.
        """
        created = time.perf_counter()
        kept: Prompts | None = prompts if terms.streaming else None
        n = len(labels) // len(prompts)
        numbered_to = labels[-n] if numbered else None
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
            n=n,
            created=created,
            record_timestamps=terms.record_timestamps,
            numbered_to=numbered_to,
        )
        if claims or self._handlers.awaits:
            for sequence, label in enumerate(labels, first):
                if claims:
                    self._engine.claim(sequence)
                self._handlers.come(label, sequence)
        return first

    def _refused(self, closed: _native.EngineClosed, labels: Sequence[str], now: float) -> int:
        """Gives sequences that come too late their failed outputs; the id of the first."""
        self._worker.fail_if_dead()
        logger.warning(f"Request {labels[0]!r} is refused: {closed}")
        return min(self._engine.refuse(str(closed), now) for _ in labels)
