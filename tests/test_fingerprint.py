"""The fingerprint of a model's weights changes with what a forward computes with, and with nothing else."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from chairlift import _native
from chairlift.engine import fingerprint as room
from chairlift.engine.fingerprint import Fingerprint, fingerprint
from tiny_models import tiny_model

# A program that prints the fingerprint of the same model as `model` below.
IN_ANOTHER_PROCESS = """
from chairlift.engine.fingerprint import fingerprint
from tiny_models import tiny_model
print(fingerprint(tiny_model("llama")).digest)
"""


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that are smaller than the rows of a tiny matrix."""
    monkeypatch.setattr(room, "PIECE_BYTES", 64)


def weight_of(model: PreTrainedModel) -> torch.nn.Parameter:
    return model.model.layers[1].mlp.down_proj.weight


def holding(tensor: torch.Tensor) -> torch.nn.Module:
    """A model whose one weight is this tensor."""
    module = torch.nn.Module()
    module.register_buffer("weight", tensor)
    return module


class Adapted(torch.nn.Linear):
    """A layer with PEFT's attributes."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.weight = torch.nn.Parameter(torch.eye(4))
        self._active_adapter = ["first"]
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self.scaling = {"first": 1.0, "second": 1.0}

    @property
    def active_adapter(self) -> list[str]:
        return self._active_adapter

    @property
    def active_adapters(self) -> list[str]:
        return self._active_adapter

    @property
    def disable_adapters(self) -> bool:
        return self._disable_adapters


class Scaled(torch.Tensor):
    """A tensor made of two others, as quantisation libraries have them."""

    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, **_: int) -> "Scaled":
        made: Scaled = cls._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)
        return made

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, bits: int = 8) -> None:
        self.values, self.scale, self.bits = values, scale, bits

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], (self.bits, object())

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, *sizes: Any) -> "Scaled":
        return Scaled(inner["values"], inner["scale"], bits=context[0])

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Closed(torch.Tensor):
    """A tensor that has no bytes and does not tell what it is made of."""

    def __new__(cls) -> "Closed":
        made: Closed = cls._make_wrapper_subclass(cls, (2, 2), dtype=torch.float32)
        return made

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented


class TestItChangesWith:
    def test_an_edit_through_data(self, model: PreTrainedModel) -> None:
        before, version = fingerprint(model), weight_of(model)._version
        weight_of(model).data[0, 0] += 1e-3
        assert weight_of(model)._version == version
        assert fingerprint(model) != before

    @pytest.mark.parametrize("how", ["fused", "foreach"])
    def test_a_step_of_an_optimiser(self, model: PreTrainedModel, how: str) -> None:
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, **{how: True})
        before = fingerprint(model)
        model(torch.arange(5, 15).unsqueeze(0)).logits.square().mean().backward()
        assert fingerprint(model) == before
        optimiser.step()
        assert fingerprint(model) != before

    def test_load_state_dict(self, model: PreTrainedModel) -> None:
        other = tiny_model("llama", seed=1)
        assert fingerprint(model) != fingerprint(other)
        model.load_state_dict(other.state_dict())
        assert fingerprint(model) == fingerprint(other)

    @pytest.mark.parametrize("rows", [(0, 1), (3, 31)])
    def test_two_rows_of_a_matrix_swapped(self, model: PreTrainedModel, rows: tuple[int, int]) -> None:
        before = fingerprint(model)
        weight_of(model).data[list(rows)] = weight_of(model).data[list(reversed(rows))]
        assert fingerprint(model) != before

    def test_two_matrices_swapped(self, model: PreTrainedModel) -> None:
        before, mlp = fingerprint(model), model.model.layers[0].mlp
        mlp.gate_proj.weight, mlp.up_proj.weight = mlp.up_proj.weight, mlp.gate_proj.weight
        assert fingerprint(model) != before

    def test_any_single_bit_of_any_element(self) -> None:
        model = holding(torch.arange(12, dtype=torch.float32).reshape(3, 4))
        octets, seen = model.weight.view(torch.uint8).view(-1), {fingerprint(model)}
        for octet in range(12 * 4):
            for bit in range(8):
                octets[octet] ^= 1 << bit
                seen.add(fingerprint(model))
                octets[octet] ^= 1 << bit
        assert len(seen) == 1 + 12 * 32

    def test_a_bit_of_any_piece(self, model: PreTrainedModel, small_pieces: None) -> None:
        flat, seen = weight_of(model).data.view(torch.int32).view(-1), {fingerprint(model)}
        positions = range(0, flat.numel(), 61)
        for element in positions:
            flat[element] ^= 1
            seen.add(fingerprint(model))
            flat[element] ^= 1
        assert len(seen) == 1 + len(positions)

    def test_the_sign_of_a_zero(self) -> None:
        assert fingerprint(holding(torch.tensor([0.0]))) != fingerprint(holding(torch.tensor([-0.0])))

    def test_a_parameter_replaced_by_another_tensor(self, model: PreTrainedModel) -> None:
        before = fingerprint(model)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
        assert fingerprint(model) != before

    def test_a_buffer_that_is_not_persistent(self, model: PreTrainedModel) -> None:
        before = fingerprint(model)
        assert "model.rotary_emb.inv_freq" not in model.state_dict()
        model.model.rotary_emb.inv_freq[1] *= 2
        assert fingerprint(model) != before

    @pytest.mark.parametrize(
        "other",
        [
            torch.zeros(3, 2),
            torch.zeros(6),
            torch.zeros(2, 3, dtype=torch.int32),
            torch.zeros(2, 3, dtype=torch.bfloat16),
            torch.zeros(2, 4),
        ],
        ids=["shape", "dimensions", "dtype", "size of an element", "one element more"],
    )
    def test_a_shape_or_dtype(self, other: torch.Tensor) -> None:
        assert fingerprint(holding(torch.zeros(2, 3))) != fingerprint(holding(other))

    def test_a_name(self) -> None:
        model, other = torch.nn.Module(), torch.nn.Module()
        model.register_buffer("weight", torch.ones(2))
        other.register_buffer("bias", torch.ones(2))
        assert fingerprint(model) != fingerprint(other)

    def test_one_tensor_more(self, model: PreTrainedModel) -> None:
        before = fingerprint(model)
        model.model.register_buffer("empty", torch.empty(0), persistent=False)
        assert fingerprint(model) != before

    def test_either_of_two_weights_that_share_memory_in_part(self) -> None:
        fused = torch.arange(12.0).reshape(4, 3)
        model = torch.nn.Module()
        model.register_buffer("first", fused[:3])
        model.register_buffer("second", fused[1:])
        seen = {fingerprint(model)}
        for row in range(4):
            fused[row, 1] += 100
            seen.add(fingerprint(model))
        assert len(seen) == 5


class TestItChangesWithAdapters:
    @pytest.mark.parametrize(
        "change",
        [
            lambda layer: setattr(layer, "_active_adapter", ["second"]),
            lambda layer: setattr(layer, "_active_adapter", ["first", "second"]),
            lambda layer: setattr(layer, "_disable_adapters", True),
            lambda layer: layer.merged_adapters.append("first"),
            lambda layer: layer.scaling.update(first=0.5),
        ],
        ids=["switched", "one more", "disabled", "merged", "scaled"],
    )
    def test_of_a_layer(self, model: PreTrainedModel, change: Callable[[Adapted], None]) -> None:
        model.model.layers[0].adapted = layer = Adapted()
        before = fingerprint(model)
        assert fingerprint(model) == before
        change(layer)
        assert fingerprint(model) != before

    def test_but_not_with_another_way_to_say_the_same(self, model: PreTrainedModel) -> None:
        model.model.layers[0].adapted = layer = Adapted()
        before = fingerprint(model)
        layer._active_adapter = "first"
        assert fingerprint(model) == before


class TestItStays:
    def test_in_training_mode(self, model: PreTrainedModel) -> None:
        before = fingerprint(model)
        assert fingerprint(model.train()) == before

    def test_with_requires_grad_and_gradients(self, model: PreTrainedModel) -> None:
        before = fingerprint(model)
        model(torch.arange(5, 15).unsqueeze(0)).logits.sum().backward()
        assert fingerprint(model) == before
        assert fingerprint(model.requires_grad_(False)) == before

    def test_after_a_move_to_the_same_device(self, model: PreTrainedModel) -> None:
        before = fingerprint(model)
        assert fingerprint(model.to("cpu")) == before

    def test_in_a_copy(self, model: PreTrainedModel) -> None:
        assert fingerprint(copy.deepcopy(model)) == fingerprint(model)

    def test_after_generation(self, model: PreTrainedModel) -> None:
        before = fingerprint(model)
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert fingerprint(model) == before

    def test_in_another_process(self, model: PreTrainedModel) -> None:
        path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
        environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "7"}
        ended = subprocess.run(
            [sys.executable, "-c", IN_ANOTHER_PROCESS], capture_output=True, text=True, check=True, env=environment
        )
        assert Fingerprint(ended.stdout.strip()) == fingerprint(model)

    def test_whatever_the_number_of_threads(self, model: PreTrainedModel, small_pieces: None) -> None:
        num_threads, seen = torch.get_num_threads(), set()
        try:
            for n in (1, 2, 5):
                torch.set_num_threads(n)
                seen |= {fingerprint(model) for _ in range(3)}
        finally:
            torch.set_num_threads(num_threads)
        assert len(seen) == 1

    def test_in_inference_mode(self, model: PreTrainedModel) -> None:
        before = fingerprint(model)
        with torch.inference_mode():
            assert fingerprint(model) == before

    def test_whether_weights_are_tied_or_equal(self) -> None:
        model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        model[1].weight = model[0].weight
        tied = fingerprint(model)
        model[1].weight = torch.nn.Parameter(model[0].weight.detach().clone())
        assert fingerprint(model) == tied


def test_the_model_and_the_random_state_are_left_alone(model: PreTrainedModel) -> None:
    random_state = torch.get_rng_state()
    before = {name: (p, p._version, p.requires_grad, p.grad) for name, p in model.named_parameters()}
    copies = {name: p.detach().clone() for name, p in model.named_parameters()}
    fingerprint(model)
    after = {name: (p, p._version, p.requires_grad, p.grad) for name, p in model.named_parameters()}
    assert all(after[name][0] is before[name][0] and after[name][1:] == before[name][1:] for name in before)
    assert all(torch.equal(p, copies[name]) for name, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_memory_that_weights_share_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8, bias=False) for _ in range(3)])
    model[2].weight = model[0].weight
    read: list[int] = []
    digests = _native.digests

    def counting(buffers: list[Any], num_threads: int) -> list[bytes]:
        read.extend(buffer.nbytes for buffer in buffers)
        return digests(buffers, num_threads)

    monkeypatch.setattr(room._native, "digests", counting)
    fingerprint(model)
    assert read == [8 * 8 * 4] * 2


def test_weights_are_read_where_they_lie(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().t().contiguous().t())
    read: set[int] = set()
    digests = _native.digests

    def noting(buffers: list[Any], num_threads: int) -> list[bytes]:
        read.update(buffer.ctypes.data for buffer in buffers)
        return digests(buffers, num_threads)

    monkeypatch.setattr(room._native, "digests", noting)
    fingerprint(model)
    assert read == {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}


@pytest.mark.parametrize(
    "of",
    [
        lambda base: base[:, ::2],
        lambda base: base[:, :7],
        lambda base: base[::3].transpose(0, 1),
        lambda base: base[:, None, ::3].expand(-1, 5, -1),
        lambda base: base[1:2, ::8],
    ],
    ids=["every other column", "some columns", "transposed", "expanded", "one row"],
)
def test_each_element_of_a_weight_with_gaps_counts_and_none_between(
    of: Callable[[torch.Tensor], torch.Tensor], small_pieces: None
) -> None:
    base = torch.arange(24.0 * 40).reshape(24, 40)
    weight = of(base)
    model, shown = holding(weight), set(weight.flatten().tolist())
    before = fingerprint(model)
    for element in range(0, base.numel(), 7):
        flat = base.view(-1)
        value = flat[element].item()
        flat[element] = -1
        assert (fingerprint(model) != before) == (value in shown)
        flat[element] = value
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.bool, torch.complex128],
    ids=str,
)
def test_weights_of_any_dtype_are_read(dtype: torch.dtype) -> None:
    ones, zeros = torch.ones(4, 3).to(dtype), torch.zeros(4, 3).to(dtype)
    assert fingerprint(holding(ones)) == fingerprint(holding(ones.clone())) != fingerprint(holding(zeros))
    assert fingerprint(holding(ones[:, ::2])) != fingerprint(holding(zeros[:, ::2]))
    assert fingerprint(holding(ones[0, 0])) != fingerprint(holding(zeros[0, 0]))


def test_a_tensor_made_of_others_counts_with_those() -> None:
    values, scale = torch.arange(6, dtype=torch.int8).reshape(2, 3), torch.ones(2)
    model = holding(Scaled(values, scale))
    before = fingerprint(model)
    assert fingerprint(holding(Scaled(values.clone(), scale.clone()))) == before
    assert fingerprint(holding(Scaled(values, scale, bits=4))) != before
    scale[1] = 2
    assert fingerprint(model) != before
    scale[1] = 1
    values[1, 1] = 9
    assert fingerprint(model) != before


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (lambda: torch.ones(2, device="meta"), "meta device"),
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.nn.UninitializedBuffer(), "not materialised"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "conjugate"),
        (lambda: Closed(), "Closed does not tell its parts"),
    ],
    ids=["meta", "sparse", "lazy", "conjugate view", "subclass"],
)
def test_a_weight_that_cannot_be_read_is_named(tensor: Callable[[], torch.Tensor], reason: str) -> None:
    model = torch.nn.ModuleDict({"layer": holding(tensor())})
    with pytest.raises(TypeError, match=rf"'layer\.weight'.*{reason}"):
        fingerprint(model)


class TestDigests:
    def test_they_are_xxh3(self) -> None:
        assert _native.digests([b""], 1)[0].hex() == "99aa06d3014798d86001c324468d497f"

    def test_each_is_of_its_buffer_whatever_the_threads(self) -> None:
        buffers = [bytes([n]) * n * 100 for n in range(50)]
        alone = [_native.digests([buffer], 1)[0] for buffer in buffers]
        assert all(_native.digests(buffers, num_threads) == alone for num_threads in (0, 1, 2, 7, 100))
        assert len(set(alone)) == 50

    def test_no_buffers_have_no_digests(self) -> None:
        assert _native.digests([], 2) == []

    def test_an_empty_array_is_a_buffer(self) -> None:
        assert _native.digests([np.empty(0, np.uint8)], 1) == _native.digests([b""], 1)

    def test_a_buffer_with_gaps_is_refused(self) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            _native.digests([np.zeros(8, np.uint8)[::2]], 1)

    def test_a_buffer_of_another_element_type_is_refused(self) -> None:
        with pytest.raises(BufferError):
            _native.digests([np.zeros(8, np.float32)], 1)
