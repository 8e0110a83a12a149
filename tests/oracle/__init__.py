"""What plain `generate` answers, read from `smollm2.json`, and the rule by which an answer counts as equal.

The rule: greedy tokens are equal one by one, except that where the two best logits lie within `tie` of each
other the runner-up is as good. From there on two texts are compared that differ, so comparison stops.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ORACLE_PATH = Path(__file__).with_name("smollm2.json")
# fp32 logits of one row differ by about 1e-5 with the number of rows in the matrix product.
ACCEPTED_TIE = 1e-4


@dataclass(frozen=True)
class OracleCase:
    """One prompt and its greedy continuation."""

    id: str
    prompt: list[int]
    tokens: list[int]
    near_ties: dict[int, float]
    """By index into `tokens`: the gap between the two best logits, where it is below 1e-3."""
    runners_up: dict[int, int]
    """By the same indices: the token that came second."""


def prompts_checksum(prompts: Iterable[Sequence[int]]) -> str:
    """SHA-256 over the token ids of all prompts, in order."""
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()


def load() -> list[OracleCase]:
    """All cases, in the file's order; ValueError where the prompts are not those that were recorded."""
    stored = json.loads(ORACLE_PATH.read_text())
    cases = [
        OracleCase(
            id=case["id"],
            prompt=case["prompt"],
            tokens=case["tokens"],
            near_ties={index: gap for index, gap, _ in case["near_ties"]},
            runners_up={index: token for index, _, token in case["near_ties"]},
        )
        for case in stored["cases"]
    ]
    found, recorded = prompts_checksum(case.prompt for case in cases), stored["prompts_sha256"]
    if found != recorded:
        raise ValueError(f"{ORACLE_PATH.name}: prompts hash to {found}, recorded is {recorded}; make the file again")
    return cases


def mismatch(
    tokens: Sequence[int], case: OracleCase, tie: float = ACCEPTED_TIE, *, new_tokens: int | None = None
) -> int | None:
    """The first index at which `tokens` differs from the oracle by no accepted tie; None if there is none.

    `new_tokens` is how many tokens were asked for (None: as many as the oracle has). With too few or too many
    no tie is accepted, and the index is at most where the shorter of the two ends.
    """
    index, tied = _first_difference(tokens, case, tie, new_tokens)
    return None if tied else index


def ties_used(
    tokens: Sequence[int], case: OracleCase, tie: float = ACCEPTED_TIE, *, new_tokens: int | None = None
) -> int:
    """How many accepted ties `tokens` needed to pass: 1 if comparison stopped at one, else 0."""
    _, tied = _first_difference(tokens, case, tie, new_tokens)
    return int(tied)


def _first_difference(
    tokens: Sequence[int], case: OracleCase, tie: float, new_tokens: int | None
) -> tuple[int | None, bool]:
    """Where the two differ first, and whether that is an accepted tie."""
    expected = case.tokens[:new_tokens]
    if len(tokens) != len(expected):
        # A wrong length is wrong even behind a tie.
        shorter = min(len(tokens), len(expected))
        early = next((i for i in range(shorter) if tokens[i] != expected[i]), shorter)
        return early, False
    for index, (got, wanted) in enumerate(zip(tokens, expected, strict=True)):
        if got != wanted:
            is_tie = case.near_ties.get(index, tie) < tie and got == case.runners_up[index]
            return index, is_tie
    return None, False
