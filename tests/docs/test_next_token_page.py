"""The examples of docs/next-token.md run in order; those of genlm and vLLM only where they are installed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from doc_pages import PAGES, examples_of, run_examples
from logprobe import RemoteLLM, errors
from logprobe.next_token import AsyncLM
from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe import LLM

PAGE = PAGES["next-token.md"]
EXAMPLES = examples_of("next-token.md")


@pytest.fixture
def here(tmp_path: Path, adapter_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which contains LoRA weights."""
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "tuned").symlink_to(adapter_folders["narrow"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("here")
def test_the_examples_run_one_after_the_other(
    tiny_llm: LLM, tiny_model_folder: Path, new_serving: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = [example for example in EXAMPLES if not re.search("genlm|Virtual", example)]
    assert ours
    with new_serving(tiny_llm, ServerSettings()) as (url, _):
        run_examples("next-token.md", ours, model=tiny_model_folder, url=url)
    assert capsys.readouterr().out


@pytest.mark.vllm
def test_the_examples_on_vllm_run_one_after_the_other(wide_heads: tuple[Path, dict[str, Path]]) -> None:
    on_vllm = [example for example in EXAMPLES if "Virtual" in example and "genlm" not in example]
    assert on_vllm
    run_examples("next-token.md", on_vllm, model=wide_heads[0])


def test_every_method_and_error_that_the_page_names_is_there() -> None:
    for method in re.findall(r"\blm\.(\w+)\(", PAGE):
        assert callable(getattr(AsyncLM, method)), method
        assert hasattr(RemoteLLM, method) or method in {"add_lora", "clear_kv_cache"}, method
    for error in re.findall(r"`(\w+Error)`", PAGE):
        assert hasattr(errors, error) or error in {"ValueError", "RuntimeError"}, error
