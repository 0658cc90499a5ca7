"""Parts of an output: numbers of one model in one file, and nothing left of a run that wrote none."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.errors import InputError
from logprobe.scoring import DataSettings
from logprobe.scoring.data.journal import Journal
from logprobe.scoring.data.rows import schema_of

if TYPE_CHECKING:
    from pathlib import Path

ASKED = {"inputs": ["in.jsonl"], "text_column": "text"}
OURS = {"model": "m", "weights": "float32 published"}
THEIRS = {"model": "m", "weights": "bfloat16 plain"}


def journal(folder: Path, *, resume: bool = True, **known: str) -> Journal:
    schema = schema_of(DataSettings())
    return Journal(folder / "o.parquet", schema, ASKED | known, resume=resume, force=False)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The folder of a run that learnt with its first row which model gives them."""
    run = journal(tmp_path, resume=False)
    run.agree(OURS)
    run.write(1, [{"row": 0, "logprob": -1.0}], [], None)
    run.agree(OURS)
    with pytest.raises(
        InputError, match="rows of weights 'bfloat16 plain' after rows of 'float32 published'"
    ):
        run.agree(THEIRS)
    run.leave()
    return tmp_path


def test_what_gave_the_first_rows_is_noted_beside_them(begun: Path) -> None:
    noted: Any = json.loads((begun / "o.parquet.parts/settings.json").read_text())
    assert noted == ASKED | OURS


def test_a_run_goes_on_with_the_same_model_however_late_it_is_known(begun: Path) -> None:
    assert journal(begun, **OURS).num_done == 1
    late = journal(begun)
    late.agree(OURS)
    with pytest.raises(InputError, match="after rows of 'float32 published'"):
        late.agree(THEIRS)
    with pytest.raises(InputError, match="the run to resume had another weights"):
        journal(begun, **THEIRS)


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path: Path) -> None:
    journal(tmp_path, resume=False).leave()
    assert list(tmp_path.iterdir()) == []
