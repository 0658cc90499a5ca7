"""`logprobe audit` of servers, of hand-made reports, and of rollouts."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from audit_samples import CONFORMING, FAILING, HOSTILE, NONCONFORMING, PASSING
from logprobe import SamplingParams
from logprobe.analysis import write_rollouts
from logprobe.analysis.auditing.report import AuditReport
from logprobe.cli.verdicts import print_conformance, print_report
from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from logprobe import LLM
    from logprobe.analysis.auditing.conformance import ConformanceReport

KEY = "sk-very-secret"


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[AuditReport], dict[str, Any]]:
    """Make the audit return a given report; record its arguments."""

    def answer(report: AuditReport) -> dict[str, Any]:
        asked: dict[str, Any] = {}

        def audit(endpoint: Any, llm: Any, **given: Any) -> AuditReport:
            asked.update(given, endpoint=endpoint, llm=llm)
            return report

        monkeypatch.setattr("logprobe.analysis.auditing.run.audit", audit)
        return asked

    return answer


@pytest.fixture(scope="module")
def url(tiny_llm: LLM, new_serving: Any) -> Iterator[str]:
    """The tiny Llama served with a key."""
    settings = ServerSettings(model_name="tiny", api_key=(KEY,))
    with new_serving(tiny_llm, settings) as (address, _):
        yield address


def test_our_own_server_passes_and_its_report_goes_into_files(
    cli: Callable[..., Any],
    url: str,
    tiny_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINY_KEY", KEY)
    report, picture = tmp_path / "report.json", tmp_path / "numbers.png"
    flags = ("--model", str(tiny_model_folder), "--api-key-env", "TINY_KEY", "--quick")
    done = cli("audit", url, *flags, "-o", str(report), "--plot", str(picture))
    assert done.out.startswith("numbers: PASS  worst "), done
    assert done.code == 0
    assert json.loads(report.read_text())["numbers"] == "PASS"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert all(KEY not in text for text in (done.out, done.err, report.read_text()))
    # The same numbers again: no change.
    again = cli("audit", f"{url}/v1", *flags, "--before", str(report), "--json")
    assert json.loads(again.out)["findings"] == json.loads(report.read_text())["findings"]
    assert again.code == 0


def test_a_key_that_is_refused_is_one_line_without_the_key(
    cli: Callable[..., Any], url: str, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another")
    done = cli("audit", url, "--model", str(tiny_model_folder))
    assert done.code == 2
    assert "--api-key-env" in done.error_line
    assert "sk-of-another" not in done.err


def test_an_endpoint_that_is_not_there_is_one_line(cli: Callable[..., Any], tiny_model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    done = cli("audit", f"http://127.0.0.1:{port}", "--model", str(tiny_model_folder))
    assert done.code == 1
    assert str(port) in done.error_line


def test_what_is_asked_arrives(
    cli: Callable[..., Any],
    tiny_model_folder: Path,
    adapter_folders: dict[str, Path],
    answering: Callable[[AuditReport], dict[str, Any]],
    tmp_path: Path,
) -> None:
    asked = answering(PASSING)
    (tmp_path / "before.json").write_text(json.dumps(PASSING.to_dict()))
    (tmp_path / "in.txt").write_text("the cat\nthe dog\nthe end")
    done = cli(
        *("audit", "http://127.0.0.1:1", "--model", str(tiny_model_folder)),
        *("--endpoint-model", "m", "--lora", f"mine={adapter_folders['wide']}"),
        *("--data", str(tmp_path / "in.txt"), "--lines", "--limit", "2"),
        *("--before", str(tmp_path / "before.json"), "--max-nats", "0.5", "--timeout-s", "7"),
    )
    assert done.code == 0, done
    assert asked["endpoint"].timeout_s == 7
    assert asked["llm"].lora == asked["lora"] == "mine"
    assert asked["before"] == PASSING
    names = ("model", "texts", "max_nats", "quick")
    assert [asked[name] for name in names] == ["m", ["the cat", "the dog"], 0.5, False]


@pytest.mark.parametrize(
    ("report", "flags", "code"),
    [
        (PASSING, (), 0),
        (FAILING, (), 1),
        (replace(PASSING, max_nats=1e-6), (), 1),  # the report has 3e-6
        (replace(PASSING, errors=()), (), 1),  # nothing was compared
        (PASSING, ("--json",), 0),
    ],
)
def test_the_exit_code_is_that_of_the_numbers(
    report: AuditReport,
    flags: tuple[str, ...],
    code: int,
    cli: Callable[..., Any],
    tiny_model_folder: Path,
    answering: Callable[[AuditReport], dict[str, Any]],
) -> None:
    answering(report)
    done = cli("audit", "http://127.0.0.1:1", "--model", str(tiny_model_folder), *flags)
    assert done.code == code
    assert not flags or "--json" not in flags or AuditReport.from_dict(json.loads(done.out)) == report


@pytest.mark.parametrize(("report", "code"), [(CONFORMING, 0), (NONCONFORMING, 1)])
def test_conformance_is_a_report_of_its_own(
    report: ConformanceReport,
    code: int,
    cli: Callable[..., Any],
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}

    def check(endpoint: Any, llm: Any, **given: Any) -> ConformanceReport:
        asked.update(given, endpoint=endpoint, llm=llm)
        return report

    monkeypatch.setattr("logprobe.analysis.auditing.conformance.check_conformance", check)
    words = ("audit", "http://127.0.0.1:1", "--model", str(tiny_model_folder), "--conformance")
    done = cli(*words, "--endpoint-model", "m")
    assert (done.code, asked["model"], asked["endpoint"].url) == (code, "m", "http://127.0.0.1:1")
    kinds = "text-wrong, ignored" if code else "no fault"
    assert done.out.startswith(f"API conformance: {kinds}\nhttp://127.0.0.1:8000, model m (")
    assert "\x1b" not in done.out
    assert HOSTILE not in done.out
    assert done.out.rstrip().endswith("chat.n (whole)")
    values = json.loads(cli(*words, "--json").out)
    assert values["conformance"] == [one.kind for one in report.faults]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((), "--model"),
        (("--model", "MODEL", "--conformance", "--before", "report.json"), "--before"),
        (("--model", "MODEL", "--lora", "mine"), "--lora"),
        (("--model", "MODEL", "--api-key-env", KEY), "--api-key-env"),
        (("--model", "MODEL", "--max-nat", "1"), "--max-nat"),
        (("--model", "MODEL", "--limit", "-1"), "--limit"),
    ],
)
def test_wrong_use_is_one_line_and_repeats_no_key(
    flags: tuple[str, ...], named: str, cli: Callable[..., Any], tiny_model_folder: Path
) -> None:
    words = [str(tiny_model_folder) if flag == "MODEL" else flag for flag in flags]
    done = cli("audit", "http://127.0.0.1:1", *words)
    assert done.code == 2
    assert named in done.error_line
    assert KEY not in done.err


def test_an_address_that_is_none_is_refused_before_a_model_is_loaded(
    cli: Callable[..., Any], tiny_model_folder: Path
) -> None:
    done = cli("audit", "127.0.0.1:8000", "--model", str(tiny_model_folder))
    assert (done.code, "loading" in done.err) == (2, False)
    assert "URL" in done.error_line


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"version": 77}', "\xff", None])
def test_a_file_that_is_no_report_is_refused_by_name(
    text: str | None, cli: Callable[..., Any], tiny_model_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "before.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    done = cli("audit", "http://127.0.0.1:1", "--model", str(tiny_model_folder), "--before", str(path))
    assert done.code == 1
    assert done.error_line.startswith(str(path))


def test_a_file_that_cannot_be_written_is_refused_before_any_request(
    cli: Callable[..., Any], tiny_model_folder: Path, tmp_path: Path
) -> None:
    done = cli(
        *("audit", "http://127.0.0.1:1", "--model", str(tiny_model_folder)),
        *("--plot", str(tmp_path / "none" / "numbers.png")),
    )
    assert done.code == 1
    assert "the folder does not exist" in done.error_line


def test_a_picture_without_matplotlib_is_refused_before_any_request(
    cli: Callable[..., Any], tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    flags = ("--model", str(tiny_model_folder), "--plot", str(tmp_path / "numbers.png"))
    done = cli("audit", "http://127.0.0.1:1", *flags)
    assert done.code == 2
    assert "--plot" in done.error_line


def test_the_first_line_is_the_verdict_and_steers_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_report(FAILING)
    first, second, _, finding, evidence, correction, *rest = capsys.readouterr().out.splitlines()
    assert first == "numbers: FAIL  worst 2.3100 nats (at most 0.01), temperature-unasked"
    assert second.endswith("412 requests, 9,120 rows")
    assert finding.startswith("fault  temperature-unasked: Numbers are after a temperature of 0.7")
    assert finding.endswith("(138 of 140)")
    assert "row 0, ' Paris': theirs -0.1234, ours -0.4321" in evidence
    assert correction == "       to correct: multiply by 0.7, and normalise"
    assert "\x1b" not in "".join([first, second, finding, evidence, correction, *rest])
    facts = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in rest if "  " in line}
    assert (
        facts["steadiness"] == "steady in 2 of 4 circumstances; beside 8 others: up to 2.0e-06 from row 3 on"
    )


def test_an_api_of_which_every_field_is_applied_is_a_short_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_conformance(replace(CONFORMING, fields={"chat.n (whole)": "applied"}, findings=(), server=None))
    assert capsys.readouterr().out == (
        "API conformance: no fault\nhttp://127.0.0.1:8000, model m; 80 requests\n\n"
    )


def test_a_report_without_anything_still_has_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    bare = replace(PASSING, distributions={}, errors=(), steadiness=(), findings=())
    print_report(bare)
    assert capsys.readouterr().out.startswith("numbers: FAIL  no number could be compared\n")


# -- rollouts ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rollouts(tiny_llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Samples of the tiny Llama, with log-probabilities after temperature (whole) and truncation (cut)."""
    folder = tmp_path_factory.mktemp("rollouts")
    drawn: dict[str, Any] = {"n": 3, "max_tokens": 12, "seed": 3, "ignore_eos": True, "temperature": 0.8}
    asked: dict[str, Any] = {"whole": drawn, "cut": drawn | {"top_p": 0.7}}
    for name, params in asked.items():
        sampling = SamplingParams(**params, logprobs=0, logprobs_mode="processed_logprobs")
        write_rollouts(folder / f"{name}.parquet", tiny_llm.generate(["the cat", "a dog and"], sampling))
    return {name: str(folder / f"{name}.parquet") for name in asked}


def test_rollouts_of_the_model_pass(
    cli: Callable[..., Any], rollouts: dict[str, str], tiny_model_folder: Path, tmp_path: Path
) -> None:
    flags = ("--model", str(tiny_model_folder), "-o", str(tmp_path / "report.json"))
    done = cli("audit", rollouts["whole"], *flags)
    assert done.code == 0, done
    first, _, stored, *_ = done.out.splitlines()
    assert first.startswith("PASS  worst ")
    assert first.endswith(", 72 tokens of 6 samples")
    assert stored.split("  ")[-1].strip() == "after temperature"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == json.loads(cli("audit", rollouts["whole"], *flags, "--json").out)
    assert report["num_tokens"] == 72


def test_rollouts_of_a_cut_distribution_say_what_to_apply(
    cli: Callable[..., Any], rollouts: dict[str, str], tiny_model_folder: Path
) -> None:
    done = cli("audit", rollouts["cut"], "--model", str(tiny_model_folder))
    assert done.code == 1
    assert done.out.startswith("TO CORRECT  worst ")
    assert "to correct: add log_kept_mass" in done.out
    other = cli("audit", rollouts["cut"], "--model", str(tiny_model_folder), "--temperature", "3")
    assert other.out.startswith("FAIL  worst ")


def test_two_files_are_compared_without_a_model(cli: Callable[..., Any], rollouts: dict[str, str]) -> None:
    done = cli("audit", rollouts["whole"], rollouts["whole"])
    assert done.code == 0
    assert done.out.startswith("PASS  worst 0 nats")
    assert "tokens differ" in cli("audit", rollouts["whole"], rollouts["cut"]).error_line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("whole",), "--model"),
        (("whole", "--plot", "numbers.png"), "--plot"),
        (("whole", "--before", "report.json"), "--before"),
        (("whole", "--quick"), "--quick"),
        (("whole", "--conformance"), "--conformance"),
        (("whole", "--timeout-s", "60"), "--timeout-s"),
        (("whole", "cut", "--model", "smollm2"), "--model"),
        (("http://127.0.0.1:1", "--top-p", "0.9"), "--top-p"),
        (("http://127.0.0.1:1", "whole"), "TRAINER.parquet"),
    ],
)
def test_flags_of_the_other_kind_are_refused(
    words: tuple[str, ...], named: str, cli: Callable[..., Any], rollouts: dict[str, str]
) -> None:
    done = cli("audit", *(rollouts.get(word, word) for word in words))
    assert done.code == 2
    assert named in done.error_line
