from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from doc_pages import PAGES, examples_of, run_examples
from logprobe.processors.registry import BUILT_INS, describe_processor

if TYPE_CHECKING:
    from logprobe import LLM

ROOT = Path(__file__).parents[2]
PAGE = PAGES["processors.md"]


def test_the_examples_of_the_page_run_one_after_the_other(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    run_examples("processors.md", examples_of("processors.md"), model=tiny_model_folder)


def test_the_table_names_every_built_in_with_its_arguments() -> None:
    rows = dict(re.findall(r"^\| `(\w+(?:LogitsProcessor|Capture))` \| (.*) \|$", PAGE, re.MULTILINE))
    assert list(rows) == list(BUILT_INS)
    for name, cell in rows.items():
        keys = describe_processor(name)["args"]["properties"]
        documented = re.findall(r"`(\w+)`", cell)
        assert set(documented) <= set(keys)
        assert {key for key in keys if not key.endswith("_token_ids")} <= set(documented)


@pytest.mark.real_model
def test_the_example_program_runs(real_llm: LLM) -> None:
    del real_llm  # only checks that the model is available
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "say_it_again.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert lines[0] != lines[1]
    assert lines[2].startswith("SayItAgainLogitsProcessor: ")
