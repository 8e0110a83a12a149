"""What the benchmarks compute before they print it: prompts, operations, agreement, tables."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, GenerationConfig, PreTrainedModel

import chairlift
from floor import (
    FREE_ATTENTION,
    FloorReport,
    ModelCost,
    StepShape,
    free_attention,
    matrix_peak,
    recorded_steps,
    step_shape,
    visible_keys,
)
from peers import Agreement, Report, agreement, parse_arguments, print_floor, print_ratios, print_table
from tiny_models import tiny_model
from workloads import OWN_TOKENS, WORKLOADS, Size, Task

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("kind", ["full", "quick"])
def test_a_workload_has_the_size_it_says_each_time(name: str, kind: str) -> None:
    workload = WORKLOADS[name]
    size: Size = getattr(workload, kind)
    prompts = workload.make(size)
    assert len(prompts) == size.requests
    assert max(len(prompt) for prompt in prompts) <= size.longest_prompt
    assert prompts == workload.make(size)


def test_mixed_lengths_go_from_end_to_end_and_half_of_them_lie_below_the_middle_of_the_logarithm() -> None:
    lengths = [len(prompt) for prompt in WORKLOADS["mixed"].make(Size(256, 32, 2048))]
    assert (min(lengths), max(lengths)) == (16, 2048)
    assert sum(length < (16 * 2048) ** 0.5 for length in lengths) == 128
    assert lengths != sorted(lengths)


def test_shared_prompts_share_all_but_their_own_tokens() -> None:
    prompts = WORKLOADS["shared"].make(Size(64, 64, 1532))
    assert {tuple(prompt[:-OWN_TOKENS]) for prompt in prompts} == {tuple(prompts[0][:1500])}
    assert len({tuple(prompt[-OWN_TOKENS:]) for prompt in prompts}) == 64


@pytest.mark.parametrize(
    ("name", "size", "told"),
    [
        ("texts", Size(65, 64, 600), "65 requests, but the oracle has 64"),
        ("texts", Size(1, 65, 600), "65 new tokens, but the oracle knows 64"),
        ("mixed", Size(4, 1, 15), "at most 15 tokens, but the shortest has 16"),
        ("mixed", Size(4, 1, 10**6), "1000000 tokens, but"),
        ("shared", Size(4, 1, OWN_TOKENS), "of each are its own"),
    ],
)
def test_a_size_that_cannot_be_made_is_refused_with_its_numbers(name: str, size: Size, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        WORKLOADS[name].make(size)


def test_keys_are_those_that_a_causal_mask_leaves() -> None:
    for queries, length in ((1, 1), (1, 9), (5, 5), (3, 8)):
        mask = torch.ones(length, length).tril()[length - queries :]
        assert visible_keys(queries, length) == int(mask.sum())
    # Two decodes and a chunk of three tokens that ends at the fourth.
    assert step_shape([0, 1, 2, 5], [7, 2, 4], sampled=3) == StepShape(5, 3, 3, 7 + 2 + (2 + 3 + 4))


def test_operations_are_those_that_torch_counts() -> None:
    model = tiny_model("llama")
    cost = ModelCost.of_model(model)
    AttentionInterface.register(FREE_ATTENTION, free_attention(13, model.dtype))
    own = model.config._attn_implementation
    for attention, keys in ((FREE_ATTENTION, 0), ("eager", 13 * 13)):  # torch counts what the mask hides too
        model.set_attn_implementation(attention)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.arange(13).unsqueeze(0), use_cache=False, logits_to_keep=torch.tensor([3, 12]))
        assert cost.flop([StepShape(13, 1, 2, keys)]) == counter.get_total_flops()
    model.set_attn_implementation(own)


def test_recorded_steps_are_those_of_the_run(llama: PreTrainedModel) -> None:
    prompts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    with recorded_steps() as log:
        chairlift.generate_batch(llama, prompts, GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1))
    prefill = StepShape(8, 2, 2, (1 + 2 + 3 + 4 + 5) + (1 + 2 + 3))
    assert log.steps == [prefill, StepShape(2, 2, 2, 6 + 4), StepShape(2, 2, 2, 7 + 5)]
    assert log.first_at is not None
    assert report(tokens=[[0] * 3] * 2, steps=log.steps).computed_prompt_tokens == 8


def test_a_peak_is_measured_by_whichever_product_is_best() -> None:
    flop_per_s, kernel = matrix_peak(torch.float32, size=64, repeats=2)
    assert flop_per_s > 0
    assert kernel


def report(tokens: list[list[int]], wall_s: float = 2.0, steps: list[StepShape] | None = None) -> Report:
    return Report(wall_s, 10, tokens, 5.0, 50.0, 4, steps=steps, set_up_s=None if steps is None else 0.5)


def test_agreement_ends_at_the_first_difference() -> None:
    assert agreement([[1, 2, 3], [4, 9, 6]], [[1, 2, 3], [4, 5, 6]]) == Agreement(1, 0, 4, 6)


def test_a_report_comes_back_from_its_fields() -> None:
    there = report([[1]], steps=[StepShape(1, 1, 1, 1)])
    assert Report.of_fields(asdict(there)) == there


def test_tables_show_medians_and_ratios_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    task = Task("single", "float32", Size(1, 4, 8), 512)
    ours = [report([[1, 2, 3, 4]], wall, [StepShape(8, 1, 1, 36)]) for wall in (1.0, 2.0, 9.0)]
    reports = {"chairlift": ours, "alone": [report([[1, 2, 0, 4]], 4.0)]}
    print_table(reports, task, ("someone", [[1, 2, 3, 4]]))
    floors = [FloorReport(eager_s, 10**9, peak, "torch.mm", 2) for eager_s, peak in ((1.0, 10**10), (20.0, 10**9))]
    print_floor(ours, floors, "float32")
    print_ratios(reports, task)
    lines = capsys.readouterr().out.splitlines()
    mine, other = (next(line for line in lines if line.startswith(name)) for name in ("chairlift ", "transformers"))
    assert mine.split()[1:7] == ["2.0", "7.0", "2.0", "1.0", "..", "9.0"]
    assert "100.0%" in mine
    assert mine.endswith("1/1")
    assert "50.0%" in other
    assert other.endswith("0/1")
    assert any("2.00x (of it 0.50 s before the first step)" in line for line in lines)
    assert any("10 GFLOP/s (torch.mm, 2 threads)" in line and line.endswith(": 5%") for line in lines)
    assert lines[-1] == "float32, chairlift / transformers generate, alone: 2.00x (aim: at least 1.0x)"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--dtype", "float32,float8"], "float8 unknown; there are float32, bfloat16"),
        (["--engines", "vllm"], "vllm unknown"),
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--requests", "65"], "the oracle has 64"),
    ],
)
def test_a_command_that_means_nothing_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert told in capsys.readouterr().err


@pytest.mark.smollm2
def test_a_quick_comparison_runs_to_its_ratios() -> None:
    command = [sys.executable, "benches/peers.py", "--workload", "single", "--quick", "--engines", "chairlift,alone"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert sum(line.endswith(" 1/1") for line in lines) == 2
    assert any(line.startswith("  eager floor:") for line in lines)
    assert lines[-1].startswith("float32, chairlift / transformers generate, alone: ")
