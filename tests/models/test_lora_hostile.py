"""LoRA folders that would not end, or break what reads them, are refused by name."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.errors import UnsupportedModelError
from logprobe.models import lora as module
from logprobe.models.lora import load_lora

if TYPE_CHECKING:
    from pathlib import Path

ENDLESS = "(.*.*)*(.*.*)*(.*.*)*(.*.*)*x"


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> Any:
    """What the folders were made for."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_folder)


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
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_pattern_that_never_ends_is_refused(
    folder: Path, changes: dict[str, Any], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATTERN_LIMIT_S", 1)
    spoil(folder, **changes)
    start = time.monotonic()
    with pytest.raises(UnsupportedModelError, match="patterns take longer"):
        load_lora("x", folder, model)
    assert time.monotonic() - start < 10


def test_a_pattern_that_ends_still_chooses_modules(folder: Path, model: Any) -> None:
    spoil(folder, target_modules=r"model\.layers\.\d+\.(self_attn|mlp)\.(?!nothing).*_proj")
    assert load_lora("x", folder, model).parts


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
def test_a_broken_header_is_refused(folder: Path, data: bytes, model: Any) -> None:
    (folder / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(UnsupportedModelError):
        load_lora("x", folder, model)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": "("},
        {"target_modules": 3},
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
    folder: Path, changes: dict[str, Any], model: Any
) -> None:
    spoil(folder, **changes)
    with contextlib.suppress(UnsupportedModelError):
        load_lora("x", folder, model)
