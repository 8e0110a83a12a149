"""What the engine has and does, to be looked at: the scheduler, the cache and the requests of a manager.

Nothing here is a copy, and nothing can be changed: each look asks the engine.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from chairlift import _native
from chairlift.outputs import RequestStatus

if TYPE_CHECKING:
    from chairlift.manager import ContinuousBatchingManager

_PHASES = {
    "pending": RequestStatus.PENDING,
    "prefilling": RequestStatus.PREFILLING,
    "decoding": RequestStatus.DECODING,
}


class RequestState:
    """A request (one of its sequences) as it stands. Once it has ended its attributes raise `LookupError`: its output
    tells the rest."""

    def __init__(self, manager: "ContinuousBatchingManager", request_id: str, sequence: int) -> None:
        """Made by a manager."""
        self._manager = manager
        self._request_id = request_id
        self._sequence = sequence

    @property
    def _live(self) -> _native.Live:
        live = self._manager._engine.live_one(self._sequence)
        if live is None:
            raise LookupError(f"request {self._request_id!r} has ended, or was not read yet: its output tells the rest")
        return live

    @property
    def _tokens(self) -> list[int]:
        return self._manager._engine.tokens_of(self._sequence) or []

    @property
    def request_id(self) -> str:
        """Its label."""
        return self._request_id

    @property
    def status(self) -> RequestStatus:
        """`PENDING` (without blocks; its tokens may be on the host), `PREFILLING` or `DECODING`."""
        return _PHASES[self._live.phase]

    @property
    def initial_tokens(self) -> list[int]:
        """The prompt."""
        return self._tokens[: self._live.prompt]

    @property
    def generated_tokens(self) -> list[int]:
        """What it generated so far."""
        return self._tokens[self._live.prompt :]

    @property
    def position_offset(self) -> int:
        """Leading tokens whose K and V are there."""
        return self._live.computed

    @property
    def allocated_blocks(self) -> int:
        """Blocks that it holds, of all groups."""
        return self._live.blocks

    @property
    def is_cpu_offloaded(self) -> bool:
        """Whether its K and V wait in host memory."""
        return self._live.on_host

    @property
    def priority(self) -> int:
        """Its priority."""
        return self._live.priority

    @property
    def lifespan(self) -> tuple[float, float]:
        """When it was first scheduled, -1 before, and -1: it has not ended."""
        started = self._live.started
        return (-1 if started is None else started, -1)

    def current_len(self) -> int:
        """Tokens of prompt and output."""
        live = self._live
        return live.prompt + live.generated

    def generated_len(self) -> int:
        """Tokens of the output so far."""
        return self._live.generated

    def __repr__(self) -> str:
        live = self._manager._engine.live_one(self._sequence)
        if live is None:
            return f"RequestState({self._request_id!r}, ended)"
        return (
            f"RequestState({self._request_id!r}, {_PHASES[live.phase].name}, {live.prompt} prompt and {live.generated} "
            f"generated tokens, {live.computed} computed, {live.blocks} blocks)"
        )


class _OfManager:
    """What is made by a manager alone."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if cls.__module__ != __name__:
            raise TypeError(
                f"{cls.__name__}: the scheduler is part of the engine and cannot be replaced; choose a policy with "
                "scheduler_type='fifo' or scheduler_type='prefill_first' in the config"
            )
        super().__init_subclass__(**kwargs)

    def __init__(self, manager: "ContinuousBatchingManager") -> None:
        kind = type(self).__name__
        if not hasattr(manager, "_engine"):
            raise TypeError(f"a {kind} belongs to a manager: see its attributes scheduler and cache")
        self._manager = manager


class Scheduler(_OfManager):
    """Who runs and who waits; `manager.scheduler`. Its class tells the policy."""

    @property
    def max_requests_per_batch(self) -> int:
        """Sequences that run at once, at most."""
        return self._manager.config.max_requests_per_batch or 0

    @property
    def safety_margin(self) -> float:
        """Part of the pool with fewer blocks than which prefills wait."""
        return self._manager.config.safety_margin or 0.0

    @property
    def active_requests(self) -> Mapping[str, RequestState]:
        """Requests that run, in the order of their admission, by label."""
        return self._requests(waiting=False)

    @property
    def waiting_requests(self) -> Mapping[str, RequestState]:
        """Requests that wait: those that gave up their blocks first, then those that were never admitted, by label."""
        return self._requests(waiting=True)

    def has_pending_requests(self) -> bool:
        """Whether anything runs or waits."""
        return not self._manager._engine.is_idle

    def request_state(self, request_id: str) -> RequestState:
        """A request as it stands.

        Raises:
            KeyError: No request of that label is in flight or has an output to be taken.
        """
        manager = self._manager
        with manager._lock:
            return RequestState(manager, request_id, manager._books.id_of(request_id))

    def _requests(self, *, waiting: bool) -> Mapping[str, RequestState]:
        manager = self._manager
        with manager._lock:
            states = {
                label: RequestState(manager, label, live.request)
                for live in manager._engine.live()
                if (live.phase == "pending") == waiting and (label := manager._books.label_of(live.request)) is not None
            }
        return MappingProxyType(states)

    def __repr__(self) -> str:
        stats = self._manager.stats()
        return f"{type(self).__name__}({stats.running} run, {stats.waiting} wait)"


class FIFOScheduler(Scheduler):
    """Decodes, then split prefills, then arrivals."""


class PrefillFirstScheduler(Scheduler):
    """Split prefills, then decodes, then arrivals; a decode is in at least every eighth step."""


class PagedAttentionCache(_OfManager):
    """The pool of blocks; `manager.cache`."""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._manager.config.page_size

    @property
    def block_size(self) -> int:
        """The same, by its older name."""
        return self._manager.config.page_size

    @property
    def num_blocks(self) -> int:
        """Whole-model blocks of `page_size` tokens."""
        return self._manager.config.num_blocks or 0

    @property
    def num_groups(self) -> int:
        """Groups of attention calls, each of which takes a block of its own for the same tokens."""
        return self._manager.geometry.num_groups

    @property
    def capacity(self) -> int:
        """Blocks of all groups."""
        return self._manager.stats().capacity

    @property
    def free_blocks(self) -> int:
        """Blocks of which nothing is known."""
        return self._manager.stats().free_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks nobody owns that are kept for prompts that begin alike; they are given to whoever needs one."""
        return self._manager.stats().cached_blocks

    @property
    def owned_blocks(self) -> int:
        """Blocks of requests."""
        return self._manager.stats().owned_blocks

    def get_num_free_blocks(self) -> int:
        """Blocks that can be given to requests: free ones, and cached ones."""
        stats = self._manager.stats()
        return stats.free_blocks + stats.cached_blocks

    def compute_free_capacity(self, relative: bool = True) -> int | float:
        """Blocks that can be given to requests, or their share of all."""
        stats = self._manager.stats()
        free = stats.free_blocks + stats.cached_blocks
        return free / stats.capacity if relative else free

    @property
    def max_batch_tokens(self) -> int:
        """Tokens of a step, at most."""
        return self._manager.config.max_batch_tokens or 0

    @property
    def use_prefix_sharing(self) -> bool:
        """Whether prompts that begin alike share K and V."""
        return bool(self._manager.config.match_unit)

    @property
    def dtype(self) -> torch.dtype:
        """Of K and V of the first attention call."""
        return self._manager.facts.calls[0].kind.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._manager.facts.calls[0].kind.device

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, trash included."""
        return self._manager.cache_bytes

    def __repr__(self) -> str:
        stats = self._manager.stats()
        return (
            f"PagedAttentionCache({stats.capacity} blocks of {self.page_size} tokens: {stats.free_blocks} free, "
            f"{stats.cached_blocks} cached, {stats.owned_blocks} owned)"
        )


SCHEDULERS: dict[str, type[Scheduler]] = {"fifo": FIFOScheduler, "prefill_first": PrefillFirstScheduler}
