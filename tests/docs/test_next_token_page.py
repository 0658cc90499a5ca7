"""The examples of docs/next-token.md run, one after the other; those of genlm where it is installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from logprobe import AsyncLM, RemoteLM, errors
from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from logprobe import LLM

PAGE = (Path(__file__).parents[2] / "docs/next-token.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_run_one_after_the_other(
    tiny_llm: LLM,
    tiny_model_folder: Path,
    adapter_folders: dict[str, Path],
    new_serving: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = [example for example in EXAMPLES if "genlm" not in example]
    assert len(ours) == 8
    with new_serving(tiny_llm, ServerSettings()) as (url, _):
        names: dict[str, object] = {
            "model": str(tiny_model_folder),
            "adapter": adapter_folders["narrow"],
            "url": url,
        }
        for example in ours:
            exec(compile(example, "next-token.md", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_every_method_and_error_that_the_page_names_is_there() -> None:
    for method in re.findall(r"\blm\.(\w+)\(", PAGE):
        assert callable(getattr(AsyncLM, method)), method
        assert hasattr(RemoteLM, method) or method in {"add_new_lora", "clear_kv_cache"}, method
    for error in re.findall(r"`(\w+Error)`", PAGE):
        assert hasattr(errors, error) or error in {"ValueError", "RuntimeError"}, error


@pytest.mark.parametrize(
    ("name", "kind"), [("ParameterError", ValueError), ("EngineClosedError", RuntimeError)]
)
def test_the_errors_are_what_the_page_says(name: str, kind: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), kind)
