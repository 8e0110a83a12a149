"""chairlift and its peers on the same prompts, one command.

    python benches/peers.py                          # every engine that is importable, three rounds, fp32
    python benches/peers.py --dtype bfloat16 --rounds 5
    python benches/peers.py --engines chairlift,generate_batch --requests 16 --new-tokens 16

The prompts are the oracle's (tests/oracle), greedy, with eos off, so every engine does exactly the same work.
Rounds are interleaved (A B C D, A B C D, ...), and every measurement is a fresh process: it loads the model,
warms up on two short prompts, then runs once. Timed is the call that takes prompts and returns tokens.
chairlift and transformers set up their cache in that call, OpenVINO when it loads.

What OpenVINO runs: GenAI reads the GGUF file and builds its graph, but it rounds the zero points of Q4_1 to
whole numbers, which changes the weights by about a tenth. So its graph is kept, and its weights are replaced
by the unpacked fp32 ones that the other engines use; once, in the cache folder. K and V are held in the run's
dtype (the default of its CPU plugin is 8-bit).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import oracle  # noqa: E402 (found only from the root)

# Prompts in, new tokens of each out.
Generate = Callable[[Sequence[list[int]], int], list[list[int]]]

# The graphs that GenAI writes beside the model. Prompts are token ids here, but the pipeline wants them.
TOKENIZER_GRAPHS = ("openvino_tokenizer", "openvino_detokenizer")
# Tokens in one K and V block of OpenVINO's CPU plugin.
OPENVINO_BLOCK = 32
WARM_UP_PROMPTS = ([504, 808, 2775, 288], [9690, 198, 2683, 359, 253])
WARM_UP_TOKENS = 4
MIB = 2**20


@dataclass(frozen=True)
class Workload:
    """What every engine is asked to do."""

    dtype: str
    requests: int
    new_tokens: int
    max_batch_tokens: int

    def cases(self) -> list[oracle.OracleCase]:
        """The first `requests` cases of the oracle."""
        return oracle.load()[: self.requests]


@dataclass(frozen=True)
class Report:
    """What one process measured."""

    wall_s: float
    prompt_tokens: int
    generated_tokens: int
    equal: int
    """Requests whose tokens all match the oracle."""
    ties: int
    """How many of them needed an accepted tie."""
    rss_growth_mib: float
    """Peak resident memory of warm-up and run over that of the loaded model."""
    peak_rss_mib: float
    threads: int

    @property
    def generated_per_s(self) -> float:
        """Generated tokens per second."""
        return self.generated_tokens / self.wall_s

    @property
    def total_per_s(self) -> float:
        """Prompt and generated tokens per second."""
        return (self.prompt_tokens + self.generated_tokens) / self.wall_s


# The engines. Each loads its model and returns the call that is timed.


def load_torch_model(work: Workload) -> Any:
    """The model that chairlift and transformers share, in the run's dtype."""
    import torch

    from chairlift.cli.demo import load_demo

    model, _ = load_demo(getattr(torch, work.dtype))
    # `generate` fills what a generation config leaves open from the model's own, so eos goes there.
    model.generation_config.eos_token_id = None
    # The file is mapped: weights are resident, and counted as loaded, once they are read.
    for parameter in model.parameters():
        parameter.sum()
    return model


def ordered_tokens(results: dict[str, Any], count: int) -> list[list[int]]:
    """The tokens of each result in the order of the inputs; RuntimeError if one is missing or failed."""
    tokens = []
    for label in (f"req_{n}" for n in range(count)):
        result = results.get(label)
        if result is None or result.error is not None:
            raise RuntimeError(f"{label}: {'no result' if result is None else result.error}")
        tokens.append(list(result.generated_tokens))
    return tokens


def chairlift_engine(work: Workload) -> Generate:
    """`chairlift.generate_batch`."""
    from transformers import GenerationConfig

    import chairlift

    model = load_torch_model(work)

    def generate(prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        results = chairlift.generate_batch(
            model,
            list(prompts),
            generation_config=GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1),
            continuous_batching_config=chairlift.ContinuousBatchingConfig(max_batch_tokens=work.max_batch_tokens),
        )
        return ordered_tokens(results, len(prompts))

    return generate


def generate_batch_engine(work: Workload) -> Generate:
    """transformers' own `model.generate_batch`."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = load_torch_model(work)
    if not type(model).generate_batch.__module__.startswith("transformers."):
        raise RuntimeError("generate_batch is not transformers' own in this process; is chairlift installed into it?")

    def generate(prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        results = model.generate_batch(
            list(prompts),
            generation_config=GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(max_batch_tokens=work.max_batch_tokens),
        )
        return ordered_tokens(results, len(prompts))

    return generate


def padded_engine(work: Workload) -> Generate:
    """transformers' `model.generate`, all prompts padded on the left into one batch."""
    import torch

    model = load_torch_model(work)

    def generate(prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), model.config.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=model.config.pad_token_id,
        )
        return output[:, width:].tolist()

    return generate


def openvino_engine(work: Workload) -> Generate:
    """OpenVINO GenAI's continuous batching."""
    import numpy as np
    import openvino
    import openvino_genai

    precision = {"float32": "f32", "bfloat16": "bf16"}[work.dtype]
    able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if precision == "bf16" and "BF16" not in able:
        raise RuntimeError(f"OpenVINO would compute in fp32: on this CPU its plugin knows {', '.join(able)}")
    lengths = [len(case.prompt) + work.new_tokens for case in work.cases()]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = work.max_batch_tokens
    scheduler.num_kv_blocks = sum(-(-length // OPENVINO_BLOCK) for length in lengths) + len(WARM_UP_PROMPTS)
    scheduler.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        openvino_folder(),
        scheduler,
        "CPU",
        {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision},
    )

    def generate(prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.do_sample = False
        config.ignore_eos = True
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [config] * len(inputs))
        return [list(result.m_generation_ids[0]) for result in results]

    return generate


ENGINES: dict[str, tuple[str, Callable[[Workload], Generate], str]] = {
    # name: (title in the table, how to load it, module it needs)
    "chairlift": ("chairlift", chairlift_engine, "chairlift"),
    "generate_batch": ("transformers generate_batch", generate_batch_engine, "transformers"),
    "padded": ("transformers generate, padded", padded_engine, "transformers"),
    "openvino": ("OpenVINO GenAI", openvino_engine, "openvino_genai"),
}


# OpenVINO's model.


def openvino_folder() -> Path:
    """Where the converted model lies."""
    from chairlift.cli.demo import demo_model_dir

    return demo_model_dir() / "openvino-fp32"


def convert_for_openvino() -> None:
    """Writes GenAI's own graph of the model with the unpacked fp32 weights in it, once."""
    import numpy as np
    import openvino
    import openvino_genai
    import torch
    from openvino import opset13

    from chairlift.cli.demo import WEIGHTS_NAME, load_demo

    target = openvino_folder()
    if target.exists():
        return
    model, _ = load_demo(torch.float32)
    left = {name: weight.detach().numpy() for name, weight in model.named_parameters() if weight.dim() == 2}

    with tempfile.TemporaryDirectory(dir=target.parent) as scratch_name:
        scratch = Path(scratch_name)
        packed = scratch / WEIGHTS_NAME  # GenAI writes its graph beside it
        packed.symlink_to(target.parent / WEIGHTS_NAME)
        openvino_genai.LLMPipeline(packed, "CPU", enable_save_ov_model=True)
        graph = openvino.Core().read_model(scratch / "openvino_model.xml")

        # A packed weight ends in: (codes - zero points) * scales, reshape to two dimensions, convert to fp32.
        unpacked = [
            node.output(0)
            for node in graph.get_ordered_ops()
            if node.get_type_name() == "Convert"
            and node.input_value(0).get_node().get_type_name() == "Reshape"
            and node.get_output_partial_shape(0).is_static
            and len(node.get_output_shape(0)) == 2
        ]
        if len(unpacked) != len(left):
            raise RuntimeError(f"the graph has {len(unpacked)} packed weights, the model {len(left)}")
        # The graph's weights have no names, so each is recognised by its values: though rounded, they are
        # far nearer to their own (a relative distance of 0.1) than to any other (1.0).
        rounded = openvino.compile_model(openvino.Model(unpacked, []), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})({})
        for index, output in enumerate(unpacked):
            values = rounded[index]
            distances = {
                name: float(np.abs(weight - values).mean() / np.abs(values).mean())
                for name, weight in left.items()
                if weight.shape == values.shape
            }
            name = min(distances, key=distances.__getitem__)
            if distances[name] > 0.3:
                raise RuntimeError(f"no weight of the model is near number {index} of the graph: {distances[name]:.2f}")
            exact = opset13.constant(left.pop(name)).output(0)
            for user in output.get_target_inputs():
                user.replace_source_output(exact)
        graph.validate_nodes_and_infer_types()

        finished = scratch / "finished"
        finished.mkdir()
        openvino.save_model(graph, finished / "openvino_model.xml", compress_to_fp16=False)
        for stem in TOKENIZER_GRAPHS:
            for suffix in (".xml", ".bin"):
                (scratch / stem).with_suffix(suffix).rename(finished / f"{stem}{suffix}")
        finished.rename(target)


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


def measure(engine: str, work: Workload) -> Report:
    """Loads, warms up and runs one engine in this process."""
    _, load_engine, _ = ENGINES[engine]
    cases = work.cases()
    generate = load_engine(work)
    loaded = memory_mib("VmRSS")
    reset_peak_memory()
    generate(WARM_UP_PROMPTS, WARM_UP_TOKENS)

    start = time.perf_counter()
    tokens = generate([case.prompt for case in cases], work.new_tokens)
    wall = time.perf_counter() - start

    peak = memory_mib("VmHWM")
    threads = len(list(Path("/proc/self/task").iterdir()))
    for case, got in zip(cases, tokens, strict=True):
        if len(got) != work.new_tokens:
            raise RuntimeError(f"{case.id}: {len(got)} tokens, {work.new_tokens} were asked for")
    matches = [
        oracle.mismatch(got, case, new_tokens=work.new_tokens) is None for case, got in zip(cases, tokens, strict=True)
    ]
    ties = [oracle.ties_used(got, case, new_tokens=work.new_tokens) for case, got in zip(cases, tokens, strict=True)]
    return Report(
        wall_s=wall,
        prompt_tokens=sum(len(case.prompt) for case in cases),
        generated_tokens=sum(len(got) for got in tokens),
        equal=sum(matches),
        ties=sum(ties),
        rss_growth_mib=peak - loaded,
        peak_rss_mib=peak,
        threads=threads,
    )


# The parent: rounds and the table.


def run_child(arguments: list[str]) -> None:
    """Runs this file again in a process of its own; RuntimeError with the end of its output if it fails."""
    child = subprocess.run(
        [sys.executable, __file__, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if child.returncode != 0:
        raise RuntimeError(f"exit status {child.returncode}\n{child.stdout[-2000:]}")


def measure_in_child(engine: str, work: Workload) -> Report:
    """One measurement in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        run_child(["--child", engine, "--workload", json.dumps(asdict(work)), "--report", str(path)])
        return Report(**json.loads(path.read_text()))


def describe_cpu() -> str:
    """The processor's name as the kernel has it, and which of the units that bf16 depends on it has."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags", "").split()
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if unit in flags]
    return f"{fields.get('model name') or platform.machine()} ({', '.join(units)})"


def installed_version(package: str) -> str:
    """The installed version of a package, or a dash."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def print_conditions(work: Workload, engines: list[str], rounds: int) -> None:
    """What the numbers below hold for."""
    cases = work.cases()
    lengths = [len(case.prompt) for case in cases]
    packages = ("chairlift", "torch", "transformers", "openvino-genai")
    versions = ", ".join(f"{package} {installed_version(package)}" for package in packages)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"CPU:       {describe_cpu()}, {cores} cores, load {load:.1f} at the start")
    print(f"versions:  {versions}, Python {platform.python_version()}")
    print(f"model:     SmolLM2-135M-Instruct (Q4_1 unpacked), {work.dtype}")
    print(
        f"workload:  {len(cases)} requests, {sum(lengths)} prompt tokens ({min(lengths)} to {max(lengths)}), "
        f"{work.new_tokens} new tokens each, greedy, eos off"
    )
    print(f"settings:  at most {work.max_batch_tokens} tokens a step, prefix caching on, defaults otherwise")
    print(f"rounds:    {rounds}, interleaved: {', '.join(engines)}; a fresh process each", flush=True)


def print_table(reports: dict[str, list[Report]], work: Workload) -> None:
    """One line an engine: medians over the rounds."""
    print()
    print(
        f"{'engine':<29} {'gen tok/s':>9} {'total tok/s':>11} {'wall s':>7} {'min .. max':>14} "
        f"{'RSS + MiB':>9} {'peak MiB':>8} {'threads':>7}  equal to the oracle"
    )
    for engine, runs in reports.items():
        walls = [run.wall_s for run in runs]
        equal = min(run.equal for run in runs)
        ties = max(run.ties for run in runs)
        verdict = f"{equal}/{work.requests}, {ties} by a tie" if work.dtype == "float32" else "-"
        print(
            f"{ENGINES[engine][0]:<29} "
            f"{median(run.generated_per_s for run in runs):>9.1f} "
            f"{median(run.total_per_s for run in runs):>11.1f} "
            f"{median(walls):>7.1f} "
            f"{min(walls):>6.1f} .. {max(walls):<4.1f} "
            f"{median(run.rss_growth_mib for run in runs):>9.0f} "
            f"{median(run.peak_rss_mib for run in runs):>8.0f} "
            f"{median(run.threads for run in runs):>7.0f}  {verdict}"
        )


def print_ratios(reports: dict[str, list[Report]]) -> None:
    """The first engine's median speed over every other's."""
    print()
    ours, *peers = reports
    speed = {engine: median(run.generated_per_s for run in runs) for engine, runs in reports.items()}
    for peer in peers:
        print(f"{ENGINES[ours][0]} / {ENGINES[peer][0]}: {speed[ours] / speed[peer]:.2f}x")


def parse_arguments() -> argparse.Namespace:
    """The command line; what it cannot mean is refused here."""
    most = oracle.load()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", help=f"comma-separated, of {', '.join(ENGINES)} (default: all importable)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each engine (default %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--requests", type=int, default=len(most), help="prompts (default and most: %(default)s)")
    parser.add_argument(
        "--new-tokens", type=int, default=len(most[0].tokens), help="of each (default and most: %(default)s)"
    )
    parser.add_argument("--max-batch-tokens", type=int, default=512, help="tokens a step (default %(default)s)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--workload", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not 1 <= arguments.requests <= len(most):
        parser.error(f"--requests {arguments.requests}: 1 to {len(most)}")
    if not 1 <= arguments.new_tokens <= len(most[0].tokens):
        parser.error(f"--new-tokens {arguments.new_tokens}: 1 to {len(most[0].tokens)}")
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least 1")
    if arguments.engines is None:
        arguments.engines = [name for name, (_, _, module) in ENGINES.items() if importlib.util.find_spec(module)]
    else:
        arguments.engines = arguments.engines.split(",")
        if unknown := [name for name in arguments.engines if name not in ENGINES]:
            parser.error(f"--engines: {', '.join(unknown)} unknown; there are {', '.join(ENGINES)}")
    return arguments


def main() -> int:
    """Runs the comparison; in a child, one part of it."""
    arguments = parse_arguments()
    if arguments.child == "convert":
        convert_for_openvino()
        return 0
    if arguments.child:
        report = measure(arguments.child, Workload(**json.loads(arguments.workload)))
        arguments.report.write_text(json.dumps(asdict(report)))
        return 0

    work = Workload(arguments.dtype, arguments.requests, arguments.new_tokens, arguments.max_batch_tokens)
    print_conditions(work, arguments.engines, arguments.rounds)
    reports: dict[str, list[Report]] = {engine: [] for engine in arguments.engines}
    failed = []
    if "openvino" in reports:
        print("looking for OpenVINO's model, made once", file=sys.stderr)
        try:
            run_child(["--child", "convert"])
        except RuntimeError as error:
            print(f"openvino has no model: {error}", file=sys.stderr)
            failed.append("openvino")
            del reports["openvino"]
    for number in range(1, arguments.rounds + 1):
        for engine in [name for name in arguments.engines if name in reports]:
            try:
                report = measure_in_child(engine, work)
            except RuntimeError as error:
                print(f"{engine} failed in round {number}: {error}", file=sys.stderr)
                failed.append(engine)
                del reports[engine]
                continue
            reports[engine].append(report)
            print(f"round {number} {engine}: {report.generated_per_s:.1f} generated tok/s", file=sys.stderr)
    if reports:
        print_table(reports, work)
        print_ratios(reports)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
