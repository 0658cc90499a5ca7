from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.kernels.layers.layout import LAYOUT
from logprobe.models.known import KNOWN_MODELS
from logprobe.models.loading import source_of
from logprobe.models.stored.panels import INDEX, read_panels, reading_order, write_panels

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models import ModelFiles


def panels_of(files: ModelFiles) -> dict[str, PanelWeights]:
    """Of every matrix, each of which has been held against the rows of the file."""
    source = source_of(files)
    assert source is not None
    made = {}
    for name, shape in source.shapes.items():
        if len(shape) == 2:
            panels = source.panels(name)
            assert panels is not None
            sample = np.unique(np.linspace(0, shape[0] - 1, 300).astype(np.int64))
            want = source.read(name)[sample]
            np.testing.assert_array_equal(panels.rows(sample), want)
            made[name.removesuffix(".weight")] = panels
    return made


@pytest.mark.real_model
@pytest.mark.parametrize("real_files", ["smollm2", "gemma3-270m"], indirect=True)
def test_real_files_keep_their_blocks(real_files: ModelFiles) -> None:
    panels = panels_of(real_files)
    forms = set(KNOWN_MODELS[real_files.name].forms)
    gguf = real_files.folder / "model.gguf"
    assert {one.form.name for one in panels.values()} == forms
    assert sum(one.num_bytes for one in panels.values()) < 1.2 * gguf.stat().st_size


@pytest.mark.real_model
@pytest.mark.parametrize("real_files", ["smollm2"], indirect=True)
def test_queries_keys_and_values_of_a_layer_are_read_as_one(real_files: ModelFiles, tmp_path: Path) -> None:
    made = panels_of(real_files)
    names = sorted(made, key=reading_order)
    write_panels([(name,) for name in names], lambda start: (made[name] for name in names[start:]), tmp_path)
    panels = read_panels(tmp_path)
    query, key, value = (panels[f"model.layers.3.self_attn.{name}_proj"] for name in "qkv")
    joined = query.joined([key, value])
    assert joined is not None
    assert joined.address == query.address
    assert joined.num_outputs == query.num_outputs + key.num_outputs + value.num_outputs


@pytest.mark.real_model
@pytest.mark.parametrize("real_files", ["smollm2"], indirect=True)
def test_panels_of_another_layout_are_not_read(real_files: ModelFiles, tmp_path: Path) -> None:
    source = source_of(real_files)
    assert source is not None
    panels = source.panels("model.layers.0.mlp.up_proj.weight")
    assert panels is not None
    write_panels([("up_proj",)], lambda _: [panels], tmp_path)
    index: dict[str, Any] = json.loads((tmp_path / INDEX).read_text())
    assert index["layout"] == LAYOUT
    (tmp_path / INDEX).write_text(json.dumps(index | {"layout": LAYOUT + 1}))
    assert read_panels(tmp_path) == {}


def test_a_folder_without_panels_has_none(tmp_path: Path) -> None:
    assert read_panels(tmp_path) == {}
