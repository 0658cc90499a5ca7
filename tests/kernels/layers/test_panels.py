"""Products with packed panels against float64, on the weights of the plain reader."""

import os
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from logprobe.kernels import threads
from logprobe.kernels.layers.forms import PanelWeights, empty_panels, fill_blocks, pack_floats
from logprobe.kernels.layers.layout import BFLOAT16, FLOAT16, FLOAT32, FORMS
from logprobe.kernels.layers.panels import Finish, panel_stage
from logprobe.kernels.layers.rows import ACTIVATIONS
from logprobe.kernels.native import VARIABLE, VARIANTS, Library, library
from logprobe.kernels.stages import Series

TOLERANCE = 2e-6  # relative to the largest output
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 64, 65, 130, 300)
OUTPUTS, INPUTS = 100, 224  # an incomplete panel, an incomplete block


def floats(form: str) -> torch.Tensor:
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1))
    return {"float32": weight, "bfloat16": weight.bfloat16().float(), "float16": weight.half().float()}[form]


def weights(form: str) -> PanelWeights:
    rng = np.random.default_rng(2)
    if form in {"float32", "bfloat16", "float16"}:
        return pack_floats(floats(form))
    wide = np.float32 if form.endswith("wide") else np.float16
    panels = empty_panels(FORMS[form], OUTPUTS, INPUTS)
    block = FORMS[form].inputs
    shape = (OUTPUTS, INPUTS // block)
    scales = rng.random(shape).astype(wide)
    if form.startswith("int4"):
        header = np.stack([scales, (-8 * scales).astype(wide)], axis=-1)
        fill_blocks(panels, 0, header, rng.integers(0, 1 << 32, (*shape, 4), dtype=np.uint32))
    else:
        values = rng.integers(-128, 128, (*shape, block)).astype(np.int8)
        fill_blocks(panels, 0, scales[..., None], values)
    return panels


def activations(num_rows: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(num_rows, INPUTS, generator=torch.Generator().manual_seed(seed))


def widened(panels: PanelWeights) -> torch.Tensor:
    return torch.from_numpy(panels.rows(np.arange(panels.num_outputs)))


def product(x: torch.Tensor, panels: PanelWeights, **finish: Any) -> torch.Tensor:
    out = torch.full((len(x), panels.num_outputs), torch.nan)
    panel_stage(x, panels, out, Finish(**finish)).run()
    return out


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize("form", sorted(FORMS))
def test_products_are_those_of_float64_and_bits_do_not_depend_on_the_other_rows(form: str) -> None:
    panels = weights(form)
    assert panels.form is FORMS[form]
    x = activations(max(ROWS))
    want = x.double() @ widened(panels).double().T
    alone = product(x[:1], panels)
    for num_rows in ROWS:
        got = product(x[:num_rows], panels)
        assert_close(got, want[:num_rows])
        assert torch.equal(got[:1], alone)
        assert torch.equal(product(x[num_rows - 1 : num_rows], panels), got[-1:])


@pytest.mark.parametrize("form", sorted(FORMS))
def test_terms_behind_a_large_one_keep_their_digits(form: str) -> None:
    """A head's hidden states have a few very large values, which lose precision in long sums."""
    panels, x = weights(form), activations(64)
    x[:, [0, 96]] = 80.0
    for num_rows in (1, 4, 8, 64):
        want = x[:num_rows].double() @ widened(panels).double().T
        error = (product(x[:num_rows], panels) - want).square().mean().sqrt() / want.square().mean().sqrt()
        assert error < 1.7e-7


# int4_wide weights are widened with one rounding, but `rows` rounds twice.
@pytest.mark.parametrize("form", sorted(FORMS.keys() - {"int4_wide"}))
def test_the_form_of_the_same_weights_does_not_change_the_bits(form: str) -> None:
    panels = weights(form)
    floats = pack_floats(widened(panels))
    for num_rows in (1, 4, 8, 64):
        assert torch.equal(product(activations(num_rows), panels), product(activations(num_rows), floats))


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16"])
def test_floats_are_kept_in_the_smallest_form_that_holds_them_exactly(form: str) -> None:
    panels = weights(form)
    assert panels.form is {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}[form]
    assert torch.equal(widened(panels), floats(form))


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16"])
def test_a_matrix_that_lies_turned_is_packed_as_one_that_does_not(form: str) -> None:
    weight = floats(form)[:96, :64]  # whole panels and blocks, no padding
    for packed in (pack_floats(weight.T.contiguous().T), pack_floats(weight)):
        assert packed.form.name == form
        assert torch.equal(widened(packed), weight)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (47, 33), (48, 31), (49, 97)])
def test_any_number_of_outputs_and_inputs_will_do(outputs: int, inputs: int) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(5)).bfloat16().float()
    panels, x = pack_floats(weight), torch.randn(11, inputs, generator=torch.Generator().manual_seed(6))
    assert torch.equal(widened(panels), weight)
    assert_close(product(x, panels), x.double() @ weight.double().T)


def test_zeros_of_either_sign_and_subnormals_keep_their_bits() -> None:
    weight = torch.tensor([0.0, -0.0, 2.0**-133, -(2.0**-126), 1.0, -3.0, 2.0**100, 0.5]).repeat(3, 4)
    panels = pack_floats(weight)
    assert panels.form is BFLOAT16
    assert torch.equal(widened(panels).view(torch.int32), weight.view(torch.int32))


FUNCTIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda g: functional.relu(g) ** 2,
}


def test_every_activation_has_a_twin() -> None:
    assert FUNCTIONS.keys() == ACTIVATIONS.keys() - {"none"}


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_a_gate_meets_its_values_on_the_way_out(activation: str) -> None:
    gates, values = weights("bfloat16"), weights("bfloat16")
    x = activations(9) / 4
    want = FUNCTIONS[activation](x.double() @ widened(gates).double().T)
    want = want * (x.double() @ widened(values).double().T)
    assert_close(product(x, gates, values=values, activation=activation), want)


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("num_rows", [1, 9, 70])
def test_without_values_the_activation_is_of_the_product_and_its_bias(num_rows: int, activation: str) -> None:
    bias = torch.linspace(-1, 1, OUTPUTS)
    panels, x = pack_floats(floats("bfloat16"), bias), activations(num_rows) / 4
    residual = torch.randn(num_rows, OUTPUTS, generator=torch.Generator().manual_seed(4))
    want = FUNCTIONS[activation](x.double() @ floats("bfloat16").double().T + bias)
    got = product(x, panels, activation=activation)
    assert_close(got, want)
    assert torch.equal(product(x, panels, activation=activation, residual=residual), got + residual)


@pytest.mark.parametrize(("activation", "is_gated"), [("none", False), ("silu", False), ("silu", True)])
def test_a_factor_multiplies_the_product_but_not_the_residual(activation: str, *, is_gated: bool) -> None:
    panels, x = pack_floats(floats("bfloat16"), torch.linspace(-1, 1, OUTPUTS)), activations(9) / 4
    finish = {"activation": activation, "values": weights("bfloat16") if is_gated else None}
    residual = torch.randn(9, OUTPUTS, generator=torch.Generator().manual_seed(4))
    want = product(x, panels, **finish) * 0.22
    assert torch.equal(product(x, panels, **finish, factor=0.22), want)
    assert torch.equal(product(x, panels, **finish, factor=0.22, residual=residual), want + residual)


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_what_is_no_number_stays_so_in_its_own_row(activation: str) -> None:
    x = activations(3)
    x[1, 5] = torch.nan
    got = product(x, weights("bfloat16"), activation=activation)
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


def test_bias_and_residual_are_added_and_rows_may_lie_in_wider_arrays() -> None:
    bias = torch.linspace(-1, 1, OUTPUTS)
    panels = pack_floats(floats("float16"), bias)
    wide = activations(5).repeat(1, 2)
    x = wide[:, INPUTS:]
    out = torch.zeros(5, OUTPUTS + 20)
    residual = torch.randn(5, OUTPUTS, generator=torch.Generator().manual_seed(4))
    want = x.double() @ floats("float16").double().T + bias + residual
    panel_stage(x, panels, out[:, 7 : 7 + OUTPUTS], Finish(residual=residual)).run()
    assert_close(out[:, 7 : 7 + OUTPUTS], want)
    assert (out[:, :7] == 0).all()
    assert (out[:, 7 + OUTPUTS :] == 0).all()
    panel_stage(x, panels, residual, Finish(residual=residual)).run()  # in place
    assert torch.equal(residual, out[:, 7 : 7 + OUTPUTS])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_bits_do_not_depend_on_threads(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    panels, x = weights("int4"), activations(300)
    want, out = product(x, panels), torch.empty(300, OUTPUTS)
    monkeypatch.setattr(threads, "num_threads", lambda: num_threads)  # more threads make more row blocks
    panel_stage(x, panels, out).run()
    assert torch.equal(out, want)


@pytest.mark.parametrize("num_threads", [1, 3, 64])
def test_each_block_of_rows_is_multiplied_once_in_every_run(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    max_groups = library().functions.MAX_GROUPS
    num_rows = 64 * (max_groups + 2)
    panels, x = weights("bfloat16"), activations(num_rows)
    want = torch.cat([product(part, panels) for part in x.split(64)])
    monkeypatch.setattr(threads, "num_threads", lambda: 64)  # the maximum number of blocks
    summands = torch.zeros(num_rows, OUTPUTS)
    stage = panel_stage(x, panels, summands, Finish(residual=summands))  # repeated work would add up
    assert stage.num_items == 3 * (max_groups + 2)  # panels, and blocks
    monkeypatch.undo()
    stage.run(num_threads=num_threads)
    assert torch.equal(summands, want)
    series = Series([stage])
    for number in range(2):
        series.run()
        assert_close(summands, (2 + number) * want)


@pytest.mark.parametrize("num_threads", [1, 2, 7, 64])
def test_each_panel_of_a_row_is_multiplied_once_in_every_run(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(19 * 48 + 5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    panels, x = pack_floats(weight), torch.randn(1, 64, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(threads, "num_threads", lambda: num_threads)  # as many parts of the matrix
    sums = torch.zeros(1, len(weight))
    stage = panel_stage(x, panels, sums, Finish(residual=sums))  # repeated work would add up
    for threads_that_run in (1, num_threads, 64):
        sums.zero_()
        stage.run(num_threads=threads_that_run)
        assert_close(sums, (x.double() @ weight.double().T).float())


@pytest.mark.parametrize(("num_threads", "least"), [(1, 32), (2, 32), (16, 64), (64, 256)])
def test_every_thread_has_several_items_of_whole_panels(
    num_threads: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "num_threads", lambda: num_threads)
    for num_panels in (3, 300):
        panels = pack_floats(torch.ones(48 * num_panels, 32))
        stage = panel_stage(torch.ones(1, 32), panels, torch.empty(1, 48 * num_panels))
        assert min(least, num_panels) <= stage.num_items <= min(2 * least, num_panels)


def test_halves_of_a_layer_lie_in_its_own_memory() -> None:
    weight = torch.arange(96.0 * 32).view(96, 32).bfloat16().float()
    whole = pack_floats(weight, torch.arange(96.0))
    halves = whole.halves()
    assert halves is not None
    for half, start in zip(halves, (0, 48), strict=True):
        assert torch.equal(widened(half), weight[start : start + 48])
        assert half.bias is not None
        assert half.bias.tolist() == list(range(start, start + 48))
        assert half.address == whole.address + (start and half.num_bytes)
    assert pack_floats(weight[:80]).halves() is None  # would split a panel
    assert pack_floats(weight[:95]).halves() is None


def test_layers_of_one_form_join_to_one() -> None:
    first = pack_floats(floats("bfloat16")[:48])
    second = pack_floats(floats("bfloat16")[48:], torch.ones(OUTPUTS - 48))
    joined = first.joined([second])
    assert joined is not None
    assert torch.equal(widened(joined), floats("bfloat16"))
    assert joined.bias is not None
    assert joined.bias.tolist() == [0.0] * 48 + [1.0] * (OUTPUTS - 48)
    assert first.address != joined.address
    halves = np.split(joined.data, [len(first.data)])
    apart = [replace(first, data=halves[0]), replace(second, data=halves[1].copy())]
    inside = replace(second, data=joined.data[len(first.data) :])
    assert apart[0].joined([inside]).address == joined.address  # no copy
    assert apart[0].joined([apart[1]]).address != joined.address
    assert second.joined([first]) is None  # its last panel is incomplete
    assert first.joined([pack_floats(floats("float16"))]) is None


def bits(form: str) -> int:
    """Return a checksum of some products."""
    return zlib.crc32(product(activations(9), weights(form)).numpy().tobytes())


BITS = """
import sys
sys.path.insert(0, sys.argv[1])
import test_panels
from logprobe.kernels.native import library
print(library().variant, *map(test_panels.bits, sorted(test_panels.FORMS)))
"""


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_the_same_bits(variant: str) -> None:
    path = Library.path_of(variant)
    if not path.exists():
        pytest.skip(f"{path.name} is not built on this system")
    if not Library(variant).can_run():
        pytest.skip(f"this processor cannot run {variant}")
    command = [sys.executable, "-c", BITS, str(Path(__file__).parent)]
    environment = os.environ | {VARIABLE: variant}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [variant, *(str(bits(form)) for form in sorted(FORMS))]
