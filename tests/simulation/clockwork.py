"""Deterministic threads: one runs at a time, and a seeded generator decides which one goes on.

`Clockwork` stands in for what `logprobe.runtime` names: clock, threads, locks, conditions, events, futures,
executors. Each simulated thread is a real thread that waits for its turn. It gives up its turn only where it
uses one of these, so a run is a function of the seed. Time is virtual: it moves on when every thread waits.

Threads belong to processes. A process can be frozen, in which case its threads get no turns, and it can be
killed: each of its threads then raises `Killed` wherever it stands, and nothing it does on the way out can be
seen from other processes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import threading
import traceback
import uuid
import zlib
from collections import deque
from concurrent import futures
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from logprobe import runtime
from logprobe.errors import LogprobeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Killed(BaseException):
    """Raised in a thread whose process was killed, at each place where it would wait."""


class DeadlockError(AssertionError):
    """Every thread waits for another one."""


class SimThread:
    """A thread of the simulation, with the methods of `threading.Thread` that the package uses."""

    def __init__(
        self, world: Clockwork, target: Callable[..., Any], args: tuple[Any, ...] = (), name: str = ""
    ) -> None:
        self._world, self._target, self._args = world, target, args
        self.ident = next(world.idents)
        self.name = name or f"thread-{self.ident}"
        self.process: Process = world.current.process if world.threads else Process("front")
        self.weight = world.rng.choice([1, 1, 1, 4, 0.1])  # slow and fast threads
        self.is_waiting = False
        self.deadline: float | None = None
        self.was_woken = False
        self.is_killed = self.has_ended = False
        self.joining: list[SimThread] = []
        self.turn = threading.Lock()  # released by the thread that passes the turn on
        self.turn.acquire()
        self.real: threading.Thread | None = None

    def start(self) -> None:
        self.real = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._world.threads.append(self)
        self.process.threads.append(self)
        self.real.start()
        self._world.point("start", self.name)

    def _run(self) -> None:
        self.turn.acquire()
        try:
            if not self.is_killed:
                self._target(*self._args)
        except Killed:
            pass
        except LogprobeError as error:
            if self.process.name == "front":
                self._world.fail(error)  # of another process: its connection is gone
        except BaseException as error:  # noqa: BLE001 - it is the result of the simulation
            self._world.fail(error)
        self._world.leave(self)

    def join(self, timeout: float | None = None) -> None:
        if not self.has_ended:
            self.joining.append(self._world.current)
            self._world.wait(timeout, "join")

    def is_alive(self) -> bool:
        return self.real is not None and not self.has_ended


class Process:
    """A group of threads that are frozen and killed together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.threads: list[SimThread] = []
        self.is_frozen = self.is_dead = False


class Clockwork:
    """Runs simulated threads one at a time; `seed` decides their order.

    Args:
        seed: of the generator that decides.
        eagerness: probability that the turn passes on where a thread could go on.
    """

    def __init__(self, seed: int, eagerness: float = 0.3, max_turns: int = 400_000) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - not for secrets
        self.eagerness, self.max_turns = eagerness, max_turns
        self.now = 1000.0
        self.idents = itertools.count(1)
        self.threads: list[SimThread] = []
        self.failure: BaseException | None = None
        self.is_over = False  # only objects that are collected may still call
        self.digest = 0
        self.num_turns = 0
        self._reaper: SimThread | None = None  # waits until a killed thread has ended
        self.recent: deque[str] = deque(maxlen=60)
        self.main = self.current = SimThread(self, target=lambda: None, name="main")
        self.threads.append(self.main)
        self.main.real = threading.current_thread()

    def note(self, *what: object) -> None:
        """Add an event to the trace."""
        line = f"{self.now:.6f} {self.current.name}: {' '.join(map(str, what))}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        self.recent.append(line)

    def fail(self, error: BaseException) -> None:
        """End the simulation with this error, unless it has failed already."""
        if self.failure is None:
            error.add_note("\n".join(["last events:", *self.recent]))
            self.failure = error
            self._wake(self.main)

    def point(self, *what: object) -> None:
        """Pass the turn on to another thread, perhaps."""
        if self.is_over:
            return
        self._check_alive()
        if self.rng.random() < self.eagerness:
            self.note(*what)
            self._pass_on()

    def wait(self, timeout: float | None, *what: object) -> bool:
        """Give up the turn until `wake` or the time is over; return True if it was `wake`."""
        if self.is_over:
            return True
        self._check_alive()
        me = self.current
        self.note("waits:", *what)
        me.is_waiting, me.was_woken = True, False
        me.deadline = None if timeout is None else self.now + max(timeout, 0)
        self._pass_on()
        return me.was_woken

    def sleep(self, seconds: float) -> None:
        """Let this much virtual time pass."""
        self.wait(seconds, "sleep")

    def wake(self, thread: SimThread) -> None:
        """Let a waiting thread go on."""
        if not self.current.is_killed:
            self._wake(thread)

    @staticmethod
    def _wake(thread: SimThread) -> None:
        if thread.is_waiting:
            thread.is_waiting, thread.was_woken = False, True

    def leave(self, thread: SimThread) -> None:
        """Take a thread that has ended out of the simulation, and pass the turn on."""
        thread.has_ended = True
        self.threads.remove(thread)
        thread.process.threads.remove(thread)
        for other in thread.joining:
            self._wake(other)
        if thread.is_killed and self._reaper is not None:
            self.current, self._reaper = self._reaper, None
        else:
            self.note("ends")
            self.current = self._next()
        self.current.turn.release()

    def kill(self, process: Process) -> None:
        """End a process's threads at once; if the current thread is one of them, it raises `Killed`."""
        process.is_dead = True
        me = self.current
        self.note("kills", process.name)
        for thread in process.threads[:]:
            if thread is not me:
                self._reap(thread)
        if me.process is process:
            me.is_killed = True
            raise Killed

    def _reap(self, thread: SimThread) -> None:
        thread.is_killed, thread.is_waiting = True, False
        me, self._reaper, self.current = self.current, self.current, thread
        thread.turn.release()
        me.turn.acquire()

    def close(self) -> None:
        """End all threads but the main one."""
        while len(self.threads) > 1:
            self._reap(self.threads[-1])
        self.is_over = True

    def _pass_on(self) -> None:
        me = self.current
        self.num_turns += 1
        if self.num_turns > self.max_turns:
            self.fail(AssertionError(f"the simulation has not ended after {self.max_turns} turns"))
        self.current = following = self._next()
        if following is not me:
            following.turn.release()
            me.turn.acquire()
        self._check_alive()

    def _check_alive(self) -> None:
        if self.current.is_killed or (self.failure and self.current is not self.main):
            raise Killed
        if self.failure:
            raise self.failure

    def _next(self) -> SimThread:
        if self.failure:
            self._wake(self.main)
            return self.main
        self.now += 1e-6
        ready = self._ready()
        if not ready:
            timed = [t.deadline for t in self.threads if t.deadline is not None and not t.process.is_frozen]
            if not timed:
                self.fail(DeadlockError(self.stacks()))
                return self.main
            self.now = max(self.now, min(timed))
            ready = self._ready()
        if len(ready) == 1:
            return ready[0]
        return self.rng.choices(ready, [thread.weight for thread in ready])[0]

    def _ready(self) -> list[SimThread]:
        ready = []
        for thread in self.threads:
            if thread.deadline is not None and (not thread.is_waiting or thread.deadline <= self.now):
                thread.is_waiting, thread.deadline = False, None
            if not thread.is_waiting and not thread.process.is_frozen:
                ready.append(thread)
        return ready

    def stacks(self) -> str:
        """Show where each thread stands."""
        frames, lines = sys._current_frames(), ["every thread waits:"]
        for thread in self.threads:
            frame = frames.get(thread.real.ident) if thread.real and thread.real.ident else None
            where = [
                f"{f.name}:{f.lineno}" for f in traceback.extract_stack(frame) if "logprobe" in f.filename
            ]
            lines.append(f"  {thread.name} ({thread.process.name}): {' > '.join(where[-5:])}")
        return "\n".join(lines)

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Replace the names of `logprobe.runtime` within the block."""

        def bound(cls: Any) -> Callable[..., Any]:
            return lambda *args, **kwargs: cls(self, *args, **kwargs)

        names = {
            "Lock": bound(Lock),
            "RLock": bound(RLock),
            "Condition": bound(Condition),
            "Event": bound(Event),
            "Thread": lambda target, args=(), name="", daemon=True: SimThread(self, target, args, name),  # noqa: ARG005
            "Future": type("Future", (Future,), {"world": self}),
            "ThreadPoolExecutor": bound(Executor),
            "current_thread": lambda: self.current,
            "get_ident": lambda: self.current.ident,
            "monotonic": lambda: self.now,
            "perf_counter": lambda: self.now,
            "perf_counter_ns": lambda: round(self.now * 1e9),
            "uuid4": lambda: uuid.UUID(int=self.rng.getrandbits(128)),
        }
        with mock.patch.multiple(runtime, **names):
            try:
                yield
            except BaseException as error:  # noqa: BLE001 - raised below
                self.fail(error)
            self.close()
        if self.failure:
            raise self.failure from None


class Lock:
    """A lock; its owner may acquire it again if it is reentrant."""

    is_reentrant = False

    def __init__(self, world: Clockwork) -> None:
        self._world = world
        self.owner: SimThread | None = None
        self._depth = 0
        self._queue: list[SimThread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: ARG002 - as in `threading`
        self._world.point("lock")
        if self._world.is_over:
            return True
        me = self._world.current
        assert self.is_reentrant or self.owner is not me, "waits for a lock that it holds"
        while self.owner not in (None, me):
            self._queue.append(me)
            self._world.wait(None, "lock")
        self.owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._release()
        if not self._world.current.is_killed:
            self._world.point("unlock")

    def _release(self) -> None:
        if self._world.current.is_killed or self._world.is_over:
            return
        assert self.owner is self._world.current, "released by a thread that does not hold the lock"
        self._depth -= 1
        if self._depth == 0:
            self.owner = None
            for thread in self._queue:
                self._world.wake(thread)
            self._queue.clear()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """A reentrant lock."""

    is_reentrant = True


class Condition(RLock):
    """A condition with a lock of its own."""

    def __init__(self, world: Clockwork) -> None:
        super().__init__(world)
        self._waiters: deque[SimThread] = deque()

    def wait(self, timeout: float | None = None) -> bool:
        me, depth = self._world.current, self._depth
        self._waiters.append(me)
        self._depth = 1
        self._release()
        was_woken = self._world.wait(timeout, "condition")
        if me in self._waiters:
            self._waiters.remove(me)
        self.acquire()
        self._depth = depth
        return was_woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else self._world.now + timeout
        while not (result := predicate()):
            left = None if until is None else until - self._world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        while self._waiters and n > 0:
            self._world.wake(self._waiters.popleft())
            n -= 1

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    """An event."""

    def __init__(self, world: Clockwork) -> None:
        self._condition, self._flag = Condition(world), False

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        with self._condition:
            self._flag = True
            self._condition.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            return bool(self._condition.wait_for(self.is_set, timeout))


class Future(futures.Future):  # type: ignore[type-arg]
    """A future whose lock is simulated; `world` is set in a subclass."""

    world: Clockwork

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition(self.world)  # type: ignore[assignment]


class Executor:
    """A pool of one thread, which keeps the order of its jobs; a pool of several starts one for each job."""

    def __init__(self, world: Clockwork, max_workers: int = 1, thread_name_prefix: str = "pool") -> None:
        self._world, self._num_workers, self._name = world, max_workers, thread_name_prefix
        self._jobs: deque[Callable[[], None]] = deque()
        self._condition = Condition(world)
        self._threads: list[SimThread] = []
        self._is_closed = False

    def submit(self, work: Callable[..., Any], *args: Any) -> Any:
        future: Any = runtime.Future()

        def job() -> None:
            try:
                future.set_result(work(*args))
            except Exception as error:  # noqa: BLE001 - raised where the result is awaited
                future.set_exception(error)

        with self._condition:
            self._jobs.append(job)
            self._condition.notify()
        if len(self._threads) < self._num_workers:
            self._threads.append(SimThread(self._world, self._work, name=self._name))
            self._threads[-1].start()
        return future

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            job()

    def let_go(self) -> None:
        """End the threads once there are no more jobs."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def shutdown(self) -> None:
        self.let_go()
        for thread in self._threads:
            thread.join()


class Loop(asyncio.BaseEventLoop):
    """An event loop that runs on a simulated thread and on virtual time."""

    def __init__(self, world: Clockwork) -> None:
        super().__init__()
        self._world = world
        self._selector = self  # `select` below is all that the base class needs
        self._thread: SimThread | None = None  # while it waits
        self.set_exception_handler(lambda *_: None)  # tasks that a failure leaves

    def time(self) -> float:
        return self._world.now

    def select(self, timeout: float | None) -> list[Any]:
        if timeout == 0:
            self._world.point("loop")
            return []
        self._thread = self._world.current
        try:
            self._world.wait(timeout, "loop")
        finally:
            self._thread = None
        return []

    def _process_events(self, _: Any) -> None:
        """There are no files to watch."""

    def _write_to_self(self) -> None:
        if self._thread is not None:
            self._world.wake(self._thread)

    def run_in_executor(self, _: Any, work: Callable[..., Any], *args: Any) -> Any:
        """Run in a new thread, whatever the executor."""
        executor = Executor(self._world, thread_name_prefix="to-thread")
        future = asyncio.wrap_future(executor.submit(work, *args), loop=self)
        future.add_done_callback(lambda _: executor.let_go())
        return future
