import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from gguf_blocks import FORMS, random_blocks
from logprobe.models.gguf.blocks import panels_of_blocks


@pytest.mark.parametrize("type_name", sorted(FORMS))
@pytest.mark.parametrize("num_rows", [1, 48, 1000])
def test_panels_hold_the_numbers_of_the_formats_own_dequantisation(type_name: str, num_rows: int) -> None:
    raw = random_blocks(type_name, num_rows, 512)
    panels = panels_of_blocks(raw, type_name)
    assert panels is not None
    want = dequantize(raw, GGMLQuantizationType[type_name]).astype(np.float32)
    assert np.array_equal(panels.rows(np.arange(num_rows)), want)
    assert (panels.num_outputs, panels.num_inputs) == want.shape


@pytest.mark.parametrize("type_name", sorted(FORMS))
def test_outputs_are_the_rows_that_an_order_names(type_name: str) -> None:
    raw, order = random_blocks(type_name, 1000, 512), np.random.default_rng(1).permutation(1000)
    got, want = panels_of_blocks(raw, type_name, order), panels_of_blocks(raw[order], type_name)
    assert got is not None
    assert want is not None
    assert np.array_equal(got.data, want.data)


def test_a_type_without_a_form_is_refused() -> None:
    assert panels_of_blocks(np.zeros((4, 24), np.uint8), "Q5_1") is None


def test_scales_that_leave_half_precision_are_refused() -> None:
    raw = random_blocks("Q4_0", 2, 64)
    raw.reshape(2, 2, 18)[0, 0, :2] = np.array([60000], np.float16).view(np.uint8)
    assert panels_of_blocks(raw, "Q4_0") is None
