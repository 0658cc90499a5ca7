"""A newcomer's first output: short lines without messages of other libraries."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np

from logprobe import LLM, CompletionOutput, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path


LONGEST = 160


def test_outputs_and_models_show_as_one_short_line(tiny_llm: LLM) -> None:
    asked = SamplingParams(n=2, max_tokens=20, logprobs=-1, prompt_logprobs=-1, ignore_eos=True)
    [output] = tiny_llm.generate("the cat and the dog " * 4, asked)
    for shown in (output, output.outputs[0], tiny_llm):
        text = repr(shown).replace(tiny_llm.config.model, "")
        assert "\n" not in text
        assert len(text) <= LONGEST
    assert "20 tokens" in repr(output.outputs[0])
    assert "and 1 more" in repr(output)


def test_escapes_do_not_make_the_line_longer() -> None:
    shown = repr(CompletionOutput(index=0, text="\x1d" * 500, finish_reason="length"))
    assert len(shown) <= LONGEST
    assert "…" in shown
    assert "'ab'" in repr(CompletionOutput(index=0, text="ab", finish_reason="stop"))


def test_records_of_a_step_and_scores_show_as_one_short_line(tiny_llm: LLM) -> None:
    import torch

    from logprobe.compat.logprobs_processor import LogprobsLists, LogprobsTensors, ModelRunnerOutput

    [score] = tiny_llm.score([("the cat", " and the dog" * 8)], logprobs=-1, entropy=True)
    columns = [np.zeros((64, 2000), np.int32), np.zeros((64, 2000), np.float32)]
    rest = [np.ones(64, np.int32), np.zeros(64, np.float32), np.ones(64, np.int32), np.ones(64, np.bool_)]
    names = ("token_ids", "logprobs", "ranks", "lse", "num_logprobs", "is_valid")
    arrays = dict(zip(names, columns + rest, strict=True))
    lists = LogprobsLists.of_rows(**arrays)
    tensors = LogprobsTensors(**{name: torch.from_numpy(array) for name, array in arrays.items()})
    output = ModelRunnerOutput.create(np.arange(64), [f"request-{row}" for row in range(64)], lists)
    assert score.record is not None
    for shown in (score, score.record, lists, tensors, output, output.sampler_output):
        assert "\n" not in repr(shown)
        assert len(repr(shown)) <= LONGEST
    assert "greedy" in repr(score) or not score.is_greedy


def test_loading_a_model_says_nothing_on_standard_error(
    tiny_model_folder: Path, adapter_folders: dict[str, Path]
) -> None:
    folder = next(iter(adapter_folders.values()))
    program = (
        "from logprobe import LLM\n"
        f"with LLM({str(tiny_model_folder)!r}, kv_cache_memory_bytes=1 << 20) as llm:\n"
        f"    llm.add_lora('legal', {str(folder)!r})\n"
        "    llm.generate('the cat')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert ended.stderr == ""


def test_help_has_a_short_flag() -> None:
    from typer.testing import CliRunner

    from logprobe.cli.app import make_app

    assert CliRunner().invoke(make_app(), ["-h"]).output == CliRunner().invoke(make_app(), ["--help"]).output
