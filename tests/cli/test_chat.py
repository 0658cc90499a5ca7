"""`logprobe chat`: turns from standard input, answers with their surprisal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def test_each_line_is_a_turn_and_each_answer_says_how_sure_it_was(cli: Any, tiny_model_folder: Path) -> None:
    flags = ("--model", str(tiny_model_folder), "--max-tokens", "4", "--seed", "1")
    done = cli("chat", *flags, stdin=b"the cat\nand the dog\n\nnot read\n")
    assert done.code == 0
    found = re.findall(
        r"^\[(\d+) tokens, ([\d.]+) nats a token, perplexity [\d.]+\]$", done.out, re.MULTILINE
    )
    assert len(found) == 2
    assert all(0 < int(count) <= 4 and float(mean) > 0 for count, mean in found)


def test_shading_changes_no_text(cli: Any, tiny_model_folder: Path) -> None:
    flags = ("--model", str(tiny_model_folder), "--max-tokens", "12", "--temperature", "0")
    plain = cli("chat", *flags, stdin=b"the cat\n").out
    shaded = cli("chat", *flags, "--shade", stdin=b"the cat\n").out
    assert "\x1b[" in shaded
    assert "\x1b[" not in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", shaded) == plain


def test_a_temperature_that_cannot_be_is_wrong_use(cli: Any) -> None:
    done = cli("chat", "--temperature", "-1")
    assert done.code == 2
    assert "--temperature" in done.error_line
