"""Every kernel on extreme shapes and values.

Each gives the same bits in every variant, with any number of threads, and for a row alone or in a batch;
results are close to float64.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from logprobe.kernels import extract, stages, threads
from logprobe.kernels.arrays import as_array
from logprobe.kernels.attention.api import RowPlan, ScoreRule, attend_rows
from logprobe.kernels.attention.chunk import attend_chunk
from logprobe.kernels.draw.api import draw
from logprobe.kernels.draw.params import DrawParams
from logprobe.kernels.draw.reference import draw_reference
from logprobe.kernels.extraction import reference
from logprobe.kernels.layers.forms import PanelWeights, empty_panels, fill_blocks, pack_floats
from logprobe.kernels.layers.layout import FORMS
from logprobe.kernels.layers.panels import Finish, panel_stage
from logprobe.kernels.layers.rows import (
    ACTIVATIONS,
    Projections,
    gate_stage,
    norm_stage,
    rotary_stage,
    softcap_stage,
)
from logprobe.kernels.native import VARIANTS, Library
from logprobe.records.rows import KERNEL_EXTRAS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNIT = 2.0**-24  # float32 unit roundoff
SPECIAL = [torch.nan, -torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 2.0**-149, 3e38]
NAMES = sorted(ACTIVATIONS.keys() - {"none"})
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda g: g,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda g: functional.relu(g) ** 2,
}
few = settings(max_examples=40, deadline=None, derandomize=True)


@cache
def libraries() -> list[Library]:
    """Return all variants that were built and that this CPU can run."""
    found = [Library(name) for name in VARIANTS if Library.path_of(name).exists()]
    return [library for library in found if library.can_run()]


@contextmanager
def running(library: Library, num_threads: int) -> Iterator[None]:
    """Run kernels with one variant and a given number of threads."""
    before = threads.num_threads()
    threads.set_num_threads(num_threads)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stages, "library", lambda: library)
            yield
    finally:
        threads.set_num_threads(before)


def everywhere(compute: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Run a kernel with every variant on one and on three threads; assert equal bits; return the result."""
    first: list[Tensor] | None = None
    for library in libraries():
        for num_threads in (1, 3):
            with running(library, num_threads):
                found = compute()
            first = first or found
            for got, want in zip(found, first, strict=True):
                assert_bits(got, want)
    assert first is not None
    return first


def assert_bits(got: Tensor, want: Tensor) -> None:
    """Assert equal bits; any NaN equals any other."""
    if got.is_floating_point():
        assert torch.equal(got.isnan(), want.isnan())
        got, want = (x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf) for x in (got, want))
        got, want = (x.contiguous().view(torch.int32) for x in (got, want))
    assert torch.equal(got, want)


def numbers(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


# -- products --------------------------------------------------------------------------------------


def weights(form: str, outputs: int, inputs: int, seed: int, bias: Tensor | None = None) -> PanelWeights:
    """Make random weights of a form."""
    rng = np.random.default_rng(seed)
    if form in {"float32", "bfloat16", "float16"}:
        floats = numbers((outputs, inputs), seed).to(getattr(torch, form)).float()
        return pack_floats(floats, bias)
    inputs = -(-inputs // 32) * 32
    wide = np.float32 if form.endswith("wide") else np.float16
    panels = empty_panels(FORMS[form], outputs, inputs)
    block = FORMS[form].inputs
    shape = (outputs, inputs // block)
    scales = (rng.random(shape) / 16).astype(wide)
    if form.startswith("int4"):
        header = np.stack([scales, (-8 * scales).astype(wide)], axis=-1)
        fill_blocks(panels, 0, header, rng.integers(0, 1 << 32, (*shape, 4), dtype=np.uint32))
    else:
        values = rng.integers(-128, 128, (*shape, block)).astype(np.int8)
        fill_blocks(panels, 0, scales[..., None] / 8, values)
    return panels


@few
@given(
    form=st.sampled_from(sorted(FORMS)),
    num_rows=st.sampled_from([0, 1, 2, 3, 5, 8, 9, 31, 65, 130]),
    outputs=st.sampled_from([1, 47, 48, 49, 145]),
    inputs=st.sampled_from([1, 7, 16, 31, 96, 97, 200]),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    is_gated=st.booleans(),
    has_residual=st.booleans(),
    has_bias=st.booleans(),
    factor=st.sampled_from([1.0, 0.22]),
    seed=st.integers(0, 1000),
)
def test_products(
    *,
    form: str,
    num_rows: int,
    outputs: int,
    inputs: int,
    activation: str,
    is_gated: bool,
    has_residual: bool,
    has_bias: bool,
    factor: float,
    seed: int,
) -> None:
    bias = numbers((outputs,), seed + 1) if has_bias and form in {"float32", "bfloat16", "float16"} else None
    panels = weights(form, outputs, inputs, seed, bias)
    inputs = panels.num_inputs
    is_gated = is_gated and activation != "none"
    values = weights(form, outputs, inputs, seed + 2) if is_gated else None
    residual = numbers((num_rows, outputs), seed + 3) if has_residual else None
    x = numbers((num_rows, inputs), seed + 4, inputs**-0.5)

    def product(x: Tensor, residual: Tensor | None) -> Tensor:
        out = torch.full((len(x), outputs), torch.nan)
        finish = Finish(residual=residual, values=values, activation=activation, factor=factor)
        panel_stage(x, panels, out, finish).run()
        return out

    [got] = everywhere(lambda: [product(x, residual)])
    for row in {0, num_rows - 1} if num_rows else set():
        rest = None if residual is None else residual[row : row + 1]
        assert_bits(product(x[row : row + 1], rest)[0], got[row])

    def exact(panels: PanelWeights) -> tuple[Tensor, Tensor]:
        """Return the product in float64, and the error allowed for float32."""
        wide = torch.from_numpy(panels.rows(np.arange(outputs))).double()
        bound = x.double().abs().sum(1, keepdim=True) * wide.abs().max() * (32 + inputs / 96) * UNIT
        y = x.double() @ wide.T + (0 if panels.bias is None else torch.from_numpy(panels.bias).double())
        return y, bound + 2 * UNIT * y.abs()

    gate, gate_error = exact(panels)
    value, value_error = (torch.ones_like(gate), 0 * gate) if values is None else exact(values)
    want = FUNCTIONS[activation](gate)
    slope = 1.2 + (2 * (gate.abs() + gate_error) if activation == "relu2" else 0)
    error = slope * gate_error * value.abs() + (want.abs() + gate_error) * value_error
    error += 4e-6 * (want * value).abs() + 1e-9 * value.abs()
    want = factor * want * value
    if residual is not None:
        want, error = want + residual.double(), error + 2 * UNIT * (want.abs() + residual.abs())
    assert ((got - want).abs() <= error + 1e-30).all()


@few
@given(
    form=st.sampled_from(sorted(FORMS)),
    num_rows=st.sampled_from([2, 4, 9, 70]),
    special=st.sampled_from(SPECIAL),
    place=st.integers(0, 63),
)
def test_what_is_no_number_changes_its_own_product_alone(
    form: str, num_rows: int, special: float, place: int
) -> None:
    panels, x = weights(form, 50, 64, 1), numbers((num_rows, 64), 2)

    def product() -> list[Tensor]:
        out = torch.empty(num_rows, 50)
        panel_stage(x, panels, out).run()
        return [out]

    [before] = product()
    x[1, place] = special
    [got] = everywhere(product)
    others = [row for row in range(num_rows) if row != 1]
    assert_bits(got[others], before[others])
    wide = torch.from_numpy(panels.rows(np.arange(50))).double()
    want = x[1].double() @ wide.T
    if not np.isfinite(special):
        assert torch.equal(got[1].isnan(), want.isnan())
        assert torch.equal(got[1].isinf(), want.isinf())


# -- norms, rotary embedding, gates, store ---------------------------------------------------------


@few
@given(
    num_rows=st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 200]),
    width=st.sampled_from([1, 5, 63, 64, 65, 130, 577]),
    parts=st.sampled_from([1, 3]),
    is_centred=st.booleans(),
    has_residual=st.booleans(),
    special=st.sampled_from([None, *SPECIAL]),
    seed=st.integers(0, 1000),
)
def test_norms(
    *,
    num_rows: int,
    width: int,
    parts: int,
    is_centred: bool,
    has_residual: bool,
    special: float | None,
    seed: int,
) -> None:
    x = numbers((num_rows, parts * width), seed) * 10 ** numbers((num_rows, 1), seed + 1)
    weight, bias = numbers((width,), seed + 2), numbers((width,), seed + 3) if is_centred else None
    residual = numbers((num_rows, parts * width), seed + 4) if has_residual else None
    if special is not None and num_rows:
        x[num_rows // 2, width // 2] = special

    def norm(x: Tensor, residual: Tensor | None) -> Tensor:
        out = torch.full(x.shape, 7.0)
        norm_stage(x, weight, out, 1e-6, residual, bias=bias, is_centred=is_centred).run()
        return out

    [got] = everywhere(lambda: [norm(x, residual)])
    for row in {0, num_rows // 2} if num_rows else set():
        rest = None if residual is None else residual[row : row + 1]
        assert_bits(norm(x[row : row + 1], rest)[0], got[row])
    wide = x.double().view(num_rows, parts, width)
    centred = wide - wide.mean(-1, keepdim=True) if is_centred else wide
    deviations = (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    want = centred / deviations * weight.double()
    lost = want.abs() + (wide.abs().amax(-1, keepdim=True) / deviations * weight.abs() if is_centred else 0)
    if bias is not None:
        want, lost = want + bias, lost + bias.abs()
    if residual is not None:
        want, lost = want + residual.view(want.shape), lost + residual.view(want.shape).abs()
    error = (got.view(want.shape) - want).abs()
    # Squares of numbers beyond 1e19 overflow float32.
    is_usual = wide.abs().amax(-1, keepdim=True) < 1e18
    assert (error <= 2e-6 * (lost + 1e-30))[is_usual.expand(want.shape)].all()
    is_spoilt = wide.isnan().any(-1, keepdim=True).expand(want.shape)
    assert got.view(want.shape)[is_spoilt].isnan().all()


@few
@given(
    num_rows=st.sampled_from([0, 1, 16, 17, 64, 130]),
    heads=st.sampled_from([(1, 1), (6, 2), (5, 5)]),
    dims=st.sampled_from([(2, 1, 2), (16, 16, 16), (16, 5, 6), (10, 3, 0), (65, 64, 64)]),
    is_paired=st.booleans(),
    has_scales=st.booleans(),
    special=st.sampled_from([None, *SPECIAL]),
)
def test_rotary_embedding(
    *,
    num_rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int, int],
    is_paired: bool,
    has_scales: bool,
    special: float | None,
) -> None:
    key_dim, value_dim, rotary_dim = dims
    query, key = (numbers((num_rows, count, key_dim), seed) for seed, count in enumerate(heads))
    value = numbers((num_rows, heads[1], value_dim), 3)
    if special is not None and num_rows:
        query[0, 0, 0] = key[num_rows - 1, 0, -1] = value[0, 0, 0] = special
    half = numbers((num_rows, rotary_dim // 2), 4, 100.0)
    cosines, sines = (torch.cat([f(half)] * 2, dim=1) for f in (torch.cos, torch.sin))
    scales = numbers((num_rows,), 5) if has_scales else None
    slots = torch.randperm(150, generator=torch.Generator().manual_seed(6))[:num_rows]

    def rotate() -> list[Tensor]:
        pool = torch.zeros(150, heads[1], key_dim), torch.zeros(150, heads[1], value_dim)
        out = torch.full(query.shape, 7.0)
        rotary = (cosines, sines)
        projections = Projections(query, key, value)
        rotary_stage(projections, rotary, pool, slots, out, is_paired=is_paired, query_scales=scales).run()
        return [out, *pool]

    got, keys, values = everywhere(rotate)
    assert_bits(values[slots], value)
    for found, before, factor in ((got, query, scales), (keys[slots], key, None)):
        wide = before.double()
        rotated = wide[..., :rotary_dim]
        first, second = (
            (rotated[..., ::2], rotated[..., 1::2])
            if is_paired
            else rotated.chunk(2, -1)
            if rotary_dim
            else (rotated,) * 2
        )
        cos, sin = (x[:, None, : rotary_dim // 2].double() for x in (cosines, sines))
        pairs = first * cos - second * sin, second * cos + first * sin
        want = wide.clone()
        want[..., :rotary_dim] = torch.stack(pairs, -1).flatten(-2) if is_paired else torch.cat(pairs, -1)
        bound = 4 * UNIT * (first.abs() + second.abs())
        error = torch.zeros_like(want)
        error[..., :rotary_dim] = (
            torch.stack([bound] * 2, -1).flatten(-2) if is_paired else torch.cat([bound] * 2, -1)
        )
        if factor is not None:
            want, error = (
                want * factor[:, None, None],
                error * factor.abs()[:, None, None] + UNIT * want.abs() * 4,
            )
        is_finite = want.abs() < 1e38
        assert ((found - want).abs() <= error + 1e-44)[is_finite].all()
        assert torch.equal(found.isnan(), want.isnan())


@few
@given(
    num_rows=st.sampled_from([0, 1, 3, 20]),
    width=st.sampled_from([1, 7, 15, 16, 17, 1023, 1024, 1025]),
    activation=st.sampled_from(NAMES),
    has_values=st.booleans(),
    scale=st.sampled_from([0.1, 3.0, 40.0]),
)
def test_gates(*, num_rows: int, width: int, activation: str, has_values: bool, scale: float) -> None:
    gates = numbers((num_rows, width), 1, scale)
    gates[:, :1] = torch.tensor(SPECIAL).repeat(3)[:num_rows, None]
    values = numbers((num_rows, width), 2) if has_values else None

    def gate() -> list[Tensor]:
        out = torch.empty(num_rows, width)
        gate_stage(gates, values, out, activation).run()
        return [out]

    [got] = everywhere(gate)
    assert torch.equal(got.isnan()[~gates.isinf()], gates.isnan()[~gates.isinf()])
    is_usual = gates.abs() < 1e4
    wide = gates.double()
    factors = torch.ones_like(wide) if values is None else values.double()
    want = FUNCTIONS[activation](wide) * factors
    # Where all digits of torch's 1 + tanh z cancel, the result is close to zero.
    error = 2e-6 * want.abs() + 1e-7 * factors.abs()
    assert ((got - want).abs() <= error)[is_usual].all()


@few
@given(
    num_rows=st.sampled_from([0, 1, 3]),
    width=st.sampled_from([1, 7, 15, 16, 17, 8191, 8192, 8200]),
    cap=st.sampled_from([0.5, 30.0]),
    scale=st.sampled_from([0.1, 3.0, 40.0]),
)
def test_soft_caps(*, num_rows: int, width: int, cap: float, scale: float) -> None:
    logits = numbers((num_rows, width), 1, scale)
    logits[:, :1] = torch.tensor(SPECIAL).repeat(3)[:num_rows, None]

    def capped() -> list[Tensor]:
        out = logits.clone()
        softcap_stage(as_array(out), cap).run()
        return [out]

    [got] = everywhere(capped)
    want = cap * torch.tanh(logits.double() / cap)
    assert torch.equal(got.isnan(), logits.isnan())
    assert ((got - want).abs() <= 4e-7 * want.abs() + 1e-44)[~want.isnan()].all()


# -- attention -------------------------------------------------------------------------------------


def attended(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, rule: ScoreRule
) -> tuple[Tensor, Tensor]:
    """Return the last rows of a context, from the kernel for rows and the one for chunks."""
    outs = [torch.full((*query.shape[:2], values.shape[2]), 7.0) for _ in range(2)]
    count, context = len(query), len(slots)
    places = np.arange(count, dtype=np.int32)
    plan = RowPlan(
        places, np.zeros(count, np.int32), places + context - count + 1, slots.numpy().astype(np.int32)
    )
    if count:
        attend_rows(query, keys, values, plan, outs[0], rule)
    attend_chunk(query, keys, values, slots, rule, outs[1])
    return outs[0], outs[1]


def exact_attention(query: Tensor, keys: Tensor, values: Tensor, rule: ScoreRule) -> Tensor:
    """Attend with one row to all that it may see, in float64."""
    groups = len(query) // keys.shape[1]
    if rule.window is not None:
        keys, values = keys[-rule.window :], values[-rule.window :]
    keys, values = (x.double().repeat_interleave(groups, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,lhd->hl", query.double(), keys) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if rule.sinks is not None:
        scores = torch.cat([scores, rule.sinks.double()[:, None]], dim=1)
    weights = scores.softmax(-1)[:, : len(keys)]
    return torch.einsum("hl,lhd->hd", weights, values)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from([(4, 2, 16, 16), (9, 3, 8, 24), (5, 1, 20, 12), (2, 1, 5, 3), (1, 1, 1, 1)]),
    context=st.sampled_from([1, 2, 17, 191, 192, 193, 400]),
    most_rows=st.sampled_from([0, 1, 5, 50]),
    rule=st.builds(
        ScoreRule,
        scale=st.sampled_from([0.05, 1.0]),
        window=st.sampled_from([None, 1, 7, 100, 10_000]),
        softcap=st.sampled_from([None, 2.0]),
    ),
    sink=st.sampled_from([None, -torch.inf, 0.5, 60.0]),
    seed=st.integers(0, 1000),
)
def test_attention(
    shape: tuple[int, int, int, int],
    context: int,
    most_rows: int,
    rule: ScoreRule,
    sink: float | None,
    seed: int,
) -> None:
    heads, kv_heads, key_dim, value_dim = shape
    keys, values = numbers((420, kv_heads, key_dim), seed), numbers((420, kv_heads, value_dim), seed + 1)
    num_rows = min(context, most_rows)
    query = numbers((num_rows, heads, key_dim), seed + 2, 3.0)
    slots = torch.randperm(420, generator=torch.Generator().manual_seed(seed))[:context]
    sinks = None if sink is None else torch.full((heads,), sink)
    rule = ScoreRule(rule.scale, rule.window, rule.softcap, sinks)
    by_rows, by_chunk = everywhere(lambda: list(attended(query, keys, values, slots, rule)))
    assert_bits(by_rows, by_chunk)
    for row in {0, num_rows - 1} if num_rows else set():
        seen = slots[: context - num_rows + row + 1]
        alone, _ = attended(query[row : row + 1], keys, values, seen, rule)
        assert_bits(alone[0], by_rows[row])
        want = exact_attention(query[row], keys[seen], values[seen], rule)
        torch.testing.assert_close(by_rows[row].double(), want, atol=2e-5, rtol=2e-5)


@few
@given(
    context=st.sampled_from([1, 5, 16, 200]),
    special=st.sampled_from(SPECIAL),
    window=st.sampled_from([None, 3]),
    sink=st.sampled_from([None, 0.5, torch.nan]),
    place=st.integers(0, 199),
    is_value=st.booleans(),
)
def test_attention_to_keys_and_values_that_are_no_numbers(
    *, context: int, special: float, window: int | None, sink: float | None, place: int, is_value: bool
) -> None:
    keys, values, query = numbers((200, 1, 4), 1), numbers((200, 1, 6), 2), numbers((context, 2, 4), 3)
    (values if is_value else keys)[place, 0, 1] = special
    rule = ScoreRule(0.5, window, sinks=None if sink is None else torch.full((2,), sink))
    slots = torch.arange(context)
    by_rows, by_chunk = everywhere(lambda: list(attended(query, keys, values, slots, rule)))
    assert_bits(by_rows, by_chunk)
    for row in range(context):
        want = exact_attention(query[row], keys[: row + 1], values[: row + 1], rule)
        # A float32 score may overflow where float64 does not.
        if abs(special) != 3e38:
            torch.testing.assert_close(by_rows[row].double(), want, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("context", [1, 40, 300])
def test_a_row_whose_scores_are_all_minus_infinity_is_nan_or_all_of_its_sink(
    context: int, window: int | None
) -> None:
    keys, values = torch.full((300, 1, 1), -torch.inf), torch.ones(300, 1, 3)
    query, slots = torch.ones(context, 2, 1), torch.arange(context)
    for out in everywhere(lambda: list(attended(query, keys, values, slots, ScoreRule(1.0, window)))):
        assert out.isnan().all()
    rule = ScoreRule(1.0, window, sinks=torch.zeros(2))
    for out in everywhere(lambda: list(attended(query, keys, values, slots, rule))):
        assert (out == 0).all()


def test_the_exponential_is_as_near_as_it_says_and_has_no_bias_where_it_weighs() -> None:
    """One key of score d next to a sink of 0 has the weight e**d / (1 + e**d)."""
    d = torch.linspace(-87, 0, 30_001)
    query, keys, values = d.view(-1, 1, 1), torch.ones(len(d), 1, 1), torch.ones(len(d), 1, 1)
    rule = ScoreRule(1.0, window=1, sinks=torch.zeros(1))
    slots = torch.arange(len(d))
    exponentials = d.double().exp()
    want = exponentials / (1 + exponentials)
    for out in everywhere(lambda: list(attended(query, keys, values, slots, rule))):
        errors = out.flatten().double() / want - 1
        assert (errors.abs() <= 2e-7 + 1.4e-8 * d.abs() + 2 * UNIT).all()
        assert ((errors * want).sum() / want.sum()).abs() < 3e-8


# -- extraction and sampling ------------------------------------------------------------------------


@st.composite
def rows_of_logits(draw_from: Any) -> Tensor:
    """Draw rows with ties, masks, zeros of either sign, and invalid rows."""
    num_rows = draw_from(st.sampled_from([0, 1, 2, 5]))
    size = draw_from(st.sampled_from([1, 2, 15, 64, 100, 1023, 1024, 1025, 3000]))
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32)))
    logits = rng.normal(0, draw_from(st.sampled_from([0.1, 3, 30])), (num_rows, size))
    if draw_from(st.booleans()):
        logits = np.round(logits)  # ties, and zeros of either sign
    logits[rng.random(logits.shape) < draw_from(st.sampled_from([0, 0, 0.5, 0.99, 1]))] = -np.inf
    for row in range(num_rows):
        special = draw_from(st.sampled_from([None, None, None, np.nan, np.inf, -0.0]))
        if special is not None:
            logits[row, rng.integers(size)] = special
    return torch.from_numpy(logits.astype(np.float32))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    logits=rows_of_logits(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    k=st.sampled_from([0, 1, 7, 1000, -1]),
    num_given=st.sampled_from([None, 0, 3, 200]),
    extras=st.sets(st.sampled_from(sorted(KERNEL_EXTRAS))),
    seed=st.integers(0, 1000),
)
def test_extraction(
    logits: Tensor, dtype: torch.dtype, k: int, num_given: int | None, extras: set[str], seed: int
) -> None:
    logits, rng = logits.to(dtype), np.random.default_rng(seed)
    num_rows, size = logits.shape
    chosen = rng.integers(size, size=num_rows)
    given_ids = None if num_given is None else rng.integers(size, size=num_given)
    columns = dict.fromkeys(extras, True)

    def compute(extract: Any, start: int = 0, stop: int = num_rows, **more: Any) -> list[Tensor]:
        got = extract(logits[start:stop], chosen[start:stop], k, given_ids=given_ids, **columns, **more)
        found = [got.is_valid, got.ranks, got.token_ids, got.logprobs, got.lse, *got.extras.values()]
        found += [] if got.given is None else [got.given.ranks, got.given.logprobs]
        return [torch.from_numpy(column) for column in found]

    found = everywhere(lambda: compute(extract))
    for got, want in zip(found, compute(reference.extract, dtype=np.float64), strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=1.2e-7, atol=2e-6, equal_nan=True)
    if num_rows:
        for got, together in zip(compute(extract, num_rows - 1), found, strict=True):
            assert_bits(got, together[len(together) - len(got) :])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data(), logits=rows_of_logits())
def test_draw(data: st.DataObject, logits: Tensor) -> None:
    num_rows, size = logits.shape

    def column(*values: float) -> Any:
        return np.array(data.draw(st.lists(st.sampled_from(values), min_size=num_rows, max_size=num_rows)))

    params = DrawParams(
        temperatures=column(0, 1e-6, 0.3, 1, 1e6).astype(np.float32),
        top_ks=column(0, 1, 3, size, size + 7).astype(np.float32),
        top_ps=column(1, 1e-6, 0.9).astype(np.float32),
        min_ps=column(0, 0.2, 1).astype(np.float32),
        uniforms=column(0, 0.5, float(np.nextafter(1.0, 0.0))).astype(np.float64),
    )

    def compute(start: int = 0) -> list[Tensor]:
        rest = DrawParams(**{name: getattr(params, name)[start:] for name in params.__slots__})
        got = draw(logits[start:], rest)
        return [torch.from_numpy(x) for x in (got.token_ids, got.cut_logits, got.cut_ids, got.is_valid)]

    found = everywhere(compute)
    if num_rows:
        for got, together in zip(compute(num_rows - 1), found, strict=True):
            assert_bits(got, together[-1:])
    want = draw_reference(logits, params)
    assert found[3].tolist() == want.is_valid.tolist()
    for row in np.flatnonzero(want.is_valid).tolist():
        assert logits[row, found[0][row]] > -torch.inf
        if params.temperatures[row] == 0:
            assert found[0][row] == want.token_ids[row]
