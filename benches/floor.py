"""What a run is held against: the time of its forwards in eager torch with attention for free, and the machine's peak.

chairlift's steps are written down as it runs (`recorded_steps`), and the same shapes are run by the unmodified model
in eager mode, its attention answered with zeros at no cost, no K and V written, nothing sampled. An engine that calls
the model as it is cannot be faster than that. The peak is what large matrix products reach on the same threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

PEAK_SIZE = 2048
PEAK_REPEATS = 8
# The name under which transformers knows the attention that costs nothing.
FREE_ATTENTION = "free"


class StepShape(NamedTuple):
    """How large a step was."""

    tokens: int
    rows: int
    """Sequences with a token or more in it."""
    sampled: int
    """Tokens whose logits were wanted."""
    keys: int
    """Keys that the step's tokens saw, summed over the tokens."""


@dataclass
class StepLog:
    """The steps of a run, in order."""

    steps: list[StepShape]
    first_at: float | None = None
    """When the first one began, in seconds of `time.perf_counter`."""


@contextmanager
def recorded_steps() -> Iterator[StepLog]:
    """Writes down the shape of every step that chairlift runs inside the block."""
    from chairlift.engine.runner import Runner

    log, run = StepLog([]), Runner.run

    def recording_run(self: Any, step: Any) -> None:
        if log.first_at is None:
            log.first_at = time.perf_counter()
        arena, layout = self.slots[step.slot].arena, step.layout
        bounds, lengths = arena[layout["cu_seqlens"]].tolist(), arena[layout["kv_lens"]].tolist()
        sampled = layout["logits_rows"].stop - layout["logits_rows"].start
        log.steps.append(step_shape(bounds, lengths, sampled))
        run(self, step)

    Runner.run = recording_run  # type: ignore[method-assign]
    try:
        yield log
    finally:
        Runner.run = run  # type: ignore[method-assign]


def step_shape(bounds: Sequence[int], lengths: Sequence[int], sampled: int) -> StepShape:
    """The shape of a step.

    Args:
        bounds: [rows + 1] where each row's tokens begin and the last one's end.
        lengths: [rows] tokens of each sequence after the step.
        sampled: Tokens whose logits are wanted.
    """
    queries = [stop - start for start, stop in pairwise(bounds)]
    keys = sum(visible_keys(count, length) for count, length in zip(queries, lengths, strict=True))
    return StepShape(bounds[-1], len(lengths), sampled, keys)


def visible_keys(queries: int, length: int) -> int:
    """Keys that the last `queries` of `length` tokens see together; each sees itself and all before it."""
    return queries * length - queries * (queries - 1) // 2


@dataclass(frozen=True)
class ModelCost:
    """What a forward computes, in numbers of its model."""

    linear: int
    """Weights that each token is multiplied with."""
    head: int
    """Weights that each sampled token is multiplied with beside them."""
    attention: int
    """Heads times head size, over all layers."""

    @classmethod
    def of_model(cls, model: Any) -> ModelCost:
        """Counted in a model with full attention in every layer, and one head size."""
        import torch

        head = model.get_output_embeddings()
        layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head]
        config = model.config
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            linear=sum(module.weight.numel() for module in layers),
            head=head.weight.numel(),
            attention=config.num_hidden_layers * config.num_attention_heads * head_size,
        )

    def flop(self, steps: Sequence[StepShape]) -> int:
        """Floating point operations of steps: a multiplication and an addition for each weight and token; and for
        each query and key that it sees two of both for each element of a head, once for the score and once for V."""
        linear = sum(2 * self.linear * step.tokens + 2 * self.head * step.sampled for step in steps)
        return linear + sum(4 * self.attention * step.keys for step in steps)


@dataclass(frozen=True)
class FloorReport:
    """What one process measured for the steps of a run."""

    eager_s: float
    """Time of their forwards in eager torch with attention for free."""
    flop: int
    """Floating point operations of the model in them."""
    peak_flop_per_s: float
    """What large matrix products reach."""
    peak_kernel: str
    """Whose they were."""
    torch_threads: int


def measure_floor(dtype: str, steps: Sequence[StepShape]) -> FloorReport:
    """Runs the forwards of those steps, then large matrix products, in this process."""
    import torch
    from transformers import AttentionInterface

    from engines import load_torch_model

    torch_dtype = getattr(torch, dtype)
    model = load_torch_model(dtype)
    AttentionInterface.register(FREE_ATTENTION, free_attention(max(step.tokens for step in steps), torch_dtype))
    model.set_attn_implementation(FREE_ATTENTION)
    with torch.inference_mode():
        eager_s = eager_time_s(model, steps)
        peak, kernel = matrix_peak(torch_dtype)
    cost = ModelCost.of_model(model)
    return FloorReport(eager_s, cost.flop(steps), peak, kernel, torch.get_num_threads())


def free_attention(most_tokens: int, dtype: torch.dtype) -> Callable[..., tuple[torch.Tensor, None]]:
    """Attention that answers every call with a view of the same zeros."""
    import torch

    zeros = torch.zeros(0)

    def attend(
        _module: torch.nn.Module,
        query: torch.Tensor,
        _key: torch.Tensor,
        value: torch.Tensor,
        _attention_mask: torch.Tensor | None = None,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        nonlocal zeros
        _, heads, tokens, _ = query.shape
        size = heads * value.shape[-1]
        if zeros.numel() < most_tokens * size:
            zeros = torch.zeros(most_tokens * size, dtype=dtype)
        return zeros[: tokens * size].view(1, tokens, heads, -1), None

    return attend


def eager_time_s(model: Any, steps: Sequence[StepShape]) -> float:
    """Seconds of the steps' forwards, one after the other; the largest and the smallest are run once before."""
    import torch

    def run(step: StepShape) -> None:
        positions = torch.arange(step.tokens).unsqueeze(0)
        ids = positions % model.config.vocab_size
        sampled = torch.arange(step.sampled)
        model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=sampled)

    for step in (max(steps), min(steps)):
        run(step)
    start = time.perf_counter()
    for step in steps:
        run(step)
    return time.perf_counter() - start


def matrix_peak(dtype: torch.dtype, size: int = PEAK_SIZE, repeats: int = PEAK_REPEATS) -> tuple[float, str]:
    """Floating point operations per second of the best product of two square matrices, and whose it was: torch's own,
    and oneDNN's with one of them packed before, where torch was built with it."""
    import torch

    one, other = torch.rand(size, size).to(dtype), torch.rand(size, size).to(dtype)
    kernels: dict[str, Callable[[], Any]] = {"torch.mm": lambda: torch.mm(one, other)}
    if torch.backends.mkldnn.is_available():
        packed = torch.ops.mkldnn._reorder_linear_weight(other, size)
        kernels["oneDNN, packed"] = lambda: torch.ops.mkldnn._linear_pointwise(one, packed, None, "none", [], "")
    best, best_kernel = float("inf"), ""
    for name, multiply in kernels.items():
        multiply()
        for _ in range(repeats):
            start = time.perf_counter()
            multiply()
            took = time.perf_counter() - start
            if took < best:
                best, best_kernel = took, name
    return 2 * size**3 / best, best_kernel
