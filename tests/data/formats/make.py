"""Write the files of this folder, one per format version, which `tests/test_file_formats.py` reads.

`PYTHONPATH=src python tests/data/formats/make.py` keeps files that exist: those of earlier versions are not
written again.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from logprobe import SamplingParams
from logprobe.analysis import DataSettings, save_activations
from logprobe.analysis.auditing.report import VERSION as AUDIT_VERSION
from logprobe.analysis.auditing.report import AuditReport, Errors, Evidence, Finding
from logprobe.analysis.baseline.file import VERSION as BASELINE_VERSION
from logprobe.analysis.baseline.file import BaselineWriter, Header
from logprobe.analysis.datasets.tasks import schema_of
from logprobe.analysis.distillation.formats import schema_of as distillation_schema
from logprobe.analysis.io.journal import VERSION as JOURNAL_VERSION
from logprobe.analysis.io.journal import AnsweredRows, Journal
from logprobe.analysis.io.tables import parquet_writer
from logprobe.analysis.rollout_files import write_rollouts
from logprobe.records import FlatLogprobs, LogprobsInfo, write_parquet
from logprobe.records.forms.versions import PARQUET_VERSION
from logprobe.records.forms.wire import VERSION as RECORD_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).parent
INFO = LogprobsInfo(model="golden", num_logprobs_asked=2, num_logprobs=2, logprobe_version="0.1.0")
SETTINGS = {"inputs": ["in.jsonl"], "text_column": "text"}
ROWS = [{"row": 0, "source": "in.jsonl", "logprob": -1.5}, {"row": 1, "source": "in.jsonl", "logprob": -0.25}]
DISTILLED: list[dict[str, Any]] = [
    {
        "row": 0,
        "num_positions": 1,
        "lost_mass": 0.25,
        "max_lost_mass": 0.25,
        "input_ids": [5, 7],
        "positions": [1],
        "target_token_ids": [[7, 3]],
        "target_logprobs": [[-0.5, -2.0]],
        "lost_masses": [0.25],
    }
]


def record() -> FlatLogprobs:
    """Return the record that the files of records and rollouts hold."""
    flat = FlatLogprobs([None], info=INFO)
    flat.append_rows([[30, 10, 20], [10, 10, 20]], [[-2.0, -0.5, -1.5], [-0.25, -0.25, -3.5]], [3, 1])
    return flat


class Batch(AnsweredRows, frozen=True, kw_only=True):
    """The rows of the data set that was scored."""

    def table(self, schema: pa.Schema) -> pa.Table:
        """Return the rows."""
        return pa.Table.from_pylist(ROWS, schema)


BATCH = Batch(end=2, num_rows=2, num_bytes=9, bad=[], source={"model": "golden"}, info=INFO)


def journal(path: Path, *, resume: bool = False) -> Journal[dict[str, int]]:
    """Open the run that scores the data set."""
    return Journal(path, schema_of(DataSettings()), SETTINGS, dict, resume=resume, force=False)


def _dataset(path: Path) -> None:
    tally = SimpleNamespace(add=lambda _table: None, summary=lambda num_bad: {"num_bad": num_bad})
    with journal(path) as run:
        run.complete([BATCH], tally)


def _unfinished(path: Path) -> None:
    with journal(path.with_suffix("")) as run:
        run.agree(BATCH.source)
        run.write(2, BATCH.table(schema_of(DataSettings())), [], INFO)
    (path / "lock").unlink()


def _rollouts(path: Path) -> None:
    rows = FlatLogprobs(info=INFO)
    rows.append_rows([[30, 10, 20]], [[-2.0, -0.5, -1.5]], [3])
    completion = SimpleNamespace(processed_logprobs=None, logprobs=rows, error=None)
    output = SimpleNamespace(request_id="r", prompt_token_ids=[1, 2], outputs=[completion], params=None)
    write_rollouts(path, [output])


def activations() -> list[Any]:
    """An output with hidden states and expert routes of two prompt tokens and a generated one."""
    states, routes = (
        np.arange(6, dtype=np.float32).reshape(3, 1, 2),
        np.arange(6, dtype=np.uint8).reshape(3, 2, 1),
    )
    completion = SimpleNamespace(index=0, token_ids=[3], hidden_states=states[2:], routed_experts=routes[2:])
    return [
        SimpleNamespace(
            request_id="r",
            prompt_token_ids=[1, 2],
            prompt_hidden_states=states[:2],
            prompt_routed_experts=routes[:2],
            outputs=[completion],
            info=INFO,
            params=SamplingParams(return_hidden_states="last"),
        )
    ]


def _distillation(path: Path) -> None:
    schema = distillation_schema("parquet", 64, has_turns=False)
    with parquet_writer(path, schema, INFO.to_json().encode()) as write:
        write(pa.Table.from_pylist(DISTILLED, schema))


def _baseline(path: Path) -> None:
    header = Header(
        vocabulary_size=64, vocabulary="v", model="golden", weights=None, weight_version=None, lora=None
    )
    logits = np.random.default_rng(0).normal(0, 3, (3, 64))
    rows = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    ids = np.array([4, 9, 6], np.int32)
    writer = BaselineWriter(path, header)
    writer.write(rows, ids, rows[np.arange(3), ids].astype(np.float64), [(0, 3, 0)])
    writer.finish()


def _audit(path: Path) -> None:
    evidence = Evidence(ask="echo", prompt="The sky", position=1, where="prompt", theirs=-1.0, ours=-2.0)
    report = AuditReport(
        created="2026-01-01T00:00:00Z",
        endpoint="http://127.0.0.1:8000",
        model="golden",
        lora=None,
        server=None,
        ours={"model": "golden"},
        max_nats=0.01,
        requests=1,
        rows=2,
        distributions={"echo": "raw"},
        errors=(Errors(ask="echo", distribution="raw", count=2, worst=1, mean=0.5),),
        steadiness=(),
        findings=(Finding(kind="shifted", severity="fault", title="t", count=1, of=2, evidence=(evidence,)),),
        stored=(),
        worst_nats=1.0,
    )
    path.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")


FILES: dict[str, Callable[[Path], object]] = {
    f"record-{RECORD_VERSION}.lgpb": lambda path: path.write_bytes(record().to_bytes()),
    f"records-{PARQUET_VERSION['records']}.parquet": lambda path: write_parquet(path, {"r": record()}),
    f"rollouts-{PARQUET_VERSION['rollouts']}.parquet": _rollouts,
    f"dataset-{PARQUET_VERSION['dataset']}.parquet": _dataset,
    f"unfinished-{JOURNAL_VERSION}.parquet.parts": _unfinished,
    f"distillation-{PARQUET_VERSION['distillation']}.parquet": _distillation,
    f"activations-{PARQUET_VERSION['activations']}.parquet": lambda path: save_activations(
        path, activations()
    ),
    f"baseline-{BASELINE_VERSION}.lpkl": _baseline,
    f"audit-{AUDIT_VERSION}.json": _audit,
}


if __name__ == "__main__":
    for name, write in FILES.items():
        if not (FOLDER / name).exists():
            write(FOLDER / name)
