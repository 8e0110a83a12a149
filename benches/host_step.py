"""What a step costs the host: `advance` through the boundary, arena written, with a device that computes nothing.

    python benches/host_step.py                 # 256, 1,024 and 4,096 running
    python benches/host_step.py --rounds 9

Every running sequence decodes. Timed is the whole call that commits one step and plans the next, GIL released, as the
loop makes it. Medians over the steps of a round, then over the rounds; page 256.
"""

from __future__ import annotations

import argparse
import platform
import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from chairlift import _native

PAGE_SIZE = 256
STEPS = 60


@dataclass(frozen=True)
class Load:
    """What the engine holds while it is timed."""

    running: int
    context: int  # tokens of each running sequence
    queued: int  # requests that wait
    streaming: bool = False


def decode_step_us(load: Load) -> float:
    """Microseconds of one `advance` with that load, the median of `STEPS`."""
    blocks_each = -(-(load.context + 2 * STEPS) // PAGE_SIZE) + 1
    engine = _native.Engine(
        _native.EngineConfig(
            page_size=PAGE_SIZE,
            num_blocks=load.running * blocks_each,
            groups=[("full", 0)],
            max_requests_per_batch=load.running,
            max_batch_tokens=load.running * load.context,  # one step takes every prompt in
            vocab_size=50_000,
            safety_margin=0.0,
        )
    )
    arena = np.zeros(engine.arena_capacity, np.int32)
    tokens, logprobs = np.ones(load.running, np.int32), np.zeros(load.running, np.float32)
    engine.bind_slot(0, arena, tokens, logprobs)
    prompt = np.arange(load.context, dtype=np.int64) % 50_000
    for _ in range(load.running):
        engine.submit(prompt, max_new_tokens=100_000, streaming=load.streaming)
    waiting = np.ones(64, np.int64)
    now = 0.0
    engine.advance(None, 0, now)
    for _ in range(load.queued):
        engine.submit(waiting, max_new_tokens=16)
    engine.advance(0, 0, now)  # takes the queue in
    times = []
    for _ in range(STEPS):
        start = time.perf_counter_ns()
        engine.advance(0, 0, now)
        times.append((time.perf_counter_ns() - start) / 1000)
        while engine.take_next() is not None:
            pass
    return median(times)


def main() -> None:
    """Prints the conditions, the table, and how flat it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    machine = platform.processor() or platform.machine()
    print(f"{machine}, Python {platform.python_version()}, {rounds} rounds of {STEPS} steps")
    loads = [
        Load(256, 512, 0), Load(1024, 512, 0), Load(4096, 512, 0), Load(4096, 512, 0, streaming=True),
        Load(1024, 8192, 0), Load(1024, 512, 10_000), Load(1024, 512, 100_000),
    ]  # fmt: skip
    results: dict[Load, list[float]] = {load: [] for load in loads}
    for _ in range(rounds):
        for load in loads:
            results[load].append(decode_step_us(load))
    print("running  context   queued  streaming   us a step   us a running sequence")
    cost = {load: median(values) for load, values in results.items()}
    for load, microseconds in cost.items():
        each = microseconds / load.running
        columns = f"{load.running:7}  {load.context:7}  {load.queued:7}  {load.streaming!s:>9}"
        print(f"{columns}  {microseconds:10.1f}  {each:10.3f}")
    base = cost[Load(1024, 512, 0)]
    print(f"context 8,192 / 512: {cost[Load(1024, 8192, 0)] / base:.2f}x")
    for queued in (10_000, 100_000):
        print(f"{queued:,} queued / none: {cost[Load(1024, 512, queued)] / base:.2f}x")


if __name__ == "__main__":
    main()
