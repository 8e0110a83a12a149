"""Paged attention with torch's own operators, for CPUs (and, untested there, for whatever else runs SDPA).

Prefill chunks are computed sequence by sequence, decodes in batches of like length; a context that lies in one page
is read where it lies. No mask spans the batch, and the scores of a long chunk are computed some queries at a time, so
that nothing grows with the square of a length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from chairlift.attention.plain import causal_visibility, scores_attention

if TYPE_CHECKING:
    from chairlift.engine.cache import CallPages
    from chairlift.engine.inputs import StepInputs

# A gathered batch of decodes: K and V of so many tokens stay near the size of a cache that the cores share.
GATHERED_TOKENS = 4096
# Rows of a gathered batch are padded to its longest: lengths may differ by a quarter.
PADDING_LIMIT = 1.25
# Scores (heads x queries x keys) of a prefill chunk that are there at once, where no kernel hides them.
SCORES = 1 << 22
# fp32 scores, their masked copy and softmax, and the mask.
_SCORE_BYTES = 13


@dataclass(frozen=True)
class GatheredBatch:
    """Decodes whose contexts span pages and are alike in length."""

    rows: torch.Tensor  # [batch] rows of the step
    blocks: torch.Tensor  # [batch, pages]
    lengths: list[int]
    longest: int
    visible: torch.Tensor | None  # [batch, 1, 1, longest]; None when all are equally long


@dataclass(frozen=True)
class Prefill:
    """The tokens of one sequence in the step."""

    start: int  # its tokens in the step
    end: int
    kv_len: int
    blocks: torch.Tensor  # [pages]

    @property
    def fresh(self) -> bool:
        """Whether all its tokens are in the step, so that no page has to be read."""
        return self.kv_len == self.end - self.start


@dataclass(frozen=True)
class GroupPlan:
    """What the calls of one group have in common in a step."""

    in_place: list[tuple[int, int, int]]  # decodes within a page: row of the step, block, length
    gathered: list[GatheredBatch]
    prefills: list[Prefill]


class CpuPagedAttention:
    """The backend `torch`."""

    name = "torch"
    # K and V of a context of several pages are copied together before they are read.
    gathers = True

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._plans: list[GroupPlan] = []

    def scratch_bytes(self, bytes_per_token: int, num_heads: int, max_context: int) -> int:
        """Bytes that a call takes beside its inputs and its output, at most.

        Args:
            bytes_per_token: K and V of a token of the largest call.
            num_heads: Heads of the call with the most.
            max_context: Tokens of the longest sequence.
        """
        gathered = bytes_per_token * max(GATHERED_TOKENS, max_context)
        # One query is computed at least.
        return gathered + _SCORE_BYTES * max(SCORES, num_heads * max(GATHERED_TOKENS, max_context))

    def begin(self, inputs: "StepInputs") -> None:
        """Prepares a step: once for all calls of a group."""
        self._plans = [self._plan(inputs, table) for table in inputs.block_tables]

    def attend(
        self,
        pages: "CallPages",
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """One call over the step's tokens; K and V are in the pages already.

        Args:
            pages: The call's pages.
            query: [heads, tokens, head size]
            key: [kv heads, tokens, head size]: K of the step's tokens.
            value: [kv heads, tokens, head size of V]
            scale: Factor of the scores.
            softcap: See `scores_attention`.
            sinks: See `scores_attention`.

        Returns:
            [tokens, heads, head size of V]
        """
        plan = self._plans[pages.group]
        heads, tokens, _ = query.shape
        out = query.new_empty((tokens, heads, value.shape[-1]))
        form = _Form(scale, softcap, sinks)
        for row, block, length in plan.in_place:
            k, v = pages.k[block, :length].transpose(0, 1), pages.v[block, :length].transpose(0, 1)
            out[row] = form.decode(query[:, row].unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None)
        for batch in plan.gathered:
            k = _gather(pages.k, batch.blocks, batch.longest, batch.lengths)
            v = _gather(pages.v, batch.blocks, batch.longest, batch.lengths)
            out[batch.rows] = form.decode(query[:, batch.rows].transpose(0, 1), k, v, batch.visible)
        for prefill in plan.prefills:
            of_step = slice(prefill.start, prefill.end)
            if prefill.fresh:
                k, v = key[:, of_step].unsqueeze(0), value[:, of_step].unsqueeze(0)
            else:
                blocks = prefill.blocks.unsqueeze(0)
                k, v = _gather(pages.k, blocks, prefill.kv_len), _gather(pages.v, blocks, prefill.kv_len)
            form.prefill(query[:, of_step].unsqueeze(0), k, v, out[of_step])
        return out

    def _plan(self, inputs: "StepInputs", table: torch.Tensor) -> GroupPlan:
        kv_lens, bounds = inputs.kv_lens, inputs.cu_seqlens
        in_place: list[tuple[int, int, int]] = []
        spanning: list[int] = []
        first_blocks: list[int] = table[: inputs.decodes, 0].tolist()
        for row in range(inputs.decodes):
            if kv_lens[row] <= self.page_size:
                in_place.append((row, first_blocks[row], kv_lens[row]))
            else:
                spanning.append(row)
        batches = [self._gathered(rows, kv_lens, table) for rows in _like_lengths(spanning, kv_lens)]
        prefills = []
        for row in range(inputs.decodes, len(kv_lens)):
            start, end, kv_len = bounds[row], bounds[row + 1], kv_lens[row]
            blocks = table[row, : -(-kv_len // self.page_size)]
            prefills.append(Prefill(start, end, kv_len, blocks))
        return GroupPlan(in_place, batches, prefills)

    def _gathered(self, rows: list[int], kv_lens: Sequence[int], table: torch.Tensor) -> GatheredBatch:
        lengths = [kv_lens[row] for row in rows]
        longest = max(lengths)
        index = torch.tensor(rows, device=table.device)
        blocks = table[index, : -(-longest // self.page_size)]
        visible = None
        if min(lengths) < longest:
            ends = torch.tensor(lengths, device=table.device).unsqueeze(1)
            visible = (torch.arange(longest, device=table.device) < ends)[:, None, None, :]
        return GatheredBatch(index, blocks, lengths, longest, visible)


def _like_lengths(rows: list[int], kv_lens: Sequence[int]) -> list[list[int]]:
    """Cuts rows into batches of like length and bounded size."""
    batches: list[list[int]] = []
    for row in sorted(rows, key=lambda row: kv_lens[row]):
        length = kv_lens[row]
        if batches:
            batch = batches[-1]
            fits = (len(batch) + 1) * length <= GATHERED_TOKENS
            if fits and length <= PADDING_LIMIT * kv_lens[batch[0]]:
                batch.append(row)
                continue
        batches.append([row])
    return batches


def _gather(
    pages: torch.Tensor, blocks: torch.Tensor, longest: int, lengths: Sequence[int] | None = None
) -> torch.Tensor:
    """[batch, heads, longest, size] from [blocks, page, heads, size] by [batch, pages] block numbers."""
    gathered = pages[blocks].flatten(1, 2)
    for row, length in enumerate(lengths or ()):
        # What a former owner left behind a shorter row is masked, but a NaN would come through a mask.
        gathered[row, length:longest] = 0
    return gathered[:, :longest].transpose(1, 2)


@dataclass(frozen=True)
class _Form:
    """How this call computes its scores."""

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def decode(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None
    ) -> torch.Tensor:
        """One query a sequence: [batch, heads, size] to [batch, heads, size of V]."""
        batch, heads, size = query.shape
        if not self.plain:
            return self._written_out(query.unsqueeze(2), key, value, visible).squeeze(2)
        # The heads of a group stand as queries of their kv head, so that K and V are read once for all of them.
        kv_heads = key.shape[1]
        grouped = query.reshape(batch, kv_heads, heads // kv_heads, size)
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=visible, scale=self.scale)
        return out.reshape(batch, heads, -1)

    def prefill(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor) -> None:
        """The last tokens of one sequence: [1, heads, tokens, size] into out, [tokens, heads, size of V]."""
        heads, tokens, keys = query.shape[1], query.shape[2], key.shape[2]
        gqa = heads != key.shape[1]
        if self.plain and tokens == keys:
            whole = scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=gqa)
            out.copy_(whole[0].transpose(0, 1))
            return
        at_once = max(1, SCORES // (heads * keys))
        for start in range(0, tokens, at_once):
            end = min(start + at_once, tokens)
            seen = keys - tokens + end
            visible = causal_visibility(end - start, seen, query.device)
            part, k, v = query[:, :, start:end], key[:, :, :seen], value[:, :, :seen]
            if self.plain:
                of_part = scaled_dot_product_attention(part, k, v, attn_mask=visible, scale=self.scale, enable_gqa=gqa)
            else:
                of_part = self._written_out(part, k, v, visible)
            out[start:end] = of_part[0].transpose(0, 1)

    def _written_out(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None
    ) -> torch.Tensor:
        return scores_attention(
            query, key, value, scale=self.scale, visible=visible, softcap=self.softcap, sinks=self.sinks
        )
