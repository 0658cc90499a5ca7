"""Clock, threads, locks and random ids of the engine, its transport and the server, in one place.

Modules use these names as they would use `time` and `threading`, for example `runtime.monotonic()`, so that
the simulation in `tests/simulation` can replace them: there, the clock is virtual, and a seed decides which
thread runs next.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Condition, Event, Lock, RLock, Thread, current_thread, get_ident
from time import monotonic, perf_counter, perf_counter_ns
from uuid import uuid4

__all__ = [
    "Condition",
    "Event",
    "Future",
    "Lock",
    "RLock",
    "Thread",
    "ThreadPoolExecutor",
    "current_thread",
    "get_ident",
    "monotonic",
    "perf_counter",
    "perf_counter_ns",
    "uuid4",
]
