"""Expected results and input files for the tests of evaluation tools."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write_tasks(folder: Path, tasks: Mapping[str, tuple[list[dict[str, Any]], dict[str, Any]]]) -> None:
    """Write lm-evaluation-harness tasks named `local_NAME`, each with its own rows."""
    for name, (rows, task) in tasks.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        config = {"task": f"local_{name}", "test_split": "test", **source, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML


class Run(NamedTuple):
    """Results of an lm-evaluation-harness run, by task."""

    metrics: dict[str, Any]
    answers: dict[str, Any]  # one for each request

    @classmethod
    def read(cls, out: Path) -> Run:
        """Read the results of a run from its output folder."""
        (results,) = out.rglob("results_*.json")
        answers = {
            path.name.split("_2")[0].removeprefix("samples_"): [
                json.loads(line)["resps"] for line in path.read_text().splitlines()
            ]
            for path in out.rglob("samples_*.jsonl")
        }
        return cls(json.loads(results.read_text())["results"], answers)


def assert_same_run(got: Run, want: Run, *, metric: dict[str, float], score: dict[str, float]) -> None:
    """Assert equal metrics and answers, with numbers compared by `pytest.approx`."""
    for task, metrics in want.metrics.items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert got.metrics[task][name] == pytest.approx(value, **metric), (task, name)
    assert want.answers
    assert got.answers.keys() == want.answers.keys() == want.metrics.keys()
    for task, answers in want.answers.items():
        assert_alike(got.answers[task], answers, score)


def assert_alike(mine: Any, theirs: Any, score: dict[str, float]) -> None:
    """Assert equality through nested lists, with numbers compared by `pytest.approx`."""
    if isinstance(theirs, list):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_alike(one, other, score)
        return
    try:
        number = float(theirs)
    except (TypeError, ValueError):
        assert mine == theirs
        return
    assert float(mine) == pytest.approx(number, **score)


@cache
def _loaded(folder: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model, AutoTokenizer.from_pretrained(folder)


def surprisals(folder: Path, text: str, *, before: str = "") -> list[float]:
    """Return the surprisals (nats) of all tokens of a text but the first, by transformers in float64.

    With `before`, its trailing white space is moved to the text, and every token of the text is scored.
    """
    import torch

    model, tokenizer = _loaded(folder)
    stripped = before.rstrip()
    own = tokenizer.encode(before[len(stripped) :] + text)
    context = tokenizer.encode(stripped) if stripped else own[:1]
    ids = torch.tensor([[*context, *(own if stripped else own[1:])]])
    with torch.inference_mode():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    chosen = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    return [-float(value) for value in chosen[len(context) - 1 :]]
