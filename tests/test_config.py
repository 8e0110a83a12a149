"""The config: every field of transformers' own, its bounds, and what follows from memory and hints."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig as Theirs

import chairlift
from chairlift import ContinuousBatchingConfig, WorkloadHints
from chairlift.engine.cache import geometry_of
from chairlift.engine.free_memory import cgroup_memory
from chairlift.engine.sizing import BatchCost, max_blocks_per_request, resolve
from chairlift.probe import ModelFacts, learn
from tiny_models import reference, tiny_model

GIB = 1 << 30


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return learn(tiny_model("llama"))


def resolved(
    facts: ModelFacts,
    hints: WorkloadHints | None = None,
    free: int = GIB,
    cost: BatchCost | None = None,
    **fields: object,
) -> ContinuousBatchingConfig:
    config = ContinuousBatchingConfig(**fields)
    geometry = geometry_of(facts.calls, config.page_size)
    cost = cost or BatchCost(1000, 1000, 0)
    return resolve(config, hints or WorkloadHints(), facts, geometry, cost, attention="torch", free_bytes=free)


def test_every_field_of_theirs_is_a_field_of_ours() -> None:
    ours = {field.name: field.default for field in dataclasses.fields(ContinuousBatchingConfig)}
    theirs = {field.name: field.default for field in dataclasses.fields(Theirs)}
    assert set(theirs) <= set(ours)
    # Ours refuses what it cannot do, where theirs leaves it out.
    assert {name for name in theirs if theirs[name] != ours[name]} == {"drop_unsupported_processors"}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("page_size", 3, "page_size is 3, but must be at least 4"),
        ("num_blocks", 0, "num_blocks is 0, but must be at least 1"),
        ("num_blocks", 2**40, f"num_blocks is {2**40}, but must be at most {2**31 - 1}"),
        ("max_batch_tokens", -5, "max_batch_tokens is -5"),
        ("max_requests_per_batch", 0, "max_requests_per_batch is 0"),
        ("max_memory_percent", 0.0, "max_memory_percent is 0.0, but must be above 0"),
        ("max_memory_percent", 1.2, "at most 1"),
        ("safety_margin", -0.01, "safety_margin is -0.01"),
        ("safety_margin", 1.01, "safety_margin is 1.01"),
        ("max_queue_size", -1, "max_queue_size is -1"),
        ("default_compile_level", 4, "at most 3"),
        ("seed", -1, "seed is -1"),
        ("scheduler_type", "lifo", "scheduler_type is 'lifo', but must be 'fifo' or 'prefill_first'"),
        ("cpu_offload_space", -1.0, "cpu_offload_space is -1.0"),
    ],
)
def test_a_value_out_of_bounds_is_named_with_its_bound(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContinuousBatchingConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_async_batching", True),
        ("use_cuda_graph", True), ("use_cuda_graph", (False, True)), ("q_padding_interval_size", 64),
        ("kv_padding_interval_size", 64), ("default_compile_level", 1),
        ("varlen_compile_config", {}),
    ],
)  # fmt: skip
def test_what_is_not_served_yet_is_said(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field}=.*not served yet"):
        ContinuousBatchingConfig(**{field: value})


@pytest.mark.parametrize("field", ["page_size", "num_blocks", "safety_margin"])
def test_a_value_of_another_type_is_a_type_error(field: str) -> None:
    with pytest.raises(TypeError, match=field):
        ContinuousBatchingConfig(**{field: "8"})


def test_deprecated_fields_still_work_and_say_what_to_use() -> None:
    with pytest.warns(FutureWarning, match="page_size"):
        assert ContinuousBatchingConfig(block_size=32).page_size == 32
    with pytest.warns(FutureWarning, match="graphs"):
        ContinuousBatchingConfig(max_cached_graphs=3)


def test_something_else_is_no_config() -> None:
    with pytest.raises(TypeError, match="dict"):
        ContinuousBatchingConfig.of({"page_size": 8})


def test_the_pool_takes_what_the_memory_leaves_after_a_batch(facts: ModelFacts) -> None:
    config = resolved(facts, page_size=16, max_batch_tokens=100, max_requests_per_batch=10)
    block = geometry_of(facts.calls, 16).model_block_bytes
    assert config.num_blocks == (int(0.6 * GIB) - 110_000) // block - 2
    half = resolved(facts, page_size=16, max_batch_tokens=100, max_requests_per_batch=10, max_memory_percent=0.3)
    assert half.num_blocks == (int(0.3 * GIB) - 110_000) // block - 2


def test_the_pool_is_no_larger_than_the_requests_can_use(facts: ModelFacts) -> None:
    hints = WorkloadHints(max_prompt_length=100, max_generated_length=20, num_requests=10, num_tokens=500)
    config = resolved(facts, hints, page_size=16)
    # Every request in blocks of its own, its last one partly empty.
    assert config.num_blocks == -(-500 // 16) + 10
    assert resolved(facts, dataclasses.replace(hints, num_tokens=0), page_size=16).num_blocks == 10 * 8
    assert config.max_requests_per_batch == 10


def test_batches_shrink_to_what_memory_bears_but_not_below_256_tokens(facts: ModelFacts) -> None:
    assert resolved(facts).max_batch_tokens == 8192
    cost = BatchCost(200_000, 0, 0)
    assert resolved(facts, cost=cost).max_batch_tokens == 1024
    assert resolved(facts, cost=BatchCost(1_000_000, 0, 0)).max_batch_tokens == 256
    assert resolved(facts, cost=cost, max_batch_tokens=2000).max_batch_tokens == 2000
    assert resolved(facts, max_batch_tokens=5).max_requests_per_batch == 5


def test_each_scheduler_has_its_own_reserve(facts: ModelFacts) -> None:
    assert resolved(facts).safety_margin == 0.15
    assert resolved(facts, scheduler_type="prefill_first").safety_margin == 0.0
    assert resolved(facts, scheduler_type="prefill_first", safety_margin=0.3).safety_margin == 0.3


def test_more_requests_than_a_batch_holds_do_not_shrink_it(facts: ModelFacts) -> None:
    cost = BatchCost(1000, 1_000_000, 0)
    few, many = (WorkloadHints(num_requests=count) for count in (200, 100_000))
    assert resolved(facts, few, cost=cost, free=GIB).max_batch_tokens == 8192
    assert resolved(facts, many, cost=cost, free=GIB).max_batch_tokens == 256


def test_a_resolved_config_can_be_used_again(facts: ModelFacts) -> None:
    config = resolved(facts, page_size=16)
    assert (config.attention, config.decode_fast_path, config.cuda_graphs) == ("torch", False, (False, False))
    again = ContinuousBatchingConfig.of(config)
    assert (again.num_blocks, again.max_batch_tokens, again.seed) == (
        config.num_blocks,
        config.max_batch_tokens,
        config.seed,
    )


def test_lists_are_pairs_and_nothing_asked_is_nothing_refused() -> None:
    ContinuousBatchingConfig(use_cuda_graph=[False, False], per_request_processors=True)


def test_no_room_for_a_block_says_what_takes_it(facts: ModelFacts) -> None:
    with pytest.raises(ValueError, match=r"no room for a cache.*max_batch_tokens, max_requests_per_batch or page_size"):
        resolved(facts, free=1 << 20, cost=BatchCost(10_000, 0, 0))


def test_the_tightest_limit_of_any_level_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    for folder, limit, used in (("outer", "300", "100"), ("outer/inner", "max", "90")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.current").write_text(f"{used}\n")
    (tmp_path / "outer" / "memory.stat").write_text("anon 10\ninactive_file 40\n")
    assert cgroup_memory(tmp_path, own) == (300, 60)
    own.write_text("4:memory:/\n0::/\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("50\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("20\n")
    assert cgroup_memory(tmp_path, own) == (50, 20)
    assert cgroup_memory(tmp_path, tmp_path / "none") is None


def test_tenants_and_eviction_are_checked() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"fairness": "everybody"}, "fairness is 'everybody'"),
        ({"tenant_weights": {"a": 1.0}}, "fairness is None"),
        ({"fairness": "tenant", "tenant_weights": {"a": 0}}, "0 for 'a', but weights go from 0.001 to 1000"),
        ({"cache_eviction": "random"}, "cache_eviction is 'random', but must be 'lru' or 'lifo'"),
        ({"page_size": 8, "match_unit": 3}, "match_unit is 3, but must divide page_size, which is 8"),
        ({"match_unit": -1}, "match_unit is -1"),
        ({"allow_block_sharing": False, "match_unit": 16}, "but allow_block_sharing is False"),
        ({"allow_block_sharing": False, "cache_eviction": "lifo"}, "but allow_block_sharing is False"),
        ({"cpu_offload_space": -1.0}, "cpu_offload_space is -1.0"),
    ]
    for fields, message in wrong:
        with pytest.raises(ValueError, match=re.escape(message)):
            ContinuousBatchingConfig(**fields)
    for space in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match="cpu_offload_space is"):
            ContinuousBatchingConfig(cpu_offload_space=space)
    for wrong_type in ({"cpu_offload_space": "1"}, {"cpu_offload_space": True}, {"tenant_weights": [("a", 1)]}):
        with pytest.raises(TypeError, match=next(iter(wrong_type))):
            ContinuousBatchingConfig(fairness="tenant", **wrong_type)
    with pytest.raises(TypeError, match="maps names to numbers"):
        ContinuousBatchingConfig(fairness="tenant", tenant_weights={"a": "heavy"})  # type: ignore[dict-item]


def test_host_memory_is_what_was_asked_for_and_what_there_is() -> None:
    model = tiny_model("llama")
    small = {"page_size": 4, "num_blocks": 8}

    def blocks(**config: Any) -> int:
        return chairlift.init_continuous_batching(
            model, continuous_batching_config=ContinuousBatchingConfig(**small, **config)
        ).config.swap_blocks

    assert blocks() == 0
    some = blocks(cpu_offload_space=0.01)
    assert 0 < some < blocks(cpu_offload_space=0.02) == pytest.approx(2 * some, abs=1)
    most = blocks(cpu_offload_space=None, cpu_offload_space_safety_threshold=0.001)
    assert most > 0
    assert blocks(cpu_offload_space=1e6, cpu_offload_space_safety_threshold=0.001) == pytest.approx(most, rel=0.5)
    with pytest.raises(ValueError, match="less than a single block"):
        blocks(cpu_offload_space=1e-9)
    with pytest.raises(ValueError, match="sized by cpu_offload_space_safety_threshold, which is 0"):
        blocks(cpu_offload_space=None, cpu_offload_space_safety_threshold=0.0)


@pytest.mark.parametrize(
    ("hinted", "pages"),
    [
        ((30_000, 2_000), 126), ((4_000, 500), 20), ((8_000, 192), 34), ((8_000, 193), 34), ((7_680, 256), 32),
        ((7_680, 257), 34), ((8_192, 0), 32), ((0, 8_193), 32), ((0, 0), 32), ((1, 1), 2), ((1, 10**30), 2**31 - 1),
    ],
)  # fmt: skip
def test_block_tables_have_room_for_what_is_hinted(hinted: tuple[int, int], pages: int) -> None:
    hints = WorkloadHints(max_prompt_length=hinted[0], max_generated_length=hinted[1])
    assert max_blocks_per_request(ContinuousBatchingConfig(), hints) == pages
    assert max_blocks_per_request(ContinuousBatchingConfig(max_blocks_per_request=5), hints) == 5


@pytest.mark.parametrize("pages", [None, 0, 1, 3, 2**31 - 1])
def test_a_request_that_is_longer_than_its_block_table_makes_it_grow(llama: PreTrainedModel, pages: int | None) -> None:
    config = ContinuousBatchingConfig(page_size=4, num_blocks=64, max_blocks_per_request=pages)
    generation = GenerationConfig(max_new_tokens=30, do_sample=False, eos_token_id=-1)
    manager = chairlift.init_continuous_batching(llama, generation, config)
    assert manager.config.max_blocks_per_request == (32 if pages is None else pages)
    manager.start()
    for length in (3, 140):
        prompt = [5 + place % 90 for place in range(length)]
        output = manager.get_result(manager.add_request(prompt), timeout=60)
        assert output is not None
        assert output.generated_tokens == reference(llama, prompt, 30)[0]
    manager.destroy()


def test_the_description_says_why() -> None:
    model = tiny_model("llama")
    chosen = chairlift.init_continuous_batching(model).describe()
    assert "replaced, as auto_switch_to_flash allows" in chosen
    for words in ("the default", "drawn by the system", "leave beside a full batch", "divisor of page_size"):
        assert words in chosen
    asked = ContinuousBatchingConfig(
        page_size=8, num_blocks=9, seed=3, safety_margin=0.5, max_batch_tokens=32, max_requests_per_batch=40,
        max_blocks_per_request=2, match_unit=4, auto_switch_to_flash=False,
    )  # fmt: skip
    lines = chairlift.init_continuous_batching(model, continuous_batching_config=asked).describe().splitlines()
    for name in ("num_blocks", "seed", "safety_margin", "max_batch_tokens", "max_blocks_per_request", "prefix cache"):
        (line,) = (line for line in lines if line.startswith(name + " "))
        assert "(asked for" in line
    (line,) = (line for line in lines if line.startswith("max_requests_per_batch "))
    assert line.endswith("32  (as many as a step has tokens)")
