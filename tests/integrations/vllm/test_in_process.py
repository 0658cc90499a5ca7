"""`AsyncVirtualLM` with vLLM's worker in the same process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from logprobe.errors import ParameterError
from logprobe.next_token import AsyncVirtualLM
from logprobe.processors import GlobalLogprobsCapture
from refusals import raises

PROGRAMS = Path(__file__).with_name("in_process.py")
LIMIT_S = 600


@pytest.mark.vllm
@pytest.mark.parametrize("program", ["without", "with", "by_name", "freed"])
def test_an_engine_of_this_process_gives_the_rows(
    wide_heads: tuple[Path, dict[str, Path]], program: str
) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAMS, program, wide_heads[0]],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.mark.vllm
@pytest.mark.parametrize("extra", [{}, "settings of their own kind"])
def test_an_engine_elsewhere_that_was_made_without_our_options_is_refused(extra: object) -> None:
    from vllm import LLM

    llm = LLM.__new__(LLM)
    config = SimpleNamespace(additional_config=extra)
    llm.llm_engine = SimpleNamespace(vllm_config=config, engine_core=object())
    with raises(ParameterError, parameter="llm_engine"):
        AsyncVirtualLM(llm, GlobalLogprobsCapture())
