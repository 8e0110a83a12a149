"""Every family of the causal-LM mapping is served with `generate`'s tokens, or refused with a reason."""

import pytest

from model_table import FAILED, SERVED, WRONG, try_family
from tiny_models import families

# Families that go through transformers' attention interface with full attention, and must be served.
MUST_BE_SERVED = {
    "cohere", "dbrx", "deepseek_v2", "deepseek_v3", "diffllama", "dory", "gemma", "gemma2", "gemma3n_text",
    "gemma4_text", "glm", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "jetmoe",
    "llama", "minicpm3", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "opt", "persimmon", "phi", "phi3",
    "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2",
}  # fmt: skip
# Why some cannot be: of each sort one.
REFUSED_FOR = {
    "bloom": "do not call transformers' attention interface",
    "mamba": "keep more than K and V",
    "jamba": "keep more than K and V",
    "doge": "attention mask or bias of its own",
    "bart": "numbers the tokens of a forward by itself",
    "deepseek_v32": "keep more than K and V",
}


@pytest.mark.parametrize("family", families())
def test_family_is_served_rightly_or_refused(family: str) -> None:
    row = try_family(family)
    for outcome in (row.plain, row.windowed):
        assert outcome is None or outcome.word not in (WRONG, FAILED), row.result
    if family in MUST_BE_SERVED:
        assert row.plain.word == SERVED, row.result


@pytest.mark.parametrize(("family", "reason"), REFUSED_FOR.items())
def test_a_refusal_says_why(family: str, reason: str) -> None:
    from chairlift import generate_batch
    from tiny_models import tiny_model

    with pytest.raises(ValueError, match=reason):
        generate_batch(tiny_model(family), [[5, 6, 7]], max_new_tokens=2)


@pytest.mark.parametrize("window", [None, 8])
def test_positions_of_a_models_own_are_refused_however_late_they_matter(window: int | None) -> None:
    from chairlift import generate_batch
    from tiny_models import tiny_model

    # It scales queries by numbers of its own, from the 8,191st token on: no short text would show it.
    with pytest.raises(ValueError, match="numbers the tokens of a forward by itself"):
        generate_batch(tiny_model("llama4_text", window=window, floor_scale=8192), [[5, 6, 7]], max_new_tokens=2)


def test_tokens_that_look_at_their_neighbours_beside_attention_are_refused() -> None:
    from chairlift import generate_batch
    from tiny_models import tiny_model

    model = tiny_model("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda *given: given[-1] + given[-1].roll(1, dims=1))
    with pytest.raises(ValueError, match="its logits are not those of the sequence alone"):
        generate_batch(model, [[5, 6, 7]], max_new_tokens=2)


def test_a_window_that_no_call_is_told_is_refused() -> None:
    from chairlift import generate_batch
    from tiny_models import tiny_model

    # Plain causal calls, but the cache that `generate` makes forgets.
    with pytest.raises(ValueError, match="window of 8 tokens, which none of its attention calls is told"):
        generate_batch(tiny_model("moshi", window=8), [[5, 6, 7]], max_new_tokens=2)


# Windows told by the call, or (the last two) only by the mask; beside full attention or alone.
@pytest.mark.parametrize("family", ["gemma3_text", "gemma3n_text", "cohere2", "gpt_oss", "phimoe", "qwen2_moe"])
def test_windows_are_served_whoever_tells_of_them(family: str) -> None:
    row = try_family(family)
    assert row.windowed is not None
    assert row.windowed.word == SERVED, row.result
