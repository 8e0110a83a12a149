"""Prompts that begin alike share K and V, and every token stays `generate`'s."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import chairlift
from chairlift import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationOutput
from chairlift.books import Books
from tiny_models import VOCAB_SIZE, WAYS_TO_CHANGE, change_weights, reference, tie_aware_mismatch, tiny_model

NEW_TOKENS = 8


def text(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


@contextmanager
def serving(
    model: PreTrainedModel, generation: GenerationConfig | None = None, **config: Any
) -> Iterator[ContinuousBatchingManager]:
    config = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16, "return_logprobs": True, **config}
    generation = generation or GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False)
    batching = ContinuousBatchingConfig(**config)
    with chairlift.continuous_batching_context_manager(
        model, generation, continuous_batching_config=batching
    ) as manager:
        yield manager


def serve(manager: ContinuousBatchingManager, prompts: list[list[int]], **arguments: Any) -> list[GenerationOutput]:
    """All at once; outputs in order."""
    labels = manager.add_requests(prompts, **arguments)
    return [result(manager, label) for label in labels]


def result(manager: ContinuousBatchingManager, label: str) -> GenerationOutput:
    output = manager.get_result(label, timeout=60)
    assert output is not None
    assert output.error is None
    return output


def assert_generates(model: PreTrainedModel, outputs: list[GenerationOutput], new_tokens: int = NEW_TOKENS) -> None:
    """Tokens are `generate`'s, and logprobs those of the model's own forward over prompt and tokens."""
    known: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}
    for output in outputs:
        prompt = tuple(output.prompt_ids)
        if prompt not in known:
            known[prompt] = reference(model, output.prompt_ids, new_tokens)
        assert tie_aware_mismatch(output.generated_tokens, *known[prompt]) is None
        whole = torch.tensor([output.prompt_ids + output.generated_tokens])
        with torch.no_grad():
            own = torch.log_softmax(model(whole).logits[0, len(prompt) - 1 : -1].float(), dim=-1)
        expected = own.gather(1, whole[0, len(prompt) :, None]).squeeze(1)
        assert torch.allclose(torch.tensor(output.logprobs), expected, atol=1e-4)


@pytest.mark.parametrize("length", [4, 8, 12, 16, 17, 33, 240])
def test_a_prompt_that_is_cached_in_full_computes_one_token(llama: PreTrainedModel, length: int) -> None:
    with serving(llama, num_blocks=80) as manager:
        outputs = [serve(manager, [text(length)])[0] for _ in range(3)]
        stats = manager.stats()
    assert_generates(llama, outputs)
    whole_units = length // 4 * 4
    assert [output.cached_tokens for output in outputs] == [0, *[min(whole_units, length - 1)] * 2]
    assert stats.prompt_tokens == length + 2 * (length - outputs[1].cached_tokens)


def test_a_prompt_that_parts_inside_a_page_copies_what_it_shares(llama: PreTrainedModel) -> None:
    common = text(21)
    prompts = [common + text(4, seed) for seed in (1, 2, 3)]
    with serving(llama, page_size=8, match_unit=2) as manager:
        outputs = [serve(manager, [prompt])[0] for prompt in prompts]
        stats = manager.stats()
    assert_generates(llama, outputs)
    assert [output.cached_tokens for output in outputs] == [0, 21, 21]
    assert stats.copied_blocks == 2


def test_the_same_prompts_at_once_are_computed_once(llama: PreTrainedModel) -> None:
    prompt = text(41)
    with serving(llama) as manager:
        outputs = serve(manager, [prompt] * 6)
        stats = manager.stats()
    assert_generates(llama, outputs)
    assert sorted(output.cached_tokens for output in outputs) == [0, 40, 40, 40, 40, 40]
    assert stats.prompt_tokens == 41 + 5


def test_one_system_prompt_is_computed_once_for_all_that_begin_with_it(llama: PreTrainedModel) -> None:
    system = text(40)
    prompts = [[*system, seed, *text(4 + seed, seed)] for seed in range(1, 13)]
    with serving(llama, num_blocks=120) as manager:
        outputs = serve(manager, prompts)
        stats = manager.stats()
    assert_generates(llama, outputs)
    assert stats.prompt_tokens == sum(map(len, prompts)) - 11 * 40


def test_when_the_first_of_them_is_cancelled_the_next_takes_its_place(llama: PreTrainedModel) -> None:
    prompt = text(200)
    with serving(llama, max_batch_tokens=8) as manager:
        first, second = manager.add_request(prompt), manager.add_request(prompt)
        manager.cancel_request(first)
        output = manager.get_result(first, timeout=60)
        assert output is not None
        assert output.finish_reason in ("cancelled", "length")
        outputs = [result(manager, second), *serve(manager, [prompt])]
    assert_generates(llama, outputs)


def test_later_turns_of_a_talk_find_the_earlier_ones(llama: PreTrainedModel) -> None:
    with serving(llama) as manager:
        talk, cached, outputs = text(13), [], []
        for turn in range(4):
            (output,) = serve(manager, [talk])
            outputs.append(output)
            cached.append((output.cached_tokens, len(talk)))
            talk = talk + output.generated_tokens + text(5, seed=turn + 7)
    assert_generates(llama, outputs)
    # All but the last tokens of the turn before, whose K and V nobody needed.
    assert cached == [(0, 13), (20, 26), (32, 39), (44, 52)]


def test_sharing_changes_no_token(llama: PreTrainedModel) -> None:
    prompts = [text(9 + 3 * seed, seed % 4) for seed in range(10)] * 2
    outputs = []
    for allowed in (True, False):
        with serving(llama, allow_block_sharing=allowed, num_blocks=40) as manager:
            assert (manager.config.match_unit or 0) == (4 if allowed else 0)
            outputs.append(serve(manager, prompts))
            assert (manager.stats().cached_tokens > 0) == allowed
            assert allowed or manager.stats().cached_blocks == 0
    assert_generates(llama, outputs[0])
    assert [output.generated_tokens for output in outputs[0]] == [output.generated_tokens for output in outputs[1]]


def test_prompts_of_another_salt_share_nothing(llama: PreTrainedModel) -> None:
    prompt = text(17)
    with serving(llama) as manager:
        salts = [None, "a", "a", "", "b", None, "", "b"]
        outputs = [result(manager, manager.add_request(prompt, cache_salt=salt)) for salt in salts]
        with pytest.raises(TypeError, match="cache_salt is 3, but must be a string"):
            manager.add_request(prompt, cache_salt=3)  # type: ignore[arg-type]
    assert_generates(llama, outputs)
    assert [output.cached_tokens for output in outputs] == [0, 0, 16, 0, 0, 16, 16, 16]


FAMILIES = {
    "full": ("llama", None),
    "windows": ("mistral", 7),
    "windows beside full": ("gemma2", 6),
    "shared K and V": ("gemma3n_text", 5),
    "sinks": ("gpt_oss", 8),
}


@pytest.mark.parametrize("swap", [0.0, 0.001])
@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
@pytest.mark.parametrize("kinds", FAMILIES)
def test_eviction_swaps_and_resets_change_no_token(kinds: str, scheduler_type: str, swap: float) -> None:
    family, window = FAMILIES[kinds]
    overrides = {"num_kv_shared_layers": 1} if family == "gemma3n_text" else {}
    model = tiny_model(family, window=window, **overrides)
    draw = random.Random(3)
    prompts = [text(draw.choice([6, 11, 16]), seed % 3) + text(draw.randrange(1, 9), seed) for seed in range(16)]
    evictions = offloads = hits = 0
    for chunk, match_unit, cache_eviction, num_blocks in (
        (3, 1, "lru", 16), (16, 4, "lifo", 14), (64, 2, "lru", 16), (5, 0, "lru", 14),
    ):  # fmt: skip
        with serving(
            model, max_batch_tokens=chunk, match_unit=match_unit, cache_eviction=cache_eviction,
            num_blocks=num_blocks, scheduler_type=scheduler_type, safety_margin=0.0, cpu_offload_space=swap,
        ) as manager:  # fmt: skip
            outputs = serve(manager, prompts)
            stats = manager.stats()
        assert_generates(model, outputs)
        assert stats.owned_blocks == 0
        assert stats.free_swap_blocks == stats.swap_capacity
        assert match_unit or stats.cached_tokens == 0
        hits += stats.cached_tokens
        evictions += stats.evictions
        offloads += stats.swap_outs if swap else stats.soft_resets
    assert evictions
    assert offloads
    assert hits


def test_a_victim_comes_back_without_computing_anything_again(llama: PreTrainedModel) -> None:
    prompts = [text(6, seed) for seed in range(5)]
    generation = GenerationConfig(max_new_tokens=24, do_sample=False)
    with serving(
        llama, generation, num_blocks=12, max_batch_tokens=32, safety_margin=0.0, cpu_offload_space=0.01
    ) as manager:
        outputs = serve(manager, prompts)
        stats = manager.stats()
    assert_generates(llama, outputs, new_tokens=24)
    assert stats.swap_outs == stats.swap_ins > 0
    assert stats.soft_resets == 0
    assert stats.prompt_tokens == 5 * 6


def test_what_does_not_fit_the_host_is_computed_again(llama: PreTrainedModel) -> None:
    prompts = [text(6, seed) for seed in range(8)]
    generation = GenerationConfig(max_new_tokens=24, do_sample=False)
    with serving(llama, generation, num_blocks=12, max_batch_tokens=32, safety_margin=0.0) as manager:
        block = manager.geometry.block_bytes
    with serving(
        llama, generation, num_blocks=12, max_batch_tokens=32, safety_margin=0.0, cpu_offload_space=5 * block / 2**30
    ) as manager:
        outputs = serve(manager, prompts)
        stats = manager.stats()
    assert_generates(llama, outputs, new_tokens=24)
    assert stats.swap_outs > 0
    assert stats.soft_resets > 0
    assert stats.swap_capacity == 5


@pytest.mark.parametrize("how", WAYS_TO_CHANGE)
def test_k_and_v_of_other_weights_serve_nobody(how: str) -> None:
    model = tiny_model("llama")
    prompt = text(17)
    config = ContinuousBatchingConfig(page_size=4, num_blocks=64, return_logprobs=True)
    manager = chairlift.init_continuous_batching(model, GenerationConfig(max_new_tokens=8, do_sample=False), config)
    manager.start()
    before = serve(manager, [prompt] * 2)
    assert_generates(model, before)
    manager.stop()
    manager.start()  # nothing changed
    (again,) = serve(manager, [prompt])
    manager.stop()
    assert (again.cached_tokens, again.generated_tokens) == (16, before[0].generated_tokens)
    assert manager.stats().epoch == 0
    change_weights(model, how)
    manager.start()
    (after,) = serve(manager, [prompt])
    manager.destroy()
    assert_generates(model, [after])
    assert after.cached_tokens == 0
    assert manager.stats().epoch == 1


def test_a_reset_of_the_cache_holds_while_requests_run(llama: PreTrainedModel) -> None:
    prompt = text(30)
    long = GenerationConfig(max_new_tokens=150, do_sample=False)
    with serving(llama, long) as manager:
        running = manager.add_request(prompt, streaming=True)
        updates = manager.request_id_iter(running)
        next(updates)
        manager.reset_prefix_cache()
        after = result(manager, manager.add_request(prompt, max_new_tokens=NEW_TOKENS))
        again = result(manager, manager.add_request(prompt, max_new_tokens=NEW_TOKENS))
        last = list(updates)[-1]
    assert (after.cached_tokens, again.cached_tokens) == (0, 29)
    assert_generates(llama, [after, again])
    assert_generates(llama, [last], new_tokens=150)


def test_every_block_comes_back_after_a_prefix_was_shared_and_given_up(llama: PreTrainedModel) -> None:
    common = text(16)
    with serving(llama) as manager:
        outputs = [serve(manager, [common[:shared] + text(3, shared)])[0] for shared in (6, 10, 14, 16, 6)]
        assert manager.stats().owned_blocks == 0
        assert manager.stats().cached_blocks > 0
        manager.reset_prefix_cache()
        stats = manager.stats()
    assert_generates(llama, outputs)
    assert stats.free_blocks == stats.capacity


def test_a_cancelled_prefill_leaves_only_what_it_computed(llama: PreTrainedModel) -> None:
    prompt = text(200)
    with serving(llama, max_batch_tokens=8) as manager:
        for _ in range(4):
            label = manager.add_request(prompt)
            manager.cancel_request(label)
            assert manager.get_result(label, timeout=60) is not None
        (output,) = serve(manager, [prompt])
    assert_generates(llama, [output])


def test_blocks_that_were_given_to_others_are_found_no_more(llama: PreTrainedModel) -> None:
    first = text(20)
    with serving(llama, num_blocks=16, safety_margin=0.0) as manager:
        serve(manager, [first])
        others = [serve(manager, [text(50, seed)])[0] for seed in range(1, 5)]
        (again,) = serve(manager, [first])
    assert_generates(llama, [*others, again])
    assert again.cached_tokens == 0


def test_a_thousand_mixed_prompts_keep_their_own_text(llama: PreTrainedModel) -> None:
    draw = random.Random(11)
    stems = [text(draw.randrange(4, 40), seed) for seed in range(4)]
    prompts = []
    for seed in range(96):
        stem = draw.choice(stems)
        prompts.append(stem[: draw.randrange(1, len(stem) + 1)] + text(draw.randrange(0, 6), 100 + seed % 7))
    for scheduler_type, chunk, num_blocks in (("fifo", 4, 14), ("prefill_first", 33, 30)):
        with serving(
            llama, scheduler_type=scheduler_type, max_batch_tokens=chunk, num_blocks=num_blocks, match_unit=1
        ) as manager:
            assert_generates(llama, serve(manager, prompts))


def test_samples_of_a_prompt_are_as_if_they_came_alone(llama: PreTrainedModel) -> None:
    prompts = [text(7), text(18, 1)]
    generation = GenerationConfig(max_new_tokens=6, do_sample=True, top_k=1, num_return_sequences=3)
    with serving(llama, generation, num_blocks=16) as manager:
        labels = manager.add_requests(prompts)
        assert labels == ["req_0", "req_1"]
        outputs = [
            result(manager, name) for label in labels for name in (label, f"{label}__child#0", f"{label}__child#1")
        ]
        stats = manager.stats()
    assert [output.prompt_ids for output in outputs] == [prompts[0]] * 3 + [prompts[1]] * 3
    for output in outputs:
        tokens, gaps = reference(llama, output.prompt_ids, 6)
        assert tie_aware_mismatch(output.generated_tokens, tokens, gaps) is None
        assert len(output.logprobs) == 6
    assert stats.prompt_tokens <= 7 + 2 * 3 + 18 + 2 * 2


def test_samples_of_a_prompt_draw_each_for_itself(llama: PreTrainedModel) -> None:
    generation = GenerationConfig(max_new_tokens=12, do_sample=True, num_return_sequences=4)
    drawn = []
    for num_blocks in (60, 14):
        with serving(llama, generation, seed=3, num_blocks=num_blocks, safety_margin=0.0) as manager:
            label = manager.add_request(text(9))
            names = [label, *(f"{label}__child#{child}" for child in range(3))]
            drawn.append([result(manager, name).generated_tokens for name in names])
    assert drawn[0] == drawn[1]
    assert len({tuple(tokens) for tokens in drawn[0]}) == 4


def test_to_cancel_a_request_cancels_all_its_samples_and_a_sample_only_itself(llama: PreTrainedModel) -> None:
    generation = GenerationConfig(max_new_tokens=10**6, do_sample=True, num_return_sequences=3)
    with serving(llama, generation, num_blocks=4000, max_batch_tokens=32) as manager:
        label = manager.add_request(text(9))
        manager.cancel_request(f"{label}__child#1")
        one = manager.get_result(f"{label}__child#1", timeout=60)
        assert one is not None
        assert one.finish_reason == "cancelled"
        assert manager.stats().running + manager.stats().waiting == 2
        with pytest.raises(ValueError, match="'req_0__child#0' is taken"):
            manager.add_request(text(3), request_id="req_0__child#0")
        manager.cancel_request(label)
        outputs = [manager.get_result(name, timeout=60) for name in (label, f"{label}__child#0")]
        assert [output.finish_reason for output in outputs if output is not None] == ["cancelled"] * 2
        stats = manager.stats()
        assert (stats.running, stats.waiting, stats.owned_blocks) == (0, 0, 0)


class Ended:
    """The last event of a sequence."""

    finish_reason, error, started, ended, cached_tokens = "stop", None, 0.0, 1.0, 0
    prompt, tokens, logprobs, timestamps, epochs = [5], [6], [], [], [(0, 0)]

    def __init__(self, request: int) -> None:
        self.request = request


@pytest.mark.parametrize("requests", [1, 3])
def test_the_name_of_a_first_sample_that_has_ended_still_stands_for_all(requests: int) -> None:
    books = Books()
    labels = [name for n in range(requests) for name in (f"req_{n}", f"req_{n}__child#0", f"req_{n}__child#1")]
    books.add(10, labels, None, n=3, created=0.0, record_timestamps=False, numbered_to=None)
    first = 10 + 3 * (requests - 1)
    label = f"req_{requests - 1}"
    assert books.output(Ended(first)).request_id == label
    with pytest.raises(KeyError):
        books.id_of(label)
    assert books.id_to_cancel(label) == first
    assert books.id_to_cancel(f"{label}__child#1") == first + 2
    for sequence in (first + 1, first + 2):
        assert books.id_to_cancel(label) == first
        books.output(Ended(sequence))
    with pytest.raises(KeyError):
        books.id_to_cancel(label)


def test_no_match_unit_is_no_prefix_cache(llama: PreTrainedModel) -> None:
    with serving(llama, match_unit=0) as manager:
        outputs = [serve(manager, [text(20)])[0] for _ in range(2)]
        assert manager.config.match_unit == 0
        assert "prefix cache" in manager.describe()
    assert [output.cached_tokens for output in outputs] == [0, 0]


def test_samples_that_no_queue_or_label_has_room_for_are_refused(llama: PreTrainedModel) -> None:
    generation = GenerationConfig(max_new_tokens=2, do_sample=True, num_return_sequences=3)
    with pytest.raises(ValueError, match="num_return_sequences is 3, but max_queue_size 2"):
        chairlift.generate_batch(
            llama, [text(4)], generation, continuous_batching_config=ContinuousBatchingConfig(max_queue_size=2)
        )
    with serving(llama, generation) as manager:
        manager.add_request(text(4), request_id="req_1__child#0")
        # Labels of which some sequence's is taken are not given.
        assert manager.add_requests([text(4), text(5)]) == ["req_0", "req_2"]
        assert manager.add_request(text(4)) == "req_3"
        with pytest.raises(ValueError, match="'req_3__child#1' is taken"):
            manager.add_request(text(4), request_id="req_3__child#1")
        outputs = chairlift.generate_batch(
            llama,
            [text(4)] * 3,
            generation,
            continuous_batching_config=ContinuousBatchingConfig(page_size=4, num_blocks=16, max_queue_size=3),
        )
    assert len(outputs) == 9


def test_generate_batch_puts_samples_beside_their_prompt(llama: PreTrainedModel) -> None:
    outputs = chairlift.generate_batch(
        llama, [text(5), text(6)], max_new_tokens=3, num_return_sequences=2, do_sample=True, top_k=1
    )
    assert list(outputs) == ["req_0", "req_0__child#0", "req_1", "req_1__child#0"]
    assert [len(output.prompt_ids) for output in outputs.values()] == [5, 5, 6, 6]
    for value in (0, -1):
        with pytest.raises((ValueError, TypeError), match="num_return_sequences"):
            chairlift.generate_batch(llama, [text(5)], num_return_sequences=value)


@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_what_came_together_keeps_its_labels_in_the_order_of_the_inputs(
    llama: PreTrainedModel, streaming: bool, as_array: bool
) -> None:
    prompts = [text(9, seed) for seed in (5, 2, 7, 1, 2, 6)]
    inputs: Any = np.array(prompts) if as_array else prompts
    generation = GenerationConfig(max_new_tokens=3, do_sample=True, top_k=1, num_return_sequences=2)
    with serving(llama, generation) as manager:
        labels = manager.add_requests(inputs, streaming=streaming)
        if as_array:
            inputs[:] = 0  # the caller's to change
        assert labels == [f"req_{number}" for number in range(6)]
        for label, prompt in zip(labels, prompts, strict=True):
            for sequence in manager.family(label):
                (*_, output) = manager.request_id_iter(sequence)
                assert output.prompt_ids == prompt
                assert output.generated_tokens == reference(llama, prompt, 3)[0]
        assert manager.add_request(text(4)) == "req_6"


def test_of_what_came_together_those_that_begin_alike_find_each_other_in_a_small_pool(llama: PreTrainedModel) -> None:
    beginnings = [text(24, seed) for seed in range(6)]
    prompts = [beginnings[nth % 6] + text(3, 100 + nth) for nth in range(36)]
    # Room for two prompts: one after the other, none would find its beginning there still.
    with serving(llama, num_blocks=20, max_requests_per_batch=1, safety_margin=0.0) as manager:
        apart = [result(manager, manager.add_request(prompt)) for prompt in prompts]
    with serving(llama, num_blocks=20, max_requests_per_batch=1, safety_margin=0.0) as manager:
        together = serve(manager, prompts)
    assert sum(output.cached_tokens for output in apart) == 0
    assert sum(output.cached_tokens for output in together) >= 30 * 24
    assert_generates(llama, together)
