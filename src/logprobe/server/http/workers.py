"""What is done on the event loop and what beside it, by size alone, and the threads for the latter.

Reading (decoding, checking, tokenising) runs on the event loop where few bytes bound it to milliseconds, and
writing where a reply has few numbers; all else runs in a worker. Text and grammars are native code that lets
other threads run meanwhile; Python code is made to every few milliseconds.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, TypeVar

from logprobe.server.limits import InProgress
from logprobe.server.openai.bodies import (
    GUIDED,
    ClassifyBody,
    JudgeBody,
    RerankBody,
    ScoreBody,
    UncertaintyBody,
)
from logprobe.text.chat import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

QUICK_BYTES: Final = 1 << 13  # of a body, or of a stored conversation
QUICK_PROMPTS: Final = 8  # or continuations
QUICK_ENTRIES: Final = 1 << 11  # tokens of a reply and their alternatives
NUM_THREADS: Final = 2
MAX_JOBS: Final = 256  # running and waiting

SLOW_FIELDS: Final = (
    "response_format",
    "text",
    "logits_processors_args",
    *GUIDED,
    "structured_outputs",
    "previous_response_id",
    "tools",
    "chat_template_kwargs",
    "bad_words",
    "allowed_token_ids",
    "content_free",
)
"""May hold a grammar, stand for a long conversation, make the chat template run more than once, or take tens
of microseconds for each of their items."""


def is_bounded(body: Any) -> bool:
    """Whether the bytes of a body bound the time that it takes to understand."""
    if any(getattr(body, name, None) for name in SLOW_FIELDS):
        return False
    for name in ("prompt", "prompts", "continuations"):
        prompts = getattr(body, name, None)
        if isinstance(prompts, list) and len(prompts) > QUICK_PROMPTS and type(prompts[0]) is not int:
            return False  # many, each of which becomes a request; a list of ids is one
    if isinstance(body, ScoreBody) and not isinstance(body.context, list) and len(body.continuations) > 1:
        return False  # a text or a conversation is tokenised with each
    if isinstance(body, RerankBody) and len(body.documents) > 1:
        return False  # the query is tokenised with each
    if isinstance(body, UncertaintyBody) and body.n > QUICK_PROMPTS:
        return False  # each answer becomes a request
    if isinstance(body, ClassifyBody | JudgeBody):
        most = 1 if body.input else QUICK_PROMPTS  # a text is tokenised with each answer, a conversation once
        return not isinstance(body.input, list) and body.num_answers <= most and is_plain(body.messages or [])
    messages = getattr(body, "messages", None) or getattr(body, "input", None) or []
    return not isinstance(messages, list) or is_plain(messages)


class TurnQueue:
    """Jobs that wait, by caller: callers take turns, and each one's jobs run in order of arrival."""

    def __init__(self) -> None:
        self._jobs: dict[
            str, deque[tuple[Future[Any], Callable[[], Any]]]
        ] = {}  # none empty, next turn first
        self._lock = threading.Lock()

    def add(self, job: Callable[[], T], caller: str) -> Future[T]:
        """Queue a job; one call of `run_next` has to follow, from any thread."""
        future = Future[T]()
        with self._lock:
            self._jobs.setdefault(caller, deque()).append((future, job))
        return future

    def run_next(self) -> None:
        """Run the first job of the caller whose turn it is."""
        with self._lock:
            caller = next(iter(self._jobs))
            jobs = self._jobs.pop(caller)
            future, job = jobs.popleft()
            if jobs:
                self._jobs[caller] = jobs  # as the last one
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(job())
        except BaseException as error:  # noqa: BLE001 - whoever waits for the job is told
            future.set_exception(error)
        finally:
            del future, job  # to which this frame would refer from the traceback of the future's error


class Workers:
    """Threads that read a bounded number of bodies, and others that write replies; for one event loop.

    Readers take turns between callers, writers take their jobs in order of arrival. They are apart, so that
    what has run does not wait behind what others want to have read.
    """

    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="logprobe-http-read")
        self._writers = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="logprobe-http-write")
        self._waiting = TurnQueue()
        self._in_progress = InProgress(MAX_JOBS, "requests that wait to be read")

    async def read(self, job: Callable[[], T], num_bytes: int | None, caller: str = "") -> T:
        """The result of a caller's job that reads so many bytes; None: they do not bound its time.

        A client that leaves does not end it.

        Raises:
            ApiError: 429, too many wait.
        """
        if num_bytes is not None and num_bytes <= QUICK_BYTES:
            return job()
        with ExitStack() as held:
            held.enter_context(self._in_progress.hold(caller))
            future = asyncio.wrap_future(self._waiting.add(job, caller))
            self._readers.submit(self._waiting.run_next)
            end = held.pop_all().close  # once the job has ended, or its client has left
        future.add_done_callback(lambda _: end())
        return await future

    async def write(self, job: Callable[[], T], num_entries: int | None) -> T:
        """The result of a job that writes so many entries of a request that has run: it waits for room.

        None: they do not bound its time.
        """
        if num_entries is not None and num_entries <= QUICK_ENTRIES:
            return job()
        return await asyncio.get_running_loop().run_in_executor(self._writers, job)
