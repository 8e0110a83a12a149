"""What was learned of a model and chosen for it, as a table for people."""

import math

from transformers import PreTrainedModel

from chairlift.config import ResolvedConfig
from chairlift.engine.cache import Geometry
from chairlift.engine.sizing import BatchCost
from chairlift.probe import ModelFacts


def described(
    model: PreTrainedModel,
    facts: ModelFacts,
    geometry: Geometry,
    config: ResolvedConfig,
    cost: BatchCost,
    *,
    linears: str,
    forward: str,
    attention: str,
    cache_bytes: int,
) -> str:
    """A line for each fact: its name, its value, and the reason where it was chosen."""
    shared = sum(call.reads_from != call.ordinal for call in facts.calls)
    batch = cost.of(config.max_batch_tokens or 0, config.max_requests_per_batch or 0)
    host_bytes = config.swap_blocks * geometry.block_bytes
    loaded = (model.config._attn_implementation or "eager").removeprefix("paged|")
    facts_of_model = {
        "model": (f"{type(model).__name__}, {model.dtype}, {model.device}", ""),
        "attention calls": (len(facts.calls), f"{shared} read the pages of another"),
        "kinds": (len({call.kind for call in facts.calls}), ""),
        "groups": (geometry.described(), ""),
        "positions": (facts.max_positions or "unbounded", ""),
    }
    how = "the model's own" if loaded == config.attention else "replaced, as auto_switch_to_flash allows"
    computing = {
        "attention backend": (f"{config.attention}: {attention}", f"loaded with {loaded}; {how}"),
        "linear layers": (linears, ""),
        "forward": (forward, ""),
    }
    chosen = {
        name: (getattr(config, name), config.reasons.get(name, ""))
        for name in (
            "page_size",
            "num_blocks",
            "max_blocks_per_request",
            "max_batch_tokens",
            "max_requests_per_batch",
            "max_memory_percent",
            "scheduler_type",
            "safety_margin",
            "seed",
        )
    }
    memory = {
        "cache": (f"{(config.num_blocks or 0) * geometry.page_size:,} tokens, {_mib(cache_bytes)}", ""),
        "a full batch": (f"at most {_mib(batch)} beside the cache", ""),
        "host memory": (
            (f"{config.swap_blocks} blocks ({_mib(host_bytes)}) for victims", "cpu_offload_space")
            if config.swap_blocks
            else ("none for victims", "they are computed again; cpu_offload_space=0")
        ),
    }
    bound = math.inf if config.output_space is None else config.output_space
    memory["outputs"] = (
        "as many as come"
        if bound == math.inf
        else f"requests are refused while {_mib(bound * 2**30)} wait to be taken",
        config.reasons.get("output_space", ""),
    )
    sharing = {
        "prefix cache": (
            (f"shared by {config.match_unit} tokens, {config.cache_eviction}", config.reasons.get("match_unit", ""))
            if config.match_unit
            else ("off", "allow_block_sharing is False" if not config.allow_block_sharing else "match_unit is 0")
        ),
        "fairness": (config.fairness or "by arrival", ""),
        "graphs, async loop": ("none", "not served on a CPU"),
    }
    rows = {**facts_of_model, **computing, **chosen, **memory, **sharing}
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value}" + (f"  ({why})" if why else "") for name, (value, why) in rows.items()]
    return "\n".join(lines)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
