"""lm-evaluation-harness on a chat behind a server: log-likelihoods over `/v1/score`, as its `hf` has them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from evaluators_data import write_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOLERANCE = 1e-3
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def evaluate(
    run: Callable[..., str], rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Run the harness with our model known to it: metrics, and the answer to each request."""
    folder = tmp_path_factory.mktemp("tasks")
    data = write_lines(folder / "rows.jsonl", rows)
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    for name, task in TASKS.items():
        config = {"task": f"local_{name}", "test_split": "test", **source, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML

    def run_tasks(model: str, arguments: str, *flags: str) -> tuple[dict[str, Any], dict[str, Any]]:
        out = tmp_path_factory.mktemp("out")
        names = ",".join(f"local_{name}" for name in TASKS)
        command = ["python", "-m", "logprobe.integrations.lm_eval", "run", "--model", model]
        command += ["--model_args", arguments, "--tasks", names, "--include_path", folder]
        run(*command, "--output_path", out, "--log_samples", *flags)
        (results,) = out.rglob("results_*.json")
        answers = {
            path.name.split("_2")[0]: [json.loads(line)["filtered_resps"] for line in lines_of(path)]
            for path in out.rglob("samples_*.jsonl")
        }
        return json.loads(results.read_text())["results"], answers

    return run_tasks


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def assert_alike(mine: Any, theirs: Any) -> None:
    """Numbers alike and all else equal, through whatever lists they are nested in."""
    if isinstance(theirs, list):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_alike(one, other)
        return
    try:
        number = float(theirs)
    except (TypeError, ValueError):
        assert mine == theirs
        return
    assert float(mine) == pytest.approx(number, abs=TOLERANCE)


@pytest.mark.parametrize("flags", [(), ("--num_fewshot", "2", "--fewshot_as_multiturn", "true")])
def test_a_chat_over_http_scores_as_hf_does(
    flags: tuple[str, ...],
    evaluate: Callable[..., Any],
    served: str,
    smollm2_folder: Path,
    versions: str,
) -> None:
    sys.stdout.write(versions)
    chat = ("--apply_chat_template", *flags)
    want = evaluate("hf", f"pretrained={smollm2_folder},dtype=float32", "--device", "cpu", *chat)
    got = evaluate("logprobe", f"base_url={served}", *chat)
    for task, metrics in want[0].items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert got[0][task][name] == pytest.approx(value, abs=TOLERANCE, rel=1e-4), (task, name)
    assert got[1].keys() == want[1].keys()
    assert len(want[1]) == len(TASKS)
    for task, answers in want[1].items():
        assert_alike(got[1][task], answers)
