"""Steps that raise: who is at fault fails, steps that need too much are made smaller, and all others end as ever."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import chairlift
from chairlift import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationOutput
from chairlift.engine.failure import is_of_device, is_out_of_memory
from chairlift.engine.replay import forward as replay
from chairlift.engine.replay.program import Program
from chairlift.engine.runner import PagedForward, Runner
from tiny_models import reference, tie_aware_mismatch, tiny_model

NEW = 12
# No other prompt begins with it.
POISON = 96
PROMPTS = [[3 + (index * 29 + own) % 90 for index in range(4 + own % 7)] for own in range(16)]
BAD_PROMPT = [POISON, 7, 9]


@contextmanager
def serving(model: PreTrainedModel, config: ContinuousBatchingConfig) -> Iterator[ContinuousBatchingManager]:
    manager = chairlift.init_continuous_batching(model, GenerationConfig(max_new_tokens=NEW, eos_token_id=-1), config)
    manager.start()
    yield manager
    manager.destroy()


@pytest.fixture(params=[True, False], ids=["replayed", "eager"])
def manager(llama: PreTrainedModel, request: pytest.FixtureRequest) -> Iterator[ContinuousBatchingManager]:
    config = ContinuousBatchingConfig(page_size=4, num_blocks=128, max_batch_tokens=64, replay_forward=request.param)
    with serving(llama, config) as manager:
        yield manager


def run(manager: ContinuousBatchingManager, prompts: list[list[int]]) -> list[GenerationOutput]:
    labels = manager.add_requests(prompts)
    return [manager.get_result(label, timeout=60) for label in labels]


def assert_right(model: PreTrainedModel, prompt: list[int], output: GenerationOutput) -> None:
    assert output.error is None
    expected, gaps = reference(model, prompt, len(output.generated_tokens))
    assert len(expected) == NEW
    assert tie_aware_mismatch(output.generated_tokens, expected, gaps) is None


@pytest.fixture
def raise_over(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], None]:
    """Has the first attention call of a step look at its inputs, and raise."""
    attend = PagedForward.attend

    def set_fault(fault: Callable[[Any], None]) -> None:
        def faulty(self: PagedForward, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
            if self._next == 0:
                fault(self._inputs)
            return attend(self, *args, **kwargs)

        monkeypatch.setattr(PagedForward, "attend", faulty)

    return set_fault


def is_bad(inputs: Any) -> bool:
    return bool(((inputs.input_ids == POISON) & (inputs.position_ids == 0)).any())


def no_memory() -> None:
    """Asks torch for more than there is anywhere."""
    torch.empty(1 << 50, dtype=torch.uint8)


# ---------------------------------------------------------------- rows at fault


def test_a_bad_row_fails_alone_with_its_cause_and_all_others_end_as_ever(
    llama: PreTrainedModel, manager: ContinuousBatchingManager, raise_over: Callable[..., None]
) -> None:
    run(manager, PROMPTS[:3])

    def fault(inputs: Any) -> None:
        if is_bad(inputs):
            raise ValueError("this token cannot be computed")

    raise_over(fault)
    outputs = run(manager, [*PROMPTS[:9], BAD_PROMPT, *PROMPTS[9:]])
    bad = outputs.pop(9)
    assert (bad.finish_reason, bad.generated_tokens) == ("error", [])
    assert bad.error == "the step failed: ValueError: this token cannot be computed"
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_right(llama, prompt, output)
    stats = manager.stats()
    assert stats.failed == 1
    assert 1 < stats.abandoned_steps <= 6, "halves of 17 rows"


def test_a_row_that_turns_bad_keeps_what_it_has(
    llama: PreTrainedModel, manager: ContinuousBatchingManager, raise_over: Callable[..., None]
) -> None:
    longest = max(PROMPTS, key=len)
    expected = reference(llama, longest, NEW)[0]

    def fault(inputs: Any) -> None:
        if inputs.position_ids.max() >= len(longest) + 4:
            raise RuntimeError("too far")

    raise_over(fault)
    *others, output = run(manager, [longest[:1], longest[:2], longest])
    assert output.finish_reason == "error"
    assert output.generated_tokens == expected[:5]
    for length, other in enumerate(others, 1):
        assert_right(llama, longest[:length], other)


def test_a_model_that_always_raises_fails_everything_and_serves_again_when_it_is_mended(
    llama: PreTrainedModel, manager: ContinuousBatchingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: PagedForward, *args: Any, **kwargs: Any) -> None:
        raise TypeError("not like this")

    with monkeypatch.context() as patch:
        patch.setattr(PagedForward, "attend", broken)
        outputs = run(manager, PROMPTS)
        assert {output.error for output in outputs} == {"the step failed: TypeError: not like this"}
    assert manager.stats().max_step_tokens == 64
    for prompt, output in zip(PROMPTS, run(manager, PROMPTS), strict=True):
        assert_right(llama, prompt, output)


def test_a_streamed_request_hears_each_token_once_though_steps_were_tried_again(
    llama: PreTrainedModel, manager: ContinuousBatchingManager, raise_over: Callable[..., None]
) -> None:
    calls = 0

    def fault(inputs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0 and inputs.input_ids.shape[1] > 1:
            raise ValueError("now and then")

    raise_over(fault)
    streamed = manager.submit(PROMPTS[0], streaming=True)
    label = manager.add_request(PROMPTS[1])
    tokens = [token for snapshot in streamed for token in snapshot.generated_tokens[-1:]]
    final = streamed.result(timeout=60)
    assert final.generated_tokens == reference(llama, PROMPTS[0], NEW)[0]
    assert tokens[:NEW] == final.generated_tokens
    assert_right(llama, PROMPTS[1], manager.get_result(label, timeout=60))


# --------------------------------------------------------------- out of memory


def test_steps_that_run_out_of_memory_become_shorter_and_nobody_fails(
    llama: PreTrainedModel, manager: ContinuousBatchingManager, raise_over: Callable[..., None]
) -> None:
    run(manager, PROMPTS[:3])

    def fault(inputs: Any) -> None:
        if inputs.input_ids.shape[1] > 9:
            no_memory()

    raise_over(fault)
    for prompt, output in zip(PROMPTS, run(manager, PROMPTS), strict=True):
        assert_right(llama, prompt, output)
    stats = manager.stats()
    assert (stats.failed, stats.max_step_tokens) in ((0, 8), (0, 16))
    # Lifted when it turned out to be too short.
    assert 3 <= stats.abandoned_steps <= 3 + stats.steps // 32
    how = manager.describe()
    assert "a replayed step failed" not in how


def test_what_needs_too_much_with_one_token_fails_and_steps_are_as_long_as_before(
    llama: PreTrainedModel, manager: ContinuousBatchingManager, raise_over: Callable[..., None]
) -> None:
    def fault(inputs: Any) -> None:
        if is_bad(inputs):
            no_memory()

    raise_over(fault)
    output = manager.get_result(manager.add_request([POISON]), timeout=60)
    assert "DefaultCPUAllocator" in output.error
    assert manager.stats().max_step_tokens == 64
    outputs = run(manager, [*PROMPTS, BAD_PROMPT])
    assert "DefaultCPUAllocator" in outputs.pop().error
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_right(llama, prompt, output)


@pytest.mark.parametrize(
    ("error", "of_device", "out_of_memory"),
    [
        (MemoryError(), False, True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False, True),
        (RuntimeError("shapes do not fit"), False, False),
        (ValueError("out of memory"), False, False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failures_are_told_apart(error: Exception, of_device: bool, out_of_memory: bool) -> None:
    assert (is_of_device(error), is_out_of_memory(error)) == (of_device, out_of_memory)


# ------------------------------------------------------------------ the replay


def test_a_program_is_given_up_only_when_the_model_itself_can(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = replay.write_program
    errors: list[Exception] = []

    def failing(*args: Any) -> Program:
        program = write(*args)
        run = program.run

        def run_or_raise(*inputs: Any) -> torch.Tensor:
            if errors:
                raise errors.pop()
            return run(*inputs)

        program.run = run_or_raise
        return program

    monkeypatch.setattr(replay, "write_program", failing)
    config = ContinuousBatchingConfig(page_size=4, num_blocks=128, max_batch_tokens=64, replay_forward=True)
    with serving(llama, config) as manager:
        for _ in range(3):
            run(manager, PROMPTS[:5])
        for error, abandoned, how in (
            (MemoryError(), 1, "recorded, "),
            (IndexError("of the program"), 1, "a replayed step failed: IndexError: of the program"),
        ):
            errors.append(error)
            for prompt, output in zip(PROMPTS, run(manager, PROMPTS), strict=True):
                assert_right(llama, prompt, output)
            assert manager.stats().abandoned_steps == abandoned
            assert how in manager.describe()


# ------------------------------------------------------------ at random, under pressure


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "mistral"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_raises_and_when_everybody_ends_as_ever(
    model_type: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So little room that sequences lose theirs, to the host and altogether; prompts that share parts of pages.
    model = tiny_model(model_type)
    text = [3 + (index * 29) % 90 for index in range(40)]
    prompts = [text[: 5 + own % 9] + [3 + own] * (own % 3) for own in range(14)]
    config = ContinuousBatchingConfig(
        page_size=8,
        num_blocks=14,
        max_batch_tokens=24,
        cpu_offload_space=0.0005,
        scheduler_type=("fifo", "prefill_first")[seed % 2],
    )
    chance = random.Random(seed)
    step_runs = Runner.run

    def faulty(self: Runner, step: Any) -> None:
        [fault] = chance.choices(["raises first", "raises last", "no memory", "none"], [6, 6, 1, 27])
        if fault == "raises first" and step.rows > 1:
            raise ValueError("before anything was computed")
        if fault == "no memory" and step.tokens > 1:
            raise MemoryError
        step_runs(self, step)
        if fault == "raises last" and step.rows > 1:
            raise ValueError("when everything was computed")

    monkeypatch.setattr(Runner, "run", faulty)
    with serving(model, config) as manager:
        for _ in range(2):
            for prompt, output in zip(prompts, run(manager, prompts), strict=True):
                assert_right(model, prompt, output)
        stats = manager.stats()
    assert stats.failed == 0
    assert stats.abandoned_steps > 10
    assert stats.cached_tokens > 0
    assert stats.soft_resets + stats.swap_ins > 0
