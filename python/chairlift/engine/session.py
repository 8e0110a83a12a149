"""A session's machinery: the engine in Rust, the cache tensors, the tables on the device, and the runner."""

from collections.abc import Mapping

from transformers import PreTrainedModel

from chairlift import _native
from chairlift.attention.choice import Backend
from chairlift.engine.cache import CacheTensors, Geometry
from chairlift.engine.inputs import DeviceTables, Slot
from chairlift.engine.replay.forward import RecordedForward
from chairlift.engine.runner import Runner
from chairlift.probe import ModelFacts

NUM_SLOTS = 2


class Session:
    """All that serves one model with one resolved set of sizes."""

    def __init__(
        self,
        model: PreTrainedModel,
        facts: ModelFacts,
        geometry: Geometry,
        backend: Backend,
        *,
        num_blocks: int,
        max_batch_tokens: int,
        max_requests_per_batch: int,
        max_blocks_per_request: int,
        safety_margin: float,
        scheduler_type: str,
        max_queue_size: int = 0,
        max_output_bytes: int | None = None,
        seed: int = 0,
        return_logprobs: bool = False,
        match_unit: int = 0,
        cache_eviction: str = "lru",
        swap_blocks: int = 0,
        tenant_weights: Mapping[str, float] | None = None,
        replay_forward: bool | None = False,
    ) -> None:
        """Allocates pool and buffers. All sizes as in `ContinuousBatchingConfig`, resolved."""
        self.engine = _native.Engine(
            _native.EngineConfig(
                page_size=geometry.page_size,
                num_blocks=num_blocks,
                groups=[(reach.form, reach.tokens) for reach in geometry.reaches],
                max_requests_per_batch=max_requests_per_batch,
                max_batch_tokens=max_batch_tokens,
                vocab_size=facts.vocab_size,
                max_cache_reads=num_blocks * geometry.num_groups * geometry.page_size if backend.gathers else None,
                safety_margin=safety_margin,
                scheduler_type=scheduler_type,
                max_positions=facts.max_positions,
                first_regime=facts.first_regime,
                max_queue_size=max_queue_size,
                max_output_bytes=max_output_bytes,
                seed=seed,
                match_unit=match_unit,
                cache_eviction=cache_eviction,
                swap_blocks=swap_blocks,
                tenant_weights=None if tenant_weights is None else list(tenant_weights.items()),
            )
        )
        device = facts.calls[0].kind.device
        self.cache = CacheTensors(facts.calls, geometry, num_blocks, swap_blocks)
        self.tables = DeviceTables(
            geometry.num_groups,
            max_requests_per_batch,
            geometry.page_size,
            device,
            pages=max(1, min(max_blocks_per_request, num_blocks)),
            write_trash=num_blocks * geometry.num_groups + 1,
            first_regime=facts.first_regime,
        )
        self.slots = [Slot(self.engine.arena_capacity, max_requests_per_batch, device) for _ in range(NUM_SLOTS)]
        for index, slot in enumerate(self.slots):
            self.engine.bind_slot(index, slot.arena.numpy(), slot.tokens.numpy(), slot.logprobs.numpy())
        self.forward = RecordedForward(model, facts, replay=replay_forward)
        self.runner = Runner(
            self.forward, facts.calls, self.cache, self.tables, backend, self.slots, return_logprobs=return_logprobs
        )
