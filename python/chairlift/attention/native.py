"""Paged attention on the CPU by the kernels in Rust: K and V are read and written where they lie."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from chairlift import _native
from chairlift.attention.plain import Reach

if TYPE_CHECKING:
    from chairlift.engine.cache import CallPages
    from chairlift.engine.inputs import StepInputs

# What the kernels read.
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

# Bounds of what a thread keeps: query rows of a tile, and keys that are computed at once.
_TILE_ROWS = 768
_TILE_KEYS = 64
# Results of rows whose contexts are read in several pieces, expected at once.
_PARTIALS = 4096


class NativeAttention:
    """The backend `native`."""

    name = "native"
    gathers = False

    def __init__(self, page_size: int, reaches: Sequence[Reach], *, isa: str | None = None) -> None:
        """A backend for pages of that size and groups that look so far back, with the instruction set `isa` (None: the
        best)."""
        self._threads = torch.get_num_threads()
        groups: list[tuple[str, int]] = [(reach.form, reach.tokens) for reach in reaches]
        self._attention = _native.PagedAttention(page_size, groups, self._threads, isa)
        self._capsules: WeakKeyDictionary[CallPages, tuple[Any, Any]] = WeakKeyDictionary()

    @property
    def described(self) -> str:
        """Instructions and threads."""
        return f"{self._attention.isa} instructions, {self._threads} threads ({self._attention.team})"

    def scratch_bytes(self, bytes_per_token: int, num_heads: int, max_context: int) -> int:
        """Bytes that a call takes beside its inputs and its output, as far as can be expected.

        Args:
            bytes_per_token: K and V of a token of the largest call.
            num_heads: Heads of the call with the most.
            max_context: Tokens of the longest sequence; does not matter here.
        """
        # A head size is not larger than the bytes of a token.
        row = 4 * bytes_per_token
        return self._threads * (_TILE_ROWS + _TILE_KEYS) * (row + 4 * _TILE_KEYS) + _PARTIALS * num_heads * row

    def begin(self, inputs: "StepInputs") -> None:
        """Prepares a step."""
        self._attention.begin(
            to_dlpack(inputs.bounds),
            to_dlpack(inputs.lengths),
            inputs.decodes,
            [to_dlpack(table) for table in inputs.block_tables],
            [to_dlpack(slots) for slots in inputs.write_slots],
        )

    def attend(
        self,
        pages: "CallPages",
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        writes: bool,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """One call over the step's tokens; arguments and result as of `SdpaAttention.attend`."""
        capsules = self._capsules.get(pages)
        if capsules is None:
            capsules = self._capsules[pages] = (to_dlpack(pages.k), to_dlpack(pages.v))
        heads, tokens, _ = query.shape
        out = query.new_empty((tokens, heads, value.shape[-1]))
        self._attention.attend(
            pages.group,
            *capsules,
            _capsule(query),
            to_dlpack(out.transpose(0, 1)),
            scale=scale,
            key=_capsule(key) if writes else None,
            value=_capsule(value) if writes else None,
            softcap=softcap,
            sinks=None if sinks is None else _capsule(sinks.detach().float()),
        )
        return out


def _capsule(tensor: torch.Tensor) -> Any:
    """A tensor whose last dimension is contiguous, for the kernel."""
    return to_dlpack(tensor if tensor.stride(-1) == 1 else tensor.contiguous())
