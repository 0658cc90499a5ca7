"""`ProcessEngine`: runs the native engine in one or several engine processes.

Each process runs its own requests and is represented by a `Replica`. Requests are validated in the parent
process.
"""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Self

from logprobe import runtime
from logprobe.engine.backends.process.admission import Admission, processor_names
from logprobe.engine.backends.process.launcher import Launcher
from logprobe.engine.backends.process.orders import Start, changed_model
from logprobe.engine.backends.process.replica import Backlog, Replica
from logprobe.engine.backends.router import DOWN, SILENT, UP, Router
from logprobe.engine.creator import Creator
from logprobe.engine.protocol import EngineStats
from logprobe.errors import (
    EngineClosedError,
    EngineError,
    EngineUnavailableError,
    LogprobeError,
    ModelError,
)
from logprobe.kernels.threads import num_threads
from logprobe.models.loading import save_state
from logprobe.models.lora import CONFIG, WEIGHTS, check_files
from logprobe.processors import ModelFacts
from logprobe.transport.messages import (
    DropLora,
    DropWeights,
    ForgetPrefixes,
    LoadLora,
    LoadWeights,
    Submit,
    TakeWeights,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from logprobe.config import EngineConfig
    from logprobe.engine.backends.process.orders import Answer, Order, Ready
    from logprobe.engine.protocol import Capabilities, Layout
    from logprobe.text.edge import TextEdge
    from logprobe.transport.messages import Admitted, Asked, Command, Event, Request


class ProcessEngine:
    """Implements `Core` on engine processes.

    Raises:
        ModelError: the model cannot be loaded.
        EngineError: a process exited before it was ready.
    """

    _publish: Callable[[Iterable[Event]], None]
    _end: Callable[[LogprobeError], None]

    def __init__(self, config: EngineConfig, text: TextEdge) -> None:
        names = processor_names(config.logits_processors)
        self._settings = config.keywords() | {"logits_processors": names, "process": False}
        # What a restarted process must load: LoRA weights, and replaced model weights.
        self._loras: dict[int, tuple[LoadLora, TemporaryDirectory[str]]] = {}  # with copies of their folders
        self._left: list[TemporaryDirectory[str]] = []  # unused copies, removed by `close`
        self._weights: LoadWeights | None = None
        self._weights_files: FileStats | None = None  # if read from a caller's folder
        self._weight_version: str | None = None  # version of the checkpoint; set by the first start
        self._accepting = runtime.Lock()  # guards the first assignment of `_weight_version`
        self._passing = ExitStack()  # owns the temporary folder of `_weights`, if any
        # Weights that are loaded but not yet in use, their file stats, and the owner of their folder.
        self._ready: tuple[LoadWeights, FileStats | None, ExitStack] | None = None
        self._creator = Creator()
        self._is_routing = runtime.Lock()
        num_processes = config.parallel_config.data_parallel_size
        self._launcher = Launcher(max(num_threads() // num_processes, 1))
        self._router = Router(num_processes)
        self._replicas: list[Replica] = []
        self._replicas += [
            Replica(name, self._launcher, self._starting, self._accept, self._take)
            for name in _names(num_processes)
        ]
        atexit.register(self._close_replicas)
        try:
            ready = min([one.ready.result() for one in self._replicas], key=lambda ready: ready.kv_bytes)
        except BaseException:
            self._close_replicas()
            raise
        # Requests are admitted for the smallest KV cache; restarted processes use the same size.
        self._settings["kv_cache_memory_bytes"] = ready.kv_bytes
        self._open(config, text, ready)

    def _open(self, config: EngineConfig, text: TextEdge, ready: Ready) -> None:
        """Set `_capabilities` and `_admission`, from what a process has reported."""
        own = ready.capabilities
        self._capabilities = replace(own, num_processes=config.parallel_config.data_parallel_size)
        facts = ModelFacts(
            vocab_size=own.vocab_size,
            eos_token_ids=frozenset(ready.eos_token_ids),
            text=text,
        )
        resolved = replace(config, device=own.device, dtype=own.dtype)  # the values that processors see
        self._admission = Admission(resolved, own, facts)

    def start(self, publish: Callable[[Iterable[Event]], None], end: Callable[[LogprobeError], None]) -> None:
        """Call `publish` with the events of requests from now on, and `end` once on `close`."""
        self._publish, self._end = publish, end

    def admit(self, request: Request) -> Admitted:
        """Validate a request.

        Raises:
            ParameterError: the request can never be served.
        """
        return self._admission.admit(request)

    def send(self, command: Command) -> None:
        """Send a command to every process, or to the one that runs the command's request."""
        match command:
            case Submit(requests):
                self._submit(requests)
            case ForgetPrefixes():
                with self._is_routing:
                    self._router.forget()
                self._send_all(command)
            case DropLora(number):
                _, copy = self._loras.pop(number)  # a process that starts from now on does not load it
                self._send_all(command)
                self._remove(copy)
            case DropWeights():
                self._drop_ready()
                self._send_all(command)
            case _:
                for replica in self._replicas:
                    if replica.has(command.request_id):
                        replica.send(command)

    def _submit(self, requests: Sequence[Admitted]) -> None:
        with self._is_routing:
            queued = [replica.num_queued_tokens for replica in self._replicas]
            ranks = [DOWN if not one.is_up else SILENT if one.silent_s() else UP for one in self._replicas]
            portions: list[list[Admitted]] = [[] for _ in self._replicas]
            for admitted in requests:
                chosen = self._router.choose(admitted, queued, ranks)
                queued[chosen] += Backlog(admitted).num_tokens
                portions[chosen].append(admitted)
            # Under the lock, so that all processes have the same order of calls and weight replacements.
            for replica, portion in zip(self._replicas, portions, strict=True):
                if portion:
                    replica.submit(portion)

    @property
    def is_busy(self) -> bool:
        """True while requests run or wait."""
        return any(replica.num_queued_tokens for replica in self._replicas)

    def ask(self, command: Asked) -> Layout | None:
        """Execute a command in every process; a load that fails in one process is undone in all.

        Raises:
            ModelError: the weights cannot be read, or do not fit the model.
            EngineError: a process exited before it answered, or the weights cannot be copied.
            EngineClosedError: the engine was closed before all processes had answered.
        """
        match command:
            case LoadLora():
                self._load_lora(command)
            case LoadWeights():
                return self._load_weights(command)
            case TakeWeights():
                self._take_weights(command)
        return None

    def _load_lora(self, command: LoadLora) -> None:
        """Load LoRA weights from a copy of their folder, which processes started later load as well."""
        check_files(command.name, Path(command.path))
        with copying():
            copy = TemporaryDirectory(prefix="logprobe-lora-")
        try:
            with copying():
                for file in (CONFIG, WEIGHTS):
                    shutil.copyfile(Path(command.path) / file, Path(copy.name) / file)
            order = LoadLora(command.number, command.name, copy.name, is_passing=True)
            self._loras[command.number] = order, copy  # also for a process that starts meanwhile
            self._ask_all(order, DropLora(command.number))
        except BaseException:
            self._loras.pop(command.number, None)
            self._remove(copy)
            raise

    def _remove(self, copy: TemporaryDirectory[str]) -> None:
        """Delete a copy of a LoRA folder; leave it to `close` if a process is starting, which may read it."""
        if all(replica.is_up for replica in self._replicas):
            copy.cleanup()
        else:
            self._left.append(copy)

    def _load_weights(self, command: LoadWeights) -> Layout | None:
        number, weights = command.number, command.weights
        with ExitStack() as own:
            files = None
            if isinstance(weights, Mapping):
                with copying():
                    folder = own.enter_context(TemporaryDirectory(prefix="logprobe-weights-"))
                    save_state(weights, Path(folder))
                command = LoadWeights(number, folder, is_passing=True)
            else:
                files = FileStats.of(weights)
            answers = self._ask_all(command, DropWeights(number))
            if files is not None and (changed := files.changed()):
                self._send_all(DropWeights(number))
                raise ModelError(f"weights: {changed} while it was read; call load_weights again")
            self._ready = command, files, own.pop_all()
        return answers[0].layout

    def _take_weights(self, command: TakeWeights) -> None:
        assert self._ready is not None, "the weights were loaded"
        # Processes that start from now on load them.
        (self._weights, self._weights_files, own), self._ready = self._ready, None
        with own:
            with self._is_routing:
                self._router.forget()
                answers = [replica.ask(command) for replica in self._replicas]
            for answer in answers:
                if isinstance(error := answer.result().error, EngineClosedError):
                    raise error
            self._passing.close()
            self._passing = own.pop_all()

    def _ask_all(self, order: Asked, undo: Order) -> list[Answer]:
        """Execute a command in every process; if one fails, send `undo` to all and raise its error."""
        answers = [answer.result() for answer in [replica.ask(order) for replica in self._replicas]]
        for error in (answer.error for answer in answers if answer.error is not None):
            self._send_all(undo)
            raise error
        return answers

    def _send_all(self, order: Order) -> None:
        for replica in self._replicas:
            replica.send(order)

    def capabilities(self) -> Capabilities:
        """Return the capabilities of the engine with its initial weights; limits are per process."""
        return self._capabilities

    def stats(self) -> EngineStats:
        """Return the sum of the statistics in the latest heartbeat of each process."""
        return EngineStats.of_replicas({replica.name: replica.stats() for replica in self._replicas})

    def stalled_s(self, request_ids: Collection[str] = ()) -> float:
        """See `Front.stalled_s`; if no process accepts requests, return for how many seconds none has."""
        up = [replica for replica in self._replicas if replica.is_up]
        if not up:
            return min(replica.down_s() for replica in self._replicas)
        used = [replica for replica in up if any(map(replica.has, request_ids))]
        return max((replica.stalled_s() for replica in used), default=min(one.stalled_s() for one in up))

    def close(self) -> None:
        """Stop the processes; further calls have no effect."""
        self._close_replicas()
        self._end(EngineClosedError("the engine was closed before this request ended"))

    def _starting(self, replica: Replica) -> Start:
        """Return the first message for a process that starts, and forget which prefixes it had cached.

        Raises:
            EngineUnavailableError: the files that `load_weights` read have changed since.
        """
        if replica in self._replicas:
            with self._is_routing:
                self._router.forget(self._replicas.index(replica))
        self._check_weights_files()
        weights = [] if self._weights is None else [self._weights]
        loads: list[LoadLora | LoadWeights] = [*weights, *(order for order, _ in [*self._loras.values()])]
        return Start(self._settings, loads, self._weight_version)

    def _accept(self, ready: Ready) -> None:
        """Check that a process has loaded the same weights as the first process.

        Raises:
            EngineUnavailableError: the process has loaded other weights.
        """
        loaded = ready.capabilities.weight_version
        with self._accepting:
            self._weight_version = expected = self._weight_version or loaded
        if loaded != expected:
            raise EngineUnavailableError(changed_model(self._settings["model"], expected, loaded))
        self._check_weights_files()

    def _check_weights_files(self) -> None:
        files = self._weights_files
        if files is not None and (changed := files.changed()):
            raise EngineUnavailableError(
                f"weights: {changed} since load_weights read it; restore it, or create a new engine"
            )

    def _take(self, events: Iterable[Event]) -> None:
        """Publish events from a replica; there are none before `start` sets `_publish`."""
        self._publish(events)

    def _close_replicas(self) -> None:
        if self._creator.is_gone:  # in a fork, which does not own the processes
            return
        for replica in self._replicas:
            replica.stop()
        for replica in self._replicas:
            replica.close()
        self._passing.close()
        self._drop_ready()
        for copy in [*self._left, *(copy for _, copy in self._loras.values())]:
            copy.cleanup()
        self._launcher.close()
        atexit.unregister(self._close_replicas)

    def _drop_ready(self) -> None:
        """Discard prepared weights that will not be used, and delete their temporary folder, if any."""
        if self._ready is not None:
            self._ready[2].close()
            self._ready = None


@dataclass(frozen=True)
class FileStats:
    """Sizes and modification times of the weight files in a folder, to detect changes."""

    folder: Path
    stats: Mapping[str, tuple[int, int]]  # by file name: size in bytes, modification time in ns

    @classmethod
    def of(cls, folder: str | Path) -> Self:
        """Read the sizes and times of a folder's safetensors files; skip files that cannot be read."""
        stats = {}
        for file in Path(folder).glob("*.safetensors"):
            with suppress(OSError):  # loading the weights reports it
                facts = file.stat()
                stats[file.name] = facts.st_size, facts.st_mtime_ns
        return cls(Path(folder), stats)

    def changed(self) -> str:
        """Return `<file> has changed` for the first changed file, or an empty string."""
        now = FileStats.of(self.folder).stats
        names = sorted(name for name in {*now, *self.stats} if now.get(name) != self.stats.get(name))
        return f"{self.folder / names[0]} has changed" if names else ""


@contextmanager
def copying() -> Iterator[None]:
    """Convert an `OSError` raised in the `with` block, which copies weights, to `EngineError`."""
    try:
        yield
    except OSError as error:
        reason = f"the weights cannot be copied for the engine processes ({error})"
        raise EngineError(
            f"{reason}; free space in the folder for temporary files, or set TMPDIR to another folder"
        ) from error


def _names(count: int) -> list[str]:
    return ["the engine process"] if count == 1 else [f"replica {number}" for number in range(count)]
