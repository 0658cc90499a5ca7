"""Datasets on actors of a real local Ray: the same rows as in one process, even if actors are killed."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

import ray_models
from logprobe import LLM
from logprobe.analysis import DataSettings, score_dataset
from logprobe.analysis.datasets.run import DatasetRun, OneModel
from logprobe.analysis.io.sources import find_sources
from logprobe.errors import InputError, ModelError, ParameterError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]  # Ray's own warnings are not ours

NUM_TEXTS = 2000
STORE_BYTES = 100 << 20
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A local Ray cluster with two CPUs and a small object store."""
    import ray

    folders = [str(Path(ray_models.__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))  # for Ray's processes
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=0,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
        )
        yield
        ray.shutdown()


@pytest.fixture
def pool(cluster: None, tiny_model_folder: Path) -> Callable[..., Any]:
    """A pool of one actor with the tiny model, unless settings say otherwise."""
    from logprobe.integrations.ray import RayPool

    del cluster

    def pool_of(open_llm: Any = None, **settings: Any) -> RayPool:
        model = partial(LLM, str(tiny_model_folder), kv_cache_memory_bytes=1 << 21)
        return RayPool(open_llm or model, **{"ray_actors": 1, "ray_cpus": 1} | settings)

    return pool_of


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """Write 2,000 texts, some of them invalid; return the file's name."""
    chance = random.Random(11)  # noqa: S311 - no secret
    words = ["the", "cat", "and", "dog", "é", "🌊"]
    lines = [
        json.dumps({"id": place, "text": " ".join(chance.choices(words, k=chance.randint(2, 12)))})
        for place in range(NUM_TEXTS)
    ]
    lines[5], lines[1200] = "{broken", json.dumps({"id": 1200, "text": ""})
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def assert_same_rows(path: Path, whole: Path) -> None:
    got, want = pq.read_table(path), pq.read_table(whole)
    assert got.schema.equals(want.schema, check_metadata=True)
    for name in got.column_names:
        mine, theirs = got[name].to_pylist(), want[name].to_pylist()
        if isinstance(mine[0], float):  # the last bit may depend on the batch
            assert mine == pytest.approx(theirs, rel=1e-4), name
        else:
            assert mine == theirs, name
    errors, all_errors = (Path(f"{one}.errors.jsonl") for one in (path, whole))
    assert errors.exists() == all_errors.exists()
    assert not errors.exists() or errors.read_text() == all_errors.read_text()


def kill_when_it_holds(victim: Path, done: threading.Event) -> None:
    """Kill the process whose id is in a file, once the file exists."""
    while not done.wait(0.05):
        if victim.exists() and victim.read_text():
            os.kill(int(victim.read_text()), signal.SIGKILL)
            return


def test_two_actors_of_which_one_is_killed_give_the_rows_of_one_process(
    tiny_llm: LLM, tiny_model_folder: Path, pool: Any, texts: str, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    settings = DataSettings(keep_columns=("id",))
    want = score_dataset(tiny_llm, texts, tmp_path / "one.parquet", settings=settings)
    done = threading.Event()
    killer = threading.Thread(target=kill_when_it_holds, args=(notes / "victim", done))
    killer.start()
    steps: list[int] = []
    try:
        two = pool(partial(ray_models.HoldingLLM, str(tiny_model_folder), str(notes)), ray_actors=2)
        workers = two.workers(find_sources([texts]), settings)
        run = DatasetRun(workers, advance=lambda _, rows: steps.append(rows))
        found = run.to_file(tmp_path / "two.parquet")
    finally:
        done.set()
        killer.join()
    assert_same_rows(tmp_path / "two.parquet", tmp_path / "one.parquet")
    assert (found.num_rows, found.num_bad) == (NUM_TEXTS - 2, 2) == (want.num_rows, want.num_bad)
    assert found.logprob == pytest.approx(want.logprob, rel=1e-6)
    assert sum(steps) == NUM_TEXTS
    assert len(steps) > 4  # progress is reported during the run
    who = {note.name.partition(".")[0] for note in notes.glob("*.*")}
    assert len(who) == 3  # the two first actors, and the replacement of the killed one


def test_questions_with_choices_and_bad_rows_are_those_of_one_process(
    tiny_llm: LLM, pool: Any, tmp_path: Path
) -> None:
    rows: list[Any] = [
        {"q": "the cat", "options": ["and", "the dog"], "gold": "B", "tag": {"deep": [1, None]}},
        {"q": 5, "options": ["and", "the dog"], "gold": 0, "tag": None},
        {"q": "a dog", "options": ["in"], "gold": 0, "tag": "x"},
        {"q": "", "options": '["the", "é🌊"]', "gold": 1, "tag": "é"},
        {"q": "a\ud800", "options": ["in", "on"], "gold": 0, "tag": "x"},
        {"q": "a", "options": ["in", "on"], "gold": 0, "tag": "\udfff"},
    ]
    source = tmp_path / "q.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = DataSettings(
        context_column="q", choices_column="options", answer_column="gold", keep_columns=("tag",)
    )
    for model, name in ((tiny_llm, "one"), (pool(), "ray")):
        summary = score_dataset(model, str(source), tmp_path / f"{name}.parquet", settings=settings)
        assert (summary.num_rows, summary.num_bad) == (2, 4)
    assert_same_rows(tmp_path / "ray.parquet", tmp_path / "one.parquet")


class StoppedError(Exception):
    """Any exception that stops a run."""


def stop_after(num_rows: int) -> Callable[[int, int], None]:
    counts: list[int] = []

    def advance(_: int, rows: int) -> None:
        counts.append(rows)
        if sum(counts) > num_rows:
            raise StoppedError

    return advance


@pytest.mark.parametrize("first", ["one process", "ray"])
def test_a_run_that_was_stopped_is_resumed_on_the_other_engine(
    tiny_llm: LLM, pool: Any, texts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    monkeypatch.setattr("logprobe.analysis.io.journal.ROWS_A_PART", 512)
    monkeypatch.setattr("logprobe.analysis.io.journal.SECONDS_A_PART", math.inf)
    sources, settings, out = find_sources([texts]), DataSettings(), tmp_path / "o.parquet"
    one, many = OneModel(tiny_llm, sources, settings), pool().workers(sources, settings)
    before, after = (one, many) if first == "one process" else (many, one)
    with pytest.raises(StoppedError):
        DatasetRun(before, advance=stop_after(1000)).to_file(out)
    steps: list[int] = []
    DatasetRun(after, advance=lambda _, rows: steps.append(rows)).to_file(out, resume=True)
    assert sum(steps) == NUM_TEXTS - 512
    DatasetRun(one).to_file(tmp_path / "whole.parquet")
    assert_same_rows(out, tmp_path / "whole.parquet")


def test_a_model_that_actors_cannot_load_is_an_error_of_one_line_and_leaves_nothing(
    pool: Any, texts: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"no model '.*no-such-model': known names are"):
        score_dataset(pool(partial(LLM, str(tmp_path / "no-such-model"))), texts, tmp_path / "o.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


def test_settings_that_the_model_cannot_follow_name_their_parameter(
    pool: Any, texts: str, tmp_path: Path
) -> None:
    settings = DataSettings(truncation="window", window=999)
    with pytest.raises(ParameterError) as caught:
        score_dataset(pool(), texts, tmp_path / "o.parquet", settings=settings)
    assert caught.value.parameter == "window"


def test_a_file_that_breaks_within_ends_the_run_by_its_name(pool: Any, tmp_path: Path) -> None:
    import pyarrow as pa

    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": [f"the cat {row}" for row in range(1500)]}), source)
    data = bytearray(source.read_bytes())
    data[40:400] = bytes(360)
    source.write_bytes(data)
    with pytest.raises(InputError, match=r"in\.parquet: is damaged after row"):
        score_dataset(pool(), str(source), tmp_path / "o.parquet")


def test_what_a_cluster_cannot_do_is_refused_by_name(pool: Any, texts: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="standard input: cannot be read with --engine ray"):
        score_dataset(pool(), "-", tmp_path / "o.parquet")
    with pytest.raises(ParameterError, match="ray_actors: the cluster has room for 2"):
        score_dataset(pool(ray_actors=3), texts, tmp_path / "o.parquet")
    with pytest.raises(ParameterError, match="ray_address: ray:// addresses"):
        pool(ray_address="ray://head:10001")


def test_the_command_starts_a_ray_of_its_own_and_says_nothing_else(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    """Relative names refer to the working directory; bad rows are reported as without Ray."""
    (tmp_path / "model").symlink_to(tiny_model_folder)
    (tmp_path / "in.jsonl").write_text('{"text": "the cat"}\n{"text": ""}\n{"text": "a dog"}\n')
    command = [str(Path(sys.executable).with_name("logprobe")), "dataset", "in.jsonl", "--engine", "ray"]
    flags = ["--ray-address", "local", "--ray-actors", "1", "--ray-cpus", "1", "--model", "model"]
    done = subprocess.run(
        [*command, *flags], capture_output=True, text=True, check=False, timeout=PATIENCE_S, cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["row"] for row in rows] == [0, 2]
    assert "bad row: in.jsonl, line 2: text: is empty" in done.stderr
    assert done.stderr.splitlines()[-1] == "error: 1 bad rows; see standard error"
    own = [line for line in done.stderr.splitlines() if "core_worker" not in line]  # Ray's native part
    assert [line for line in own if "ray" in line.lower()] == []
