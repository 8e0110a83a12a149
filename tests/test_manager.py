"""The manager's promises: every request ends once, a bad one harms nobody, outputs go to who waits for them."""

import threading
import time
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import chairlift
from chairlift import ContinuousBatchingConfig
from chairlift.engine.cache import cache_memory
from chairlift.engine.runner import Runner
from tiny_models import reference, tiny_model

SMALL = {"page_size": 4, "num_blocks": 32, "max_batch_tokens": 16}
PROMPT = [5, 6, 7, 8]


@pytest.fixture
def manager(llama: PreTrainedModel):
    manager = chairlift.init_continuous_batching(
        llama, GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1), ContinuousBatchingConfig(**SMALL)
    )
    manager.start()
    yield manager
    manager.destroy()


# ------------------------------------------------------------------- bad input

BAD_PROMPTS = [
    ([], ValueError, "empty"),
    ([5, 97, 6], ValueError, "token 97 at position 1 .* 0 to 96"),
    ([5, -3, 7], ValueError, "token -3 at position 1"),
    ([5, 2**40], ValueError, f"token {2**40} at position 1"),
    ([5, 2**70], TypeError, "beyond 64 bits"),
    ([5, 6.0], TypeError, "6.0"),
    ([True, False], TypeError, "True"),
    (["a"], TypeError, "'a'"),
    ("text", TypeError, "tokenise"),
    ({"input_ids": [5]}, TypeError, "input_ids"),
    ([[5, 6]], TypeError, "2 dimensions"),
    ([[5], [6, 7]], TypeError, "nested"),
    (5, TypeError, "0 dimensions"),
    (None, TypeError, "0 dimensions"),
    (torch.tensor([[5, 6]]), TypeError, "2 dimensions"),
    (torch.tensor([5.0]), TypeError, "float32"),
    (torch.tensor([5.0], dtype=torch.bfloat16), TypeError, "bfloat16"),
    (np.array([5.0]), TypeError, "float64"),
    (list(range(5, 90)) * 2, ValueError, "170 tokens .* holds 128 .*32 blocks of 4.* num_blocks"),
]


@pytest.mark.parametrize(("prompt", "error", "message"), BAD_PROMPTS, ids=lambda value: str(value)[:20])
def test_a_bad_prompt_is_refused_in_the_callers_thread_and_harms_nobody(
    manager: chairlift.ContinuousBatchingManager, prompt: object, error: type[Exception], message: str
) -> None:
    good = manager.add_request(PROMPT)
    with pytest.raises(error, match=message):
        manager.add_request(prompt)
    assert len(manager.get_result(good, timeout=30).generated_tokens) == 6
    assert manager.stats().running == 0


@pytest.mark.parametrize(("prompt", "error", "message"), BAD_PROMPTS, ids=lambda value: str(value)[:20])
def test_generate_batch_names_the_bad_item_before_any_starts(
    llama: PreTrainedModel, prompt: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=r"inputs\[1\].*"):
        chairlift.generate_batch(
            llama, [PROMPT, prompt], continuous_batching_config=ContinuousBatchingConfig(**SMALL), max_new_tokens=2
        )
    assert threading.active_count() == 1 or "chairlift-loop" not in {t.name for t in threading.enumerate()}


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(PROMPT),
        range(5, 9),
        np.array(PROMPT, np.uint8),
        np.array(PROMPT)[::1],
        torch.tensor(PROMPT, dtype=torch.int32),
    ],
    ids=["tuple", "range", "uint8", "int64", "tensor"],
)
def test_any_flat_sequence_of_integers_is_a_prompt(
    manager: chairlift.ContinuousBatchingManager, prompt: object
) -> None:
    output = manager.get_result(manager.add_request(prompt), timeout=30)
    assert output.prompt_ids == PROMPT
    assert all(type(token) is int for token in output.prompt_ids + output.generated_tokens)


@pytest.mark.parametrize(("bound", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_bound_below_one_token_is_refused(
    manager: chairlift.ContinuousBatchingManager, llama: PreTrainedModel, bound: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match="max_new_tokens"):
        manager.add_request(PROMPT, max_new_tokens=bound)
    with pytest.raises((ValueError, TypeError), match="max_new_tokens"):
        chairlift.generate_batch(llama, [PROMPT], max_new_tokens=bound)


def test_a_prompt_that_leaves_no_position_is_refused() -> None:
    model = tiny_model("gpt2")  # a table of 512 positions
    config = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=600)
    with chairlift.continuous_batching_context_manager(model, continuous_batching_config=config) as manager:
        for length in (512, 600):
            with pytest.raises(ValueError, match=f"{length} tokens.*positions for 512.*at most 511"):
                manager.add_request([5] * length)
        output = manager.get_result(manager.add_request([5] * 511, max_new_tokens=9, eos_token_id=-1))
        assert (len(output.generated_tokens), output.finish_reason) == (1, "length")


def test_a_pool_that_the_system_refuses_says_how_large_it_was() -> None:
    message = r"no 1,099,511,627,776.0 MiB for 1073741824 blocks of K and V .*: lower num_blocks"
    with pytest.raises(MemoryError, match=message):
        cache_memory(2**30, 2**30, torch.device("cpu"))


def test_unknown_keywords_are_type_errors(llama: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match="banana"):
        chairlift.generate_batch(llama, [PROMPT], banana=3)
    with pytest.raises(TypeError, match="temprature"):
        chairlift.ContinuousBatchingManager(
            llama, continuous_batching_config=ContinuousBatchingConfig(**SMALL)
        ).add_request(PROMPT, temprature=0.5)


@pytest.mark.parametrize(
    "field",
    [
        {"repetition_penalty": 5.0}, {"no_repeat_ngram_size": 1}, {"min_new_tokens": 10}, {"forced_eos_token_id": 5},
        {"stop_strings": ["x"]}, {"num_beams": 2}, {"max_time": 1.0}, {"min_length": 4},
        {"bad_words_ids": [[5]]}, {"min_p": 0.1, "do_sample": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name_and_not_ignored(llama: PreTrainedModel, field: dict) -> None:
    name = next(iter(field))
    with pytest.raises(ValueError, match=name):
        chairlift.generate_batch(llama, [PROMPT], max_new_tokens=3, **field)


def test_a_penalty_of_the_models_own_config_is_not_ignored_either() -> None:
    model = tiny_model("llama")
    model.generation_config.repetition_penalty = 1.5
    with pytest.raises(ValueError, match=r"repetition_penalty=1\.5"):
        chairlift.generate_batch(model, [PROMPT], max_new_tokens=3)
    config = ContinuousBatchingConfig(drop_unsupported_processors=True)
    with pytest.warns(UserWarning, match="repetition_penalty") as warned:
        output = chairlift.generate_batch(model, [PROMPT], continuous_batching_config=config, max_new_tokens=3)
    assert len(output["req_0"].generated_tokens) == 3
    assert len([warning for warning in warned if "repetition_penalty" in str(warning.message)]) == 1


def test_an_impossible_prompt_does_not_stop_the_others(llama: PreTrainedModel) -> None:
    config = ContinuousBatchingConfig(page_size=4, num_blocks=8, max_batch_tokens=16)
    with chairlift.continuous_batching_context_manager(llama, continuous_batching_config=config) as manager:
        others = {
            manager.add_request(prompt, max_new_tokens=8, eos_token_id=-1): prompt for prompt in ([5] * 9, [7] * 9)
        }
        with pytest.raises(ValueError, match=r"60 tokens .* 32 "):
            manager.add_request([5] * 60, max_new_tokens=8)
        growing = manager.add_request([9] * 9, max_new_tokens=100, eos_token_id=-1)
        others[manager.add_request([8] * 5, max_new_tokens=6, eos_token_id=-1)] = [8] * 5
        for label, prompt in others.items():
            output = manager.get_result(label, timeout=60)
            assert output.generated_tokens == reference(llama, prompt, len(output.generated_tokens))[0]
        output = manager.get_result(growing, timeout=60)
        # It ends by itself, with all that the pool holds.
        assert (output.finish_reason, len(output.generated_tokens)) == ("length", 32 - 9)
        assert manager.is_running()


# --------------------------------------------------------------------- outputs


def test_outputs_come_in_input_order_and_labels_start_anew(llama: PreTrainedModel) -> None:
    inputs = [[5] * length for length in (20, 1, 9, 14)]
    for _ in range(2):
        outputs = chairlift.generate_batch(llama, inputs, max_new_tokens=3)
        assert list(outputs) == ["req_0", "req_1", "req_2", "req_3"]
        assert [output.prompt_ids for output in outputs.values()] == inputs


def test_no_prompts_no_outputs(llama: PreTrainedModel) -> None:
    assert chairlift.generate_batch(llama, []) == {}


def test_a_label_in_flight_is_not_given_twice(manager: chairlift.ContinuousBatchingManager) -> None:
    manager.add_request(PROMPT, "mine")
    with pytest.raises(ValueError, match="'mine' is taken"):
        manager.add_request(PROMPT, "mine")
    assert manager.get_result("mine", timeout=30).request_id == "mine"
    manager.add_request(PROMPT, "mine")
    assert manager.get_result("mine", timeout=30).finish_reason == "length"


def test_a_result_is_looked_up_by_its_label(manager: chairlift.ContinuousBatchingManager) -> None:
    labels = [manager.add_request(PROMPT) for _ in range(5)]
    for label in reversed(labels):
        assert manager.get_result(label, timeout=30).request_id == label
    with pytest.raises(KeyError, match=labels[0]):
        manager.get_result(labels[0])
    assert manager.get_result(timeout=0.01) is None


def test_a_stream_brings_each_token_once_and_snapshots_stay_as_they_were(
    manager: chairlift.ContinuousBatchingManager,
) -> None:
    label = manager.add_request(PROMPT, max_new_tokens=40, streaming=True)
    seen = list(manager.request_id_iter(label))
    assert [len(output.generated_tokens) for output in seen] == [*range(1, 41)]
    assert all(output.generated_tokens == seen[-1].generated_tokens[: n + 1] for n, output in enumerate(seen))
    assert [output.is_finished() for output in seen] == [False] * 39 + [True]


def test_streams_of_several_readers_do_not_mix(manager: chairlift.ContinuousBatchingManager) -> None:
    lengths: dict[str, list[int]] = {}

    def read(label: str) -> None:
        lengths[label] = [len(output.generated_tokens) for output in manager.request_id_iter(label)]

    labels = [manager.add_request([5 + n] * 4, max_new_tokens=25, streaming=True) for n in range(3)]
    readers = [threading.Thread(target=read, args=(label,)) for label in labels]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert lengths == {label: [*range(1, 26)] for label in labels}


def test_iterating_after_the_stop_hands_out_what_is_there(manager: chairlift.ContinuousBatchingManager) -> None:
    labels = {manager.add_request(PROMPT) for _ in range(5)}
    manager.stop()
    assert {output.request_id for output in manager} == labels


# ---------------------------------------------------------------------- ending


def test_a_cancelled_request_ends_once_and_gives_its_blocks_back(manager: chairlift.ContinuousBatchingManager) -> None:
    label = manager.add_request(PROMPT, max_new_tokens=10_000, streaming=True)
    stream = manager.request_id_iter(label)
    next(stream)
    manager.cancel_request(label)
    last = list(stream)[-1]
    assert (last.finish_reason, last.status) == ("cancelled", chairlift.RequestStatus.CANCELLED)
    assert manager.get_result(timeout=0.05) is None
    stats = manager.stats()
    assert (stats.cancelled, stats.owned_blocks) == (1, 0)


def test_cancelling_half_leaves_the_other_half_whole(llama: PreTrainedModel) -> None:
    config = ContinuousBatchingConfig(page_size=4, num_blocks=40, max_batch_tokens=32)
    with chairlift.continuous_batching_context_manager(llama, continuous_batching_config=config) as manager:
        prompts = {manager.add_request([5 + n] * 6, max_new_tokens=12, eos_token_id=-1): [5 + n] * 6 for n in range(60)}
        for label in list(prompts)[::2]:
            manager.cancel_request(label)
        outputs = [manager.get_result(label, timeout=60) for label in prompts]
        reasons = Counter(output.finish_reason for output in outputs)
        assert set(reasons) <= {"cancelled", "length"}
        for output in outputs[1::2]:
            assert output.generated_tokens == reference(llama, output.prompt_ids, 12)[0]
        stats = manager.stats()
        assert stats.owned_blocks == 0


def test_a_graceful_stop_finishes_what_was_submitted(manager: chairlift.ContinuousBatchingManager) -> None:
    labels = [manager.add_request(PROMPT) for _ in range(20)]
    manager.stop()
    assert not manager.is_running()
    assert {manager.get_result(label).finish_reason for label in labels} == {"length"}


def test_a_stopped_manager_refuses_with_a_warning_and_a_failed_output(
    manager: chairlift.ContinuousBatchingManager,
) -> None:
    manager.stop()
    late = manager.get_result(manager.add_request(PROMPT), timeout=5)
    assert (late.finish_reason, late.status) == ("error", chairlift.RequestStatus.FAILED)
    assert "stopped: call start()" in late.error
    assert manager.get_result(timeout=5) is None


@pytest.mark.parametrize("ending", ["stop", "destroy"])
def test_requests_of_a_manager_that_is_never_started_end_too(llama: PreTrainedModel, ending: str) -> None:
    manager = chairlift.init_continuous_batching(llama, continuous_batching_config=ContinuousBatchingConfig(**SMALL))
    label = manager.add_request(PROMPT)
    getattr(manager, ending)()
    assert manager.get_result(label).finish_reason == "error"


def test_a_higher_priority_is_served_first(llama: PreTrainedModel) -> None:
    config = ContinuousBatchingConfig(page_size=4, num_blocks=8, max_requests_per_batch=1)
    manager = chairlift.init_continuous_batching(llama, GenerationConfig(max_new_tokens=2), config)
    for label, priority in (("usual", 0), ("low", -3), ("first", 9), ("second", 9)):
        manager.add_request(PROMPT, label, priority=priority)
    manager.start()
    assert [manager.get_result(timeout=30).request_id for _ in range(4)] == ["first", "second", "usual", "low"]
    for wrong, error in ((1.5, TypeError), (True, TypeError), (2**31, ValueError)):
        with pytest.raises(error, match="priority"):
            manager.add_request(PROMPT, priority=wrong)
    manager.destroy()


def test_a_start_waits_for_the_stop_before_it(manager: chairlift.ContinuousBatchingManager) -> None:
    first = manager.add_request(PROMPT, max_new_tokens=50)
    manager.stop(block=False)
    manager.start()
    assert manager.is_running()
    assert len(manager.get_result(first).generated_tokens) == 50
    assert manager.get_result(manager.add_request(PROMPT), timeout=30).finish_reason == "length"


def test_readers_are_told_even_when_the_ending_itself_fails(
    manager: chairlift.ContinuousBatchingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, engine: object) -> None:
            self.engine = engine

        def __getattr__(self, name: str) -> object:
            return getattr(self.engine, name)

        def fail_all(self, *args: object) -> None:
            raise RuntimeError("the books are broken")

    class Fault(BaseException):
        pass

    def dying(self: Runner, step: object) -> None:
        raise Fault("the device is gone")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(Runner, "run", dying)
    monkeypatch.setattr(manager._worker, "_engine", Broken(manager._engine))
    label = manager.add_request(PROMPT)
    with pytest.raises(RuntimeError, match="the device is gone"):
        manager.get_result(label, timeout=30)
    monkeypatch.undo()


def test_requests_may_come_before_the_start(llama: PreTrainedModel) -> None:
    manager = chairlift.init_continuous_batching(
        llama, GenerationConfig(max_new_tokens=2), ContinuousBatchingConfig(**SMALL)
    )
    label = manager.add_request(PROMPT)
    assert manager.get_result() is None
    manager.start()
    assert manager.get_result(label, timeout=30).finish_reason == "length"
    manager.destroy()


def test_of_two_readers_of_one_request_one_gets_it_and_the_other_is_told(
    manager: chairlift.ContinuousBatchingManager,
) -> None:
    label = manager.add_request(PROMPT, max_new_tokens=60)
    got: list[object] = []

    def read() -> None:
        try:
            got.append(manager.get_result(label))
        except KeyError as error:
            got.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert sorted(type(item).__name__ for item in got) == ["GenerationOutput", "KeyError"]


def test_a_hard_stop_ends_every_request_once(manager: chairlift.ContinuousBatchingManager) -> None:
    labels = [manager.add_request(PROMPT, max_new_tokens=100_000) for _ in range(40)]
    manager.stop(hard_stop=True)
    outputs = [manager.get_result(label) for label in labels]
    assert {output.finish_reason for output in outputs} <= {"error", "length"}
    assert any("hard_stop" in (output.error or "") for output in outputs)
    assert manager.get_result(timeout=0.01) is None


def test_it_can_be_started_again_until_it_is_destroyed(manager: chairlift.ContinuousBatchingManager) -> None:
    manager.stop()
    manager.start()
    assert manager.get_result(manager.add_request(PROMPT), timeout=30).finish_reason == "length"
    manager.destroy()
    manager.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()


def test_a_dead_loop_tells_everybody_why_at_once(
    manager: chairlift.ContinuousBatchingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fault(BaseException):
        pass

    def dying(self: Runner, step: object) -> None:
        raise Fault("the device is gone")

    monkeypatch.setattr(Runner, "run", dying)
    label = manager.add_request(PROMPT)
    output = manager.get_result(label, timeout=30)
    assert "the device is gone" in output.error
    start = time.perf_counter()
    for call in (
        lambda: manager.add_request(PROMPT),
        lambda: manager.get_result(timeout=30),
        lambda: manager.get_result(),
        manager.start,
    ):
        with pytest.raises(RuntimeError) as raised:
            call()
        assert isinstance(raised.value.__cause__, Fault)
    assert time.perf_counter() - start < 5
    manager.stop()


def test_a_full_queue_refuses_at_once(llama: PreTrainedModel) -> None:
    config = ContinuousBatchingConfig(**SMALL, max_queue_size=2)
    manager = chairlift.init_continuous_batching(llama, GenerationConfig(max_new_tokens=2), config)
    manager.add_request(PROMPT)
    manager.add_request(PROMPT)
    with pytest.raises(chairlift.QueueFull, match="2 requests wait and 1 more"):
        manager.add_request(PROMPT)
    manager.start()
    assert {manager.get_result(timeout=30).finish_reason for _ in range(2)} == {"length"}
    manager.destroy()


def test_outputs_that_nobody_takes_hold_up_new_requests_and_none_is_dropped(llama: PreTrainedModel) -> None:
    config = ContinuousBatchingConfig(**SMALL, output_space=4096 / 2**30)
    manager = chairlift.init_continuous_batching(llama, GenerationConfig(max_new_tokens=2), config)
    assert "requests are refused while 0.0 MiB wait to be taken  (asked for)" in manager.describe()
    manager.start()
    labels: list[str] = []

    def add_without_taking() -> None:
        while len(labels) < 1000:
            labels.extend(manager.add_requests([PROMPT] * 3))
            while manager.stats().finished < len(labels):
                time.sleep(0.001)

    with pytest.raises(chairlift.QueueFull, match=r"nobody took yet hold .* \(output_space\): take some"):
        add_without_taking()
    assert 9 < len(labels) < 100
    with pytest.raises(chairlift.QueueFull):
        manager.submit(PROMPT)
    taken = [manager.get_result(timeout=30).request_id for _ in labels]
    assert sorted(taken) == sorted(labels)
    assert manager.submit(PROMPT).result(timeout=30).finish_reason == "length"
    manager.destroy()


@pytest.mark.parametrize(
    ("space", "error"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError), (True, TypeError)]
)
def test_a_space_for_outputs_that_is_none_is_refused(space: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"output_space is {space!r}, but must be"):
        ContinuousBatchingConfig(output_space=space)


def test_outputs_may_be_unbounded(llama: PreTrainedModel) -> None:
    config = ContinuousBatchingConfig(**SMALL, output_space=float("inf"))
    outputs = chairlift.generate_batch(llama, [PROMPT] * 50, max_new_tokens=2, continuous_batching_config=config)
    assert len(outputs) == 50


def test_a_dead_loop_is_an_error_of_generate_batch(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fault(BaseException):
        pass

    def dying(self: Runner, step: object) -> None:
        raise Fault("the device is gone")

    monkeypatch.setattr(Runner, "run", dying)
    with pytest.raises(RuntimeError) as raised:
        chairlift.generate_batch(llama, [PROMPT] * 3, max_new_tokens=2)
    assert isinstance(raised.value.__cause__, Fault)


def test_generate_batch_fills_a_bounded_queue_as_it_drains(llama: PreTrainedModel) -> None:
    config = ContinuousBatchingConfig(**SMALL, max_queue_size=4)
    outputs = chairlift.generate_batch(llama, [PROMPT] * 50, continuous_batching_config=config, max_new_tokens=2)
    assert list(outputs) == [f"req_{n}" for n in range(50)]
    assert {output.finish_reason for output in outputs.values()} == {"length"}


def test_many_requests_join_a_bounded_queue_all_or_none(llama: PreTrainedModel) -> None:
    config = ContinuousBatchingConfig(**SMALL, max_queue_size=4)
    manager = chairlift.init_continuous_batching(llama, continuous_batching_config=config)
    manager.add_request(PROMPT)
    with pytest.raises(chairlift.QueueFull, match="1 requests wait and 4 more"):
        manager.add_requests([PROMPT] * 4)
    assert manager._engine.queued == 1
    with pytest.raises(ValueError, match="5 sequences can never join a queue of 4"):
        manager.add_requests([PROMPT] * 5)
    assert len(manager.add_requests([PROMPT] * 3)) == 3
    manager.destroy()


def test_a_reader_of_one_request_comes_before_the_common_queue(manager: chairlift.ContinuousBatchingManager) -> None:
    stop = threading.Event()
    others: list[str] = []

    def common() -> None:
        while not stop.is_set():
            output = manager.get_result(timeout=0.01)
            if output is not None:
                others.append(output.request_id)

    readers = [threading.Thread(target=common) for _ in range(2)]
    stream = manager.request_id_iter(manager.add_request(PROMPT, "mine", max_new_tokens=80, streaming=True))
    first = next(stream)
    for reader in readers:
        reader.start()
    for n in range(10):
        manager.add_request(PROMPT, f"other_{n}", streaming=True)
    lengths = [len(first.generated_tokens), *(len(output.generated_tokens) for output in stream)]
    while len(others) < 60:
        time.sleep(0.01)
    stop.set()
    for reader in readers:
        reader.join()
    assert lengths == [*range(1, 81)]
    assert Counter(others) == {f"other_{n}": 6 for n in range(10)}


# --------------------------------------------------------------------- install


def test_install_gives_every_model_the_entry_points_and_uninstall_takes_them_back(llama: PreTrainedModel) -> None:
    names = ("generate_batch", "continuous_batching_context_manager", "init_continuous_batching")
    theirs = [getattr(type(llama), name) for name in names]
    chairlift.install()
    chairlift.install()
    try:
        outputs = llama.generate_batch(inputs=[PROMPT], generation_config=GenerationConfig(max_new_tokens=4))
        assert isinstance(outputs["req_0"], chairlift.GenerationOutput)
        manager = llama.init_continuous_batching()
        assert isinstance(manager, chairlift.ContinuousBatchingManager)
        with llama.continuous_batching_context_manager(GenerationConfig(max_new_tokens=2)) as manager:
            manager.add_request(PROMPT)
            assert len(manager.get_result(timeout=30).generated_tokens) == 2
        padded = torch.tensor([[0, 0, *PROMPT], [9, *PROMPT, 9]])
        mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
        expected = [reference(llama, prompt, 3)[0] for prompt in (PROMPT, [9, *PROMPT, 9])]
        for prompt, tokens in zip(([PROMPT], [[9, *PROMPT, 9]]), expected, strict=True):
            ids = llama.generate(torch.tensor(prompt), cache_implementation="paged", max_new_tokens=3)
            assert ids[0, 0].tolist() == prompt[0] + tokens
        outputs = chairlift.generate_batch(
            llama, padded.tolist(), attention_mask=mask, cache_implementation="paged", max_new_tokens=3
        )
        assert [output.generated_tokens for output in outputs.values()] == expected
    finally:
        chairlift.uninstall()
    assert [getattr(type(llama), name) for name in names] == theirs


def test_their_config_objects_are_accepted(llama: PreTrainedModel) -> None:
    from transformers.generation import ContinuousBatchingConfig as Theirs

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager = chairlift.init_continuous_batching(
            llama, continuous_batching_config=Theirs(page_size=8, num_blocks=9)
        )
    assert (manager.config.page_size, manager.config.num_blocks) == (8, 9)


def test_a_config_on_the_generation_config_is_used_and_deprecated(llama: PreTrainedModel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        carrier = GenerationConfig(continuous_batching_config=ContinuousBatchingConfig(page_size=8, num_blocks=9))
    with pytest.warns(FutureWarning, match="continuous_batching_config"):
        manager = chairlift.init_continuous_batching(llama, carrier)
    assert manager.config.page_size == 8
    explicit = chairlift.init_continuous_batching(llama, carrier, ContinuousBatchingConfig(**SMALL))
    assert explicit.config.page_size == 4


def test_what_was_chosen_can_be_read_back(llama: PreTrainedModel) -> None:
    manager = chairlift.init_continuous_batching(
        llama, workload_hints=chairlift.WorkloadHints(max_prompt_length=100, max_generated_length=50, num_requests=3)
    )
    config = manager.config
    assert (config.page_size, config.num_blocks, config.max_requests_per_batch) == (256, 3, 3)
    assert (config.max_batch_tokens, config.safety_margin, config.max_memory_percent) == (8192, 0.15, 0.6)
    assert (config.use_cuda_graph, config.use_async_batching) == ((False, False), False)
    assert isinstance(config.seed, int)
    description = manager.describe()
    assert "768 tokens" in description
    assert "LlamaForCausalLM" in description


def test_a_flood_of_one_tenant_leaves_room_for_another(llama: PreTrainedModel) -> None:
    config = ContinuousBatchingConfig(
        **SMALL, max_requests_per_batch=1, fairness="tenant", tenant_weights={"paying": 2.0}
    )
    manager = chairlift.init_continuous_batching(llama, GenerationConfig(max_new_tokens=2), config)
    for _ in range(30):
        manager.add_request(PROMPT, tenant="flood")
    other = manager.add_request(PROMPT, tenant="paying")
    manager.start()
    ended = [manager.get_result(timeout=30).request_id for _ in range(31)]
    manager.destroy()
    assert ended.index(other) <= 1
    plain = chairlift.init_continuous_batching(llama, continuous_batching_config=ContinuousBatchingConfig(**SMALL))
    with pytest.raises(ValueError, match="tenant is 'a', but fairness is None"):
        plain.add_request(PROMPT, tenant="a")
    with pytest.raises(TypeError, match="tenant is 5"):
        manager.add_request(PROMPT, tenant=5)


def test_stats_tell_the_blocks_of_each_group() -> None:
    from tiny_models import tiny_model

    model = tiny_model("gemma2", window=6)
    config = ContinuousBatchingConfig(page_size=4, num_blocks=32)
    with chairlift.continuous_batching_context_manager(model, continuous_batching_config=config) as manager:
        manager.get_result(manager.add_request(list(range(3, 33)), max_new_tokens=4))
        stats = manager.stats()
        described = manager.describe()
    assert [group.reach for group in stats.groups] == ["window of 6", "full"]
    assert sum(group.cached_blocks for group in stats.groups) == stats.cached_blocks > 0
    assert {group.owned_blocks + group.retiring_blocks for group in stats.groups} == {0}
    assert (
        f"2 of {manager.geometry.block_bytes:,} bytes a block (1 x window of 6, 1 x full), 0.0% of it padding"
        in described
    )
