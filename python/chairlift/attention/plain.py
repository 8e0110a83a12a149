"""Attention written out: what every backend must agree with, and what serves where no kernel does."""

from dataclasses import dataclass
from typing import Literal

import torch


def scores_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    visible: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention by its formula, scores in fp32.

    Args:
        query: [batch, heads, queries, head size]
        key: [batch, kv heads, keys, head size]; heads is a multiple of kv heads.
        value: [batch, kv heads, keys, head size of V]
        scale: Factor of the scores.
        visible: Which keys a query sees: bool, broadcastable to [batch, heads, queries, keys]. None: all.
        softcap: Scores are squeezed into (-softcap, softcap) by tanh.
        sinks: [heads] logits that take part in the softmax and contribute no value.

    Returns:
        [batch, heads, queries, head size of V]
    """
    batch, heads, queries, _ = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, queries, -1)
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2)).float() * scale
    scores = scores.reshape(batch, heads, queries, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sink_scores = sinks.float().reshape(1, -1, 1, 1).expand(batch, -1, queries, 1)
        weights = torch.softmax(torch.cat([scores, sink_scores], dim=-1), dim=-1)[..., :-1]
    weights = weights.to(value.dtype).reshape(batch, kv_heads, heads // kv_heads, queries, -1)
    return torch.matmul(weights, value.unsqueeze(2)).reshape(batch, heads, queries, -1)


@dataclass(frozen=True)
class Reach:
    """How far back attention looks.

    Attributes:
        form: `full`: to the first token; `window`: over `tokens` tokens, the query's own included; `chunk`: to the
            start of the query's chunk of `tokens` tokens.
        tokens: 0 for `full`.
    """

    form: Literal["full", "window", "chunk"] = "full"
    tokens: int = 0

    def __str__(self) -> str:
        return self.form if self.form == "full" else f"{self.form} of {self.tokens}"

    def first_seen(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        match self.form:
            case "full":
                return 0
            case "window":
                return max(0, position + 1 - self.tokens)
            case "chunk":
                return position - position % self.tokens

    def sees_all(self, length: int) -> bool:
        """Whether every token of a sequence of that length sees all before it."""
        return self.form == "full" or length <= self.tokens


FULL = Reach()


def visibility(reach: Reach, queries: range, keys: range, device: torch.device) -> torch.Tensor:
    """[queries, keys] bool: which keys each query sees, both given by their positions."""
    query = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1)
    key = torch.arange(keys.start, keys.stop, device=device)
    seen = key <= query
    if reach.form == "window":
        seen &= key > query - reach.tokens
    elif reach.form == "chunk":
        seen &= key // reach.tokens == query // reach.tokens
    return seen
