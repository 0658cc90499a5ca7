from __future__ import annotations

import io
import json
import re
import shutil
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from logprobe import LLM
from logprobe.cli.app import run
from logprobe.models import KNOWN_MODELS
from logprobe.models.resolution import known_folder

if TYPE_CHECKING:
    from pathlib import Path


def models(arguments: list[str], input: str = "") -> SimpleNamespace:  # noqa: A002
    """Run `logprobe models` with text as standard input."""
    with pytest.MonkeyPatch.context() as patch:
        out, err = io.StringIO(), io.StringIO()
        for name, stream in (("stdin", io.StringIO(input)), ("stdout", out), ("stderr", err)):
            patch.setattr(sys, name, stream)
        code = run(["models", *arguments])
    return SimpleNamespace(exit_code=code, stdout=out.getvalue(), stderr=err.getvalue())


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
    done = models(["list", "--json"])
    rows = json.loads(done.stdout)
    assert done.exit_code == 0
    assert [row["name"] for row in rows] == ["smollm2", "gemma3-270m"]
    assert all(row["folder"] is None and row["size_bytes"] is None for row in rows)
    assert not home.exists()


def test_list_shows_what_was_converted(home: Path) -> None:
    folder = home / "models" / "gguf-0123456789abcdef-c3"
    folder.mkdir(parents=True)
    manifest = json.dumps({"name": "own", "source": "own.gguf", "source_sha256": "0123"})
    (folder / "logprobe.json").write_text(manifest)
    own = json.loads(models(["list", "--json"]).stdout)[-1]
    assert (own["name"], own["folder"], own["size_bytes"]) == ("own", str(folder), len(manifest))
    table = models(["list"]).stdout.splitlines()
    assert table[0].split()[0] == "smollm2"
    assert table[0].endswith("not fetched")
    assert table[-1].endswith(str(folder))


@pytest.mark.parametrize("verb", ["pull", "path"])
def test_a_models_folder_is_the_only_output(verb: str, model_folder: Path) -> None:
    done = models([verb, str(model_folder)])
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{model_folder}\n", "")


def test_pull_prepares_a_model_where_it_is_asked_to(tiny_model_folder: Path, home: Path) -> None:
    done = models(["pull", "--prepare", str(tiny_model_folder)])
    assert (done.exit_code, done.stdout) == (0, f"{tiny_model_folder}\n")
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 20) as llm:
        forward: Any = llm.engine.core.engine.forward  # type: ignore[attr-defined]
        assert forward.is_recalled
    assert sorted(folder.name for folder in home.iterdir() if folder.is_dir()) == ["loads", "panels"]


@pytest.mark.parametrize("verb", ["pull", "path"])
def test_an_unknown_name_is_one_line_and_exit_code_1(verb: str) -> None:
    done = models([verb, "smolm2"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no model 'smolm2': did you mean 'smollm2'?")
    assert done.stderr.count("\n") == 1


def test_path_fetches_nothing(home: Path) -> None:
    done = models(["path", "smollm2"])
    assert done.exit_code == 1
    assert "logprobe models pull smollm2" in done.stderr
    assert not home.exists()


def test_wrong_use_is_exit_code_2() -> None:
    assert models(["list", "--jsn"]).exit_code == 2
    assert models(["path", "a", "b"]).exit_code == 2


@pytest.fixture
def converted(home: Path) -> Path:
    """A cache entry as left by a conversion."""
    folder = home / "models" / "gguf-0123456789abcdef-c3"
    folder.mkdir(parents=True)
    manifest = {"name": "own", "source": "own.gguf", "source_sha256": "0123"}
    config = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 99}
    for name, content in {"logprobe.json": manifest, "config.json": config, "tokenizer.json": {}}.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "model.gguf").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize("by_name", [True, False])
def test_rm_removes_one_model_whole(converted: Path, by_name: bool) -> None:
    other = converted.with_name("gguf-fedcba9876543210-c3")
    shutil.copytree(converted, other)
    (other / "logprobe.json").write_text(json.dumps({"name": "else", "source": "", "source_sha256": "1"}))
    done = models(["rm", "own" if by_name else str(converted), "--yes"])
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{converted}\n", "")
    assert not converted.exists()
    assert [path.name for path in other.parent.glob("[!.]*")] == [other.name]
    assert not list(other.parent.glob("*.partial"))


def test_rm_asks_first(converted: Path) -> None:
    done = models(["rm", "own"], input="n\n")
    assert done.exit_code == 1
    assert f"remove {converted}" in done.stderr
    assert converted.is_dir()
    assert models(["rm", "own"], input="y\n").exit_code == 0
    assert not converted.exists()


def test_rm_touches_nothing_that_is_not_the_caches(converted: Path, model_folder: Path) -> None:
    for name in (str(model_folder), "smollm2", "nothing"):
        done = models(["rm", name, "--yes"])
        assert done.exit_code == 1
        assert done.stderr.startswith(f"error: {name!r} is not in the cache, which has own")
        assert done.stderr.count("\n") == 1
    assert model_folder.is_dir()
    assert converted.is_dir()


def test_show_tells_what_a_model_is_and_loads_nothing(converted: Path) -> None:
    found = json.loads(models(["show", str(converted), "--json"]).stdout)
    assert (found["family"], found["layers"], found["vocabulary"]) == ("llama", 2, 99)
    assert (found["source"], found["folder"]) == ("own.gguf", str(converted))
    table = models(["show", str(converted)]).stdout
    assert [line.split("  ")[0] for line in table.splitlines()] == list(found)


def test_export_is_one_line_where_it_cannot_be(model_folder: Path, tmp_path: Path) -> None:
    done = models(["export", str(model_folder), str(tmp_path / "out")])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: {model_folder}: is stored as safetensors already, in {model_folder}; use that folder\n"
    )
    assert not (tmp_path / "out").exists()
    done = models(["export", str(model_folder), str(tmp_path / "out"), "--dtype", "int8"])
    assert done.exit_code == 2


def test_show_fetches_nothing(home: Path) -> None:
    done = models(["show", "smollm2"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "logprobe models pull smollm2" in done.stderr
    assert not home.exists()


KEYS = f"{'0' * 16}-{'a' * 16}"  # of a source, and of code and machine


def leave(home: Path, stem: str, *, kind: str = "loads", num_bytes: int = 1_500_000) -> Path:
    """Make the files that loading a model leaves in the cache."""
    folder = home / kind / f"{stem}-{KEYS}"
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(bytes(num_bytes))
    return folder


def listed(name: str) -> dict[str, Any]:
    rows = json.loads(models(["list", "--json"]).stdout)
    [row] = [row for row in rows if row["name"] == name]
    return dict(row)


def sizes(row: dict[str, Any]) -> list[int | None]:
    return [row[f"{what}_bytes"] for what in ("files", "panels", "records", "size")]


def test_list_tells_what_files_panels_and_records_take(home: Path, converted: Path) -> None:
    before = listed("own")["files_bytes"]
    for kind in ("panels", "loads"):
        leave(home, converted.name, kind=kind)
        leave(home, "tiny", kind=kind)
    assert sizes(listed("own")) == [before, 1_500_000, 1_500_000, before + 3_000_000]
    assert sizes(listed("tiny")) == [None, 1_500_000, 1_500_000, 3_000_000]
    assert listed("tiny")["folder"] is None
    table = models(["list"]).stdout.splitlines()
    assert f"files 0 kB, panels 2 MB, records 2 MB  {converted}" in table[2]
    assert re.split(" {2,}", table[3].strip()) == ["tiny", "left by tiny", "panels 2 MB, records 2 MB"]


def test_a_model_that_was_not_fetched_whole_is_told_with_what_it_left(home: Path) -> None:
    name = known_folder(KNOWN_MODELS["smollm2"]).name
    (home / "models" / f".{name}.partial").mkdir(parents=True)
    (home / "models" / f".{name}.partial" / "part").write_bytes(bytes(3000))
    record = leave(home, name)
    assert sizes(listed("smollm2")) == [3000, 0, 1_500_000, 1_503_000]
    assert "not fetched, files 3 kB, records 2 MB" in models(["list"]).stdout
    done = models(["rm", "smollm2", "--yes"])
    assert (done.exit_code, done.stdout) == (0, f"{home / 'models' / name}\n{record}\n")
    assert sizes(listed("smollm2")) == [None] * 4


def test_rm_takes_panels_and_records_along_and_tells_as_json(home: Path, converted: Path) -> None:
    own = [leave(home, converted.name, kind=kind, num_bytes=10) for kind in ("panels", "loads")]
    other = leave(home, "tiny")
    asked = models(["rm", "own"], input="n\n")
    assert f"remove {converted} and 2 more (0 kB)?" in asked.stderr
    size_bytes = listed("own")["size_bytes"]
    done = models(["rm", "own", "--yes", "--json"])
    removed = [str(folder) for folder in (converted, *own)]
    assert json.loads(done.stdout) == {"removed": removed, "size_bytes": size_bytes}
    assert not [folder for folder in (converted, *own) if folder.exists()]
    assert other.is_dir()


def test_what_a_folder_that_is_gone_left_is_shown_and_removed_by_its_name(home: Path) -> None:
    left = [leave(home, "tiny", kind=kind) for kind in ("panels", "loads")]
    shown = json.loads(models(["show", "tiny", "--json"]).stdout)
    assert shown == {"model": "tiny", "title": "left by tiny", "panels": "2 MB", "records": "2 MB"}
    done = models(["rm", "tiny", "--yes"])
    assert done.stdout.splitlines() == [str(folder) for folder in left]
    assert "tiny" not in models(["list"]).stdout


def test_a_folder_named_like_a_known_model_is_told_apart(home: Path) -> None:
    left = leave(home, "smollm2")
    assert sizes(listed("smollm2")) == [None] * 4
    assert sizes(listed("./smollm2")) == [None, 0, 1_500_000, 1_500_000]
    assert models(["rm", "smollm2", "--yes"]).exit_code == 1
    assert models(["rm", "./smollm2", "--yes"]).stdout == f"{left}\n"


def test_a_folder_that_was_loaded_is_shown_with_what_that_left_and_keeps_its_files(
    home: Path, tiny_model_folder: Path
) -> None:
    name = str(tiny_model_folder)
    files = {file: file.read_bytes() for file in tiny_model_folder.iterdir()}
    with LLM(name, weights="checkpoint", kv_cache_memory_bytes=1 << 20) as llm:
        assert llm.engine.capabilities().weights == "checkpoint"
    left = [folder for kind in ("panels", "loads") for folder in sorted((home / kind).glob("[!.]*"))]
    assert len(left) == 2
    shown = json.loads(models(["show", name, "--json"]).stdout)
    assert shown["folder"] == name
    assert {"files", "panels", "records"} <= shown.keys()
    row = listed(tiny_model_folder.name[:40])
    assert row["panels_bytes"] > 0
    assert row["records_bytes"] > 0
    done = models(["rm", name, "--yes"])
    assert (done.exit_code, done.stdout.splitlines()) == (0, [*map(str, left)])
    assert {file: file.read_bytes() for file in tiny_model_folder.iterdir()} == files
    assert not any(folder.exists() for folder in left)
