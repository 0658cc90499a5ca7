from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from requests import Response

from logprobe.errors import DownloadError, ModelNotFoundError
from logprobe.models import resolve

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAME = "owner/model"


def failing(error: BaseException) -> Callable[..., str]:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise error

    return snapshot_download


def test_a_snapshot_asks_for_no_file_that_could_run_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    asked: dict[str, Any] = {}

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve(NAME).folder == tmp_path
    assert asked["repository"] == NAME
    assert not asked["local_files_only"]
    assert not [pattern for pattern in asked["allow_patterns"] if pattern.endswith((".py", ".bin", "*"))]
    assert resolve(NAME, download=False).version == f"commit:{tmp_path.name}"  # the snapshot's folder
    assert asked["local_files_only"]


def test_no_network_is_one_line_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    error = LocalEntryNotFoundError("cannot reach the hub\nand more lines")
    monkeypatch.setattr("huggingface_hub.snapshot_download", failing(error))
    with pytest.raises(
        DownloadError, match=r"owner/model: cannot download from the Hugging Face Hub .*HF_HUB_OFFLINE"
    ) as caught:
        resolve(NAME)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelNotFoundError, match="logprobe models pull owner/model"):
        resolve(NAME, download=False)


def test_offline_mode_is_honoured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match="owner/model: cannot download from the Hugging Face Hub"):
        resolve(NAME)


@pytest.mark.parametrize(
    ("kind", "ours", "words"),
    [
        (RepositoryNotFoundError, ModelNotFoundError, "nor a model on the Hugging Face Hub"),
        (GatedRepoError, DownloadError, "hf auth login"),
    ],
)
def test_a_refusal_of_the_hub_says_what_to_do(
    kind: Any, ours: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", failing(kind("no", response=Response())))
    with pytest.raises(ours, match=words):
        resolve(NAME)
