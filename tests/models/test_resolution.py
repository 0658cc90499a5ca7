from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from logprobe import LLM
from logprobe.errors import InputError, ModelNotFoundError, UnsupportedModelError
from logprobe.models import KNOWN_MODELS, ModelFiles, quantization, resolve, weight_version
from logprobe.models.cache import MANIFEST, checksum_of, entry_size_bytes
from logprobe.models.lora import lora_version

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def test_a_local_folder_is_itself(folder: Path) -> None:
    assert resolve(str(folder)).folder == folder


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_without_one_of_its_files_says_which(missing: str, folder: Path) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelNotFoundError, match=missing.removeprefix("model")):
        resolve(str(folder))


def test_pickled_weights_are_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin is a pickle"):
        resolve(str(folder))


def test_a_missing_shard_is_named(folder: Path) -> None:
    shards = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelNotFoundError, match=r"1 of 2 weight files .*model-2\.safetensors"):
        resolve(str(folder))


def test_a_near_name_is_proposed() -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"did you mean 'smollm2'\? known names are smollm2, gemma3-270m"
    ):
        resolve("smolm2")


@pytest.mark.parametrize("name", ["", "qwerty", "./no/such/folder", "~/nowhere-at-all", "a/b/c"])
def test_an_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="known names are smollm2, gemma3-270m"):
        resolve(name)


def test_a_known_model_that_is_not_here_is_not_fetched_unasked(home: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="logprobe models pull smollm2"):
        resolve("smollm2", download=False)
    assert not home.exists()


def entry_of(path: Path) -> Path:
    return resolve(str(path), download=False).folder


def test_a_gguf_file_is_read_once_and_stays_where_it_is(
    tmp_path: Path, home: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    found = resolve(str(path))
    assert found.version == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert found.folder.parent == home / "models"
    assert (found.folder / "model.gguf").readlink() == path
    assert entry_size_bytes(found.folder) < path.stat().st_size / 4
    stamp = (found.folder / "config.json").stat().st_mtime_ns
    assert entry_of(path) == found.folder
    assert (found.folder / "config.json").stat().st_mtime_ns == stamp


def test_a_file_that_was_moved_is_found_where_it_is_named(
    tmp_path: Path, home: Path, write_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    folder = entry_of(path)
    assert home.is_dir()
    moved = path.rename(tmp_path / "moved.gguf")
    with pytest.raises(ModelNotFoundError, match=r"tiny\.gguf: no longer exists; give the current path"):
        resolve(str(folder))
    monkeypatch.chdir(tmp_path)
    assert entry_of(Path(moved.name)) == folder
    assert (folder / "model.gguf").readlink() == moved
    assert resolve(str(folder)).folder == folder


def test_a_file_at_two_places_has_one_entry_which_points_at_the_last(
    tmp_path: Path, home: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    assert home / "models" == entry_of(path).parent
    for named in (copy, path):
        assert (entry_of(named) / "model.gguf").readlink() == named


def test_an_entry_is_not_read_from_a_file_that_took_the_place_of_its_own(
    tmp_path: Path, home: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    folder = entry_of(path)
    assert home.is_dir()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelNotFoundError, match=r"tiny\.gguf: has changed since it was converted"):
        resolve(str(folder))
    assert entry_of(path) != folder


@pytest.mark.parametrize("manifest", ["", "[1]", "{}", "[" * 100_000])
def test_an_entry_whose_manifest_is_damaged_says_so(
    manifest: str, tmp_path: Path, home: Path, write_gguf: Callable[..., Path]
) -> None:
    folder = entry_of(write_gguf(tmp_path / "tiny.gguf"))
    assert home.is_dir()
    (folder / "logprobe.json").write_text(manifest)
    with pytest.raises(ModelNotFoundError, match=r"logprobe\.json cannot be read; remove the folder"):
        resolve(str(folder))


def test_a_checksum_is_computed_once_as_long_as_the_file_is_the_same(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"one")
    monkeypatch.setattr("logprobe.models.cache.FRESH_NS", 0)
    first = checksum_of(path)
    assert first == hashlib.sha256(b"one").hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr("logprobe.models.cache.hashlib.file_digest", None)
        assert checksum_of(path) == first
    path.write_bytes(b"two")
    assert checksum_of(path) == hashlib.sha256(b"two").hexdigest()
    (home / "checksums.json").write_text("[{]")
    assert checksum_of(path) == hashlib.sha256(b"two").hexdigest()


def test_the_checksum_of_a_file_that_was_just_written_is_not_kept(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"one")
    checksum_of(path)
    assert not (home / "checksums.json").exists()


def test_the_version_of_a_folders_weights_is_what_sha256sum_says(folder: Path) -> None:
    def own(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    assert weight_version(resolve(str(folder))) == f"sha256:{own(b'{}')}"
    (folder / "model.safetensors").unlink()
    for name, data in (("b.safetensors", b"two"), ("a.safetensors", b"one")):
        (folder / name).write_bytes(data)
    lines = f"{own(b'one')}  a.safetensors\n{own(b'two')}  b.safetensors\n"
    assert weight_version(resolve(str(folder))) == f"sha256:{own(lines.encode())}"
    (folder / "b.safetensors").write_bytes(b"owt")
    assert weight_version(resolve(str(folder))) != f"sha256:{own(lines.encode())}"
    assert weight_version(ModelFiles("x", folder, "commit:7")) == "commit:7"


def test_the_quantization_of_a_known_model_is_that_of_its_title(tmp_path: Path) -> None:
    found = {name: quantization(ModelFiles(name, tmp_path)) for name in KNOWN_MODELS}
    assert found == {"smollm2": "Q4_1", "gemma3-270m": "Q4_K_M"}
    assert all(known.title.endswith(f", {found[name]}") for name, known in KNOWN_MODELS.items())


def test_a_folder_of_safetensors_has_no_quantization(folder: Path) -> None:
    assert quantization(resolve(str(folder))) is None


@pytest.mark.usefixtures("home")
def test_the_quantization_of_a_gguf_file_is_what_it_says(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", more=lambda writer: writer.add_file_type(15))
    files = resolve(str(path))
    assert quantization(files) == "Q4_K_M"
    manifest = json.loads((files.folder / MANIFEST).read_text())
    del manifest["quantization"]  # as an earlier version wrote it
    (files.folder / MANIFEST).write_text(json.dumps(manifest))
    assert quantization(files) == "Q4_K_M"


@pytest.mark.usefixtures("home")
def test_records_name_the_quantization_of_their_checkpoint(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", more=lambda writer: writer.add_file_type(3))
    with LLM(str(path), kv_cache_memory_bytes=1 << 22, max_num_batched_tokens=64) as llm:
        (score,) = llm.score([([5, 6], [7])])
        able = llm.engine.capabilities()
    assert (score.record.info.quantization, able.quantization) == ("Q4_1", "Q4_1")
    assert able.of_weights(able.layout, "new").quantization is None


def test_the_version_of_lora_weights_is_what_sha256sum_says_of_their_files(tmp_path: Path) -> None:
    """Whatever else lies there: peft saves further adapters in folders of their names."""
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"one"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "adapter_2").mkdir()
    lines = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
    assert lora_version(tmp_path) == f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"
    (tmp_path / "adapter_model.safetensors").write_bytes(b"two")
    assert lora_version(tmp_path) != f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def test_a_broken_gguf_file_leaves_nothing(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(InputError, match=r"broken\.gguf: is not a valid GGUF file"):
        resolve(str(path))
    assert not list((home / "models").glob("[!.]*"))


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.onnx"
    path.write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"is not a \.gguf file"):
        resolve(str(path))
