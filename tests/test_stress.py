"""Sixteen threads and two event loops at once: every request ends exactly once, and nothing is left behind."""

import asyncio
import random
import threading
import time
from collections import Counter

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import chairlift
from chairlift import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationOutput, QueueFull
from tiny_models import reference, tiny_model

THREADS = 16
LOOPS = 2
SIZES = range(1, 40)
MOST_NEW = 24
TEXT = [3 + (index * 29) % 90 for index in range(60)]


class World:
    """One manager under attack, and what became of each request."""

    def __init__(self, model: PreTrainedModel, seconds: float) -> None:
        self.model = model
        self.expected = {size: reference(model, TEXT[:size], MOST_NEW)[0] for size in SIZES}
        self.sizes: dict[str, tuple[int, int]] = {}
        self.ends: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.lock = threading.Lock()
        self.manager: ContinuousBatchingManager = chairlift.init_continuous_batching(
            model,
            GenerationConfig(max_new_tokens=MOST_NEW, do_sample=False, eos_token_id=-1),
            # So little room that sequences lose theirs.
            ContinuousBatchingConfig(
                page_size=4, num_blocks=40, max_batch_tokens=32, max_queue_size=200, cpu_offload_space=0.0005
            ),
        )
        self.manager.start()
        self.end = time.monotonic() + seconds
        self.names = iter(range(10**9))

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.end and not self.failures

    def name(self, size: int, new_tokens: int) -> str:
        with self.lock:
            label = f"request-{next(self.names)}"
            self.sizes[label] = (size, new_tokens)
        return label

    def take(self, output: GenerationOutput) -> None:
        """Looks at an output of any request."""
        size, new_tokens = self.sizes[output.request_id]
        expected = self.expected[size][:new_tokens]
        assert output.generated_tokens == expected[: len(output.generated_tokens)], output.request_id
        assert output.prompt_ids == TEXT[:size]
        if output.is_finished():
            with self.lock:
                self.ends[output.request_id] += 1
                self.reasons[output.finish_reason or ""] += 1
            if output.finish_reason == "length":
                assert len(output.generated_tokens) == new_tokens

    def run(self) -> None:
        threads = [threading.Thread(target=self.guarded, args=(self.work, seed)) for seed in range(THREADS)]
        threads += [
            threading.Thread(target=self.guarded, args=(lambda seed: asyncio.run(self.work_in_loop(seed)), 100 + nth))
            for nth in range(LOOPS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"

    def guarded(self, work: object, seed: int) -> None:
        try:
            work(seed)  # type: ignore[operator]
        except BaseException as error:
            self.failures.append(error)

    # ---------------------------------------------------------------- the threads

    def work(self, seed: int) -> None:
        dice = random.Random(seed)
        while self.goes_on:
            size, new_tokens = dice.choice(SIZES), dice.randint(1, MOST_NEW)
            label = self.name(size, new_tokens)
            streaming = dice.random() < 0.5
            kind = dice.choice(("result", "iterate", "handle", "cancel", "common", "pause"))
            if kind == "pause" and dice.random() < 0.3:
                how = dice.choice(("keep", "keep", "wait", "abort"))
                try:
                    with self.manager.pause(requests=how, release_memory=dice.random() < 0.3, timeout=5):
                        time.sleep(dice.random() * 0.005)
                        assert self.model.training
                except TimeoutError:
                    assert how == "wait"
            try:
                arguments = (TEXT[:size], label, new_tokens, streaming)
                if kind == "handle":
                    handle = self.manager.submit(*arguments)
                    outputs = iter(handle)
                else:
                    self.manager.add_request(*arguments)
                    outputs = self.manager.request_id_iter(label)
            except QueueFull:
                with self.lock:
                    del self.sizes[label]
                time.sleep(0.01)
                continue
            if kind == "common":
                continue  # for whoever asks for the next one
            if kind == "cancel":
                time.sleep(dice.random() * 0.01)
                try:
                    self.manager.cancel_request(label)
                except KeyError:
                    continue  # somebody took its end
            try:
                for output in outputs:
                    assert output.request_id == label
                    self.take(output)
            except KeyError:
                pass  # a reader of the common queue was faster
            while dice.random() < 0.5 and (other := self.manager.get_result(timeout=0)) is not None:
                self.take(other)

    # ------------------------------------------------------------- the event loops

    async def work_in_loop(self, seed: int) -> None:
        await asyncio.gather(*(self.task(random.Random(seed * 100 + nth)) for nth in range(8)))

    async def task(self, dice: random.Random) -> None:
        while self.goes_on:
            size, new_tokens = dice.choice(SIZES), dice.randint(1, MOST_NEW)
            label = self.name(size, new_tokens)
            arguments = (TEXT[:size], label, new_tokens, dice.random() < 0.5)
            kind = dice.choice(("handler", "await", "async for", "cancel"))
            try:
                if kind == "handler":
                    ended = asyncio.get_running_loop().create_future()

                    def handler(output: GenerationOutput, ended: asyncio.Future[None] = ended) -> None:
                        self.take(output)
                        if output.is_finished():
                            ended.set_result(None)

                    self.manager.register_result_handler(label, handler)
                    self.manager.add_request(*arguments)
                    await ended
                    continue
                handle = self.manager.submit(*arguments)
            except QueueFull:
                if kind == "handler":
                    self.manager.unregister_result_handler(label)
                with self.lock:
                    del self.sizes[label]
                await asyncio.sleep(0.01)
                continue
            if kind == "cancel":
                await asyncio.sleep(dice.random() * 0.01)
                handle.cancel()
            if kind == "async for":
                async for output in handle:
                    self.take(output)
            else:
                self.take(await handle)


@pytest.mark.parametrize("seconds", [5.0, pytest.param(60.0, marks=pytest.mark.heavy)])
def test_every_request_ends_exactly_once_whatever_everybody_does(seconds: float) -> None:
    model = tiny_model("llama").train()
    threads_before = set(threading.enumerate())
    world = World(model, seconds)
    manager = world.manager
    world.run()
    assert not world.failures, world.failures[0]
    manager.stop()
    for output in manager:
        world.take(output)
    manager._engine.check_integrity()
    stats = manager.stats()
    assert set(world.ends) == set(world.sizes)
    assert set(world.ends.values()) == {1}
    assert world.reasons["length"] > 100
    assert world.reasons["cancelled"] > 10
    assert world.reasons.keys() == {"length", "cancelled"}
    assert stats.soft_resets + stats.swap_outs > 10
    assert (stats.running, stats.waiting, stats.owned_blocks, stats.retiring_blocks) == (0, 0, 0, 0)
    assert stats.finished + stats.cancelled == stats.submitted == len(world.sizes)
    assert not manager._engine.undelivered
    assert not len(manager._handlers)
    assert not manager._books._ids
    assert not manager._books._records
    assert model.training
    manager.destroy()
    deadline = time.monotonic() + 30
    while not threads_before >= {thread for thread in threading.enumerate() if thread.name.startswith("chairlift")}:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.05)
    assert torch.isfinite(model(torch.tensor([TEXT])).logits).all()
