"""Linear layers with packed weights: the same tokens, nobody else's business, and never older than the weights."""

import copy
import gc
import pickle
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from transformers import GenerationConfig, PreTrainedModel

import chairlift
from chairlift.engine import linears as room
from chairlift.engine.linear_calls import TORCHS_LINEAR, linear_context, recorded_weights
from chairlift.engine.linears import PackedLinear, PackedLinears, pack, plan_linears
from chairlift.engine.packings import PACKINGS, NativePacking, OneDnnPacking, Packing, padded_rows
from tiny_models import reference, tie_aware_mismatch, tiny_model

SMALL: dict[str, Any] = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 24}
GREEDY = GenerationConfig(max_new_tokens=8, do_sample=False)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], list(range(20, 60))]
PLENTY = 1 << 40


def can_pack(packing: type[Packing], dtype: torch.dtype = torch.float32) -> bool:
    try:
        packing(torch.ones(64, 64, dtype=dtype))
    except (RuntimeError, AttributeError):
        return False
    return True


every_packing = pytest.mark.parametrize("packing", [p for p in PACKINGS.values() if can_pack(p)], ids=lambda p: p.title)


def packed(weight: torch.Tensor, packing: type[Packing] = NativePacking, least_rows: int = 1) -> PackedLinear:
    return PackedLinear(weight, packing(weight), least_rows)


def config(**fields: Any) -> chairlift.ContinuousBatchingConfig:
    return chairlift.ContinuousBatchingConfig(**{**SMALL, "packed_linears": True, **fields})


def manager_of(model: PreTrainedModel, **fields: Any) -> chairlift.ContinuousBatchingManager:
    return chairlift.init_continuous_batching(model, GREEDY, config(**fields))


def tokens_of(manager: chairlift.ContinuousBatchingManager) -> list[list[int]]:
    labels = manager.add_requests(PROMPTS)
    return [manager.get_result(label).generated_tokens for label in labels]


def linears_of(manager: chairlift.ContinuousBatchingManager) -> PackedLinears | None:
    return manager._session.runner.linears


def assert_right(model: PreTrainedModel, answers: list[list[int]], tie: float = 1e-4) -> None:
    for prompt, tokens in zip(PROMPTS, answers, strict=True):
        expected, gaps = reference(model, prompt, 8)
        assert tie_aware_mismatch(tokens, expected, gaps, tie) is None


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of this machine yet."""
    monkeypatch.setattr(room, "_measurements", {})


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def started(model: PreTrainedModel) -> Iterator[chairlift.ContinuousBatchingManager]:
    manager = manager_of(model)
    manager.start()
    yield manager
    manager.destroy()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often packed weights were called."""
    calls = [0]

    def count(packing: type[Packing]) -> None:
        call = packing.__call__

        def counting(self: Packing, *args: Any) -> torch.Tensor:
            calls[0] += 1
            return call(self, *args)

        monkeypatch.setattr(packing, "__call__", counting)

    for packing in PACKINGS.values():
        count(packing)
    return calls


class TestTokens:
    @pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "opt", "gemma2", "mixtral"])
    @every_packing
    def test_are_those_of_generate(
        self, family: str, counted: list[int], packing: type[Packing], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(room, "PACKINGS", {packing.title: packing})
        model = tiny_model(family)
        manager = manager_of(model)
        before = counted[0]
        manager.start()
        assert_right(model, tokens_of(manager))
        assert counted[0] > before
        manager.destroy()

    def test_with_tied_embeddings(self, counted: list[int]) -> None:
        model = tiny_model("llama", tie_word_embeddings=True)
        manager = manager_of(model)
        assert "model.embed_tokens.weight" in manager._linear_plan.least_rows
        manager.start()
        assert_right(model, tokens_of(manager))
        manager.destroy()

    def test_off_no_weight_is_packed(self, model: PreTrainedModel, counted: list[int]) -> None:
        manager = manager_of(model, packed_linears=False)
        manager.start()
        assert_right(model, tokens_of(manager))
        assert counted == [0]
        assert manager.config.packed_linears is False
        assert "packed_linears is False" in manager.describe()
        manager.destroy()


# Ties of half precision: logits between 4 and 8 are rounded to steps of 2**-5 (bf16) and 2**-8 (fp16), and two of them
# may each be a step off.
@pytest.mark.parametrize(("dtype", "tie"), [(torch.bfloat16, 2**-4), (torch.float16, 2**-7)], ids=str)
@pytest.mark.parametrize("wanted", [None, True])
@every_packing
def test_half_precision_gives_the_tokens_of_generate(
    dtype: torch.dtype, tie: float, wanted: bool | None, packing: type[Packing], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_pack(packing, dtype):
        pytest.skip(f"{packing.title} cannot pack {dtype} here")
    monkeypatch.setattr(room, "PACKINGS", {packing.title: packing})
    model = tiny_model("llama").to(dtype)
    manager = manager_of(model, packed_linears=wanted)
    manager.start()
    answers = tokens_of(manager)
    assert_right(model, answers, tie)
    manager.destroy()


class TestAChangedWeight:
    @pytest.mark.parametrize(
        "change",
        [
            lambda model, other: model.load_state_dict(other.state_dict()),
            lambda model, other: [p.data.copy_(q) for p, q in zip(model.parameters(), other.parameters(), strict=True)],
            lambda model, other: [setattr(p, "data", q) for p, q in pairs(model, other)],
            lambda model, other: model.set_output_embeddings(other.get_output_embeddings()),
        ],
        ids=["load_state_dict", "in place through data", "data swapped", "another parameter"],
    )
    def test_is_packed_anew_at_the_next_start(
        self, started: chairlift.ContinuousBatchingManager, change: Callable[..., object]
    ) -> None:
        model = started.model
        assert_right(model, tokens_of(started))
        started.stop()
        before = linears_of(started)
        change(model, tiny_model("llama", seed=3))
        started.start()
        assert linears_of(started) is not before
        assert_right(model, tokens_of(started))

    def test_seen_while_the_manager_runs_is_torchs(self, started: chairlift.ContinuousBatchingManager) -> None:
        weight, linears = started.model.lm_head.weight, linears_of(started)
        assert linears.find(weight) is not None
        with torch.no_grad():
            weight.mul_(2)
        assert linears.find(weight) is None
        other = started.model.model.layers[0].mlp.up_proj.weight
        other.data = other.data.clone()
        assert linears.find(other) is None
        assert linears.find(started.model.model.layers[1].mlp.up_proj.weight) is not None

    def test_unseen_is_packed_anew_with_a_reset(self, started: chairlift.ContinuousBatchingManager) -> None:
        assert_right(started.model, tokens_of(started))
        for parameter, other in pairs(started.model, tiny_model("llama", seed=3)):
            parameter.data.copy_(other)
        started.reset_prefix_cache()
        assert_right(started.model, tokens_of(started))

    def test_back_again_after_a_reset_is_packed_anew(self, started: chairlift.ContinuousBatchingManager) -> None:
        first = {name: p.detach().clone() for name, p in started.model.named_parameters()}
        for parameter, other in pairs(started.model, tiny_model("llama", seed=3)):
            parameter.data.copy_(other)
        started.reset_prefix_cache()
        for name, parameter in started.model.named_parameters():
            parameter.data.copy_(first[name])
        started.stop()
        started.start()
        assert_right(started.model, tokens_of(started))

    def test_that_is_no_plain_matrix_any_more_is_torchs(self, model: PreTrainedModel) -> None:
        plan = plan_of(model)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().double())
        by_name = pack(model, plan).by_name
        assert "lm_head.weight" not in by_name
        assert "model.layers.0.mlp.up_proj.weight" in by_name


def pairs(model: PreTrainedModel, other: PreTrainedModel) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(model.parameters(), (p.detach() for p in other.parameters()), strict=True)


def used_by(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    with torch.no_grad(), recorded_weights() as used:
        model(torch.arange(5, 15).unsqueeze(0))
    return used


def plan_of(model: PreTrainedModel, **fields: Any) -> room.LinearPlan:
    used = {name for name, weight in model.named_parameters() if id(weight) in used_by(model)}
    return plan_linears(model, used, **{"wanted": True, "free_bytes": PLENTY, "max_rows": 64, **fields})


class TestCopies:
    def test_stay_over_a_restart_with_the_same_weights(self, started: chairlift.ContinuousBatchingManager) -> None:
        before = {name: packed.packed for name, packed in linears_of(started).by_name.items()}
        started.stop()
        started.model.load_state_dict(copy.deepcopy(started.model.state_dict()))
        started.start()
        after = linears_of(started)
        assert before
        assert all(after.by_name[name].packed is packed for name, packed in before.items())
        assert after.find(started.model.lm_head.weight) is not None

    def test_go_with_a_destroyed_manager(self, model: PreTrainedModel) -> None:
        manager = manager_of(model)
        manager.start()
        tokens_of(manager)
        kept = [weakref.ref(packed.packed) for packed in linears_of(manager).by_name.values()]
        manager.destroy()
        gc.collect()
        assert kept
        assert not any(ref() is not None for ref in kept)

    def test_go_with_a_loop_that_dies(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        manager = manager_of(model)
        monkeypatch.setattr("chairlift.worker.run_sync", mock.Mock(side_effect=RuntimeError("dead")))
        manager.start()
        manager.join()
        assert manager.fatal_error is not None
        assert linears_of(manager) is None

    def test_do_not_keep_a_weight_alive(self) -> None:
        layer = torch.nn.Linear(64, 64)
        linears = PackedLinears({"weight": packed(layer.weight)}, {"weight": layer.weight})
        ref = weakref.ref(layer.weight)
        del layer
        gc.collect()
        assert ref() is None
        assert linears.find(torch.nn.Linear(64, 64).weight) is None

    def test_that_take_more_than_a_quarter_of_the_free_memory_are_left_out(self, model: PreTrainedModel) -> None:
        plan = plan_of(model)
        assert plan.copy_bytes >= sum(p.nbytes for p in used_by(model).values())
        assert plan_of(model, free_bytes=4 * plan.copy_bytes).least_rows
        with pytest.raises(ValueError, match=r"packed_linears=True cannot be had: the copies would take .* 25% of"):
            plan_of(model, free_bytes=4 * plan.copy_bytes - 1)

    def test_are_left_out_of_the_memory_for_the_pool(self, model: PreTrainedModel, monkeypatch: Any) -> None:
        monkeypatch.setattr("chairlift.manager.free_memory_bytes", lambda: 1 << 30)
        monkeypatch.setattr("chairlift.engine.sizing.free_memory_bytes", lambda: 1 << 30)
        plain, other = (manager_of(model, num_blocks=None, packed_linears=wanted) for wanted in (False, True))
        taken = (plain.config.num_blocks - other.config.num_blocks) * plain.geometry.model_block_bytes
        plan = other._linear_plan
        # Whole blocks are taken.
        block = plain.geometry.model_block_bytes
        assert taken == pytest.approx(0.6 * plan.num_bytes, abs=block)
        assert plan.num_bytes > 4 * block
        assert f"{plan.copy_bytes / 2**20:,.1f} MiB" in other.describe()


class TestWhereItCannotBeHad:
    @pytest.fixture
    def refusing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(room, "LEAST_ELEMENTS", 1)

        class Missing(OneDnnPacking):
            def __init__(self, weight: torch.Tensor) -> None:
                raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

        monkeypatch.setattr(room, "PACKINGS", {"oneDNN": Missing})

    def test_everything_is_torchs_and_says_why(self, model: PreTrainedModel, refusing: None) -> None:
        manager = manager_of(model, packed_linears=None)
        manager.start()
        assert linears_of(manager) is None
        assert_right(model, tokens_of(manager))
        assert "as torch computes them: '_OpNamespace' 'mkldnn' object has no" in manager.describe()
        assert manager.config.packed_linears is False
        manager.destroy()

    def test_asked_for_it_is_refused(self, model: PreTrainedModel, refusing: None) -> None:
        with pytest.raises(ValueError, match=r"packed_linears=True cannot be had: .*_reorder_linear_weight.*None"):
            manager_of(model)

    def test_with_one_dnn_switched_off(self, model: PreTrainedModel) -> None:
        with torch.backends.mkldnn.flags(enabled=False):
            assert set(plan_of(model).packings.values()) == {"chairlift"}

    def test_with_wrong_results(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        class Wrong(NativePacking):
            def __call__(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
                return super().__call__(input, bias).zero_()

        monkeypatch.setattr(room, "PACKINGS", {"chairlift": Wrong})
        with pytest.raises(ValueError, match="differ"):
            plan_of(model)

    def test_under_autocast(self, model: PreTrainedModel) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="autocast"):
            manager_of(model)

    def test_weights_of_other_dtypes(self, model: PreTrainedModel) -> None:
        with pytest.raises(ValueError, match="fp32, bf16 or fp16"):
            plan_of(model.double())

    def test_tiny_weights_are_not_worth_it(self, model: PreTrainedModel) -> None:
        assert not plan_of(model, wanted=None).least_rows

    def test_a_value_of_another_type_is_refused(self) -> None:
        with pytest.raises(TypeError, match="packed_linears is 1, but must be True, False or None"):
            config(packed_linears=1)


class TestWhatPays:
    @pytest.mark.parametrize(
        ("after", "least"),
        [
            ({1: 0.5, 8: 0.5, 64: 0.5, 512: 0.5}, 1),
            ({1: 1.1, 8: 0.8, 64: 0.8, 512: 1.0}, 8),
            ({1: 2.0, 8: 1.2, 64: 0.9, 512: 0.9}, 64),
            ({1: 0.9, 8: 0.97, 64: 0.98, 512: 0.99}, None),
            ({1: 1.0, 8: 1.0, 64: 1.0, 512: 1.0}, None),
            ({1: 1.5, 8: 0.99, 64: 0.99, 512: 1.5}, None),
        ],
    )
    def test_is_faster_by_a_twentieth_from_some_number_of_rows_on(
        self, after: dict[int, float], least: int | None
    ) -> None:
        assert room._Measured(dict.fromkeys(after, 1.0), after).worth_it_from() == least

    @pytest.mark.parametrize("ratio", [0.5, 2.0])
    def test_is_what_was_measured(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
        monkeypatch.setattr(room, "LEAST_ELEMENTS", 1)
        monkeypatch.setattr(room, "_best_ms", mock.Mock(return_value=(1.0, dict.fromkeys(PACKINGS, ratio))))
        plan = plan_of(model, wanted=None)
        assert bool(plan.least_rows) == (ratio < 1)
        assert ("not faster here" in plan.described()) == (ratio > 1)
        assert plan_of(model).least_rows  # asked for, it is done all the same

    def test_the_packing_that_gains_most_is_taken(
        self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        times = {"chairlift": 0.5, "oneDNN": 0.4}
        monkeypatch.setattr(room, "_best_ms", mock.Mock(side_effect=lambda *_: (1.0, dict(times))))
        monkeypatch.setattr(room, "PACKINGS", dict.fromkeys(times, NativePacking))
        assert set(plan_of(model).packings.values()) == {"oneDNN"}
        monkeypatch.setattr(room, "_measurements", {})
        times["chairlift"] = 0.3
        assert set(plan_of(model).packings.values()) == {"chairlift"}
        assert "packed by chairlift, " in plan_of(model).described()

    def test_numbers_of_rows_are_few_and_little_is_computed_in_vain(self) -> None:
        padded = [padded_rows(rows) for rows in range(8193)]
        assert all(rows <= more <= rows * 9 / 8 for rows, more in enumerate(padded))
        assert len(set(padded)) == 89
        assert all(padded_rows(rows) == rows for rows in (0, 1, 7, 15, 64, 512, 8192))


@every_packing
class TestACall:
    @pytest.fixture
    def layer(self) -> torch.nn.Linear:
        return torch.nn.Linear(48, 40)

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize(
        "input",
        [
            lambda: torch.randn(1, 48),
            lambda: torch.randn(1, 17, 48),
            lambda: torch.randn(2, 3, 11, 48),
            lambda: torch.randn(0, 48),
            lambda: torch.randn(2, 0, 48),
            lambda: torch.randn(48),
            lambda: torch.randn(48, 33).t(),
            lambda: torch.randn(33, 96)[:, ::2],
            lambda: torch.randn(1, 48).expand(19, 48),
            lambda: torch.randn(7, 3, 48).transpose(0, 1),
        ],
    )
    def test_takes_any_input(
        self, layer: torch.nn.Linear, packing: type[Packing], input: Callable[[], torch.Tensor], bias: bool
    ) -> None:
        x, b = input(), layer.bias if bias else None
        with torch.no_grad():
            out, expected = packed(layer.weight, packing)(x, b), F.linear(x, layer.weight, b)
        assert out.shape == expected.shape
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)

    def test_of_fewer_rows_than_pay_is_torchs(
        self, layer: torch.nn.Linear, packing: type[Packing], counted: list[int]
    ) -> None:
        linear = packed(layer.weight, packing, least_rows=3)
        with torch.no_grad():
            assert torch.equal(linear(torch.ones(2, 48)), F.linear(torch.ones(2, 48), layer.weight))
            assert counted == [0]
            linear(torch.ones(3, 48))
        assert counted == [1]

    def test_of_another_dtype_fails_as_torchs_does(self, layer: torch.nn.Linear, packing: type[Packing]) -> None:
        with torch.no_grad(), pytest.raises(RuntimeError, match="same dtype"):
            packed(layer.weight, packing)(torch.ones(2, 48, dtype=torch.float64))

    def test_with_gradients_or_under_autocast_is_torchs(
        self, layer: torch.nn.Linear, packing: type[Packing], counted: list[int]
    ) -> None:
        x, linears = torch.ones(8, 48), PackedLinears({"w": packed(layer.weight, packing)}, {"w": layer.weight})
        with linears.entered():
            assert layer(x).requires_grad
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                assert layer(x).dtype is torch.bfloat16
            assert counted == [0]
            with torch.no_grad():
                layer(x)
            assert counted == [1]

    def test_of_a_weight_that_is_not_known_is_torchs(
        self, layer: torch.nn.Linear, packing: type[Packing], counted: list[int]
    ) -> None:
        other = copy.deepcopy(layer)
        linears = PackedLinears({"w": packed(layer.weight, packing)}, {"w": layer.weight})
        with linears.entered(), torch.no_grad():
            assert torch.equal(other(torch.ones(8, 48)), TORCHS_LINEAR(torch.ones(8, 48), other.weight, other.bias))
        assert counted == [0]


class Scaled(torch.Tensor):
    """A tensor of a class of its own."""


@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(4, 4, device="meta"),
        torch.eye(4).to_sparse(),
        torch.ones(4, 4, dtype=torch.float64),
        torch.ones(4, 4, dtype=torch.int8),
        torch.ones(4),
        torch.ones(0, 4),
        torch.ones(4, 4).as_subclass(Scaled),
        torch.nested.nested_tensor([torch.ones(2, 3)]),
    ],
    ids=["meta", "sparse", "fp64", "int8", "vector", "empty", "subclass", "nested"],
)
def test_weights_that_are_no_plain_matrix_are_left_alone(weight: torch.Tensor) -> None:
    assert not room._can_be_packed(weight)


def given_back(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return input


class TestTheSeam:
    @pytest.fixture(autouse=True)
    def _registered(self) -> None:
        with recorded_weights():
            pass

    def test_gives_everybody_else_torchs_own_function(self) -> None:
        seen = []
        with linear_context(given_back):
            thread = threading.Thread(target=lambda: seen.append(F.linear))
            thread.start()
            thread.join()
            assert F.linear is not TORCHS_LINEAR
            assert torch.equal(torch.nn.Linear(3, 3)(torch.ones(2, 3)), torch.ones(2, 3))
        assert seen == [TORCHS_LINEAR]
        assert F.linear is vars(F)["linear"] is torch._C._nn.linear

    def test_ends_with_its_block_and_goes_back_to_the_outer_one(self) -> None:
        def fail() -> None:
            with linear_context(given_back):
                with recorded_weights():
                    assert F.linear is not given_back
                assert F.linear is given_back
                raise RuntimeError

        with pytest.raises(RuntimeError):
            fail()
        assert F.linear is TORCHS_LINEAR

    def test_what_others_put_there_stays_in_force(self) -> None:
        layer = torch.nn.Linear(3, 3)
        with mock.patch("torch.nn.functional.linear", return_value=7), recorded_weights() as used:
            assert layer(torch.ones(2, 3)) == 7
            assert not used
        assert F.linear is TORCHS_LINEAR

    def test_a_name_that_was_taken_out_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("torch.nn.functional.linear")
        with pytest.raises(AttributeError, match=r"torch\.nn\.functional.*'linear'"):
            F.linear  # noqa: B018

    def test_the_module_is_a_module_and_pickles(self) -> None:
        assert isinstance(F, types.ModuleType)
        assert pickle.loads(pickle.dumps(F)) is F

    def test_a_compiler_sees_torchs_own(self) -> None:
        layer = torch.nn.Linear(3, 3)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        with torch.no_grad(), recorded_weights() as used:
            out = compiled(torch.ones(2, 3))
        assert not used
        assert torch.equal(out, layer(torch.ones(2, 3)))


def test_a_forward_of_another_thread_is_the_same_to_the_bit_while_packed_steps_run(model: PreTrainedModel) -> None:
    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model(torch.arange(5, 45).unsqueeze(0)).logits

    before, during = logits(), []
    manager = chairlift.init_continuous_batching(model, GenerationConfig(max_new_tokens=150), config())
    manager.start()
    label = manager.add_request([5, 6, 7], eos_token_id=-1)
    while manager.stats().generated_tokens < 100:
        during.append(logits())
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert manager.get_result(label).error is None
    manager.destroy()
    assert during
    assert all(torch.equal(before, other) for other in during)
    for other in copies:
        with torch.no_grad():
            assert torch.equal(other(torch.arange(5, 45).unsqueeze(0)).logits, before)
