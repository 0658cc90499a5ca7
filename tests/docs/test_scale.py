"""docs/scale.md: its formula matches the engine, its table the formula, and its flags exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe import LLM

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHAPES = {  # parameters, layers, key/value heads, their size, hidden size, vocabulary, as published
    "SmolLM2-135M": (134_515_008, 30, 3, 64, 576, 49_152),
    "Llama-3.1-8B": (8_030_261_248, 32, 8, 128, 4096, 128_256),
    "Qwen2.5-72B": (72_706_203_648, 80, 8, 128, 8192, 152_064),
}
BYTES = {"float32": 4, "bfloat16": 2}
TABLE = re.findall(r"^\| (\S+) \| (float32|bfloat16) \| (float32|bfloat16) \| (.*) \|$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def sizes() -> Callable[..., tuple[int, int, int]]:
    """The function on the page."""
    names: dict[str, Any] = {}
    exec(next(code for code in PYTHON if "def sizes" in code), names)  # noqa: S102 - our own page
    made: Callable[..., tuple[int, int, int]] = names["sizes"]
    return made


def test_a_token_takes_what_the_engine_takes(tiny_llm: LLM, sizes: Any) -> None:
    _, token, row = sizes(0, 2, 2, 16, 64, tiny_llm.engine.capabilities().vocab_size, weight_bytes=4)
    assert tiny_llm.engine.capabilities().num_slots == (1 << 21) // token
    assert row == 4 * tiny_llm.engine.capabilities().vocab_size


@pytest.mark.parametrize(("model", "dtype", "cache", "cells"), TABLE)
def test_the_table_follows_from_the_formula(
    sizes: Any, model: str, dtype: str, cache: str, cells: str
) -> None:
    weights, token, row = sizes(*SHAPES[model], weight_bytes=BYTES[dtype], cache_bytes=BYTES[cache])
    gigabytes = f"{weights / 1e9:.2f}" if weights < 1e9 else f"{weights / 1e9:.1f}"
    want = f"{gigabytes} GB | {token / 1e3:.1f} kB | {(1 << 30) // token:,} | {row / 1e6:.2f} MB"
    assert cells == want


def test_every_flag_exists() -> None:
    commands = subprocess.run(
        [sys.executable, ROOT / "docs" / "cli_help.py"], capture_output=True, text=True, check=True
    ).stdout
    flags = set(re.findall(r"--(?:ray|engine|device|resume)[\w-]*", PAGE)) - {"--resume`"}
    assert TABLE
    assert flags
    assert [flag for flag in flags if flag not in commands] == []


@pytest.mark.parametrize("code", PYTHON)
def test_the_python_of_the_page_compiles(code: str) -> None:
    compile(code, "docs/scale.md", "exec")
