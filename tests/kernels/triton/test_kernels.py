"""The Triton kernels of the GPU decoder against their float64 references; interpreted without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no build for this platform")

from logprobe.kernels.attention.api import ScoreRule
from logprobe.kernels.triton import attention, layers, products, reference
from logprobe.kernels.triton.attention import Tiles
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
    x, residual = random(num_rows, num_inputs), random(num_rows, num_outputs, seed=1)
    weight, bias = random(num_outputs, num_inputs, seed=2).to(dtype), random(num_outputs, seed=3)
    close(products.linear(split(x, 3), weight), reference.linear(x, weight), 1e-6)
    got = products.linear(split(x, 3), weight, bias, residual=residual, factor=0.3)
    close(got, reference.linear(x, weight, bias, residual, 0.3), 1e-6)
    one_piece = products.linear(split(x, 1), weight)
    close(one_piece, reference.linear(x, weight), 2e-2)
    assert not torch.equal(one_piece, products.linear(split(x, 3), weight))


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    pieces, weight = split(random(130, 600), 3), random(96, 600, seed=1).bfloat16()
    assert products.num_splits(96, 600) == 2
    residual = random(130, 96, seed=2)
    whole = products.linear(pieces, weight, residual=residual, factor=0.7)
    for num_rows in (1, 2, 17, 33, 64, 65):
        part = pieces[:, :num_rows].contiguous()
        got = products.linear(part, weight, residual=residual[:num_rows], factor=0.7)
        same(got, whole[:num_rows])


def test_one_program_adds_what_several_did(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, weight, bias = split(random(3, 1000), 3), random(70, 1000, seed=1).bfloat16(), random(70, seed=2)
    monkeypatch.setattr(products, "num_splits", lambda *_: 4)
    apart = products.linear(pieces, weight, bias, factor=0.7)
    monkeypatch.setattr(products, "ENOUGH_TILES", 0)
    same(products.linear(pieces, weight, bias, factor=0.7), apart)


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize("width", [32, 96])
def test_norms(is_centred: bool, width: int) -> None:
    x, weight, bias = random(5, 96), random(width, seed=1), random(width, seed=2) if is_centred else None
    options: dict[str, Any] = {"epsilon": 1e-5, "is_centred": is_centred}
    want = reference.norm(x, weight, bias, **options)
    close(layers.norm(x, weight, bias, **options, out=torch.empty_like(x)), want, 1e-6)
    residual = random(5, 96, seed=3)
    got = layers.norm(x, weight, bias, **options, out=torch.empty_like(x), residual=residual)
    close(got, want + residual, 1e-6)
    if width == 96:
        pieces = torch.empty(3, 5, 96, dtype=torch.bfloat16, device=DEVICE)
        close(join(layers.norm(x, weight, bias, **options, out=pieces)), want, 1e-6)
        assert torch.equal(join(layers.norm(x, None, out=pieces)), x)


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("pairs", [0, 4, 10])
def test_rotation_and_store(is_paired: bool, pairs: int) -> None:
    heads, kv_heads, dim = 6, 2, 20
    projected = random(5, (heads + 2 * kv_heads) * dim)
    cosines, sines = random(5, pairs, seed=1), random(5, pairs, seed=2)
    keys, values = torch.zeros(2, 30, kv_heads, dim, device=DEVICE)
    slots = torch.tensor([3, 1, -1, 9, 20], dtype=torch.int32, device=DEVICE)
    query, scales = torch.empty(5, heads, dim, device=DEVICE), random(5, seed=3)
    offsets = (0, heads * dim, (heads + kv_heads) * dim)
    layers.rotate_and_store(
        projected, offsets, dim, (cosines, sines), (keys, values), slots, query,
        is_paired=is_paired, query_scales=scales,
    )  # fmt: skip
    parts = torch.split(projected, [heads * dim, kv_heads * dim, kv_heads * dim], 1)
    queries, new_keys, new_values = (part.view(5, -1, dim) for part in parts)
    want = reference.rotate(queries, cosines, sines, is_paired=is_paired) * scales[:, None, None].double()
    close(query, want, 1e-6)
    stored = slots >= 0
    places = slots[stored].long()
    want = reference.rotate(new_keys, cosines, sines, is_paired=is_paired)
    close(keys[places], want[stored], 1e-6)
    assert torch.equal(values[places], new_values[stored])
    assert int(values.any(-1).any(-1).sum()) == len(places)  # rows without a token store nothing


@pytest.mark.parametrize("activation", layers.ACTIVATIONS)
@pytest.mark.parametrize("has_values", [True, False])
def test_gates(activation: str, has_values: bool) -> None:
    x = 3 * random(4, 80 if has_values else 40)
    out = torch.empty(3, 4, 40, dtype=torch.bfloat16, device=DEVICE)
    want = reference.gate(x, activation, has_values=has_values)
    close(join(layers.gate(x, activation, out, has_values=has_values)), want, 1e-6)


def tiles(
    rows: list[tuple[int, int, int, int]], slots: torch.Tensor, max_tokens: int, segments: int
) -> Tiles:
    columns = torch.tensor(rows, dtype=torch.int32, device=DEVICE).T.contiguous()
    return Tiles(*columns, slots=slots, max_tokens=max_tokens, num_segments=segments)


RULES = (ScoreRule(0.22), ScoreRule(0.3, 100), ScoreRule(0.3, None, 5.0), ScoreRule(0.3, 300, 5.0))


@pytest.mark.parametrize(
    ("rule", "heads", "kv_heads", "dim"),
    [*((rule, 6, 2, 20) for rule in RULES), (RULES[0], 4, 4, 16), (RULES[-1], 4, 1, 64)],
)
def test_attention_over_pages(rule: ScoreRule, heads: int, kv_heads: int, dim: int) -> None:
    lengths = (1, 300, 64, 700)
    pool = random(2000, kv_heads, dim), random(2000, kv_heads, dim, seed=1)
    generator = torch.Generator().manual_seed(2)
    contexts = [torch.randperm(2000, generator=generator)[:length].int() for length in lengths]
    slots, begins = torch.cat(contexts).to(DEVICE), (0, 1, 301, 365)
    query = random(4, heads, dim, seed=3)
    rows = [(token, 1, begin, length) for token, begin, length in zip(range(4), begins, lengths, strict=True)]
    made = {}
    for segments in (3, 4, 0):  # 3 programs, 4 (one of them idle), or one for all segments
        out = torch.empty(3, 4, heads * dim, dtype=torch.bfloat16, device=DEVICE)
        decode = tiles(rows, slots, 1, segments)
        attention.attend(query, pool, decode, rule, out)
        close(join(out), reference.attend(query, pool, decode, rule), 2e-6)
        made[segments] = out
    same(join(made[3]), join(made[0]))
    same(join(made[4]), join(made[0]))


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
    attention.attend(query, pool, tiles(rows, slots, 1, 2), rule, alone)
    same(join(chunk), join(alone))
