"""Score a data set with the actors of a Ray cluster, each of which loads its own model.

A task on the driver's machine reads and checks the rows, actors score them batch by batch, and the driver
writes the results in order. An actor that dies is restarted, and its batches are scored again. Messages are
encoded as msgpack, decoded only to known types, and transferred by Ray Data in Arrow tables.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from logprobe._arrow import pa
from logprobe.analysis.datasets.rows import Question  # noqa: TC001 - msgspec reads the field
from logprobe.analysis.datasets.run import RowScorer, ScoredBatch, question_batches
from logprobe.analysis.datasets.settings import RaySettings
from logprobe.analysis.io.sources import STDIN, BadRow
from logprobe.errors import (
    EngineError,
    InputError,
    LogprobeError,
    MissingPackageError,
    ParameterError,
    require,
)
from logprobe.transport.codec import Codec

try:
    import ray
    import ray.data
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as missing:
    raise MissingPackageError("logprobe.integrations.ray needs Ray; pip install 'logprobe[ray]'") from missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logprobe.analysis.datasets.settings import RowSettings
    from logprobe.analysis.io.sources import Source
    from logprobe.analysis.scorer import Scorer

    OpenScorer: TypeAlias = Callable[[], Scorer]

MAX_RESTARTS: Final = 4  # average number of restarts per actor after which the run fails
MESSAGE: Final = "message"  # the only column of all tables


class RowBatch(msgspec.Struct, frozen=True, tag=True):
    """Checked rows that an actor scores in one call."""

    rows: list[Question | BadRow]


class Failed(msgspec.Struct, frozen=True, tag=True, eq=False):
    """An error that ends the run."""

    error: LogprobeError


_asked: Codec[RowBatch | Failed] = Codec(RowBatch | Failed)
_answered: Codec[ScoredBatch | Failed] = Codec(ScoredBatch | Failed)


class RayPool:
    """Models on the actors of a Ray cluster; `score_dataset` accepts a pool in place of an `LLM`.

    Args:
        open_llm: model factory, which each actor calls: a class, function or `functools.partial` that every
            machine in the cluster can import, such as `partial(LLM, "smollm2")`.
        settings: fields of `RaySettings`.

    Raises:
        ParameterError: a setting is invalid.
    """

    def __init__(self, open_llm: OpenScorer, **settings: Any) -> None:
        self._open_llm = open_llm
        self._settings = RaySettings(**settings)

    def workers(self, sources: Sequence[Source], settings: RowSettings) -> RayWorkers:
        """Return an object that scores the rows of `sources` on the cluster.

        Raises:
            InputError: a source is standard input, which other processes cannot read.
        """
        if any(source.name == STDIN for source in sources):
            raise InputError("standard input: cannot be read with --engine ray; save it to a file")
        return RayWorkers(self._open_llm, sources, settings, self._settings)


class RayWorkers:
    """Scores the rows of files with the actors of a cluster, one data set at a time."""

    def __init__(
        self, open_llm: OpenScorer, sources: Sequence[Source], settings: RowSettings, cluster: RaySettings
    ) -> None:
        self.sources = sources
        self.settings = settings
        self._open_llm = open_llm
        self._cluster = cluster

    def source_of_numbers(self) -> dict[str, str | None]:
        """Return an empty dict, because every batch of results states its own source."""
        return {}

    def scored(self, *, skip: int) -> Iterator[ScoredBatch]:
        """Yield scored batches in order, after the first `skip` rows, as in `Workers.scored`.

        Raises:
            ParameterError: the cluster cannot run the requested actors, or cannot be reached.
            InputError: a file cannot be read.
            EngineError: the actors failed.
        """
        with _connected(self._cluster.ray_address):
            try:
                for row in self._dataset(skip).iter_rows():
                    yield _opened(row[MESSAGE])
            except RayError as error:
                raise EngineError(
                    f"ray: {_last_line(error)}; see Ray's logs, and continue with resume=True (--resume)"
                ) from error

    def _dataset(self, skip: int) -> Any:
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        share = self._cluster.share(machines)
        here = ray.get_runtime_context().get_node_id()
        beside = NodeAffinitySchedulingStrategy(here, soft=False)
        counter = ray.remote(num_cpus=0)(StartCounter).options(scheduling_strategy=beside).remote()
        read = {"folder": str(Path.cwd()), "sources": list(self.sources), "settings": self.settings}
        load = {
            "folder": str(Path.cwd()),
            "open_llm": self._open_llm,
            "settings": self.settings,
            "release": version("logprobe"),
            "max_starts": share.num_actors * (1 + MAX_RESTARTS),
        }
        return (
            ray.data.from_arrow(pa.table({"skip": [skip]}))
            .map_batches(
                read_rows_here,
                batch_format="pyarrow",
                fn_kwargs=read,
                num_cpus=0,  # leave all CPUs to the actors
                label_selector={"ray.io/node-id": here},
            )
            .map_batches(
                ScoringActor,
                batch_size=1,
                batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(size=share.num_actors),
                fn_constructor_kwargs=load | {"counter": counter},
                num_cpus=share.num_cpus,
                num_gpus=share.num_gpus,
            )
        )


# -- on the machines of the cluster --------------------------------------------------------------------------


def read_rows_here(
    start: pa.Table, folder: str, sources: Sequence[Source], settings: RowSettings
) -> Iterator[pa.Table]:
    """Yield one table per batch of checked rows; if reading fails, the last table holds the error."""
    _go_to(folder)
    (skip,) = start["skip"].to_pylist()
    try:
        for rows in question_batches(sources, settings, skip=skip):
            yield _table(_asked.encode(RowBatch(rows)))
    except LogprobeError as error:
        yield _table(_asked.encode(Failed(error)))


class StartCounter:
    """Counts how often actors start, because Ray itself restarts dead actors without limit."""

    def __init__(self) -> None:
        self._num_starts = 0

    def count(self) -> int:
        """Increment and return the count."""
        self._num_starts += 1
        return self._num_starts


class ScoringActor:
    """An actor that loads a model and scores batches."""

    def __init__(
        self,
        folder: str,
        open_llm: OpenScorer,
        settings: RowSettings,
        release: str,
        max_starts: int,
        counter: Any,
    ) -> None:
        _go_to(folder)
        self._scorer: RowScorer | None = None
        try:
            _check_release(release)
            if ray.get(counter.count.remote()) > max_starts:
                raise EngineError(
                    f"ray: actors kept dying and were started {max_starts} times in total; give each more "
                    "memory (fewer actors with --ray-actors, or a smaller model), and continue with "
                    "resume=True (--resume)"
                )
            self._scorer = RowScorer(open_llm(), settings)
        except LogprobeError as error:
            self._error = error

    def __call__(self, messages: pa.Table) -> pa.Table:
        """Return a table with the reply to each message, in order."""
        return _table(*(self._answer(data) for data in messages[MESSAGE].to_pylist()))

    def _answer(self, data: bytes) -> bytes:
        message = _asked.decode(data)
        if isinstance(message, Failed):
            return _answered.encode(message)
        if self._scorer is None:
            return _answered.encode(Failed(self._error))
        try:
            return _answered.encode(self._scorer.score(message.rows))
        except LogprobeError as error:
            return _answered.encode(Failed(error))


def _check_release(release: str) -> None:
    here = version("logprobe")
    differ = f"a machine of the cluster has logprobe {here}, but the driver program has {release}"
    require(here == release, "engine", f"{differ}; install the same version on both")


def _go_to(folder: str) -> None:
    """Change to the driver's working folder if it exists on this machine, so that relative paths work."""
    if Path(folder).is_dir():
        os.chdir(folder)


def _table(*messages: bytes) -> pa.Table:
    return pa.table({MESSAGE: pa.array(messages, pa.binary())})


# -- in the driver -------------------------------------------------------------------------------------------


def _opened(data: bytes) -> ScoredBatch:
    message = _answered.decode(data)
    if isinstance(message, Failed):
        raise message.error
    return message


def _last_line(error: Exception) -> str:
    """Return the last line of Ray's message, which is the error after the tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


@contextmanager
def _connected(address: str | None) -> Iterator[None]:
    """Use the caller's Ray connection if there is one; otherwise connect, and disconnect at the end."""
    if ray.is_initialized():
        with _quiet():
            yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # applies if this starts a cluster
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address in {None, "local"}:
            fault, remedy = "Ray can neither find nor start a cluster", "run ray start, and pass its address"
        else:
            fault, remedy = f"cannot connect to {address!r}", "check the address, and that Ray runs there"
        raise ParameterError("ray_address", f"{fault} ({_last_line(error)}); {remedy}") from error
    try:
        with _quiet():
            yield
    finally:
        ray.shutdown()


@contextmanager
def _quiet() -> Iterator[None]:
    """Configure Ray Data to keep the order and make one block per batch, without progress bars or logs."""
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.target_max_block_size = 1  # bytes; otherwise an actor would wait for megabytes of rows
    context.enable_progress_bars = False
    loggers = [logging.getLogger(name) for name in ("ray", "ray.data")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with ray.data.DataContext.current(context):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
