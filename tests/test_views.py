"""The scheduler, the cache and the requests of a manager, to be looked at: live, and unchangeable."""

import pytest
import transformers.generation.continuous_batching as original
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel

import chairlift
from chairlift import (
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    ContinuousMixin,
    FIFOScheduler,
    PagedAttentionCache,
    PrefillFirstScheduler,
    RequestState,
    RequestStatus,
    Scheduler,
)
from tiny_models import reference, tiny_model

PROMPT = list(range(5, 22))
LONG = 300


def manager_of(model: PreTrainedModel, **fields: object) -> ContinuousBatchingManager:
    config = ContinuousBatchingConfig(**{"page_size": 4, "num_blocks": 128, "max_batch_tokens": 64, **fields})
    generation = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1)
    return chairlift.init_continuous_batching(model, generation, config)


def test_every_public_name_of_the_original_is_there() -> None:
    for name in original.__all__:
        assert getattr(chairlift, name).__name__ == name
        assert name in chairlift.__all__
        assert name in dir(chairlift)


def test_views_show_what_runs_and_what_waits(llama: PreTrainedModel) -> None:
    manager = manager_of(llama, max_requests_per_batch=1)
    scheduler, cache = manager.scheduler, manager.cache
    assert type(scheduler) is FIFOScheduler
    assert isinstance(scheduler, Scheduler)
    assert not scheduler.has_pending_requests()
    assert scheduler.max_requests_per_batch == 1
    assert (cache.num_blocks, cache.page_size, cache.block_size, cache.num_groups) == (128, 4, 4, 1)
    assert cache.compute_free_capacity() == 1.0
    manager.start()
    label = manager.add_request(PROMPT, "first", max_new_tokens=LONG, streaming=True)
    outputs = manager.request_id_iter(label)
    for _ in range(3):
        next(outputs)
    manager.add_request(PROMPT[:9], "second", priority=3)
    while not scheduler.waiting_requests:
        next(outputs)
    with manager.pause():
        assert list(scheduler.active_requests) == ["first"]
        assert list(scheduler.waiting_requests) == ["second"]
        first, second = scheduler.request_state("first"), scheduler.waiting_requests["second"]
        assert (first.status, second.status) == (RequestStatus.DECODING, RequestStatus.PENDING)
        assert first.initial_tokens == PROMPT
        assert first.generated_len() >= 3
        assert first.generated_tokens == reference(llama, PROMPT, LONG)[0][: first.generated_len()]
        assert first.current_len() == len(PROMPT) + first.generated_len() == first.position_offset + 1
        assert first.allocated_blocks == cache.owned_blocks == -(-first.position_offset // 4)
        assert first.lifespan[0] > 0
        assert (second.allocated_blocks, second.priority, second.lifespan, second.is_cpu_offloaded) == (
            0,
            3,
            (-1, -1),
            False,
        )
        assert cache.free_blocks + cache.cached_blocks + cache.owned_blocks == cache.capacity == 128
        assert cache.get_num_free_blocks() == cache.compute_free_capacity(relative=False)
        assert "DECODING, 17 prompt and" in repr(first)
        assert repr(scheduler) == "FIFOScheduler(1 run, 1 wait)"
        assert "of 4 tokens" in repr(cache)
        before = first.generated_len()
        with pytest.raises(AttributeError):
            first.status = RequestStatus.FAILED  # type: ignore[misc]
        with pytest.raises(TypeError):
            scheduler.active_requests["first"] = first  # type: ignore[index]
    for _ in range(3):
        next(outputs)
    assert first.generated_len() > before, "it is no copy"
    manager.cancel_request("first")
    assert manager.get_result("second", timeout=60) is not None
    with pytest.raises(LookupError, match="'first' has ended"):
        _ = first.status
    assert repr(first) == "RequestState('first', ended)"
    with pytest.raises(KeyError, match="no request 'second'"):
        scheduler.request_state("second")
    manager.destroy()


def test_the_class_of_a_scheduler_is_its_policy(llama: PreTrainedModel) -> None:
    manager = manager_of(llama, scheduler_type="prefill_first")
    assert type(manager.scheduler) is PrefillFirstScheduler
    manager.destroy()


def test_a_scheduler_cannot_be_made_or_plugged_in() -> None:
    for kind in (Scheduler, FIFOScheduler, PagedAttentionCache):
        with pytest.raises(TypeError, match="belongs to a manager"):
            kind(object())
    with pytest.raises(TypeError, match="'fifo' or scheduler_type='prefill_first'"):

        class Mine(FIFOScheduler):
            pass

    with pytest.raises(TypeError, match="scheduler_type is the class FIFOScheduler"):
        ContinuousBatchingConfig(scheduler_type=FIFOScheduler)  # type: ignore[arg-type]


def test_a_model_class_may_have_the_entry_points_for_itself() -> None:
    class Model(ContinuousMixin, LlamaForCausalLM):
        pass

    plain = tiny_model("llama")
    model = Model(plain.config)
    model.load_state_dict(plain.state_dict())
    generation = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1)
    outputs = model.generate_batch([PROMPT], generation)
    assert outputs["req_0"].generated_tokens == reference(plain, PROMPT, 4)[0]
    assert isinstance(model.init_continuous_batching(generation), ContinuousBatchingManager)


def test_a_state_that_gave_up_its_blocks_says_where_they_are(llama: PreTrainedModel) -> None:
    manager = manager_of(llama, num_blocks=12, max_batch_tokens=32, cpu_offload_space=0.001, safety_margin=0.0)
    manager.start()
    for nth in range(5):
        manager.add_request([nth + 3] * 6, f"r{nth}", max_new_tokens=24, streaming=True)
    seen: list[RequestState] = []
    for _ in range(5 * 24):
        output = manager.get_result(timeout=60)
        assert output is not None
        with manager.pause():
            seen += [state for state in manager.scheduler.waiting_requests.values() if state.is_cpu_offloaded]
            for state in seen[-1:]:
                if state.is_cpu_offloaded:
                    assert (state.status, state.allocated_blocks) == (RequestStatus.PENDING, 0)
                    assert state.position_offset == state.current_len() - 1
        if seen:
            break
    assert seen
    manager.destroy()
