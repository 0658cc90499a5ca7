"""`EngineThread`: runs the native engine on a thread of this process; only that thread runs steps.

Commands arrive through a queue. They come from a `Front`, or from `child` if the front is in another process.
Events are published from the engine's threads.
"""

from __future__ import annotations

import atexit
import math
import sys
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING, Final

from logprobe import runtime
from logprobe.engine.creator import Creator
from logprobe.engine.forward.device import on_device
from logprobe.engine.overlap import OverlappedLoop
from logprobe.errors import EngineClosedError, EngineError
from logprobe.transport.messages import TakeWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from concurrent.futures import Future

    from logprobe.engine.engine import Engine
    from logprobe.engine.protocol import Capabilities, EngineStats, Layout
    from logprobe.errors import LogprobeError
    from logprobe.transport.messages import Admitted, Asked, Command, Event, Request

CHECK_AFTER_IDLE_S = 1.0
EXIT_WAIT_S = 5.0  # maximum wait for the step in progress at interpreter exit
CLOSED: Final = "the engine was closed before the new weights were in use"
SWITCH_S: Final = 0.001  # how long a thread may hold the GIL; Python's default is 5 ms


class SerialLoop:
    """Publishes the events of each step before the next step begins."""

    def __init__(self, engine: Engine, publish: Callable[[Sequence[Event]], None]) -> None:
        self._engine = engine
        self._publish = publish

    def step(self) -> None:
        """Run a step and publish its events."""
        events = self._engine.step()
        with self._engine.clock.part("publish"):
            self._publish(events)

    def settle(self) -> None:
        """Do nothing, because every step has been published already."""

    def close(self) -> None:
        """Do nothing, because there are no resources to release."""


class EngineThread:
    """Implements `Core`: accepts commands from any thread and publishes events from its own."""

    _publish: Callable[[Iterable[Event]], None]
    _end: Callable[[LogprobeError], None]
    _loop: OverlappedLoop | SerialLoop

    def __init__(self, engine: Engine, capabilities: Capabilities, *, overlap: bool = False) -> None:
        """Create the thread; with `overlap`, a second thread publishes a step while the next one runs."""
        self.engine = engine
        self._creator = Creator()
        self._capabilities = capabilities
        self._overlap = overlap
        self._wake = runtime.Condition()
        # `_wake` guards these three.
        self._commands: deque[Command | TakeWeights] = deque()
        self._taking: dict[int, Future[None]] = {}  # pending weight replacements, by load number
        self._is_closed = False
        self._turn_began: float | None = None  # monotonic start of the step, s; None while idle
        self._thread = runtime.Thread(target=self._run, name="logprobe-engine", daemon=True)

    def start(self, publish: Callable[[Iterable[Event]], None], end: Callable[[LogprobeError], None]) -> None:
        """Start serving; `end` is called once, after the last `publish`, with the reason for stopping."""
        self._publish, self._end = publish, end
        self._loop = (OverlappedLoop if self._overlap else SerialLoop)(self.engine, publish)
        # The caller's event loop would otherwise wait up to this long for each engine thread.
        if sys.getswitchinterval() > SWITCH_S:
            sys.setswitchinterval(SWITCH_S)
        self._thread.start()
        # A daemon thread still running at exit is unwound, which C++ code may not survive.
        atexit.register(self._close_at_exit)

    def admit(self, request: Request) -> Admitted:
        """Validate a request.

        Raises:
            ParameterError: the request can never be served.
        """
        return self.engine.admit(request)

    def send(self, command: Command) -> None:
        """Queue a command; the engine executes it before its next step."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    @property
    def is_busy(self) -> bool:
        """True if the engine has work or queued commands."""
        return bool(self._commands) or self.engine.has_work

    def check_integrity_at_rest(self) -> bool:
        """Check the engine's invariants if it is idle; return True if it was idle."""
        with self._wake:
            is_at_rest = self._turn_began is None and not self.is_busy
            if is_at_rest:
                self.engine.check_integrity()
        return is_at_rest

    def ask(self, command: Asked) -> Layout | None:
        """Execute a command and wait until it is done.

        Weights are read on the caller's thread, so that no step waits for the disk.

        Raises:
            ModelError: the weights cannot be read, or do not fit the model.
            EngineClosedError: the engine was closed meanwhile.
        """
        if isinstance(command, TakeWeights):
            self.take(command).result()
            return None
        return self.engine.load(command)

    def take(self, command: TakeWeights) -> Future[None]:
        """Queue the switch to prepared weights; the returned future completes once they are in use.

        Raises:
            EngineError: the weights are not prepared.
            EngineClosedError: the engine was closed.
        """
        if not self.engine.has_ready(command.number):
            raise EngineError("the new weights are not loaded; please report this")
        taking: Future[None] = runtime.Future()
        with self._wake:
            if self._is_closed:
                raise EngineClosedError(CLOSED)
            self._taking[command.number] = taking
            self._commands.append(command)
            self._wake.notify()
        return taking

    def capabilities(self) -> Capabilities:
        """Return the properties and limits of the engine with its initial weights."""
        return self._capabilities

    def stats(self) -> EngineStats:
        """Return the current statistics; the figures are not an atomic snapshot while the engine runs."""
        return self.engine.stats()

    def stalled_s(self, request_ids: Collection[str] = ()) -> float:  # noqa: ARG002 - one engine runs all requests
        """Return for how many seconds the current step has run: 0 while idle, infinity once stopped."""
        if not self._thread.is_alive():
            return math.inf
        began = self._turn_began
        return 0.0 if began is None else runtime.monotonic() - began

    def close(self) -> None:
        """Finish the step in progress, stop the thread and release the model; repeated calls do nothing."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if runtime.current_thread() is not self._thread:
            self._thread.join()
            self.engine.close()
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """Stop the thread at interpreter exit; a step that hangs must not keep the process alive."""
        if self._creator.is_gone:
            return
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join(EXIT_WAIT_S)

    def _run(self) -> None:
        reason: LogprobeError = EngineClosedError("the engine was closed before this request ended")
        try:
            with on_device(self.engine.config.device), closing(self._loop):
                while self._take_commands():
                    self._loop.step()
                    if not self.engine.has_work:
                        self._loop.settle()
                    self._end_taking()
                    self._turn_began = None
        except BaseException as error:  # noqa: BLE001 - a bug must fail all requests, not hang them
            reason = EngineError(f"the engine stopped: {error!r}; please report this")
            reason.__cause__ = error
        with self._wake:
            self._is_closed = True
            taking, self._taking = self._taking, {}
        for waiting in taking.values():
            waiting.set_exception(EngineClosedError(CLOSED))
        self._end(reason)

    def _end_taking(self) -> None:
        """Complete the future of weights that are now in use, once the old weights' rows are published."""
        if self._taking:
            with self._wake:
                taking = self._taking.pop(self.engine.weights_number, None)
            if taking is not None:
                self._loop.settle()
                taking.set_result(None)

    def _take_commands(self) -> bool:
        """Wait for work, and execute the queued commands; return False once the engine is closed."""
        with self._wake:
            if not self._wake.wait_for(self._should_wake, timeout=CHECK_AFTER_IDLE_S):
                self.engine.check_integrity()
                self._wake.wait_for(self._should_wake)
            if self._is_closed:
                return False
            commands, self._commands = self._commands, deque()
            self._turn_began = runtime.monotonic()
        if commands:
            self._loop.settle()  # publish the last step's events before those of the commands
        self._publish([event for command in commands for event in self.engine.handle(command)])
        return True

    def _should_wake(self) -> bool:
        return bool(self._commands) or self._is_closed or self.engine.has_work
