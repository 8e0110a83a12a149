"""Result handlers and request handles: who gets an output, where, and that nothing is lost or left behind."""

import asyncio
import contextlib
import copy
import dataclasses
import gc
import pickle
import threading
import time
from collections.abc import Iterator

import pytest
from transformers import GenerationConfig, PreTrainedModel

import chairlift
from chairlift import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationOutput
from chairlift.outputs import Later
from tiny_models import change_weights, reference, tiny_model

PROMPT = list(range(5, 22))
NEW_TOKENS = 12
LONG = 400


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@contextlib.contextmanager
def serving(model: PreTrainedModel, n: int = 1, **fields: object) -> Iterator[ContinuousBatchingManager]:
    config = ContinuousBatchingConfig(**{"page_size": 4, "num_blocks": 256, "max_batch_tokens": 64, **fields})
    generation = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=n > 1, top_k=1, eos_token_id=-1, num_return_sequences=n
    )
    manager = chairlift.init_continuous_batching(model, generation, config)
    manager.start()
    try:
        yield manager
        assert not len(manager._handlers), "a handler is left behind"
        assert not manager._engine.undelivered, "an event is left behind"
    finally:
        manager.destroy()
    assert eventually(lambda: "chairlift-handlers" not in {thread.name for thread in threading.enumerate()})


def eventually(holds: object, within_s: float = 30.0) -> bool:
    end = time.monotonic() + within_s
    while not holds():  # type: ignore[operator]
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def alone(model: PreTrainedModel, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    return reference(model, prompt, new_tokens)[0]


async def handled(manager: ContinuousBatchingManager, prompts: list[list[int]], first: bool) -> dict[str, list]:
    """What the handlers of some streaming requests get, to their last."""
    got: dict[str, list[GenerationOutput]] = {}
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    name = f"{id(loop):x}-"

    def handler(output: GenerationOutput) -> None:
        assert asyncio.get_running_loop() is loop
        got.setdefault(output.request_id, []).append(output)
        if sum(outputs[-1].is_finished() for outputs in got.values()) == len(prompts):
            ended.set()

    for nth, prompt in enumerate(prompts):
        if first:
            manager.register_result_handler(f"{name}{nth}", handler)
        await asyncio.to_thread(manager.add_request, prompt, f"{name}{nth}", streaming=True)
        if not first:
            manager.register_result_handler(f"{name}{nth}", handler)
    await asyncio.wait_for(ended.wait(), 60)
    return got


@pytest.mark.parametrize("first", [True, False])
def test_handlers_of_two_event_loops_get_all_outputs_in_order_each_on_its_own(
    model: PreTrainedModel, first: bool
) -> None:
    prompts = [PROMPT[:size] for size in range(3, 13)]
    results = []
    with serving(model) as manager:
        threads = [
            threading.Thread(target=lambda: results.append(asyncio.run(handled(manager, prompts, first))))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(results) == 2
    for got in results:
        for outputs in got.values():
            assert [len(output.generated_tokens) for output in outputs] == list(range(1, NEW_TOKENS + 1))
        for nth, prompt in enumerate(prompts):
            (outputs,) = [outputs for label, outputs in got.items() if label.endswith(f"-{nth}")]
            assert outputs[-1].generated_tokens == alone(model, prompt)


def test_a_handler_that_raises_harms_nobody(model: PreTrainedModel) -> None:
    async def main(manager: ContinuousBatchingManager) -> tuple[list, list]:
        problems: list[dict] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        good = asyncio.get_running_loop().create_future()

        def bad(output: GenerationOutput) -> None:
            raise ZeroDivisionError(output.request_id)

        manager.register_result_handler("bad", bad)
        manager.register_result_handler("good", good.set_result)
        for label in ("bad", "good"):
            manager.add_request(PROMPT, label)
        output = await asyncio.wait_for(good, 60)
        return problems, output.generated_tokens

    with serving(model) as manager:
        problems, tokens = asyncio.run(main(manager))
    assert [problem["message"] for problem in problems] == ["the result handler of request 'bad' raised an exception"]
    assert isinstance(problems[0]["exception"], ZeroDivisionError)
    assert tokens == alone(model, PROMPT)


def test_outputs_for_an_event_loop_that_is_closed_are_for_the_others(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(manager: ContinuousBatchingManager) -> list[int]:
        got: list[int] = []
        manager.register_result_handler("long", lambda output: got.append(len(output.generated_tokens)))
        manager.add_request(PROMPT, "long", max_new_tokens=LONG, streaming=True)
        while len(got) < 3:
            await asyncio.sleep(0.001)
        return got

    with serving(model) as manager:
        got = asyncio.run(main(manager))
        assert eventually(lambda: not len(manager._handlers))
        rest = [len(output.generated_tokens) for output in manager.request_id_iter("long")]
    assert got + rest == list(range(1, LONG + 1))


def test_a_request_with_a_handler_has_no_other_reader(model: PreTrainedModel) -> None:
    async def main(manager: ContinuousBatchingManager) -> None:
        got: list[GenerationOutput] = []
        label = manager.add_request(PROMPT, max_new_tokens=LONG, streaming=True)
        manager.register_result_handler(label, got.append)
        while not got:
            await asyncio.sleep(0.001)
        with pytest.raises(RuntimeError, match="has a result handler"):
            manager.get_result(label)
        assert manager.get_result(timeout=0) is None
        manager.unregister_result_handler(label)
        with pytest.raises(KeyError, match="no result handler"):
            manager.unregister_result_handler(label)
        await asyncio.sleep(0.01)
        count = len(got)
        assert [len(output.generated_tokens) for output in manager.request_id_iter(label)] == list(
            range(count + 1, LONG + 1)
        )

    with serving(model) as manager:
        asyncio.run(main(manager))


def test_a_handler_needs_an_event_loop(model: PreTrainedModel) -> None:
    with serving(model) as manager, pytest.raises(RuntimeError, match="no running event loop"):
        manager.register_result_handler("any", print)


@pytest.mark.parametrize("end", ["cancel", "hard stop", "death"])
def test_every_handler_gets_its_end_whatever_ends_it(
    model: PreTrainedModel, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(manager: ContinuousBatchingManager) -> list[GenerationOutput]:
        loop = asyncio.get_running_loop()
        ends = [loop.create_future() for _ in range(20)]
        for nth, future in enumerate(ends):
            manager.register_result_handler(f"r{nth}", future.set_result)
            manager.add_request(PROMPT, f"r{nth}", max_new_tokens=LONG)
        if end == "cancel":
            for nth in range(20):
                manager.cancel_request(f"r{nth}")
        elif end == "hard stop":
            await asyncio.to_thread(manager.stop, hard_stop=True)
        else:

            def die(*_: object) -> None:
                raise KeyboardInterrupt("broken")

            monkeypatch.setattr(manager._session.runner, "run", die)
        return await asyncio.wait_for(asyncio.gather(*ends), 60)

    with serving(model, max_requests_per_batch=4) as manager:
        outputs = asyncio.run(main(manager))
        assert manager.is_running() == (end == "cancel") or eventually(lambda: not manager.is_running())
    assert {output.finish_reason for output in outputs} == {"cancelled" if end == "cancel" else "error"}


# ------------------------------------------------------------------------- handles


def test_a_handle_gives_the_result_and_its_stream_once(model: PreTrainedModel) -> None:
    with serving(model) as manager:
        whole = manager.submit(PROMPT)
        stream = manager.submit(PROMPT[:7], streaming=True)
        assert manager.get_result(timeout=0.5) is None, "nobody else gets them"
        lengths = [len(output.generated_tokens) for output in stream]
        assert not whole.done()
        assert whole.result(60).generated_tokens == alone(model, PROMPT)
        assert whole.done()
        assert whole.result() is whole.result()
        assert list(stream) == list(whole) == []
        assert stream.result().generated_tokens == alone(model, PROMPT[:7])
    assert lengths == list(range(1, NEW_TOKENS + 1))


def test_a_handle_can_be_awaited_and_iterated_in_event_loops(model: PreTrainedModel) -> None:
    async def main(manager: ContinuousBatchingManager) -> None:
        handles = [manager.submit(PROMPT[:size]) for size in range(3, 13)]
        stream = manager.submit(PROMPT, "stream", streaming=True)
        assert stream.request_id == "stream"
        lengths = [len(output.generated_tokens) async for output in stream]
        assert lengths == list(range(1, NEW_TOKENS + 1))
        assert [output async for output in stream] == []
        outputs = await asyncio.gather(*handles, stream)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(manager.submit(PROMPT, "slow", max_new_tokens=LONG), 0.001)
        manager.cancel_request("slow")
        for size, output in zip(range(3, 13), outputs, strict=False):
            assert output.generated_tokens == alone(model, PROMPT[:size])

    with serving(model) as manager:
        asyncio.run(main(manager))
        # What the one that was given up did not take is there for others.
        assert eventually(lambda: not len(manager._handlers))
        while manager.get_result(timeout=0.2) is not None:
            pass


def test_several_tasks_may_await_one_handle(model: PreTrainedModel) -> None:
    async def main(manager: ContinuousBatchingManager) -> list[GenerationOutput]:
        handle = manager.submit(PROMPT)

        async def wait() -> GenerationOutput:
            return await handle

        in_thread = asyncio.to_thread(handle.result, 60)
        waiting = asyncio.gather(wait(), wait())
        await asyncio.sleep(0)
        return [*await waiting, await in_thread]

    with serving(model) as manager:
        first, second, third = asyncio.run(main(manager))
    assert first is second is third


def test_a_handle_cancels_all_of_its_sequences(model: PreTrainedModel) -> None:
    with serving(model, n=3) as manager:
        handle = manager.submit(PROMPT, max_new_tokens=LONG)
        assert [child.request_id for child in handle.children] == [f"{handle.request_id}__child#{n}" for n in (0, 1)]
        handle.cancel()
        for one in (handle, *handle.children):
            assert one.result(60).finish_reason == "cancelled"
        again = manager.submit(PROMPT)
        tokens = [one.result(60).generated_tokens for one in (again, *again.children)]
    assert tokens == [alone(model, PROMPT)] * 3


def test_a_handle_that_is_dropped_leaves_its_outputs_to_others(model: PreTrainedModel) -> None:
    with serving(model) as manager:
        label = manager.submit(PROMPT).request_id
        gc.collect()
        output = manager.get_result(timeout=60)
        assert output is not None
        assert output.request_id == label


def test_a_handle_that_cannot_have_a_result_says_so(model: PreTrainedModel) -> None:
    with serving(model) as manager:
        handle = manager.submit(PROMPT, max_new_tokens=LONG)
        with pytest.raises(TimeoutError, match=r"did not end within 0\.001 s; it goes on"):
            handle.result(timeout=0.001)
        manager.stop(hard_stop=True)
        assert handle.result().finish_reason == "error"
    unstarted = chairlift.init_continuous_batching(
        model, GenerationConfig(max_new_tokens=2), ContinuousBatchingConfig(page_size=4, num_blocks=64)
    )
    handle = unstarted.submit(PROMPT)
    with pytest.raises(RuntimeError, match="not started"):
        handle.result()
    unstarted.start()
    assert len(handle.result(60).generated_tokens) == 2
    unstarted.destroy()


# ------------------------------------------------------------------------- streams


def test_snapshots_of_a_stream_never_change_and_are_made_when_looked_at(model: PreTrainedModel) -> None:
    with serving(model, return_logprobs=True) as manager:
        handle = manager.submit(PROMPT, streaming=True, record_timestamps=True)
        outputs = list(handle)
    *tokens, last = outputs
    # Nothing of what was there before was copied for a token.
    assert all(
        isinstance(vars(output)[name], Later) for output in tokens for name in ("generated_tokens", "prompt_ids")
    )
    for count, output in enumerate(tokens, 1):
        assert output.generated_tokens == last.generated_tokens[:count]
        assert output.logprobs == last.logprobs[:count]
        assert output.timestamps == (last.timestamps or [])[:count]
        assert output.prompt_ids == PROMPT
        output.generated_tokens.clear()
        output.prompt_ids.clear()
    assert [token for output in outputs for token in output.new_tokens] == last.generated_tokens
    assert [logprob for output in outputs for logprob in output.new_logprobs] == last.logprobs
    assert last.generated_tokens == alone(model, PROMPT)
    assert last.prompt_ids == PROMPT


def test_a_snapshot_can_be_copied_compared_and_pickled_before_it_was_looked_at() -> None:
    model = tiny_model("llama")
    with serving(model) as manager:
        handle = manager.submit(PROMPT, streaming=True, max_new_tokens=LONG)
        outputs = iter(handle)
        for _ in range(4):
            next(outputs)
        with manager.pause(kv="recompute"):
            change_weights(model)
        late = [output for output in outputs if output.epochs is not None][3]
    made = pickle.loads(pickle.dumps(late))
    assert made.epochs == late.epochs
    assert made == copy.copy(late) == copy.deepcopy(late) == dataclasses.replace(late) == late
    assert dataclasses.asdict(made)["generated_tokens"] == late.generated_tokens
    assert f"generated_tokens={late.generated_tokens}" in repr(late)
    assert GenerationOutput("x").timestamps is GenerationOutput("x").epochs is None
    assert GenerationOutput("x").generated_tokens == []


@pytest.mark.parametrize(
    ("label", "handler", "message"),
    [(3, print, "request_id is 3"), (None, print, "request_id is None"), ("a", None, "callback is None")],
)
def test_what_cannot_be_a_handler_is_refused(
    model: PreTrainedModel, label: object, handler: object, message: str
) -> None:
    async def main(manager: ContinuousBatchingManager) -> None:
        with pytest.raises(TypeError, match=message):
            manager.register_result_handler(label, handler)  # type: ignore[arg-type]

    with serving(model) as manager:
        asyncio.run(main(manager))


@pytest.mark.parametrize(
    ("timeout", "error"), [("x", TypeError), (True, TypeError), (-1, ValueError), (float("nan"), ValueError)]
)
def test_a_time_out_that_is_none_is_refused_by_whoever_takes_one(
    model: PreTrainedModel, timeout: object, error: type[Exception]
) -> None:
    with serving(model) as manager:
        handle = manager.submit(PROMPT)
        for call in (manager.get_result, handle.result, manager.pause, manager.stop, manager.join):
            with pytest.raises(error, match=f"timeout is {timeout!r}, but must be"):
                call(timeout=timeout)
        assert handle.result(float("inf")).generated_tokens == alone(model, PROMPT), "it runs on"
