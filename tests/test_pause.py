"""Pauses: the model is the caller's, and what becomes of requests, weights and memory is what was asked for."""

import contextlib
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

import chairlift
from chairlift import ContinuousBatchingConfig, ContinuousBatchingManager, GenerationOutput
from tiny_models import WAYS_TO_CHANGE, change_weights, reference, tiny_model

PROMPT = list(range(5, 22))
NEW_TOKENS = 8
LONG = 300


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


@contextlib.contextmanager
def serving(model: PreTrainedModel, **fields: object) -> Iterator[ContinuousBatchingManager]:
    config = ContinuousBatchingConfig(**{"page_size": 4, "num_blocks": 256, "max_batch_tokens": 64, **fields})
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    manager = chairlift.init_continuous_batching(model, generation, config)
    manager.start()
    try:
        yield manager
        manager._engine.check_integrity()
    finally:
        manager.destroy()


def under_way(manager: ContinuousBatchingManager, prompt: list[int] = PROMPT, new_tokens: int = LONG) -> str:
    """A request that has some of its tokens."""
    label = manager.add_request(prompt, max_new_tokens=new_tokens, streaming=True)
    for output in manager.request_id_iter(label):
        if len(output.generated_tokens) == 3:
            return label
    raise AssertionError("it ended")


def last(manager: ContinuousBatchingManager, label: str) -> GenerationOutput:
    (*_, output) = manager.request_id_iter(label)
    return output


def alone(model: PreTrainedModel, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    return reference(model, prompt, new_tokens)[0]


def chosen_by_old(output: GenerationOutput) -> int:
    """Tokens that were chosen before the weights changed."""
    assert output.epochs is not None
    assert output.epochs == sorted(output.epochs)
    assert output.epoch == output.epochs[-1] == 1
    return output.epochs.count(0)


def test_nothing_is_computed_in_a_pause_and_everything_goes_on_after_it(model: PreTrainedModel) -> None:
    with serving(model) as manager:
        label = under_way(manager)
        with manager.pause() as pause:
            assert manager.is_paused()
            assert manager.is_running()
            steps = manager.stats().steps
            other = manager.add_request(PROMPT[:5])
            time.sleep(0.1)
            assert manager.stats().steps == steps
        assert not manager.is_paused()
        pause.resume()  # once more does nothing
        output, after = last(manager, label), manager.get_result(other)
        assert manager.stats().epoch == 0
    assert (output.generated_tokens, output.epochs) == (alone(model, PROMPT, LONG), None)
    assert after is not None
    assert after.generated_tokens == alone(model, PROMPT[:5])


def test_training_in_a_pause_is_training_of_a_model_that_nobody_serves(model: PreTrainedModel) -> None:
    untouched = tiny_model("llama")
    batch = torch.arange(3, 43).view(2, 20)

    def step(trained: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
        optimiser = torch.optim.AdamW(trained.parameters(), lr=0.05, fused=True)
        out = trained(input_ids=batch, labels=batch)
        out.loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        return out.loss.detach(), out.logits.detach()

    for of_both in (model, untouched):
        of_both.train()
    model.model.layers[1].eval()
    attention, generation = model.config._attn_implementation, model.generation_config.to_dict()
    with serving(model) as manager:
        for _ in range(3):
            label = under_way(manager)
            assert not model.training
            with manager.pause(requests="abort"):
                assert model.training
                assert not model.model.layers[1].training
                assert model.config._attn_implementation == attention
                for mine, its in zip(step(model), step(untouched), strict=True):
                    assert torch.equal(mine, its)
            assert last(manager, label).finish_reason == "cancelled"
            after = manager.get_result(manager.add_request(PROMPT))
            assert after is not None
            assert after.generated_tokens == alone(untouched, PROMPT)
            assert after.cached_tokens == 0
    assert model.training
    assert not model.model.layers[1].training
    assert model.generation_config.to_dict() == generation
    for mine, its in zip(model.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert torch.equal(model(batch).logits, untouched(batch).logits)


@pytest.mark.parametrize("how", WAYS_TO_CHANGE)
def test_weights_that_changed_in_a_pause_are_noticed_when_it_ends(model: PreTrainedModel, how: str) -> None:
    with serving(model) as manager:
        first = manager.get_result(manager.add_request(PROMPT))
        with manager.pause():
            pass
        again = manager.get_result(manager.add_request(PROMPT))
        with manager.pause():
            change_weights(model, how)
        after = manager.get_result(manager.add_request(PROMPT))
        epoch = manager.stats().epoch
    assert first is not None
    assert again is not None
    assert after is not None
    assert (first.cached_tokens, again.cached_tokens, after.cached_tokens) == (0, 16, 0)
    assert (first.epoch, again.epoch, after.epoch, epoch) == (0, 0, 1, 1)
    assert after.generated_tokens == alone(model, PROMPT)


def test_k_and_v_that_are_kept_are_those_of_the_old_weights(model: PreTrainedModel) -> None:
    old = tiny_model("llama")
    with serving(model) as manager:
        label = under_way(manager)
        with manager.pause(kv="keep"):
            change_weights(model)
        output = last(manager, label)
        assert manager.stats().soft_resets == 0
    by_old = chosen_by_old(output)
    tokens = alone(old, PROMPT, by_old)
    assert output.generated_tokens[:by_old] == tokens
    # What goes on: the newest token is the first that the new weights compute, over K and V of the old ones.
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        old(torch.tensor([PROMPT + tokens[:-1]]), cache=cache)
        for token in output.generated_tokens[by_old:]:
            logits = model(torch.tensor([tokens[-1:]]), cache=cache).logits[0, -1]
            assert logits.max() - logits[token] < 1e-4
            tokens.append(token)


@pytest.mark.parametrize("release_memory", [False, True])
def test_k_and_v_that_are_recomputed_are_those_of_the_new_weights(model: PreTrainedModel, release_memory: bool) -> None:
    old = tiny_model("llama")
    with serving(model) as manager:
        label = under_way(manager)
        with manager.pause(kv="recompute", release_memory=release_memory):
            change_weights(model)
        output = last(manager, label)
        assert manager.stats().soft_resets == 1
    by_old = chosen_by_old(output)
    tokens = alone(old, PROMPT, by_old)
    assert output.generated_tokens == tokens + alone(model, PROMPT + tokens, LONG - by_old)


def test_released_memory_is_given_back_and_taken_again(model: PreTrainedModel) -> None:
    with serving(model, cpu_offload_space=0.001) as manager:
        label = under_way(manager)
        storage = manager._session.cache.storage
        assert storage.count_nonzero()
        with manager.pause(release_memory=True):
            assert not storage.count_nonzero()
            assert manager._session.runner.linears is None
            stats = manager.stats()
            assert (stats.free_blocks, stats.running, stats.waiting) == (stats.capacity, 0, 1)
        output = last(manager, label)
        assert manager.stats().epoch == 0
    assert output.generated_tokens == alone(model, PROMPT, LONG)


def test_requests_that_were_begun_end_before_a_pause_that_waits_and_queued_ones_stay(model: PreTrainedModel) -> None:
    with serving(model, max_requests_per_batch=1) as manager:
        first, second = (manager.add_request(PROMPT, max_new_tokens=40) for _ in range(2))
        while not manager.stats().running:
            time.sleep(0.001)
        with manager.pause(requests="wait"):
            output = manager.get_result(first, timeout=0)
            assert output is not None
            assert output.finish_reason == "length"
            stats = manager.stats()
            assert (stats.running, stats.waiting) == (0, 1)
            assert manager.get_result(second, timeout=0.05) is None
            change_weights(model)
        after = manager.get_result(second)
    assert after is not None
    assert (after.generated_tokens, after.epochs, after.epoch) == (alone(model, PROMPT, 40), None, 1)


def test_a_pause_that_aborts_ends_queued_requests_too(model: PreTrainedModel) -> None:
    with serving(model, max_requests_per_batch=1) as manager:
        label = under_way(manager)
        queued = manager.add_request(PROMPT)
        with manager.pause(requests="abort"):
            for ended in (label, queued):
                assert last(manager, ended).finish_reason == "cancelled"
            assert manager.stats().free_blocks + manager.stats().cached_blocks == manager.stats().capacity
            later = manager.add_request(PROMPT)
        output = manager.get_result(later)
    assert output is not None
    assert output.generated_tokens == alone(model, PROMPT)


def test_the_loop_goes_on_after_the_last_of_several_pauses(model: PreTrainedModel) -> None:
    with serving(model) as manager:
        label = under_way(manager)
        first, second = manager.pause(), manager.pause(kv="recompute")
        change_weights(model)
        second.resume()
        assert manager.is_paused()
        assert manager.get_result(label, timeout=0.05) is not None  # what came before the pause
        steps = manager.stats().steps
        time.sleep(0.05)
        assert manager.stats().steps == steps
        first.resume()
        assert not manager.is_paused()
        output = last(manager, label)
        assert manager.stats().soft_resets == 1, "one of them asked for it"
    assert chosen_by_old(output) > 0


def test_a_pause_that_waits_goes_on_waiting_when_another_ends(model: PreTrainedModel) -> None:
    with serving(model) as manager:
        label = under_way(manager)
        held = manager.pause()
        waited = []
        waiting = threading.Thread(target=lambda: waited.append(manager.pause(requests="wait")))
        waiting.start()
        time.sleep(0.1)
        assert not waited
        held.resume()
        waiting.join(60)
        assert manager.is_paused()
        assert manager.stats().running == 0
        waited[0].resume()
        assert last(manager, label).generated_tokens == alone(model, PROMPT, LONG)


def test_a_cancel_in_a_pause_comes_at_once(model: PreTrainedModel) -> None:
    with serving(model) as manager:
        label = under_way(manager)
        with manager.pause():
            manager.cancel_request(label)
            assert last(manager, label).finish_reason == "cancelled"
            assert manager.stats().running == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"requests": "drop"}, "requests is 'drop', but must be 'keep', 'wait' or 'abort'"),
        ({"kv": "drop"}, "kv is 'drop', but must be 'keep' or 'recompute'"),
        ({"kv": "keep", "release_memory": True}, "kv is 'keep', but release_memory"),
    ],
)
def test_a_pause_that_makes_no_sense_is_refused(model: PreTrainedModel, fields: dict, message: str) -> None:
    with serving(model) as manager:
        with pytest.raises(ValueError, match=message):
            manager.pause(**fields)
        assert not manager.is_paused()


def test_a_manager_that_does_not_run_cannot_pause(model: PreTrainedModel) -> None:
    with serving(model) as manager:
        manager.stop()
        with pytest.raises(RuntimeError, match="does not run"):
            manager.pause()


def test_a_pause_that_does_not_come_in_time_leaves_nothing(model: PreTrainedModel) -> None:
    with serving(model) as manager:
        label = under_way(manager)
        held = manager.pause()
        with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
            manager.pause(requests="wait", timeout=0.05)
        held.resume()
        assert last(manager, label).generated_tokens == alone(model, PROMPT, LONG)


def test_the_loop_cannot_pause_itself(model: PreTrainedModel) -> None:
    refused = []
    with serving(model) as manager:

        def hook(*_: object) -> None:
            try:
                manager.pause()
            except RuntimeError as error:
                refused.append(str(error))

        with manager.pause():
            handle = model.model.register_forward_hook(hook)
        assert manager.get_result(manager.add_request(PROMPT)) is not None
        with manager.pause():
            handle.remove()
    assert "the loop itself" in refused[0]


def test_to_stop_in_a_pause_waits_for_nobody(model: PreTrainedModel) -> None:
    with serving(model) as manager:
        label = under_way(manager)
        with manager.pause():
            with pytest.raises(RuntimeError, match="holds a pause"):
                manager.stop()
            assert manager.is_running()
            assert manager.add_request(PROMPT, request_id="taken") == "taken"
            manager.stop(hard_stop=True)
            assert not manager.is_running()
            assert not manager.is_paused()
        assert last(manager, label).finish_reason == "error"
        manager.start()
        output = manager.get_result(manager.add_request(PROMPT))
        assert output is not None
        assert output.generated_tokens == alone(model, PROMPT)
        with manager.pause():
            manager.stop()  # nothing is in flight


def test_threads_that_start_pause_and_stop_as_they_like_never_wait_in_vain(
    model: PreTrainedModel, recwarn: pytest.WarningsRecorder
) -> None:
    refused = []

    def race(manager: ContinuousBatchingManager) -> None:
        for _ in range(20):
            manager.start()
            try:
                with manager.pause(timeout=60):
                    pass
            except RuntimeError as error:  # a time-out is none
                refused.append(str(error))
            manager.stop(hard_stop=True)

    with serving(model) as manager:
        threads = [threading.Thread(target=race, args=(manager,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert manager.fatal_error is None
        manager.start()
        output = manager.get_result(manager.add_request(PROMPT))
        assert output is not None
        assert output.generated_tokens == alone(model, PROMPT)
    assert all("does not run" in why or "was stopped before" in why for why in refused)
    recwarn.clear()


def test_a_graceful_stop_of_another_thread_comes_after_the_pause(model: PreTrainedModel) -> None:
    with serving(model) as manager:
        label = under_way(manager)
        with manager.pause():
            stopping = threading.Thread(target=manager.stop)
            stopping.start()
            stopping.join(0.1)
            assert stopping.is_alive()
        stopping.join(60)
        assert not manager.is_running()
        assert last(manager, label).generated_tokens == alone(model, PROMPT, LONG)


def test_memory_that_cannot_be_had_again_ends_the_manager_and_everybody_is_told(model: PreTrainedModel) -> None:
    with serving(model) as manager:
        label = under_way(manager)
        pause = manager.pause(release_memory=True)
        with (
            mock.patch.object(manager._session.cache, "take_again", side_effect=MemoryError("no room")),
            pytest.raises(MemoryError, match="no room"),
        ):
            pause.resume()
        manager.join(60)
        output = last(manager, label)
        assert output.finish_reason == "error"
        assert "no room" in (output.error or "")
        for call in (manager.pause, lambda: manager.add_request(PROMPT), manager.start):
            with pytest.raises(RuntimeError) as raised:
                call()
            assert isinstance(raised.value.__cause__, MemoryError)


@pytest.mark.parametrize("end", ["destroyed", "died"])
def test_of_what_is_over_nothing_is_accepted_in_silence(
    model: PreTrainedModel, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(model) as manager:
        if end == "destroyed":
            manager.destroy()
        else:
            manager.stop()
            monkeypatch.setattr("chairlift.worker.run_sync", mock.Mock(side_effect=MemoryError("no room")))
            manager.start()
            manager.join()
        for call in (manager.pause, manager.weights_changed, manager.reset_prefix_cache, manager.start):
            with pytest.raises(RuntimeError, match="destroyed" if end == "destroyed" else "no room"):
                call()


def test_a_manager_in_a_pause_that_was_forgotten_serves_no_other_session(model: PreTrainedModel) -> None:
    config = ContinuousBatchingConfig(page_size=4)
    session = chairlift.continuous_batching_context_manager(
        model, continuous_batching_config=config, persistent_manager=True
    )
    with session as manager:
        manager.pause()
        manager.stop(hard_stop=True, keep_for_next_session=True)
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    outputs = chairlift.generate_batch(
        model, [PROMPT], generation, continuous_batching_config=config, persistent_manager=True
    )
    assert outputs["req_0"].generated_tokens == alone(model, PROMPT)
    chairlift.destroy_cached_continuous_batching_manager(model)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_weights_that_change_while_the_loop_runs_can_be_told(model: PreTrainedModel, kv: str) -> None:
    with serving(model) as manager:
        label = under_way(manager)
        with manager.pause():
            steps = manager.stats().soft_resets
        model.model.layers[0].mlp.down_proj.weight.data.mul_(-1)
        manager.weights_changed(kv)
        after = manager.get_result(manager.add_request(PROMPT))
        output = last(manager, label)
        assert manager.stats().soft_resets - steps == (kv == "recompute")
    assert after is not None
    # The request in flight is computed again and shares what it has then, its prompt.
    assert (after.cached_tokens, after.epoch) == (16 if kv == "recompute" else 0, 1)
    assert after.generated_tokens == alone(model, PROMPT)
    assert output.epochs is not None


def test_weights_said_to_have_changed_before_a_start_share_nothing(model: PreTrainedModel) -> None:
    with serving(model) as manager:
        assert manager.get_result(manager.add_request(PROMPT)) is not None
        manager.stop()
        manager.weights_changed()
        manager.start()
        after = manager.get_result(manager.add_request(PROMPT))
    assert after is not None
    assert (after.cached_tokens, after.epoch) == (0, 1)


def test_sixteen_threads_that_pause_and_submit_at_once_all_get_their_tokens(model: PreTrainedModel) -> None:
    expected = {size: alone(model, PROMPT[:size]) for size in range(2, 10)}
    failures: list[BaseException] = []
    with serving(model) as manager:

        def work(nth: int) -> None:
            try:
                for turn in range(6):
                    if (nth + turn) % 4 == 0:
                        with manager.pause(requests=("keep", "wait")[turn % 2], release_memory=turn == 3):
                            time.sleep(0.001)
                    size = 2 + (nth + turn) % 8
                    output = manager.get_result(manager.add_request(PROMPT[:size]), timeout=60)
                    assert output is not None
                    assert output.generated_tokens == expected[size]
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(nth,)) for nth in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        stats = manager.stats()
    assert not failures
    assert (stats.finished, stats.running, stats.waiting, stats.epoch) == (96, 0, 0, 0)
