"""Without an optional package, what needs it names the command that installs it; the rest works."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PREAMBLE = "import sys; sys.modules.update(dict.fromkeys({packages}))"  # with None, an import fails


def run_without(*packages: str, code: str, exit_code: int = 0) -> str:
    """Run Python code in a process where these packages cannot be imported; return what it prints."""
    source = PREAMBLE.format(packages=packages) + "\n" + dedent(code)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == exit_code, done.stderr
    return done.stdout + done.stderr


def test_without_pyarrow_records_have_every_form_but_arrow() -> None:
    printed = run_without(
        "pyarrow",
        code="""
        import json
        from logprobe import FlatLogprobs, LogprobeError
        from logprobe.compat.vllm_logprobs import append_logprobs_for_next_position
        from logprobe.compat.vllm_logprobs import create_sample_logprobs

        record = create_sample_logprobs(flat_logprobs=True)
        append_logprobs_for_next_position(record, [5, 7], [-0.5, -1.5], ["a", "b"], 1, 2)
        assert isinstance(record, FlatLogprobs), type(record)
        print(json.dumps(record[0][5].logprob))
        try:
            record.to_arrow()
        except LogprobeError as error:
            print(type(error).__name__, isinstance(error, ImportError), error)
        """,
    )
    value, error = printed.splitlines()
    assert float(value) == -0.5
    assert error.startswith("MissingPackageError True")
    assert "pip install 'logprobe[arrow]'" in error


def test_without_pyarrow_a_data_set_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a"}\n')
    printed = run_without(
        "pyarrow",
        code=f"""
        from logprobe.cli import command

        output = {str(tmp_path / "scores")!r}
        sys.argv = ["logprobe", "dataset", {str(texts)!r}, "-o", output, "--model", "missing"]
        command()
        """,
        exit_code=1,
    )
    assert "pip install 'logprobe[arrow]'" in printed


def test_without_torch_the_class_on_vllm_names_its_extra() -> None:
    printed = run_without(
        "torch",
        code="""
        import logprobe.next_token

        try:
            logprobe.next_token.AsyncVirtualLM
        except ImportError as error:
            print(type(error).__name__, error)
        """,
    )
    assert printed.startswith("MissingPackageError")
    assert "pip install 'logprobe[vllm]'" in printed


@pytest.mark.real_model
def test_the_default_model_runs_without_torch_and_other_extras() -> None:
    printed = run_without(
        *("torch", "transformers", "peft", "pyarrow"),
        code="""
        from logprobe import LLM, SamplingParams

        question = "The capital of France is"
        with LLM("smollm2") as llm:
            [output] = llm.generate(question, SamplingParams(max_tokens=1, temperature=0))
            [score] = llm.score([(question, " Paris")])
            layout = llm.engine.capabilities().layout
        print(output.outputs[0].text, round(score.logprob, 2), layout.why_transformers)
        """,
    )
    assert printed.split() == ["Paris", "-0.26", "None"]


@pytest.mark.real_model
def test_torch_is_not_imported_where_it_is_installed_but_not_needed() -> None:
    printed = run_without(
        code="""
        import logprobe

        with logprobe.LLM("smollm2") as llm:
            llm.generate("a")
        print([name for name in ("torch", "transformers", "pyarrow") if name in sys.modules])
        """,
    )
    assert printed.split() == ["[]"]
