"""docs/coming-from.md: what stands on its right-hand sides works."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from logprobe import LLM, AsyncLM, SamplingParams
from logprobe.processors.foreign import adapt_transformers

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def right_sides(section: str) -> list[str]:
    """The first code of each right-hand cell, in order."""
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [re.findall(r"`([^`]+)`", row.split(" | ")[-1])[0] for row in rows]


@pytest.fixture
def names(
    tiny_model_folder: Path, adapter_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """What the lines may use; the models that they open are small, and closed at the end."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    opened: list[Any] = []

    class SmallLLM(LLM):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **({"kv_bytes": 1 << 20} | settings))
            opened.append(self)

    monkeypatch.chdir(tiny_model_folder.parent)
    yield {
        "LLM": SmallLLM,
        "AsyncLM": AsyncLM,
        "SamplingParams": SamplingParams,
        "adapt_transformers": adapt_transformers,
        "own": lambda _, scores: scores,
        "lora": next(iter(adapter_folders.values())),
        "model": AutoModelForCausalLM.from_pretrained(tiny_model_folder),
        "tokenizer": AutoTokenizer.from_pretrained(tiny_model_folder),
    }
    for llm in opened:
        llm.close()


def run(line: str, names: dict[str, Any], folder: Path) -> None:
    code = line.replace('"smollm2"', repr(str(folder)))
    compiled = compile(code, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    ended = eval(compiled, names)  # noqa: S307 - our own page
    if inspect.isawaitable(ended):
        asyncio.run(_awaited(ended))


async def _awaited(work: Any) -> None:
    await work


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "OpenAI"])
def test_each_line_on_the_right_runs(section: str, names: dict[str, Any], tiny_model_folder: Path) -> None:
    lines = right_sides(SECTIONS[section])
    assert len(lines) == 10
    for line in lines:
        run(line, names, tiny_model_folder)


def test_openais_client_runs_on_a_server(
    names: dict[str, Any], tiny_model_folder: Path, tiny_llm: LLM, new_serving: Any
) -> None:
    from openai import OpenAI

    from logprobe.server import ServerSettings

    lines = right_sides(SECTIONS["OpenAI"])
    assert len(lines) == 10
    with new_serving(tiny_llm, ServerSettings(model_name="tiny")) as (url, _):
        names |= {"url": f"{url}/v1", "OpenAI": OpenAI}
        for line in lines:
            run(line, names, tiny_model_folder)
