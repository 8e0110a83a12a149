"""Which families chairlift serves, found by trying: `python tests/model_table.py [--write] [FAMILY ...]`.

Each family's tiny random model generates through chairlift, and its tokens are compared with those of
`model.generate` on each prompt alone. A family that has windows is tried without and with them.
Prints a table, and with `--write` puts it into docs/models.md; exits with 1 if any family is served wrongly.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

import chairlift
from tiny_models import (
    FIRST_PLAIN_TOKEN,
    VOCAB_SIZE,
    families,
    model_class,
    reference,
    tie_aware_mismatch,
    tiny_config,
    tiny_model,
)

DOC = Path(__file__).resolve().parent.parent / "docs" / "models.md"
NUM_PROMPTS = 5
PROMPT_TOKENS = (3, 40)
NEW_TOKENS = 12
WINDOW = 8  # tokens; shorter than most prompts, so that it matters
REASON_CHARS = 140

SERVED, REFUSED, NOT_BUILT, WRONG, FAILED = "served", "refused", "not built", "WRONG", "FAILED"


class Outcome(NamedTuple):
    """What became of one model: one of the words above, and why."""

    word: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}" if self.reason else self.word

    @classmethod
    def of(cls, word: str, error: Exception) -> Outcome:
        reason = " ".join(str(error).split()).split(" cannot be served: ")[-1] or type(error).__name__
        if word == FAILED:
            reason = f"{type(error).__name__}: {reason}"
        return cls(word, reason if len(reason) <= REASON_CHARS else reason[: REASON_CHARS - 3] + "...")


class Row(NamedTuple):
    family: str
    model: str
    plain: Outcome
    windowed: Outcome | None  # None where the family has no window

    @property
    def worst(self) -> Outcome:
        """The outcome to count: a fault in either run, else that of the run without windows."""
        faulty = [o for o in (self.plain, self.windowed) if o is not None and o.word in (WRONG, FAILED)]
        return faulty[0] if faulty else self.plain

    @property
    def result(self) -> str:
        if self.windowed is None or self.windowed == self.plain:
            return str(self.plain)
        return f"{self.plain}; with its window {self.windowed}"


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [
        [draw.randrange(FIRST_PLAIN_TOKEN, VOCAB_SIZE) for _ in range(draw.randint(*PROMPT_TOKENS))]
        for _ in range(NUM_PROMPTS)
    ]


def generate(model: PreTrainedModel) -> list[list[int]]:
    """Tokens of every prompt, all prompts in one batch of small steps, so that prompts are split."""
    results = chairlift.generate_batch(
        model,
        prompts(),
        generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False),
        continuous_batching_config=chairlift.ContinuousBatchingConfig(page_size=4, num_blocks=64, max_batch_tokens=16),
    )
    for result in results.values():
        if result.error is not None:
            raise RuntimeError(result.error)
    return [list(result.generated_tokens) for result in results.values()]


def attempt(build: Callable[[], PreTrainedModel]) -> Outcome:
    try:
        model = build()
        expected = [reference(model, prompt, NEW_TOKENS) for prompt in prompts()]
    except Exception as error:
        return Outcome.of(NOT_BUILT, error)
    try:
        generated = generate(model)
    except ValueError as error:
        return Outcome.of(REFUSED, error)
    except Exception as error:
        return Outcome.of(FAILED, error)
    if len(generated) != len(expected):
        return Outcome(FAILED, f"{len(generated)} results of {len(expected)} prompts")
    for i, (tokens, (reference_tokens, gaps)) in enumerate(zip(generated, expected, strict=True)):
        at = tie_aware_mismatch(tokens, reference_tokens, gaps)
        if at is not None:
            return Outcome(WRONG, f"prompt {i} differs from its token {at} on")
    return Outcome(SERVED)


def has_window(family: str) -> bool:
    try:
        return tiny_config(family, window=WINDOW).to_dict() != tiny_config(family).to_dict()
    except Exception:
        return False


def try_family(family: str) -> Row:
    with contextlib.redirect_stdout(io.StringIO()):  # some models print warnings
        plain = attempt(lambda: tiny_model(family))
        windowed = attempt(lambda: tiny_model(family, window=WINDOW)) if has_window(family) else None
    return Row(family, model_class(family).__name__, plain, windowed)


def cells(row: Row) -> str:
    return " | ".join((row.family, row.model, row.result.replace("|", "\\|")))


def counts(rows: list[Row]) -> str:
    counted = Counter(row.worst.word for row in rows)
    words = (SERVED, REFUSED, NOT_BUILT, WRONG, FAILED)
    return f"{len(rows)} families: " + ", ".join(f"{counted[word]} {word}" for word in words if counted[word])


def page(rows: list[Row]) -> str:
    table = "\n".join(f"| {cells(row)} |" for row in sorted(rows))
    return f"""# Models

Every family of the causal-LM mapping of transformers {transformers.__version__}, tried on torch \
{torch.__version__}.

A tiny random fp32 model of the family answers {NUM_PROMPTS} prompts through chairlift on the CPU.
*served*: all tokens equal those of `model.generate` on each prompt alone. *refused*: chairlift raised a
`ValueError`, and says why. *not built*: transformers itself could not build the model here, or generate with
it from text alone. A family with windowed layers is tried without and with a window of {WINDOW} tokens.

To make this page again: `python tests/model_table.py --write`.

{counts(rows)}.

| family | class | result |
| --- | --- | --- |
{table}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="model types to try (default: all)")
    parser.add_argument("--write", action="store_true", help="write docs/models.md; needs all families")
    args = parser.parse_args()
    if unknown := sorted(set(args.families) - set(families())):
        parser.error(f"not in the causal-LM mapping: {', '.join(unknown)}")
    if args.write and args.families:
        parser.error("--write needs all families: name none")

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)

    started, rows = time.monotonic(), []
    for family in args.families or families():
        rows.append(try_family(family))
        print(cells(rows[-1]), flush=True)
    print(f"{counts(rows)} ({time.monotonic() - started:.0f} s)")
    if args.write:
        DOC.parent.mkdir(exist_ok=True)
        DOC.write_text(page(rows), encoding="utf-8")
    return int(any(row.worst.word in (WRONG, FAILED) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
