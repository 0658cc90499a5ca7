from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def model(tiny_model_folder: Path) -> str:
    return str(tiny_model_folder)


def test_without_logprobs_only_the_text_is_printed(cli: Callable[..., Any], model: str) -> None:
    arguments = ("generate", "the cat", "--temperature", "0", "--model", model)
    done = cli(*arguments)
    found = json.loads(cli(*arguments, "--json").out)
    assert done.code == 0
    assert done.out == f"{found['text']}\n"
    assert "tokens" not in found
    assert found["prompt"] == "the cat"


def test_each_generated_token_has_its_row(cli: Callable[..., Any], model: str) -> None:
    arguments = ("generate", "the cat", "--max-tokens", "5", "--seed", "1", "--logprobs", "2")
    found = json.loads(cli(*arguments, "--json", "--model", model).out)
    assert [row["token_id"] for row in found["tokens"]] == found["token_ids"]
    assert all(len(row["top_logprobs"]) == 2 and row["entropy"] > 0 for row in found["tokens"])
    table = cli(*arguments, "--model", model).out.rsplit("\n\n", 1)[1].splitlines()
    assert table[0].split()[:5] == ["#", "token", "logprob", "rank", "entropy"]
    assert len(table) == 1 + len(found["token_ids"])
    assert [line.split()[0] for line in table[1:]] == [str(row) for row in range(len(found["token_ids"]))]


def test_the_rows_are_those_that_score_gives_the_same_tokens(cli: Callable[..., Any], model: str) -> None:
    from logprobe import LLM, SamplingParams

    generated = json.loads(
        cli(
            "generate",
            "the cat",
            "--max-tokens",
            "4",
            "--seed",
            "3",
            "--logprobs",
            "3",
            "--json",
            "--model",
            model,
        ).out
    )
    with LLM(model, kv_cache_memory_bytes=1 << 21) as llm:
        ids = [*llm.text.encode("the cat").tolist(), *generated["token_ids"]]
        (scored,) = llm.generate(ids, SamplingParams(max_tokens=0, prompt_logprobs=3, entropy=True))
    flat = scored.prompt_logprobs
    assert flat is not None
    for row, position in zip(generated["tokens"], range(len(ids) - 4, len(ids)), strict=True):
        chosen = flat.chosen(position)
        assert chosen is not None
        assert row["logprob"] == pytest.approx(chosen[1].logprob, abs=5e-5)
        assert row["rank"] == chosen[1].rank


def test_a_seed_gives_the_same_text_again(cli: Callable[..., Any], model: str) -> None:
    def text(seed: str) -> str:
        done = cli("generate", "the", "--max-tokens", "12", "--seed", seed, "--json", "--model", model)
        return str(json.loads(done.out)["token_ids"])

    assert text("5") == text("5")
    assert text("5") != text("6")


def test_top_k_1_is_the_greedy_text(cli: Callable[..., Any], model: str) -> None:
    common = ("generate", "the", "--max-tokens", "8", "--json", "--model", model)
    greedy = json.loads(cli(*common, "--temperature", "0").out)
    assert json.loads(cli(*common, "--top-k", "1").out)["token_ids"] == greedy["token_ids"]
    assert json.loads(cli(*common, "--top-p", "1e-6").out)["token_ids"] == greedy["token_ids"]


def test_a_stop_text_ends_the_completion_before_it(cli: Callable[..., Any], model: str) -> None:
    common = ("generate", "the", "--max-tokens", "12", "--temperature", "0", "--json", "--model", model)
    whole = json.loads(cli(*common).out)["text"]
    (stop,) = re.findall("[a-z]{2}", whole)[:1]
    found = json.loads(cli(*common, "--stop", "never there", "--stop", stop).out)
    assert found["text"] == whole[: whole.index(stop)]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)


def test_the_prompt_may_come_from_standard_input(cli: Callable[..., Any], model: str) -> None:
    common = ("--max-tokens", "3", "--temperature", "0", "--json", "--model", model)
    piped = cli("generate", "-", *common, stdin="the é".encode())
    assert piped.out == cli("generate", "the é", *common).out


def test_an_empty_prompt_is_refused_where_the_model_has_no_bos(
    cli: Callable[..., Any], tiny_window_folder: Path
) -> None:
    done = cli("generate", "", "--model", str(tiny_window_folder))
    assert done.code == 2
    assert "PROMPT: is empty; give at least one token" in done.error_line


def test_an_interrupt_keeps_what_came(
    cli: Callable[..., Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from logprobe import LLM

    whole = LLM.stream

    def interrupted(llm: LLM, *arguments: Any) -> Iterator[Any]:
        for output in whole(llm, *arguments):
            yield output
            if len(output.outputs[0].token_ids) >= 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    arguments = ("generate", "the", "--max-tokens", "50", "--temperature", "0", "--model", model)
    done = cli(*arguments, "--json", "--logprobs", "1")
    found = json.loads(done.out)
    assert done.code == 130
    assert found["finish_reason"] is None
    assert 3 <= len(found["tokens"]) == len(found["token_ids"]) < 50
    shown = cli(*arguments)
    assert shown.code == 130
    assert shown.out.endswith("\n")
    # A late reader finds several tokens at once, so either of the two may have more of them.
    shorter, longer = sorted((shown.out.removesuffix("\n"), found["text"]), key=len)
    assert shorter
    assert longer.startswith(shorter)


@pytest.mark.real_model
@pytest.mark.usefixtures("on_real_llm")
def test_the_capital_of_france_has_the_known_logprobs(cli: Callable[..., Any]) -> None:
    arguments = ("--max-tokens", "1", "--temperature", "0", "--logprobs", "5", "--json")
    found = json.loads(cli("generate", "The capital of France is", *arguments).out)
    (row,) = found["tokens"]
    known = {" Paris": -0.2581, " the": -2.7407, " London": -4.3844}
    assert found["text"] == row["token"] == " Paris"
    assert row["logprob"] == pytest.approx(known[" Paris"], abs=5e-4)
    assert row["rank"] == 1
    best = {one["token"]: one["logprob"] for one in row["top_logprobs"][:3]}
    assert best == pytest.approx(known, abs=5e-4)
