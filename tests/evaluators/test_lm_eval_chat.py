"""lm-evaluation-harness with a chat behind a server: `/v1/loglikelihood` gives what `hf` computes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from evaluators_data import Run, assert_same_run, write_tasks

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
) -> Callable[..., Run]:
    """Run the harness with our model registered; return metrics and answers."""
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder, {name: (rows, task) for name, task in TASKS.items()})

    def run_tasks(model: str, arguments: str, *flags: str) -> Run:
        out = tmp_path_factory.mktemp("out")
        names = ",".join(f"local_{name}" for name in TASKS)
        command = ["python", "-m", "logprobe.integrations.lm_eval", "run", "--model", model]
        command += ["--model_args", arguments, "--tasks", names, "--include_path", folder]
        run(*command, "--output_path", out, "--log_samples", *flags)
        return Run.read(out)

    return run_tasks


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
    assert_same_run(got, want, metric={"abs": TOLERANCE, "rel": 1e-4}, score={"abs": TOLERANCE})
