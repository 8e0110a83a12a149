"""How pool and batches are sized: from the free memory, the model and the hints."""

from typing import NamedTuple

from transformers.utils import logging

from chairlift import _native
from chairlift.attention.choice import Backend
from chairlift.config import (
    DEFAULT_BLOCKS_PER_REQUEST,
    DEFAULT_MAX_BATCH_TOKENS,
    DEFAULT_MAX_REQUESTS,
    MEMORY_PERCENT_CPU,
    MIN_AUTO_BATCH_TOKENS,
    MOST_COUNT,
    SAFETY_MARGINS,
    ContinuousBatchingConfig,
    ResolvedConfig,
    random_seed,
)
from chairlift.engine.cache import Geometry
from chairlift.engine.free_memory import free_memory_bytes
from chairlift.engine.linears import LinearPlan
from chairlift.outputs import WorkloadHints
from chairlift.probe import ModelFacts
from chairlift.sampling.draw import scratch_bytes

logger = logging.get_logger(__name__)

_UNLIMITED = 1 << 60
# Of outputs that nobody took, where a config leaves it open: as much at the least.
MIN_OUTPUT_BYTES = 64 * 2**20


class BatchCost(NamedTuple):
    """Bytes that batches take beside the pool, at their peak."""

    per_token: int  # of max_batch_tokens
    per_row: int  # of max_requests_per_batch
    fixed: int

    def of(self, max_batch_tokens: int, max_requests: int) -> int:
        """Bytes of a full batch."""
        return self.per_token * max_batch_tokens + self.per_row * max_requests + self.fixed


def batch_cost(facts: ModelFacts, backend: Backend, hints: WorkloadHints) -> BatchCost:
    """What batches of a model take: the activations measured by the probe, the logits of every row, and the scratch
    of attention and sampling."""
    largest = max(call.kind.token_bytes for call in facts.calls)
    heads = max(call.num_heads for call in facts.calls)
    scratch = backend.scratch_bytes(largest, heads, _longest_sequence(hints, facts))
    # K and V of the step on their way into the pages.
    return BatchCost(facts.token_bytes + 2 * largest, facts.logits_bytes, scratch + scratch_bytes(facts.vocab_size))


def _longest_sequence(hints: WorkloadHints, facts: ModelFacts) -> int:
    """Tokens of the longest sequence that is to be expected."""
    known = [bound for bound in (facts.max_positions, facts.limit) if bound is not None]
    if hints.max_prompt_length and hints.max_generated_length:
        known.append(hints.max_prompt_length + hints.max_generated_length)
    return min(known, default=DEFAULT_MAX_BATCH_TOKENS)


def resolve(
    config: ContinuousBatchingConfig,
    hints: WorkloadHints,
    facts: ModelFacts,
    geometry: Geometry,
    cost: BatchCost,
    *,
    attention: str,
    linears: LinearPlan | None = None,
    free_bytes: int | None = None,
) -> ResolvedConfig:
    """Fills what a config leaves open.

    The pool gets what `max_memory_percent` of the free memory leaves after a full batch, and no more than the hints
    can use. `max_batch_tokens`, when open, is lowered (not below 256) until a batch leaves half of it to the pool.

    Args:
        config: The user's.
        hints: What is known of the workload.
        facts: What is known of the model.
        geometry: Its blocks.
        cost: What batches take.
        attention: The backend that was chosen.
        linears: Which weights get packed copies, for which room is left.
        free_bytes: None: what is free now.

    Raises:
        ValueError: Not even one block fits, with the numbers and the way out.
    """
    why: dict[str, str] = {}
    percent = MEMORY_PERCENT_CPU if config.max_memory_percent is None else config.max_memory_percent
    why["max_memory_percent"] = _asked(config.max_memory_percent, "the default on a CPU")
    copies = 0 if linears is None else linears.num_bytes
    free = (free_memory_bytes() if free_bytes is None else free_bytes) - copies
    budget = int(percent * free)
    wanted_requests = config.max_requests_per_batch or hints.num_requests or DEFAULT_MAX_REQUESTS
    max_batch_tokens = config.max_batch_tokens
    if max_batch_tokens is None:
        max_batch_tokens = DEFAULT_MAX_BATCH_TOKENS
        while max_batch_tokens > MIN_AUTO_BATCH_TOKENS:
            if cost.of(max_batch_tokens, min(wanted_requests, max_batch_tokens)) <= budget // 2:
                break
            max_batch_tokens //= 2
    why["max_batch_tokens"] = _asked(
        config.max_batch_tokens,
        "the default"
        if max_batch_tokens == DEFAULT_MAX_BATCH_TOKENS
        else f"{DEFAULT_MAX_BATCH_TOKENS}, halved until a batch takes at most half of {_mib(budget)}, and not below "
        f"{MIN_AUTO_BATCH_TOKENS}",
    )
    max_requests = min(wanted_requests, max_batch_tokens)
    why["max_requests_per_batch"] = (
        "as many as a step has tokens"
        if max_requests < wanted_requests
        else _asked(config.max_requests_per_batch, "as many as hinted" if hints.num_requests else "the default")
    )
    num_blocks = config.num_blocks
    why["num_blocks"] = "asked for"
    if num_blocks is None:
        batch = cost.of(max_batch_tokens, max_requests)
        # The trash takes its part of the pool's memory.
        fitting = (budget - batch) // geometry.model_block_bytes - 2
        if fitting < 1:
            raise ValueError(
                f"no room for a cache: {percent:g} of the free {_mib(free)} is {_mib(budget)}, of which a batch of "
                f"{max_batch_tokens} tokens takes {_mib(batch)} and a block of {geometry.page_size} tokens "
                f"{_mib(geometry.model_block_bytes)}. Lower max_batch_tokens, max_requests_per_batch or page_size, or "
                "raise max_memory_percent"
                + (f", or set packed_linears=False: packed weights would take {_mib(copies)} more" if copies else "")
            )
        bounds = {
            "all that the hinted requests can use": _usable_blocks(hints, facts, geometry.page_size),
            "all that can be addressed": _addressable(geometry),
            f"what {percent:g} of the free {_mib(free)} leave beside a full batch": fitting,
        }
        why["num_blocks"], num_blocks = min(bounds.items(), key=lambda bound: bound[1])
    batch_bytes = cost.of(max_batch_tokens, max_requests)
    pool_bytes = (num_blocks + 2) * geometry.model_block_bytes
    swap_blocks = _swap_blocks(config, geometry, max(0, free - batch_bytes - pool_bytes))
    output_space = config.output_space
    if output_space is None:
        left = free - batch_bytes - pool_bytes - swap_blocks * geometry.block_bytes
        output_space = max(left // 4, MIN_OUTPUT_BYTES) / 2**30
    why["output_space"] = _asked(
        config.output_space, "a quarter of what is free beside pool and batches, 64 MiB at the least"
    )
    margin = SAFETY_MARGINS[config.scheduler_type] if config.safety_margin is None else config.safety_margin
    why["safety_margin"] = _asked(config.safety_margin, f"the default of {config.scheduler_type}")
    why["seed"] = _asked(config.seed, "drawn by the system")
    why["match_unit"] = _asked(config.match_unit, "the largest divisor of page_size up to 32")
    blocks = max_blocks_per_request(config, hints)
    hinted = "from the hinted lengths" if hints.max_prompt_length and hints.max_generated_length else "the default"
    why["max_blocks_per_request"] = _asked(config.max_blocks_per_request, hinted) + "; tables grow where it takes more"
    return ResolvedConfig.of_config(
        config,
        num_blocks=num_blocks,
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=max_requests,
        max_memory_percent=percent,
        max_blocks_per_request=blocks,
        use_async_batching=False,
        use_cuda_graph=(False, False),
        safety_margin=margin,
        seed=random_seed() if config.seed is None else config.seed,
        attention=attention,
        packed_linears=copies > 0,
        swap_blocks=swap_blocks,
        output_space=output_space,
        match_unit=_match_unit(config),
        reasons=why,
    )


def max_blocks_per_request(config: ContinuousBatchingConfig, hints: WorkloadHints) -> int:
    """Pages that a block table has room for at first."""
    if config.max_blocks_per_request is not None:
        return config.max_blocks_per_request
    if not (hints.max_prompt_length and hints.max_generated_length):
        return DEFAULT_BLOCKS_PER_REQUEST
    pages = -(-(hints.max_prompt_length + hints.max_generated_length) // config.page_size) + 1
    return min(pages + pages % 2, MOST_COUNT)


def _asked(value: object, otherwise: str) -> str:
    return otherwise if value is None else "asked for"


def _match_unit(config: ContinuousBatchingConfig) -> int:
    if not config.allow_block_sharing:
        return 0
    unit = config.match_unit
    return _native.default_match_unit(config.page_size) if unit is None else unit


def _swap_blocks(config: ContinuousBatchingConfig, geometry: Geometry, free: int) -> int:
    """Blocks of host memory for victims, of the bytes that are free beside pool and batches."""
    space, threshold = config.cpu_offload_space, config.cpu_offload_space_safety_threshold
    most = int(threshold * free) if threshold else None
    if space is None:
        if most is None:
            raise ValueError(
                "cpu_offload_space=None is sized by cpu_offload_space_safety_threshold, which is 0: set either"
            )
        return most // geometry.block_bytes
    wanted = int(space * 2**30)
    if most is not None and wanted > most:
        logger.warning(
            f"cpu_offload_space={space:g} GiB is more than {threshold:.0%} of the {_mib(free)} that are free beside "
            f"pool and batches: lowered to {_mib(most)}"
        )
        wanted = most
    if space and wanted < geometry.block_bytes:
        raise ValueError(
            f"cpu_offload_space={space:g} GiB leaves room for {_mib(wanted)}, less than a single block of "
            f"{_mib(geometry.block_bytes)}: raise it, or set 0"
        )
    return wanted // geometry.block_bytes


def _usable_blocks(hints: WorkloadHints, facts: ModelFacts, page_size: int) -> int:
    """Blocks that the hinted requests can use; beyond counting when nothing is known."""
    longest = hints.max_prompt_length + hints.max_generated_length
    if not (hints.num_requests and hints.max_prompt_length and hints.max_generated_length):
        return _UNLIMITED
    if facts.limit is not None:
        longest = min(longest, max(facts.limit, hints.max_prompt_length + 1))
    each = -(-longest // page_size)
    if not hints.num_tokens:
        return hints.num_requests * each
    # A request's last block is partly empty, and one of them is the longest.
    return max(each, min(hints.num_requests * each, -(-hints.num_tokens // page_size) + hints.num_requests))


def _addressable(geometry: Geometry) -> int:
    """Whole-model blocks whose write slots are int32."""
    return ((2**31 - 1) // geometry.page_size - 2) // geometry.num_groups


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
