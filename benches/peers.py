"""chairlift and its peers on the same prompts, one command a workload.

    python benches/peers.py                             # the oracle's texts, three rounds, fp32
    python benches/peers.py --dtype float32,bfloat16    # both, in turn
    python benches/peers.py --workload mixed            # 256 requests of 16 to 2,048 prompt tokens
    python benches/peers.py --workload shared           # one system prompt of 1,500 tokens for 64 requests
    python benches/peers.py --workload single           # one request alone
    python benches/peers.py --workload single --quick   # a small size of it, once: does it all run?
    python benches/peers.py --engines chairlift,generate_batch --requests 16 --new-tokens 16

Prompts are made of the oracle's texts (tests/oracle), greedy, with eos off, so every engine does exactly the same work.
Rounds are interleaved (A B C D, A B C D, ...), and every measurement is a fresh process: it loads the model,
warms up on two short prompts, then runs once. Timed is the call that takes prompts and returns tokens.
chairlift and transformers set up their cache in that call, OpenVINO when it loads, and so does `started`, which is
chairlift with its manager started before.

Beside the peers, chairlift is held against what its own steps would take in eager torch with attention for free, and
against the machine's peak (benches/floor.py); both are measured in the same rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import openvino_model
from conditions import describe_machine, describe_versions
from engines import ENGINES, PADDED_ROWS, WARM_UP_PROMPTS, WARM_UP_TOKENS
from floor import FloorReport, StepShape, measure_floor
from workloads import ROOT, WORKLOADS, Size, Task, Tokens, expected_tokens, oracle, oracle_cases

DTYPES = ("float32", "bfloat16")
# Whose steps are held against the floor.
OURS = "chairlift"
MIB = 2**20


@dataclass(frozen=True)
class Report:
    """What one process measured."""

    wall_s: float
    prompt_tokens: int
    tokens: list[Tokens]
    """The new ones of each request."""
    rss_growth_mib: float
    """Peak resident memory of warm-up and run over that of the loaded model."""
    peak_rss_mib: float
    threads: int
    steps: list[StepShape] | None = None
    """chairlift's."""
    set_up_s: float | None = None
    """From the call to its first step."""

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> Report:
        """A report from what `dataclasses.asdict` made of it."""
        report = cls(**fields)
        return report if report.steps is None else replace(report, steps=[StepShape(*step) for step in report.steps])

    @property
    def generated_tokens(self) -> int:
        """Of all requests."""
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def generated_per_s(self) -> float:
        """Generated tokens per second."""
        return self.generated_tokens / self.wall_s

    @property
    def total_per_s(self) -> float:
        """Prompt and generated tokens per second."""
        return (self.prompt_tokens + self.generated_tokens) / self.wall_s

    @property
    def computed_prompt_tokens(self) -> int | None:
        """Prompt tokens that were computed, not found in the prefix cache, where the steps are known."""
        if self.steps is None:
            return None
        # The last new token of a request is never computed with.
        return sum(step.tokens for step in self.steps) - sum(len(tokens) - 1 for tokens in self.tokens)


@dataclass(frozen=True)
class Agreement:
    """How far tokens are those of a reference."""

    equal: int
    """Requests that are equal to their last token."""
    ties: int
    """How many of them needed a tie that the oracle accepts."""
    leading: int
    """Tokens before the first difference of their request, summed."""
    tokens: int
    """Of the reference."""


# One measurement, in its own process.


def memory_mib(field: str) -> float:
    """A field of this process's status in MiB: `VmRSS` now, `VmHWM` its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / MIB
    raise RuntimeError(f"/proc/self/status has no {field}")


def reset_peak_memory() -> None:
    """Lets `VmHWM` start again from now; where that is not permitted the peak may be the loading's."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        print(f"peak memory could not be reset ({error}): it includes loading", file=sys.stderr)


def measure(engine: str, task: Task) -> Report:
    """Loads, warms up and runs one engine in this process."""
    prompts, new_tokens = task.prompts(), task.size.new_tokens
    generate = ENGINES[engine].load(task)
    loaded = memory_mib("VmRSS")
    reset_peak_memory()
    generate(WARM_UP_PROMPTS, WARM_UP_TOKENS)

    start = time.perf_counter()
    answer = generate(prompts, new_tokens)
    wall = time.perf_counter() - start

    peak = memory_mib("VmHWM")
    threads = len(list(Path("/proc/self/task").iterdir()))
    for number, got in enumerate(answer.tokens):
        if len(got) != new_tokens:
            raise RuntimeError(f"request {number}: {len(got)} tokens, {new_tokens} were asked for")
    log = answer.log
    return Report(
        wall_s=wall,
        prompt_tokens=sum(len(prompt) for prompt in prompts),
        tokens=answer.tokens,
        rss_growth_mib=peak - loaded,
        peak_rss_mib=peak,
        threads=threads,
        steps=None if log is None else log.steps,
        set_up_s=None if log is None or log.first_at is None else log.first_at - start,
    )


def run_part(part: str, task: Task, steps: Sequence[StepShape]) -> Any:
    """The part of a comparison that a child was started for; what it returns goes back as JSON."""
    if part == "floor":
        return asdict(measure_floor(task.dtype, steps))
    if part == "openvino model":
        openvino_model.convert_model()
        return openvino_model.computes_in(task.dtype)
    return asdict(measure(part, task))


def run_child(part: str, task: Task, steps: Sequence[StepShape] = ()) -> Any:
    """`run_part` in a fresh process; RuntimeError with the end of its output if it fails, or with what it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "asked.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps({"part": part, "task": asdict(task), "steps": steps}))
        child = subprocess.run(
            [sys.executable, __file__, "--child", str(asked), str(answer)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if child.returncode != 0:
            raise RuntimeError(f"exit status {child.returncode}\n{child.stdout[-2000:]}")
        got = json.loads(answer.read_text())
        if "refused" in got:
            raise RuntimeError(got["refused"])
        return got["answer"]


def serve_parent(asked: Path, answer: Path) -> None:
    """The child's end of `run_child`."""
    order = json.loads(asked.read_text())
    steps = [StepShape(*step) for step in order["steps"]]
    try:
        got = {"answer": run_part(order["part"], Task.of_fields(order["task"]), steps)}
    except openvino_model.Refused as refused:
        got = {"refused": str(refused)}
    answer.write_text(json.dumps(got))


# The parent: rounds and tables.


class Comparison:
    """Every engine in every dtype, in interleaved rounds."""

    def __init__(self, tasks: Sequence[Task], engines: Sequence[str]) -> None:
        """One task a dtype."""
        self.tasks = tasks
        self.reports: dict[str, dict[str, list[Report]]] = {
            task.dtype: {engine: [] for engine in engines} for task in tasks
        }
        self.floors: dict[str, list[FloorReport]] = {task.dtype: [] for task in tasks}
        self.failed = False

    def prepare(self) -> None:
        """Has OpenVINO's model made, where it is compared, and says what it computes in."""
        for task in self.tasks:
            if "openvino" in self.reports[task.dtype]:
                try:
                    told = run_child("openvino model", task)
                    print(f"OpenVINO:  {task.dtype}: {told}", flush=True)
                except RuntimeError as error:
                    self._drop("openvino", task, error)

    def run_round(self, number: int) -> None:
        """One measurement of each engine in each dtype, and one of the floor under chairlift's."""
        for task in self.tasks:
            runs = self.reports[task.dtype]
            for engine in list(runs):
                try:
                    report = Report.of_fields(run_child(engine, task))
                except RuntimeError as error:
                    self._drop(engine, task, error)
                    continue
                runs[engine].append(report)
                told = f"{report.generated_per_s:.1f} generated tok/s"
                print(f"round {number} {task.dtype} {engine}: {told}", file=sys.stderr)
            if runs.get(OURS):
                try:
                    floor = FloorReport(**run_child("floor", task, runs[OURS][-1].steps or ()))
                except RuntimeError as error:
                    print(f"the floor failed in {task.dtype}: {error}", file=sys.stderr)
                    self.failed = True
                else:
                    self.floors[task.dtype].append(floor)

    def _drop(self, engine: str, task: Task, error: RuntimeError) -> None:
        print(f"{engine} failed in {task.dtype}: {error}", file=sys.stderr)
        self.failed = True
        del self.reports[task.dtype][engine]

    def reference(self) -> tuple[str, list[Tokens]] | None:
        """Whose tokens the others are compared with, and the tokens; None where that engine did not run."""
        first = self.tasks[0]
        engine = WORKLOADS[first.workload].reference
        if engine is None:
            return "generate alone, float32 (the oracle)", expected_tokens(first.size)
        reports = self.reports[first.dtype].get(engine)
        return (f"{ENGINES[engine].title}, {first.dtype}", reports[0].tokens) if reports else None


def agreement(got: Sequence[Tokens], expected: Sequence[Tokens]) -> Agreement:
    """How far tokens are equal to those expected, request by request."""
    leading = [leading_equal(one, other) for one, other in zip(got, expected, strict=True)]
    equal = sum(one == other for one, other in zip(got, expected, strict=True))
    return Agreement(equal, 0, sum(leading), sum(len(tokens) for tokens in expected))


def leading_equal(got: Tokens, expected: Tokens) -> int:
    """Tokens before the first difference."""
    pairs = enumerate(zip(got, expected, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(got), len(expected)))


def with_ties(plain: Agreement, got: Sequence[Tokens], size: Size) -> Agreement:
    """The same with the ties that the oracle accepts between fp32 and fp32."""
    judged = list(zip(got, oracle_cases(size), strict=True))
    ties = sum(oracle.ties_used(tokens, case, new_tokens=size.new_tokens) for tokens, case in judged)
    equal = sum(oracle.mismatch(tokens, case, new_tokens=size.new_tokens) is None for tokens, case in judged)
    return replace(plain, equal=equal, ties=ties)


def print_conditions(tasks: Sequence[Task], engines: Sequence[str], rounds: int) -> None:
    """What the numbers below hold for."""
    task, prompts = tasks[0], tasks[0].prompts()
    lengths = [len(prompt) for prompt in prompts]
    print(f"CPU:       {describe_machine()}")
    print(f"versions:  {describe_versions('chairlift', 'torch', 'transformers', 'openvino-genai')}")
    print(f"model:     SmolLM2-135M-Instruct (Q4_1 unpacked), {' and '.join(task.dtype for task in tasks)}")
    print(f"workload:  {task.workload}: {WORKLOADS[task.workload].about}")
    print(
        f"           {len(prompts)} requests, {sum(lengths)} prompt tokens ({min(lengths)} to {max(lengths)}), "
        f"{task.size.new_tokens} new tokens each, greedy, eos off"
    )
    print(f"settings:  at most {task.max_batch_tokens} tokens a step, prefix caching on, defaults otherwise")
    if "padded" in engines:
        print(f"           padded: batches of at most {PADDED_ROWS} prompts, by length")
    print(f"rounds:    {rounds}, interleaved: {', '.join(engines)}; a fresh process each", flush=True)


def print_table(
    reports: Mapping[str, Sequence[Report]], task: Task, reference: tuple[str, list[Tokens]] | None
) -> None:
    """One line an engine: medians over the rounds, the least agreement of any."""
    print(f"\n{task.dtype}; equal to: {reference[0] if reference else 'nothing, its engine did not run'}")
    print(
        f"{'engine':<29} {'gen tok/s':>9} {'total tok/s':>11} {'wall s':>7} {'min .. max':>14} "
        f"{'RSS + MiB':>9} {'peak MiB':>8} {'threads':>7} {'prefilled':>9} {'tokens equal':>12}  requests equal"
    )
    for engine, runs in reports.items():
        walls = [run.wall_s for run in runs]
        prefilled = runs[0].computed_prompt_tokens
        share, verdict = equality(runs, task, reference)
        print(
            f"{ENGINES[engine].title:<29} "
            f"{median(run.generated_per_s for run in runs):>9.1f} "
            f"{median(run.total_per_s for run in runs):>11.1f} "
            f"{median(walls):>7.1f} "
            f"{min(walls):>6.1f} .. {max(walls):<4.1f} "
            f"{median(run.rss_growth_mib for run in runs):>9.0f} "
            f"{median(run.peak_rss_mib for run in runs):>8.0f} "
            f"{median(run.threads for run in runs):>7.0f} "
            f"{'-' if prefilled is None else prefilled:>9} "
            f"{share:>12}  {verdict}"
        )


def equality(runs: Sequence[Report], task: Task, reference: tuple[str, list[Tokens]] | None) -> tuple[str, str]:
    """The share of tokens before the first difference, and the requests that have none; of the run that has most."""
    if reference is None:
        return "-", "-"
    found = [agreement(run.tokens, reference[1]) for run in runs]
    accepts_ties = WORKLOADS[task.workload].reference is None and task.dtype == "float32"
    if accepts_ties:
        found = [with_ties(one, run.tokens, task.size) for one, run in zip(found, runs, strict=True)]
    worst = min(found, key=lambda one: (one.equal, one.leading))
    verdict = f"{worst.equal}/{task.size.requests}" + (f", {worst.ties} by a tie" if accepts_ties else "")
    return f"{worst.leading / worst.tokens:.1%}", verdict


def print_floor(runs: Sequence[Report], floors: Sequence[FloorReport], dtype: str) -> None:
    """chairlift's median time over the eager floor, and its share of the peak.

    Of floors and peaks the best of all rounds counts: whatever disturbs them would flatter us.
    """
    wall = median(run.wall_s for run in runs)
    eager_s = min(floor.eager_s for floor in floors)
    best = max(floors, key=lambda floor: floor.peak_flop_per_s)
    reached = floors[-1].flop / wall
    set_up = median(run.set_up_s or 0.0 for run in runs)
    print(f"\n{ENGINES[OURS].title} in {dtype}, against what is possible")
    print(
        f"  eager floor:  its {len(runs[-1].steps or ())} forwards with attention for free take {eager_s:.2f} s, "
        f"chairlift {wall:.2f} s: {wall / eager_s:.2f}x (of it {set_up:.2f} s before the first step)"
    )
    print(
        f"  peak:         {best.peak_flop_per_s / 1e9:.0f} GFLOP/s ({best.peak_kernel}, {best.torch_threads} threads); "
        f"the run's {floors[-1].flop / 1e9:.0f} GFLOP at {reached / 1e9:.0f} GFLOP/s: "
        f"{reached / best.peak_flop_per_s:.0%}"
    )


def print_ratios(reports: Mapping[str, Sequence[Report]], task: Task) -> None:
    """Our median speed (the first engine's, where ours did not run) over every peer's, and what it is meant to be."""
    speed = {engine: median(run.generated_per_s for run in runs) for engine, runs in reports.items()}
    ours = [engine for engine in reports if ENGINES[engine].ours]
    for engine in ours or list(reports)[:1]:
        for peer in reports:
            if peer in (engine, *ours):
                continue
            aim = WORKLOADS[task.workload].aims.get(peer) if ours else None
            meant = "" if aim is None else f" (aim: at least {aim:.1f}x)"
            ratio = speed[engine] / speed[peer]
            print(f"{task.dtype}, {ENGINES[engine].title} / {ENGINES[peer].title}: {ratio:.2f}x{meant}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what it cannot mean is refused here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="texts", help="(default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small size of it, one round: a test, no measurement")
    parser.add_argument("--dtype", default="float32", help=f"comma-separated, of {', '.join(DTYPES)}")
    parser.add_argument("--engines", help=f"comma-separated, of {', '.join(ENGINES)} (default: the workload's)")
    parser.add_argument("--rounds", type=int, help="measurements of each engine (default 3)")
    parser.add_argument("--requests", type=int, help="prompts (default: the workload's)")
    parser.add_argument("--new-tokens", type=int, help="of each (default: the workload's)")
    parser.add_argument("--longest-prompt", type=int, help="in tokens (default: the workload's)")
    parser.add_argument("--max-batch-tokens", type=int, default=512, help="tokens a step (default %(default)s)")
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    for name in ("rounds", "requests", "new_tokens", "longest_prompt", "max_batch_tokens"):
        if (value := getattr(parsed, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: at least 1")
    workload = WORKLOADS[parsed.workload]
    size = workload.quick if parsed.quick else workload.full
    given = {name: getattr(parsed, name) for name in ("requests", "new_tokens", "longest_prompt")}
    parsed.size = replace(size, **{name: value for name, value in given.items() if value is not None})
    try:
        workload.make(parsed.size)
    except ValueError as error:
        parser.error(str(error))
    parsed.rounds = parsed.rounds or (1 if parsed.quick else 3)
    parsed.dtype = _names(parser, "--dtype", parsed.dtype, DTYPES)
    if parsed.engines is None:
        parsed.engines = [name for name in workload.engines if importlib.util.find_spec(ENGINES[name].module)]
    else:
        parsed.engines = _names(parser, "--engines", parsed.engines, ENGINES)
    return parsed


def _names(
    parser: argparse.ArgumentParser, option: str, given: str, known: Sequence[str] | Mapping[str, Any]
) -> list[str]:
    """The names of a comma-separated list, each once."""
    names = list(dict.fromkeys(given.split(",")))
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{option}: {', '.join(unknown)} unknown; there are {', '.join(known)}")
    return names


def main() -> int:
    """Runs the comparison; in a child, one part of it."""
    arguments = parse_arguments()
    if arguments.child:
        serve_parent(*arguments.child)
        return 0
    tasks = [Task(arguments.workload, dtype, arguments.size, arguments.max_batch_tokens) for dtype in arguments.dtype]
    print_conditions(tasks, arguments.engines, arguments.rounds)
    comparison = Comparison(tasks, arguments.engines)
    comparison.prepare()
    for number in range(1, arguments.rounds + 1):
        comparison.run_round(number)
    measured = [task for task in tasks if comparison.reports[task.dtype]]
    for task in measured:
        print_table(comparison.reports[task.dtype], task, comparison.reference())
    for task in measured:
        if floors := comparison.floors[task.dtype]:
            print_floor(comparison.reports[task.dtype][OURS], floors, task.dtype)
    print()
    for task in measured:
        print_ratios(comparison.reports[task.dtype], task)
    return 1 if comparison.failed else 0


if __name__ == "__main__":
    sys.exit(main())
