"""`logprobe uncertainty`: the library's results as a table and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from logprobe import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logprobe import LLM

ASKED = ("the cat", "--n", "6", "--max-tokens", "2", "--seed", "3", "--temperature", "0.5", "--top-k", "3")


@pytest.fixture
def run(cli: Callable[..., Any], tiny_model_folder: Path) -> Callable[..., Any]:
    """Run the command on the tiny model."""

    def call(*arguments: str, stdin: bytes = b"") -> Any:
        return cli("uncertainty", *arguments, "--model", str(tiny_model_folder), stdin=stdin)

    return call


def test_the_figures_are_those_of_the_library(run: Any, tiny_llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, seed=3, temperature=0.5, top_k=3)
    want = tiny_llm.uncertainty("the cat", 6, params, self_certainty=True, k=7, window=2)
    flags = ("--self-certainty", "--k", "7", "--window", "2", "--json")
    found = json.loads(run(*ASKED, *flags).out)
    assert found["prompt"] == "the cat"
    assert found["semantic_sets"] == [list(one) for one in want.semantic_sets]
    # Another engine may batch differently, so the last bits of float32 differ.
    assert found["semantic_entropy"] == pytest.approx(want.semantic_entropy, abs=1e-5)
    for one, answer in zip(found["answers"], want.answers, strict=True):
        assert one["token_ids"] == answer.token_ids
        assert one["self_certainty"] == pytest.approx(answer.self_certainty, abs=1e-5)
        assert one["tail_confidence"] == pytest.approx(answer.tail_confidence, abs=1e-5)


def test_answers_of_one_text_are_a_line(run: Any, tiny_llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, seed=3, temperature=0.5, top_k=3)
    want = tiny_llm.uncertainty("the cat", 6, params)
    head, *lines = run("-", *ASKED[1:], stdin=b"the cat").out.splitlines()
    assert head.split() == ["answer", "share", "draws", "logprob"]
    assert want.best is not None
    assert lines[0].startswith(repr(want.best.text))
    shares = [float(line.split()[-3]) for line in lines[: want.num_semantic_sets]]
    assert shares == pytest.approx(want.shares.tolist(), abs=2e-4)
    draws = [int(line.split()[-2]) for line in lines[: want.num_semantic_sets]]
    assert draws == [len(one) for one in want.semantic_sets]
    facts = dict(line.rsplit("  ", 1) for line in lines[want.num_semantic_sets + 1 :])
    assert {name.strip() for name in facts} == {
        *("semantic entropy", "by counts", "sequence entropy", "per token", "probability mass")
    }


def test_answers_that_are_ended_early_are_told(run: Any) -> None:
    asked = ("the cat", "--n", "3", "--max-tokens", "9", "--seed", "3", "--window", "2", "--k", "5")
    done = run(*asked, "--stop-below", "100")
    assert done.out.splitlines()[-1].split() == ["stopped", "early", "3", "of", "3"]
    assert "nan" not in done.out
    found = json.loads(run(*asked, "--stop-below", "100", "--json").out)
    assert [(one["num_tokens"], one["stopped_early"]) for one in found["answers"]] == [(2, True)] * 3
    assert (found["best"], found["semantic_entropy"]) == (None, None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--n", "0"), "--n: must be an integer >= 1"),
        (("--temperature", "0"), "--temperature: 0 would sample the same answer"),
        (("--max-tokens", "0"), "--max-tokens: must be positive"),
        (("--window", "0"), "--window: must be"),
        (("--k", "0"), "--k: must be"),
        (("--stop-below", "0"), "--stop-below: must be"),
        (("--stop-below", "1"), "--window: is 2048"),
        (("--top-p", "0"), "--top-p: must be in"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_named_before_a_model_is_loaded(
    cli: Callable[..., Any], flags: tuple[str, ...], said: str
) -> None:
    done = cli("uncertainty", "the cat", "--model", "no-such-model", *flags)
    assert (done.code, said in done.error_line) == (2, True), done.err
