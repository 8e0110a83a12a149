"""How a manager ends that nobody stops: collected, interrupted, or with its interpreter."""

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
from transformers import GenerationConfig, PreTrainedModel

import chairlift
from chairlift import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationOutput
from tiny_models import reference, tiny_model

PROMPT = list(range(5, 22))
LONG = 400


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def make(model: PreTrainedModel) -> ContinuousBatchingManager:
    config = ContinuousBatchingConfig(page_size=4, num_blocks=256, max_batch_tokens=64)
    return chairlift.init_continuous_batching(
        model, GenerationConfig(max_new_tokens=LONG, do_sample=False, eos_token_id=-1), config
    )


def loops() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("chairlift-")]


def end_of_all(within_s: float = 30.0) -> bool:
    end = time.monotonic() + within_s
    while loops() and time.monotonic() < end:
        time.sleep(0.3)
        gc.collect()  # a thread that just ended may have been the last to hold something
    return not loops()


def test_a_manager_that_nobody_holds_ends_its_thread_and_frees_its_pool(model: PreTrainedModel) -> None:
    manager = make(model)
    manager.start()
    manager.add_request(PROMPT)
    gone = weakref.ref(manager), weakref.ref(manager._session)
    del manager
    gc.collect()
    assert end_of_all()
    gc.collect()
    assert [what() for what in gone] == [None, None]


@pytest.mark.parametrize("reader", ["handle", "iterator", "pause", "view"])
def test_whoever_waits_for_something_of_it_holds_it(model: PreTrainedModel, reader: str) -> None:
    manager = make(model)
    manager.start()
    if reader == "handle":
        held: object = manager.submit(PROMPT)
    elif reader == "iterator":
        held = manager.request_id_iter(manager.add_request(PROMPT))
    elif reader == "pause":
        held = manager.pause()
    else:
        held = manager.scheduler
    del manager
    gc.collect()
    assert loops()
    if reader == "handle":
        assert held.result(60).generated_tokens == reference(model, PROMPT, LONG)[0]  # type: ignore[attr-defined]
    elif reader == "iterator":
        (output,) = held  # type: ignore[misc]
        assert output.generated_tokens == reference(model, PROMPT, LONG)[0]
    del held
    gc.collect()
    assert end_of_all()


def test_a_result_handler_holds_it_until_its_last_output(model: PreTrainedModel) -> None:
    async def main() -> GenerationOutput:
        ended: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
        manager = make(model)
        manager.start()
        manager.register_result_handler(manager.add_request(PROMPT), ended.set_result)
        del manager
        gc.collect()
        return await asyncio.wait_for(ended, 60)

    assert asyncio.run(main()).generated_tokens == reference(model, PROMPT, LONG)[0]
    gc.collect()
    assert end_of_all()


def test_one_that_is_to_be_kept_is_kept_though_nobody_holds_it(model: PreTrainedModel) -> None:
    manager = make(model)
    manager.start()
    manager.add_request(PROMPT)
    manager.stop(block=False, keep_for_next_session=True)
    gone = weakref.ref(manager)
    del manager
    gc.collect()
    assert end_of_all()
    kept = make(model)
    assert kept is gone()
    output = kept.get_result()
    assert output is None, "what nobody took of the session before is dropped"
    kept.destroy()


FORKS = """
import os, warnings
warnings.simplefilter("ignore")
manager = chairlift.init_continuous_batching(model, generation, config)
manager.start()
label = manager.add_request([1, 2, 3])
while not manager.stats().steps: time.sleep(0.01)
for _ in range(5):
    child = os.fork()
    if not child:
        refused = 0
        for call in (
            lambda: manager.add_request([1]), lambda: manager.add_requests([[1]]), lambda: manager.get_result(),
            lambda: manager.get_result(label), lambda: next(iter(manager)), manager.start, manager.stop, manager.pause,
            lambda: manager.submit([1]), manager.weights_changed,
        ):
            try:
                call()
            except RuntimeError as error:
                refused += "forked" in str(error)
        assert refused == 10, refused
        assert not manager.is_running()
        manager.join()
        manager.destroy()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
steps = manager.stats().steps
while manager.stats().steps < steps + 3: time.sleep(0.01)
manager.destroy()
print("served on")
"""


SCRIPT = """
import threading, time
import sys; sys.path[:0] = {tests!r}
from transformers import GenerationConfig
import chairlift
from tiny_models import tiny_model

model = tiny_model("llama", max_position_embeddings=10**7)
config = chairlift.ContinuousBatchingConfig(page_size=256, num_blocks=512, max_batch_tokens=64)
generation = GenerationConfig(max_new_tokens=120_000, do_sample=False, eos_token_id=-1)
{body}
"""


def started(body: str) -> "subprocess.Popen[str]":
    tests = [str(Path(__file__).parent)]
    script = SCRIPT.format(tests=tests, body=textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )


WAITS = """
import os, signal

def is_loop(thread):
    return thread.name == "chairlift-loop"

def interrupt(ended):
    while not any(map(is_loop, threading.enumerate())): time.sleep(0.01)
    time.sleep(0.5)
    # Python drops an interrupt that comes while the collector calls something.
    while not ended.is_set():
        os.kill(os.getpid(), signal.SIGINT)
        ended.wait(20)

def interrupted(wait):
    ended = threading.Event()
    threading.Thread(target=interrupt, args=(ended,)).start()
    try:
        with chairlift.continuous_batching_context_manager(
            model, generation, continuous_batching_config=config
        ) as manager:
            label = manager.add_request([1, 2, 3])
            while not manager.stats().steps: time.sleep(0.01)
            wait(manager, label)
    except KeyboardInterrupt:
        ended.set()
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("chairlift-")]
        print("ended" if not left else left, flush=True)

def request(manager, label):
    for output in manager.request_id_iter(label): pass

def any_request(manager, label):
    for output in manager: pass

interrupted(lambda manager, label: manager.get_result())
interrupted(lambda manager, label: manager.get_result(label))
interrupted(lambda manager, label: manager.submit([1, 2, 3, 4]).result())
interrupted(request)
interrupted(any_request)
interrupted(lambda manager, label: manager.stop())
interrupted(lambda manager, label: manager.join())
interrupted(lambda manager, label: manager.pause(requests="wait"))
interrupted(lambda *_: chairlift.generate_batch(model, [[1, 2, 3]] * 4, generation, continuous_batching_config=config))
"""


def test_an_interrupt_ends_whatever_waits_at_once() -> None:
    process = started(WAITS)
    try:
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert out.split("\n") == ["ended"] * 9 + [""], errors
    assert process.returncode == 0
    assert "Fatal" not in errors


@pytest.mark.parametrize("how", ["end", "error"])
def test_an_interpreter_ends_though_a_manager_runs(how: str) -> None:
    ends = {"end": "", "error": "raise LookupError('on purpose')"}
    process = started(
        f"""
        manager = chairlift.init_continuous_batching(model, generation, config)
        manager.start()
        label = manager.add_request([1, 2, 3])
        while not manager.stats().steps: time.sleep(0.01)
        {ends[how]}
        """
    )
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == {"end": 0, "error": 1}[how], errors
    assert "Fatal" not in errors
    assert ("on purpose" in errors) == (how == "error")


def test_in_a_forked_process_a_manager_says_where_it_runs_and_nobody_hangs() -> None:
    process = started(FORKS)
    try:
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert out == "served on\n", errors
