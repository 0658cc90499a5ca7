"""`logprobe dataset`, and `logprobe score` on long texts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from server_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe import LLM

LONG = "the cat and the dog, 12 é 🌊\n" * 12


@pytest.fixture
def score(cli: Callable[..., Any], tiny_model_folder: Path) -> Callable[..., Any]:
    """Run `logprobe score` on the tiny model."""

    def run(*arguments: str, stdin: bytes = b"") -> Any:
        return cli("score", *arguments, "--model", str(tiny_model_folder), stdin=stdin)

    return run


@pytest.fixture
def dataset(cli: Callable[..., Any], tiny_model_folder: Path) -> Callable[..., Any]:
    """Run `logprobe dataset` on the tiny model."""

    def run(*arguments: str, stdin: bytes = b"") -> Any:
        return cli("dataset", *arguments, "--model", str(tiny_model_folder), stdin=stdin)

    return run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "the cat"}\n{"text": ""}\n{"text": "a dog"}\n')
    return path


def test_a_long_text_is_scored_in_windows(score: Any, tiny_llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(LONG)
    want = tiny_llm.perplexity(LONG, window=100, stride=40)
    flags = ("--window", "100", "--stride", "40")
    found = json.loads(score(str(tmp_path / "long.txt"), *flags, "--logprobs", "2", "--json").out)
    assert (found["window"], found["stride"]) == (100, 40)
    assert found["totals"]["num_scored"] == want.num_scored
    assert found["totals"]["logprob"] == pytest.approx(want.logprob, abs=1e-3)
    assert bytes(byte for row in found["tokens"][1:] for byte in row["bytes"]) == LONG.encode()
    assert [row["logprob"] is None for row in found["tokens"]] == [True] + [False] * want.num_scored
    assert all(len(row["top_logprobs"]) == 2 for row in found["tokens"][1:])
    lines = score(str(tmp_path / "long.txt"), *flags).out.splitlines()
    assert [line.split()[0] for line in lines[1 : want.num_tokens + 2]] == [
        str(place) for place in range(want.num_tokens + 1)
    ]
    assert float(lines[-2].split()[-1]) == pytest.approx(want.perplexity, rel=1e-4)


def test_rows_say_how_they_were_measured(dataset: Any, tmp_path: Path) -> None:
    rows = [{"c": "the ca", "text": "t and"}, {"c": "the cat", "text": " and"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = (str(tmp_path / "in.jsonl"), "--context-column", "c", "--json")
    for more, boundaries in (((), ["bytes", "token"]), (("--boundary", "token"), ["token", "token"])):
        found = [json.loads(line) for line in dataset(*flags, *more).out.splitlines()]
        assert [row["boundary"] for row in found if "row" in row] == boundaries
    assert dataset(*flags, "--boundary", "end").code == 2


def test_disjoint_windows_show_every_token_and_the_first_of_each_without_a_number(
    score: Any, tiny_llm: LLM, tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_text(LONG)
    want = tiny_llm.perplexity(LONG, window=100, stride=100)
    found = json.loads(score(str(tmp_path / "long.txt"), "--window", "100", "--stride", "100", "--json").out)
    rows = found["tokens"]
    assert bytes(byte for row in rows[1:] for byte in row["bytes"]) == LONG.encode()
    assert [place for place, row in enumerate(rows) if row["logprob"] is None] == [*range(0, len(rows), 100)]
    assert found["totals"]["num_scored"] == want.num_scored == len(rows) - -(-len(rows) // 100)
    assert found["totals"]["logprob"] == pytest.approx(want.logprob, abs=1e-3)


@pytest.mark.parametrize("flag", ["--resume", "--force"])
def test_flags_of_an_output_need_one(dataset: Any, tmp_path: Path, flag: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "the cat"}\n')
    refused = dataset(str(tmp_path / "in.jsonl"), flag, "--summary")
    assert refused.code == 2
    assert f"{flag}: requires --output" in refused.error_line


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_finished_run_that_is_resumed_says_so(dataset: Any, tmp_path: Path, suffix: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "the cat"}\n{"text": "a dog"}\n')
    flags = (str(tmp_path / "in.jsonl"), "-o", str(tmp_path / f"o.{suffix}"), "--json")
    first = dataset(*flags)
    again = dataset(*flags, "--resume")
    assert (again.code, json.loads(again.out)) == (0, json.loads(first.out))
    assert again.err.splitlines()[-1].endswith("the run has already finished; nothing to do")
    assert "already finished" not in first.err


def test_a_summary_alone_is_the_totals_whatever_the_length(score: Any, tiny_llm: LLM) -> None:
    for text in (LONG, "the cat"):
        done = score("-", "--summary", stdin=text.encode())
        assert len(done.out.splitlines()) == 6
        assert float(done.out.splitlines()[-2].split()[-1]) == pytest.approx(
            tiny_llm.perplexity(text).perplexity, rel=1e-4
        )
        alone = score("--text", text, "--summary", "--json")
        assert json.loads(alone.out)["tokens"] == []


def test_a_text_may_be_scored_with_or_without_bos(score: Any) -> None:
    with_bos = json.loads(score("--text", "the cat", "--bos", "--json").out)
    without = json.loads(score("--text", "the cat", "--no-bos", "--json").out)
    assert with_bos["totals"]["num_scored"] == without["totals"]["num_scored"] + 1
    assert without["bos_token"] is None


def test_rows_are_printed_as_json_lines_and_bad_ones_told(dataset: Any, data: Path) -> None:
    done = dataset(str(data))
    assert done.code == 1
    assert [json.loads(line)["row"] for line in done.out.splitlines()] == [0, 2]
    assert f"bad row: {data}, line 2: text: is empty" in done.err
    assert done.err.splitlines()[-1] == "error: 1 bad rows; see standard error"


def test_rows_go_to_a_file_and_the_summary_is_printed(dataset: Any, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    done = dataset(str(data), "-o", str(out), "--tokens")
    assert done.code == 1
    assert pq.read_table(out).column("row").to_pylist() == [0, 2]
    assert done.out.startswith("rows           2 scored, 1 bad\n")
    assert dataset(str(data), "-o", str(out)).error_line.endswith(
        "(--force) to overwrite it, or another name"
    )
    assert json.loads(dataset(str(data), "-o", str(out), "--force", "--json").out)["num_rows"] == 2


def test_questions_are_summed_up(dataset: Any, tmp_path: Path) -> None:
    rows = [{"q": "the cat", "options": ["and", "x"], "gold": 0}] * 4
    source = tmp_path / "q.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("--context-column", "q", "--choices-column", "options", "--answer-column", "gold")
    done = dataset(str(source), *columns, "--summary")
    assert done.code == 0
    assert done.out.splitlines()[1].split()[0] == "acc"
    assert "± 0.0000" in done.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("x.jsonl", "--answer-column", "a"), "--answer-column: requires --choices-column"),
        (("x.jsonl", "--label-column", "a"), "--label-column: requires --detect"),
        (("x.jsonl", "--truncation", "right"), "--truncation"),
        (("x.jsonl", "--keep-columns", "logprob"), "'logprob' is an output column"),
        (("--lines",), "FILE: missing; give files with rows"),
        (("IN", "--window", "999"), "--window: must be in [2, 129]"),
        (("x.jsonl", "--window", "9", "--truncation", "left"), "--window: requires --truncation window"),
    ],
)
def test_wrong_use_is_told_with_the_flag(
    dataset: Any, data: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = dataset(*(str(data) if argument == "IN" else argument for argument in arguments))
    assert done.code == 2
    assert says in done.err.splitlines()[-1]


def test_a_text_file_has_one_column_and_says_so(dataset: Any, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("the cat")
    for flag in ("--context-column", "--keep-columns"):
        done = dataset(str(tmp_path / "in.txt"), flag, "q")
        assert done.code == 1
        assert "is read as text, which has one column, not 'text', 'q'" in done.error_line


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.jsonl", None, "no such file"),
        ("broken.parquet", b"PAR1", "not a Parquet file"),
        ("in.csv", b"body\nx\n", "has no column 'text'; it has 'body'"),
        ("latin.txt", b"the \xe9 cat", "byte 0xe9 at byte 4"),
        ("empty.txt", b"", "is empty"),
        ("cut.txt", b"the \xf0\x9f", "byte 0xf0 at byte 4"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(
    score: Any, dataset: Any, tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    run = score if name.endswith("txt") else dataset
    done = run(str(tmp_path / name), "--summary")
    assert done.code == 1
    assert says in done.error_line


def test_no_library_speaks_on_standard_error(tiny_model_folder: Path, tmp_path: Path) -> None:
    """Nor does a tokenizer warn about a text beyond the maximum length in its settings."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 128}))
    (tmp_path / "long.txt").write_text("the cat and the dog " * 500)
    command = [Path(sys.executable).with_name("logprobe"), "score", tmp_path / "long.txt", "--model", folder]
    for flags in (["--summary"], ["--json"]):
        done = subprocess.run([*command, *flags], capture_output=True, check=True, timeout=PATIENCE_S)
        spoken = [line for line in done.stderr.decode().splitlines() if not line.startswith("loading ")]
        assert spoken == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_one_line(tiny_model_folder: Path) -> None:
    command = Path(sys.executable).with_name("logprobe")
    arguments = [command, "score", "--text", "the cat", "--json", "--model", str(tiny_model_folder)]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, check=False, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert done.stderr.decode().splitlines()[1:] == [
        "error: standard output: No space left on device; free disk space, or use another file"
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("x.jsonl", "--ray-actors", "2"), "requires --engine ray"),
        (("IN", "--engine", "ray"), "requires Ray; pip install 'logprobe[ray]'"),
        (("x.jsonl", "--engine", "ray", "--ray-address", "ray://h:1"), "(Ray Client) are not supported"),
        (("x.jsonl", "--engine", "ray", "--ray-gpus", "-1"), "must be a number of at least 0"),
    ],
)
def test_ray_is_refused_where_it_cannot_be(
    dataset: Any, data: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr("logprobe.cli.data.find_spec", lambda _: None)
    done = dataset(*(str(data) if argument == "IN" else argument for argument in arguments))
    assert done.code == 2
    assert says in done.err.splitlines()[-1]


@pytest.mark.parametrize("flags", [(), ("-o", "out.parquet"), ("--context-column", "sentence")])
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("in.jsonl", '\n{"sentence": "the cat"}\nno JSON\n{"sentence": "a dog", "id": 3}\n'),
        ("in.csv", "sentence,id\nthe cat,1\n"),
    ],
)
def test_a_column_that_is_not_there_is_told_before_the_model_is_loaded(
    cli: Callable[..., Any], tmp_path: Path, name: str, data: str, flags: tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(data)
    done = cli("dataset", str(tmp_path / name), *flags, "--model", "no/such-model-anywhere")
    assert done.code == 1
    assert "has no column 'text'; it has 'sentence', 'id'" in done.err
    assert "loading" not in done.err


def test_a_first_row_of_jsonl_may_lack_what_others_have(dataset: Any, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 1}\n{"text": "the cat"}\n')
    done = dataset(str(tmp_path / "in.jsonl"))
    assert [json.loads(line)["row"] for line in done.out.splitlines()] == [1]
    assert "line 1: has no 'text'; it has 'id'" in done.err
