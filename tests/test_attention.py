"""The attention kernels through the boundary, held against the formula; and what a model's choice of attention does."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny_models import tiny_model
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

import chairlift
from chairlift import _native
from chairlift.attention.native import NativeAttention
from chairlift.attention.plain import Reach, scores_attention, visibility

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def int32(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 90), st.sampled_from([1, 1, 1, 2, 17, 40])), min_size=1, max_size=5),
    shared=st.integers(0, 6),
    page_size=st.sampled_from([1, 4, 7, 16, 64]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    sizes=st.tuples(st.sampled_from([8, 16, 20, 64, 80]), st.sampled_from([8, 16, 20, 64, 80])),
    reach=st.sampled_from([Reach(), Reach("window", 9), Reach("window", 40), Reach("chunk", 16)]),
    dtype=st.sampled_from(list(TOLERANCE)),
    softcap=st.sampled_from([None, 5.0]),
    with_sinks=st.booleans(),
    isa=st.sampled_from(_native.instruction_sets()),
    team=st.sampled_from([None, "rayon", "serial"]),
    seed=st.integers(0, 1000),
)
def test_every_step_gives_what_the_formula_gives(
    sequences: list[tuple[int, int]],
    shared: int,
    page_size: int,
    kv_heads: int,
    group: int,
    sizes: tuple[int, int],
    reach: Reach,
    dtype: torch.dtype,
    softcap: float | None,
    with_sinks: bool,
    isa: str,
    team: str | None,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    sequences = sorted(sequences, key=lambda sequence: sequence[1] != 1)
    decodes = sum(new == 1 for _, new in sequences)
    heads, (size, size_v) = kv_heads * group, sizes
    tables: list[list[int]] = []
    for context, new in sequences:
        # The leading pages of a decode are those of the decode before, as far as both have them whole.
        common = min(shared, context // page_size, len(tables[-1]) - 1) if tables and new == 1 else 0
        own = sum(map(len, tables)) + 1
        tables.append((tables[-1][:common] if common else []) + list(range(own, own - (-(context + new) // page_size))))
    blocks = max(map(max, tables)) + 1
    k_pages = torch.randn(blocks, page_size, kv_heads, size).to(dtype)
    v_pages = torch.randn(blocks, page_size, kv_heads, size_v).to(dtype)
    tokens = sum(new for _, new in sequences)
    query = (2 * torch.randn(heads, tokens, size)).to(dtype)
    key = torch.randn(tokens, kv_heads, size).to(dtype).transpose(0, 1)
    value = torch.randn(kv_heads, tokens, size_v).to(dtype)
    sinks = torch.randn(heads) if with_sinks else None
    bounds, slots = [0], []
    for (context, new), table in zip(sequences, tables, strict=True):
        slots += [table[at // page_size] * page_size + at % page_size for at in range(context, context + new)]
        bounds.append(bounds[-1] + new)
    width = max(map(len, tables))
    padded = [table + [0] * (width - len(table)) for table in tables]

    attention = _native.PagedAttention(page_size, [(reach.form, reach.tokens)], 2, isa, team)
    attention.begin(
        to_dlpack(int32(bounds)),
        to_dlpack(int32([context + new for context, new in sequences])),
        decodes,
        [to_dlpack(int32([block for table in padded for block in table]).view(len(tables), width))],
        [to_dlpack(int32(slots))],
    )
    out = torch.full((tokens, heads, size_v), float("nan"), dtype=dtype)
    attention.attend(
        0,
        to_dlpack(k_pages),
        to_dlpack(v_pages),
        to_dlpack(query),
        to_dlpack(out.transpose(0, 1)),
        scale=0.3,
        key=to_dlpack(key),
        value=to_dlpack(value),
        softcap=softcap,
        sinks=None if sinks is None else to_dlpack(sinks),
    )
    for row, ((context, new), table) in enumerate(zip(sequences, tables, strict=True)):
        of_step = slice(bounds[row], bounds[row + 1])
        k, v = (pages[table].flatten(0, 1)[: context + new].transpose(0, 1) for pages in (k_pages, v_pages))
        assert torch.equal(k[:, context:], key[:, of_step])
        assert torch.equal(v[:, context:], value[:, of_step])
        visible = visibility(reach, range(context, context + new), range(context + new), query.device)
        expected = scores_attention(
            query[None, :, of_step].double(),
            k[None].double(),
            v[None].double(),
            scale=0.3,
            visible=visible,
            softcap=softcap,
            sinks=sinks,
        )[0].transpose(0, 1)
        assert torch.allclose(out[of_step].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def begun(write_slots: list[int], table: list[int]) -> _native.PagedAttention:
    attention = _native.PagedAttention(4, [("full", 0)], 1)
    rows = to_dlpack(int32([0, 1])), to_dlpack(int32([5]))
    attention.begin(*rows, 1, [to_dlpack(int32(table).view(1, -1))], [to_dlpack(int32(write_slots))])
    return attention


def attend(attention: _native.PagedAttention, blocks: int = 3, **others: torch.Tensor) -> None:
    tensors = {
        "k_pages": torch.zeros(blocks, 4, 2, 8),
        "v_pages": torch.zeros(blocks, 4, 2, 8),
        "query": torch.zeros(4, 1, 8),
        "out": torch.zeros(4, 1, 8),
        "key": torch.zeros(2, 1, 8),
        "value": torch.zeros(2, 1, 8),
    } | others
    attention.attend(0, scale=1.0, **{name: to_dlpack(tensor) for name, tensor in tensors.items()})


def test_what_does_not_fit_is_refused_by_name_and_value() -> None:
    attend(begun([8], [1, 2]))
    with pytest.raises(ValueError, match="block 2, and the pages have 2"):
        attend(begun([4], [1, 2]), blocks=2)
    with pytest.raises(ValueError, match="block 3, and the pages have 3"):
        attend(begun([12], [1, 2]))
    with pytest.raises(ValueError, match=r"the queries are \[4, 2, 8\]"):
        attend(begun([8], [1, 2]), query=torch.zeros(4, 2, 8))
    with pytest.raises(ValueError, match="3 heads of queries over 2"):
        attend(begun([8], [1, 2]), query=torch.zeros(3, 1, 8))
    with pytest.raises(ValueError, match="last dimension of query has stride 2"):
        attend(begun([8], [1, 2]), query=torch.zeros(4, 1, 16)[:, :, ::2])
    with pytest.raises(ValueError, match="value is of Bf16"):
        attend(begun([8], [1, 2]), value=torch.zeros(2, 1, 8, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="query: float32, bfloat16 or float16 is expected"):
        attend(begun([8], [1, 2]), query=torch.zeros(4, 1, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="page 1 of row 0 is block -1"):
        begun([8], [1, -1])
    with pytest.raises(ValueError, match="row 0 has 5 tokens, more than 1 pages of 4"):
        begun([8], [1])
    with pytest.raises(ValueError, match='"mmx"'):
        _native.PagedAttention(4, [("full", 0)], 1, "mmx")
    with pytest.raises(ValueError, match='"pthreads"'):
        _native.PagedAttention(4, [("full", 0)], 1, None, "pthreads")
    with pytest.raises(ValueError, match='"sideways"'):
        _native.PagedAttention(4, [("sideways", 0)], 1)


@pytest.mark.parametrize(("length", "decodes"), [(9, 1), (5, 2)])
def test_a_step_that_was_refused_leaves_none_behind(length: int, decodes: int) -> None:
    attention = begun([8], [1, 2])
    attend(attention)
    rows = to_dlpack(int32([0, 1])), to_dlpack(int32([length]))
    table = to_dlpack(int32([1, 2]).view(1, -1))
    with pytest.raises(ValueError, match=r"row 0 has 9 tokens|2 decodes among 1 rows"):
        attention.begin(*rows, decodes, [table], [to_dlpack(int32([8]))])
    # Not by the former step's table, in pages that do not have its blocks.
    with pytest.raises(ValueError, match=r"the queries are \[4, 1, 8\].*\[4, 0, 8\] is expected"):
        attend(attention, blocks=1)


@pytest.mark.parametrize("isa", _native.instruction_sets())
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_what_is_no_number_stays_none_and_harms_no_other_row(isa: str, softcap: float | None) -> None:
    torch.manual_seed(0)
    # Two decodes of 1 and 70 tokens, and a prompt of 40.
    lengths, news = [1, 70, 40], [1, 1, 40]
    bounds = [0, 1, 2, 42]
    pages = torch.randn(5 * 64, 2, 16).view(5, 64, 2, 16)
    table = torch.tensor([[1, 0], [2, 3], [4, 0]], dtype=torch.int32)
    slots = [64, 3 * 64 + 5, *range(4 * 64, 4 * 64 + 40)]
    for bad in (0, 1, 2, 20):  # a token, by its query or by its key
        for of_query in (True, False):
            query, key, value = torch.randn(6, 42, 16), torch.randn(2, 42, 16), torch.randn(2, 42, 16)
            (query if of_query else key)[0, bad] = float("nan")
            attention = _native.PagedAttention(64, [("full", 0)], 2, isa)
            attention.begin(
                to_dlpack(int32(bounds)), to_dlpack(int32(lengths)), 2, [to_dlpack(table)], [to_dlpack(int32(slots))]
            )
            k_pages, v_pages, out = pages.clone(), pages.clone(), torch.zeros(6, 42, 16)
            tensors = (k_pages, v_pages, query, out)
            attention.attend(
                0, *map(to_dlpack, tensors), scale=0.3, key=to_dlpack(key), value=to_dlpack(value), softcap=softcap
            )
            for row, (length, new) in enumerate(zip(lengths, news, strict=True)):
                of_step = slice(bounds[row], bounds[row + 1])
                k, v = (
                    tensor[table[row].long()].flatten(0, 1)[:length].transpose(0, 1) for tensor in (k_pages, v_pages)
                )
                visible = visibility(Reach(), range(length - new, length), range(length), query.device)
                expected = scores_attention(
                    query[None, :, of_step], k[None], v[None], scale=0.3, visible=visible, softcap=softcap
                )[0]
                assert torch.allclose(out[:, of_step], expected, atol=1e-4, equal_nan=True)


def test_torchs_own_threads_compute_where_torch_has_gnu_openmp() -> None:
    team = _native.PagedAttention(4, [("full", 0)], 1).team
    assert team == ("OpenMP" if "libgomp" in Path("/proc/self/maps").read_text() else "rayon")


@pytest.mark.parametrize("asked", ["sdpa", "eager"])
def test_the_models_own_attention_is_obeyed_where_switching_is_off(asked: str) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(asked)
    tokens = []
    for switch in (True, False):
        config = chairlift.ContinuousBatchingConfig(page_size=8, num_blocks=8, auto_switch_to_flash=switch)
        with chairlift.continuous_batching_context_manager(model, continuous_batching_config=config) as manager:
            assert manager.config.attention == ("native" if switch else asked)
            tokens.append(manager.get_result(manager.add_request([5, 6, 7], max_new_tokens=8)).generated_tokens)
    assert tokens[0] == tokens[1]


def test_the_backend_tells_its_instructions_and_threads() -> None:
    described = NativeAttention(4, [Reach()]).described
    assert _native.instruction_sets()[0] in described
    assert f"{torch.get_num_threads()} threads" in described
