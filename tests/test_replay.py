"""Recorded forwards: replayed where steps of all sizes are the same calls, and never where they are not."""

import copy
import pickle
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel

import chairlift
from chairlift.engine.replay import forward as replay
from chairlift.engine.replay.agreement import Agreement, Disagreement
from chairlift.engine.replay.calls import Call, take_apart
from chairlift.engine.replay.recorder import Recording
from test_longrope import long_model
from test_parity import assert_equals_generate, prompts
from tiny_models import tiny_config, tiny_model

LENGTHS = [1, 2, 3, 5, 9, 17, 33]
NEW_TOKENS = 9


def config(**overrides: Any) -> chairlift.ContinuousBatchingConfig:
    return chairlift.ContinuousBatchingConfig(**{"page_size": 4, "num_blocks": 96, "max_batch_tokens": 16, **overrides})


def make_manager(model: PreTrainedModel, **overrides: Any) -> chairlift.ContinuousBatchingManager:
    return chairlift.init_continuous_batching(
        model, GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False), config(**overrides)
    )


def how(manager: chairlift.ContinuousBatchingManager) -> str:
    (line,) = (line for line in manager.describe().splitlines() if line.startswith("forward "))
    return line.removeprefix("forward").strip()


def serve(manager: chairlift.ContinuousBatchingManager, inputs: list[list[int]]) -> dict[str, Any]:
    return {label: manager.get_result(label) for label in manager.add_requests(inputs)}


def assert_served(model: PreTrainedModel, **overrides: Any) -> str:
    """Serves prompts together and one alone, checks all tokens, and says how forwards ran."""
    manager = make_manager(model, **overrides)
    manager.start()
    try:
        for inputs in (prompts(LENGTHS), prompts(LENGTHS, 1), prompts([3], 2)):
            assert_equals_generate(model, inputs, serve(manager, inputs), NEW_TOKENS)
        return how(manager)
    finally:
        manager.stop()


def variant(**methods: Callable[..., Any]) -> PreTrainedModel:
    """A tiny llama of a class of its own."""
    base = tiny_model("llama")
    model = type("Variant", (LlamaForCausalLM,), methods)(tiny_config("llama")).float().eval()
    model.load_state_dict(base.state_dict())
    model.generation_config = base.generation_config
    return model


def on_logits(change: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> PreTrainedModel:
    """A tiny llama that does something more with its input ids and logits."""

    def forward(self: Any, input_ids: torch.Tensor, position_ids: Any = None, logits_to_keep: Any = 0, **kwargs: Any):
        output = LlamaForCausalLM.forward(
            self, input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, **kwargs
        )
        output.logits = change(self, input_ids, output.logits)
        return output

    return variant(forward=forward)


# ---------------------------------------------------------------------------- what is replayed


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma2", "gemma3_text", "qwen3", "gpt2", "gpt_neox", "phi", "opt", "olmo2", "starcoder2", "gpt_oss"],
)
@pytest.mark.parametrize("window", [None, 8])
def test_families_are_replayed_and_generate_the_same(family: str, window: int | None) -> None:
    assert assert_served(tiny_model(family, window=window)).startswith("recorded, ")


def test_experts_that_are_one_product_are_replayed() -> None:
    assert assert_served(tiny_model("mixtral")).startswith("recorded, ")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_replayed_to_the_same_tokens(dtype: torch.dtype) -> None:
    model, inputs = tiny_model("llama").to(dtype), prompts(LENGTHS)
    tokens = []
    for replay_forward in (False, True):
        manager = make_manager(model, replay_forward=replay_forward)
        manager.start()
        tokens.append([output.generated_tokens for output in serve(manager, inputs).values()])
        assert how(manager).startswith("recorded" if replay_forward else "eager: replay_forward is False")
        manager.stop()
    assert tokens[0] == tokens[1]


def test_what_is_changed_in_place_on_the_way_is_changed_in_a_replay_too() -> None:
    def change(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros_like(logits)
        rows[..., 1:] = logits[..., 1:]
        rows[..., :1] += logits[..., :1]
        rows.mul_(2)
        rows *= 0.5
        return rows

    assert assert_served(on_logits(change)).startswith("recorded, ")
    # The first steps bring parts of a prompt and sample nothing: what is written to is empty.
    manager = make_manager(on_logits(change), max_batch_tokens=4)
    manager.start()
    inputs = prompts([15, 9])
    assert_equals_generate(manager.model, inputs, serve(manager, inputs), NEW_TOKENS)
    assert how(manager).startswith("recorded, ")
    manager.stop()


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def test_a_function_with_a_gradient_of_its_own_is_replayed() -> None:
    def change(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return _Same.apply(logits)

    assert assert_served(on_logits(change)).startswith("recorded, ")


def test_steps_of_one_token_are_recorded_on_their_own() -> None:
    def change(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits * 1.0 if input_ids.shape[1] == 1 else logits + 0.0

    assert assert_served(on_logits(change)).startswith("recorded, ")


def test_a_model_is_recorded_anew_at_each_start() -> None:
    model, inputs = tiny_model("llama"), prompts(LENGTHS)
    manager = make_manager(model)
    for seed in (0, 1):
        other = tiny_model("llama", seed=seed)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):  # not their bytes change: they are other objects
                module.weight = torch.nn.Parameter(other.get_submodule(name).weight.detach().clone())
        manager.start()
        assert_equals_generate(model, inputs, serve(manager, inputs), NEW_TOKENS)
        assert how(manager).startswith("recorded, ")
        manager.stop()


@pytest.mark.parametrize("swap", ["parameter", "data"])
def test_weights_that_change_while_it_runs_count_from_the_reset_on(swap: str) -> None:
    model, other, inputs = tiny_model("llama"), tiny_model("llama", seed=1), prompts(LENGTHS)
    with torch.no_grad():
        other.model.norm.weight.mul_(-2.0)  # of all weights those of a norm are read by more than linear layers
    manager = make_manager(model)
    manager.start()
    serve(manager, inputs)
    assert how(manager).startswith("recorded, ")
    for name, module in model.named_modules():
        if "weight" in module._parameters:
            weight = other.get_submodule(name).weight.detach().clone()
            if swap == "data":
                module.weight.data = weight
            else:
                module.weight = torch.nn.Parameter(weight)
    manager.reset_prefix_cache()
    assert_equals_generate(model, inputs, serve(manager, inputs), NEW_TOKENS)
    assert how(manager).startswith("recorded, ")
    manager.stop()


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("llama")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    manager = make_manager(model)
    manager.start()
    serve(manager, prompts(LENGTHS))
    assert how(manager).startswith("recorded, ")
    copy.deepcopy(model)
    pickle.dumps(model)
    manager.stop()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_other_threads_neither_notice_nor_are_recorded() -> None:
    model, ids = tiny_model("llama"), torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = model(ids).logits
    stop, wrong = threading.Event(), []

    def other() -> None:
        while not stop.is_set():
            with torch.no_grad():
                if not torch.equal(model(ids).logits, expected):
                    wrong.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert assert_served(model).startswith("recorded, ")
    finally:
        stop.set()
        thread.join()
    assert not wrong


# ---------------------------------------------------------------------------- what is not


def _curve(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits + torch.zeros(input_ids.shape[1] ** 2)[:1]


def _branch(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits * 1.0 if input_ids.shape[1] > 9 else logits + 0.0


def _count(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    self.calls = getattr(self, "calls", 0.0) + 1.0
    return logits + 1e-9 * self.calls


def _data(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits * 1.0 if (input_ids > 50).any() else logits + 0.0


def _index(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits + 0.0 * logits[logits > 0].sum()


def _numbers(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits + 0.0 * input_ids[0].tolist()[0]


def _arange(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits + 0.0 * torch.arange(input_ids.max()).sum()


def _random(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits + 1e-9 * torch.rand(1)


def _numpy(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits + torch.from_numpy(np.zeros(1, dtype=np.float32))


def _unknown(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        self.zero = torch.zeros(1)
    return logits + self.zero


def _writes_a_weight(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    self.model.norm.weight.mul_(1.0)
    return logits


def _past_autograd(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits.data


def _autocast(self: Any, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return logits + 0.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_curve, "a number of zeros is no affine function of the tokens"),
        (_branch, r"call \d+ of its forward \((mul, add|add, mul)\) is not always the same"),
        (_count, r"call \d+ of its forward \(add, add\) is not always the same"),
        (_data, "depends on computed values"),
        (_index, "the shape of a result depends on computed values"),
        (_numbers, "depends on computed values"),
        (_arange, "depends on computed values"),
        (_random, "it draws random numbers"),
        (_numpy, "it reaches an operator by no function of torch"),
        (_unknown, "tensors of unknown origin"),
        (_writes_a_weight, "it changes its weights, its buffers or its inputs"),
        (_past_autograd, "it reaches past autograd"),
        (_autocast, "it computes under autocast"),
    ],
)
def test_a_forward_that_is_not_always_the_same_calls_runs_as_ever(
    change: Callable[..., torch.Tensor], reason: str
) -> None:
    said = assert_served(on_logits(change))
    assert said.startswith("eager: ")
    assert re.search(reason, said)


def test_experts_that_are_looped_over_run_as_ever() -> None:
    model = tiny_model("mixtral")
    model.config._experts_implementation = "eager"
    assert assert_served(model).startswith("eager: what it does depends on computed values")


def test_two_regimes_of_a_rope_run_as_ever() -> None:
    manager = make_manager(long_model())
    manager.start()
    serve(manager, prompts([3, 9]))
    assert how(manager) == "eager: its RoPE looks at the longest position of a forward"
    manager.stop()


def test_hooks_see_every_forward() -> None:
    model, seen = tiny_model("llama"), []
    handle = model.model.norm.register_forward_hook(lambda *_: seen.append(True))
    manager = make_manager(model)
    manager.start()
    serve(manager, prompts([3]))
    assert how(manager) == "eager: a module has forward hooks (model.norm)"
    manager.stop()
    assert len(seen) >= NEW_TOKENS
    handle.remove()
    manager.start()
    serve(manager, prompts([3]))
    assert how(manager).startswith("recorded, ")
    manager.stop()


def test_a_forward_that_somebody_replaced_runs_as_ever() -> None:
    model = tiny_model("llama")
    model.forward = model.forward  # what `model.forward = torch.compile(model.forward)` leaves
    assert assert_served(model).startswith("eager: a module's forward was replaced")


def test_who_asks_for_a_replay_hears_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(replay.logger, "warning", said.append)
    assert_served(on_logits(_random))
    assert said == []
    assert_served(on_logits(_random), replay_forward=True)
    assert said == ["The forward of Variant is not replayed: it draws random numbers (rand)"]


def test_replay_forward_is_yes_no_or_nothing() -> None:
    with pytest.raises(TypeError, match="replay_forward is 1, but must be True, False or None"):
        config(replay_forward=1)


# ---------------------------------------------------------------------------- what goes wrong


def test_a_replay_that_differs_from_the_model_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    write = replay.write_program

    def wrong(*args: Any) -> Any:
        program = write(*args)
        run = program.run
        program.run = lambda *inputs: run(*inputs) + 1.0
        return program

    monkeypatch.setattr(replay, "write_program", wrong)
    assert assert_served(tiny_model("llama")).startswith("eager: replayed logits differ from the model's by up to 1 ")


def test_a_replay_that_fails_is_done_again_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    write = replay.write_program

    def failing(*args: Any) -> Any:
        program = write(*args)
        run, calls = program.run, []

        def run_twice(*inputs: Any) -> torch.Tensor:
            calls.append(True)
            if len(calls) > 2:
                raise ZeroDivisionError("no more")
            return run(*inputs)

        program.run = run_twice
        return program

    monkeypatch.setattr(replay, "write_program", failing)
    assert assert_served(tiny_model("llama")) == "eager: a replayed step failed: ZeroDivisionError: no more"


def test_attention_that_fails_in_a_replay_fails_its_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny_model("llama"), prompts([3, 4, 5])
    manager = make_manager(model)
    manager.start()
    assert_equals_generate(model, inputs, serve(manager, inputs), NEW_TOKENS)
    said = how(manager)
    backend = manager._session.runner.backend
    with monkeypatch.context() as patch:

        def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
            raise RuntimeError("no pages today")

        patch.setattr(backend, "attend", attend)
        failed = serve(manager, inputs)
    assert all("no pages today" in str(output.error) for output in failed.values())
    assert_equals_generate(model, inputs, serve(manager, inputs), NEW_TOKENS)
    assert how(manager) == said
    manager.stop()


# ---------------------------------------------------------------------------- the law of numbers


def recording(tokens: int, sampled: int, size: int) -> Recording:
    tensors: list[torch.Tensor] = []
    numbers: list[int] = []
    pattern = take_apart(((size,), {}), tensors, numbers)
    call = Call(torch.zeros, pattern, (), (3,), False, (torch.float32,), (1,), False)
    return Recording(tokens, sampled, [call], [*numbers, size], output=3)


def agreement_of(law: Callable[[int, int], int], points: list[tuple[int, int]]) -> Agreement:
    first, *others = (recording(*point, law(*point)) for point in points)
    agreement = Agreement(first)
    for other in others:
        agreement.add(other)
    return agreement


def value(law: tuple[int, int, int, int], tokens: int, sampled: int) -> int:
    a, c, b, divisor = law
    return (a * tokens + c * sampled + b) // divisor


@pytest.mark.parametrize("law", [lambda _t, _s: 7, lambda t, _: 3 * t + 1, lambda _, s: 2 * s, lambda t, s: t - s + 4])
def test_numbers_follow_tokens_and_sampled_rows(law: Callable[[int, int], int]) -> None:
    agreement = agreement_of(law, [(9, 0), (16, 3), (12, 7), (31, 8)])
    for point in ((16, 2), (31, 5), (8, 0)):
        assert agreement.covers(point) or point[1] == 1
        assert all(value(found, *point) == law(*point) for found in agreement.laws())
    assert agreement.covers((62, 8))
    assert not agreement.covers((63, 8)), "nobody knows what a model does with more than twice as many tokens"
    assert agreement.covers((4, 0))
    assert not agreement.covers((3, 0))


def test_recordings_speak_for_the_sizes_between_them() -> None:
    agreement = agreement_of(lambda t, _: 3 * t + 1, [(9, 3), (12, 7), (10, 1), (512, 2)])
    assert all(agreement.covers((tokens, 5)) for tokens in (4, 64, 200, 1024))
    assert agreement.covers((20, 1))
    assert not agreement.covers((64, 1)), "one sampled row may be another thing than several"


def test_sizes_that_were_always_equal_are_told_apart_before_they_differ() -> None:
    agreement = agreement_of(lambda t, _: t, [(4, 4), (6, 6), (7, 7)])
    assert agreement.covers((5, 5))
    assert not agreement.covers((6, 5))


def test_two_sizes_prove_no_line() -> None:
    agreement = agreement_of(lambda t, _: t * t, [(4, 4), (7, 7)])
    assert agreement.covers((4, 4))
    assert not agreement.covers((5, 5))
    with pytest.raises(Disagreement, match="a number of zeros is no affine function"):
        agreement.add(recording(6, 6, 36))


def test_a_bend_shows_in_no_two_sizes() -> None:
    agreement = agreement_of(lambda t, _: t * t, [(5, 1), (5, 2), (9, 1), (9, 4)])
    assert agreement.covers((5, 2))
    assert not agreement.covers((6, 2))


def test_the_same_step_twice_is_enough_for_that_step() -> None:
    assert not Agreement(recording(4, 4, 4)).covers((4, 4))
    assert agreement_of(lambda t, _: t, [(4, 4), (4, 4)]).covers((4, 4))


def test_a_program_that_cannot_be_written_costs_nobody_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("no such register")

    monkeypatch.setattr("chairlift.engine.replay.forward.write_program", fail)
    described = assert_served(tiny_model("llama"))
    assert described == "eager: no program could be written: ValueError: no such register"
