"""lm-evaluation-harness over HTTP gives the scores of its own in-process model."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from evaluators_data import Run, assert_same_run, write_tasks

if TYPE_CHECKING:
    from collections.abc import Callable

HARNESS = Path(__file__).parents[2] / ".rivals/lm_eval/bin/lm_eval"
TOLERANCES = {"metric": {"abs": 1e-3, "rel": 1e-3}, "score": {"abs": 1e-3, "rel": 1e-5}}

pytestmark = pytest.mark.skipif(
    not HARNESS.exists(), reason="lm-eval has an environment of its own: `make test-lm-eval` builds it"
)

CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
}
QUESTIONS = [
    ("Question: What colour is the sky on a clear day?\nAnswer:", ["blue", "green", "a dog"], 0),
    ("Question: Which animal barks?\nAnswer:", ["the cat", "the dog", "the fish"], 1),
    ("Question: How many legs does a cat have?\nAnswer:", ["two", "three", "four"], 2),
    ("Question: What do bees make?\nAnswer:", ["honey", "milk and the", "stones"], 0),
    ("Question: Where do fish live?\nAnswer:", ["in the water", "on the moon"], 0),
    ("Question: What is frozen water called?\nAnswer:", ["ice", "fire", "sand é"], 0),
]
TEXT = " ".join(question.split("\n")[0].removeprefix("Question: ") for question, _, _ in QUESTIONS)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a multiple-choice task and a perplexity task on local files."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": text, "choices": choices, "answer": answer} for text, choices, answer in QUESTIONS]
    documents = [{"text": TEXT}, {"text": f"The dog and the cat. {TEXT}"}, {"text": "One é."}]
    write_tasks(folder, {"choices": (rows, CHOICES), "rolling": (documents, ROLLING)})
    return folder


@pytest.fixture(scope="module")
def evaluate(tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Run the harness; return the score of each request, and the metrics."""

    def run(model: str, arguments: str, *flags: str, names: str = "local_choices,local_rolling") -> Run:
        out = tmp_path_factory.mktemp("out")
        quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [HARNESS, "run", "--model", model, "--model_args", arguments, "--tasks", names]
        options = ["--include_path", tasks, "--output_path", out, "--log_samples", *flags]
        done = subprocess.run(
            [*command, *options], env=os.environ | quiet, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return Run.read(out)

    return run


def over_http(server: Any, limit: int, *more: str) -> str:
    base = f"model={server.service.model_name},base_url={server.url}/v1/completions"
    return ",".join([base, f"max_length={limit + 2}", *more])


def test_a_tiny_model_scores_alike_in_process_and_over_http(
    server: Any, tiny_model_folder: Path, evaluate: Callable[..., Any]
) -> None:
    # Its HTTP client adds no BOS to a context, but its own model does by default.
    hf = f"pretrained={tiny_model_folder},dtype=float32,add_bos_token=False"
    want = evaluate("hf", hf, "--device", "cpu")
    limit = server.service.capabilities.max_model_len
    # The client ignores a BOS with id 0 unless it is given explicitly.
    asked = over_http(server, limit, "num_concurrent=4", "custom_prefix_token_id=0")
    got = evaluate("local-completions", asked, "--batch_size", "4")
    assert_same_run(got, want, **TOLERANCES)


def test_the_gguf_client_scores_alike(
    server: Any, tiny_model_folder: Path, evaluate: Callable[..., Any]
) -> None:
    hf = f"pretrained={tiny_model_folder},dtype=float32"
    want = evaluate("hf", hf, "--device", "cpu", names="local_choices")
    got = evaluate("gguf", f"base_url={server.url}", names="local_choices")
    assert_same_run(got, want, **TOLERANCES)


@pytest.mark.real_model
def test_a_real_model_scores_alike_in_process_and_over_http(
    real_server: Any, evaluate: Callable[..., Any], smollm2_folder: Path
) -> None:
    want = evaluate("hf", f"pretrained={smollm2_folder},dtype=float32", "--device", "cpu")
    limit = real_server.service.capabilities.max_model_len
    got = evaluate("local-completions", over_http(real_server, limit), "--batch_size", "4")
    assert_same_run(got, want, **TOLERANCES)
