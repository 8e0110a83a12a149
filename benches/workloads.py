"""What the engines are asked to do: four workloads, the same tokens wherever they are made.

All prompts come from the oracle's texts (tests/oracle), greedy, with eos off: every engine does the same work.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import oracle  # noqa: E402 (found only from the root)

__all__ = ["ROOT", "WORKLOADS", "Size", "Task", "Tokens", "Workload", "expected_tokens", "oracle", "oracle_cases"]

Tokens = list[int]

SHORTEST_MIXED = 16
# What each request of `shared` brings beside what all of them share.
OWN_TOKENS = 32
SEED = 20_260


@dataclass(frozen=True)
class Size:
    """How much of a workload is run."""

    requests: int
    new_tokens: int
    """Of each request."""
    longest_prompt: int
    """Tokens of the longest prompt."""


@dataclass(frozen=True)
class Workload:
    """A kind of traffic, and what there is to learn from it."""

    about: str
    make: Callable[[Size], list[Tokens]]
    full: Size
    quick: Size
    engines: tuple[str, ...]
    """Those that are compared unless others are named; ours is the first."""
    reference: str | None
    """The engine whose tokens the others' are compared with; None: the oracle's."""
    aims: Mapping[str, float] = field(default_factory=dict)
    """By peer: how many times its speed ours is meant to reach."""


@dataclass(frozen=True)
class Task:
    """What one process is asked to do."""

    workload: str
    dtype: str
    size: Size
    max_batch_tokens: int

    @classmethod
    def of_fields(cls, fields: dict[str, object]) -> Task:
        """A task from what `dataclasses.asdict` made of it."""
        task = cls(**fields)  # type: ignore[arg-type]
        return replace(task, size=Size(**fields["size"]))  # type: ignore[arg-type]

    def prompts(self) -> list[Tokens]:
        """The prompts, in the order in which they are submitted."""
        return WORKLOADS[self.workload].make(self.size)


def expected_tokens(size: Size) -> list[Tokens]:
    """What `generate` says to each prompt of `texts` alone, in fp32."""
    return [case.tokens[: size.new_tokens] for case in oracle_cases(size)]


def oracle_cases(size: Size) -> list[oracle.OracleCase]:
    """The first `requests` cases of the oracle whose prompts are not longer than asked.

    Raises:
        ValueError: It has fewer, or fewer tokens of each.
    """
    every = oracle.load()
    short = [case for case in every if len(case.prompt) <= size.longest_prompt]
    if size.requests > len(short):
        raise ValueError(
            f"{size.requests} requests, but the oracle has {len(short)} of at most {size.longest_prompt} prompt "
            f"tokens ({len(every)} in all): ask for fewer, or for longer prompts"
        )
    if size.new_tokens > (most := len(every[0].tokens)):
        raise ValueError(f"{size.new_tokens} new tokens, but the oracle knows {most} of each: ask for fewer")
    return short[: size.requests]


def oracle_prompts(size: Size) -> list[Tokens]:
    """The oracle's own prompts."""
    return [case.prompt for case in oracle_cases(size)]


def mixed_prompts(size: Size) -> list[Tokens]:
    """Prompts whose lengths are spread evenly over their logarithm, in no order: short ones prevail, as in real
    traffic, and most tokens are in the long ones."""
    if size.longest_prompt < SHORTEST_MIXED:
        raise ValueError(f"prompts of at most {size.longest_prompt} tokens, but the shortest has {SHORTEST_MIXED}")
    spread = size.longest_prompt / SHORTEST_MIXED
    lengths = [round(SHORTEST_MIXED * spread ** (n / max(size.requests - 1, 1))) for n in range(size.requests)]
    dice = random.Random(SEED)
    dice.shuffle(lengths)
    return cut_from_texts(lengths, dice)


def shared_prompts(size: Size) -> list[Tokens]:
    """Prompts that begin with the same system prompt, and end each in a way of its own."""
    shared = size.longest_prompt - OWN_TOKENS
    if shared < 1:
        raise ValueError(f"prompts of {size.longest_prompt} tokens, but {OWN_TOKENS} of each are its own: ask for more")
    dice = random.Random(SEED)
    (system,) = cut_from_texts([shared], dice)
    return [system + own for own in cut_from_texts([OWN_TOKENS] * size.requests, dice)]


def cut_from_texts(lengths: list[int], dice: random.Random) -> list[Tokens]:
    """Pieces of the oracle's texts, each from a start of its own.

    Raises:
        ValueError: A piece is longer than all texts together, or there are more pieces than starts.
    """
    texts = [token for case in oracle.load() for token in (*case.prompt, *case.tokens)]
    for asked, of in ((max(lengths), "tokens"), (len(lengths), "requests")):
        if asked > len(texts):
            raise ValueError(f"{asked} {of}, but the oracle's texts have {len(texts)} tokens in all: ask for fewer")
    twice = texts + texts
    starts = dice.sample(range(len(texts)), len(lengths))
    return [twice[start : start + length] for start, length in zip(starts, lengths, strict=True)]


WORKLOADS = {
    "texts": Workload(
        about="the oracle's 64 prompts",
        make=oracle_prompts,
        full=Size(requests=64, new_tokens=64, longest_prompt=600),
        quick=Size(requests=8, new_tokens=8, longest_prompt=128),
        engines=("chairlift", "generate_batch", "padded", "openvino"),
        reference=None,
    ),
    "mixed": Workload(
        about="prompts of very different lengths",
        make=mixed_prompts,
        full=Size(requests=256, new_tokens=32, longest_prompt=2048),
        quick=Size(requests=8, new_tokens=4, longest_prompt=128),
        engines=("chairlift", "generate_batch", "padded", "openvino"),
        reference="chairlift",
    ),
    "shared": Workload(
        about=f"one system prompt for all, {OWN_TOKENS} tokens of each request's own behind it",
        make=shared_prompts,
        full=Size(requests=64, new_tokens=64, longest_prompt=1532),
        quick=Size(requests=8, new_tokens=4, longest_prompt=288),
        engines=("chairlift", "unshared", "openvino"),
        reference="unshared",
        aims={"unshared": 9.0},
    ),
    "single": Workload(
        about="one request alone",
        make=lambda size: cut_from_texts([size.longest_prompt] * size.requests, random.Random(SEED)),
        full=Size(requests=1, new_tokens=128, longest_prompt=100),
        quick=Size(requests=1, new_tokens=16, longest_prompt=32),
        engines=("chairlift", "started", "alone", "openvino"),
        reference="alone",
        aims={"alone": 1.0},
    ),
}
