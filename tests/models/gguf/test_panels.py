from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.torch import load_file

from logprobe.kernels.layers.widen import LAYOUT
from logprobe.models.gguf.config import build_config
from logprobe.models.gguf.file import GgufFile
from logprobe.models.gguf.panels import write_panels
from logprobe.models.gguf.weights import write_weights
from logprobe.models.stored.panels import INDEX, PANELS, read_panels

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logprobe.models import ModelFiles


def assert_same_weights(folder: Path) -> set[str]:
    """Panels widen to the bits of the float32 file; the forms that they are kept in."""
    stored, panels = load_file(folder / "model.safetensors"), read_panels(folder)
    matrices = {name.removesuffix(".weight") for name, tensor in stored.items() if tensor.ndim == 2}
    assert panels.keys() == matrices
    for name, weights in panels.items():
        want = stored[f"{name}.weight"].numpy()
        sample = np.unique(np.linspace(0, len(want) - 1, 300).astype(np.int64))
        np.testing.assert_array_equal(weights.rows(sample), want[sample])
    return {weights.form.name for weights in panels.values()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3"])
def test_panels_hold_the_weights_of_the_float32_file(
    architecture: str, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    gguf = GgufFile(write_gguf(tmp_path / "tiny.gguf", architecture))
    config = build_config(gguf)
    write_weights(gguf, config, tmp_path / "model.safetensors")
    write_panels(gguf, config, tmp_path)
    assert assert_same_weights(tmp_path)


def test_panels_of_another_layout_are_not_read(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    gguf = GgufFile(write_gguf(tmp_path / "tiny.gguf"))
    write_panels(gguf, build_config(gguf), tmp_path)
    index: dict[str, Any] = json.loads((tmp_path / INDEX).read_text())
    assert index["layout"] == LAYOUT
    (tmp_path / INDEX).write_text(json.dumps(index | {"layout": LAYOUT + 1}))
    assert read_panels(tmp_path) == {}


def test_a_folder_without_panels_has_none(tmp_path: Path) -> None:
    assert read_panels(tmp_path) == {}


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("real_files", "forms"),
    [("smollm2", {"nibbles", "octets"}), ("gemma3-270m", {"nibbles_wide", "octets", "octets_wide"})],
    indirect=["real_files"],
)
def test_real_files_keep_their_blocks(real_files: ModelFiles, forms: set[str]) -> None:
    assert assert_same_weights(real_files.folder) == forms
    assert (real_files.folder / PANELS).stat().st_size < 0.3 * (
        real_files.folder / "model.safetensors"
    ).stat().st_size


@pytest.mark.real_model
@pytest.mark.parametrize("real_files", ["smollm2"], indirect=True)
def test_queries_keys_and_values_of_a_layer_are_read_as_one(real_files: ModelFiles) -> None:
    panels = read_panels(real_files.folder)
    query, key, value = (panels[f"model.layers.3.self_attn.{name}_proj"] for name in "qkv")
    joined = query.joined([key, value])
    assert joined is not None
    assert joined.data.data_ptr() == query.data.data_ptr()
    assert joined.num_outputs == query.num_outputs + key.num_outputs + value.num_outputs
