from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import pytest
from rich.cells import cell_len

from logprobe.cli.inputs import source_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logprobe import LLM

TEXT = "the cat and the dog, 12 é 🌊\n"


@pytest.fixture
def model(tiny_model_folder: Path) -> str:
    return str(tiny_model_folder)


def slow_logprobs(folder: str, text: str) -> tuple[list[int], Any]:
    """Return token ids, and the whole log-softmax after each, by transformers only."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder).encode(text)
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder).eval()(torch.tensor([ids])).logits[0]
    return ids, torch.log_softmax(logits.double(), dim=-1)


def test_json_holds_the_models_own_numbers_for_every_token(cli: Callable[..., Any], model: str) -> None:
    done = cli("score", "--text", TEXT, "--logprobs", "3", "--json", "--model", model)
    found = json.loads(done.out)
    ids, expected = slow_logprobs(model, TEXT)
    assert done.code == 0
    assert [row["token_id"] for row in found["tokens"]] == ids
    for position, row in enumerate(found["tokens"][1:]):
        whole = expected[position]
        chosen = whole[row["token_id"]]
        best = whole.topk(3)
        assert row["logprob"] == pytest.approx(float(chosen), abs=1e-4)
        assert row["rank"] == 1 + int((whole > chosen + 1e-5).sum())
        assert row["entropy"] == pytest.approx(float(-(whole.exp() * whole).sum()), abs=1e-4)
        assert [one["token_id"] for one in row["top_logprobs"]] == best.indices.tolist()
        assert [one["logprob"] for one in row["top_logprobs"]] == pytest.approx(
            best.values.tolist(), abs=1e-4
        )
        assert [one["rank"] for one in row["top_logprobs"]] == [1, 2, 3]


def test_a_tokenizers_bos_lets_every_token_of_the_text_be_scored(cli: Callable[..., Any], model: str) -> None:
    found = json.loads(cli("score", "--text", TEXT, "--json", "--model", model).out)
    first, *rows = found["tokens"]
    assert found["bos_token"] == "<|bos|>"  # noqa: S105 - no password
    assert (first["logprob"], first["rank"], first["entropy"], first["top_logprobs"]) == (
        None,
        None,
        None,
        [],
    )
    assert all(row["logprob"] < 0 for row in rows)
    assert bytes(byte for row in rows for byte in row["bytes"]) == TEXT.encode()
    assert found["totals"]["num_scored_bytes"] == found["totals"]["num_bytes"] == len(TEXT.encode())


def test_a_continuation_is_scored_after_its_context(
    cli: Callable[..., Any], model: str, tiny_llm: LLM
) -> None:
    for context, text in (("the cat", " and the dog"), ("the ca", "t and")):  # the second splits a token
        flags = ("--context", context, "--text", text, "--model", model)
        found = json.loads(cli("score", *flags, "--logprobs", "2", "--json").out)
        (want,) = tiny_llm.score([(context, text)], entropy=True)
        assert [row["token_id"] for row in found["tokens"]] == want.token_ids
        assert [row["logprob"] for row in found["tokens"]] == pytest.approx(want.token_logprobs, abs=1e-5)
        assert all(len(row["top_logprobs"]) == 2 for row in found["tokens"])
        assert (found["context"], found["boundary"]) == (context, want.boundary)
        assert found["totals"]["logprob"] == pytest.approx(want.logprob, abs=1e-5)
        assert found["totals"]["num_bytes"] == found["totals"]["num_scored_bytes"] == len(text)
        assert f"after the context; boundary: {want.boundary}" in cli("score", *flags).out
        assert json.loads(cli("score", *flags, "--summary", "--json").out)["tokens"] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--text", "x", "--context", "a", "--detect"), "--context: cannot be combined with --detect"),
        (("--text", "x", "--context", "a", "--no-bos"), "--context: cannot be combined with"),
        (("in.jsonl",), "in.jsonl holds rows; use `logprobe dataset`"),
        (("*.txt",), "use `logprobe dataset`"),
        (("a.txt", "b.txt"), "unexpected extra argument(s) (b.txt)"),
        (("--text", "x", "--stride", "0"), "--stride"),
        (("--text", "x", "--window", "999"), "--window"),
    ],
)
def test_wrong_use_names_the_flag(
    cli: Callable[..., Any], model: str, arguments: tuple[str, ...], says: str
) -> None:
    done = cli("score", *arguments, "--model", model)
    assert done.code == 2
    assert says in done.error_line


def test_without_a_bos_the_first_token_is_not_scored(
    cli: Callable[..., Any], tiny_window_folder: Path
) -> None:
    found = json.loads(cli("score", "--text", TEXT, "--json", "--model", str(tiny_window_folder)).out)
    first, *rows = found["tokens"]
    assert found["bos_token"] is None
    assert first["logprob"] is None
    assert found["totals"]["num_scored"] == len(rows)
    assert found["totals"]["num_scored_bytes"] == len(TEXT.encode()) - len(first["bytes"])


def test_totals_are_the_sums_of_the_rows(cli: Callable[..., Any], model: str) -> None:
    found = json.loads(cli("score", "--text", TEXT, "--json", "--model", model).out)
    logprobs = [row["logprob"] for row in found["tokens"][1:]]
    sums = found["totals"]
    assert sums["num_tokens"] == len(logprobs) + 1
    assert sums["logprob"] == pytest.approx(sum(logprobs))
    assert sums["mean_logprob"] == pytest.approx(sum(logprobs) / len(logprobs))
    assert sums["perplexity"] == pytest.approx(math.exp(-sum(logprobs) / len(logprobs)))
    assert sums["bits_per_byte"] == pytest.approx(-sum(logprobs) / math.log(2) / len(TEXT.encode()))


def test_info_says_which_model_and_which_stage(cli: Callable[..., Any], model: str) -> None:
    info = json.loads(cli("score", "--text", TEXT, "--logprobs", "2", "--json", "--model", model).out)["info"]
    assert (info["model"], info["stages"], info["unit"], info["num_logprobs"]) == (model, ["raw"], "nats", 2)


def test_the_tables_say_the_same_as_the_json(cli: Callable[..., Any], model: str) -> None:
    found = json.loads(cli("score", "--text", TEXT, "--logprobs", "2", "--json", "--model", model).out)
    done = cli("score", "--text", TEXT, "--logprobs", "2", "--model", model)
    rows, sums = done.out.rstrip("\n").split("\n\n")
    header, *lines = rows.splitlines()
    assert header.split() == ["#", "token", "logprob", "rank", "entropy", "2", "most", "likely"]
    assert len(lines) == len(found["tokens"])
    for line, row in zip(lines[1:], found["tokens"][1:], strict=True):
        assert f" {row['logprob']:.4f} " in line
        assert line.count('"') >= 6
    assert "first token: <|bos|>" in sums
    assert f"{found['totals']['perplexity']:.4f}" in sums
    assert done.err == f"loading {model} …\n"


def test_a_file_and_standard_input_and_a_flag_give_the_same(
    cli: Callable[..., Any], model: str, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    from_file = cli("score", str(path), "--json", "--model", model)
    from_stdin = cli("score", "-", "--json", "--model", model, stdin=TEXT.encode())
    from_flag = cli("score", "--text", TEXT, "--json", "--model", model)
    assert from_file.out == from_stdin.out == from_flag.out


def test_windows_line_ends_are_scored_as_they_stand(cli: Callable[..., Any], model: str) -> None:
    done = cli("score", "-", "--json", "--model", model, stdin=b"a\r\nb")
    rows = json.loads(done.out)["tokens"]
    assert bytes(byte for row in rows[1:] for byte in row["bytes"]) == b"a\r\nb"


def test_the_whole_vocabulary_sums_to_one(cli: Callable[..., Any], model: str) -> None:
    found = json.loads(cli("score", "--text", "the cat", "--logprobs", "-1", "--json", "--model", model).out)
    for row in found["tokens"][1:]:
        assert math.fsum(math.exp(one["logprob"]) for one in row["top_logprobs"]) == pytest.approx(
            1, abs=1e-5
        )


def test_one_token_alone_has_no_mean(cli: Callable[..., Any], tiny_window_folder: Path) -> None:
    arguments = ("score", "--text", "x", "--model", str(tiny_window_folder))
    sums = json.loads(cli(*arguments, "--json").out)["totals"]
    assert (sums["num_tokens"], sums["num_scored"], sums["logprob"]) == (1, 0, 0)
    assert (sums["mean_logprob"], sums["perplexity"], sums["bits_per_byte"]) == (None, None, None)
    assert "perplexity     -\n" in cli(*arguments).out


def test_a_text_longer_than_the_context_is_scored_in_windows(cli: Callable[..., Any], model: str) -> None:
    done = cli("score", "--text", "x" * 200, "--model", model)
    assert done.code == 0
    assert "windows of 128, stride 64" in done.out
    assert done.out == cli("score", "--text", "x" * 200, "--stride", "64", "--model", model).out


def test_a_text_that_no_context_holds_is_never_held(
    cli: Callable[..., Any], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("the cat and the dog " * 400)
    whole = cli("score", str(path), "--summary", "--model", model).out
    monkeypatch.setattr("logprobe.cli.inputs.PART_BYTES", 64)
    source = source_of(str(path), None)
    assert source.num_bytes == 8000
    assert [len(part) for part in source.parts] == [64] * 125
    assert_same_figures(cli("score", str(path), "--summary", "--model", model).out, whole)
    assert_same_figures(cli("score", str(path), "--model", model).out[-len(whole) :], whole)


def assert_same_figures(got: str, want: str) -> None:
    """Assert the same words, and the same numbers up to the last bits, which depend on the batch."""
    number = re.compile(r"-?\d+\.\d+")
    assert number.sub("", got) == number.sub("", want)
    assert list(map(float, number.findall(got))) == pytest.approx(
        list(map(float, number.findall(want))), rel=1e-6
    )


@pytest.fixture
def screen(cli: Callable[..., Any], model: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return the output of `score` on a terminal of 60 columns."""
    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "60"}.items():
        monkeypatch.setenv(name, value)

    def shown(*arguments: str) -> str:
        done = cli("score", *arguments, "--model", model)
        assert done.code == 0, done.err
        return str(done.out)

    return shown


def test_a_terminal_shows_the_text_in_its_shades(screen: Callable[..., str]) -> None:
    shown = screen("--text", TEXT)
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert plain.startswith(TEXT.replace("\n", "↵\n"))
    assert "surprisal in nats:" in plain
    assert "perplexity" in plain
    assert "entropy" not in plain


@pytest.mark.parametrize("flags", [("--tokens",), ("--logprobs", "2")])
def test_a_terminal_shows_the_table_where_it_is_asked_for(
    screen: Callable[..., str], flags: tuple[str, ...]
) -> None:
    shown = screen("--text", TEXT, *flags)
    assert shown.split()[:5] == ["#", "token", "logprob", "rank", "entropy"]
    assert all(cell_len(line) <= 60 for line in shown.splitlines())


def test_without_colours_a_terminal_shows_the_table(
    screen: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    shown = screen("--text", TEXT)
    assert "\x1b[" not in shown
    assert shown.split()[:2] == ["#", "token"]


def test_windows_are_shaded_one_after_another(screen: Callable[..., str]) -> None:
    text = "the cat é 🌊 and " * 40
    plain = re.sub(r"\x1b\[[\d;]*m", "", screen("--text", text))
    assert plain.startswith(text)
    assert "windows of 128, stride 64" in " ".join(plain.split())


def test_the_whole_vocabulary_is_not_for_a_terminal(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for arguments in (("score", "--text", "x", "--logprobs", "-1"), ("generate", "x", "--logprobs", "-1")):
        done = cli(*arguments)
        assert done.code == 2
        assert "too much for a terminal" in done.error_line


@pytest.mark.real_model
@pytest.mark.usefixtures("on_real_llm")
def test_the_text_of_the_demo_is_scored_to_its_last_byte(cli: Callable[..., Any]) -> None:
    done = cli("score", "examples/lighthouse.txt", "--logprobs", "3", "--json")
    found = json.loads(done.out)
    data = bytes(byte for row in found["tokens"] for byte in row["bytes"])
    assert data.decode().endswith("🌊\n")
    assert found["totals"]["num_bytes"] == len(data)
    assert found["totals"]["num_scored"] == len(found["tokens"]) - 1
    assert 0.5 < found["totals"]["bits_per_byte"] < 2
