"""A manager that is kept from session to session: what it keeps, what it must not keep, and when it is another."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import chairlift
from chairlift import ContinuousBatchingConfig
from chairlift.kept import kept_manager
from tiny_models import reference, tiny_model

SMALL = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16}
PROMPT = list(range(5, 22))
NEW_TOKENS = 8
GREEDY = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)


@pytest.fixture
def model():
    model = tiny_model("llama")
    yield model
    chairlift.destroy_cached_continuous_batching_manager(model)


def alone(model: PreTrainedModel, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    tokens, _ = reference(model, prompt, new_tokens)
    return tokens


def config(**fields: object) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(**{**SMALL, **fields})


def generate(model: PreTrainedModel, prompts: list, generation: GenerationConfig = GREEDY, **fields: object) -> dict:
    return chairlift.generate_batch(
        model, prompts, generation, continuous_batching_config=config(**fields), persistent_manager=True
    )


def test_the_next_call_finds_the_manager_and_its_prefix_cache(model: PreTrainedModel) -> None:
    first = generate(model, [PROMPT])["req_0"]
    manager = kept_manager(model)
    second = generate(model, [PROMPT, PROMPT[:9]])
    assert kept_manager(model) is manager
    assert list(second) == ["req_0", "req_1"]
    assert (first.cached_tokens, second["req_0"].cached_tokens) == (0, 16)
    for output in (first, *second.values()):
        assert output.generated_tokens == alone(model, output.prompt_ids)


def test_weights_that_changed_between_two_calls_share_nothing_with_the_old_ones(model: PreTrainedModel) -> None:
    generate(model, [PROMPT])
    manager = kept_manager(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    output = generate(model, [PROMPT])["req_0"]
    assert kept_manager(model) is manager
    assert output.cached_tokens == 0
    assert output.generated_tokens == alone(model, PROMPT)


def test_a_call_generates_as_it_says_not_as_the_call_before(model: PreTrainedModel) -> None:
    generate(model, [PROMPT])
    manager = kept_manager(model)
    longer = GenerationConfig(max_new_tokens=12, do_sample=True, top_k=1, eos_token_id=-1, num_return_sequences=2)
    outputs = generate(model, [PROMPT], longer)
    assert kept_manager(model) is manager
    assert list(outputs) == ["req_0", "req_0__child#0"]
    tokens = alone(model, PROMPT, 12)
    assert [output.generated_tokens for output in outputs.values()] == [tokens, tokens]
    ended_by = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=tokens[3])
    (output,) = generate(model, [PROMPT], ended_by).values()
    assert (output.generated_tokens, output.finish_reason) == (tokens[: tokens.index(tokens[3]) + 1], "stop")


def test_another_batching_config_makes_another_manager(model: PreTrainedModel) -> None:
    generate(model, [PROMPT])
    manager = kept_manager(model)
    assert manager is not None
    generate(model, [PROMPT], return_logprobs=True)
    other = kept_manager(model)
    assert other is not None
    assert other is not manager
    assert other.config.return_logprobs
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()


def test_a_larger_workload_makes_a_larger_manager_for_both(model: PreTrainedModel) -> None:
    def session(prompt: int) -> chairlift.ContinuousBatchingManager:
        hints = chairlift.WorkloadHints(max_prompt_length=prompt, max_generated_length=8, num_requests=4)
        automatic = ContinuousBatchingConfig(page_size=4)
        with chairlift.continuous_batching_context_manager(
            model, GREEDY, continuous_batching_config=automatic, persistent_manager=True, workload_hints=hints
        ) as manager:
            return manager

    small, same, large = session(20), session(12), session(60)
    assert same is small
    assert large is not small
    assert large.config.num_blocks > small.config.num_blocks
    assert session(20) is large


def test_a_model_that_became_another_gets_another_manager(model: PreTrainedModel) -> None:
    generate(model, [PROMPT])
    manager = kept_manager(model)
    model.model.layers[0].mlp.register_forward_hook(lambda *_: _[-1] * 0.5)
    output = generate(model, [PROMPT])["req_0"]
    assert kept_manager(model) is not manager
    assert output.generated_tokens == alone(model, PROMPT)


def test_outputs_that_nobody_took_are_dropped_with_a_warning(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with chairlift.continuous_batching_context_manager(
        model, GREEDY, continuous_batching_config=config(), persistent_manager=True
    ) as manager:
        manager.add_requests([PROMPT, PROMPT[:5], PROMPT[:7]])
        manager.get_result(timeout=60)
    assert manager.get_result() is not None  # until the next session they can still be taken
    with caplog.at_level("WARNING"):
        outputs = generate(model, [PROMPT])
    assert list(outputs) == ["req_0"]
    assert "1 outputs of the session before were never taken" in caplog.text


def test_of_several_threads_one_takes_it_and_each_gets_its_outputs(model: PreTrainedModel) -> None:
    generate(model, [PROMPT])
    outputs: list[dict] = []
    threads = [
        threading.Thread(target=lambda n=n: outputs.append(generate(model, [PROMPT[: 4 + n], PROMPT])))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(outputs) == 4
    for of_thread in outputs:
        for output in of_thread.values():
            assert output.generated_tokens == alone(model, output.prompt_ids)


def test_what_is_kept_does_not_end_the_requests_of_another_session(model: PreTrainedModel) -> None:
    managers = [chairlift.init_continuous_batching(model, GREEDY, config(num_blocks=100)) for _ in range(2)]
    labels = []
    for manager in managers:
        manager.start()
        labels.append(manager.add_request(PROMPT, max_new_tokens=200))
    for manager in managers:
        manager.stop(block=False, keep_for_next_session=True)
    for manager, label in zip(managers, labels, strict=True):
        output = manager.get_result(label, timeout=60)
        assert output is not None
        assert output.finish_reason == "length"
        manager.join(60)
    assert kept_manager(model) in managers


def test_a_config_that_is_refused_leaves_it_kept(model: PreTrainedModel) -> None:
    generate(model, [PROMPT])
    manager = kept_manager(model)
    with pytest.raises(ValueError, match="num_beams"):
        chairlift.init_continuous_batching(model, GenerationConfig(num_beams=2), config())
    assert kept_manager(model) is manager


def test_a_call_that_keeps_nothing_uses_what_is_kept_and_lets_it_go(model: PreTrainedModel) -> None:
    generate(model, [PROMPT])
    outputs = chairlift.generate_batch(model, [PROMPT], GREEDY, continuous_batching_config=config())
    assert outputs["req_0"].cached_tokens == 16
    assert kept_manager(model) is None


def test_a_kept_manager_that_runs_is_left_alone(model: PreTrainedModel) -> None:
    with chairlift.continuous_batching_context_manager(
        model, GREEDY, continuous_batching_config=config(), persistent_manager=True
    ) as manager:
        pass
    manager.start()
    other = chairlift.init_continuous_batching(model, GREEDY, config())
    assert other is not manager
    assert manager.is_running()
    assert kept_manager(model) is manager
    manager.stop()


def test_a_manager_whose_loop_died_is_not_kept(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from chairlift.engine.runner import Runner

    class Death(BaseException):
        pass

    def die(*_: object) -> None:
        raise Death("the end")

    with monkeypatch.context() as patched:
        patched.setattr(Runner, "run", die)
        with pytest.raises(RuntimeError):
            generate(model, [PROMPT])
    assert kept_manager(model) is None
    output = generate(model, [PROMPT])["req_0"]
    assert output.generated_tokens == alone(model, PROMPT)


def test_copies_of_the_model_keep_no_manager(model: PreTrainedModel, tmp_path) -> None:
    before = set(model.state_dict())
    generate(model, [PROMPT])
    assert kept_manager(copy.deepcopy(model)) is None
    assert kept_manager(copy.copy(model)) is None
    pickled = pickle.dumps(model)
    assert b"chairlift" not in pickled  # it is read where this package is not there, too
    assert kept_manager(pickle.loads(pickled)) is None
    model.save_pretrained(tmp_path)
    assert set(model.state_dict()) == before
    assert kept_manager(type(model).from_pretrained(tmp_path)) is None


def test_the_model_and_the_manager_that_it_keeps_go_together() -> None:
    model = tiny_model("llama")
    generate(model, [PROMPT])
    gone = weakref.ref(model), weakref.ref(kept_manager(model))
    del model
    gc.collect()
    assert [what() for what in gone] == [None, None]
    assert not [thread for thread in threading.enumerate() if thread.name == "chairlift-loop"]


def test_it_is_let_go_when_asked(model: PreTrainedModel) -> None:
    generate(model, [PROMPT])
    chairlift.destroy_cached_continuous_batching_manager(model)
    assert kept_manager(model) is None
    chairlift.destroy_cached_continuous_batching_manager(model)
    assert generate(model, [PROMPT])["req_0"].cached_tokens == 0


def test_a_manager_that_never_ran_is_not_kept(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    manager = chairlift.init_continuous_batching(model, GREEDY, config())
    with caplog.at_level("WARNING"):
        manager.stop(keep_for_next_session=True)
    assert "not kept" in caplog.text
    assert kept_manager(model) is None
