"""`ContinuousBatchingConfig`: every field of transformers' own, checked, and what is not served yet refused by name."""

import dataclasses
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import CompileConfig, GenerationConfig, PreTrainedModel

# Counts beyond it are beyond what block tables hold.
MOST_COUNT = 2**31 - 1
MIN_PAGE_SIZE = 4
DEFAULT_MAX_BATCH_TOKENS = 8192
MIN_AUTO_BATCH_TOKENS = 256
DEFAULT_MAX_REQUESTS = 1024
DEFAULT_BLOCKS_PER_REQUEST = 32
SAFETY_MARGINS: Mapping[str, float] = {"fifo": 0.15, "prefill_first": 0.0}
MEMORY_PERCENT_CPU = 0.6
MIN_TENANT_WEIGHT, MAX_TENANT_WEIGHT = 0.001, 1000
EVICTION_ORDERS = ("lru", "lifo")


@dataclass
class ContinuousBatchingConfig:
    """How requests are batched: memory, scheduling, and what the device does. None means: chosen at creation, and to
    be read back in `manager.config`.

    Attributes:
        page_size: Tokens of a page, at least 4.
        num_blocks: Whole-model blocks of `page_size` tokens. None: what fits into `max_memory_percent` of the free
            memory, and no more than the workload hints can use.
        max_batch_tokens: Tokens of a step. None: 8192, lowered to what memory bears, not below 256.
        max_memory_percent: Part of the free memory that pool and batches may take, above 0 and at most 1. None: 0.6 on
            a CPU.
        max_requests_per_batch: Requests of a step. None: as many as the hints tell, else 1024; never more than
            `max_batch_tokens`.
        max_blocks_per_request: Pages that a request's block table has room for at first; it grows where a longer
            request needs it. None: from the hinted lengths, one more than these take and an even number, else 32.
        allow_block_sharing: Prompts that begin alike share K and V of what they have in common (the prefix cache).
        match_unit: Tokens of an entry of the prefix cache, a divisor of `page_size`: prompts share what they have in
            common once that is an entry. None: the largest divisor that is at most 32. 0: no prefix cache.
        fairness: Who is next among those that wait: None, whoever came first; `tenant`, the tenant that was served
            least by its weight (prompt tokens count once, generated ones twice).
        tenant_weights: Weights of tenants, 0.001 to 1000, with `fairness="tenant"`; the others weigh 1.
        cache_eviction: Which cached blocks go first when others need them: `lru`, those that were used the longest ago,
            or `lifo`, those that were cached last. One at a time, the tail of a sequence before its head.
        packed_linears: Linear layers on the CPU compute with copies of their weights that were packed once, where torch
            would pack in every call. None: those that this makes faster, as measured when the manager is made, if the
            copies take at most a quarter of the free memory. True: all that can be packed; refused where none can.
            False: none.
        replay_forward: Record the model's forward while it serves, and run what was recorded in place of the model's
            Python. None: where that can be. True: and a warning says why, where it cannot. False: never.
        use_async_batching: None or False here.
        use_cuda_graph: None or False here.
        q_padding_interval_size: 0 here.
        kv_padding_interval_size: 0 here.
        varlen_compile_config: None here.
        decode_compile_config: None here.
        default_compile_level: 0 here.
        scheduler_type: `fifo`: decodes, then split prefills, then arrivals. `prefill_first`: split prefills, then
            decodes, then arrivals; a decode is in at least every eighth step.
        safety_margin: Part of the pool, 0 to 1: with fewer blocks available, prefills wait. None: 0.15 with `fifo`, 0
            with `prefill_first`.
        return_logprobs: Keep the logarithm of each generated token's probability.
        seed: Seed of all draws. None: a random one, to be read back.
        auto_switch_to_flash: Take the best attention there is in place of a model's `sdpa` or `eager`: on a CPU
            `native`, which reads K and V in their pages. False: exactly what the model was loaded with.
        cpu_offload_space: GiB of host memory for K and V of requests that had to give up their blocks; what does not
            fit is computed again. 0: none. None: what the safety threshold allows.
        cpu_offload_space_safety_threshold: Part of the RAM that is free beside pool and batches that offloading may
            take, 0 to 1; a larger `cpu_offload_space` is lowered to it, with a warning. 0: no such bound.
        max_queue_size: Bound on sequences that wait to be admitted for the first time; 0: none. One more raises
            `QueueFull` at once.
        output_space: GiB of host memory for outputs nobody took yet. None is ever dropped: while they hold more, those
            of requests in flight still come, but one more request raises `QueueFull`. None: a quarter of what is free
            beside pool and batches, 64 MiB at the least. `float("inf")`: no bound.
        per_request_processors: Says that requests may ask for a temperature, a top-k and a top-p of their own. They may
            anyway; with False a warning says so, once.
        drop_unsupported_processors: Drop logits processors that are not served, with a warning, instead of refusing
            them.
        disable_nccl_graph_mixing: Accepted; there is no tensor parallelism here.
        cpu_group_timeout: Accepted; there is no tensor parallelism here.
        use_default_compile_configs: Deprecated: use `default_compile_level`.
        max_cached_graphs: Deprecated, without effect.
        block_size: Deprecated: use `page_size`.
    """

    page_size: int = 256
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    max_memory_percent: float | None = None
    max_requests_per_batch: int | None = None
    max_blocks_per_request: int | None = None
    allow_block_sharing: bool = True
    use_async_batching: bool | None = None
    use_cuda_graph: bool | tuple[bool, bool] | None = None
    q_padding_interval_size: int = 0
    kv_padding_interval_size: int = 0
    varlen_compile_config: CompileConfig | dict[str, Any] | None = None
    decode_compile_config: CompileConfig | dict[str, Any] | None = None
    default_compile_level: int = 0
    scheduler_type: str = "fifo"
    safety_margin: float | None = None
    return_logprobs: bool = False
    seed: int | None = None
    auto_switch_to_flash: bool = True
    cpu_offload_space: float | None = 0.0
    cpu_offload_space_safety_threshold: float = 0.8
    max_queue_size: int = 0
    per_request_processors: bool = False
    drop_unsupported_processors: bool = False
    disable_nccl_graph_mixing: bool = True
    cpu_group_timeout: float | None = 300.0
    use_default_compile_configs: bool | None = None
    max_cached_graphs: int | None = None
    block_size: int | None = None
    match_unit: int | None = None
    cache_eviction: str = "lru"
    fairness: str | None = None
    tenant_weights: Mapping[str, float] | None = None
    packed_linears: bool | None = None
    replay_forward: bool | None = None
    output_space: float | None = None

    def __post_init__(self) -> None:
        """Settles the deprecated fields and checks the others."""
        if self.use_default_compile_configs is not None:
            _deprecated("use_default_compile_configs", "use default_compile_level")
            self.default_compile_level = 3 if self.use_default_compile_configs else 0
            self.use_default_compile_configs = None
        if self.max_cached_graphs is not None:
            _deprecated("max_cached_graphs", "the number of graphs needs no bound")
            self.max_cached_graphs = None
        if self.block_size is not None:
            _deprecated("block_size", "use page_size")
            self.page_size, self.block_size = self.block_size, None
        self.validate()

    @classmethod
    def of(cls, config: Any) -> "ContinuousBatchingConfig":
        """A copy of a config: ours, transformers' own, or None for the defaults.

        Raises:
            TypeError: It is something else.
            ValueError: A value is out of bounds or not served yet.
        """
        if config is None:
            return cls()
        names = {field.name for field in dataclasses.fields(cls)}
        alike = dataclasses.is_dataclass(config) and type(config).__name__ == cls.__name__
        if not alike and not isinstance(config, cls):
            raise TypeError(
                f"continuous_batching_config is a {type(config).__name__}, but must be a ContinuousBatchingConfig"
            )
        values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        if not isinstance(config, cls):
            # Their default drops processors; nobody asked for that, so ours holds.
            values.pop("drop_unsupported_processors", None)
            # A deprecated field was settled (and said) when their object was made.
            for name in ("block_size", "use_default_compile_configs", "max_cached_graphs"):
                values.pop(name, None)
        else:
            values = {name: value for name, value in values.items() if name in names}
        unknown = {name: value for name, value in values.items() if name not in names}
        if unknown:
            raise ValueError(f"fields of a newer transformers that are not served yet: {', '.join(sorted(unknown))}")
        return cls(**values)

    @classmethod
    def chosen(
        cls, config: Any, generation_config: GenerationConfig | None, model: PreTrainedModel
    ) -> "ContinuousBatchingConfig":
        """The explicit config, else (deprecated) the one on a generation config, else the defaults.

        Raises:
            TypeError, ValueError: As `of`.
        """
        if config is None:
            carrier = generation_config if generation_config is not None else model.generation_config
            config = getattr(carrier, "continuous_batching_config", None)
            if config is not None:
                _deprecated("continuous_batching_config on a GenerationConfig", "pass it beside the generation config")
        return cls.of(config)

    def validate(self) -> None:
        """Checks every bound, and refuses what is not served yet.

        Raises:
            TypeError: A value of the wrong type.
            ValueError: A value out of its bounds, or a field that is not served yet, set away from its default.
        """
        self._check_int("page_size", MIN_PAGE_SIZE)
        for name in ("num_blocks", "max_batch_tokens", "max_requests_per_batch"):
            self._check_int(name, 1, optional=True)
        self._check_int("max_blocks_per_request", 0, optional=True)
        for name in ("q_padding_interval_size", "kv_padding_interval_size", "max_queue_size"):
            self._check_int(name, 0)
        self._check_int("match_unit", 0, optional=True)
        if self.match_unit and self.page_size % self.match_unit:
            raise ValueError(f"match_unit is {self.match_unit}, but must divide page_size, which is {self.page_size}")
        if not self.allow_block_sharing and (self.match_unit or self.cache_eviction != EVICTION_ORDERS[0]):
            raise ValueError(
                f"match_unit={self.match_unit} and cache_eviction={self.cache_eviction!r} are of the prefix cache, but "
                "allow_block_sharing is False: leave them out, or allow it"
            )
        if self.cache_eviction not in EVICTION_ORDERS:
            known = " or ".join(map(repr, EVICTION_ORDERS))
            raise ValueError(f"cache_eviction is {self.cache_eviction!r}, but must be {known}")
        if not isinstance(self.packed_linears, bool | None):
            raise TypeError(f"packed_linears is {self.packed_linears!r}, but must be True, False or None")
        self._check_int("default_compile_level", 0, most=3)
        self._check_int("seed", 0, optional=True, most=2**64 - 1)
        self._check_part("max_memory_percent", optional=True, above_zero=True)
        self._check_part("safety_margin", optional=True)
        self._check_part("cpu_offload_space_safety_threshold")
        self._check_space("cpu_offload_space")
        self._check_space("output_space", bounded=False)
        given: Any = self.scheduler_type
        if isinstance(given, type):
            raise TypeError(
                f"scheduler_type is the class {given.__name__}: the scheduler is part of the engine and "
                f"cannot be replaced; choose one of its policies, {' or '.join(map(repr, SAFETY_MARGINS))}"
            )
        if self.scheduler_type not in SAFETY_MARGINS:
            known = " or ".join(map(repr, SAFETY_MARGINS))
            raise ValueError(f"scheduler_type is {self.scheduler_type!r}, but must be {known}")
        if self.replay_forward is not None and not isinstance(self.replay_forward, bool):
            raise TypeError(f"replay_forward is {self.replay_forward!r}, but must be True, False or None")
        self._check_fairness()
        self._refuse_unserved()

    def _check_fairness(self) -> None:
        if self.fairness not in (None, "tenant"):
            raise ValueError(f"fairness is {self.fairness!r}, but must be None or 'tenant'")
        if self.tenant_weights is None:
            return
        if not isinstance(self.tenant_weights, Mapping):
            raise TypeError(f"tenant_weights is {self.tenant_weights!r}, but must map names to numbers")
        if self.fairness is None:
            raise ValueError("tenant_weights are set, but fairness is None: set fairness='tenant'")
        for tenant, weight in self.tenant_weights.items():
            if not isinstance(tenant, str) or isinstance(weight, bool) or not isinstance(weight, int | float):
                raise TypeError(f"tenant_weights has {tenant!r}: {weight!r}, but maps names to numbers")
            if not MIN_TENANT_WEIGHT <= weight <= MAX_TENANT_WEIGHT:
                raise ValueError(
                    f"tenant_weights has {weight} for {tenant!r}, but weights go from {MIN_TENANT_WEIGHT} to "
                    f"{MAX_TENANT_WEIGHT}"
                )

    def _refuse_unserved(self) -> None:
        graphs = self.use_cuda_graph if isinstance(self.use_cuda_graph, tuple | list) else (self.use_cuda_graph,)
        unserved = {
            "use_async_batching": (bool(self.use_async_batching), "must be None or False"),
            "use_cuda_graph": (any(graphs), "must be None or False"),
            "q_padding_interval_size": (self.q_padding_interval_size != 0, "must be 0"),
            "kv_padding_interval_size": (self.kv_padding_interval_size != 0, "must be 0"),
            "varlen_compile_config": (self.varlen_compile_config is not None, "must be None"),
            "decode_compile_config": (self.decode_compile_config is not None, "must be None"),
            "default_compile_level": (self.default_compile_level != 0, "must be 0"),
        }
        for name, (asked, bound) in unserved.items():
            if asked:
                raise ValueError(f"{name}={getattr(self, name)!r} is not served yet: it {bound}")

    def _check_int(self, name: str, least: int, *, optional: bool = False, most: int = MOST_COUNT) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}, but must be an integer")
        if value < least:
            raise ValueError(f"{name} is {value}, but must be at least {least}")
        if value > most:
            raise ValueError(f"{name} is {value}, but must be at most {most}")

    def _check_space(self, name: str, *, bounded: bool = True) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} is {value!r}, but must be a number of GiB, or None")
        if not value >= 0 or (bounded and value == math.inf):
            raise ValueError(f"{name} is {value}, but must be at least 0 (GiB){', and finite' if bounded else ''}")

    def _check_part(self, name: str, *, optional: bool = False, above_zero: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} is {value!r}, but must be a number")
        if not (0 < value <= 1 if above_zero else 0 <= value <= 1):
            raise ValueError(
                f"{name} is {value}, but must be {'above 0' if above_zero else 'at least 0'} and at most 1"
            )


@dataclass
class ResolvedConfig(ContinuousBatchingConfig):
    """A config with nothing left open, and what was chosen beside it.

    Attributes:
        attention: The attention backend.
        decode_fast_path: Whether steps of decodes alone take a path of their own.
        cuda_graphs: Whether steps are graphs: (varlen, decode).
        swap_blocks: Blocks of host memory for victims.
        reasons: Why fields have the values that were chosen for them.
    """

    attention: str = ""
    decode_fast_path: bool = False
    cuda_graphs: tuple[bool, bool] = (False, False)
    swap_blocks: int = 0
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_config(cls, config: ContinuousBatchingConfig, **values: Any) -> "ResolvedConfig":
        """A config with what was chosen for it."""
        given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        return cls(**{**given, **values})


def random_seed() -> int:
    """A seed from the operating system; no generator of the caller's is touched."""
    return int.from_bytes(os.urandom(8), "little")


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(f"{name} is deprecated: {instead}", FutureWarning, stacklevel=4)
