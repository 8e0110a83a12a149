"""Greedy choice and counter-based draws.

A draw is a Gumbel variable per candidate and an argmax over logit plus Gumbel, which is a draw from the softmax. The
variables are a function of (draw key of the sequence, position, token id) alone, so that a sequence draws the same
tokens whoever else is in the batch, however its prompt was cut, and after it was evicted. No global generator is
touched.
"""

import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from chairlift import _native
from chairlift.attention.native import DTYPES
from chairlift.engine.inputs import SamplingTable

# Odd 64-bit constants of the MurmurHash3 finaliser and of SplitMix64, as signed numbers.
_MIX_1 = -0xAE502812AA7333
_MIX_2 = -0x3B314601E57A13AD
_GOLDEN = -0x61C8864680B583EB


# Rows that are handled at once: what sampling takes beside the logits stays the same however many rows there are.
SLICE_ROWS = 64
# fp32 copy, warped and ordered scores, int64 bits and fp64 uniforms of a draw, at their peak.
_SLICE_ENTRY_BYTES = 48


def scratch_bytes(vocab_size: int) -> int:
    """Bytes that `choose` takes beside its logits, at most."""
    return SLICE_ROWS * vocab_size * _SLICE_ENTRY_BYTES


def choose(
    logits: torch.Tensor, table: SamplingTable, rows: torch.Tensor, draws: torch.Tensor, *, logprobs: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chooses a token for each row of logits.

    Args:
        logits: [sampled, vocabulary]
        table: Sampling parameters by row.
        rows: [sampled] rows of the table.
        draws: [sampled, 3] int32: low and high half of the draw key, and the position of the token.
        logprobs: Whether the logarithms of the chosen tokens' probabilities are wanted.

    Returns:
        Token ids [sampled] int64, and their logprobs [sampled] fp32 under the distribution that was drawn from, or
        None.
    """
    slices = [slice(start, start + SLICE_ROWS) for start in range(0, logits.shape[0], SLICE_ROWS)]
    chosen = [_choose(logits[part], table, rows[part], draws[part], logprobs) for part in slices]
    tokens = torch.cat([tokens for tokens, _ in chosen])
    return tokens, torch.cat([of_slice for _, of_slice in chosen if of_slice is not None]) if logprobs else None


def _choose(
    logits: torch.Tensor, table: SamplingTable, rows: torch.Tensor, draws: torch.Tensor, logprobs: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    tokens = largest(logits)
    drawn = table.draws[rows]
    draws_any = bool(drawn.any())
    if not (draws_any or logprobs):
        return tokens, None
    scores = logits.float()
    if draws_any:
        # Warped rows replace their scores; greedy rows keep theirs, as `generate` applies no warper to them.
        warped = warp(scores[drawn], table, rows[drawn])
        tokens[drawn] = torch.argmax(warped + gumbel(draws[drawn], scores.shape[-1]), dim=-1)
        if logprobs:
            scores = scores.clone() if scores.data_ptr() == logits.data_ptr() else scores
            scores[drawn] = warped
    if not logprobs:
        return tokens, None
    of_tokens = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens, of_tokens - torch.logsumexp(scores, dim=-1)


def largest(logits: torch.Tensor) -> torch.Tensor:
    """[rows] int64: the first of each row's largest logits."""
    is_read = logits.dtype in DTYPES and logits.stride(-1) == 1
    if logits.device.type != "cpu" or not is_read:
        # On a CPU several times as fast as `argmax`, which gives the same.
        return logits.max(dim=-1).indices
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    _native.largest(to_dlpack(logits.detach()), to_dlpack(tokens), torch.get_num_threads())
    return tokens


def warp(scores: torch.Tensor, table: SamplingTable, rows: torch.Tensor) -> torch.Tensor:
    """Applies temperature, top-k and top-p, in `generate`'s order; excluded tokens get -inf."""
    scores = scores / table.temperature[rows].unsqueeze(1)
    top_k, top_p = table.top_k[rows], table.top_p[rows]
    vocab_size = scores.shape[-1]
    limits_k, limits_p = bool((top_k > 0).any()), bool((top_p < 1).any())
    if not (limits_k or limits_p):
        return scores
    most = vocab_size if limits_p or bool((top_k == 0).any()) else min(int(top_k.max()), vocab_size)
    ordered = torch.topk(scores, most, dim=-1).values  # descending
    if limits_k:
        last = torch.where(top_k > 0, top_k, vocab_size).clamp(max=most) - 1
        lowest = ordered.gather(1, last.unsqueeze(1))
        scores = scores.masked_fill(scores < lowest, float("-inf"))
        ordered = ordered.masked_fill(ordered < lowest, float("-inf"))
    if limits_p:
        # A token stays when the more probable ones together do not reach top_p.
        probabilities = torch.softmax(ordered, dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        last = (before < top_p.unsqueeze(1)).sum(dim=-1).clamp(min=1) - 1
        lowest = ordered.gather(1, last.unsqueeze(1))
        kept = (scores >= lowest) | (top_p >= 1).unsqueeze(1)
        scores = scores.masked_fill(~kept, float("-inf"))
    return scores


def gumbel(draws: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[rows, vocabulary] Gumbel variables, each a function of the row's key and position and of the token id."""
    low, high, position = draws.long().unbind(1)
    key = (low & 0xFFFFFFFF) | (high << 32)
    stream = _mix(key ^ _mix(position * _GOLDEN)).unsqueeze(1)
    tokens = torch.arange(vocab_size, device=draws.device) * _GOLDEN
    bits = _mix(stream ^ tokens.unsqueeze(0))
    # 52 bits to the open interval (0, 1): with 53 the largest would round to 1.
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform)).float()


def _shift(value: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = (value ^ _shift(value, 33)) * _MIX_1
    value = (value ^ _shift(value, 33)) * _MIX_2
    return value ^ _shift(value, 33)
