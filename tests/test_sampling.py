"""Draws follow the distribution that was asked for, and depend on nothing but the request."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, PreTrainedModel, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import chairlift
from chairlift.engine.inputs import SamplingTable
from chairlift.sampling.draw import choose, gumbel, largest, scratch_bytes, warp
from chairlift.watch import ForwardWatch


def table(temperature: float, top_k: int, top_p: float, rows: int = 1) -> SamplingTable:
    return SamplingTable(
        torch.ones(rows, dtype=torch.bool),
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
    )


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.1, 5.0),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.05, 1.0),
)
def test_warping_is_that_of_generate(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(seed)) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    warped = warp(logits, table(temperature, top_k, top_p, 3), torch.arange(3))
    kept, expected_kept = warped.isfinite(), expected.isfinite()
    # At the very edge of top-p the two sums may round to either side: one token.
    assert (kept != expected_kept).sum(dim=1).max() <= (1 if top_p < 1 else 0)
    both = kept & expected_kept
    assert torch.allclose(warped[both], expected[both])


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 70),
    columns=st.sampled_from([1, 5, 500, 3001]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    odd=st.sampled_from([None, float("nan"), float("inf"), -float("inf")]),
    transposed=st.booleans(),
)
def test_the_largest_is_that_of_torch(
    seed: int, rows: int, columns: int, dtype: torch.dtype, odd: float | None, transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=generator).to(dtype)
    if odd is not None:
        logits[torch.rand(rows, columns, generator=generator) < 0.01] = odd
    logits = logits.T.contiguous().T if transposed else logits
    assert largest(logits).tolist() == logits.max(dim=-1).indices.tolist()


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5]])
    count = 40_000
    draws = torch.stack([torch.full((count,), 77), torch.zeros(count, dtype=torch.int64), torch.arange(count)], dim=1)
    tokens, _ = choose(
        logits.expand(count, -1), table(1.0, 0, 1.0), torch.zeros(count, dtype=torch.int64), draws.int(), logprobs=False
    )
    counts = torch.bincount(tokens, minlength=5).double() / count
    probabilities = torch.softmax(logits[0].double(), dim=-1)
    # Five standard deviations.
    assert ((counts - probabilities).abs() < 5 * (probabilities * (1 - probabilities) / count).sqrt()).all()


def test_gumbel_variables_have_gumbels_mean_and_variance() -> None:
    noise = gumbel(torch.tensor([[1, 2, 3], [1, 2, 4]], dtype=torch.int32), 200_000).double()
    assert noise.isfinite().all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, rel=0.01)
    assert torch.corrcoef(noise)[0, 1].abs() < 0.01


def test_a_draw_depends_on_key_position_and_token_alone() -> None:
    one = gumbel(torch.tensor([[5, 6, 7]], dtype=torch.int32), 50)
    among = gumbel(torch.tensor([[1, 1, 1], [5, 6, 7], [5, 6, 8], [5, 7, 7]], dtype=torch.int32), 80)
    assert torch.equal(one[0], among[1, :50])
    assert not torch.equal(one[0], among[2, :50])
    assert not torch.equal(one[0], among[3, :50])


def test_logprobs_are_of_the_distribution_drawn_from() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    tokens, logprobs = choose(logits, table(2.0, 2, 1.0), torch.tensor([0]), torch.tensor([[1, 1, 1]]), logprobs=True)
    expected = torch.log_softmax(torch.tensor([1.0, 0.5]), dim=0)
    assert logprobs is not None
    assert logprobs[0] == pytest.approx(float(expected[tokens[0]]))


def test_greedy_rows_stay_greedy_beside_drawn_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]] * 2)
    mixed = SamplingTable(torch.tensor([False, True]), torch.tensor([1.0, 50.0]), torch.zeros(2).long(), torch.ones(2))
    draws = torch.tensor([[1, 2, n] for n in range(2)])
    tokens = Counter()
    for n in range(200):
        draws[:, 2] = n
        chosen, _ = choose(logits, mixed, torch.tensor([0, 1]), draws, logprobs=False)
        assert chosen[0] == 1
        tokens[int(chosen[1])] += 1
    assert len(tokens) == 3
    assert torch.equal(logits, torch.tensor([[0.0, 3.0, 1.0]] * 2)), "the model's logits were written to"


SAMPLED = GenerationConfig(max_new_tokens=20, do_sample=True, temperature=1.3, top_k=0, eos_token_id=-1)


def sampled(model: PreTrainedModel, inputs: list[list[int]], **config: object) -> list[list[int]]:
    settings = chairlift.ContinuousBatchingConfig(**{"page_size": 4, "num_blocks": 64, "seed": 7, **config})
    return [o.generated_tokens for o in chairlift.generate_batch(model, inputs, SAMPLED, settings).values()]


def test_the_same_seed_gives_the_same_tokens_whatever_the_batch(llama: PreTrainedModel) -> None:
    inputs = [[5, 6, 7], [8] * 11, [9, 10], [5, 6, 7]]
    expected = sampled(llama, inputs, max_batch_tokens=64)
    assert expected == sampled(llama, inputs, max_batch_tokens=3)
    assert expected == sampled(llama, inputs, max_batch_tokens=64, num_blocks=12, safety_margin=0.0)
    assert expected[:2] == sampled(llama, inputs[:2], max_batch_tokens=64)
    assert expected != sampled(llama, inputs, max_batch_tokens=64, seed=8)
    assert expected[0] != expected[3], "two requests of one prompt drew the same"


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1.0), ("temperature", 0.0), ("top_p", 1.5), ("top_k", -1)]
)
def test_values_out_of_bounds_are_refused(llama: PreTrainedModel, field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        chairlift.generate_batch(llama, [[5, 6, 7]], max_new_tokens=2, do_sample=True, **{field: value})


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 0.0}, {"top_k": 2**40, "top_p": 0.0}], ids=str)
def test_the_narrowest_draw_is_greedy(llama: PreTrainedModel, fields: dict) -> None:
    greedy = chairlift.generate_batch(llama, [[5, 6, 7]], max_new_tokens=8, do_sample=False)
    drawn = chairlift.generate_batch(llama, [[5, 6, 7]], max_new_tokens=8, do_sample=True, **fields)
    assert greedy["req_0"].generated_tokens == drawn["req_0"].generated_tokens


def test_rows_in_slices_choose_what_each_chooses_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(150, 40, generator=generator)
    every = SamplingTable(
        torch.arange(150) % 3 > 0, torch.rand(150, generator=generator) + 0.5, torch.arange(150) % 7, torch.rand(150)
    )
    draws = torch.randint(0, 2**31 - 1, (150, 3), generator=generator).int()
    tokens, logprobs = choose(logits, every, torch.arange(150), draws, logprobs=True)
    assert logprobs is not None
    for row in range(150):
        alone, logprob = choose(logits[row : row + 1], every, torch.tensor([row]), draws[row : row + 1], logprobs=True)
        assert logprob is not None
        assert int(alone) == int(tokens[row])
        assert float(logprob) == pytest.approx(float(logprobs[row]), abs=1e-5)


def test_sampling_takes_no_more_than_it_says() -> None:
    rows, vocab_size = 200, 4000
    logits = torch.randn(rows, vocab_size).bfloat16()
    watch = ForwardWatch(torch.nn.Module(), torch.zeros(0))
    with watch:
        choose(
            logits, table(1.5, 50, 0.9, rows), torch.arange(rows), torch.ones(rows, 3, dtype=torch.int32), logprobs=True
        )
    assert watch.peak_bytes <= scratch_bytes(vocab_size) + 100 * rows


def test_an_integer_temperature_is_a_temperature(llama: PreTrainedModel) -> None:
    assert len(chairlift.generate_batch(llama, [[5]], max_new_tokens=2, do_sample=True, temperature=1)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_of_equal_logits_the_first_is_the_greedy_token_and_no_number_before_all(dtype: torch.dtype) -> None:
    for seed in range(20):
        logits = torch.randint(0, 4, (5, 900 + seed), generator=torch.Generator().manual_seed(seed)).to(dtype)
        logits[1, [17, 40]] = float("nan")
        logits[2] = float("-inf")
        table = SamplingTable(
            draws=torch.zeros(5, dtype=torch.bool),
            temperature=torch.ones(5),
            top_k=torch.zeros(5, dtype=torch.int64),
            top_p=torch.ones(5),
        )
        tokens, logprobs = choose(logits, table, torch.arange(5), torch.zeros(5, 3, dtype=torch.int32), logprobs=False)
        assert logprobs is None
        assert tokens.tolist() == [_first_of_the_largest(row) for row in logits.tolist()]


def _first_of_the_largest(row: list[float]) -> int:
    no_number = [index for index, value in enumerate(row) if value != value]
    return no_number[0] if no_number else row.index(max(row))


def test_each_request_draws_by_values_of_its_own(llama: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the generation config has none: https://github.com/huggingface/transformers/issues/45026."""
    hot = GenerationConfig(max_new_tokens=20, do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1)
    prompt = [5, 6, 7]
    own = [{"temperature": 0.5}, {"temperature": 2}, {"top_k": 1}, {"top_p": 0.01}, {"do_sample": False}, {}]
    together, apart = [], []
    for fields in own:
        config = GenerationConfig.from_dict({**hot.to_dict(), **fields})
        settings = chairlift.ContinuousBatchingConfig(page_size=4, num_blocks=256, seed=7)
        (output,) = chairlift.generate_batch(llama, [prompt], config, settings).values()
        apart.append(output.generated_tokens)
    settings = chairlift.ContinuousBatchingConfig(page_size=4, num_blocks=256, seed=7, per_request_processors=True)
    for fields in own:
        # The draws of a request depend on its place: each is the first of its manager, with others beside it.
        with chairlift.continuous_batching_context_manager(llama, hot, continuous_batching_config=settings) as manager:
            label = manager.add_request(prompt, **fields)
            others = manager.add_requests([prompt, prompt], temperature=0.3, top_k=3)
            output = manager.get_result(label)
            assert output is not None
            together.append(output.generated_tokens)
            assert [manager.get_result(other) for other in others]
    assert together == apart
    assert len({tuple(tokens) for tokens in apart}) == 4, "0.5, 2, greedy three times, and 1"
    assert "per_request_processors" not in caplog.text


def test_values_of_its_own_are_honoured_where_the_config_did_not_announce_them(
    llama: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with chairlift.continuous_batching_context_manager(llama, SAMPLED) as manager:
        labels = [manager.add_request([5, 6, 7], top_k=1) for _ in range(2)]
        first, second = (manager.get_result(label) for label in labels)
    assert first is not None
    assert second is not None
    assert first.generated_tokens == second.generated_tokens
    assert caplog.text.count("per_request_processors is False") == 1


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"temperature": -1.0}, ValueError, "temperature is -1"),
        ({"temperature": 0}, ValueError, "temperature is 0"),
        ({"temperature": "hot"}, TypeError, "temperature is 'hot'"),
        ({"temperature": True}, TypeError, "temperature is True"),
        ({"top_k": 1.5}, TypeError, "top_k is 1.5"),
        ({"top_k": -1}, ValueError, "top_k is -1"),
        ({"top_p": 1.5}, ValueError, "top_p is 1.5"),
        ({"do_sample": 1}, TypeError, "do_sample is 1"),
        ({"do_sample": False, "top_p": 0.5}, ValueError, "top_p=0.5 would have no effect: do_sample is False"),
        ({"min_p": 0.1}, TypeError, "min_p"),
    ],
    ids=str,
)
def test_values_of_a_request_that_cannot_be_are_refused_at_once_and_harm_nobody(
    llama: PreTrainedModel, fields: dict, error: type[Exception], message: str
) -> None:
    with chairlift.continuous_batching_context_manager(llama, SAMPLED) as manager:
        other = manager.add_request([5, 6, 7])
        for add in (
            manager.add_request,
            manager.submit,
            lambda prompt, **fields: manager.add_requests([prompt], **fields),
        ):
            with pytest.raises(error, match=message):
                add([5, 6, 7], **fields)
        output = manager.get_result(other)
        assert output is not None
        assert output.finish_reason == "length"
