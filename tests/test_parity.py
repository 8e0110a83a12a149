"""Tokens equal `generate`'s, whatever the chunks, the pool and the neighbours."""

import random
import weakref
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import chairlift
from chairlift.attention.plain import FULL, Reach
from chairlift.engine.cache import geometry_of
from chairlift.probe import learn
from tiny_models import VOCAB_SIZE, reference, tie_aware_mismatch, tiny_model


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def assert_equals_generate(
    model: PreTrainedModel, inputs: list[list[int]], outputs: dict[str, chairlift.GenerationOutput], new_tokens: int
) -> None:
    for prompt, output in zip(inputs, outputs.values(), strict=True):
        assert output.error is None
        assert output.prompt_ids == prompt
        tokens, gaps = reference(model, prompt, new_tokens)
        assert tie_aware_mismatch(output.generated_tokens, tokens, gaps) is None


@pytest.mark.parametrize("page_size", [4, 7, 64])
@pytest.mark.parametrize("max_batch_tokens", [3, 5, 64])
def test_chunks_and_pages_of_any_size(llama: PreTrainedModel, page_size: int, max_batch_tokens: int) -> None:
    inputs = prompts([1, 2, 3, 4, 5, 8, 17, 33])
    config = chairlift.ContinuousBatchingConfig(
        page_size=page_size, num_blocks=-(-400 // page_size), max_batch_tokens=max_batch_tokens
    )
    outputs = chairlift.generate_batch(llama, inputs, continuous_batching_config=config, max_new_tokens=9)
    assert_equals_generate(llama, inputs, outputs, 9)


@pytest.mark.parametrize("scheduler_type", ["fifo", "prefill_first"])
@pytest.mark.parametrize("num_blocks", [8, 12, 16, 20])
def test_a_pool_too_small_for_all_resets_victims_and_loses_nothing(
    llama: PreTrainedModel, num_blocks: int, scheduler_type: str
) -> None:
    inputs = prompts([6, 6, 6, 6, 6])
    manager = chairlift.init_continuous_batching(
        llama,
        GenerationConfig(max_new_tokens=24, do_sample=False),
        chairlift.ContinuousBatchingConfig(
            page_size=4,
            num_blocks=num_blocks,
            safety_margin=0.0,
            return_logprobs=True,
            max_batch_tokens=32,
            scheduler_type=scheduler_type,
        ),
    )
    manager.start()
    labels = manager.add_requests(inputs, record_timestamps=True)
    outputs = {label: manager.get_result(label) for label in labels}
    manager.stop()
    assert_equals_generate(llama, inputs, outputs, 24)
    for output in outputs.values():
        assert len(output.logprobs) == len(output.timestamps) == 24
        assert output.timestamps == sorted(output.timestamps)
    stats = manager.stats()
    assert stats.soft_resets > 0
    assert stats.owned_blocks == 0


def test_half_loaded_prompts_do_not_block_each_other(llama: PreTrainedModel) -> None:
    inputs = prompts([40, 40, 38])
    for num_blocks in (11, 12, 14):
        config = chairlift.ContinuousBatchingConfig(page_size=4, num_blocks=num_blocks, max_batch_tokens=8)
        outputs = chairlift.generate_batch(llama, inputs, continuous_batching_config=config, max_new_tokens=3)
        assert_equals_generate(llama, inputs, outputs, 3)


def test_logprobs_are_those_of_the_models_own_forward(llama: PreTrainedModel) -> None:
    inputs = prompts([5, 19])
    config = chairlift.ContinuousBatchingConfig(page_size=4, num_blocks=32, max_batch_tokens=7, return_logprobs=True)
    outputs = chairlift.generate_batch(llama, inputs, continuous_batching_config=config, max_new_tokens=6)
    for prompt, output in zip(inputs, outputs.values(), strict=True):
        text = torch.tensor([prompt + output.generated_tokens])
        with torch.no_grad():
            logprobs = torch.log_softmax(llama(text).logits[0].float(), dim=-1)
        for n, token in enumerate(output.generated_tokens):
            expected = float(logprobs[len(prompt) - 1 + n, token])
            assert output.logprobs[n] == pytest.approx(expected, abs=1e-4)


def test_end_tokens_end_one_sequence_and_not_its_neighbours(llama: PreTrainedModel) -> None:
    inputs = prompts([5, 6, 7, 8, 9])
    plain = [reference(llama, prompt, 12)[0] for prompt in inputs]
    end = plain[2][4]
    outputs = chairlift.generate_batch(llama, inputs, max_new_tokens=12, eos_token_id=[10**6, end])
    for tokens, output in zip(plain, outputs.values(), strict=True):
        expected = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        assert output.generated_tokens == expected
        assert output.finish_reason == ("stop" if end in tokens else "length")


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager", "paged|sdpa", "paged|eager"])
def test_whatever_attention_the_model_was_loaded_with(llama: PreTrainedModel, attn_implementation: str) -> None:
    inputs = prompts([5, 12])
    expected = [reference(llama, prompt, 8)[0] for prompt in inputs]
    other = tiny_model("llama")
    other.config._attn_implementation = attn_implementation
    outputs = chairlift.generate_batch(other, inputs, max_new_tokens=8)
    assert [output.generated_tokens for output in outputs.values()] == expected
    assert other.config._attn_implementation == attn_implementation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_run(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    outputs = chairlift.generate_batch(model, prompts([5, 12]), max_new_tokens=4)
    assert [len(output.generated_tokens) for output in outputs.values()] == [4, 4]


def test_kinds_of_unlike_sizes_share_blocks() -> None:
    # Its windowed layers have smaller heads; a window as long as the longest sequence is none.
    model = tiny_model("gemma4_text", window=512)
    facts = learn(model)
    kinds = {call.kind for call in facts.calls}
    assert len(kinds) > 1
    geometry = geometry_of(facts.calls, 4)
    assert geometry.num_groups >= len(kinds)
    owners = [call for call in facts.calls if call.reads_from == call.ordinal]
    assert set(geometry.places) == {call.ordinal for call in owners}
    inputs = prompts([3, 9, 21])
    config = chairlift.ContinuousBatchingConfig(page_size=4, num_blocks=16, max_batch_tokens=8)
    outputs = chairlift.generate_batch(model, inputs, continuous_batching_config=config, max_new_tokens=8)
    assert_equals_generate(model, inputs, outputs, 8)


def test_a_call_that_shares_k_and_v_has_no_pages_of_its_own() -> None:
    facts = learn(tiny_model("gemma3n_text", num_kv_shared_layers=1))
    assert [call.reads_from == call.ordinal for call in facts.calls].count(False) >= 1


def test_a_layer_may_call_twice() -> None:
    facts = learn(tiny_model("diffllama"))
    assert len(facts.calls) == 4


def test_k_and_v_may_differ_in_size() -> None:
    (kind,) = {call.kind for call in learn(tiny_model("deepseek_v3")).calls}
    assert kind.head_size != kind.head_size_v


def test_an_expert_that_gets_every_token_is_no_table_of_positions() -> None:
    model = tiny_model("mixtral", num_local_experts=1, num_experts_per_tok=1)
    assert learn(model).max_positions is None


@pytest.mark.parametrize("window", [3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_windows_shorter_and_longer_than_pages_and_chunks(family: str, window: int) -> None:
    model = tiny_model(family, window=window)
    inputs = prompts([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 20, 25, 33])
    expected = [reference(model, prompt, 12) for prompt in inputs]
    for max_batch_tokens, num_blocks in ((3, 80), (5, 80), (64, 80), (64, 20), (16, 12)):
        config = chairlift.ContinuousBatchingConfig(
            page_size=4, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, safety_margin=0.0
        )
        outputs = chairlift.generate_batch(model, inputs, continuous_batching_config=config, max_new_tokens=12)
        for output, (tokens, gaps) in zip(outputs.values(), expected, strict=True):
            assert tie_aware_mismatch(output.generated_tokens, tokens, gaps) is None


# The last one is longer than the first of the forwards that a model is learned from.
@pytest.mark.parametrize("chunk", [3, 4, 5, 8, 16])
def test_attention_within_chunks_of_any_size(chunk: int) -> None:
    model = tiny_model("llama4_text", window=chunk, attn_temperature_tuning=False)
    assert {call.kind.reach for call in learn(model).calls} == {FULL, Reach("chunk", chunk)}
    inputs = prompts([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 20, 25, 33])
    expected = [reference(model, prompt, 12) for prompt in inputs]
    for max_batch_tokens, num_blocks in ((3, 80), (5, 80), (64, 80), (64, 20), (16, 12)):
        config = chairlift.ContinuousBatchingConfig(
            page_size=4, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, safety_margin=0.0
        )
        outputs = chairlift.generate_batch(model, inputs, continuous_batching_config=config, max_new_tokens=12)
        for output, (tokens, gaps) in zip(outputs.values(), expected, strict=True):
            assert tie_aware_mismatch(output.generated_tokens, tokens, gaps) is None


# Of 97 or 257 tokens a chunk starts right after where a mask is asked what is seen from far away.
@pytest.mark.parametrize("reach", [Reach(form, n) for form in ("window", "chunk") for n in (2, 8, 76, 97, 257, 8192)])
def test_a_reach_is_learned_whatever_its_size(reach: Reach) -> None:
    size = reach.tokens
    model = tiny_model("llama4_text", window=size, attn_temperature_tuning=False)
    if reach.form == "window":
        model = tiny_model("phimoe", window=size)
    assert reach in {call.kind.reach for call in learn(model).calls}


def test_chunks_share_prefixes_that_end_within_them() -> None:
    model = tiny_model("llama4_text", window=6, attn_temperature_tuning=False)
    (text,) = prompts([40])
    inputs = [text[:length] + tail for length, tail in zip((5, 8, 12, 15, 23, 32, 39), prompts([5] * 7), strict=True)]
    expected = [reference(model, prompt, 8) for prompt in inputs]
    config = chairlift.ContinuousBatchingConfig(page_size=4, num_blocks=40, max_batch_tokens=7)
    with chairlift.continuous_batching_context_manager(model, continuous_batching_config=config) as manager:
        for _ in range(2):
            labels = manager.add_requests(inputs, max_new_tokens=8)
            for label, (tokens, gaps) in zip(labels, expected, strict=True):
                assert tie_aware_mismatch(manager.get_result(label).generated_tokens, tokens, gaps) is None
        assert manager.stats().cached_tokens > 0


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("mistral", {}),
        ("llama4_text", {"layer_types": ["chunked_attention"] * 2, "attn_temperature_tuning": False}),
    ],
)
def test_a_model_of_windows_or_chunks_alone_outgrows_its_pool(family: str, overrides: dict[str, Any]) -> None:
    model = tiny_model(family, window=8, **overrides)
    (prompt,) = prompts([30])
    config = chairlift.ContinuousBatchingConfig(page_size=4, num_blocks=4, max_batch_tokens=16)
    output = chairlift.generate_batch(model, [prompt], continuous_batching_config=config, max_new_tokens=90)["req_0"]
    tokens, gaps = reference(model, prompt, 90)
    assert tie_aware_mismatch(output.generated_tokens, tokens, gaps) is None
    assert len(output.generated_tokens) == 90


def test_a_bound_beyond_everything_is_no_bound(llama: PreTrainedModel) -> None:
    config = chairlift.ContinuousBatchingConfig(page_size=4, num_blocks=8)
    output = chairlift.generate_batch(
        llama, [[5, 6, 7]], continuous_batching_config=config, max_new_tokens=10**30, eos_token_id=-1
    )["req_0"]
    assert len(output.generated_tokens) == 32 - 3


def test_a_request_full_of_nan_leaves_no_trace_in_the_blocks_it_had() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = float("nan")
    inputs = [[token % 50 for token in prompt] for prompt in prompts([5, 6, 9, 10, 11, 17])]
    config = chairlift.ContinuousBatchingConfig(page_size=4, num_blocks=24, max_batch_tokens=16)
    with chairlift.continuous_batching_context_manager(model, continuous_batching_config=config) as manager:
        manager.get_result(manager.add_request([50] * 90, max_new_tokens=2))
        labels = manager.add_requests(inputs, max_new_tokens=9)
        outputs = {label: manager.get_result(label) for label in labels}
    assert_equals_generate(model, inputs, outputs, 9)


def test_attention_with_a_softcap_in_slices_is_attention() -> None:
    from chairlift.attention import sdpa
    from chairlift.attention.plain import scores_attention, visibility

    query, key, value = torch.randn(1, 4, 30, 8), torch.randn(1, 2, 70, 8), torch.randn(1, 2, 70, 8)
    for reach in (Reach(), Reach("window", 9), Reach("chunk", 16)):
        visible = visibility(reach, range(40, 70), range(70), query.device)
        for softcap in (None, 5.0):
            expected = scores_attention(query, key, value, scale=0.3, visible=visible, softcap=softcap)
            for scores in (1, 2000, 1 << 22):
                out = torch.full((30, 4, 8), float("nan"))
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(sdpa, "SCORES", scores)
                    sdpa._Form(0.3, softcap, None, reach, written_out=False).prefill(
                        query, key, value, range(40, 70), 0, out
                    )
                assert torch.allclose(out, expected[0].transpose(0, 1), atol=1e-5)


def test_learning_a_model_leaves_nothing_behind(llama: PreTrainedModel) -> None:
    learn(llama)
    before = len(weakref.finalize._registry)
    learn(llama)
    assert len(weakref.finalize._registry) == before
