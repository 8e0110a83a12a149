"""The engine through its binding: random stories, with a device that believes only the arena."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift import _native

VOCAB = 50
SECTIONS = (
    "rows", "cu_seqlens", "kv_lens", "tokens", "positions", "write_slots", "logits_rows", "draws", "table_changes",
    "row_changes",
)  # fmt: skip


class Device:
    """Keeps tables by row and a memory of what was written where; chooses tokens by a row's whole text."""

    def __init__(self, page_size: int, num_blocks: int, rows: int, tokens: int, **config: object) -> None:
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
        self.arena = np.full(self.engine.arena_capacity, -1, np.int32)
        self.tokens, self.logprobs = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
        self.engine.bind_slot(0, self.arena, self.tokens, self.logprobs)
        self.tables: dict[tuple[int, int], int] = {}
        self.memory: dict[int, int] = {}
        self.now = 0.0

    def step(self, *, abandon: bool = False) -> bool:
        self.now += 1.0
        step = self.engine.advance(None, 0, self.now)
        self.engine.check_integrity()
        if step is None:
            return False
        part = {name: self.arena[slice(*bounds)].tolist() for name, bounds in zip(SECTIONS, step.layout, strict=True)}
        changes = part["table_changes"]
        for _, row, page, block in zip(*[iter(changes)] * 4, strict=True):
            self.tables[row, page] = block
        self.memory.update(zip(part["write_slots"], part["tokens"], strict=True))
        sampled = 0
        for row, end, length in zip(part["rows"], part["cu_seqlens"][1:], part["kv_lens"], strict=True):
            if end - 1 in part["logits_rows"]:
                self.tokens[sampled] = next_token(self.read(row, length))
                self.logprobs[sampled] = -float(self.tokens[sampled])
                sampled += 1
        if abandon:
            self.engine.abandon(0, self.now)
        else:
            self.engine.advance(0, None, self.now)
        self.engine.check_integrity()
        return True

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


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
operations = st.one_of(
    st.tuples(st.just("submit"), prompts, st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 15)),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
    st.tuples(st.just("abandon")),
)


@settings(max_examples=150, deadline=None)
@given(
    page_size=st.integers(1, 6),
    num_blocks=st.integers(3, 40),
    rows=st.integers(1, 6),
    tokens=st.integers(6, 24),
    margin=st.sampled_from([0.0, 0.15, 1.0]),
    story=st.lists(operations, max_size=60),
)
def test_every_request_ends_once_with_its_own_tokens(
    page_size: int, num_blocks: int, rows: int, tokens: int, margin: float, story: list[tuple]
) -> None:
    device = Device(page_size, num_blocks, rows, tokens, safety_margin=margin)
    room = page_size * num_blocks
    expected: dict[int, list[int]] = {}
    cancelled = set()
    for name, *arguments in story:
        if name == "submit":
            prompt, count = arguments
            array = np.array(prompt, np.int64)
            if len(prompt) >= room:
                with pytest.raises(ValueError, match="num_blocks"):
                    device.engine.submit(array, max_new_tokens=count)
                continue
            request = device.engine.submit(array, max_new_tokens=count, record_logprobs=True, record_timestamps=True)
            expected[request] = answer(prompt, min(count, room - len(prompt)))
        elif name == "cancel":
            device.engine.cancel(arguments[0])
            cancelled.add(arguments[0])
        else:
            device.step(abandon=name == "abandon")
    while device.step():
        pass
    ended = set()
    while (event := device.engine.take_next()) is not None:
        assert event.finish_reason is not None
        assert event.request not in ended
        ended.add(event.request)
        full = expected[event.request]
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
    assert stats["free_blocks"] == stats["capacity"]
    assert device.engine.is_idle


def test_buffers_of_another_kind_are_refused() -> None:
    device = Device(4, 8, 2, 8)
    good = (device.arena, device.tokens, device.logprobs)
    for wrong in (
        device.arena.astype(np.int64),
        device.arena[::2],
        device.arena.reshape(1, -1),
        device.arena.tobytes(),
    ):
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
    with pytest.raises(RuntimeError, match="bind_slot"):
        device.engine.advance(None, 1, 0.0)
    device.engine.bind_slot(1, np.zeros(3, np.int32), device.tokens.copy(), device.logprobs.copy())
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
        device.engine.bind_slot(0, device.arena, device.tokens, device.logprobs)
    device.tokens[:] = (VOCAB, 7)
    device.engine.advance(0, None, 1.0)
    first, second = (device.engine.take_next() for _ in range(2))
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    assert f"token {VOCAB} is outside the vocabulary" in first.error
    assert second.tokens == [7]


def test_ids_are_checked_at_full_width() -> None:
    device = Device(4, 8, 2, 8)
    for token in (VOCAB, -1, 2**31, 2**32 + 1, -(2**63)):
        with pytest.raises(ValueError, match=f"token {token} at position 0"):
            device.engine.submit(np.array([token]), max_new_tokens=1)


def test_the_stub_names_what_the_stats_have() -> None:
    import dataclasses

    from chairlift.outputs import Stats

    assert list(Device(4, 8, 2, 8).engine.stats()) == [field.name for field in dataclasses.fields(Stats)]
