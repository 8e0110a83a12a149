"""Element-wise calls of a forward in runs: the same numbers, whatever the calls, and nothing fused that is not row by
row."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from toy_forwards import HEADS, SIZE, WIDTH, Forward, Toy, weights

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


NORM = weights(WIDTH, seed=1)
NORMS = {dtype: NORM.to(dtype) for dtype in TOLERANCES}


def rotated(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(1, x.shape[1], HEADS, SIZE).transpose(1, 2)
    # Angles of each token, alike for all heads.
    angle = x[..., :SIZE].unsqueeze(1)
    turned = torch.cat((-heads[..., SIZE // 2 :], heads[..., : SIZE // 2]), dim=-1)
    return heads * torch.tanh(angle) + turned * torch.sigmoid(angle)


def gated(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * (x + 1.5)


FORWARDS: dict[str, Forward] = {
    "a norm": lambda x, _: x + NORMS[x.dtype] * norm_of(x),
    "a gate": lambda x, _: gated(x) - x,
    "a rotation": lambda x, _: rotated(x).transpose(1, 2).reshape(1, x.shape[1], WIDTH) * 2,
    "numbers first": lambda x, _: (1.0 - x) * (2.0 / (3.0 + x * x)),
    "activations": lambda x, _: F.relu(x) + F.gelu(x, approximate="tanh") + torch.exp(-x * x) + x.square().sqrt(),
    "sampled rows": lambda x, rows: gated(norm_of(x)[:, rows, :]) / 3.0,
    "values that are used again": lambda x, _: reused(x),
    "a result of several widths": lambda x, _: torch.cat((x * 2, gated(x)[..., 3:11], x - 1), dim=-1) + 0.5,
}


def norm_of(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return NORMS[x.dtype] * wide.to(x.dtype)


def reused(x: torch.Tensor) -> torch.Tensor:
    y = norm_of(x)
    z = F.linear(y, EYES[x.dtype])
    return z + y * x


EYES = {dtype: weights(WIDTH, WIDTH, dtype=dtype, seed=5) for dtype in TOLERANCES}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", FORWARDS)
def test_a_run_gives_what_its_calls_give(name: str, dtype: torch.dtype) -> None:
    toy = Toy(FORWARDS[name], dtype)
    assert toy.runs
    toy.check(TOLERANCES[dtype])


@pytest.mark.parametrize("name", FORWARDS)
def test_of_single_tokens_too(name: str) -> None:
    points = [(1, 1), (1, 1), (1, 1)]
    toy = Toy(FORWARDS[name], torch.float32, points)
    assert toy.runs
    toy.check(TOLERANCES[torch.float32], points)


def test_what_is_between_two_layers_is_one_run() -> None:
    def block(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        x = x + F.linear(norm_of(x), EYES[x.dtype])
        return x + F.linear(gated(norm_of(x)), EYES[x.dtype])

    toy = Toy(block, torch.bfloat16)
    assert [len(call.results) for call in toy.runs] == [1, 2]
    toy.check(TOLERANCES[torch.bfloat16])


def test_tokens_and_sampled_rows_are_runs_of_their_own() -> None:
    toy = Toy(lambda x, rows: torch.cat((gated(x), gated(x[:, rows, :])), dim=1), torch.float32)
    assert len(toy.runs) == 2
    toy.check(1e-5)


def test_parts_without_elements_stay_torchs() -> None:
    def forward(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        turned, rest = x[..., :WIDTH], x[..., WIDTH:]
        return torch.cat((gated(turned), rest * 2), dim=-1)

    toy = Toy(forward, torch.float32)
    assert toy.runs
    toy.check(1e-5)


NOT_ROW_BY_ROW: dict[str, Forward] = {
    "over the tokens": lambda x, _: (x.mean(1, keepdim=True) + x.mean(-2, keepdim=True)).mean(0, keepdim=True),
    "a softmax": lambda x, _: x.softmax(-1).log(),
    "one of all": lambda x, _: x.reshape(1, -1, WIDTH // 2).transpose(1, 2).contiguous().transpose(1, 2),
    "heads as rows": lambda x, _: x.view(1, x.shape[1], HEADS, SIZE).transpose(2, 3).contiguous(),
    "rows that meet": lambda x, _: x[:, :1] / x[:, 1:2],
}


@pytest.mark.parametrize("name", NOT_ROW_BY_ROW)
def test_what_is_not_row_by_row_stays_torchs(name: str) -> None:
    toy = Toy(NOT_ROW_BY_ROW[name], torch.float32)
    assert not toy.runs
    toy.check(1e-6)


def test_of_other_dtypes_stays_torchs() -> None:
    toy = Toy(lambda x, _: (x.double() * 2).exp() + 1, torch.float32)
    assert not toy.runs
    toy.check(1e-9)


def test_a_forward_that_writes_in_place_stays_torchs() -> None:
    def forward(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        y = x * 2 + 1
        seen = y[..., :4]
        y.mul_(3.0)
        return torch.cat((seen, y), dim=-1)

    toy = Toy(forward, torch.float32)
    assert not toy.runs
    toy.check(1e-6)


def test_a_single_call_stays_torchs() -> None:
    toy = Toy(lambda x, _: x * 2.0, torch.float32)
    assert not toy.runs


# Random programs: each step takes one or two of the values so far.
UNARY: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: -x,
    torch.tanh,
    F.silu,
    lambda x: x * 0.5,
    lambda x: 1.0 + x,
    lambda x: x.pow(2),
    lambda x: x.mean(-1, keepdim=True),
    lambda x: x[..., : max(1, x.shape[-1] // 2)],
    lambda x: torch.cat((x, -x), dim=-1) if x.shape[-1] < 60 else x,
    lambda x: x.float(),
    lambda x: x.to(torch.bfloat16),
]
BINARY: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [torch.add, torch.sub, torch.mul]


def is_broadcast(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dim() == b.dim() and all(m == n or 1 in (m, n) for m, n in zip(a.shape, b.shape, strict=True))


def random_forward(steps: list[tuple[int, int, int]]) -> Forward:
    def forward(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        values = [x, x.view(1, x.shape[1], HEADS, SIZE).transpose(1, 2)]
        for kind, first, second in steps:
            a, b = values[first % len(values)], values[second % len(values)]
            if kind < len(BINARY):
                values.append(BINARY[kind](a, b) if is_broadcast(a, b) else BINARY[kind](a, a))
            else:
                values.append(UNARY[kind % len(UNARY)](a))
        # All of them matter.
        flat = [value.transpose(1, 2).reshape(1, x.shape[1], -1) if value.dim() == 4 else value for value in values]
        return torch.cat([value.float() for value in flat], dim=-1)

    return forward


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 13), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_random_calls_give_the_same_in_runs(steps: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
    toy = Toy(random_forward(steps), dtype)
    # Roundings of half precision add up along a chain.
    toy.check(1e-4 if dtype is torch.float32 and all(kind % len(UNARY) != 10 for kind, _, _ in steps) else 0.3)
