"""The attention kernels for rows and for chunks against a float64 reference and against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from logprobe.kernels import threads
from logprobe.kernels.attention.api import RowPlanBuilder, ScoreRule, attend_rows
from logprobe.kernels.attention.chunk import attend_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_SLOTS = 450


@pytest.fixture(params=[1, 2, 4, 16])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = threads.num_threads()
    threads.set_num_threads(request.param)
    yield request.param
    threads.set_num_threads(before)


def pools(kv_heads: int, key_dim: int, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(NUM_SLOTS, kv_heads, key_dim, generator=generator),
        torch.randn(NUM_SLOTS, kv_heads, value_dim, generator=generator),
    )


def plain_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    """Attend with one query row (heads, dim) to its context (length, kv_heads, dim), in float64."""
    groups = query.shape[0] // keys.shape[1]
    if rule.window is not None:
        keys, values = keys[-rule.window :], values[-rule.window :]
    keys = keys.double().repeat_interleave(groups, dim=1)
    values = values.double().repeat_interleave(groups, dim=1)
    scores = torch.einsum("hd,lhd->hl", query.double(), keys) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), values)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from([(4, 2, 16, 16), (4, 4, 8, 8), (9, 3, 64, 64), (8, 1, 20, 12), (2, 1, 5, 3)]),
    spans=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 9)), min_size=1, max_size=6),
    rule=st.builds(
        ScoreRule,
        scale=st.sampled_from([0.05, 0.25, 1.0]),
        window=st.sampled_from([None, 1, 7, 64, 10_000]),
        softcap=st.sampled_from([None, 2.0, 50.0]),
    ),
    seed=st.integers(0, 1000),
)
def test_each_row_attends_to_its_own_context(
    shape: tuple[int, int, int, int], spans: list[tuple[int, int]], rule: ScoreRule, seed: int
) -> None:
    heads, kv_heads, key_dim, value_dim = shape
    keys, values = pools(kv_heads, key_dim, value_dim)
    rng = np.random.default_rng(seed)
    num_tokens = sum(length for _, length in spans) + 2
    query = torch.randn(num_tokens, heads, key_dim, generator=torch.Generator().manual_seed(seed)) * 3
    out = torch.full((num_tokens, heads, value_dim), 7.0)
    builder, row, wanted = RowPlanBuilder(), 1, {}
    for start, length in spans:
        slots = rng.permutation(NUM_SLOTS)[: start + length].astype(np.int32)
        builder.add(row, start, slots)
        for place in range(length):
            wanted[row + place] = torch.from_numpy(slots[: start + place + 1].astype(np.int64))
        row += length
    plan = builder.build()
    assert plan is not None
    attend_rows(query, keys, values, plan, out, rule)
    for place in range(num_tokens):
        if place not in wanted:
            assert (out[place] == 7).all(), "a row that was not planned was written"
            continue
        want = plain_attention(query[place], keys[wanted[place]], values[wanted[place]], rule)
        torch.testing.assert_close(out[place].double(), want, atol=2e-5, rtol=2e-5)


def test_any_number_of_threads_gives_the_same_as_torchs_attention(num_threads: int) -> None:
    assert threads.num_threads() == num_threads
    heads, kv_heads, dim, context = 9, 3, 64, 250
    keys, values = pools(kv_heads, dim, dim)
    query = torch.randn(context, heads, dim, generator=torch.Generator().manual_seed(1))
    slots = np.random.default_rng(2).permutation(NUM_SLOTS)[:context].astype(np.int32)
    builder = RowPlanBuilder()
    builder.add(0, 0, slots)
    plan = builder.build()
    assert plan is not None
    out = torch.empty(context, heads, dim)
    attend_rows(query, keys, values, plan, out, ScoreRule(dim**-0.5))
    places = torch.from_numpy(slots.astype(np.int64))
    want = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[places].transpose(0, 1)[None],
        values[places].transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=True,
    )
    torch.testing.assert_close(out, want[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_queries_may_be_a_transposed_view() -> None:
    keys, values = pools(2, 16, 16)
    packed = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1))  # (heads, tokens, dim)
    builder = RowPlanBuilder()
    builder.add(0, 10, np.arange(16, dtype=np.int32))
    plan = builder.build()
    assert plan is not None
    outs = [torch.empty(6, 4, 16) for _ in range(2)]
    attend_rows(packed.transpose(0, 1), keys, values, plan, outs[0], ScoreRule(0.25))
    attend_rows(packed.transpose(0, 1).contiguous(), keys, values, plan, outs[1], ScoreRule(0.25))
    assert torch.equal(outs[0], outs[1])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from([(4, 2, 16, 16), (3, 3, 8, 24), (9, 3, 64, 64), (8, 1, 20, 12), (2, 1, 5, 3)]),
    num_rows=st.integers(1, 200),
    prefix=st.sampled_from([0, 1, 40, 191, 192, 200]),
    rule=st.builds(
        ScoreRule,
        scale=st.sampled_from([0.05, 0.3]),
        window=st.sampled_from([None, 1, 7, 64, 100, 10_000]),
        softcap=st.sampled_from([None, 2.0]),
    ),
)
def test_a_chunk_of_any_length_attends_to_its_own_context(
    shape: tuple[int, int, int, int], num_rows: int, prefix: int, rule: ScoreRule
) -> None:
    heads, kv_heads, key_dim, value_dim = shape
    keys, values = pools(kv_heads, key_dim, value_dim)
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(num_rows))[: prefix + num_rows]
    query = 3 * torch.randn(num_rows, heads, key_dim, generator=torch.Generator().manual_seed(prefix))
    out = attended(query, keys, values, slots, rule)
    for row in {0, num_rows // 2, num_rows - 1}:
        seen = slots[: prefix + row + 1]
        want = plain_attention(query[row], keys[seen], values[seen], rule)
        torch.testing.assert_close(out[row].double(), want, atol=2e-5, rtol=2e-5)


def attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    """Run the kernel for chunks into an output that was filled with NaN."""
    out = torch.full((*query.shape[:2], values.shape[2]), torch.nan)
    attend_chunk(query, keys, values, slots, rule, out)
    return out


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from(
        [(4, 2, 16, 16), (9, 3, 64, 64), (8, 1, 20, 12), (2, 1, 5, 3), (34, 2, 64, 72), (2, 2, 80, 80)]
    ),
    context=st.sampled_from([1, 7, 191, 192, 193, 385, 430]),
    most_rows=st.sampled_from([1, 5, 200]),
    window=st.sampled_from([None, 1, 7, 64, 200]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
)
def test_a_row_has_the_bits_that_a_chunk_gives_it(
    shape: tuple[int, int, int, int],
    context: int,
    most_rows: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    heads, kv_heads, key_dim, value_dim = shape
    keys, values = pools(kv_heads, key_dim, value_dim)
    generator = torch.Generator().manual_seed(context)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:context]
    num_rows = min(context, most_rows)
    query = 3 * torch.randn(num_rows, heads, key_dim, generator=generator)
    rule = ScoreRule(0.3, window, softcap, torch.randn(heads, generator=generator) if has_sinks else None)
    builder = RowPlanBuilder()
    builder.add(0, context - num_rows, slots.numpy().astype(np.int32))
    plan = builder.build()
    assert plan is not None
    by_rows = torch.empty(num_rows, heads, value_dim)
    attend_rows(query, keys, values, plan, by_rows, rule)
    assert torch.equal(by_rows, attended(query, keys, values, slots, rule))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_a_rows_bits_do_not_depend_on_its_chunk_nor_on_threads(
    window: int | None, sinks: torch.Tensor | None, num_threads: int
) -> None:
    assert threads.num_threads() == num_threads
    context, rule = 430, ScoreRule(0.3, window, sinks=sinks)
    keys, values = pools(2, 20, 12)
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(3))[:context]
    query = 3 * torch.randn(context, 4, 20, generator=torch.Generator().manual_seed(4))
    whole = attended(query, keys, values, slots, rule)
    for size in (1, 5, 24, 96, 200):
        for start in range(0, context, size):
            end = min(context, start + size)
            part = attended(query[start:end], keys, values, slots[:end], rule)
            assert torch.equal(part, whole[start:end]), (size, start)


def test_a_chunk_may_be_any_view_of_queries_and_part_of_a_wider_result() -> None:
    keys, values = pools(2, 16, 16)
    packed = torch.randn(4, 60, 16, generator=torch.Generator().manual_seed(1))  # (heads, rows, dim)
    slots, rule = torch.arange(60), ScoreRule(0.25)
    want = attended(packed.transpose(0, 1).contiguous(), keys, values, slots, rule)
    spread = packed.permute(1, 2, 0).contiguous().permute(0, 2, 1)  # strided in the last dimension
    for query in (packed.transpose(0, 1), spread):
        wide = torch.full((60, 6, 16), 7.0)
        attend_chunk(query, keys, values, slots, rule, wide[:, 1:5])
        assert torch.equal(wide[:, 1:5], want)
        assert (wide[:, [0, 5]] == 7).all()


def test_a_chunk_hands_on_what_is_not_a_number_to_rows_that_see_it() -> None:
    keys, values = pools(1, 8, 8)
    keys[120] = torch.nan
    out = attended(torch.ones(200, 2, 8), keys, values, torch.arange(200), ScoreRule(1.0))
    assert out[:120].isfinite().all()
    assert out[120:].isnan().all()


def test_large_scores_do_not_overflow() -> None:
    keys, values = pools(1, 8, 8)
    builder = RowPlanBuilder()
    builder.add(0, 0, np.arange(50, dtype=np.int32))
    plan = builder.build()
    assert plan is not None
    query, out = torch.full((50, 1, 8), 1000.0), torch.empty(50, 1, 8)
    attend_rows(query, keys, values, plan, out, ScoreRule(1.0))
    by_chunk = attended(query, keys, values, torch.arange(50), ScoreRule(1.0))
    for attended_rows in (out, by_chunk):
        assert attended_rows.isfinite().all()
        torch.testing.assert_close(attended_rows[0], values[0])


@pytest.mark.parametrize("first_score", [0.0, 12.0, 16.0, 18.0])
@pytest.mark.parametrize("window", [None, 5000])
def test_small_weights_of_a_long_context_count_beside_a_large_one(
    first_score: float, window: int | None
) -> None:
    """Models give most of a row's weight to one token; thousands of small weights must not be lost."""
    heads, kv_heads, dim, context, num_rows = 4, 2, 32, 8192, 20
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(context, kv_heads, dim, generator=generator)
    values = torch.randn(context, kv_heads, dim, generator=generator) + 0.5
    query = torch.randn(num_rows, heads, dim, generator=generator)
    large = 0 if window is None else context - 4000  # visible to every row
    query[..., 0], keys[..., 0], keys[large, :, 0] = 1.0, 0.0, first_score * dim**0.5
    rule = ScoreRule(dim**-0.5, window)
    builder = RowPlanBuilder()
    builder.add(0, context - num_rows, np.arange(context, dtype=np.int32))
    plan = builder.build()
    assert plan is not None
    by_rows = torch.empty(num_rows, heads, dim)
    attend_rows(query, keys, values, plan, by_rows, rule)
    by_chunk = attended(query, keys, values, torch.arange(context), rule)
    assert torch.equal(by_rows, by_chunk)
    for row in range(num_rows):
        seen = slice(0, context - num_rows + row + 1)
        want = plain_attention(query[row], keys[seen], values[seen], rule)
        assert (by_rows[row].double() - want).abs().max() < 2e-6 * want.abs().max()


def test_no_spans_make_no_plan() -> None:
    assert RowPlanBuilder().build() is None


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("sink", [-30.0, 0.5, 4.0, 60.0])
def test_a_sink_takes_its_share_of_the_weight_in_every_kernel(
    sink: float, window: int | None, softcap: float | None
) -> None:
    heads, kv_heads, dim, context = 6, 3, 16, 150
    keys, values = pools(kv_heads, dim, dim)
    keys, values = keys[:context].contiguous(), values[:context].contiguous()
    query = torch.randn(context, heads, dim, generator=torch.Generator().manual_seed(1))
    sinks = sink + torch.randn(heads, generator=torch.Generator().manual_seed(2))
    rule = ScoreRule(0.25, window, softcap, sinks)
    builder = RowPlanBuilder()
    builder.add(0, 0, np.arange(context, dtype=np.int32))
    plan = builder.build()
    assert plan is not None
    by_rows = torch.empty(context, heads, dim)
    attend_rows(query, keys, values, plan, by_rows, rule)
    by_chunk = attended(query, keys, values, torch.arange(context), rule)
    for row in range(context):
        seen = slice(0 if window is None else max(0, row + 1 - window), row + 1)
        want = with_sinks(query[row], keys[seen], values[seen], rule)
        torch.testing.assert_close(by_rows[row].double(), want, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(by_chunk[row].double(), want, atol=2e-5, rtol=2e-5)


def with_sinks(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    """Compute one row as gpt-oss does: the sink is one more score, whose weight is dropped."""
    assert rule.sinks is not None
    groups = query.shape[0] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(groups, dim=1) for part in (keys, values))
    scores = torch.einsum("hd,lhd->hl", query.double(), keys) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    weights = torch.cat([scores, rule.sinks.double()[:, None]], dim=1).softmax(-1)[:, :-1]
    return torch.einsum("hl,lhd->hd", weights, values)
