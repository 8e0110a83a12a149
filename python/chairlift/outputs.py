"""What users get back: outputs, their status, and the hints they give about their workload."""

import time
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

    def is_finished(self) -> bool:
        """Whether nothing more will come: it finished, failed or was cancelled."""
        return self.status >= RequestStatus.FINISHED


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
