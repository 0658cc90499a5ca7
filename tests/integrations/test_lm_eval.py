"""The harness's model `logprobe`, in process, gives the scores of the harness's own model `hf`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from evaluators_data import Run, assert_same_run, write_tasks

if TYPE_CHECKING:
    from collections.abc import Callable

PYTHON = Path(__file__).parents[2] / ".rivals/lm_eval/bin/python"
# A rolling request sums hundreds of tokens.
TOLERANCES = {"metric": {"abs": 1e-3, "rel": 1e-4}, "score": {"abs": 2e-4, "rel": 1e-6}}

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="lm-eval has an environment of its own: `make test-lm-eval` builds it"
)

QUESTIONS = [
    {"question": "Which animal barks?", "choices": ["the cat", "the dog", "the fish"], "answer": 1},
    {"question": "How many legs does a cat have?", "choices": ["two", "three", "four"], "answer": 2},
    {"question": "What is frozen water called?", "choices": ["ice", "fire", "sand é"], "answer": 0},
    {"question": "Where do fish live?", "choices": ["in the water", "on the moon"], "answer": 0},
]
PROSE = " ".join(row["question"] for row in QUESTIONS)  # type: ignore[misc]
TEXTS = [{"text": PROSE}, {"text": f"The dog and the cat. {PROSE}"}, {"text": "One é."}]
TASKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "choices": (
        QUESTIONS,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
    ),
    "rolling": (
        TEXTS,
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
    ),
    "until": (
        QUESTIONS,
        {
            "output_type": "generate_until",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_target": "{{choices[answer]}}",
            "generation_kwargs": {"until": ["\n", "the"], "max_gen_toks": 12, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of each kind on local files."""
    made = tmp_path_factory.mktemp("tasks")
    write_tasks(made, TASKS)
    return made


@pytest.fixture(scope="module")
def evaluate(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run the harness's command with our model registered; return metrics and answers."""

    def run(model: str, arguments: str, *flags: str) -> Run:
        out = tmp_path_factory.mktemp("out")
        quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [PYTHON, "-m", "logprobe.integrations.lm_eval", "run", "--model", model]
        command += ["--model_args", arguments, "--tasks", ",".join(f"local_{name}" for name in TASKS)]
        command += ["--include_path", folder, "--output_path", out, "--log_samples", *flags]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | quiet
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return Run.read(out)

    return run


@pytest.mark.parametrize("flags", [(), ("--num_fewshot", "2")])
def test_a_tiny_model_scores_and_writes_as_hf_does(
    tiny_model_folder: Path, evaluate: Callable[..., Any], flags: tuple[str, ...]
) -> None:
    want = evaluate("hf", f"pretrained={tiny_model_folder},dtype=float32", "--device", "cpu", *flags)
    got = evaluate("logprobe", f"pretrained={tiny_model_folder},dtype=float32", *flags)
    assert_same_run(got, want, **TOLERANCES)


@pytest.mark.real_model
def test_a_real_model_scores_and_writes_as_hf_does(
    evaluate: Callable[..., Any], smollm2_folder: Path
) -> None:
    """Compare with `hf` in float64: its float32 sums are 2.5e-4 nats off at 30 tokens (vocabulary 49,152)."""
    want = evaluate("hf", f"pretrained={smollm2_folder},dtype=float64", "--device", "cpu")
    got = evaluate("logprobe", "pretrained=smollm2,dtype=float32")
    assert_same_run(got, want, **TOLERANCES)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ("max_num_seq=4)", "did you mean 'max_num_seqs'?"),
        ("max_length=16).generate_until([SimpleNamespace(args=('a dog', {'max_gen_toks': 16}))])", "no room"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(tiny_model_folder: Path, use: str, words: str) -> None:
    code = (
        "from types import SimpleNamespace; from lm_eval.api.registry import get_model;"
        f"import logprobe.integrations.lm_eval, sys; get_model('logprobe')(sys.argv[1], {use}"
    )
    command = [PYTHON, "-c", code, str(tiny_model_folder)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert words in done.stderr.splitlines()[-1]
