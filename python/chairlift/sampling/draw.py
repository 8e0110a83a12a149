"""Greedy choice and counter-based draws.

A draw is a Gumbel variable per candidate and an argmax over logit plus Gumbel, which is a draw from the softmax. The
variables are a function of (draw key of the sequence, position, token id) alone, so that a sequence draws the same
tokens whoever else is in the batch, however its prompt was cut, and after it was evicted. No global generator is
touched.
"""

import torch

from chairlift.engine.inputs import SamplingTable

# Odd 64-bit constants of the MurmurHash3 finaliser and of SplitMix64, as signed numbers.
_MIX_1 = -0xAE502812AA7333
_MIX_2 = -0x3B314601E57A13AD
_GOLDEN = -0x61C8864680B583EB


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
    scores = logits.float()
    drawn = table.draws[rows]
    if bool(drawn.any()):
        # Warped rows replace their scores; greedy rows keep theirs, as `generate` applies no warper to them.
        warped = warp(scores[drawn], table, rows[drawn])
        noise = gumbel(draws[drawn], scores.shape[-1])
        scores = scores.clone() if scores is logits else scores
        scores[drawn] = warped
        tokens = torch.argmax(scores, dim=-1)
        tokens[drawn] = torch.argmax(warped + noise, dim=-1)
    else:
        tokens = torch.argmax(scores, dim=-1)
    if not logprobs:
        return tokens, None
    chosen = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens, chosen - torch.logsumexp(scores, dim=-1)


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
    # 53 bits to the open interval (0, 1).
    uniform = ((_shift(bits, 11)).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform)).float()


def _shift(value: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = (value ^ _shift(value, 33)) * _MIX_1
    value = (value ^ _shift(value, 33)) * _MIX_2
    return value ^ _shift(value, 33)
