"""RoPE whose factors depend on the longest position of a forward (longrope): two regimes, never in one step."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import chairlift
from chairlift.probe import learn
from test_prefix_cache import assert_generates, serve, serving, text
from tiny_models import tiny_model

SHORT = 16


def long_model(family: str = "phi3", **overrides: Any) -> PreTrainedModel:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": SHORT,
        "short_factor": [1.0] * 4, "long_factor": [1.0, 1.7, 3.1, 6.0], "short_mscale": 1.0, "long_mscale": 1.2,
    }  # fmt: skip
    return tiny_model(
        family, rope_parameters=rope, original_max_position_embeddings=SHORT, max_position_embeddings=128, **overrides
    )


def test_the_two_sets_of_factors_give_other_tokens() -> None:
    """Or the tests below prove nothing."""
    model = long_model()
    ids = torch.tensor([text(SHORT)])
    positions = torch.arange(SHORT + 1)[None]
    with torch.no_grad():
        short = model(ids, position_ids=positions[:, :SHORT]).logits[0, -1]
        long = model(torch.cat([ids, ids[:, :1]], 1), position_ids=positions).logits[0, SHORT - 1]
    assert (short - long).abs().max() > 0.1


@pytest.mark.parametrize("family", ["phi3", "phimoe"])
@pytest.mark.parametrize("max_batch_tokens", [3, 5, 64])
@pytest.mark.parametrize("num_blocks", [20, 120])
def test_prompts_before_at_and_beyond_the_change(family: str, max_batch_tokens: int, num_blocks: int) -> None:
    model = long_model(family)
    assert learn(model).first_regime == SHORT
    prompts = [text(length, length % 3) for length in (1, 3, 9, 12, 14, 15, 16, 17, 18, 25, 40)]
    with serving(model, max_batch_tokens=max_batch_tokens, num_blocks=num_blocks, safety_margin=0.0) as manager:
        outputs = serve(manager, prompts + prompts)
        stats = manager.stats()
    # Logprobs beside tokens: of those of a sequence that crossed, the last are checked by one forward, which is long.
    assert_generates(model, [output for output in outputs if len(output.prompt_ids) > SHORT])
    for output in outputs:
        if len(output.prompt_ids) <= SHORT:
            output.logprobs, tokens = [], output.generated_tokens
            assert tokens == chairlift_reference(model, output.prompt_ids)
    crossing = sum(len(prompt) <= SHORT < len(prompt) + 7 for prompt in prompts)
    assert stats.crossings == 2 * crossing
    assert stats.owned_blocks == 0


def chairlift_reference(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def test_k_and_v_of_one_regime_serve_nobody_in_the_other() -> None:
    model = long_model()
    common = text(12)
    prompts = [common + text(2, 1), common + text(20, 2), common + text(1, 3), common + text(21, 4)]
    with serving(model) as manager:
        outputs = [serve(manager, [prompt], max_new_tokens=2)[0] for prompt in prompts]
    assert_generates(model, outputs, new_tokens=2)
    assert [output.cached_tokens for output in outputs] == [0, 0, 12, 12]


def test_a_model_that_keeps_what_the_other_factors_computed_is_refused() -> None:
    model = long_model("llama")
    with pytest.raises(ValueError, match="'longrope' changes its factors in the middle of a sequence, but `generate`"):
        chairlift.init_continuous_batching(model)
