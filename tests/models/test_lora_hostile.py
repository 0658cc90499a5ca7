"""LoRA folders that would not end, or break what reads them, are refused by name."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import fuzz
from logprobe.errors import UnsupportedModelError
from logprobe.models import lora as module
from logprobe.models.lazy import modules_of
from logprobe.models.lora import ModelModules, load_lora

if TYPE_CHECKING:
    from pathlib import Path

ENDLESS = "(?:(?:.|[a-z])*)*[A-Z]"


@pytest.fixture(scope="module")
def modules(tiny_model_folder: Path) -> ModelModules:
    """Of the model that the folders were made for."""
    from transformers import AutoConfig

    return modules_of(AutoConfig.from_pretrained(tiny_model_folder))


@pytest.fixture
def folder(adapter_folders: dict[str, Path], tmp_path: Path) -> Path:
    """A good one, to be spoilt."""
    return shutil.copytree(adapter_folders["wide"], tmp_path / "lora")


def spoil(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ENDLESS},
        {"exclude_modules": ENDLESS},
        {"rank_pattern": {ENDLESS: 4}},
        {"alpha_pattern": {ENDLESS: 4}},
        {"layers_pattern": ENDLESS, "layers_to_transform": [0]},
        {"layers_pattern": ["nothing", ENDLESS], "layers_to_transform": [0]},
        {"modules_to_save": [ENDLESS]},
        {"rank_pattern": {f"nothing.{number}": 4 for number in range(100_000)}},
        {"alpha_pattern": {f"nothing.{number}": 4 for number in range(100_000)}},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_patterns_that_never_end_are_refused(
    folder: Path, changes: dict[str, Any], modules: ModelModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATTERN_LIMIT_S", 0.5)
    spoil(folder, **changes)
    start = time.monotonic()
    with pytest.raises(UnsupportedModelError, match="patterns take longer"):
        load_lora("x", folder, modules)
    assert time.monotonic() - start < 60


def test_many_patterns_are_read_within_the_limit(folder: Path, modules: ModelModules) -> None:
    """One pattern per module, as tools write that choose each module's rank, of a model with 700 modules."""
    spoil(folder, rank_pattern={f"layers.{number}.x": 4 for number in range(700)})
    assert load_lora("x", folder, modules).parts


def test_a_pattern_that_ends_still_chooses_modules(folder: Path, modules: ModelModules) -> None:
    spoil(folder, target_modules=r"model\.layers\.\d+\.(self_attn|mlp)\.(?!nothing).*_proj")
    assert load_lora("x", folder, modules).parts


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 100,
        (2**62).to_bytes(8, "little") + b"{}",
        b"\x02\0\0\0\0\0\0\0{}",
        b'\x4f\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]}}       ',
    ],
    ids=range(6),
)
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_a_broken_header_is_refused(folder: Path, data: bytes, modules: ModelModules) -> None:
    (folder / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(UnsupportedModelError):
        load_lora("x", folder, modules)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "("},
        {"target_modules": 3},
        {"layers_pattern": "(layers)", "layers_to_transform": [0]},
        {"r": -1},
        {"r": 10**9},
        {"r": "x"},
        {"rank_pattern": [1]},
        {"lora_alpha": None},
        {"base_model_name_or_path": "\x00"},
        {"task_type": "NOTHING"},
    ],
    ids=str,
)
def test_a_broken_configuration_is_refused_or_unread(
    folder: Path, changes: dict[str, Any], modules: ModelModules
) -> None:
    spoil(folder, **changes)
    with contextlib.suppress(UnsupportedModelError):
        load_lora("x", folder, modules)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["peft_type", "r", "lora_alpha", "target_modules", "rank_pattern", "layers_to_transform", "bias"]
FIELDS += ["task_type", "use_rslora", "fan_in_fan_out", "modules_to_save", "init_lora_weights", "revision"]


@pytest.mark.fuzz
@fuzz(0.3)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2),
    alterations=st.lists(st.tuples(st.integers(0, 4000), st.binary(min_size=1, max_size=9)), max_size=3),
)
@pytest.mark.filterwarnings("ignore")  # peft warns of much that it then refuses
def test_an_altered_folder_is_read_or_refused(
    adapter_folders: dict[str, Path], tmp_path: Path, modules: ModelModules, changes: Any, alterations: Any
) -> None:
    folder = shutil.copytree(adapter_folders["narrow"], tmp_path / "altered", dirs_exist_ok=True)
    spoil(folder, **changes)
    weights = folder / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    for place, value in alterations:
        data[place % 900 : place % 900 + len(value)] = value
    weights.write_bytes(data)
    with contextlib.suppress(UnsupportedModelError):
        load_lora("x", folder, modules)
