"""docs/coming-from.md: both sides of its tables work if their libraries are installed."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from logprobe import LLM, SamplingParams
from logprobe.next_token import AsyncLM
from logprobe.processors.foreign import adapt_transformers

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
del SECTIONS["Differences by name"]  # tested in tests/sources


def sides(section: str, column: int) -> list[str]:
    """Return the code that begins each cell of a column, in order; cells without it are skipped."""
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    both = [row.strip("| ").split(" | ") for row in rows]
    cells = [row[-1] if row[column] == "the same" else row[column] for row in both]
    return [code[1] for cell in cells if (code := re.match(r"`([^`]+)`", cell))]


def right_sides(section: str) -> list[str]:
    return sides(section, -1)


def left_sides(section: str) -> list[str]:
    return sides(section, 0)


@pytest.fixture
def names(
    tiny_model_folder: Path, adapter_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """The names that the lines may use; the models they open are small, and closed at the end."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    opened: list[Any] = []

    class SmallLLM(LLM):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **({"kv_cache_memory_bytes": 1 << 20} | settings))
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
    assert len(lines) >= 4
    for line in lines:
        run(line, names, tiny_model_folder)


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "LightLLM"])
def test_each_line_on_the_left_is_python(section: str) -> None:
    lines = left_sides(SECTIONS[section])
    assert len(lines) >= 4
    for line in lines:
        # A line of the page may be only the arguments of a call.
        code = f"call({line})" if line.startswith("logprobs=") else line
        compile(code, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_lightllms_parameters_are_json() -> None:
    lines = left_sides(SECTIONS["LightLLM"])
    assert len(lines) >= 4
    for line in lines:
        assert line.startswith("/") or json.loads(f"{{{line}}}")


def test_transformers_own_lines_run(tiny_model_folder: Path, names: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, TextIteratorStreamer

    tokenizer = names["tokenizer"]
    inputs = tokenizer("the cat", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, timeout=30)
    streamer.on_finalized_text("the cat", stream_end=True)
    names |= {"inputs": inputs, "ids": inputs.input_ids, "num_prompt": inputs.input_ids.shape[1]}
    names |= {"streamer": streamer, "AutoModelForCausalLM": AutoModelForCausalLM}
    lines = left_sides(SECTIONS["transformers"])
    assert len(lines) >= 4
    for line in lines:
        run(line, names, tiny_model_folder)


def test_openais_client_runs_on_a_server(
    names: dict[str, Any], tiny_model_folder: Path, tiny_llm: LLM, new_serving: Any
) -> None:
    from openai import OpenAI

    from logprobe.server import ServerSettings

    lines = right_sides(SECTIONS["OpenAI"])
    assert len(lines) >= 4
    with new_serving(tiny_llm, ServerSettings(model_name="tiny")) as (url, _):
        names |= {"url": f"{url}/v1", "OpenAI": OpenAI}
        for line in lines:
            run(line, names, tiny_model_folder)
        names["client"].close()
