"""Products of bfloat16 pieces on tiles (`bf16x3`) against a plain twin, bit for bit, and against float64."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from logprobe.kernels import threads
from logprobe.kernels.layers.forms import PanelWeights, empty_panels, fill_blocks, pack_floats
from logprobe.kernels.layers.layout import FORMS
from logprobe.kernels.layers.panels import Finish, panel_stage
from logprobe.kernels.native import VARIABLE, Library, library

pytestmark = pytest.mark.skipif(library().variant == "neon", reason="bf16x3 products are for x86-64")
Floats = NDArray[np.float32]
ROWS = (1, 2, 3, 8, 9, 16, 17, 31, 33, 48, 100, 300)
QUANTIZED = ("int4", "int4_wide", "int8", "int8_wide")
SMALLEST = np.float32(2.0**-126)


class Weights(NamedTuple):
    """A matrix, and what it was packed from: `numbers` times `scales` plus `summands`."""

    panels: PanelWeights
    numbers: Floats  # (outputs, inputs)
    scales: Floats | None = None  # (outputs, blocks); None: floats
    summands: Floats | None = None

    @property
    def values(self) -> NDArray[np.float64]:
        """The exact weights."""
        numbers = self.numbers.astype(np.float64)
        if self.scales is None:
            return numbers
        block = numbers.shape[1] // self.scales.shape[1]
        found = numbers * np.repeat(self.scales.astype(np.float64), block, axis=1)
        summands = np.zeros_like(self.scales) if self.summands is None else self.summands
        return found + np.repeat(summands.astype(np.float64), block, axis=1)


def weights(form: str, outputs: int = 50, inputs: int = 544, seed: int = 2) -> Weights:
    rng = np.random.default_rng(seed)
    if form == "bfloat16":
        bits = rng.standard_normal((outputs, inputs), np.float32).view(np.uint32) & 0xFFFF0000
        numbers = bits.view(np.float32)
        return Weights(replace(pack_floats(numbers), arithmetic="bf16x3"), numbers)
    wide = np.float32 if form.endswith("wide") else np.float16
    panels = replace(empty_panels(FORMS[form], outputs, inputs), arithmetic="bf16x3")
    block = FORMS[form].inputs
    scales = (rng.random((outputs, inputs // block)) + 0.01).astype(wide)
    if form.startswith("int8"):
        values = rng.integers(-128, 128, (*scales.shape, block)).astype(np.int8)
        fill_blocks(panels, 0, scales[..., None], values)
        return Weights(panels, values.reshape(outputs, inputs).astype(np.float32), scales.astype(np.float32))
    summands = (-7 * scales * rng.random(scales.shape)).astype(wide)
    words = rng.integers(0, 1 << 32, (*scales.shape, 4), dtype=np.uint32)
    fill_blocks(panels, 0, np.stack([scales, summands], axis=-1), words)
    numbers = (words[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).reshape(outputs, inputs)
    return Weights(panels, numbers.astype(np.float32), scales.astype(np.float32), summands.astype(np.float32))


def activations(num_rows: int, inputs: int = 544, seed: int = 3) -> Floats:
    return np.random.default_rng(seed).standard_normal((num_rows, inputs), np.float32)


def product(x: Floats, panels: PanelWeights, **finish: object) -> Floats:
    out = np.full((len(x), panels.num_outputs), np.nan, np.float32)
    panel_stage(x, panels, out, Finish(**finish)).run()  # type: ignore[arg-type]
    return out


def flushed(x: Floats) -> Floats:
    """Numbers below the normal range as zeros, with their sign."""
    return np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x)


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """Round a * b + c once, by an odd float64: its last bit is set if the sum is not exact."""
    p, c64 = flushed(a).astype(np.float64) * flushed(b), flushed(c).astype(np.float64)
    total = p + c64
    part = total - p
    error = (p - (total - part)) + (c64 - part)
    bits = total.view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((error != 0) & (bits & 1 == 0), bits + step, bits)
    return flushed(odd.view(np.float64).astype(np.float32))


def plus(a: Floats, b: Floats) -> Floats:
    return flushed(flushed(a) + flushed(b))


def pieces(x: Floats) -> list[Floats]:
    """Three numbers of eight significant bits whose sum is `x`, largest first."""
    found, rest = [], flushed(x)
    for _ in range(3):
        piece = (rest.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        found.append(piece)
        rest = flushed(rest - piece)
    return found


def block_sum(x: Floats) -> Floats:
    """Sum 32 inputs in the order of the kernel."""
    eight = plus(plus(x[..., :8], x[..., 8:16]), plus(x[..., 16:24], x[..., 24:32]))
    four = plus(eight[..., :4], eight[..., 4:])
    return plus(plus(four[..., 0], four[..., 1]), plus(four[..., 2], four[..., 3]))


def twin(x: Floats, matrix: Weights) -> Floats:
    """The products of rows with a matrix, in the order that native/products_bf16x3.cpp states."""
    padding = ((0, 0), (0, -x.shape[1] % 32))
    x, numbers = np.pad(x, padding), np.pad(matrix.numbers, padding)
    inputs, shape = x.shape[1], (len(x), len(numbers))
    step = 16 if matrix.panels.form.name == "int8_wide" else 32
    if matrix.summands is not None:
        numbers -= 8
    result = np.zeros(shape, np.float32)
    length = 256 if matrix.scales is None else 128  # of a section
    for section in range(0, inputs, length):
        total = np.zeros(shape, np.float32)
        for start in range(section, min(section + length, inputs), step):
            one = slice(start, start + step)
            found = total if matrix.scales is None else np.zeros(shape, np.float32)
            for piece in reversed(pieces(x[:, one])):
                sums = [np.zeros(shape, np.float32), np.zeros(shape, np.float32)]
                for i in range(step):
                    sums[i % 2] = fused(piece[:, i, None], numbers[None, :, start + i], sums[i % 2])
                found = plus(found, plus(*sums))
            if matrix.scales is None:
                total = found
                continue
            scale = matrix.scales[None, :, start // step]
            total = fused(scale, found, total)
            if matrix.summands is not None:
                summand = matrix.summands[None, :, start // step]
                summand = fused(np.full_like(scale, 8), scale, summand)
                total = fused(block_sum(x[:, one])[:, None], summand, total)
        result = plus(result, total)
    return result


def hostile(num_rows: int, inputs: int) -> Floats:
    """Rows with numbers of very different sizes, zeros of both signs, and numbers below the normal range."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((num_rows, inputs)) * 2.0 ** rng.integers(-60, 30, (num_rows, inputs))
    x[rng.random(x.shape) < 0.1] = 0.0
    x[rng.random(x.shape) < 0.1] *= -1.0
    x[rng.random(x.shape) < 0.05] *= 2.0**-100
    return x.astype(np.float32)


@pytest.mark.parametrize("form", ["bfloat16", *QUANTIZED])
@pytest.mark.parametrize("kind", ["normal", "hostile"])
def test_products_have_the_bits_of_the_plain_twin(form: str, kind: str) -> None:
    matrix = weights(form)
    x = activations(37) if kind == "normal" else hostile(37, 544)
    want = twin(x, matrix)
    assert np.array_equal(product(x, matrix.panels).view(np.uint32), want.view(np.uint32))
    for row in (0, 5, 36):
        alone = product(x[row : row + 1], matrix.panels)
        assert np.array_equal(alone.view(np.uint32), want[row : row + 1].view(np.uint32))


@pytest.mark.parametrize("form", ["bfloat16", *QUANTIZED])
def test_a_row_has_the_same_bits_among_any_others(form: str) -> None:
    panels, x = weights(form).panels, activations(max(ROWS))
    alone = np.concatenate([product(row[None], panels) for row in x])
    for num_rows in ROWS:
        assert np.array_equal(product(x[:num_rows], panels), alone[:num_rows])
        assert np.array_equal(product(x[-num_rows:], panels), alone[-num_rows:])


@pytest.mark.parametrize("form", ["bfloat16", *QUANTIZED])
@pytest.mark.parametrize("inputs", [32, 576, 2048, 8192])
def test_products_are_as_exact_as_those_of_fma(form: str, inputs: int) -> None:
    matrix = weights(form, 48, inputs)
    x = activations(8, inputs)
    want = x.astype(np.float64) @ matrix.values.T
    size = np.abs(x).astype(np.float64) @ np.abs(matrix.values).T

    def error(panels: PanelWeights) -> float:
        return float(np.sqrt(np.mean(((product(x, panels) - want) / size) ** 2)))

    fma = error(replace(matrix.panels, arithmetic="fma"))
    assert error(matrix.panels) < 1.1 * fma  # measured: 0.5 to 1.0


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (47, 33), (48, 31), (49, 97), (144, 300)])
def test_any_number_of_outputs_and_inputs_is_padded(outputs: int, inputs: int) -> None:
    matrix = weights("bfloat16", outputs, inputs)
    x = activations(21, inputs)
    assert np.array_equal(product(x, matrix.panels), twin(x, matrix))


@pytest.mark.parametrize("form", ["bfloat16", "int4"])
def test_the_epilogue_is_applied(form: str) -> None:
    bias = np.linspace(-1, 1, 50, dtype=np.float32)
    gates, values = weights(form, seed=7).panels, weights(form, seed=8).panels
    for num_rows in (1, 20, 70):
        x, residual = activations(num_rows) / 4, activations(num_rows, 50, seed=9)
        x[0], residual[0] = 0.0, 1e-40  # stays, although products below the normal range are zero
        finish = {"values": values, "activation": "relu", "factor": 0.5, "residual": residual}
        got = product(x, gates.with_bias(bias), **finish)
        gated = np.maximum(product(x, gates) + bias, 0) * product(x, values)
        assert np.array_equal(got, gated * np.float32(0.5) + residual)


@pytest.mark.parametrize("form", ["bfloat16", *QUANTIZED])
def test_infinities_and_nan_stay_in_their_rows(form: str) -> None:
    matrix, x = weights(form), activations(20)
    want = product(x, matrix.panels)
    x[3, 7], x[11, 100] = np.inf, np.nan
    got = product(x, matrix.panels)
    assert not np.isfinite(got[[3, 11]]).any()
    others = [row for row in range(20) if row not in {3, 11}]
    assert np.array_equal(got[others], want[others])


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_the_number_of_threads_does_not_matter(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    panels, x = weights(form, 480).panels, activations(130)
    want = product(x, panels)
    for number in (1, 3):
        monkeypatch.setattr(threads, "num_threads", lambda number=number: number)
        assert np.array_equal(product(x, panels), want)


def test_weights_with_more_digits_than_bfloat16_stay_with_fma() -> None:
    numbers = np.random.default_rng(1).standard_normal((50, 64), np.float32)
    for matrix in (numbers, numbers.astype(np.float16)):
        assert pack_floats(matrix).multiplied_by("bf16x3").arithmetic == "fma"
    plain = replace(weights("int8").panels, arithmetic="fma")
    assert plain.multiplied_by("bf16x3").arithmetic == "bf16x3"


@pytest.mark.skipif(not library().has_tiles, reason="this processor has no AMX tiles")
@pytest.mark.parametrize("form", ["bfloat16", *QUANTIZED])
def test_emulated_tiles_have_the_bits_of_the_processors(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    panels, x = weights(form, 480, 2048).panels, hostile(100, 2048)
    want = product(x, panels)
    monkeypatch.setitem(library().__dict__, "has_tiles", False)
    assert np.array_equal(product(x, panels), want)


OTHER_VARIANT = """
import sys, zlib
sys.path.insert(0, sys.argv[1])
from test_bf16x3 import activations, hostile, product, weights, QUANTIZED
for form in ("bfloat16", *QUANTIZED):
    panels = weights(form).panels
    print(zlib.crc32(product(activations(70), panels)), zlib.crc32(product(hostile(5, 544), panels)))
"""


def test_variants_have_the_same_bits() -> None:
    built = [name for name in ("v3", "v4") if Library.path_of(name).exists() and Library(name).can_run()]
    assert built
    folder = str(Path(__file__).parent)
    outputs = {
        subprocess.run(
            [sys.executable, "-c", OTHER_VARIANT, folder],
            env={**os.environ, VARIABLE: name},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for name in built
    }
    assert len(outputs) == 1
