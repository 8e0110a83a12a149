"""What a look at a forward from below finds: tokens that a model numbers by itself."""

from collections.abc import Callable

import pytest
import torch

from chairlift.watch import ForwardWatch

TOKENS, SIZE = 12, 8
Forward = Callable[[torch.Tensor, torch.Tensor], object]  # of hidden states [1, tokens, size] and position_ids


def numbers() -> torch.Tensor:
    return torch.arange(TOKENS)


def column(values: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, 1)


def in_its_place(hidden: torch.Tensor) -> torch.Tensor:
    """Sorted, and sorted back, as experts do."""
    order = hidden[0, :, 0].argsort()
    back = torch.empty_like(order)
    back[order] = numbers()
    return hidden[:, order][:, back]


def table() -> torch.Tensor:
    return torch.ones(64, SIZE)


COMPUTES_WITH_NUMBERS: dict[str, Forward] = {
    "a factor": lambda hidden, _: hidden * column(torch.log1p(torch.floor(numbers() / 8192)) + 1),
    "whole numbers": lambda hidden, _: hidden + column(numbers()),
    "numbers with an offset": lambda hidden, _: hidden + column(torch.arange(3, 3 + TOKENS) + torch.tensor(5)),
    "a threshold": lambda hidden, _: hidden * column(torch.where(numbers() > 8192, 2.0, 1.0)),
    "a mask": lambda hidden, _: hidden.masked_fill(column(numbers() > 8192), 0.0),
    "a mask in place": lambda hidden, _: hidden.clone().masked_fill_(column(numbers() > 8192), 0.0),
    "a table": lambda hidden, _: hidden + table()[numbers()],
    "a rotation": lambda hidden, _: hidden * torch.outer(numbers(), torch.ones(SIZE)).cos(),
    "a mixture": lambda hidden, _: torch.exp(-(numbers()[:, None] - numbers()).float()) @ hidden,
    "beside lengths": lambda hidden, positions: hidden * column((numbers() - positions).float()),
}
ONLY_ORDERS: dict[str, Forward] = {
    "nothing": lambda hidden, _: (hidden + 1, numbers() + 1),
    "positions": lambda hidden, positions: hidden * column(torch.log1p(positions)),
    "a pick": lambda hidden, _: hidden[:, numbers()] * 2,
    "a placement": lambda hidden, _: torch.zeros_like(hidden).index_add(1, numbers(), hidden) * 2,
    "an order undone": lambda hidden, _: in_its_place(hidden) * 2,
    "a rotation looked up by position": lambda hidden, positions: hidden * numbers().float().cos()[positions[0], None],
    "numbers of something else": lambda hidden, _: hidden * torch.arange(SIZE),
}


def found(forward: Forward) -> bool:
    hidden, positions = torch.rand(1, TOKENS, SIZE), torch.arange(TOKENS).unsqueeze(0)
    with torch.no_grad(), ForwardWatch(torch.nn.Linear(1, 1), positions) as watch:
        forward(hidden, positions)
    return watch.numbers_tokens


@pytest.mark.parametrize("forward", COMPUTES_WITH_NUMBERS.values(), ids=COMPUTES_WITH_NUMBERS)
def test_numbers_that_hidden_states_are_computed_with_are_found(forward: Forward) -> None:
    assert found(forward)


@pytest.mark.parametrize("forward", ONLY_ORDERS.values(), ids=ONLY_ORDERS)
def test_numbers_that_only_order_tokens_are_not(forward: Forward) -> None:
    assert not found(forward)
