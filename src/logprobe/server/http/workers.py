"""Worker threads that read bodies and write replies; only small jobs run on the event loop.

Reading (decoding, validation, tokenization) runs on the event loop if the body is so small that reading takes
only milliseconds. Writing runs on the event loop if the reply has few entries. Everything else runs in a
worker thread. Tokenizer and grammar code is native and releases the GIL; Python code is preempted every few
milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, TypeVar

from logprobe import runtime
from logprobe.server.limits import InProgress
from logprobe.server.openai.bodies import (
    GUIDED,
    JudgeBody,
    LabelBody,
    LoglikelihoodBody,
    RerankBody,
    TokenScoreBody,
    UncertaintyBody,
)
from logprobe.text.chat import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

T = TypeVar("T")

# Maximum sizes of jobs that run on the event loop.
QUICK_BYTES: Final = 1 << 13  # bytes of a body or a stored conversation
QUICK_PROMPTS: Final = 8  # prompts or continuations
QUICK_ENTRIES: Final = 1 << 11  # tokens in a reply, including alternatives
NUM_THREADS: Final = 2
MAX_JOBS: Final = 256  # maximum number of reading jobs, running or waiting

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
"""Fields that may contain a grammar, refer to a long conversation, make the chat template run more than once,
or take tens of microseconds per item."""


def is_bounded(body: Any) -> bool:
    """Return True if the time to process a body is bounded by its size in bytes."""
    if any(getattr(body, name, None) for name in SLOW_FIELDS):
        return False
    for name in ("prompt", "prompts", "continuations", "items"):
        prompts = getattr(body, name, None)
        if isinstance(prompts, list) and len(prompts) > QUICK_PROMPTS and type(prompts[0]) is not int:
            return False  # each prompt becomes a request; a list of ids is a single prompt
    if (
        isinstance(body, LoglikelihoodBody)
        and not isinstance(body.context, list)
        and len(body.continuations) > 1
    ):
        return False  # the context is tokenized with each continuation
    if isinstance(body, TokenScoreBody) and isinstance(body.query, str) and len(body.items) > 1:
        return False  # the query is tokenized with each item
    if isinstance(body, RerankBody) and len(body.documents) > 1:
        return False  # the query is tokenized with each document
    if isinstance(body, UncertaintyBody) and body.n > QUICK_PROMPTS:
        return False  # each answer becomes a request
    if isinstance(body, LabelBody | JudgeBody):
        most = 1 if body.input else QUICK_PROMPTS  # a text is tokenized with each answer, a conversation once
        return not isinstance(body.input, list) and body.num_answers <= most and is_plain(body.messages or [])
    messages = getattr(body, "messages", None) or getattr(body, "input", None) or []
    return not isinstance(messages, list) or is_plain(messages)


class TurnQueue:
    """Thread-safe queue of jobs: round-robin over callers, and in order of arrival for each caller."""

    def __init__(self) -> None:
        self._jobs: dict[
            str, deque[tuple[Future[Any], Callable[[], Any]]]
        ] = {}  # no empty queues, the next caller first
        self._lock = runtime.Lock()

    def add(self, job: Callable[[], T], caller: str) -> Future[T]:
        """Queue a job; `run_next` must then be called once for this job, in any thread."""
        future = runtime.Future[T]()
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
                self._jobs[caller] = jobs  # at the end of the round
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(job())
        except BaseException as error:  # noqa: BLE001 - re-raised where the future is awaited
            future.set_exception(error)
        finally:
            del future, job  # breaks a reference cycle: future, its error, the traceback, this frame


class Workers:
    """Thread pools that read bodies and write replies; used in one event loop.

    The number of reading jobs is limited, and they run round-robin over callers. Writing jobs run in order of
    arrival. The pools are separate, so that finished generations do not wait behind new bodies.
    """

    def __init__(self) -> None:
        self._readers = runtime.ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="logprobe-http-read")
        self._writers = runtime.ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="logprobe-http-write")
        self._waiting = TurnQueue()
        self._in_progress = InProgress(MAX_JOBS, "requests waiting to be decoded")

    async def read(self, job: Callable[[], T], num_bytes: int | None, caller: str = "") -> T:
        """Run a job that reads `num_bytes` bytes (None: the job's time is not bounded by the size).

        Small jobs run immediately on the event loop. A job that runs in a thread is not stopped if the client
        disconnects.

        Raises:
            ApiError: 429 if too many jobs are waiting.
        """
        if num_bytes is not None and num_bytes <= QUICK_BYTES:
            return job()
        with ExitStack() as held:
            held.enter_context(self._in_progress.hold(caller))
            future = asyncio.wrap_future(self._waiting.add(job, caller))
            self._readers.submit(self._waiting.run_next)
            end = held.pop_all().close  # called when the job has finished or is cancelled
        future.add_done_callback(lambda _: end())
        return await future

    async def write(self, job: Callable[[], T], num_entries: int | None) -> T:
        """Run a job that writes `num_entries` entries (None: the job's time is not bounded by the number).

        Small jobs run immediately on the event loop. The queue needs no limit of its own, because the number
        of requests is limited.
        """
        if num_entries is not None and num_entries <= QUICK_ENTRIES:
            return job()
        return await asyncio.get_running_loop().run_in_executor(self._writers, job)
