"""Engine processes in memory: `SimLauncher` stands in for `Launcher`, with a transport that can misbehave.

Messages are encoded as between real processes. Each direction keeps its order, as a socket does; a message
takes as long as the seed says, and the two directions, and those of other processes, do not wait for each
other. What a process has sent before it dies may be lost, from some message on.
"""

from __future__ import annotations

import subprocess
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logprobe.engine.backends.process.child import Child
from logprobe.engine.backends.process.launcher import Launched
from logprobe.engine.backends.process.orders import Order, Report
from logprobe.errors import LogprobeError
from logprobe.transport.channel import GONE, PeerGoneError
from logprobe.transport.codec import Codec
from simulation.clockwork import Condition, Process, SimThread

if TYPE_CHECKING:
    from contextlib import ExitStack

    from simulation.plan import Fault
    from simulation.world import World


class Pipe:
    """One direction of a connection."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.messages: deque[tuple[float, bytes]] = deque()  # (time of arrival, message)
        self.changed = Condition(world.clock)
        self.is_down = False
        self.cuts_next = False

    def put(self, data: bytes) -> None:
        """Send a message."""
        world = self.world
        if self.cuts_next:
            self.cuts_next = False
            world.sometimes["message cut"] += 1
            data = data[: int(world.rng.random() * len(data))]  # one draw, whatever the length
        arrives_s = world.clock.now + world.rng.choice([0, 0, 0.0005, 0.004, 0.05])
        last_s = self.messages[-1][0] if self.messages else 0.0
        self.messages.append((max(arrives_s, last_s), data))
        self.notify()

    def take(self, timeout: float | None) -> bytes | None:
        """Wait for a message; None if none arrives in time.

        Raises:
            PeerGoneError: the other side is gone, and all messages were taken.
        """
        clock = self.world.clock
        until_s = None if timeout is None else clock.now + timeout
        with self.changed:
            while not (self.messages and self.messages[0][0] <= clock.now):
                if self.is_down and not self.messages:
                    raise PeerGoneError(GONE)
                if until_s is not None and until_s <= clock.now:
                    return None
                times = [
                    t for t in (until_s, self.messages[0][0] if self.messages else None) if t is not None
                ]
                self.changed.wait(min(times) - clock.now if times else None)
            data = self.messages.popleft()[1]
            self.changed.notify_all()
        return data

    def go_down(self, *, loses: bool) -> None:
        """Let nothing more through; with `loses`, some of the last messages are lost."""
        rng = self.world.rng
        if loses and self.messages and rng.random() < 0.5:
            for _ in range(rng.randint(1, len(self.messages))):
                self.messages.pop()
        self.is_down = True
        self.notify()

    def notify(self) -> None:
        """Wake those who wait for a message or for space."""
        self.changed.notify_all()


class SimChannel:
    """One side of a connection, with the methods of `Channel`."""

    def __init__(self, outgoing: Pipe, incoming: Pipe, codec: Codec[Any], high_water: int | None) -> None:
        self._outgoing, self._incoming, self._codec = outgoing, incoming, codec
        self._high_water = high_water
        self._is_closed = False

    def wait_for_peer(self) -> None:
        """Connections are made at once."""

    def send(self, message: Any) -> None:
        """Send a message; wait while too many are under way."""
        pipe = self._outgoing
        if self._is_closed:
            raise PeerGoneError(GONE)
        data = self._codec.encode(message)
        with pipe.changed:
            if self._high_water is not None:
                pipe.changed.wait_for(lambda: len(pipe.messages) < self._high_water or pipe.is_down)
            if not pipe.is_down:
                pipe.put(data)
            elif pipe.world.rng.random() < 0.5:
                raise PeerGoneError(GONE)  # otherwise it is lost without a word

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message; None if there is none in time."""
        data = self._incoming.take(timeout_s)
        return None if data is None else self._codec.decode(data)

    def close(self) -> None:
        """Close both directions."""
        self._is_closed = True
        for pipe in (self._outgoing, self._incoming):
            pipe.go_down(loses=False)
            pipe.messages.clear()


class SimProcess:
    """An engine process, with the methods of `Popen` that `Replica` uses."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self._world = world
        self.pid = 1000 + number
        self.returncode: int | None = None
        self.process = Process(name)
        self.to_engine, self.to_front = Pipe(world), Pipe(world)
        self.starting: Any = None
        self._ended = Condition(world.clock)
        own = world.settings.high_water
        self.channel = SimChannel(self.to_engine, self.to_front, Codec(list[Report]), None)
        codec: Codec[Order] = Codec(Order)
        child = SimChannel(self.to_front, self.to_engine, codec, own)
        thread = SimThread(world.clock, self._run, (child,), name=f"{name} main")
        thread.process = self.process
        thread.start()

    def _run(self, channel: Any) -> None:
        code = 0
        try:
            Child(channel, set()).run()
        except LogprobeError:  # as with any exception, the process ends
            code = 1
        self._end(code)

    def _end(self, code: int) -> None:
        if self.returncode is not None:
            return
        self.returncode = code
        self.process.is_frozen = False
        self.to_front.go_down(loses=code < 0)
        self.to_engine.go_down(loses=True)
        self._ended.notify_all()
        self._world.clock.kill(self.process)

    def kill(self) -> None:
        """End the process at once."""
        self._end(-9)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended."""
        with self._ended:
            if not self._ended.wait_for(lambda: self.returncode is not None, timeout):
                raise subprocess.TimeoutExpired("engine", timeout or 0)
        assert self.returncode is not None
        return self.returncode


class SimLauncher:
    """Starts engine processes in this one, and harms them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._num_started = 0
        self._processes: dict[str, SimProcess] = {}

    def launch(self, resources: ExitStack, *, is_restart: bool) -> Launched:
        """Start a process."""
        self._num_started += 1
        name = f"engine-{self._num_started}"
        self._world.sometimes["replica restarted"] += is_restart
        own = self._processes[name] = SimProcess(self._world, name, self._num_started)
        resources.callback(own.channel.close)
        return Launched(own, own.channel, Path("/nonexistent"))  # type: ignore[arg-type]

    def close(self) -> None:
        """There is nothing to release."""

    def is_alive(self, name: str) -> bool:
        """Return True if the process of this name runs."""
        return name in self._processes and self._processes[name].returncode is None

    def harm(self, number: int, fault: Fault) -> None:
        """Let something happen to one of the running processes."""
        world = self._world
        alive = [own for own in self._processes.values() if own.returncode is None]
        if not alive:
            return
        own = alive[number % len(alive)]
        match fault.what:
            case "kill":
                world.sometimes["replica killed"] += 1
                own.kill()
            case "drop":
                world.sometimes["connection dropped"] += 1
                own.to_engine.go_down(loses=True)
                own.to_front.go_down(loses=True)
            case "freeze":
                world.sometimes["replica hung"] += 1
                own.process.is_frozen = True
                SimThread(world.clock, self._thaw, (own, fault.seconds), name="thaw").start()
            case "cut":
                own.to_engine.cuts_next = True
            case "cut-back":
                own.to_front.cuts_next = True

    def _thaw(self, own: SimProcess, seconds: float) -> None:
        self._world.clock.sleep(seconds)
        own.process.is_frozen = False
