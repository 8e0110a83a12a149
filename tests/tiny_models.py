"""Builds a tiny random model of any family that `transformers` can load as a causal language model.

Owns the table of what makes a family small and the greedy reference that an engine is compared with.
Knows nothing of chairlift.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 97
FIRST_PLAIN_TOKEN = 3  # the ids below it may be special (pad, bos, ...) in some family
NUM_LAYERS = 2
MAX_POSITIONS = 512
WEIGHT_STD = 0.3  # with the usual 0.02 a tiny model repeats one token, which hides faults

# The field's many words for one size, by value. A field is set where the family's config has it.
SIZES: dict[int | float, str] = {
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size",
    MAX_POSITIONS: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length"
    " model_max_length original_max_position_embeddings",
    64: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dim_ff dff d_inner ffn_hidden_size"
    " feed_forward_size intermediate_size_mlp dense_intermediate_size inner_dim",
    32: "hidden_size d_model n_embd emb_dim moe_intermediate_size shared_expert_intermediate_size"
    " shared_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size embedding_size"
    " shared_experts_intermediate_size attention_hidden_size word_embed_proj_dim input_embedding_size"
    " output_embedding_size lru_width backbone_hidden_size hidden_size_global embedding_dim",
    16: "q_lora_rank kv_lora_rank qk_head_dim o_lora_rank",
    8: "head_dim swa_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim swa_v_head_dim"
    " dim_head d_head kv_channels index_head_dim attention_head_size linear_key_head_dim"
    " linear_value_head_dim linear_head_dim mamba_head_dim mamba_headdim mamba_d_state ssm_state_size"
    " state_size mamba_dt_rank time_step_rank hidden_size_per_layer_input laurel_rank gated_norm_rank d_rel"
    " index_topk ple_embed_dim router_hidden_size floor_scale log_scaling_n_floor rel_extent"
    " keep_window_size",
    4: "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads"
    " decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads"
    " swa_num_attention_heads num_local_experts num_experts n_routed_experts moe_num_experts"
    " linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads n_mamba_heads index_n_heads"
    " rotary_dim index_block_size",
    NUM_LAYERS: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers"
    " num_encoder_layers num_decoder_layers num_key_value_heads num_global_key_value_heads"
    " swa_num_key_value_heads num_kv_heads num_query_groups num_experts_per_tok num_experts_per_token"
    " moe_topk moe_k top_k_experts linear_num_key_heads index_topk_blocks",
    1: "n_group topk_group num_expert_group n_groups mamba_n_groups mamba_ngroups n_shared_experts"
    " num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers",
    0: "num_nextn_predict_layers",
    WEIGHT_STD: "initializer_range init_std initializer_factor",
}

# What the sizes above do not settle, by config class or family.
EXTRA: dict[str, dict[str, Any]] = {
    "BambaConfig": {"attn_layer_indices": [1]},
    "BltConfig": {"encoder_hash_byte_group_vocab": VOCAB_SIZE, "num_hidden_layers": NUM_LAYERS},
    "CohereCompassTextConfig": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "DbrxAttentionConfig": {"rope_theta": 1e4, "clip_qkv": 8.0},
    "Gemma3nTextConfig": {
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 1,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0],
    },
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 3,
            "num_hidden_layers": 3,
        }
    },
    "Gemma4TextConfig": {"num_hidden_layers": 3, "num_kv_shared_layers": 1, "global_head_dim": 16},
    "Gemma4UnifiedTextConfig": {"num_hidden_layers": 3, "num_kv_shared_layers": 1, "global_head_dim": 16},
    "DoryConfig": {
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "num_hidden_layers": 3,
    },
    "GPTNeoConfig": {"attention_types": [[["global"], NUM_LAYERS]]},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "LongcatFlashConfig": {"zero_expert_num": 2},
    "Mamba2Config": {"head_dim": 16},
    "MiniMaxM3VLTextConfig": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "MusicgenDecoderConfig": {"num_codebooks": 1},
    "MusicgenMelodyDecoderConfig": {"num_codebooks": 1},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
    },
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": {
        "is_decoder": True,
        "axial_pos_shape": (16, 32),
        "axial_pos_embds_dim": (16, 16),
        "attn_layers": ["local", "lsh"],
    },
    "RoCBertConfig": {"shape_vocab_size": VOCAB_SIZE, "shape_embed_dim": 8, "pronunciation_embed_dim": 8},
    "xLSTMConfig": {"hidden_size": 128, "embedding_dim": 128},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "ZayaConfig": {"num_experts_per_tok": 1},
}

# Kinds of layer with a window, and the kind that stands for each without; fields that hold a window.
UNWINDOWED = {
    "sliding_attention": "full_attention",
    "chunked_attention": "full_attention",
    "hybrid_sliding": "hybrid",
}
WINDOWS = {"sliding_window", "attention_chunk_size", "sliding_window_size", "window_size", "local_attention"}


def families() -> list[str]:
    """Every model type of the causal-LM mapping, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def model_class(model_type: str) -> type[PreTrainedModel]:
    found: type[PreTrainedModel] = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    return found


def config_class(model_type: str) -> type[PreTrainedConfig]:
    """The family's own config class, or its text part where the causal LM is built from that one alone."""
    own: type[PreTrainedConfig] = CONFIG_MAPPING[model_type]
    wanted: type[PreTrainedConfig] = model_class(model_type).config_class
    return wanted if wanted in own.sub_configs.values() else own


def tiny_config(model_type: str, *, window: int | None = None, **overrides: Any) -> PreTrainedConfig:
    """A config with every size small; `overrides` win, the number of layers follows `layer_types`.

    With a `window` (in tokens) the layers that have one in the family keep it, else they attend to all.
    """
    return _shrink(config_class(model_type), {**EXTRA.get(model_type, {}), **overrides}, window)


def tiny_model(model_type: str, *, seed: int = 0, window: int | None = None, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model in eval mode that generates to its full length (no end token).

    Every weight matrix is drawn with `WEIGHT_STD`, whatever the family's own initialisation;
    vectors (norm weights, biases) keep theirs. The global random state is left as it was.
    """
    config = tiny_config(model_type, window=window, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(model_type)(config).float().eval()
        norms = {id(p) for m in model.modules() if "norm" in type(m).__name__.lower() for p in m.parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2 and parameter.is_floating_point() and id(parameter) not in norms:
                    parameter.normal_(std=WEIGHT_STD)
    model.generation_config = GenerationConfig(bos_token_id=0, decoder_start_token_id=0)
    return model


def _shrink(cls: type[PreTrainedConfig], given: dict[str, Any], window: int | None) -> PreTrainedConfig:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    given = {**EXTRA.get(cls.__name__, {}), **given}
    try:
        default = cls()
    except Exception:  # some reject their own defaults
        default = cls(**given)
    small: dict[str, Any] = {n: size for size, words in SIZES.items() for n in words.split() if n in fields}
    small |= _small_ids(default, set(fields))
    small |= _small_layers(default, set(fields), given, window)
    for name in fields.keys() & WINDOWS:
        # Layers told to be full still ask some configs for a window; where it alone decides, it is None.
        optional = "None" in str(fields[name].type) and "layer_types" not in fields
        small[name] = window or (None if optional else MAX_POSITIONS)
    if "use_sliding_window" in fields:
        small["use_sliding_window"] = window is not None
    if "kv_lora_rank" in fields:  # latent attention has no grouped heads
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "is_decoder" in fields:  # else the encoder families attend both ways
        small["is_decoder"] = True
    if "tie_word_embeddings" in fields:  # tied, a tiny model tends to echo its last token
        small["tie_word_embeddings"] = False
    for name in cls.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            small[name] = _shrink(type(part), given.pop(name, {}), window)
    return cls(**{**small, **given})


def _small_ids(default: PreTrainedConfig, names: set[str]) -> dict[str, Any]:
    """Special ids inside the vocabulary; no end of text."""
    ids: dict[str, Any] = {}
    for name in sorted(names):
        if name == "eos_token_id":
            ids[name] = None
        elif name.endswith(("_token_id", "_token_index")):
            value = getattr(default, name, None)
            if isinstance(value, int) and value >= FIRST_PLAIN_TOKEN:
                text = name in ("bos_token_id", "pad_token_id")
                ids[name] = 0 if text else VOCAB_SIZE - 1 - len(ids)
    return ids


def _small_layers(
    default: PreTrainedConfig, names: set[str], given: dict[str, Any], window: int | None
) -> dict[str, Any]:
    """Lists with an entry per layer: one layer of each kind, without a window full attention instead."""
    lists = {}
    for name in ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types", "no_rope_layers"):
        value = getattr(default, name, None) if name in names else None
        if isinstance(value, (list, tuple)) and value:
            kinds = list(dict.fromkeys(value))
            if window is None:
                kinds = list(dict.fromkeys(UNWINDOWED.get(kind, kind) for kind in kinds))
            elif name == "layer_types" and "use_sliding_window" in names:
                kinds = ["full_attention", "sliding_attention"]  # windows are off in the default config
            lists[name] = kinds
    for name in ("layer_types", "layers_block_type"):
        if name in given:
            lists[name] = list(given[name])
    count = given.get("num_hidden_layers") or max([NUM_LAYERS, *map(len, lists.values())])
    small: dict[str, Any] = {name: (kinds * count)[:count] for name, kinds in lists.items()}
    if "num_hidden_layers" in names:
        small["num_hidden_layers"] = count
    return small


def reference(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of `model.generate` on this prompt alone, and for each the gap of the two best logits."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [step[0].topk(2).values for step in out.logits]
    return out.sequences[0, len(prompt) :].tolist(), [float(top[0] - top[1]) for top in best]


# By which trainers change weights.
WAYS_TO_CHANGE = ("data", "load_state_dict", "optimiser", "one bit")


def change_weights(model: PreTrainedModel, how: str = "data") -> None:
    """Gives a Llama of `tiny_model` other weights."""
    other = tiny_model("llama", seed=5)
    if how == "data":
        for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
            parameter.data.copy_(new.data)
    elif how == "load_state_dict":
        model.load_state_dict(other.state_dict())
    elif how == "optimiser":
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        model(torch.arange(FIRST_PLAIN_TOKEN, 12)[None]).logits.square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    else:
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.view(torch.int32)[0, 0] ^= 1 << 30


def tie_aware_mismatch(
    tokens: list[int], reference_tokens: list[int], gaps: list[float], tie: float = 1e-4
) -> int | None:
    """Index of the first token that differs and is no tie, else None.

    A difference where the reference's two best logits are within `tie` is accepted and ends the
    comparison, for the texts may part from there on.
    """
    for i, (token, expected) in enumerate(zip(tokens, reference_tokens, strict=False)):
        if token != expected:
            return None if gaps[i] <= tie else i
    return None if len(tokens) == len(reference_tokens) else min(len(tokens), len(reference_tokens))
