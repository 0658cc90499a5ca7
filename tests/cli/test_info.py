from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import logprobe
from logprobe.kernels import threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_info_names_versions_devices_and_the_cache(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("LOGPROBE_HOME", str(tmp_path))
    found = json.loads(cli("info", "--json").out)
    assert found["logprobe"] == logprobe.__version__
    # torch's own version may have a more specific build suffix than its package.
    assert torch.__version__.startswith(found["torch"])
    assert found["kernels"]["cpu"] == "native"
    assert found["native"].keys() == {"variant", "version", "compiler", "digest"}
    assert found["native"]["version"] == logprobe.__version__
    assert found["threads"] == threads.num_threads()
    assert found["devices"][0] == "cpu"
    assert found["cache"] == str(tmp_path)


def test_info_without_torch_names_no_gpus() -> None:
    code = "import json; from logprobe.cli.info import facts; print(json.dumps(facts()))"
    without = "import sys; sys.modules |= dict.fromkeys(('torch', 'transformers'))\n"
    done = subprocess.run([sys.executable, "-c", without + code], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["devices"] == ["cpu"]
    assert found["kernels"]["cpu"] == "native"


def test_the_table_has_one_line_a_fact(cli: Callable[..., Any]) -> None:
    facts = json.loads(cli("info", "--json").out)
    lines = cli("info").out.splitlines()
    assert [line.split()[0] for line in lines] == list(facts)


def test_info_of_a_model_tells_how_its_layers_run(cli: Callable[..., Any], tiny_model_folder: Path) -> None:
    found = json.loads(cli("info", str(tiny_model_folder), "--json").out)
    assert found["weights"] == "checkpoint"
    assert found["num_layers"] == 2
    assert "why_transformers" not in found
    assert 0 < found["probe_difference"] < 1e-4
    assert "rope_boundary" not in found
    assert "2 by the native decoder" in cli("info", str(tiny_model_folder)).out


@pytest.mark.real_model
def test_info_of_the_default_model_names_its_quantization(cli: Callable[..., Any]) -> None:
    found = json.loads(cli("info", "smollm2", "--json").out)
    assert (found["title"], found["quantization"]) == ("SmolLM2-135M-Instruct, Q4_1", "Q4_1")


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "mistral4", "own"])
@pytest.mark.parametrize("flags", [(), ("--weights", "plain")], ids=str)
def test_info_of_a_model_without_a_causal_language_model_is_one_line(
    cli: Callable[..., Any], tiny_model_folder: Path, tmp_path: Path, model_type: str, flags: tuple[str, ...]
) -> None:
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    done = cli("info", str(folder), *flags)
    assert done.code == 1
    assert model_type in done.error_line
