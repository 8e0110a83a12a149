"""The engine's step in plain Python: the same algorithm and the same arena, without Rust.

It answers what of the host's cost is owed to the data structures, and what to the language they are written in. Like
the engine it keeps a free list of blocks, a block table per sequence, stable rows and a list of active sequences, and
a step costs it O(rows in the step + blocks changed). It is written as one would write it in Python: objects with
slots, lists, and each step handed to numpy in one assignment.

It does less than the engine, so it flatters Python: one group of full attention, greedy, prompts in whole, a pool that
is large enough. No split prefills, windows, victims, priorities, streaming, cancellation or integrity checks, and no
lock or inbox, as it has one caller. What it does it does alike: `check_equal_work` holds its arenas against the
engine's, element for element, block numbers apart.
"""

from __future__ import annotations

import heapq
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift import _native

Arena = npt.NDArray[np.int32]
ONE_AS_FLOAT_BITS = struct.unpack("<i", struct.pack("<f", 1.0))[0]
SECTIONS = (
    "rows", "cu_seqlens", "kv_lens", "tokens", "positions", "write_slots", "logits_rows", "draws", "table_changes",
    "row_changes",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class SequenceState:
    """A sequence: its tokens, and how many of them have K and V."""

    request: int
    tokens: list[int]
    prompt_len: int
    max_len: int
    eos: frozenset[int]
    draw_key: tuple[int, int]  # low and high half, as int32
    computed: int = 0
    row: int = -1
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class PlannedRow:
    """A row of a planned step."""

    seq: SequenceState
    length: int
    blocks_before: int
    is_new: bool


@dataclass(slots=True)
class PlannedStep:
    """A planned step, in the words of `_native.Step`."""

    rows: int
    decodes: int
    tokens: int
    sampled: int
    layout: dict[str, slice]


@dataclass(slots=True)
class Finished:
    """The end of a request."""

    request: int
    tokens: list[int]
    reason: str


class PlainEngine:
    """Scheduler, block manager and step planner, decodes and whole prompts."""

    def __init__(
        self, *, page_size: int, num_blocks: int, max_requests_per_batch: int, max_batch_tokens: int, vocab_size: int
    ) -> None:
        self.page_size = page_size
        self.num_blocks = num_blocks
        self.max_batch_tokens = max_batch_tokens
        self.vocab_size = vocab_size
        self.free_blocks = list(range(num_blocks - 1, -1, -1))
        self.free_rows = list(range(max_requests_per_batch))
        self.queue: deque[SequenceState] = deque()
        self.active: list[SequenceState] = []
        self.in_flight: list[PlannedRow] = []
        self.finished: list[Finished] = []
        self.steps = self.generated_tokens = self.requests = 0
        self.arena: Arena = np.zeros(0, np.int32)
        self.sampled: Arena = np.zeros(0, np.int32)

    def bind(self, arena: Arena, sampled: Arena) -> None:
        """Gives it the buffers of a step: what it tells the device, and the tokens that come back."""
        self.arena, self.sampled = arena, sampled

    def submit(self, prompt: Sequence[int], *, max_new_tokens: int, eos: Sequence[int] = ()) -> int:
        """Queues a request; returns its id."""
        request, self.requests = self.requests, self.requests + 1
        key = mix(mix(mix(request)) ^ mix(0))  # the engine's seed is 0, the request brings none; its first sequence
        max_len = min(len(prompt) + max_new_tokens, self.num_blocks * self.page_size)
        draw_key = (as_int32(key), as_int32(key >> 32))
        seq = SequenceState(request, [int(token) for token in prompt], len(prompt), max_len, frozenset(eos), draw_key)
        self.queue.append(seq)
        return request

    def advance(self, commit: bool) -> PlannedStep | None:
        """Commits the step in flight, when told that its results are there, and plans the next one."""
        if commit:
            self.commit()
        rows = self.plan()
        if not rows:
            return None
        self.in_flight = rows
        return self.write(rows)

    def commit(self) -> None:
        """Appends each row's token and lets go of the sequences that end with it."""
        ended: set[int] = set()
        sampled = self.sampled[: len(self.in_flight)].tolist()
        for planned, token in zip(self.in_flight, sampled, strict=True):
            seq = planned.seq
            seq.computed += planned.length
            if not 0 <= token < self.vocab_size:
                self.end(seq, "error")
                ended.add(seq.request)
                continue
            seq.tokens.append(token)
            if token in seq.eos:
                self.end(seq, "stop")
                ended.add(seq.request)
            elif len(seq.tokens) >= seq.max_len:
                self.end(seq, "length")
                ended.add(seq.request)
        if ended:
            self.active = [seq for seq in self.active if seq.request not in ended]
        self.steps += 1
        self.generated_tokens += len(sampled)

    def end(self, seq: SequenceState, reason: str) -> None:
        """Takes back a sequence's blocks and row."""
        self.free_blocks.extend(reversed(seq.blocks))
        heapq.heappush(self.free_rows, seq.row)
        self.finished.append(Finished(seq.request, seq.tokens[seq.prompt_len :], reason))

    def plan(self) -> list[PlannedRow]:
        """The rows of the next step: each decode, then prompts while there is room for them."""
        rows: list[PlannedRow] = []
        budget = self.max_batch_tokens
        for seq in self.active:
            if budget == 0:
                break
            rows.append(self.extend(seq, 1, is_new=False))
            budget -= 1
        while self.queue and self.free_rows:
            seq = self.queue[0]
            length = len(seq.tokens)
            if length > budget or -(-length // self.page_size) > len(self.free_blocks):
                break
            self.queue.popleft()
            seq.row = heapq.heappop(self.free_rows)
            self.active.append(seq)
            rows.append(self.extend(seq, length, is_new=True))
            budget -= length
        if rows and rows[-1].is_new:
            rows.sort(key=lambda planned: planned.length != 1)
        return rows

    def extend(self, seq: SequenceState, length: int, *, is_new: bool) -> PlannedRow:
        """Plans `length` more tokens of a sequence, with a block for each page that they start."""
        blocks = seq.blocks
        before = len(blocks)
        end = seq.computed + length
        while len(blocks) * self.page_size < end:
            if not self.free_blocks:
                raise MemoryError(f"all {self.num_blocks} blocks are owned; this engine knows no victims")
            blocks.append(self.free_blocks.pop())
        return PlannedRow(seq, length, before, is_new)

    def write(self, planned_rows: list[PlannedRow]) -> PlannedStep:
        """Writes the step into the arena, in the layout of the engine."""
        page_size = self.page_size
        rows: list[int] = []
        kv_lens: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        write_slots: list[int] = []
        draws: list[int] = []
        table_changes: list[int] = []
        row_changes: list[int] = []
        decodes = 0
        for planned in planned_rows:
            seq, length = planned.seq, planned.length
            start, blocks = seq.computed, seq.blocks
            end = start + length
            rows.append(seq.row)
            kv_lens.append(end)
            draws += (*seq.draw_key, end)
            if length == 1:
                decodes += 1
                tokens.append(seq.tokens[start])
                positions.append(start)
                write_slots.append(blocks[start // page_size] * page_size + start % page_size)
            else:
                tokens += seq.tokens[start:end]
                positions += range(start, end)
                write_slots += [blocks[at // page_size] * page_size + at % page_size for at in range(start, end)]
            for page in range(planned.blocks_before, len(blocks)):
                table_changes += (0, seq.row, page, blocks[page])
            if planned.is_new:
                row_changes += (seq.row, 0, ONE_AS_FLOAT_BITS, 0, ONE_AS_FLOAT_BITS)
        cu_seqlens = list(accumulate((planned.length for planned in planned_rows), initial=0))
        logits_rows = [end - 1 for end in cu_seqlens[1:]]

        sections = (
            rows, cu_seqlens, kv_lens, tokens, positions, write_slots, logits_rows, draws, table_changes, row_changes
        )  # fmt: skip
        bounds = list(accumulate(map(len, sections), initial=0))
        self.arena[: bounds[-1]] = np.fromiter(chain.from_iterable(sections), np.int32, bounds[-1])
        layout = {name: slice(start, end, 1) for name, (start, end) in zip(SECTIONS, pairwise(bounds), strict=True)}
        return PlannedStep(len(rows), decodes, len(tokens), len(rows), layout)


def mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on 64 bits, as the engine draws its keys."""
    mask = 2**64 - 1
    z = (value + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def as_int32(bits: int) -> int:
    """The low 32 bits, read as a signed number."""
    low = bits & 0xFFFFFFFF
    return low - 2**32 if low >= 2**31 else low


# The proof that it does the engine's work.


def check_equal_work(make_config: Callable[..., _native.EngineConfig]) -> int:
    """Runs one short story on both engines: prompts of unlike lengths, more of them than rows, ends by token and by
    length, pages that start, blocks and rows that are used again.

    `make_config` takes the sizes of the engine. Block numbers may differ, as long as each stands for the same block.

    Returns:
        The number of steps compared.

    Raises:
        RuntimeError: The first difference.
    """
    page_size, max_rows, vocab_size, end_token = 4, 3, 1000, 999
    sizes: dict[str, Any] = {
        "page_size": page_size, "num_blocks": 40, "max_requests_per_batch": max_rows, "max_batch_tokens": 64,
        "vocab_size": vocab_size,
    }  # fmt: skip
    native, plain = _native.Engine(make_config(**sizes, match_unit=0)), PlainEngine(**sizes)
    arenas = [np.zeros(native.arena_capacity, np.int32) for _ in range(2)]
    sampled = np.zeros(max_rows, np.int32)
    native.bind_slot(0, arenas[0], sampled, np.zeros(max_rows, np.float32))
    plain.bind(arenas[1], sampled)
    story = [(7, 9), (1, 30), (4, 1), (12, 6), (3, 40), (8, 5), (5, 60), (2, 20), (9, 3), (1, 12)]
    for number, (prompt_len, new_tokens) in enumerate(story):
        prompt = np.arange(prompt_len, dtype=np.int64) + 20 * number
        native.submit(prompt, max_new_tokens=new_tokens, eos=[end_token])
        plain.submit(prompt.tolist(), max_new_tokens=new_tokens, eos=[end_token])

    known: dict[int, int] = {}
    number_of_step = 0
    step, other = native.advance(None, 0, 0.0), plain.advance(commit=False)
    while step is not None and other is not None:
        layout = {name: where for name, where in step.layout.items() if name in SECTIONS or where.start != where.stop}
        if layout != other.layout or step.decodes != other.decodes:
            raise RuntimeError(f"step {number_of_step}: {layout} and {other.layout}")
        ours, theirs = ({name: arena[where].copy() for name, where in layout.items()} for arena in arenas)
        changed_blocks = ours["table_changes"][3::4]
        known.update(zip(changed_blocks.tolist(), theirs["table_changes"][3::4].tolist(), strict=True))
        changed_blocks[:] = [known[block] for block in changed_blocks.tolist()]
        ours["write_slots"][:] = [
            known[slot // page_size] * page_size + slot % page_size for slot in ours["write_slots"].tolist()
        ]
        for name in SECTIONS:
            if not np.array_equal(ours[name], theirs[name]):
                raise RuntimeError(f"step {number_of_step}, {name}: {ours[name]} and {theirs[name]}")
        owned = [block for seq in plain.active for block in seq.blocks]
        if sorted(owned + plain.free_blocks) != list(range(plain.num_blocks)):
            raise RuntimeError(f"step {number_of_step}: the plain engine has lost or doubled a block")
        number_of_step += 1
        sampled[:] = 300 + max_rows * number_of_step + np.arange(max_rows)
        if number_of_step == 15:
            sampled[0] = end_token
        if number_of_step == 25:
            sampled[:] = end_token
        step, other = native.advance(0, 0, 0.0), plain.advance(commit=True)
    if step is not None or other is not None:
        raise RuntimeError(f"step {number_of_step}: only one engine goes on")

    ends: list[Finished] = []
    while (event := native.take_next()) is not None:
        ends.append(Finished(event.request, event.tokens, event.finish_reason or ""))
    if ends != plain.finished or {end.reason for end in ends} != {"stop", "length"}:
        raise RuntimeError(f"ends differ: {ends} and {plain.finished}")
    return number_of_step
