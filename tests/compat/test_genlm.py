"""genlm-backend's names of methods: which adapter `set_lora` accepts, and what the other names do."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

from logprobe.compat.genlm import AsyncLM
from logprobe.errors import EngineClosedError, ModelNotFoundError, ParameterError
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logprobe import LLM


@pytest.fixture
def lm(tiny_llm: LLM, adapter_folders: dict[str, Path]) -> Iterator[AsyncLM]:
    with AsyncLM(tiny_llm) as made:
        made.add_new_lora(adapter_folders["wide"], "wide")
        yield made
        made.remove_lora("wide")


def test_an_adapter_is_accepted_by_its_path_or_its_hugging_face_id(
    lm: AsyncLM, adapter_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter_folders["wide"]
    link = tmp_path / "link"
    link.symlink_to(folder)
    for path in (link, folder / ".." / folder.name):
        lm.set_lora(path, "wide")
        lm.set_lora(lora_path=str(path), lora_name="wide")
    repository = tmp_path / "models--me--legal"
    shutil.copytree(folder, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    lm.add_new_lora(lora_path="me/legal", lora_name="far")
    lm.set_lora("me/legal", "far")
    lm.remove_lora("far")
    with pytest.raises(ModelNotFoundError, match="Hugging Face id"):
        lm.add_new_lora("me/absent", "far")


def test_an_adapter_loaded_from_elsewhere_is_rejected(lm: AsyncLM) -> None:
    with raises(ParameterError, parameter="lora_path"):
        lm.set_lora("elsewhere", "wide")
    with raises(ParameterError, parameter="lora"):
        lm.set_lora(lora_name="nobody")


def test_the_other_names_do_what_ours_do(tiny_llm: LLM) -> None:
    lm = AsyncLM(tiny_llm)
    np.testing.assert_array_equal(lm.next_token_logprobs_uncached([5]), lm.next_token_logprobs_sync([5]))
    lm.cleanup()
    with pytest.raises(EngineClosedError):
        lm.next_token_logprobs_sync([5])
