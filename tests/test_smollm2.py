"""chairlift against the SmolLM2 oracle: token by token what `model.generate` gives for each prompt alone.

The pool is small and the steps are short on purpose: long prompts are split over several steps, prompts and
decodes share steps, and requests queue for blocks. None of it may show in the text.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import chairlift
from chairlift.cli.demo import load_demo
from oracle import OracleCase, load, mismatch, ties_used

# What a run without --heavy is cut down to.
FEW_CASES = 24
FEW_TOKENS = 16

# The longest request, 600 + 64 tokens, needs 42 blocks; all of them together more than 900.
POOL = {"page_size": 16, "num_blocks": 160, "max_batch_tokens": 128}


@pytest.fixture(scope="module")
def model() -> Any:
    model, _ = load_demo(torch.float32)
    return model


def spread(cases: list[OracleCase], count: int) -> list[OracleCase]:
    """`count` cases spread evenly over the lengths, shortest and longest included, in the file's order."""
    by_length = sorted(cases, key=lambda case: len(case.prompt))
    chosen = {by_length[i * (len(cases) - 1) // (count - 1)].id for i in range(count)}
    return [case for case in cases if case.id in chosen]


@pytest.mark.smollm2
def test_every_token_is_the_one_generate_chooses_alone(
    model: Any, pytestconfig: pytest.Config, record_property: Callable[[str, object], None]
) -> None:
    cases = load()
    new_tokens = len(cases[0].tokens)
    if not pytestconfig.getoption("--heavy"):
        cases, new_tokens = spread(cases, FEW_CASES), FEW_TOKENS

    results = chairlift.generate_batch(
        model,
        [case.prompt for case in cases],
        generation_config=GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1),
        continuous_batching_config=chairlift.ContinuousBatchingConfig(**POOL),
    )

    assert [result.error for result in results.values()] == [None] * len(cases)
    answers = [(case, list(results[f"req_{n}"].generated_tokens)) for n, case in enumerate(cases)]
    differing = {
        case.id: f"at {index} of {new_tokens}"
        for case, tokens in answers
        if (index := mismatch(tokens, case, new_tokens=new_tokens)) is not None
    }
    assert differing == {}
    ties = sum(ties_used(tokens, case, new_tokens=new_tokens) for case, tokens in answers)
    record_property("ties_used", ties)
    print(f"{len(cases)} requests, {new_tokens} tokens each, {ties} by an accepted tie")


MEMORY_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from pathlib import Path
from transformers import GenerationConfig
import chairlift
from chairlift.cli.demo import load_demo
from oracle import load

def mib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

model, _ = load_demo(torch.float32)
for parameter in model.parameters():
    parameter.sum()  # the file is mapped: weights are resident once they are read
loaded = mib("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
prompts = [case.prompt for case in load()]
manager = chairlift.init_continuous_batching(
    model,
    GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1),
    chairlift.ContinuousBatchingConfig(max_batch_tokens=512),
    chairlift.WorkloadHints(
        max_prompt_length=600, max_generated_length=4, num_requests=64, num_tokens=sum(map(len, prompts)) + 256
    ),
)
manager.start()
for label in manager.add_requests(prompts):
    assert manager.get_result(label).error is None
manager.stop()
config = manager.config
batch = manager.batch_cost.of(config.max_batch_tokens, config.max_requests_per_batch) / 2**20
print(mib("VmHWM") - loaded, manager.cache_bytes / 2**20, batch)
"""


@pytest.mark.smollm2
def test_memory_stays_within_what_was_promised() -> None:
    program = [sys.executable, "-c", MEMORY_PROGRAM, str(Path(__file__).parent)]
    ended = subprocess.run(program, capture_output=True, text=True, check=True, timeout=600)
    growth, pool, batch = map(float, ended.stdout.split())
    print(f"grew by {growth:.0f} MiB; pool {pool:.0f} MiB, a batch at most {batch:.0f} MiB")
    assert growth < 1.1 * (pool + batch)


def case_with_a_tie() -> OracleCase:
    return OracleCase("made-up", [1, 2], [10, 11, 12, 13], near_ties={2: 5e-5}, runners_up={2: 99})


def test_the_runner_up_of_a_near_tie_is_as_good() -> None:
    case = case_with_a_tie()
    assert mismatch([10, 11, 99, 7], case) is None
    assert ties_used([10, 11, 99, 7], case) == 1
    assert ties_used(case.tokens, case) == 0


def test_a_gap_above_the_accepted_tie_is_a_difference() -> None:
    case = replace(case_with_a_tie(), near_ties={2: 5e-4})
    assert mismatch([10, 11, 99, 7], case) == 2


def test_a_third_token_at_a_near_tie_is_a_difference() -> None:
    assert mismatch([10, 11, 98, 13], case_with_a_tie()) == 2


def test_a_wrong_length_is_a_difference_even_behind_a_tie() -> None:
    case = case_with_a_tie()
    assert mismatch([10, 11, 12], case) == 3
    assert mismatch([10, 11, 99], case) == 2
    assert mismatch([10, 11, 12], case, new_tokens=3) is None
    assert mismatch([*case.tokens, 14], case) == 4
