"""What a step costs the host: `advance` through the boundary, arena written, with a device that computes nothing.

    python benches/host_step.py                 # chairlift, the same in plain Python, and transformers
    python benches/host_step.py --rounds 9
    python benches/host_step.py --no-peers      # chairlift alone, seconds

Every running sequence decodes. Timed is what commits one step and plans the next: for chairlift the whole call, GIL
released, as the loop makes it, for the peers as the conditions say that are printed first. Medians over the steps of
a round, then over the rounds; engines in turn, in one process; page 256.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import LlamaConfig, LlamaForCausalLM

import chairlift
from chairlift import _native
from conditions import describe_machine, describe_versions
from plain_engine import PlainEngine, PlannedStep, check_equal_work

PAGE_SIZE = 256
VOCAB_SIZE = 50_000
STEPS = 60
# Steps before any is timed: memory that is touched for the first time is made by the system then.
WARM_UP = 80
BESIDE_STEPS = 600
PAUSE_S = 0.005
PEER_RUNNING = (64, 256, 1024)
PEER_CONTEXT = 512
RATIOS_AT = 256
# Both keep their prefix caches up to date.
PREFIX_SHARING = True

BLOCK_TABLE, VARLEN = "transformers, block table", "transformers, varlen"
CHAIRLIFT, PLAIN = "chairlift", "plain Python"

CONDITIONS = f"""\
steps:         decodes alone, greedy, page {PAGE_SIZE}, contexts from 0.5 to 1.5 of the mean; no forward, no sampling;
               after {WARM_UP} steps that are not timed (transformers: none)
chairlift:     `advance`: commit of the last step, and the plan of the next one in the arena"""
PEER_CONDITIONS = f"""\
plain Python:  the same by benches/plain_engine.py, without a prefix cache; its arenas were equal in {{compared}} steps
transformers:  `prepare_next_batch` (schedule_batch and preparation of the inputs) and `update_batch` of its own batch
               processor, synchronous loop; no attention mask, one torch thread,
               prefix sharing {"on" if PREFIX_SHARING else "off"}
  block table: its decode fast path, which it takes on CUDA only: the host's code of it is driven here by setting
               max_blocks_per_request after its config is resolved, and the table is filled in the CPU's memory
  varlen:      its other path, the one that it takes on a CPU: an index for each token of each context"""


@dataclass(frozen=True)
class Load:
    """What the engine holds while it is timed."""

    running: int
    context: int  # tokens of a running sequence in the mean
    queued: int = 0  # requests that wait
    streaming: bool = False

    def lengths(self) -> npt.NDArray[np.int64]:
        """Prompts of the running sequences: spread evenly from half the context to one and a half, in no order.

        Alike lengths would start all pages in one step, and would put the ends of the sequences at addresses alike,
        which caches serve better or worse than any real mixture.
        """
        number = np.arange(self.running)
        # The last term has match units, as pages, complete in every step for some.
        spread = self.context // 2 + number * self.context // self.running + number % 32
        return np.random.default_rng(0).permutation(spread)

    def prompts(self) -> list[npt.NDArray[np.int64]]:
        """The prompts; no two begin alike."""
        return [(np.arange(length, dtype=np.int64) + n) % VOCAB_SIZE for n, length in enumerate(self.lengths())]

    def sizes(self) -> dict[str, Any]:
        """What any engine needs to hold it: no sequence starves, and one step takes every prompt in."""
        lengths = self.lengths()
        return {
            "page_size": PAGE_SIZE,
            "num_blocks": int((-(-(lengths + WARM_UP + STEPS + 3) // PAGE_SIZE)).sum()),
            "max_requests_per_batch": self.running,
            "max_batch_tokens": int(lengths.sum()),
            "vocab_size": VOCAB_SIZE,
        }


def engine_config(**sizes: Any) -> _native.EngineConfig:
    """The engine's config in every measurement: full attention, and no room held back."""
    return _native.EngineConfig(groups=[("full", 0)], safety_margin=0.0, **sizes)


def check_step(step: _native.Step | PlannedStep | None, load: Load) -> None:
    """Every sequence decodes, or what was timed is something else."""
    shape = None if step is None else (step.rows, step.decodes, step.tokens, step.sampled)
    if shape != (load.running,) * 4:
        raise RuntimeError(f"not a step of {load.running} decodes: {shape}")


def running_engine(load: Load, extra_blocks: int = 0) -> _native.Engine:
    """An engine whose sequences all decode."""
    sizes = load.sizes()
    sizes["num_blocks"] += extra_blocks
    engine = _native.Engine(engine_config(**sizes))
    arena = np.zeros(engine.arena_capacity, np.int32)
    engine.bind_slot(0, arena, np.ones(load.running, np.int32), np.zeros(load.running, np.float32))
    for prompt in load.prompts():
        engine.submit(prompt, max_new_tokens=100_000, streaming=load.streaming)
    engine.advance(None, 0, 0.0)
    return engine


def chairlift_us(load: Load) -> float:
    """Microseconds of one `advance` with that load, the median of `STEPS`."""
    engine = running_engine(load)
    waiting = np.ones(64, np.int64)
    for _ in range(load.queued):
        engine.submit(waiting, max_new_tokens=16)
    for _ in range(WARM_UP):  # the first takes the queue in
        engine.advance(0, 0, 0.0)
        while engine.take_next() is not None:
            pass
    times = []
    for _ in range(STEPS):
        start = time.perf_counter_ns()
        step = engine.advance(0, 0, 0.0)
        times.append((time.perf_counter_ns() - start) / 1000)
        check_step(step, load)
        while engine.take_next() is not None:
            pass
    return median(times)


def plain_us(load: Load) -> float:
    """The same of the engine in plain Python."""
    engine = PlainEngine(**load.sizes())
    # Per token an id, a position and a write slot; per row what is left of the arena.
    arena = np.zeros(3 * int(load.lengths().sum()) + 64 * load.running, np.int32)
    engine.bind(arena, np.ones(load.running, np.int32))
    for prompt in load.prompts():
        engine.submit(prompt.tolist(), max_new_tokens=100_000)
    engine.advance(commit=False)
    for _ in range(WARM_UP):
        engine.advance(commit=True)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter_ns()
        step = engine.advance(commit=True)
        times.append((time.perf_counter_ns() - start) / 1000)
        check_step(step, load)
    return median(times)


def transformers_engines() -> dict[str, Callable[[Load], float]]:
    """The same of transformers, by path."""
    from transformers_engine import StepPath, TransformersEngine, quiet, tiny_llama

    quiet()
    model = tiny_llama(VOCAB_SIZE)

    def measure(path: StepPath) -> Callable[[Load], float]:
        def step_us(load: Load) -> float:
            engine = TransformersEngine(
                model, load.prompts(), path, page_size=PAGE_SIZE, steps=STEPS, prefix_sharing=PREFIX_SHARING
            )
            times = [engine.step_us() for _ in range(STEPS)]
            engine.check_generated(STEPS + 1)
            return median(times)

        return step_us

    return {BLOCK_TABLE: measure(StepPath.BLOCK_TABLE), VARLEN: measure(StepPath.VARLEN)}


def measure_in_turn(
    engines: dict[str, Callable[[Load], float]], loads: list[Load], rounds: int
) -> dict[tuple[str, Load], float]:
    """Median microseconds of each engine with each load."""
    results: dict[tuple[str, Load], list[float]] = {(name, load): [] for load in loads for name in engines}
    for _ in range(rounds):
        for name, load in results:
            results[name, load].append(engines[name](load))
    return {key: median(values) for key, values in results.items()}


def compare_peers(rounds: int) -> list[str]:
    """Prints the table of the engines; returns the ratios."""
    engines: dict[str, Callable[[Load], float]] = {CHAIRLIFT: chairlift_us, PLAIN: plain_us, **transformers_engines()}
    loads = [Load(running, PEER_CONTEXT) for running in PEER_RUNNING]
    cost = measure_in_turn(engines, loads, rounds)
    print()
    print(f"{'engine':<25}  running  context    us a step   us a running sequence  x chairlift")
    for (name, load), microseconds in cost.items():
        columns = f"{name:<25}  {load.running:7}  {load.context:7}  {microseconds:11.1f}"
        print(f"{columns}  {microseconds / load.running:22.3f}  {microseconds / cost[CHAIRLIFT, load]:11.1f}")
    load = Load(RATIOS_AT, PEER_CONTEXT)
    pairs = [(BLOCK_TABLE, PLAIN), (VARLEN, PLAIN), (PLAIN, CHAIRLIFT), (BLOCK_TABLE, CHAIRLIFT), (VARLEN, CHAIRLIFT)]
    return [f"{a} / {b}, {RATIOS_AT} running: {cost[a, load] / cost[b, load]:.1f}x" for a, b in pairs]


def scale_chairlift(rounds: int) -> list[str]:
    """Prints how the step's cost grows, and how it does not; returns the ratios."""
    base = Load(1024, 512)
    longer, queues = Load(1024, 8192), [Load(1024, 512, 10_000), Load(1024, 512, 100_000)]
    loads = [Load(256, 512), base, Load(4096, 512), Load(4096, 512, streaming=True), longer, *queues]
    cost = measure_in_turn({CHAIRLIFT: chairlift_us}, loads, rounds)
    print()
    print("chairlift: running  context   queued  streaming   us a step   us a running sequence")
    for (_, load), microseconds in cost.items():
        columns = f"{load.running:18}  {load.context:7}  {load.queued:7}  {load.streaming!s:>9}"
        print(f"{columns}  {microseconds:10.1f}  {microseconds / load.running:22.3f}")
    ratios = [f"chairlift, context 8,192 / 512: {cost[CHAIRLIFT, longer] / cost[CHAIRLIFT, base]:.2f}x"]
    for load in queues:
        ratio = cost[CHAIRLIFT, load] / cost[CHAIRLIFT, base]
        ratios.append(f"chairlift, {load.queued:,} queued / none: {ratio:.2f}x")
    return ratios


def beside_busy_python() -> list[str]:
    """The time inside `advance`, a pause of 5 ms after each, quiet and beside a thread that never lets the GIL go by
    itself."""
    load = Load(1024, 512)
    p99 = {}
    for name in ("quiet", "busy"):
        engine = running_engine(load, extra_blocks=load.running * (BESIDE_STEPS // PAGE_SIZE + 1))
        done = threading.Event()
        thread = threading.Thread(target=count, args=(done,))
        if name == "busy":
            thread.start()
        times = []
        for _ in range(BESIDE_STEPS):
            engine.advance(0, 0, 0.0)
            times.append(engine.advance_ns / 1000)
            time.sleep(PAUSE_S)  # a forward: what it leaves of the caches is the same with and without the thread
        done.set()
        if name == "busy":
            thread.join()
        p99[name] = float(np.percentile(times, 99))
        print(f"inside advance, 1,024 running, {name}: median {median(times):.1f} us, p99 {p99[name]:.1f} us")
    return [f"inside advance, p99 beside a busy Python thread / quiet: {p99['busy'] / p99['quiet']:.2f}x"]


def count(done: threading.Event) -> int:
    """Pure Python, for as long as it is wanted."""
    number = 0
    while not done.is_set():
        number += 1
    return number


def submit_a_million() -> None:
    """`add_requests` of a million prompts that stand in the rows of an array, in a manager that is not started."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    sizes = chairlift.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512)
    manager = chairlift.init_continuous_batching(model, continuous_batching_config=sizes)
    prompts = np.random.default_rng(0).integers(0, VOCAB_SIZE, (1_000_000, 128))
    start = time.perf_counter()
    labels = manager.add_requests(prompts, max_new_tokens=16)
    seconds = time.perf_counter() - start
    print(f"add_requests of {len(labels):,} prompts of 128 tokens from rows of an array: {seconds:.2f} s")


def print_conditions(rounds: int, peers: bool) -> None:
    """What the figures below hold for; with peers, after the proof that plain Python does the engine's work."""
    print(f"CPU:           {describe_machine()}")
    print(f"versions:      {describe_versions('chairlift', 'torch', 'transformers')}")
    print(f"rounds:        {rounds} of {STEPS} steps, engines in turn in one process; medians of steps, then of rounds")
    print(CONDITIONS)
    if peers:
        print(PEER_CONDITIONS.format(compared=check_equal_work(engine_config)), flush=True)


def main() -> None:
    """Prints the conditions, the tables, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with plain Python and transformers (default: yes)",
    )
    arguments = parser.parse_args()
    print_conditions(arguments.rounds, arguments.peers)
    ratios = scale_chairlift(arguments.rounds)
    print()
    ratios += beside_busy_python()
    submit_a_million()
    if arguments.peers:
        ratios += compare_peers(arguments.rounds)
    print()
    print("\n".join(ratios))


if __name__ == "__main__":
    main()
