"""Attention is ours inside our own forward on the engine's thread, and the model's own everywhere else."""

import copy
import pickle
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

import chairlift
from chairlift.attention.interface import forward_context
from tiny_models import tiny_model

CONFIG = chairlift.ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=8)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(5, 45).unsqueeze(0)).logits


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_a_forward_of_another_thread_is_the_same_to_the_bit_while_the_engine_runs(attn_implementation: str) -> None:
    model = tiny_model("llama")
    model.config._attn_implementation = attn_implementation
    before = logits(model)
    manager = chairlift.init_continuous_batching(model, GenerationConfig(max_new_tokens=150), CONFIG)
    manager.start()
    labels = [manager.add_request([5 + n, 6, 7], eos_token_id=-1) for n in range(3)]
    during = []
    while manager.stats().generated_tokens < 150:
        during.append(logits(model))
    assert manager.is_running()
    manager.stop()
    assert all(len(manager.get_result(label).generated_tokens) == 150 for label in labels)
    assert during
    assert all(torch.equal(before, other) for other in [*during, logits(model)])
    assert model.config._attn_implementation == attn_implementation


def test_gradients_flow_through_an_ordinary_forward_while_the_engine_runs(llama: PreTrainedModel) -> None:
    def gradient() -> torch.Tensor:
        llama.zero_grad()
        llama(torch.arange(5, 45).unsqueeze(0)).logits.square().mean().backward()
        return llama.model.embed_tokens.weight.grad.clone()

    before = gradient()
    with chairlift.continuous_batching_context_manager(llama, continuous_batching_config=CONFIG) as manager:
        manager.add_request([5, 6, 7], max_new_tokens=60, eos_token_id=-1)
        assert torch.equal(before, gradient())
    llama.zero_grad()


def test_training_mode_is_off_for_the_session_and_back_afterwards() -> None:
    model = tiny_model("llama").train()
    model.model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    config = GenerationConfig(max_new_tokens=4)
    with chairlift.continuous_batching_context_manager(model, config, continuous_batching_config=CONFIG) as manager:
        manager.add_request([5, 6, 7])
        assert manager.get_result().finish_reason == "length"
        assert not model.training
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_two_managers_of_one_model_both_keep_it_in_evaluation_mode() -> None:
    model = tiny_model("llama").train()
    first, second = (chairlift.init_continuous_batching(model, continuous_batching_config=CONFIG) for _ in range(2))
    first.start()
    first.get_result(first.add_request([5], max_new_tokens=1))
    second.start()
    second.get_result(second.add_request([5], max_new_tokens=1))
    first.stop()
    assert not model.training
    second.stop()
    assert model.training


def test_copies_of_a_model_with_a_live_manager_are_plain_models(llama: PreTrainedModel, tmp_path: Path) -> None:
    expected = logits(llama)
    with chairlift.continuous_batching_context_manager(llama, continuous_batching_config=CONFIG) as manager:
        manager.add_request([5, 6, 7], max_new_tokens=40, eos_token_id=-1)
        copies = [copy.deepcopy(llama), pickle.loads(pickle.dumps(llama))]
        llama.save_pretrained(tmp_path)
    copies.append(AutoModelForCausalLM.from_pretrained(tmp_path))
    for other in copies:
        assert torch.equal(logits(other), expected)


def test_the_context_ends_with_its_block_even_when_the_forward_fails(llama: PreTrainedModel) -> None:
    class Failing:
        def attend(self, *args: object, **kwargs: object) -> None:
            raise RuntimeError("no attention today")

        def mask(self, **kwargs: object) -> None:
            return None

    expected = logits(llama)
    with pytest.raises(RuntimeError, match="today"), forward_context(Failing()):
        logits(llama)
    assert torch.equal(logits(llama), expected)


def test_the_context_is_of_one_thread(llama: PreTrainedModel) -> None:
    class Counting:
        calls = 0

        def attend(self, module: object, query: torch.Tensor, key: object, value: torch.Tensor, *args, **kwargs):
            type(self).calls += 1
            return query.transpose(1, 2).contiguous(), None

        def mask(self, **kwargs: object) -> None:
            return None

    expected, seen = logits(llama), []
    with forward_context(Counting()):
        thread = threading.Thread(target=lambda: seen.append(logits(llama)))
        thread.start()
        thread.join()
        assert Counting.calls == 0
        logits(llama)
    assert Counting.calls == 2
    assert torch.equal(seen[0], expected)


def test_the_callers_random_state_is_left_alone(llama: PreTrainedModel) -> None:
    before = torch.get_rng_state()
    chairlift.generate_batch(llama, [[5, 6, 7]], max_new_tokens=5, do_sample=True, temperature=1.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_autocast_of_the_creating_thread_is_carried_over(llama: PreTrainedModel) -> None:
    from chairlift.probe import learn

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert {call.kind.dtype for call in learn(llama).calls} <= {torch.bfloat16, torch.float32}
        output = chairlift.generate_batch(llama, [[5, 6, 7]], max_new_tokens=3)["req_0"]
        manager = chairlift.init_continuous_batching(llama, continuous_batching_config=CONFIG)
    assert output.error is None
    assert len(output.generated_tokens) == 3
    # Made under autocast, started outside: it runs as it was learned.
    manager.start()
    assert manager.get_result(manager.add_request([5, 6, 7], max_new_tokens=3)).error is None
    manager.destroy()
