"""Continuous batching for unmodified transformers models, with the engine in Rust."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chairlift._native import EngineClosed, QueueFull, __version__
    from chairlift.api import (
        ContinuousMixin,
        continuous_batching_context_manager,
        destroy_cached_continuous_batching_manager,
        generate_batch,
        init_continuous_batching,
        install,
        uninstall,
    )
    from chairlift.config import ContinuousBatchingConfig
    from chairlift.handle import RequestHandle
    from chairlift.manager import ContinuousBatchingManager
    from chairlift.outputs import GenerationOutput, RequestStatus, WorkloadHints
    from chairlift.pause import Pause
    from chairlift.views import (
        FIFOScheduler,
        PagedAttentionCache,
        PrefillFirstScheduler,
        RequestState,
        Scheduler,
    )

__all__ = [
    "ContinuousBatchingConfig",
    "ContinuousBatchingManager",
    "ContinuousMixin",
    "EngineClosed",
    "FIFOScheduler",
    "GenerationOutput",
    "PagedAttentionCache",
    "Pause",
    "PrefillFirstScheduler",
    "QueueFull",
    "RequestHandle",
    "RequestState",
    "RequestStatus",
    "Scheduler",
    "WorkloadHints",
    "__version__",
    "continuous_batching_context_manager",
    "destroy_cached_continuous_batching_manager",
    "generate_batch",
    "init_continuous_batching",
    "install",
    "uninstall",
]

_HOMES = {
    "ContinuousBatchingConfig": "config",
    "ContinuousBatchingManager": "manager",
    "ContinuousMixin": "api",
    "EngineClosed": "_native",
    "FIFOScheduler": "views",
    "GenerationOutput": "outputs",
    "PagedAttentionCache": "views",
    "Pause": "pause",
    "PrefillFirstScheduler": "views",
    "QueueFull": "_native",
    "RequestHandle": "handle",
    "RequestState": "views",
    "RequestStatus": "outputs",
    "Scheduler": "views",
    "WorkloadHints": "outputs",
    "__version__": "_native",
    "continuous_batching_context_manager": "api",
    "destroy_cached_continuous_batching_manager": "api",
    "generate_batch": "api",
    "init_continuous_batching": "api",
    "install": "api",
    "uninstall": "api",
}


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import: who only asks for help does not wait for them.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
