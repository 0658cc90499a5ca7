"""`ProcessEngine`: the native engine in one process of its own, or in several of which each has its requests.

Before it: a `Front` in this process. After it: replicas, each behind a channel. Admission and the names of
LoRA weights are on this side, once for all replicas.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec
import torch
import zmq

from logprobe.engine.backends.process.admission import Admission, LoraNames, processor_names
from logprobe.engine.backends.process.orders import (
    DropLora,
    DropWeights,
    LoadLora,
    LoadWeights,
    Start,
    TakeWeights,
)
from logprobe.engine.backends.process.replica import Load, Replica
from logprobe.engine.backends.router import Router
from logprobe.engine.protocol import EngineStats
from logprobe.errors import EngineClosedError
from logprobe.models.loading import digest_of, read_state, save_state
from logprobe.processors import ModelFacts
from logprobe.transport.messages import ForgetPrefixes, Submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from logprobe.config import EngineConfig
    from logprobe.engine.backends.process.orders import Answer, Asked, Order, Ready
    from logprobe.engine.forward.native import State
    from logprobe.engine.front import Front
    from logprobe.engine.protocol import Capabilities
    from logprobe.errors import LogprobeError
    from logprobe.text.edge import TextEdge
    from logprobe.transport.messages import Admitted, FrontCommand, News, Request


class ProcessEngine:
    """Implements `Core` on engine processes.

    Raises:
        ModelError: the model cannot be had or used.
        EngineError: a process ended before it took requests.
    """

    _publish: Callable[[Iterable[News]], None]
    _end: Callable[[LogprobeError], None]

    def __init__(self, config: EngineConfig, text: TextEdge) -> None:
        settings = {field.name: getattr(config, field.name) for field in fields(config)}
        settings |= {"logits_processors": processor_names(config.logits_processors)}
        self._settings = settings | {"process": False, "data_parallel": 1}
        self._loras = LoraNames()
        self._weights: LoadWeights | None = None  # that answer now; None: the model's own
        self._passing = ExitStack()  # has the folder of weights that came without one
        self._is_loading = threading.Lock()
        self._is_routing = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        threads = max(torch.get_num_threads() // config.data_parallel, 1)
        self._router = Router(config.data_parallel)
        self._replicas: list[Replica] = []
        self._replicas += [
            Replica(name, self._context, threads, self._starting, self._take)
            for name in _names(config.data_parallel)
        ]
        atexit.register(self._close_replicas)
        try:
            ready, *_ = [replica.ready.result() for replica in self._replicas]
        except BaseException:
            self._close_replicas()
            raise
        self._open(config, text, ready)

    def _open(self, config: EngineConfig, text: TextEdge, ready: Ready) -> None:
        """All that waits for a process to tell of its engine."""
        own = ready.capabilities
        self._capabilities = replace(own, num_processes=config.data_parallel)
        facts = ModelFacts(
            vocab_size=own.vocab_size,
            eos_token_ids=frozenset(ready.eos_token_ids),
            tokenizer=text.tokenizer,
            vocabulary=text.vocabulary,
        )
        told = replace(config, device=own.device, dtype=own.dtype)  # what processors are told
        self._admission = Admission(told, own, facts, self._loras)

    def start(self, publish: Callable[[Iterable[News]], None], end: Callable[[LogprobeError], None]) -> None:
        """Hand what comes of requests to `publish`, and why nothing more will to `end`."""
        self._publish, self._end = publish, end

    def admit(self, request: Request) -> Admitted:
        """Say yes to a request.

        Raises:
            ParameterError: it can never be served.
        """
        return self._admission.admit(request)

    def send(self, command: FrontCommand) -> None:
        """Have the processes that it is for do this before their next step."""
        match command:
            case Submit(requests):
                self._submit(requests)
            case ForgetPrefixes():
                with self._is_routing:
                    self._router.forget()
                self._send_all(command)
            case _:
                for replica in self._replicas:
                    if replica.has(command.request_id):
                        replica.send(command)

    def _submit(self, admitted: Sequence[Admitted]) -> None:
        self._drop_loras()
        with self._is_routing:
            queued = [replica.num_queued_tokens for replica in self._replicas]
            is_up = [replica.is_up for replica in self._replicas]
            portions: list[list[Admitted]] = [[] for _ in self._replicas]
            for one in admitted:
                chosen = self._router.choose(one, queued, is_up)
                queued[chosen] += Load(one).num_tokens
                portions[chosen].append(one)
            # All of a call come before other weights in each process, or behind them in each.
            for replica, portion in zip(self._replicas, portions, strict=True):
                if portion:
                    replica.submit(portion)

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait."""
        return any(replica.num_queued_tokens for replica in self._replicas)

    def add_lora(self, name: str, path: str | Path) -> None:
        """Load LoRA weights from a folder in every process or in none; errors as `Front.add_lora`."""
        with self._is_loading:
            load = LoadLora(self._loras.next_number(), name, str(Path(path).absolute()))
            first, *_ = self._ask_all(load, DropLora(load.number))
            self._loras.add(LoadLora(load.number, name, first.path))
        self._drop_loras()

    def remove_lora(self, name: str) -> None:
        """Refuse new requests for LoRA weights; errors as `Front.remove_lora`."""
        self._loras.remove(name)
        self._drop_loras()

    def list_loras(self) -> dict[str, str]:
        """The loaded LoRA weights: name → path."""
        return {load.name: load.path for load in self._loras.all()}

    def lora_number(self, name: str | None) -> int:
        """As `Front.lora_number`."""
        return self._admission.weights_number if name is None else self._loras.get(name).number

    def load_weights(
        self, weights: str | Path | State, front: Front, *, version: str | None = None, finishes: bool
    ) -> str:
        """Go on with other weights of the model in every process or in none, as `start.replace_weights` says.

        `front` is told of them before they can answer: its records name them.

        Raises:
            ModelError: they cannot be read, or do not fit the model.
            EngineError: a process ended while it read them.
            EngineClosedError: the engine was closed before they answered.
        """
        with self._is_loading, ExitStack() as own:
            is_state = isinstance(weights, Mapping)
            # Once, here, and not in every process.
            version = version or digest_of(weights if isinstance(weights, Mapping) else read_state(weights))
            if isinstance(weights, Mapping):
                folder = Path(own.enter_context(TemporaryDirectory(prefix="logprobe-weights-")))
                save_state(weights, folder)
            else:
                folder = Path(weights).absolute()
            number, loras = self._loras.next_number(), self._loras.renumbered()
            load = LoadWeights(number, str(folder), is_passing=is_state, loras=loras)
            first, *_ = self._ask_all(load, DropWeights(number))
            assert first.layout is not None, "it is told with other weights"
            capabilities = self._capabilities.of_weights(first.layout, version)
            front.expect(number, capabilities.source())
            # A process that starts from here on has them; LoRA weights it has by `_starting`.
            self._weights = msgspec.structs.replace(load, loras=[])
            take = TakeWeights(self._loras.next_number(), number, finishes)
            with self._is_routing:
                self._router.forget()
                answers = [replica.ask(take) for replica in self._replicas]
            for answer in answers:
                if isinstance(error := answer.result().error, EngineClosedError):
                    raise error
            self._loras.replace(loras)
            self._admission.weights_number, self._capabilities = number, capabilities
            front.took_over(number)
            self._passing.close()
            self._passing = own.pop_all()
        self._drop_loras()
        return version

    def _ask_all(self, order: Asked, undo: Order) -> list[Answer]:
        """Have every process do something; where one cannot, the others undo it."""
        answers = [one.result() for one in [replica.ask(order) for replica in self._replicas]]
        for error in (answer.error for answer in answers if answer.error is not None):
            self._send_all(undo)
            raise error
        return answers

    def _send_all(self, order: Order) -> None:
        for replica in self._replicas:
            replica.send(order)

    def capabilities(self) -> Capabilities:
        """What this engine can do; slots and rows are each replica's."""
        return self._capabilities

    def stats(self) -> EngineStats:
        """What its processes were doing and had done at their latest signs of life, and what each was."""
        return EngineStats.of_replicas({replica.name: replica.stats() for replica in self._replicas})

    def stalled_s(self) -> float:
        """How long the slowest present step has taken, s; where no process takes requests: since when."""
        if not any(replica.is_up for replica in self._replicas):
            return min(replica.down_s() for replica in self._replicas)
        return max(replica.stalled_s() for replica in self._replicas)

    def close(self) -> None:
        """End the processes; a second call does nothing."""
        self._close_replicas()
        self._end(EngineClosedError("the engine was closed before this request ended"))

    def _starting(self, replica: Replica) -> Start:
        """What a process that starts is told first; it knows no prefix."""
        if replica in self._replicas:
            with self._is_routing:
                self._router.forget(self._replicas.index(replica))
        return Start(self._settings, self._loras.all(), self._weights)

    def _take(self, news: Iterable[News]) -> None:
        """What a replica says of requests, of which there are none before `start`."""
        self._publish(news)

    def _close_replicas(self) -> None:
        for replica in self._replicas:
            replica.stop()
        for replica in self._replicas:
            replica.close()
        self._passing.close()
        self._context.term()
        atexit.unregister(self._close_replicas)

    def _drop_loras(self) -> None:
        """Let the processes let go of weights that no request to come names."""
        for number in self._loras.take_dropped():
            self._send_all(DropLora(number))


def _names(count: int) -> list[str]:
    return ["the engine process"] if count == 1 else [f"replica {number}" for number in range(count)]
