"""Paged attention with torch's own operators, for whatever runs SDPA.

Prefill chunks are computed sequence by sequence, decodes in batches of like length; a context that lies in one page
is read where it lies. No mask spans the batch, and the scores of a long chunk are computed some queries at a time, so
that nothing grows with the square of a length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from chairlift.attention.plain import Reach, scores_attention, visibility

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
class InPlace:
    """A decode whose visible context lies in one page."""

    row: int  # of the step
    block: int
    tokens: slice  # of the page


@dataclass(frozen=True)
class GatheredBatch:
    """Decodes whose visible contexts span pages and are alike in length."""

    rows: torch.Tensor  # [batch] rows of the step
    blocks: torch.Tensor  # [batch, pages]
    seen: list[range]  # per row, its visible tokens in the gathered pages
    visible: torch.Tensor  # [batch, 1, 1, gathered tokens]


@dataclass(frozen=True)
class Prefill:
    """The tokens of one sequence in the step."""

    of_step: slice  # its tokens
    queries: range  # their positions
    first_key: int  # position of the first gathered token
    blocks: torch.Tensor | None  # [pages] from there on; None where all that is seen is in the step


@dataclass(frozen=True)
class GroupPlan:
    """What the calls of one group have in common in a step."""

    reach: Reach
    in_place: list[InPlace]
    gathered: list[GatheredBatch]
    prefills: list[Prefill]


class SdpaAttention:
    """The backends `sdpa` and `eager`."""

    described = "torch's operators over gathered pages"
    # K and V of a context of several pages are copied together before they are read.
    gathers = True

    def __init__(self, page_size: int, reaches: Sequence[Reach], *, written_out: bool = False) -> None:
        """A backend for pages of that size and groups that look so far back; `written_out`: by the formula, without a
        fused operator."""
        self.name = "eager" if written_out else "sdpa"
        self.page_size = page_size
        self.reaches = reaches
        self._written_out = written_out
        self._plans: list[GroupPlan] = []
        self._tokens = 0  # of the step, without padding
        self._write_blocks: list[torch.Tensor] = []  # per group, [tokens]
        self._write_offsets = torch.empty(0)  # [tokens], in the page

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
        groups = zip(inputs.block_tables, self.reaches, strict=True)
        self._plans = [self._plan(inputs, table, reach) for table, reach in groups]
        self._tokens = inputs.cu_seqlens[-1]
        slots = inputs.write_slots.long()
        self._write_blocks = list(slots // self.page_size)
        self._write_offsets = slots[0] % self.page_size

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
        """One call over the step's tokens.

        Args:
            pages: The call's pages.
            writes: Whether K and V go into them; else they are there already.
            query: [heads, tokens, head size]
            key: [kv heads, tokens, head size]: K of the step's tokens.
            value: [kv heads, tokens, head size of V]
            scale: Factor of the scores.
            softcap: See `scores_attention`.
            sinks: See `scores_attention`.

        Returns:
            [tokens, heads, head size of V]
        """
        if writes:
            where = (self._write_blocks[pages.group], self._write_offsets)
            pages.k[where] = key.transpose(0, 1)
            pages.v[where] = value.transpose(0, 1)
        plan = self._plans[pages.group]
        heads, tokens, _ = query.shape
        out = query.new_empty((tokens, heads, value.shape[-1]))
        out[self._tokens :] = 0
        form = _Form(scale, softcap, sinks, plan.reach, self._written_out)
        for decode in plan.in_place:
            k = pages.k[decode.block, decode.tokens].transpose(0, 1)
            v = pages.v[decode.block, decode.tokens].transpose(0, 1)
            out[decode.row] = form.decode(query[:, decode.row].unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None)
        for batch in plan.gathered:
            k, v = _gather(pages.k, batch.blocks, batch.seen), _gather(pages.v, batch.blocks, batch.seen)
            out[batch.rows] = form.decode(query[:, batch.rows].transpose(0, 1), k, v, batch.visible)
        for prefill in plan.prefills:
            if prefill.blocks is None:
                k, v = key[:, prefill.of_step].unsqueeze(0), value[:, prefill.of_step].unsqueeze(0)
            else:
                blocks, used = prefill.blocks.unsqueeze(0), prefill.queries.stop - prefill.first_key
                k, v = _gather(pages.k, blocks)[:, :, :used], _gather(pages.v, blocks)[:, :, :used]
            queries = query[:, prefill.of_step].unsqueeze(0)
            form.prefill(queries, k, v, prefill.queries, prefill.first_key, out[prefill.of_step])
        return out

    def _plan(self, inputs: "StepInputs", table: torch.Tensor, reach: Reach) -> GroupPlan:
        page_size, bounds = self.page_size, inputs.cu_seqlens
        seen = [range(reach.first_seen(length - 1), length) for length in inputs.kv_lens[: inputs.decodes]]
        first_pages = [tokens.start // page_size for tokens in seen]
        rows = torch.arange(inputs.decodes, device=table.device)
        first_blocks: list[int] = table[rows, torch.tensor(first_pages, dtype=torch.int64)].tolist()
        in_place, spanning = [], []
        for row, (tokens, page) in enumerate(zip(seen, first_pages, strict=True)):
            if tokens.stop <= (page + 1) * page_size:
                of_page = slice(tokens.start - page * page_size, tokens.stop - page * page_size)
                in_place.append(InPlace(row, first_blocks[row], of_page))
            else:
                spanning.append(row)
        batches = [
            self._gathered(rows, seen, table) for rows in _like_lengths({row: len(seen[row]) for row in spanning})
        ]
        prefills = []
        for row in range(inputs.decodes, len(inputs.kv_lens)):
            of_step = slice(bounds[row], bounds[row + 1])
            end = inputs.kv_lens[row]
            queries = range(end - (of_step.stop - of_step.start), end)
            page = reach.first_seen(queries.start) // page_size
            blocks = None if queries.start == 0 else table[row, page : -(-end // page_size)]
            prefills.append(Prefill(of_step, queries, 0 if blocks is None else page * page_size, blocks))
        return GroupPlan(reach, in_place, batches, prefills)

    def _gathered(self, rows: list[int], seen: Sequence[range], table: torch.Tensor) -> GatheredBatch:
        page_size, device = self.page_size, table.device
        first_pages = [seen[row].start // page_size for row in rows]
        pages = max(-(-seen[row].stop // page_size) - page for row, page in zip(rows, first_pages, strict=True))
        of_pages = torch.tensor(first_pages, device=device).unsqueeze(1) + torch.arange(pages, device=device)
        index = torch.tensor(rows, device=device)
        # Beyond a shorter row's last page any block will do: what is not seen is cleared.
        blocks = table[index.unsqueeze(1), of_pages.clamp(max=table.shape[1] - 1)]
        offsets = [page * page_size for page in first_pages]
        of_rows = [
            range(seen[row].start - offset, seen[row].stop - offset) for row, offset in zip(rows, offsets, strict=True)
        ]
        places = torch.arange(pages * page_size, device=device)
        starts = torch.tensor([tokens.start for tokens in of_rows], device=device).unsqueeze(1)
        stops = torch.tensor([tokens.stop for tokens in of_rows], device=device).unsqueeze(1)
        visible = ((places >= starts) & (places < stops))[:, None, None, :]
        return GatheredBatch(index, blocks, of_rows, visible)


def _like_lengths(lengths: Mapping[int, int]) -> list[list[int]]:
    """Cuts rows, given with their lengths, into batches of like length and bounded size."""
    batches: list[list[int]] = []
    for row, length in sorted(lengths.items(), key=lambda item: item[1]):
        if batches:
            batch = batches[-1]
            fits = (len(batch) + 1) * length <= GATHERED_TOKENS
            if fits and length <= PADDING_LIMIT * lengths[batch[0]]:
                batch.append(row)
                continue
        batches.append([row])
    return batches


def _gather(pages: torch.Tensor, blocks: torch.Tensor, seen: Sequence[range] = ()) -> torch.Tensor:
    """[batch, heads, tokens, size] from [blocks, page, heads, size] by [batch, pages] block numbers."""
    gathered = pages[blocks].flatten(1, 2)
    for row, tokens in enumerate(seen):
        # What a former owner left around a row's tokens is masked, but a NaN would come through a mask.
        gathered[row, : tokens.start] = 0
        gathered[row, tokens.stop :] = 0
    return gathered.transpose(1, 2)


@dataclass(frozen=True)
class _Form:
    """How this call computes its scores."""

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None
    reach: Reach
    written_out: bool

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None and not self.written_out

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

    def prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        queries: range,
        first_key: int,
        out: torch.Tensor,
    ) -> None:
        """Tokens of one sequence, at the positions `queries`, over keys from position `first_key` to the last of them:
        [1, heads, tokens, size] into out, [tokens, heads, size of V]."""
        heads, keys = query.shape[1], key.shape[2]
        gqa = heads != key.shape[1]
        if self.plain and queries.start == first_key and self.reach.sees_all(len(queries)):
            whole = scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=gqa)
            out.copy_(whole[0].transpose(0, 1))
            return
        at_once = max(1, SCORES // (heads * keys))
        for start in range(0, len(queries), at_once):
            part = queries[start : start + at_once]
            seen = range(max(first_key, self.reach.first_seen(part.start)), part.stop)
            of_keys = slice(seen.start - first_key, seen.stop - first_key)
            visible = visibility(self.reach, part, seen, query.device)
            q, k, v = query[:, :, start : start + len(part)], key[:, :, of_keys], value[:, :, of_keys]
            if self.plain:
                attended = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=self.scale, enable_gqa=gqa)
            else:
                attended = self._written_out(q, k, v, visible)
            out[start : start + len(part)] = attended[0].transpose(0, 1)

    def _written_out(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None
    ) -> torch.Tensor:
        return scores_attention(
            query, key, value, scale=self.scale, visible=visible, softcap=self.softcap, sinks=self.sinks
        )
