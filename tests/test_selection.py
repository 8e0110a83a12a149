"""Rows that nobody samples: computed as far as others need them, and no further."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from toy_forwards import HEADS, SIZE, WIDTH, Forward, Toy, inputs, weights

EYE, OTHER, HEAD = weights(WIDTH, WIDTH, seed=5), weights(WIDTH, WIDTH, seed=6), weights(50, WIDTH, seed=7)
NORM = weights(WIDTH, seed=1)


class Rows:
    """Linear layers that write down how many rows they are given."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def find(self, weight: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
        def linear(input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            self.seen.append(input.shape[:-1].numel())
            return F.linear(input, weight, bias)

        return linear

    def join(self, *_: Any) -> None:
        return None


def rows_of_linears(forward: Forward, tokens: int = 40, sampled: int = 3) -> list[int]:
    """Checks a forward, and says how many rows each of its linear layers computes of so many."""
    toy, rows = Toy(forward, torch.float32), Rows()
    toy.check(1e-4)
    given = inputs(tokens, sampled)
    torch.testing.assert_close(toy.program_with(rows).run(None, None, *given), toy(*given), rtol=1e-4, atol=1e-4)
    return rows.seen


def normed(x: torch.Tensor) -> torch.Tensor:
    return NORM * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def mixed(x: torch.Tensor) -> torch.Tensor:
    """What no row can be computed of alone; in heads, as attention's results."""
    return F.linear(x, EYE).cumsum(1).view(1, x.shape[1], HEADS, SIZE)


def block(x: torch.Tensor) -> torch.Tensor:
    x = x + F.linear(mixed(normed(x)).reshape(1, x.shape[1], -1), OTHER)
    return x + F.linear(F.silu(F.linear(normed(x), EYE)), OTHER, NORM)


def test_behind_the_last_attention_only_sampled_rows_are_computed() -> None:
    seen = rows_of_linears(lambda x, rows: F.linear(normed(block(block(x)))[:, rows, :], HEAD))
    assert seen == [40] * 5 + [3] * 4


def test_a_head_that_knows_of_no_pick_computes_sampled_rows() -> None:
    seen = rows_of_linears(lambda x, rows: F.linear(normed(block(x)), HEAD)[0][rows])
    assert seen == [40] + [3] * 4


def test_a_cap_behind_the_head_is_row_by_row() -> None:
    seen = rows_of_linears(lambda x, rows: (torch.tanh(F.linear(block(x), HEAD) / 30.0) * 30.0)[0][rows])
    assert seen == [40] + [3] * 4


ELSEWHERE: dict[str, tuple[Forward, list[int]]] = {
    "rows that others need": (
        lambda x, rows: (y := F.linear(x, EYE))[:, rows, :] + y.cumsum(1)[:, rows, :],
        [40],
    ),
    "a mean over the tokens": (lambda x, rows: F.linear(x, EYE)[:, rows, :] - F.linear(x, EYE).mean(1), [3, 40]),
    "other rows than the sampled ones": (lambda x, rows: F.linear(x, EYE)[:, rows - rows, :], [40]),
    "all of them": (lambda x, _: F.linear(x, EYE), [40]),
    "a pick along the features": (lambda x, rows: F.linear(x, HEAD)[..., rows], [40]),
    "the result itself, and its rows": (lambda x, rows: torch.cat(((y := F.linear(x, EYE)), y[:, rows, :]), 1), [40]),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_needed_elsewhere_is_computed_whole(name: str) -> None:
    forward, seen = ELSEWHERE[name]
    assert rows_of_linears(forward) == seen


def test_a_forward_that_writes_in_place_is_computed_whole() -> None:
    def forward(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, EYE)
        y.mul_(2.0)
        return F.linear(y, EYE)[:, rows, :]

    assert rows_of_linears(forward) == [40, 40]


STEPS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, _: F.linear(a, EYE) * 0.2,
    lambda a, b: a + b,
    lambda a, b: a * torch.sigmoid(b),
    lambda a, _: normed(a),
    lambda a, _: mixed(a).reshape(1, a.shape[1], -1) / 40.0,
    lambda a, _: a.view(1, a.shape[1], HEADS, SIZE).transpose(1, 2).contiguous().transpose(1, 2).reshape(a.shape) - 1.0,
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=9),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
)
def test_random_forwards_give_the_same(steps: list[tuple[int, int, int]], taken: list[int]) -> None:
    def forward(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        values = [x]
        for kind, first, second in steps:
            values.append(STEPS[kind](values[first % len(values)], values[second % len(values)]))
        picked = [values[-1 - index % len(values)][:, rows, :] for index in taken]
        return F.linear(torch.stack(picked).sum(0), HEAD)

    Toy(forward, torch.float32).check(1e-4)
