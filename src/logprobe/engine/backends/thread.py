"""`EngineThread`: the native engine on a thread of this process, which alone touches it.

Before it: a `Front`, or `child` for the front of another process; messages come through a queue. After it:
what is new of the requests is published.
"""

from __future__ import annotations

import atexit
import itertools
import math
import sys
import threading
import time
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING, Final

from logprobe.engine.overlap import Overlapped, Plain
from logprobe.errors import EngineClosedError, EngineError
from logprobe.transport.messages import AddLora, RemoveLora, ReplaceForward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from logprobe.engine.engine import Engine
    from logprobe.engine.front import Front
    from logprobe.engine.protocol import Capabilities, EngineStats, ForwardBackend
    from logprobe.errors import LogprobeError
    from logprobe.transport.messages import Admitted, Command, News, Request

CHECK_AFTER_IDLE_S = 1.0
EXIT_WAIT_S = 5.0  # for the step in progress when the interpreter ends
SWITCH_S: Final = 0.001  # that a thread keeps the interpreter for while others want it; Python's own is 5 ms


class EngineThread:
    """Implements `Core`: takes messages from any thread, and publishes what is new on its own."""

    _publish: Callable[[Iterable[News]], None]
    _end: Callable[[LogprobeError], None]
    _loop: Overlapped | Plain

    def __init__(self, engine: Engine, capabilities: Capabilities, *, overlap: bool = False) -> None:
        """`overlap`: the next step runs while what the one before found is published, on a second thread."""
        self.engine = engine
        self._capabilities = capabilities
        self._loads = itertools.count(1)  # of weights that take over, guarded by `_loading`
        self._loading = threading.Lock()
        self._overlap = overlap
        self._wake = threading.Condition()
        # Both are guarded by `_wake`.
        self._commands: deque[Command] = deque()
        self._is_closed = False
        self._turn_began: float | None = None  # by the monotonic clock; None while it waits for work
        self._thread = threading.Thread(target=self._run, name="logprobe-engine", daemon=True)

    def start(self, publish: Callable[[Iterable[News]], None], end: Callable[[LogprobeError], None]) -> None:
        """Serve; `end` is told why it has stopped, once, after all that `publish` was told."""
        self._publish, self._end = publish, end
        self._loop = (Overlapped if self._overlap else Plain)(self.engine, publish)
        # The caller's event loop would wait so long for each of the threads that answer it.
        if sys.getswitchinterval() > SWITCH_S:
            sys.setswitchinterval(SWITCH_S)
        self._thread.start()
        # A thread that still runs when the interpreter ends is unwound, which C++ code may not survive.
        atexit.register(self._close_at_exit)

    def admit(self, request: Request) -> Admitted:
        """Say yes to a request.

        Raises:
            ParameterError: it can never be served.
        """
        return self.engine.admit(request)

    def send(self, command: Command) -> None:
        """Let the engine handle a message before its next step."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    @property
    def is_busy(self) -> bool:
        """Whether the engine has work, or messages to handle."""
        return bool(self._commands) or self.engine.has_work

    def replace_forward(
        self, forward: ForwardBackend, capabilities: Capabilities, front: Front, *, finishes: bool
    ) -> None:
        """Run what comes from now on through another forward pass of the same shape; wait until it does.

        `capabilities` are those of the engine with it; `front` is told of them first: its records name them.

        Raises:
            EngineClosedError: the engine was closed meanwhile.
        """
        has_taken_over = threading.Event()

        def on_done() -> None:
            if self.lora_number(None) == number:  # else a later one has its place
                self._capabilities = capabilities
                front.took_over(number)
            has_taken_over.set()

        with self._loading:
            number = next(self._loads)
            front.expect(number, capabilities.source())
            self.send(ReplaceForward(forward, finishes, number, on_done))
        while not has_taken_over.wait(CHECK_AFTER_IDLE_S):
            if math.isinf(self.stalled_s()):
                raise EngineClosedError("the engine was closed before the new weights answered")

    def add_lora(self, name: str, path: str | Path) -> None:
        """Load LoRA weights from a folder; errors as `Engine.handle`."""
        self.engine.handle(AddLora(name, str(path)))  # here, so that no step waits for the disk

    def remove_lora(self, name: str) -> None:
        """Refuse new requests for LoRA weights; errors as `Engine.handle`."""
        self.engine.handle(RemoveLora(name))

    def list_loras(self) -> dict[str, str]:
        """The loaded LoRA weights: name → path."""
        return self.engine.list_loras()

    def lora_number(self, name: str | None) -> int:
        """Which load of a name answers now, or for None which of the model's own weights; errors as there."""
        return self.engine.lora_number(name)

    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        return self._capabilities

    def stats(self) -> EngineStats:
        """What it is doing and has done; read while it runs, so each figure is of its own moment."""
        return self.engine.stats()

    def stalled_s(self) -> float:
        """How long its present step has taken, s: 0 while it waits for work, infinite once it has stopped."""
        if not self._thread.is_alive():
            return math.inf
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """Let the step in progress end, the thread with it, and the model go; a second call does nothing."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self.engine.close()
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """Let the thread end before the interpreter does; a step that hangs must not keep the process."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join(EXIT_WAIT_S)

    def _run(self) -> None:
        reason: LogprobeError = EngineClosedError("the engine was closed before this request ended")
        try:
            with closing(self._loop):
                while self._take_commands():
                    self._loop.step()
                    if not self.engine.has_work:
                        self._loop.settle()
                    self._turn_began = None
        except BaseException as error:  # noqa: BLE001 - a bug of ours must end every request, not hang it
            reason = EngineError(f"the engine stopped: {error!r}; please report this")
            reason.__cause__ = error
        self._end(reason)

    def _take_commands(self) -> bool:
        """Wait for work and do what the messages ask; False once closed."""
        with self._wake:
            if not self._wake.wait_for(self._has_news, timeout=CHECK_AFTER_IDLE_S):
                self.engine.check_integrity()
                self._wake.wait_for(self._has_news)
            if self._is_closed:
                return False
            commands, self._commands = self._commands, deque()
        self._turn_began = time.monotonic()
        if commands:
            self._loop.settle()  # what they end is told after what was found before
        self._publish([news for command in commands for news in self.engine.handle(command)])
        return True

    def _has_news(self) -> bool:
        return bool(self._commands) or self._is_closed or self.engine.has_work
