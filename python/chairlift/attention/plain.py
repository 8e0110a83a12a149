"""Attention written out: what every backend must agree with, and what serves where no kernel does."""

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


def causal_visibility(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """[queries, keys], for queries that are the last of the keys."""
    first = num_keys - num_queries
    keys = torch.arange(num_keys, device=device)
    return keys <= torch.arange(first, num_keys, device=device).unsqueeze(1)
