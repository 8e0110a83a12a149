"""What a model is, learned from one small forward: its attention calls, their kinds, and what bounds it. Or why it
cannot be served.

No list of model names decides. A forward over one short sequence records every attention call; a second, over two
sequences packed in steps as the engine would run them, must give the logits of each sequence alone.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import DynamicCache, PreTrainedModel

from chairlift.attention.interface import forward_context
from chairlift.attention.plain import FULL, Reach, scores_attention, visibility
from chairlift.evaluation import evaluating
from chairlift.watch import ForwardWatch

_PROBE_TOKENS = 12
_LONGER_PROBE_TOKENS = 76
# A mask is asked what a query this far along sees; no context is longer.
_FAR = 1 << 24


@dataclass(frozen=True)
class Kind:
    """What makes calls alike."""

    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: torch.dtype
    device: torch.device
    reach: Reach = FULL

    def page_bytes(self, page_size: int) -> int:
        """K and V of `page_size` tokens of one call."""
        return page_size * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """K and V of one token of one call."""
        return self.num_kv_heads * (self.head_size + self.head_size_v) * self.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """One attention call of a forward."""

    ordinal: int
    kind: Kind
    num_heads: int
    reads_from: int  # the call whose pages it reads: itself, or an earlier one whose K and V it shares


@dataclass(frozen=True)
class ModelFacts:
    """What the engine needs to know of a model.

    Attributes:
        calls: Its attention calls, in order.
        vocab_size: Token ids go from 0 to below this.
        max_positions: Positions of its table, where it has one that ends; else None.
        first_regime: Longest sequence that it computes with the short factors of its RoPE, where it has two sets.
        limit: Tokens that it was made for, as its config says; None where it does not.
        token_bytes: Bytes of activations that each token of a step takes at the peak of a forward.
        logits_bytes: Bytes of the logits of each sampled row.
    """

    calls: tuple[Call, ...]
    vocab_size: int
    max_positions: int | None
    first_regime: int | None
    limit: int | None
    token_bytes: int
    logits_bytes: int


def require_model(model: object) -> None:
    """Refuses what is no model at all.

    Raises:
        TypeError: Not a `PreTrainedModel`.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"the model is a {type(model).__name__}, but must be a transformers PreTrainedModel")


def learn(model: PreTrainedModel) -> ModelFacts:
    """Learns what a model is. Takes one forward of 12 tokens and one of 76.

    Raises:
        ValueError: The model cannot be served, and why.
    """
    _refuse_placements(model)
    _refuse_config(model)
    accepts = forward_arguments(model)
    vocab_size = _vocab_size(model)
    limit = _config_limit(model)
    longer = min(_LONGER_PROBE_TOKENS, limit or _LONGER_PROBE_TOKENS)
    with evaluating(model), torch.no_grad():
        recorder, watch = _recorded_forward(model, vocab_size, min(_PROBE_TOKENS, longer), accepts)
        _, longer_watch = _recorded_forward(model, vocab_size, longer, accepts)
    first_regime = _first_regime(model)
    calls = tuple(recorder.calls)
    if not calls:
        raise refusal(model, "its layers do not call transformers' attention interface")
    # One of them alone may be something else as long as that forward.
    if watch.numbers_tokens and longer_watch.numbers_tokens:
        raise refusal(
            model,
            "it numbers the tokens of a forward by itself and computes with the numbers, which are not their "
            "positions in a packed step",
        )
    # Tokens picked in order (by an expert that gets all of them, say) look like a table as long as the forward.
    bounds = watch.table_lengths & longer_watch.table_lengths | _untold_window(model, calls, limit)
    further = max(longer - _PROBE_TOKENS, 1)
    return ModelFacts(
        calls=calls,
        vocab_size=vocab_size,
        max_positions=min(bounds, default=None),
        first_regime=first_regime,
        limit=limit,
        token_bytes=math.ceil(max(0, longer_watch.peak_bytes - watch.peak_bytes) / further),
        logits_bytes=vocab_size * model.dtype.itemsize,
    )


def _refuse_placements(model: PreTrainedModel) -> None:
    """Refuses what is not a plain model on one device.

    Raises:
        TypeError: Not a `PreTrainedModel`.
        ValueError: Spread over devices, sharded, tensor-parallel, or without weights.
    """
    require_model(model)
    if getattr(model, "_device_mesh", None) is not None or (getattr(model, "tp_size", None) or 1) > 1:
        raise refusal(model, "it is tensor-parallel")
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    placed = {tensor.device for tensor in model.parameters()}
    if len(devices) > 1 or len(placed) > 1:
        raise refusal(model, f"it is spread over several devices: {sorted(map(str, devices or placed))}")
    if torch.device("meta") in placed:
        raise refusal(model, "its weights are on the meta device: load them first")
    for module in model.modules():
        if hasattr(module, "_fsdp_wrapped_module") or type(module).__name__.startswith("FSDP"):
            raise refusal(model, "its parameters are sharded by FSDP")
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise refusal(model, "its parameters are sharded by DeepSpeed")
    if getattr(model.config, "is_encoder_decoder", False):
        raise refusal(model, "it is an encoder-decoder model")


def forward_arguments(model: PreTrainedModel) -> frozenset[str]:
    """Which of the arguments that a step passes the model's forward takes.

    Raises:
        ValueError: It takes no positions, without which packed sequences cannot be told apart.
    """
    parameters = inspect.signature(model.forward).parameters
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {name for name in ("logits_to_keep", "return_dict") if name in parameters}
    # Some models name neither, and hand them down all the same.
    handed_down = {name for name in ("position_ids", "use_cache") if name in parameters or anything}
    if "position_ids" not in handed_down:
        raise refusal(model, "its forward takes no position_ids, so packed sequences cannot be told apart")
    return frozenset(named | handed_down)


def forward(
    model: PreTrainedModel,
    accepts: frozenset[str],
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    logits_rows: torch.Tensor,
) -> torch.Tensor:
    """The one way in which steps call the model.

    Args:
        model: The model.
        accepts: What its forward takes, see `forward_arguments`.
        input_ids: [1, tokens]
        position_ids: [1, tokens]
        logits_rows: [sampled] tokens whose logits are wanted.

    Returns:
        [sampled, vocabulary]
    """
    arguments = {
        "position_ids": position_ids,
        "use_cache": False,
        "logits_to_keep": logits_rows,
        "return_dict": True,
    }
    output = model(input_ids=input_ids, **{name: arguments[name] for name in arguments if name in accepts})
    logits: torch.Tensor = output.logits[0]
    # A head without `logits_to_keep` computes all; the wanted ones are taken from them.
    return logits if "logits_to_keep" in accepts else logits[logits_rows]


def probe_tokens(vocab_size: int, count: int, device: torch.device, *, seed: int = 0) -> torch.Tensor:
    """[count] token ids without a pattern, the same each time."""
    ids = [(seed * 7919 + (n + 1) * (n + 3) * 2654435761) % 2**32 % vocab_size for n in range(count)]
    return torch.tensor(ids, device=device)


def _recorded_forward(
    model: PreTrainedModel, vocab_size: int, tokens: int, accepts: frozenset[str]
) -> tuple["Recorder", ForwardWatch]:
    recorder = Recorder(model, tokens)
    input_ids = probe_tokens(vocab_size, tokens, model.device).unsqueeze(0)
    position_ids = torch.arange(tokens, device=model.device).unsqueeze(0)
    last = torch.tensor([tokens - 1], device=model.device)
    watch = ForwardWatch(model, position_ids)
    try:
        with forward_context(recorder), watch:
            forward(model, accepts, input_ids, position_ids, last)
    except _Refusal as reason:
        raise refusal(model, str(reason)) from None
    except Exception as error:
        raise refusal(model, f"its forward failed on a packed step: {type(error).__name__}: {error}") from error
    return recorder, watch


class _Refusal(Exception):
    """Why a call cannot be served."""


def refusal(model: PreTrainedModel, reason: str) -> ValueError:
    """The error of a model that cannot be served."""
    return ValueError(f"{type(model).__name__} cannot be served: {reason}")


@dataclass
class Recorder:
    """Answers a forward over one sequence, and writes down its calls."""

    model: PreTrainedModel
    tokens: int
    calls: list[Call] = field(default_factory=list)
    _keys_and_values: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _masks: list[Reach | str] = field(default_factory=list)  # see `_reach_of`

    def mask(self, **kwargs: Any) -> torch.Tensor:
        """A single number that names the mask, in the shape of one."""
        self._masks.append(_reach_of(kwargs.get("mask_function"), kwargs.get("attention_mask")))
        return mask_stand_in(len(self._masks), kwargs.get("device"), kwargs.get("dtype"))

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Records a call, and computes it."""
        self._check_shapes(query, key, value)
        reach = self._reach(module, attention_mask, kwargs)
        # Under autocast K may come wider than V, from its rotation; attention would narrow it to V's.
        kind = Kind(key.shape[1], key.shape[3], value.shape[3], value.dtype, key.device, reach)
        ordinal = len(self.calls)
        self.calls.append(Call(ordinal, kind, query.shape[1], self._shared_with(key, value, kind, ordinal)))
        self._keys_and_values.append((key, value))
        # Unwatched: who numbers the tokens here is not the model.
        with _disable_current_modes():
            visible = visibility(reach, range(self.tokens), range(self.tokens), query.device)
        out = scores_attention(
            query.to(kind.dtype),
            key.to(kind.dtype),
            value,
            scale=scale_of(query, kwargs),
            visible=visible,
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
        )
        return out.transpose(1, 2).contiguous(), None

    def _check_shapes(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.dim() != 4 or tensor.shape[0] != 1:
                raise _Refusal(
                    f"an attention call has a {name} of shape {list(tensor.shape)}, not [1, heads, tokens, size]"
                )
            if tensor.shape[2] != self.tokens:
                raise _Refusal(f"an attention call has {tensor.shape[2]} {name} tokens for {self.tokens} of the step")
        if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
            raise _Refusal(
                f"an attention call has {query.shape[1]} heads, {key.shape[1]} of K and {value.shape[1]} of V"
            )

    def _reach(self, module: torch.nn.Module, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]) -> Reach:
        if kwargs.get("is_causal", getattr(module, "is_causal", True)) is False and attention_mask is None:
            raise _Refusal("its attention is not causal")
        if kwargs.get("position_bias") is not None:
            raise _Refusal("it adds a position bias to the scores")
        told = FULL if attention_mask is None else self._mask_named_by(attention_mask)
        if isinstance(told, str):
            raise _Refusal(told)
        window = kwargs.get("sliding_window")
        if window is None:
            return told
        by_call = Reach("window", int(window))
        if attention_mask is not None and told != by_call:
            its = f"one of {told.tokens}" if told.tokens else "none"
            raise _Refusal(f"a call is told a window of {window} tokens, and its mask has {its}")
        return by_call

    def _mask_named_by(self, attention_mask: torch.Tensor) -> Reach | str:
        number = int(attention_mask.flatten()[0]) if attention_mask.numel() == 1 else 0
        if 1 <= number <= len(self._masks):
            return self._masks[number - 1]
        return "it makes an attention mask or bias of its own"

    def _shared_with(self, key: torch.Tensor, value: torch.Tensor, kind: Kind, ordinal: int) -> int:
        """The earlier call of the same kind that was given the very same K and V, if there is one. A call that looks
        farther back needs pages of its own: the other's may be gone."""
        for earlier, (other_key, other_value) in enumerate(self._keys_and_values):
            same = _same_memory(key, other_key) and _same_memory(value, other_value)
            if same and self.calls[earlier].kind == kind:
                return self.calls[earlier].reads_from
        return ordinal


def mask_stand_in(number: int, device: Any, dtype: Any) -> torch.Tensor:
    """Stands for a mask: one number, in a mask's dimensions. The model passes it on to its calls, sliced or not; a
    mask that it changed or made itself is something else."""
    floating = dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
    return torch.full((1, 1, 1, 1), float(number), device=device, dtype=floating)


def scale_of(query: torch.Tensor, kwargs: dict[str, Any]) -> float:
    """The factor of the scores: the call's, or the usual one."""
    scaling = kwargs.get("scaling")
    return float(query.shape[-1]) ** -0.5 if scaling is None else float(scaling)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _reach_of(mask_function: Callable[..., Any] | None, padding: Any) -> Reach | str:
    """How far back a mask lets a query look, found by asking it; or why it is more than that."""
    # Some models make a padding mask of ones where none was given: it hides nothing.
    hides = padding is not None and not (isinstance(padding, torch.Tensor) and bool(padding.all()))
    own = "it makes an attention mask of its own"
    if mask_function is None or hides:
        return own

    def sees(query: int, key: int) -> bool:
        zero = torch.tensor(0)
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    try:
        if sees(0, 1) or sees(_FAR, _FAR + 1):
            return "its attention is not causal"
        if not sees(_FAR, _FAR):
            return own
        # The earliest key that a far query sees: between an unseen and a seen one.
        first = 0 if sees(_FAR, 0) else _boundary(-1, _FAR, lambda key: sees(_FAR, key))
        if first == 0:
            reach = FULL
        elif not sees(_FAR + 1, first) and sees(_FAR + 1, first + 1):
            reach = Reach("window", _FAR - first + 1)
        else:
            # The first query that does not see it any more is the start of the next chunk.
            reach = Reach("chunk", _boundary(_FAR, 2 * _FAR, lambda query: not sees(query, first)) - first)
        # Here and there, and at the edges of what was found.
        queries = (0, 1, 5, 100, 4097, _FAR - 3, reach.tokens, 2 * reach.tokens, 3 * reach.tokens + 1)
        for query in queries:
            edge = reach.first_seen(query)
            for key in (0, 1, 4, 99, 2049, _FAR - 9, max(0, edge - 1), edge):
                if sees(query, key) != (edge <= key <= query):
                    return own
        return reach
    except Exception:
        return "it makes an attention mask that depends on more than positions"


def _boundary(no: int, yes: int, holds: Callable[[int], bool]) -> int:
    """The first number from which on something holds, that does not at `no` and does at `yes`."""
    while yes - no > 1:
        middle = (no + yes) // 2
        no, yes = (no, middle) if holds(middle) else (middle, yes)
    return yes


def _vocab_size(model: PreTrainedModel) -> int:
    embeddings = model.get_input_embeddings()
    weight = getattr(embeddings, "weight", None)
    rows = weight.shape[0] if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None
    configured = getattr(model.config.get_text_config(), "vocab_size", None)
    known = [size for size in (rows, configured) if size]
    if not known:
        raise refusal(model, "neither its embeddings nor its config tell the size of its vocabulary")
    return int(min(known))


def _config_limit(model: PreTrainedModel) -> int | None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if isinstance(limit, int) and limit > 0 else None


def _refuse_config(model: PreTrainedModel) -> None:
    config = model.config.get_text_config(decoder=True)
    _refuse_states(model, config)
    if "dynamic" in {entry.get("rope_type") for entry in _ropes(config)}:
        raise refusal(
            model, "its RoPE of type 'dynamic', whose factors depend on the longest sequence, is not served yet"
        )


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """The parameters of the model's RoPE, or of that of each type of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    entries = [rope, *rope.values()] if isinstance(rope, Mapping) else []
    return [entry for entry in entries if isinstance(entry, Mapping)]


def _first_regime(model: PreTrainedModel) -> int | None:
    """Longest sequence that a RoPE of type longrope computes with its short factors; None without one.

    `generate` computes a sequence again that outgrows it, and so does the engine; a model that keeps what it computed
    with the short factors is another.
    """
    config = model.config.get_text_config(decoder=True)
    longest = {
        entry.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for entry in _ropes(config)
        if entry.get("rope_type") == "longrope"
    }
    if not longest:
        return None
    (length, *others) = longest
    if others or not isinstance(length, int) or length < 1:
        raise refusal(model, f"its RoPE of type 'longrope' changes its factors at {longest}, which is no single length")
    if not _computes_again(model, config, length):
        raise refusal(
            model,
            "its RoPE of type 'longrope' changes its factors in the middle of a sequence, but `generate` keeps K and V "
            "that were computed with the others, which is not served",
        )
    return length


def _computes_again(model: PreTrainedModel, config: Any, length: int) -> bool:
    """Whether `generate` drops its cache when a sequence becomes one longer than that."""
    accepted = inspect.signature(model.prepare_inputs_for_generation).parameters
    name = "cache" if "cache" in accepted else "past_key_values"
    cache = DynamicCache(config=config)
    cache.get_seq_length = lambda *_: length
    ids = torch.zeros((1, length + 1), dtype=torch.long, device=model.device)
    try:
        inputs = model.prepare_inputs_for_generation(
            ids, attention_mask=torch.ones_like(ids), next_sequence_length=1, **{name: cache}
        )
    except Exception as error:
        raise refusal(
            model, f"what `generate` does with its RoPE of type 'longrope' cannot be told: {error}"
        ) from error
    return inputs.get(name) is None


def _refuse_states(model: PreTrainedModel, config: Any) -> None:
    """The cache that `generate` makes for a model tells whether it keeps more than K and V."""
    for layer in _cache_layers(config):
        name = type(layer).__name__
        if name not in ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"):
            raise refusal(
                model, f"its layers keep more than K and V of attention calls ({name}), which is not served yet"
            )


def _untold_window(model: PreTrainedModel, calls: tuple[Call, ...], limit: int | None) -> set[int]:
    """That cache may also forget tokens, which is a window even if no call or mask is told of it. One that is as long
    as the model's limit bounds a sequence; a shorter one cannot be served."""
    layers = _cache_layers(model.config.get_text_config(decoder=True))
    forgetting = {layer.sliding_window for layer in layers if hasattr(layer, "sliding_window")}
    # To a cache a chunk is a window.
    untold = forgetting - {call.kind.reach.tokens for call in calls}
    if untold and (limit is None or min(untold) < limit):
        raise refusal(
            model, f"it attends within a window of {min(untold)} tokens, which none of its attention calls is told"
        )
    return untold


def _cache_layers(config: Any) -> list[Any]:
    try:
        return list(DynamicCache(config=config).layers)
    except Exception:
        # A config that no cache can be made for says nothing; the forward will.
        return []
