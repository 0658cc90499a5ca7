"""A model of the native decoder is loaded, verified and run where torch and transformers are missing."""

from __future__ import annotations

import json
import subprocess
import sys
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PREAMBLE = """
import json
import sys

for name in ("torch", "transformers", "peft"):
    sys.modules[name] = None  # as if it were not installed

import numpy as np
from logprobe.config import EngineConfig
from logprobe.engine.forward.native import NativeForward
from logprobe.errors import LogprobeError
from logprobe.models import resolve

def load(path, state=None):
    config = EngineConfig(model=path, device="cpu", kv_cache_memory_bytes=1 << 21)
    return NativeForward(config, resolve(path), state)

def verified(forward):
    layout = forward.layout
    return [layout.verified_against, layout.arithmetic, layout.probe_difference < 1e-3, forward.is_recalled]
"""


def run(code: str, *arguments: Path) -> Any:
    """Run code without torch and transformers, and return the JSON that it prints."""
    command = [sys.executable, "-c", PREAMBLE + dedent(code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache for this test only."""
    monkeypatch.setenv("LOGPROBE_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_safetensors_are_loaded_verified_and_recalled(
    dtype: str, tiny_model_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=getattr(torch, dtype)).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(tiny_model_folder).save_pretrained(folder)
    printed = run("print(json.dumps([verified(load(sys.argv[1])) for _ in range(2)]))", folder)
    assert printed == [["reference", "fma", True, is_recalled] for is_recalled in (False, True)]


def test_a_gguf_file_is_loaded_and_exported(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    code = """
    from pathlib import Path
    from logprobe.models.export import export_model

    forward = load(sys.argv[1])
    folder = Path(sys.argv[2])
    export_model(resolve(sys.argv[1]), folder, dtype="bfloat16")
    print(json.dumps([verified(forward), verified(load(str(folder)))]))
    """
    printed = run(code, write_gguf(tmp_path / "tiny.gguf"), tmp_path / "out")
    assert printed == [["reference", "fma", True, False]] * 2


def test_weights_are_replaced_by_arrays_and_by_files(tiny_model_folder: Path, tmp_path: Path) -> None:
    code = """
    from logprobe.models.loading import as_state, copied, digest_of, read_state, save_state

    state = read_state(sys.argv[1])
    given = {f"module.{name}": weight / 2 for name, weight in state.items()}
    arrays = copied(as_state(given))
    save_state(arrays, sys.argv[2])
    files = read_state(sys.argv[2])
    assert digest_of(as_state(given)) == digest_of(files) != digest_of(state)
    print(json.dumps([verified(load(sys.argv[1], one)) for one in (arrays, files)]))
    """
    assert run(code, tiny_model_folder, tmp_path) == [["reference", "fma", True, False]] * 2


def test_lora_weights_are_loaded(tiny_model_folder: Path, adapter_folders: dict[str, Path]) -> None:
    code = """
    forward = load(sys.argv[1])
    lora = forward.load_lora("own", sys.argv[2], 1)
    forward.make_room(lora)
    hidden = np.ones((2, forward.decoder.hidden_size), np.float32)
    print(json.dumps([len(lora.parts) > 0, np.isfinite(forward.decoder.head(hidden, lora)).all().item()]))
    """
    assert run(code, tiny_model_folder, adapter_folders["wide"]) == [True, True]


def test_a_model_that_needs_transformers_names_the_command(tiny_model_folder: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model_folder / "config.json").read_text())
    for file in tiny_model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "bloom"}))
    code = """
    try:
        load(sys.argv[1])
    except LogprobeError as error:
        print(json.dumps([type(error).__name__, str(error)]))
    """
    kind, message = run(code, tmp_path)
    assert kind == "UnsupportedModelError"
    assert message.endswith("pip install 'logprobe[torch]'")


def test_the_transformers_model_and_tokenizer_name_the_command(tiny_model_folder: Path) -> None:
    code = """
    from logprobe.models import load_tokenizer

    found = []
    forward = load(sys.argv[1])
    for act in (forward.transformers_model, lambda: load_tokenizer(resolve(sys.argv[1]))):
        try:
            act()
        except LogprobeError as error:
            found.append([type(error).__name__, str(error)])
    print(json.dumps(found))
    """
    for kind, message in run(code, tiny_model_folder):
        assert kind == "MissingPackageError"
        assert message.endswith("pip install 'logprobe[torch]'")
