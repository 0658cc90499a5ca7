from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from logprobe.cli.models import app

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("LOGPROBE_HOME", str(folder))
    return folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def test_list_shows_every_known_model_as_json(home: Path) -> None:
    done = CliRunner().invoke(app, ["list", "--json"])
    rows = json.loads(done.stdout)
    assert done.exit_code == 0
    assert [row["name"] for row in rows] == ["smollm2", "gemma3-270m"]
    assert all(row["folder"] is None and row["size_bytes"] is None for row in rows)
    assert not home.exists()


def test_list_shows_what_was_converted(home: Path) -> None:
    folder = home / "models" / "gguf-0123456789abcdef-c2"
    folder.mkdir(parents=True)
    manifest = json.dumps({"name": "own", "source": "own.gguf", "source_sha256": "0123"})
    (folder / "logprobe.json").write_text(manifest)
    own = json.loads(CliRunner().invoke(app, ["list", "--json"]).stdout)[-1]
    assert (own["name"], own["folder"], own["size_bytes"]) == ("own", str(folder), len(manifest))
    table = CliRunner().invoke(app, ["list"]).stdout.splitlines()
    assert table[0].split()[0] == "smollm2"
    assert table[0].endswith("not fetched")
    assert table[-1].endswith(str(folder))


@pytest.mark.parametrize("verb", ["pull", "path"])
def test_a_models_folder_is_the_only_output(verb: str, model_folder: Path) -> None:
    done = CliRunner().invoke(app, [verb, str(model_folder)])
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{model_folder}\n", "")


@pytest.mark.parametrize("verb", ["pull", "path"])
def test_an_unknown_name_is_one_line_and_exit_code_1(verb: str) -> None:
    done = CliRunner().invoke(app, [verb, "smolm2"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no model 'smolm2': did you mean 'smollm2'?")
    assert done.stderr.count("\n") == 1


def test_path_fetches_nothing(home: Path) -> None:
    done = CliRunner().invoke(app, ["path", "smollm2"])
    assert done.exit_code == 1
    assert "logprobe models pull smollm2" in done.stderr
    assert not home.exists()


def test_wrong_use_is_exit_code_2() -> None:
    assert CliRunner().invoke(app, ["list", "--jsn"]).exit_code == 2
    assert CliRunner().invoke(app, ["path", "a", "b"]).exit_code == 2


@pytest.fixture
def converted(home: Path) -> Path:
    """An entry of the cache, as a conversion leaves it."""
    folder = home / "models" / "gguf-0123456789abcdef-c2"
    folder.mkdir(parents=True)
    manifest = {"name": "own", "source": "own.gguf", "source_sha256": "0123"}
    config = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 99}
    for name, content in {"logprobe.json": manifest, "config.json": config, "tokenizer.json": {}}.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize("by_name", [True, False])
def test_rm_removes_one_model_whole(converted: Path, by_name: bool) -> None:
    other = converted.with_name("gguf-fedcba9876543210-c2")
    shutil.copytree(converted, other)
    (other / "logprobe.json").write_text(json.dumps({"name": "else", "source": "", "source_sha256": "1"}))
    done = CliRunner().invoke(app, ["rm", "own" if by_name else str(converted), "--yes"])
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{converted}\n", "")
    assert not converted.exists()
    assert [path.name for path in other.parent.glob("[!.]*")] == [other.name]
    assert not list(other.parent.glob("*.partial"))


def test_rm_asks_first(converted: Path) -> None:
    done = CliRunner().invoke(app, ["rm", "own"], input="n\n")
    assert done.exit_code == 1
    assert f"remove {converted}" in done.stderr
    assert converted.is_dir()
    assert CliRunner().invoke(app, ["rm", "own"], input="y\n").exit_code == 0
    assert not converted.exists()


def test_rm_touches_nothing_that_is_not_the_caches(converted: Path, model_folder: Path) -> None:
    for name in (str(model_folder), "smollm2", "nothing"):
        done = CliRunner().invoke(app, ["rm", name, "--yes"])
        assert done.exit_code == 1
        assert done.stderr.startswith(f"error: no {name!r} in the cache; there is own")
        assert done.stderr.count("\n") == 1
    assert model_folder.is_dir()
    assert converted.is_dir()


def test_show_tells_what_a_model_is_and_loads_nothing(converted: Path) -> None:
    found = json.loads(CliRunner().invoke(app, ["show", str(converted), "--json"]).stdout)
    assert (found["family"], found["layers"], found["vocabulary"]) == ("llama", 2, 99)
    assert (found["source"], found["folder"]) == ("own.gguf", str(converted))
    table = CliRunner().invoke(app, ["show", str(converted)]).stdout
    assert [line.split("  ")[0] for line in table.splitlines()] == list(found)


def test_show_fetches_nothing(home: Path) -> None:
    done = CliRunner().invoke(app, ["show", "smollm2"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "logprobe models pull smollm2" in done.stderr
    assert not home.exists()
