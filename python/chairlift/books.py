"""The manager's books: labels and prompts of requests, from their submission until their last output is taken.

Events of the engine become outputs here. It locks nothing: the manager does.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift import _native
from chairlift.outputs import GenerationOutput, Later, RequestStatus, leading
from chairlift.prompts import Prompts

_STATUS = {
    "stop": RequestStatus.FINISHED,
    "length": RequestStatus.FINISHED,
    "cancelled": RequestStatus.CANCELLED,
    "error": RequestStatus.FAILED,
}


@dataclass
class _Record:
    """What is kept of a sequence."""

    label: str
    family: str  # label of the first sequence of its request
    prompt: npt.NDArray[np.int64] | None
    created: float
    record_timestamps: bool
    # What a streaming request produced so far.
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)
    epochs: list[tuple[int, int]] = field(default_factory=list)
    prompt_ids: list[int] | None = None

    def add(self, event: _native.Event) -> None:
        """Takes the news of a token in."""
        ((_, epoch),) = event.epochs
        if not self.epochs or self.epochs[-1][1] != epoch:
            self.epochs.append((len(self.tokens), epoch))
        self.tokens.extend(event.tokens)
        self.logprobs.extend(event.logprobs)
        self.timestamps.extend(event.timestamps)

    def show(self, output: GenerationOutput) -> None:
        """Gives an output what there is now, in a time that does not depend on how much that is."""
        if self.prompt_ids is None:
            self.prompt_ids = [] if self.prompt is None else self.prompt.tolist()
        count, changes = len(self.tokens), len(self.epochs)
        given: Any = output  # lists are made when somebody looks
        given.prompt_ids = leading(self.prompt_ids, len(self.prompt_ids))
        given.generated_tokens = leading(self.tokens, count)
        given.logprobs = leading(self.logprobs, len(self.logprobs))
        given.timestamps = leading(self.timestamps, count) if self.record_timestamps else None
        output.epoch = self.epochs[-1][1]
        given.epochs = Later(lambda: _epochs(self.epochs[:changes], count)[1]) if changes > 1 else None


@dataclass
class _Batch:
    """Sequences that came together: no record is made before the first output of one is taken."""

    labels: Sequence[str]
    prompts: Prompts | None  # one for every `n` labels
    n: int
    created: float
    record_timestamps: bool
    left: int


class Books:
    """Which label stands for which sequence of the engine, and what its outputs carry."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._records: dict[int, _Record] = {}
        self._batches: dict[int, _Batch] = {}
        self._firsts: list[int] = []  # of the batches, rising
        self._next_label = 0
        # Of requests of several sequences, by the label of the first: its id, and how many outputs are to come.
        self._families: dict[str, tuple[int, int]] = {}

    def __contains__(self, label: str) -> bool:
        return label in self._ids

    def free_labels(self, count: int, family: Callable[[str], Sequence[str]]) -> list[str]:
        """The next `req_N` that nobody has, they and the rest of their families. They count as given once they are
        added."""
        first = self._next_label
        labels = [f"req_{number}" for number in range(first, first + count)]
        if self._ids.keys().isdisjoint(name for label in labels for name in family(label)):
            return labels
        # Somebody chose such a label.
        labels = []
        while len(labels) < count:
            label = f"req_{first}"
            if self._ids.keys().isdisjoint(family(label)):
                labels.append(label)
            first += 1
        return labels

    def start_anew(self) -> None:
        """Numbers labels from 0 again; those that are in use are left out."""
        self._next_label = 0

    def add(
        self,
        first: int,
        labels: Sequence[str],
        prompts: Prompts | None,
        *,
        n: int,
        created: float,
        record_timestamps: bool,
        numbered_to: str | None,
    ) -> None:
        """Enters sequences, whose ids follow one another.

        Args:
            first: Id of the first.
            labels: Their labels.
            prompts: The prompts, where outputs need them before the end or the engine does not have them.
            n: Labels for each prompt.
            created: When they were submitted.
            record_timestamps: Whether their outputs carry the time of each token.
            numbered_to: The last of `free_labels`, where the labels are from there.
        """
        self._ids.update(zip(labels, range(first, first + len(labels)), strict=True))
        if n > 1:
            for at in range(0, len(labels), n):
                self._families[labels[at]] = (first + at, n)
        if len(labels) == n:
            prompt = None if prompts is None else prompts[0]
            for sequence, label in enumerate(labels, first):
                self._records[sequence] = _Record(label, labels[0], prompt, created, record_timestamps)
        else:
            self._batches[first] = _Batch(labels, prompts, n, created, record_timestamps, len(labels))
            self._firsts.append(first)
        if numbered_to is not None:
            self._next_label = int(numbered_to.removeprefix("req_")) + 1

    def id_of(self, label: str) -> int:
        """The id of a sequence.

        Raises:
            KeyError: No request of that label is in flight or has an output to be taken.
        """
        if label not in self._ids:
            raise KeyError(f"no request {label!r}: it was never added, or its last output was taken")
        return self._ids[label]

    def label_of(self, sequence: int) -> str | None:
        """The label of a sequence whose last output is still to be taken."""
        record = self._records.get(sequence) or self._of_batch(sequence)
        return None if record is None else record.label

    def id_to_cancel(self, label: str) -> int:
        """The id of a sequence, or of a request of several whose first has ended already.

        Raises:
            KeyError: As `id_of`.
        """
        if label not in self._ids and label in self._families:
            return self._families[label][0]
        return self.id_of(label)

    def is_open(self, sequence: int) -> bool:
        """Whether the last output of a sequence is still to be taken."""
        record = self._records.get(sequence) or self._of_batch(sequence)
        return record is not None and self._ids.get(record.label) == sequence

    def output(self, event: _native.Event) -> GenerationOutput:
        """What a reader gets for an event that it took. With the last one of a sequence its label is free again."""
        record = self._records.get(event.request) or self._of_batch(event.request)
        if record is None:
            raise AssertionError(f"an event of sequence {event.request}, which nobody submitted")
        output = GenerationOutput(record.label, created_time=record.created)
        reason, before = event.finish_reason, len(record.tokens)
        if reason is None:
            self._records[event.request] = record
            record.add(event)
            record.show(output)
            output.new_tokens, output.new_logprobs = event.tokens, event.logprobs
            output.status = RequestStatus.DECODING
            return output
        self._close(event.request, record)
        output.prompt_ids = event.prompt if record.prompt is None else record.prompt.tolist()
        output.generated_tokens, output.logprobs = event.tokens, event.logprobs
        output.new_tokens, output.new_logprobs = output.generated_tokens[before:], output.logprobs[before:]
        output.timestamps = event.timestamps if record.record_timestamps else None
        output.finish_reason = reason  # type: ignore[assignment]  # one of the four
        output.status = _STATUS[reason]
        output.epoch, output.epochs = _epochs(event.epochs, len(output.generated_tokens))
        output.error = event.error
        output.cached_tokens = event.cached_tokens
        started, ended = event.started, event.ended
        output.lifespan = (-1 if started is None else started, -1 if ended is None else ended)
        return output

    def _of_batch(self, sequence: int) -> _Record | None:
        at = bisect_right(self._firsts, sequence) - 1
        if at < 0:
            return None
        first = self._firsts[at]
        batch, place = self._batches[first], sequence - first
        if place >= len(batch.labels):
            return None
        prompt = None if batch.prompts is None else batch.prompts[place // batch.n]
        family = batch.labels[place - place % batch.n]
        return _Record(batch.labels[place], family, prompt, batch.created, batch.record_timestamps)

    def _close(self, sequence: int, record: _Record) -> None:
        del self._ids[record.label]
        self._records.pop(sequence, None)
        if record.family in self._families:
            first, left = self._families.pop(record.family)
            if left > 1:
                self._families[record.family] = (first, left - 1)
        at = bisect_right(self._firsts, sequence) - 1
        if at < 0 or sequence >= self._firsts[at] + len(self._batches[self._firsts[at]].labels):
            return  # it came alone
        batch = self._batches[self._firsts[at]]
        batch.left -= 1
        if not batch.left:
            del self._batches[self._firsts[at]], self._firsts[at]


def _epochs(changes: list[tuple[int, int]], tokens: int) -> tuple[int, list[int] | None]:
    """The epoch of the last token, and those of all where they differ."""
    if len(changes) < 2:
        return changes[0][1] if changes else 0, None
    ends = [place for place, _ in changes[1:]] + [tokens]
    return changes[-1][1], [epoch for (start, epoch), end in zip(changes, ends, strict=True) for _ in range(start, end)]
