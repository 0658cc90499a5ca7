"""The size table in docs/deploy.md matches its script, and its memory that of a real pool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logprobe import LLM

ROOT = Path(__file__).parents[2]


def printed() -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "sizing.py"], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_page_holds_the_newest_table() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    assert printed() in text, "python docs/sizing.py"


def test_a_token_takes_what_the_table_says(real_llm: LLM) -> None:
    kv_cache_memory_bytes = real_llm.config.cache_config.kv_cache_memory_bytes
    assert kv_cache_memory_bytes is not None
    row = next(line for line in printed().splitlines() if "smollm2" in line).split(" | ")
    in_one_gib = int(row[2].replace(",", ""))
    assert real_llm.engine.capabilities().num_slots == kv_cache_memory_bytes * in_one_gib // 2**30
