"""Inspect with our model in process, and over HTTP by its own providers, compared with its own `hf`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from evaluators_data import surprisals

if TYPE_CHECKING:
    from collections.abc import Callable

TASKS = Path(__file__).with_name("inspect_tasks.py")
TOLERANCE = 1e-3
NUMBERS = ("--logprobs", "--top-logprobs", "3")
GREEDY = ("--temperature", "0", "--max-tokens", "24", *NUMBERS)
PROMPT_ROWS = ("--prompt-logprobs", "1", "--max-tokens", "1")
SERVED = {"VLLM": ("vllm", "smollm2"), "LOGPROBE": ("openai-api", "logprobe/smollm2")}


@pytest.fixture(scope="module")
def evaluate(
    run: Callable[..., str], rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """Run `inspect eval`; return the log of each task."""
    data = tmp_path_factory.mktemp("data") / "rows.json"
    data.write_text(json.dumps(rows))

    def run_tasks(model: str, names: str, *flags: str, **variables: str) -> dict[str, Any]:
        logs = tmp_path_factory.mktemp("logs")
        tasks = [f"{TASKS}@{name}" for name in names.split()]
        options = ["--log-dir", logs, "--log-format", "json", "--display", "none", "--no-fail-on-error"]
        run(
            "inspect",
            "eval",
            *tasks,
            "--model",
            model,
            *options,
            *flags,
            EVALUATION_DATA=str(data),
            **variables,
        )
        found = {
            log["eval"]["task"].split("/")[-1]: log for path in logs.glob("*.json") for log in [read(path)]
        }
        assert found.keys() == set(names.split())
        for log in found.values():
            assert log["status"] == "success", log.get("error")
            assert [sample.get("error") for sample in log["samples"]] == [None] * len(rows)
        return found

    return run_tasks


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def outputs(log: Any) -> list[Any]:
    return [sample["output"] for sample in log["samples"]]


def metrics(log: Any) -> dict[str, float]:
    return {
        name: metric["value"]
        for score in log["results"]["scores"]
        for name, metric in score["metrics"].items()
    }


@pytest.fixture(scope="module")
def ours(evaluate: Callable[..., Any], smollm2_folder: Path) -> Any:
    return evaluate(f"logprobe/{smollm2_folder}", "answers choices", "-M", "dtype=float32", *GREEDY)


def assert_same(got: Any, want: Any) -> None:
    """Assert equal texts, metrics and numbers at the positions that both have."""
    assert metrics(got) == pytest.approx(metrics(want), abs=TOLERANCE)
    for mine, theirs in zip(outputs(got), outputs(want), strict=True):
        assert mine["completion"] == theirs["completion"]
        pairs = [*zip(numbers(mine), numbers(theirs), strict=False)]
        assert pairs
        for one, other in pairs:
            assert one == pytest.approx(other, abs=TOLERANCE)


def numbers(output: Any) -> list[list[float]]:
    """Return the log-probabilities of the chosen token and of the three best at each position."""
    content = output["choices"][0]["logprobs"]["content"]
    return [[row["logprob"], *(top["logprob"] for top in row["top_logprobs"])] for row in content]


@pytest.mark.real_model
@pytest.mark.parametrize("task", ["answers", "choices"])
def test_in_process_it_writes_and_scores_as_hf_does(
    task: str, ours: Any, evaluate: Callable[..., Any], smollm2_folder: Path, versions: str
) -> None:
    sys.stdout.write(versions)
    asked = ("-M", "do_sample=false", "-M", "device=cpu", "-M", "dtype=float32", *GREEDY[2:])
    want = evaluate(f"hf/{smollm2_folder}", task, *asked)
    assert_same(ours[task], want[task])


@pytest.mark.real_model
@pytest.mark.parametrize("service", SERVED)
def test_its_own_providers_find_the_same_over_http(
    service: str, ours: Any, evaluate: Callable[..., Any], served: str
) -> None:
    provider, name = SERVED[service]
    at = {f"{service}_BASE_URL": f"{served}/v1", f"{service}_API_KEY": "none"}
    got = evaluate(f"{provider}/{name}", "answers choices", *GREEDY, **at)
    for task, log in got.items():
        assert_same(log, ours[task])


@pytest.mark.real_model
@pytest.mark.parametrize("where", ["in process", "vllm-completions"])
def test_its_perplexities_are_those_of_transformers(
    where: str,
    evaluate: Callable[..., Any],
    rows: list[dict[str, Any]],
    smollm2_folder: Path,
    request: pytest.FixtureRequest,
) -> None:
    if where == "in process":
        asked = ("-M", "use_chat_template=false", "-M", "dtype=float32", *PROMPT_ROWS)
        got = evaluate(f"logprobe/{smollm2_folder}", "texts targets", *asked)
    else:
        at = {"VLLM_BASE_URL": f"{request.getfixturevalue('served')}/v1", "VLLM_API_KEY": "none"}
        got = evaluate("vllm-completions/smollm2", "texts targets", *PROMPT_ROWS, **at)
    own = [value for row in rows for value in surprisals(smollm2_folder, row["text"])]
    want = math.exp(sum(own) / len(own))
    assert metrics(got["texts"])["perplexity_per_token"] == pytest.approx(want, rel=TOLERANCE)
    assert metrics(got["targets"])["perplexity_per_token"] > 1


@pytest.mark.real_model
@pytest.mark.parametrize("where", ["in process", "vllm"])
def test_a_tool_that_must_be_called_is_called(
    where: str, evaluate: Callable[..., Any], smollm2_folder: Path, request: pytest.FixtureRequest
) -> None:
    asked = ("--temperature", "0", "--max-tokens", "200")
    if where == "in process":
        got = evaluate(f"logprobe/{smollm2_folder}", "calls", "-M", "dtype=float32", *asked)
    else:
        at = {"VLLM_BASE_URL": f"{request.getfixturevalue('served')}/v1", "VLLM_API_KEY": "none"}
        got = evaluate("vllm/smollm2", "calls", *asked, **at)
    for sample in got["calls"]["samples"]:
        called = [call for message in sample["messages"] for call in message.get("tool_calls") or ()]
        assert called
        assert {(call["function"], *call["arguments"]) for call in called} == {("look", "at")}


def test_what_cannot_be_honoured_is_refused_by_name_and_what_does_not_fit_is_told(
    run: Callable[..., str], tiny_model_folder: Path
) -> None:
    out = run("python", TASKS.with_name("inspect_ends.py"), tiny_model_folder)
    assert json.loads(out.splitlines()[-1]) == {
        "verbosity": "UnknownParameterError verbosity",
        "reasoning_effort": "ParameterError reasoning_effort",
        "top_logprobs": "ParameterError top_logprobs",
        "extra_body": "UnknownParameterError temprature",
        "short": "max_tokens 3 3",
        "until the context is full": "model_length",
        "too long": "model_length",
        "base_url": "ParameterError base_url",
    }
