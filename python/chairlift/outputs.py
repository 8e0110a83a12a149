"""What users get back: outputs, their status, and the hints they give about their workload."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RequestStatus(IntEnum):
    """Where a request stands."""

    PENDING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3
    FAILED = 4
    CANCELLED = 5


class Later:
    """A list that is made when somebody looks: most readers of a stream look at what is new."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __reduce__(self) -> tuple[Any, ...]:
        made = self.make()
        return (list, (made,)) if isinstance(made, list) else (_nothing, ())


def leading(items: list[Any], count: int) -> Later:
    """The first items of a list that only grows."""
    return Later(lambda: items[:count])


def _nothing() -> None:
    return None


class _MadeWhenLookedAt:
    """An attribute that may be given as a `Later`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, output: Any, _: type | None = None) -> Any:
        if output is None:
            raise AttributeError(self._name)  # the class itself has no such attribute
        values = output.__dict__
        value = values[self._name]
        if isinstance(value, Later):
            value = values[self._name] = value.make()
        return value

    def __set__(self, output: Any, value: Any) -> None:
        output.__dict__[self._name] = value


@dataclass
class GenerationOutput:
    """What a request produced so far, or in all once it is finished.

    Attributes:
        request_id: The request's label.
        prompt_ids: The prompt's token ids.
        generated_tokens: The generated token ids; an end token that came up is the last of them.
        logprobs: The logarithm of each generated token's probability, with `return_logprobs`; else empty.
        error: What went wrong, if anything did.
        status: Where the request stands.
        created_time: When it was submitted, in seconds of `time.perf_counter`.
        lifespan: When it was first scheduled and when it ended; -1 for what has not happened.
        timestamps: When each token was there, with `record_timestamps`; else None.
        finish_reason: How it ended: `stop` (an end token), `length` (a bound on tokens), `cancelled` or `error`;
            None while it goes on.
        cached_tokens: Tokens of the prompt whose K and V were found in the prefix cache when it was first scheduled.
        epoch: The version of the weights that chose the newest token. It rises each time the manager finds (or is told)
            that they changed, and when the prefix cache is reset.
        epochs: That of each generated token, where they differ; else None.
        new_tokens: The generated tokens that no output before brought: one each time while a request streams, all of
            them where the end is its only output.
        new_logprobs: Their logprobs.
    """

    request_id: str
    prompt_ids: list[int] = field(default_factory=list)
    generated_tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    status: RequestStatus = RequestStatus.PENDING
    created_time: float = field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1, -1)
    timestamps: list[float] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    epoch: int = 0
    epochs: list[int] | None = None
    new_tokens: list[int] = field(default_factory=list)
    new_logprobs: list[float] = field(default_factory=list)

    def is_finished(self) -> bool:
        """Whether nothing more will come: it finished, failed or was cancelled."""
        return self.status >= RequestStatus.FINISHED


# After the class was made: its fields have the defaults that they say.
for _name in ("prompt_ids", "generated_tokens", "logprobs", "timestamps", "epochs"):
    _attribute = _MadeWhenLookedAt()
    _attribute.__set_name__(GenerationOutput, _name)
    setattr(GenerationOutput, _name, _attribute)


@dataclass(frozen=True)
class WorkloadHints:
    """What is known about the requests to come; 0 where nothing is. Defaults follow from it.

    Attributes:
        max_prompt_length: Tokens of the longest prompt.
        max_generated_length: Tokens that a request generates at most.
        num_requests: Requests that will be submitted.
        num_tokens: Prompt and generated tokens of all of them together.
    """

    max_prompt_length: int = 0
    max_generated_length: int = 0
    num_requests: int = 0
    num_tokens: int = 0

    @classmethod
    def of(cls, hints: Any) -> "WorkloadHints":
        """Hints of ours, of transformers' own class (which knows fewer), or None for no hints."""
        if isinstance(hints, cls):
            return hints
        return cls(**{field.name: int(getattr(hints, field.name, 0)) for field in fields(cls)})

    def within(self, others: "WorkloadHints") -> bool:
        """Whether what is sized for the others is large enough for these."""
        pairs = [(getattr(self, hint.name), getattr(others, hint.name)) for hint in fields(self)]
        return all(other == 0 or 0 < mine <= other for mine, other in pairs)

    def joined(self, others: "WorkloadHints") -> "WorkloadHints":
        """Hints of both workloads, one after the other."""
        both = {hint.name: (getattr(self, hint.name), getattr(others, hint.name)) for hint in fields(self)}
        return WorkloadHints(**{name: max(two) if all(two) else 0 for name, two in both.items()})


@dataclass(frozen=True)
class GroupStats:
    """Blocks of a group of attention calls.

    Attributes:
        reach: How far back its calls look.
        owned_blocks: Of one sequence or more.
        cached_blocks: Kept for prompts that begin alike.
        retiring_blocks: Given up, but a step in flight uses them.
    """

    reach: str
    owned_blocks: int
    cached_blocks: int
    retiring_blocks: int


@dataclass(frozen=True)
class Stats:
    """Counters and gauges of an engine, each exact.

    Attributes:
        submitted: Requests submitted.
        waiting: Sequences that wait, victims among them.
        running: Sequences with a row.
        capacity: Blocks of the pool.
        free_blocks: Blocks nobody owns, of which nothing is known.
        owned_blocks: Blocks with an owner.
        cached_blocks: Blocks nobody owns, kept for prompts that begin alike.
        retiring_blocks: Blocks nobody owns, but a step in flight uses.
        peak_owned_blocks: Most blocks owned at once since the engine was made.
        steps: Committed steps.
        abandoned_steps: Steps abandoned.
        max_step_tokens: Most tokens of the next step: `max_batch_tokens`, unless a step ran out of memory not long ago.
        batch_rows: Rows of the step that was committed last.
        batch_decodes: Those of them that brought one token.
        batch_tokens: Tokens of that step.
        prompt_tokens: Prompt tokens computed (again, after a soft reset), in committed steps.
        generated_tokens: Tokens generated, in committed steps.
        finished: Requests that ended by an end token or a bound.
        failed: Requests that ended by an error.
        cancelled: Requests that were cancelled.
        starved: Times that an active sequence got no block for its next tokens.
        soft_resets: Victims whose tokens joined their prompt.
        crossings: Sequences that were computed again as they outgrew the first regime.
        swapped: Sequences whose K and V are in host memory.
        swap_capacity: Blocks of host memory.
        free_swap_blocks: Those of them that nothing is in.
        swap_outs: Victims whose K and V were copied to host memory.
        swap_ins: Victims whose K and V were copied back.
        cached_tokens: Tokens that were found in the prefix cache instead of computed, in all admissions.
        looked_up_tokens: Tokens that were looked up in the prefix cache, in all admissions.
        evictions: Cached blocks that were given to others.
        merged_blocks: Blocks that were given up for another one with the same K and V.
        copied_blocks: Partly matching pages that were copied.
        epoch: Times that everything cached was forgotten: weights changed, or the cache was reset.
        groups: Blocks that are not free, by group.
    """

    submitted: int
    waiting: int
    running: int
    capacity: int
    free_blocks: int
    owned_blocks: int
    cached_blocks: int
    retiring_blocks: int
    peak_owned_blocks: int
    steps: int
    abandoned_steps: int
    max_step_tokens: int
    batch_rows: int
    batch_decodes: int
    batch_tokens: int
    prompt_tokens: int
    generated_tokens: int
    finished: int
    failed: int
    cancelled: int
    starved: int
    soft_resets: int
    crossings: int
    swapped: int
    swap_capacity: int
    free_swap_blocks: int
    swap_outs: int
    swap_ins: int
    cached_tokens: int
    looked_up_tokens: int
    evictions: int
    merged_blocks: int
    copied_blocks: int
    epoch: int
    groups: tuple[GroupStats, ...] = ()
