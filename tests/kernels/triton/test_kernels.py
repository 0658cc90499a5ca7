"""The Triton kernels of the GPU decoder against their float64 references; interpreted without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton has no build for this platform")

from logprobe.kernels.attention.api import ScoreRule
from logprobe.kernels.layers.forms import PanelWeights, empty_panels, fill_blocks
from logprobe.kernels.layers.layout import FLOAT32, INT4, INT4_WIDE, INT8, INT8_WIDE, Form
from logprobe.kernels.triton import attention, layers, products, reference
from logprobe.kernels.triton.attention import Tiles
from logprobe.kernels.triton.blocks import from_panels, joined
from logprobe.kernels.triton.pieces import join, split

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.shape == want.shape
    assert float((got.double() - want).abs().max() / want.abs().max()) < tolerance


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Assert equal bits on a GPU; the interpreter uses NumPy, whose summation order depends on the shape."""
    if DEVICE == "cuda":
        assert torch.equal(got, want)
    else:
        close(got, want.double(), 1e-6)


def test_three_pieces_are_the_number_itself() -> None:
    x = random(7, 33) * torch.exp(random(7, 33, seed=1) * 10)
    assert torch.equal(join(split(x, 3)), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"), [(1, 70, 96), (5, 128, 576), (70, 65, 130)]
)
def test_products_are_accurate_to_float32(
    dtype: torch.dtype, num_rows: int, num_outputs: int, num_inputs: int
) -> None:
    x = random(num_rows, num_inputs)
    weight, bias = random(num_outputs, num_inputs, seed=2).to(dtype), random(num_outputs, seed=3)
    close(products.linear(split(x, 3), weight), reference.linear(x, weight), 1e-6)
    close(products.linear(split(x, 3), weight, bias), reference.linear(x, weight, bias), 1e-6)
    one_piece = products.linear(split(x, 1), weight)
    close(one_piece, reference.linear(x, weight), 2e-2)
    assert not torch.equal(one_piece, products.linear(split(x, 3), weight))


def quantised(form: Form, num_outputs: int, num_inputs: int) -> PanelWeights:
    rng = np.random.default_rng(0)
    num_blocks = num_inputs // form.inputs
    is_int4, is_wide = form in {INT4, INT4_WIDE}, form in {INT4_WIDE, INT8_WIDE}
    header = rng.normal(size=(num_outputs, num_blocks, 2 if is_int4 else 1))
    if is_int4:
        numbers = rng.integers(0, 1 << 32, (num_outputs, num_blocks, 4), dtype=np.uint32)
    else:
        numbers = rng.integers(-128, 128, (num_outputs, num_blocks, form.inputs), dtype=np.int8)
    panels = empty_panels(form, num_outputs, num_inputs)
    fill_blocks(panels, 0, header.astype(np.float32 if is_wide else np.float16), numbers)
    return panels


@pytest.mark.parametrize("form", [INT4, INT4_WIDE, INT8, INT8_WIDE], ids=lambda form: form.name)
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), [(1, 70, 96), (20, 64, 576)])
def test_products_of_quantised_weights_are_those_of_the_same_floats(
    form: Form, num_rows: int, num_outputs: int, num_inputs: int
) -> None:
    panels = quantised(form, num_outputs, num_inputs)
    weight = from_panels(panels, DEVICE)
    assert weight is not None
    assert weight.shape == (num_outputs, num_inputs)
    floats = torch.from_numpy(panels.rows(np.arange(num_outputs))).to(DEVICE)
    assert torch.equal(weight.float(), floats)
    assert torch.equal(weight[3:9].float(), floats[3:9])
    x = random(num_rows, num_inputs)
    got = products.linear(split(x, 3), weight)
    assert torch.equal(got, products.linear(split(x, 3), floats))
    close(got, reference.linear(x, floats), 1e-6)


def test_quantised_matrices_of_one_format_are_joined() -> None:
    first, second, other = (from_panels(quantised(form, 48, 64), DEVICE) for form in (INT4, INT4, INT8))
    assert first is not None
    assert second is not None
    assert other is not None
    whole = joined([first, second])
    assert whole is not None
    assert torch.equal(whole.float(), torch.cat([first.float(), second.float()]))
    assert joined([first, other]) is None
    floats = empty_panels(FLOAT32, 48, 64)
    assert from_panels(floats, DEVICE) is None


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    pieces, weight = split(random(130, 600), 3), random(96, 600, seed=1).bfloat16()
    assert products.num_splits(96, 600) == 2
    whole = products.linear(pieces, weight)
    for num_rows in (1, 2, 17, 33, 64, 65):
        same(products.linear(pieces[:, :num_rows].contiguous(), weight), whole[:num_rows])


def test_one_program_adds_what_several_did(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, weight, bias = split(random(3, 1000), 3), random(70, 1000, seed=1).bfloat16(), random(70, seed=2)
    monkeypatch.setattr(products, "num_splits", lambda *_: 4)
    assert len(products.linear_parts(pieces, weight)) == 4
    apart = products.linear(pieces, weight, bias)
    monkeypatch.setattr(products, "ENOUGH_TILES", 0)
    assert len(products.linear_parts(pieces, weight)) == 1
    same(products.linear(pieces, weight, bias), apart)


def norm_of(width: int, *, is_centred: bool, seed: int) -> layers.Norm:
    bias = random(width, seed=seed + 10) if is_centred else None
    return layers.Norm(random(width, seed=seed), bias, 1e-5, is_centred)


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize("width", [32, 96])
def test_norms(is_centred: bool, width: int) -> None:
    x, layer = random(5, 96), norm_of(width, is_centred=is_centred, seed=1)
    want = reference.norm(x, layer)
    close(layers.norm(x, layer, torch.empty_like(x)), want, 1e-6)
    if width == 96:
        pieces = torch.empty(3, 5, 96, dtype=torch.bfloat16, device=DEVICE)
        close(join(layers.norm(x, layer, pieces)), want, 1e-6)
        assert torch.equal(join(layers.norm(x, None, pieces)), x)


@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("norms", ["none", "rms", "layer"])
def test_products_are_added_to_hidden_states(num_parts: int, has_bias: bool, norms: str) -> None:
    parts, hidden = random(num_parts, 5, 96), random(5, 96, seed=1)
    bias = random(96, seed=2) if has_bias else None
    after, following = (
        None if norms == "none" else norm_of(96, is_centred=norms == "layer", seed=seed) for seed in (3, 4)
    )
    want = (parts.double().sum(0) + (0 if bias is None else bias.double())) * 0.7
    want = hidden + (want if after is None else reference.norm(want, after))
    got, out = hidden.clone(), torch.empty(3, 5, 96, dtype=torch.bfloat16, device=DEVICE)
    layers.add(parts, bias, got, factor=0.7, after=after, following=following, out=out)
    close(got, want, 1e-6)
    close(join(out), want if following is None else reference.norm(want, following), 1e-6)
    alone = hidden.clone()
    layers.add(parts, bias, alone, factor=0.7, after=after)
    assert torch.equal(alone, got)


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("pairs", [0, 4, 10])
@pytest.mark.parametrize("norms", ["none", "rms", "layer"])
def test_rotation_and_store(is_paired: bool, pairs: int, norms: str) -> None:
    heads, kv_heads, dim = 6, 2, 20
    width = (heads + 2 * kv_heads) * dim
    products_, bias = random(3, 5, width), random(width, seed=6)
    projected = products_.double().sum(0) + bias
    layer_norms = [
        None if norms == "none" else norm_of(dim, is_centred=norms == "layer", seed=seed) for seed in (7, 8)
    ]
    cosines, sines = random(5, pairs, seed=1), random(5, pairs, seed=2)
    keys, values = torch.zeros(2, 30, kv_heads, dim, device=DEVICE)
    slots = torch.tensor([3, 1, -1, 9, 20], dtype=torch.int32, device=DEVICE)
    query, scales = torch.empty(5, heads, dim, device=DEVICE), random(5, seed=3)
    offsets = (0, heads * dim, (heads + kv_heads) * dim)
    layers.rotate_and_store(
        products_, bias, offsets, dim, (cosines, sines), (keys, values), slots, query,
        norms=(layer_norms[0], layer_norms[1]), is_paired=is_paired, query_scales=scales,
    )  # fmt: skip
    parts = torch.split(projected, [heads * dim, kv_heads * dim, kv_heads * dim], 1)
    normed = [
        part if one is None else reference.norm(part.contiguous(), one)
        for part, one in zip(parts, [*layer_norms, None], strict=True)
    ]
    queries, new_keys, new_values = (part.view(5, -1, dim) for part in normed)
    want = reference.rotate(queries, cosines, sines, is_paired=is_paired) * scales[:, None, None].double()
    close(query, want, 1e-6)
    stored = slots >= 0
    places = slots[stored].long()
    want = reference.rotate(new_keys, cosines, sines, is_paired=is_paired)
    close(keys[places], want[stored], 1e-6)
    close(values[places], new_values[stored], 1e-6)
    assert int(values.any(-1).any(-1).sum()) == len(places)  # rows without a token store nothing


@pytest.mark.parametrize("activation", layers.ACTIVATIONS)
@pytest.mark.parametrize("has_values", [True, False])
def test_gates(activation: str, has_values: bool) -> None:
    width = 80 if has_values else 40
    parts, bias = 3 * random(2, 4, width), random(width, seed=1)
    out = torch.empty(3, 4, 40, dtype=torch.bfloat16, device=DEVICE)
    want = reference.gate(parts.double().sum(0), activation, has_values=has_values)
    close(join(layers.gate(parts, None, activation, out, has_values=has_values)), want, 1e-6)
    want = reference.gate(parts.double().sum(0) + bias, activation, has_values=has_values)
    close(join(layers.gate(parts, bias, activation, out, has_values=has_values)), want, 1e-6)


def tiles(
    rows: list[tuple[int, int, int, int]], slots: torch.Tensor, max_tokens: int, max_keys: int
) -> Tiles:
    columns = torch.tensor(rows, dtype=torch.int32, device=DEVICE).T.contiguous()
    return Tiles(*columns, slots=slots, max_tokens=max_tokens, max_keys=max_keys)


RULES = (ScoreRule(0.22), ScoreRule(0.3, 100), ScoreRule(0.3, None, 5.0), ScoreRule(0.3, 300, 5.0))


@pytest.mark.parametrize(
    ("rule", "heads", "kv_heads", "dim"),
    [*((rule, 6, 2, 20) for rule in RULES), (RULES[0], 4, 4, 16), (RULES[-1], 4, 1, 64)],
)
def test_attention_over_pages(
    rule: ScoreRule, heads: int, kv_heads: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SEGMENT_BLOCKS", 4)
    lengths = (1, 300, 64, 700)
    pool = random(2000, kv_heads, dim), random(2000, kv_heads, dim, seed=1)
    generator = torch.Generator().manual_seed(2)
    contexts = [torch.randperm(2000, generator=generator)[:length].int() for length in lengths]
    slots, begins = torch.cat(contexts).to(DEVICE), (0, 1, 301, 365)
    query = random(4, heads, dim, seed=3)
    rows = [(token, 1, begin, length) for token, begin, length in zip(range(4), begins, lengths, strict=True)]
    made = {}
    # A program for each block; for each segment (the last of them idle); for everything.
    for max_keys, most in ((700, 64), (1030, 1), (0, 64)):
        monkeypatch.setattr(attention, "MAX_BLOCKS", most)
        out = torch.full((3, 4, heads * dim), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        decode = tiles(rows, slots, 1, max_keys)
        attention.attend(query, pool, decode, rule, out)
        close(join(out), reference.attend(query, pool, decode, rule), 2e-6)
        made[max_keys] = out
    monkeypatch.setattr(attention, "MAX_BLOCKS", 1)
    assert attention._split(tiles(rows, slots, 1, 1030), kv_heads, 64) == (5, 4)
    same(join(made[700]), join(made[0]))
    same(join(made[1030]), join(made[0]))


@pytest.mark.parametrize("num_tiles", [1, 3, 8, 31, 32, 128])
@pytest.mark.parametrize("max_keys", [0, 1, 64, 65, 500, 4096, 4097, 100_000])
def test_a_program_computes_one_block_or_one_segment(num_tiles: int, max_keys: int) -> None:
    slots = torch.zeros(1, dtype=torch.int32)
    found = attention._split(tiles([(0, 1, 0, 1)] * num_tiles, slots, 1, max_keys), 8, 64)
    num_blocks = max(1, -(-max_keys // 64))
    assert found in {(num_blocks, 1), (-(-num_blocks // attention.SEGMENT_BLOCKS), attention.SEGMENT_BLOCKS)}


def test_a_token_has_the_same_bits_in_a_chunk_and_alone() -> None:
    heads, kv_heads, dim, length, count = 6, 2, 20, 300, 9
    pool = random(500, kv_heads, dim), random(500, kv_heads, dim, seed=1)
    slots = torch.randperm(500, generator=torch.Generator().manual_seed(2))[:length].int().to(DEVICE)
    query, rule = random(count, heads, dim, seed=3), ScoreRule(0.22, 280)
    first = length - count + 1
    chunk = torch.empty(3, count, heads * dim, dtype=torch.bfloat16, device=DEVICE)
    alone = torch.empty_like(chunk)
    many = attention.tile_tokens(heads, kv_heads, is_decode=False)
    rows = [(start, min(many, count - start), 0, first + start) for start in range(0, count, many)]
    attention.attend(query, pool, tiles(rows, slots, many, 0), rule, chunk)
    rows = [(token, 1, 0, first + token) for token in range(count)]
    attention.attend(query, pool, tiles(rows, slots, 1, length), rule, alone)
    same(join(chunk), join(alone))
