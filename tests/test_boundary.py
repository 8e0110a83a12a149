"""The engine through its binding: random stories, with a device that believes only the arena."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift import _native

VOCAB = 50


class Device:
    """Keeps tables by row and a memory of what was written where; chooses tokens by a row's whole text.

    With `late` a step is committed only after the next one was planned, as by a loop that never waits for the device.
    """

    def __init__(
        self, page_size: int, num_blocks: int, rows: int, tokens: int, *, late: bool = False, **config: object
    ) -> None:
        self.page_size = page_size
        self.engine = _native.Engine(
            _native.EngineConfig(
                page_size=page_size,
                num_blocks=num_blocks,
                groups=[("full", 0)],
                max_requests_per_batch=rows,
                max_batch_tokens=tokens,
                vocab_size=VOCAB,
                **config,
            )
        )
        self.late = late
        self.slots = [
            (np.full(self.engine.arena_capacity, -1, np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.float32))
            for _ in range(2)
        ]
        for index, slot in enumerate(self.slots):
            self.engine.bind_slot(index, *slot)
        self.in_flight: list[int] = []
        self.tables: dict[tuple[int, int], int] = {}
        self.memory: dict[int, int] = {}
        self.host: dict[int, int] = {}
        self.now = 0.0

    def step(self, *, abandon: bool = False) -> bool:
        """Plans a step if it can, and commits (or abandons) the oldest one unless it may stay in flight."""
        self.now += 1.0
        planned = len(self.in_flight) < 1 + self.late and self.plan()
        if abandon and self.in_flight:
            slot = self.in_flight.pop()
            self.engine.abandon(slot, self.now)
        elif len(self.in_flight) > (self.late and planned):
            self.engine.advance(self.in_flight.pop(0), None, self.now)
        elif not planned:
            return False
        self.engine.check_integrity()
        return True

    def plan(self) -> bool:
        index = 1 - self.in_flight[-1] if self.in_flight else 0
        step = self.engine.advance(None, index, self.now)
        self.engine.check_integrity()
        if step is None:
            return False
        arena, tokens, logprobs = self.slots[index]
        part = {name: arena[where].tolist() for name, where in step.layout.items()}
        for _, row, page, block in zip(*[iter(part["table_changes"])] * 4, strict=True):
            self.tables[row, page] = block
        for source, target, pairs in (
            (self.memory, self.host, part["swap_outs"]),
            (self.host, self.memory, part["swap_ins"]),
            (self.memory, self.memory, part["copies"]),
        ):
            self.move(source, target, pairs)
        for place, sampled in zip(*[iter(part["carry_overs"])] * 2, strict=True):
            part["tokens"][place] = int(self.slots[1 - index][1][sampled])
        self.memory.update(zip(part["write_slots"], part["tokens"], strict=True))
        sampled = 0
        for row, end, length in zip(part["rows"], part["cu_seqlens"][1:], part["kv_lens"], strict=True):
            if end - 1 in part["logits_rows"]:
                tokens[sampled] = next_token(self.read(row, length))
                logprobs[sampled] = -float(tokens[sampled])
                sampled += 1
        assert sampled == step.sampled
        self.in_flight.append(index)
        return True

    def move(self, source: dict[int, int], target: dict[int, int], pairs: list[int]) -> None:
        size = self.page_size
        for come_from, go_to in zip(*[iter(pairs)] * 2, strict=True):
            for offset in range(size):
                target.pop(go_to * size + offset, None)
                if (token := source.get(come_from * size + offset)) is not None:
                    target[go_to * size + offset] = token

    def read(self, row: int, length: int) -> list[int]:
        slots = (self.tables[row, at // self.page_size] * self.page_size + at % self.page_size for at in range(length))
        return [self.memory[slot] for slot in slots]


def next_token(text: list[int]) -> int:
    value = 17
    for token in text:
        value = (value * 31 + token + 7) % 2**32
    return (value >> 5) % VOCAB


def answer(prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(prompt) :]


# Few tokens and few lengths: prompts begin alike, and some are the same.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)
operations = st.one_of(
    st.tuples(st.just("submit"), prompts, st.integers(1, 12), st.integers(1, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 15)),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
    st.tuples(st.just("abandon")),
    st.tuples(st.just("new_epoch")),
)


@settings(max_examples=200, deadline=None)
@given(
    page_size=st.sampled_from([1, 2, 3, 4, 6]),
    num_blocks=st.integers(3, 40),
    rows=st.integers(1, 6),
    tokens=st.integers(6, 24),
    late=st.booleans(),
    config=st.fixed_dictionaries(
        {
            "safety_margin": st.sampled_from([0.0, 0.15, 1.0]),
            "match_unit": st.sampled_from([None, 0, 1]),
            "cache_eviction": st.sampled_from(["lru", "lifo"]),
            "swap_blocks": st.sampled_from([0, 4, 50]),
            "hash_bits": st.sampled_from([128, 3]),
        }
    ),
    story=st.lists(operations, max_size=60),
)
def test_every_request_ends_once_with_its_own_tokens(
    page_size: int, num_blocks: int, rows: int, tokens: int, late: bool, config: dict, story: list[tuple]
) -> None:
    device = Device(page_size, num_blocks, rows, tokens, late=late, **config)
    room = page_size * num_blocks
    expected: dict[int, tuple[list[int], list[int]]] = {}
    cancelled = set()
    for name, *arguments in story:
        if name == "submit":
            prompt, count, n = arguments
            array = np.array(prompt, np.int64)
            if len(prompt) >= room:
                with pytest.raises(ValueError, match="num_blocks"):
                    device.engine.submit(array, max_new_tokens=count, n=n)
                continue
            first = device.engine.submit(array, max_new_tokens=count, n=n, record_logprobs=True, record_timestamps=True)
            for request in range(first, first + n):
                expected[request] = prompt, answer(prompt, min(count, room - len(prompt)))
        elif name == "cancel":
            device.engine.cancel(arguments[0])
            # Those of the same prompt go with it.
            cancelled.update(range(arguments[0], arguments[0] + 3))
        elif name == "new_epoch":
            device.engine.new_epoch()
        else:
            device.step(abandon=name == "abandon")
    while device.step():
        pass
    ended = set()
    while (event := device.engine.take_next()) is not None:
        assert event.finish_reason is not None
        assert event.request not in ended
        ended.add(event.request)
        prompt, full = expected[event.request]
        assert event.prompt == prompt
        assert 0 <= event.cached_tokens < len(prompt)
        if event.finish_reason == "cancelled":
            assert event.request in cancelled
            assert event.tokens == full[: len(event.tokens)]
        else:
            assert event.tokens == full
        assert event.logprobs == [-float(token) for token in event.tokens]
        assert len(event.timestamps) == len(event.tokens)
        assert event.timestamps == sorted(event.timestamps)
    assert ended == set(expected)
    stats = device.engine.stats()
    assert stats["free_blocks"] + stats["cached_blocks"] == stats["capacity"]
    assert stats["free_swap_blocks"] == stats["swap_capacity"]
    assert device.engine.is_idle


def test_buffers_of_another_kind_are_refused() -> None:
    device = Device(4, 8, 2, 8)
    good = device.slots[0]
    arena = good[0]
    for wrong in (arena.astype(np.int64), arena[::2], arena.reshape(1, -1), arena.tobytes()):
        with pytest.raises((ValueError, BufferError)):
            device.engine.bind_slot(0, wrong, *good[1:])
    with pytest.raises(ValueError, match="slot is 2"):
        device.engine.bind_slot(2, *good)
    shared = np.zeros(device.engine.arena_capacity + 1, np.int32)
    for wrong in ((shared[:-1], shared[-3:], good[2]), (good[0], good[1].copy(), good[2].copy())):
        with pytest.raises(ValueError, match="overlap"):
            device.engine.bind_slot(1, *wrong)


def test_a_short_arena_and_a_misused_slot_are_errors_that_change_nothing() -> None:
    device = Device(4, 8, 2, 8)
    device.engine.submit(np.array([1, 2, 3]), max_new_tokens=1)
    unbound = _native.Engine(
        _native.EngineConfig(
            page_size=4, num_blocks=8, groups=[("full", 0)], max_requests_per_batch=2, max_batch_tokens=8, vocab_size=9
        )
    )
    with pytest.raises(RuntimeError, match="bind_slot"):
        unbound.advance(None, 1, 0.0)
    device.engine.bind_slot(1, np.zeros(3, np.int32), *(buffer.copy() for buffer in device.slots[1][1:]))
    with pytest.raises(RuntimeError, match="arena of slot B has 3 elements, the step needs"):
        device.engine.advance(None, 1, 0.0)
    with pytest.raises(RuntimeError, match="no step to commit"):
        device.engine.advance(0, None, 0.0)
    with pytest.raises(RuntimeError, match="no step to abandon"):
        device.engine.abandon(0, 0.0)
    while device.step():
        pass
    assert device.engine.take_next().tokens == answer([1, 2, 3], 1)


def test_a_sampled_token_outside_the_vocabulary_fails_that_request_alone() -> None:
    device = Device(4, 8, 2, 8)
    for _ in range(2):
        device.engine.submit(np.array([1, 2, 3]), max_new_tokens=1)
    assert device.engine.advance(None, 0, 0.0) is not None
    with pytest.raises(RuntimeError, match="in flight"):
        device.engine.bind_slot(0, *device.slots[0])
    device.slots[0][1][:] = (VOCAB, 7)
    device.engine.advance(0, None, 1.0)
    first, second = (device.engine.take_next() for _ in range(2))
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert f"token {VOCAB} is outside the vocabulary" in first.error
    assert second.tokens == [7]


def test_steps_are_committed_in_the_order_of_their_planning() -> None:
    device = Device(4, 8, 2, 8, late=True)
    device.engine.submit(np.array([1, 2, 3]), max_new_tokens=3)
    assert device.plan()
    assert device.plan()
    with pytest.raises(RuntimeError, match="planned on top of another"):
        device.engine.advance(1, None, 1.0)
    with pytest.raises(RuntimeError, match="while its step is in flight"):
        device.engine.advance(None, 0, 1.0)
    while device.step():
        pass
    assert device.engine.take_next().tokens == answer([1, 2, 3], 3)


def test_prompts_that_come_together_are_taken_all_or_none() -> None:
    device = Device(4, 8, 2, 8)
    prompts = [[1, 2, 3], [4], [5, 6]]
    tokens, lengths = np.concatenate(prompts), np.array([len(prompt) for prompt in prompts])
    bounds = np.array([2, 1, 3])
    for wrong in (lengths[:-1], lengths + 1, np.array([3, -1, 4])):
        with pytest.raises(ValueError, match="lengths must add up"):
            device.engine.submit_many(tokens, wrong, bounds)
    with pytest.raises(ValueError, match=r"inputs\[1\]: max_new_tokens is 0"):
        device.engine.submit_many(tokens, lengths, bounds - 1)
    with pytest.raises(ValueError, match=r"inputs\[2\]: token 99 at position 1"):
        device.engine.submit_many(np.where(tokens == 6, 99, tokens), lengths, bounds)
    assert device.engine.queued == 0
    first = device.engine.submit_many(tokens, lengths, bounds)
    while device.step():
        pass
    for request, (prompt, bound) in enumerate(zip(prompts, bounds, strict=True), first):
        assert device.engine.take_for(request).tokens == answer(prompt, bound)


def test_prompts_that_come_together_can_join_the_queue_by_their_tokens() -> None:
    device = Device(4, 8, 2, 8)
    prompts = [[5, 6], [4, 9], [5], [4], [5, 6]]
    tokens, lengths = np.concatenate(prompts), np.array([len(prompt) for prompt in prompts])
    bounds = np.arange(1, 6)
    with pytest.raises(ValueError, match=r"inputs\[1\]: max_new_tokens is 0"):
        device.engine.submit_many(tokens, lengths, np.array([1, 0, 1, 1, 1]), sorts=True)
    first = device.engine.submit_many(tokens, lengths, bounds, sorts=True)
    device.step()
    running = [live.request - first for live in device.engine.live() if live.phase != "pending"]
    assert sorted(running) == [1, 3]
    while device.step():
        pass
    for request, (prompt, bound) in enumerate(zip(prompts, bounds, strict=True), first):
        assert device.engine.take_for(request).tokens == answer(prompt, bound)


def test_ids_are_checked_at_full_width() -> None:
    device = Device(4, 8, 2, 8)
    for token in (VOCAB, -1, 2**31, 2**32 + 1, -(2**63)):
        with pytest.raises(ValueError, match=f"token {token} at position 0"):
            device.engine.submit(np.array([token]), max_new_tokens=1)


def test_the_stub_names_what_the_stats_have() -> None:
    import dataclasses

    from chairlift.outputs import Stats

    names = [field.name for field in dataclasses.fields(Stats)]
    assert [*Device(4, 8, 2, 8).engine.stats(), "groups"] == names
