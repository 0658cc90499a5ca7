"""A data set scored by the actors of a Ray cluster, each with a model of its own.

A task beside the driver reads and checks the rows, actors score them batch by batch, and the driver writes
them in order. An actor that dies is started again, and its batches are scored again. What crosses is msgpack
of known types in Arrow tables; how Ray itself moves them, and names of classes, is Ray's.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import pyarrow as pa

from logprobe.analysis.datasets.rows import Question  # noqa: TC001 - msgspec reads the field
from logprobe.analysis.datasets.run import RowScorer, ScoredBatch, question_batches
from logprobe.analysis.datasets.settings import RaySettings
from logprobe.analysis.io.sources import STDIN, BadRow
from logprobe.errors import EngineError, InputError, LogprobeError, ParameterError, require
from logprobe.transport.codec import Codec

try:
    import ray
    import ray.data
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as missing:
    raise ImportError("logprobe.integrations.ray needs Ray; pip install 'logprobe[ray]'") from missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logprobe.analysis.datasets.settings import RowSettings
    from logprobe.analysis.io.sources import Source
    from logprobe.analysis.scorer import Scorer

    OpenScorer: TypeAlias = Callable[[], Scorer]

MAX_RESTARTS: Final = 4  # of each actor, on average, before the run ends
MESSAGE: Final = "message"  # the one column of all tables


class RowBatch(msgspec.Struct, frozen=True, tag=True):
    """Checked rows, as many as one call scores."""

    rows: list[Question | BadRow]


class Failed(msgspec.Struct, frozen=True, tag=True, eq=False):
    """Why the run cannot go on."""

    error: LogprobeError


_asked: Codec[RowBatch | Failed] = Codec(RowBatch | Failed)
_answered: Codec[ScoredBatch | Failed] = Codec(ScoredBatch | Failed)


class RayPool:
    """Models on the actors of a Ray cluster: `score_dataset` takes it in place of an `LLM`.

    Args:
        open_llm: makes an actor's model: a class, function or `functools.partial` that every machine of the
            cluster can import, such as `partial(LLM, "smollm2")`.
        settings: the fields of `RaySettings`.

    Raises:
        ParameterError: a setting that cannot be used.
    """

    def __init__(self, open_llm: OpenScorer, **settings: Any) -> None:
        self._open_llm = open_llm
        self._settings = RaySettings(**settings)

    def workers(self, sources: Sequence[Source], settings: RowSettings) -> RayWorkers:
        """What scores the rows of some files.

        Raises:
            InputError: standard input, which no other process can read.
        """
        if any(source.name == STDIN for source in sources):
            raise InputError("standard input: cannot be read with --engine ray; save it to a file")
        return RayWorkers(self._open_llm, sources, settings, self._settings)


class RayWorkers:
    """Scores the rows of some files on a cluster; one run at a time."""

    def __init__(
        self, open_llm: OpenScorer, sources: Sequence[Source], settings: RowSettings, cluster: RaySettings
    ) -> None:
        self.sources = sources
        self.settings = settings
        self._open_llm = open_llm
        self._cluster = cluster

    def source_of_numbers(self) -> dict[str, str | None]:
        """Nothing yet: the actors load the model, and each batch says what gave it."""
        return {}

    def scored(self, *, skip: int) -> Iterator[ScoredBatch]:
        """As `Workers.scored`.

        Raises:
            ParameterError: the cluster has no room for so many actors, or cannot be reached.
            InputError: a file that cannot be read.
            EngineError: the actors cannot go on.
        """
        with _connected(self._cluster.ray_address):
            try:
                for row in self._dataset(skip).iter_rows():
                    yield _opened(row[MESSAGE])
            except RayError as error:
                raise EngineError(
                    f"ray: {_last_line(error)}; its logs say more, and resume=True (--resume) goes on"
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
                num_cpus=0,  # the actors may have them all
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
    """Batches of checked rows, one a table, or why they end."""
    _go_to(folder)
    (skip,) = start["skip"].to_pylist()
    try:
        for rows in question_batches(sources, settings, skip=skip):
            yield _table(_asked.encode(RowBatch(rows)))
    except LogprobeError as error:
        yield _table(_asked.encode(Failed(error)))


class StartCounter:
    """How often actors were started: Ray starts one that dies again without end."""

    def __init__(self) -> None:
        self._num_starts = 0

    def count(self) -> int:
        """Count one more; the number with it."""
        self._num_starts += 1
        return self._num_starts


class ScoringActor:
    """A model that answers one batch after another."""

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
                    f"ray: actors were started {max_starts} times and died; give each more memory, by fewer "
                    "actors (--ray-actors) or a smaller model, and resume=True (--resume) goes on"
                )
            self._scorer = RowScorer(open_llm(), settings)
        except LogprobeError as error:
            self._error = error

    def __call__(self, messages: pa.Table) -> pa.Table:
        """The answer to each message, in order."""
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
    differ = f"a machine of the cluster has logprobe {here}, the driver {release}"
    require(here == release, "engine", f"{differ}; install the same on all")


def _go_to(folder: str) -> None:
    """Make relative names mean what they mean to the driver, where its folder is here too."""
    if Path(folder).is_dir():
        os.chdir(folder)


def _table(*messages: bytes) -> pa.Table:
    return pa.table({MESSAGE: pa.array(messages, pa.binary())})


# -- beside the driver ---------------------------------------------------------------------------------------


def _opened(data: bytes) -> ScoredBatch:
    message = _answered.decode(data)
    if isinstance(message, Failed):
        raise message.error
    return message


def _last_line(error: Exception) -> str:
    """What Ray says of an error at the end of its traces: the error itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


@contextmanager
def _connected(address: str | None) -> Iterator[None]:
    """Within a cluster: the caller's own where there is one, else one that is left at the end."""
    if ray.is_initialized():
        with _quiet():
            yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of a cluster that is started here
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        named = "a cluster" if address is None else repr(address)
        raise ParameterError(
            "ray_address", f"{named} cannot be reached ({_last_line(error)}); is Ray started there?"
        ) from error
    try:
        with _quiet():
            yield
    finally:
        ray.shutdown()


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray Data for batches: in order, each a block of its own, without bars and lines of its own."""
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.target_max_block_size = 1  # bytes: else one actor would wait for megabytes of rows
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
