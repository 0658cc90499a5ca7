"""Files of earlier versions can be read, and a file of a newer version is an error that names the version.

`tests/data/formats/make.py` wrote one small file per format version.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from logprobe.analysis.auditing.report import AuditReport
from logprobe.analysis.baseline.file import BaselineReader
from logprobe.analysis.comparison import compare_stored
from logprobe.analysis.rollout_files import read_rollouts
from logprobe.errors import InputError
from logprobe.records import FlatLogprobs, LogprobsInfo, from_arrow, read_parquet, to_arrow
from logprobe.records.forms.versions import FORMAT_KEY, check_parquet

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).parent / "data" / "formats"
_spec = importlib.util.spec_from_file_location("golden_files", FOLDER / "make.py")
assert _spec
assert _spec.loader
golden = importlib.util.module_from_spec(_spec)
sys.modules["golden_files"] = golden
_spec.loader.exec_module(golden)


def test_there_is_a_file_of_every_format_in_its_present_version() -> None:
    assert golden.FILES.keys() <= {path.name for path in FOLDER.iterdir()}


def test_a_record() -> None:
    read = FlatLogprobs.from_bytes((FOLDER / "record-1.lgpb").read_bytes())
    assert read == golden.record()
    assert read.info == golden.INFO


def test_records_in_parquet() -> None:
    assert read_parquet(FOLDER / "records-1.parquet") == {"r": golden.record()}


def test_rollouts() -> None:
    [rollout] = read_rollouts(FOLDER / "rollouts-1.parquet")
    assert (rollout.name, rollout.token_ids.tolist(), rollout.logprobs.tolist()) == ("r-0", [30], [-2.0])
    assert rollout.prompt_ids is not None
    assert rollout.prompt_ids.tolist() == [1, 2]
    assert rollout.info == golden.INFO


def test_a_scored_data_set_and_the_record_of_its_run(tmp_path: Path) -> None:
    for name in ("dataset-1.parquet", "dataset-1.parquet.run.json"):
        shutil.copy(FOLDER / name, tmp_path)
    rows = pq.read_table(tmp_path / "dataset-1.parquet").select(["row", "source", "logprob"]).to_pylist()
    assert rows == golden.ROWS
    with golden.journal(tmp_path / "dataset-1.parquet", resume=True) as run:
        assert run.summary == {"num_bad": 0}


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A copy of the parts of an unfinished run, which no other user can write to."""
    parts = shutil.copytree(FOLDER / "unfinished-1.parquet.parts", tmp_path / "out.parquet.parts")
    for path in (parts, *parts.iterdir()):
        path.chmod(0o700)
    return parts


def test_an_unfinished_run_is_resumed(unfinished: Path) -> None:
    with golden.journal(unfinished.with_suffix(""), resume=True) as run:
        assert run.num_done == 2
        assert [row["logprob"] for table in run.groups() for row in table.to_pylist()] == [-1.5, -0.25]


def test_rows_for_distillation() -> None:
    table = pq.read_table(FOLDER / "distillation-1.parquet")
    assert table.to_pylist() == golden.DISTILLED
    check_parquet(table.schema.metadata, "the file")


def test_activations() -> None:
    path = FOLDER / "activations-1.parquet"
    table, [output] = pq.read_table(path), golden.activations()
    check_parquet(table.schema.metadata, "the file")
    assert table.schema.metadata[FORMAT_KEY] == b"activations/1"
    assert LogprobsInfo.from_json(table.schema.metadata[b"logprobe.info"]) == golden.INFO
    assert json.loads(table.schema.metadata[b"logprobe.layers"]) == "last"
    assert table["token_id"].to_pylist() == [1, 2, 3]
    assert table["completion"].to_pylist() == [None, None, 0]
    assert table["hidden_states"].to_pylist()[2] == output.outputs[0].hidden_states[0].tolist()
    assert table["routed_experts"].to_pylist()[:2] == output.prompt_routed_experts.tolist()


def test_a_baseline() -> None:
    with closing(BaselineReader(FOLDER / "baseline-1.lpkl")) as reader:
        [run] = reader.runs()
        assert reader.header.model == "golden"
    assert (run.context.tolist(), run.token_ids.tolist()) == ([3], [4, 9, 6])


def test_an_audit_report() -> None:
    report = AuditReport.from_dict(json.loads((FOLDER / "audit-2.json").read_text("utf-8")))
    assert report.model == "golden"
    assert report.findings[0].evidence[0].ours == -2.0


# -- newer versions ------------------------------------------------------------------------------------------


READERS: dict[str, Callable[[Path], object]] = {
    "records-1.parquet": read_parquet,
    "rollouts-1.parquet": lambda path: list(read_rollouts(path)),
    "dataset-1.parquet": lambda path: compare_stored(path, path),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ("{}/7", "format version 7, but only version 1 is supported; upgrade"),
        ("{}/0", "format version 0, but only version 1 is supported; write"),
        ("{}/x", "format version 'x'"),
        ("frobnication/1", "unknown format 'frobnication'"),
        ("\udcff", "unknown format"),
    ],
)
def test_a_parquet_file_of_another_version_is_refused(
    tmp_path: Path, name: str, stated: str, message: str
) -> None:
    table = pq.read_table(FOLDER / name)
    value = stated.format(name.partition("-")[0]).encode(errors="surrogateescape")
    newer = table.replace_schema_metadata(table.schema.metadata | {FORMAT_KEY: value}).drop_columns(
        table.column_names[0]
    )
    pq.write_table(newer, tmp_path / name)
    with pytest.raises(InputError, match=message):
        READERS[name](tmp_path / name)


def test_an_arrow_batch_of_a_newer_version_is_refused() -> None:
    batch = to_arrow(golden.record())
    newer = batch.replace_schema_metadata({FORMAT_KEY: b"records/2"})
    with pytest.raises(InputError, match="format version 2"):
        from_arrow(newer)


def test_a_parquet_file_that_another_program_wrote_again_is_read(tmp_path: Path) -> None:
    table = pq.read_table(FOLDER / "records-1.parquet")
    pq.write_table(table.replace_schema_metadata(None), tmp_path / "r.parquet")
    assert read_parquet(tmp_path / "r.parquet") == {"r": golden.record()}


def test_a_record_of_a_newer_version_is_refused_whatever_its_header_holds() -> None:
    data = (FOLDER / "record-1.lgpb").read_bytes()
    stop = 8 + int.from_bytes(data[4:8], "little")
    header = json.loads(data[8:stop]) | {"version": 4, "rows": "in another form"}
    head = json.dumps(header).encode()
    with pytest.raises(InputError, match=r"the record: has format version 4.*upgrade"):
        FlatLogprobs.from_bytes(b"LGPB" + len(head).to_bytes(4, "little") + head + data[stop:])


def test_an_unfinished_run_of_a_newer_version_is_refused(unfinished: Path) -> None:
    (unfinished / "settings.json").write_text('{"version": 3}', encoding="utf-8")
    with pytest.raises(InputError, match=r"settings\.json: has format version 3"):
        golden.journal(unfinished.with_suffix(""), resume=True)


def test_a_finished_run_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "dataset-1.parquet", tmp_path)
    (tmp_path / "dataset-1.parquet.run.json").write_text('{"version": 3}', encoding="utf-8")
    with pytest.raises(InputError, match=r"run\.json: has format version 3"):
        golden.journal(tmp_path / "dataset-1.parquet", resume=True)


def test_an_audit_report_of_a_newer_version_is_refused() -> None:
    with pytest.raises(InputError, match="format version 9"):
        AuditReport.from_dict({"version": 9})


def test_facts_that_a_newer_release_states_are_refused_with_its_version() -> None:
    text = '{"model":"m","typical_p":0.5,"logprobe_version":"7.1.0"}'
    with pytest.raises(InputError, match=r"typical_p.*logprobe 7\.1\.0.*upgrade"):
        LogprobsInfo.from_json(text)
