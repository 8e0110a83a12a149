"""What was learned of a model serves the next manager, and never a model that became another."""

import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import chairlift
from chairlift import knowledge
from chairlift import manager as manager_room
from chairlift.engine.replay import forward as room
from chairlift.knowledge import knowledge_of
from tiny_models import reference, tie_aware_mismatch, tiny_model

GREEDY = GenerationConfig(max_new_tokens=8, do_sample=False)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], list(range(20, 60))]
CONFIG: dict[str, Any] = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 24}


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def learned() -> Iterator[mock.Mock]:
    """Counts how often a model was learned."""
    with mock.patch.object(manager_room, "learn", side_effect=manager_room.learn) as learn:
        yield learn


@pytest.fixture
def model_calls() -> Iterator[mock.Mock]:
    """Counts steps that called the model."""
    with mock.patch.object(room, "forward", side_effect=room.forward) as forward:
        yield forward


def serve(model: PreTrainedModel, **fields: Any) -> str:
    """Serves all prompts rightly, and says how."""
    config = chairlift.ContinuousBatchingConfig(**{**CONFIG, **fields})
    with chairlift.continuous_batching_context_manager(model, GREEDY, continuous_batching_config=config) as manager:
        answers = [manager.get_result(label).generated_tokens for label in manager.add_requests(PROMPTS)]
        described = manager.describe()
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        expected, gaps = reference(model, prompt, 8)
        assert tie_aware_mismatch(tokens, expected, gaps, 1e-4) is None
    return described


def test_a_second_manager_neither_learns_nor_records(
    model: PreTrainedModel, learned: mock.Mock, model_calls: mock.Mock
) -> None:
    serve(model)
    serve(model)  # what is new to the first may still be recorded here
    assert learned.call_count == 1
    model_calls.reset_mock()
    assert "recorded, " in serve(model)
    assert learned.call_count == 1
    assert model_calls.call_count == 0


def test_other_values_of_the_same_weights_change_nothing_of_it(model: PreTrainedModel, learned: mock.Mock) -> None:
    serve(model)
    model.load_state_dict(tiny_model("llama", seed=3).state_dict())
    serve(model)
    assert learned.call_count == 1


def test_another_page_size_is_proven_again(model: PreTrainedModel, learned: mock.Mock) -> None:
    serve(model)
    with mock.patch.object(manager_room, "check_packed") as check:
        serve(model)
        assert check.call_count == 0
        serve(model, page_size=8)
        assert check.call_count == 1
    assert learned.call_count == 1


class Settings:
    """What a module may keep beside its tensors."""

    def __init__(self) -> None:
        self.scale = 1.0
        # A list hides it from the tree.
        self.beside = [torch.nn.ModuleDict({"linear": torch.nn.Linear(2, 2), "dropout": torch.nn.Dropout(0.1)})]


def scaled(module: torch.nn.Module, input: torch.Tensor) -> torch.Tensor:
    return 2 * torch.nn.functional.linear(input, module.weight)  # type: ignore[arg-type]


def replace_class(model: PreTrainedModel) -> None:
    module = model.model.layers[0].mlp
    module.__class__ = type("Other", (type(module),), {"forward": lambda _, x: 0.5 * x})


def replace_buffer(model: PreTrainedModel) -> None:
    model.model.rotary_emb.register_buffer("inv_freq", model.model.rotary_emb.inv_freq / 2, persistent=False)


CHANGES: dict[str, Callable[[PreTrainedModel], object]] = {
    "an attribute": lambda model: setattr(model.model.norm, "variance_epsilon", 0.5),
    "an attribute that is new": lambda model: setattr(model.model.layers[1], "extra", [1, 2]),
    "the config": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    "the attention": lambda model: model.set_attn_implementation("eager"),
    "a module": lambda model: setattr(model.model.layers[0], "mlp", torch.nn.Identity()),
    "a module less": lambda model: model.model.layers.__delitem__(1),
    "a module's class": replace_class,
    "a module's forward": lambda model: setattr(model.lm_head, "forward", types.MethodType(scaled, model.lm_head)),
    "a hook": lambda model: model.lm_head.register_forward_hook(lambda _module, _args, out: 2 * out),
    "a parameter": lambda model: setattr(
        model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    ),
    "a buffer": replace_buffer,
    "a module beside the tree": lambda model: setattr(model.model.layers[0].settings, "inner", torch.nn.Linear(2, 2)),
    "the inside of a module beside the tree": lambda model: setattr(
        model.model.layers[0].settings.beside[0]["dropout"], "p", 0.5
    ),
    "a parameter beside the tree": lambda model: setattr(
        model.model.layers[0].settings.beside[0]["linear"], "weight", torch.nn.Parameter(torch.zeros(2, 2))
    ),
    "the inside of an object": lambda model: setattr(model.model.layers[0].settings, "scale", 2.0),
    "torch's threads": lambda _: torch.set_num_threads(torch.get_num_threads() + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_of_a_model_that_was_changed_nothing_is_kept(
    model: PreTrainedModel, learned: mock.Mock, change: str, request: pytest.FixtureRequest
) -> None:
    model.model.layers[0].settings = Settings()
    serve(model)
    known = knowledge_of(model)
    assert known.facts is not None
    assert knowledge_of(model) is known
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    CHANGES[change](model)
    assert knowledge_of(model) is not known
    serve(model)
    assert learned.call_count == 2


def test_a_function_of_the_models_code_that_was_exchanged_is_seen(
    model: PreTrainedModel, learned: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    serve(model)
    turned = modeling_llama.apply_rotary_pos_emb

    def other(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return turned(2 * q, k, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", other)
    serve(model)
    assert learned.call_count == 2


def test_a_method_of_a_models_class_that_was_exchanged_is_seen(
    model: PreTrainedModel, learned: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(model.model.layers[0].mlp)
    serve(model)
    monkeypatch.setattr(kind, "forward", lambda self, x: self.down_proj(torch.relu(self.up_proj(x))))
    serve(model)
    assert learned.call_count == 2


def test_what_cannot_be_compared_is_learned_each_time(model: PreTrainedModel, learned: mock.Mock) -> None:
    class Opaque:
        __slots__ = ()

    model.model.layers[0].opaque = Opaque()
    serve(model)
    serve(model)
    assert learned.call_count == 2


def test_a_model_that_is_gone_is_forgotten() -> None:
    model = tiny_model("llama", seed=4)
    serve(model)
    assert model in knowledge._known
    before = len(knowledge._known)
    freed, weight = weakref.ref(model), weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    assert freed() is None
    assert weight() is None
    assert len(knowledge._known) < before


def test_a_reset_of_the_prefix_cache_forgets(model: PreTrainedModel, learned: mock.Mock) -> None:
    config = chairlift.ContinuousBatchingConfig(**CONFIG)
    with chairlift.continuous_batching_context_manager(model, GREEDY, continuous_batching_config=config) as manager:
        manager.get_result(manager.add_request(PROMPTS[0]))
        manager.reset_prefix_cache()
        manager.get_result(manager.add_request(PROMPTS[0]))
    serve(model)
    assert learned.call_count == 2


def test_two_managers_at_once_record_each_for_itself(model: PreTrainedModel) -> None:
    config = chairlift.ContinuousBatchingConfig(**CONFIG)
    with (
        chairlift.continuous_batching_context_manager(model, GREEDY, continuous_batching_config=config) as first,
        chairlift.continuous_batching_context_manager(model, GREEDY, continuous_batching_config=config) as second,
    ):
        labels = [(manager, manager.add_requests(PROMPTS)) for manager in (first, second)]
        answers = [[manager.get_result(label).generated_tokens for label in given] for manager, given in labels]
    assert answers[0] == answers[1]
    serve(model)


def test_a_switch_in_the_models_code_is_seen(
    model: PreTrainedModel, learned: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "SWITCH", False, raising=False)
    serve(model)
    monkeypatch.setattr(modeling_llama, "SWITCH", True)
    serve(model)
    assert learned.call_count == 2


def test_a_module_that_the_models_code_calls_by_name_is_looked_into(
    model: PreTrainedModel, learned: mock.Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    called = torch.nn.Identity()
    monkeypatch.setattr(modeling_llama, "called_by_name", called, raising=False)
    serve(model)
    serve(model)
    assert learned.call_count == 1
    called.forward = types.MethodType(lambda _, x: 2 * x, called)
    serve(model)
    assert learned.call_count == 2


@pytest.mark.parametrize("thing", ["a name", None, torch.nn.Linear(2, 2)], ids=["str", "None", "Linear"])
def test_what_is_no_model_is_refused_as_such(thing: Any) -> None:
    with pytest.raises(TypeError, match=f"the model is a {type(thing).__name__}, but must be a transformers"):
        chairlift.init_continuous_batching(thing)
