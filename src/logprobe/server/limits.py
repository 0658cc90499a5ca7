"""Request limits and admission control.

A request that exceeds a limit gets a 400 that names the limit. A request that exceeds the free capacity waits
in its caller's queue, or gets a 429 if the queue is full. One caller may use the whole capacity, because
callers with few requests in progress have a reserve in addition. `openai.fields` checks the number of
alternatives per position (`max_logprobs`).
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from logprobe import runtime
from logprobe.processors.builtin.grammar import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_GRAMMAR_DEPTH,
    MAX_GRAMMAR_PARTS,
)
from logprobe.records.digests import NUM_IDS
from logprobe.records.fields import is_deeper
from logprobe.records.values import IdLists
from logprobe.server.http.errors import ApiError, bad_request, server_full
from logprobe.server.openai.bodies import GUIDED, AnswersBody, LoglikelihoodBody

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logprobe.engine.protocol import ModelShape
    from logprobe.sampling import SamplingParams
    from logprobe.server.settings import ServerSettings
    from logprobe.transport.messages import Request

# Memory of one log-probability entry (token id and logprob), in the engine's record and in the reply.
RECORD_BYTES: Final = 8
ENTRY_BYTES: Final = RECORD_BYTES + 250  # record, Python objects and JSON of one alternative
ROUTE_BYTES: Final = 4 + 2 + 2 + 3  # per expert: in a step, in the output, and in the reply, also as base64
WHOLE_ROW_BYTES: Final = 2 * 4  # per entry of a whole row: one copy in the engine, one in the reply

CHARS_A_VALUE: Final = 16  # characters of text that count as one value
RESERVE_PART: Final = 8
"""In addition to each limit, there is a reserve of 1/8, for callers that use at most 1/8 of the reserve."""
_ESCAPED_MARK: Final = re.compile(rb"\\u00(?:[57][bB]|3[aA])")  # [ { :
_ESCAPED_COMMA: Final = re.compile(rb"\\u002[cC]")
MAX_DEPTH: Final = MAX_GRAMMAR_DEPTH  # nesting depth of values in a body


UNITS: Final = {  # of the fields of `Cost`
    "requests": "concurrent completions",
    "tokens": "tokens",
    "logprob_bytes": "bytes for log-probabilities",
}

LIMITS: Final = (
    "max_body_bytes",
    "max_body_values",
    "max_text_bytes",
    "max_messages",
    "max_token_ids",
    "max_logprobs",
    "max_logprob_token_ids",
    "max_bad_words",
    "max_stop",
    "max_stop_bytes",
    "max_requests",
    "max_tokens_in_flight",
    "max_logprob_bytes",
    "max_waiting",
    "max_field_rows",
    "max_stored",
    "max_stored_bytes",
    "header_timeout_s",
    "body_timeout_s",
    "wait_timeout_s",
    "write_timeout_s",
)
"""Settings that limit clients, in the order of `limit_table`."""


def limit_table(settings: ServerSettings) -> dict[str, float]:
    """Return all limits by name, including those on grammars and nesting depth, which are constants."""
    return {name: getattr(settings, name) for name in LIMITS} | {
        "max_depth": MAX_DEPTH,
        "max_grammar_bytes": MAX_GRAMMAR_BYTES,
        "max_grammar_parts": MAX_GRAMMAR_PARTS,
        "max_choices": MAX_CHOICES,
    }


def utf8_bytes(text: str) -> int:
    """Return the size of a text in bytes of UTF-8."""
    return len(text.encode("utf-8", "surrogatepass"))


def check_count(settings: ServerSettings, limit: str, param: str, count: int, of: str) -> None:
    """Reject `count` items of kind `of` if the setting named `limit` allows fewer.

    Raises:
        ApiError: 400 with the count, the limit and the limit's name.
    """
    most = getattr(settings, limit)
    if count > most and most != -1:
        raise bad_request(param, f"has {count} {of}, but at most {most} are allowed ({limit})")


def check_values(settings: ServerSettings, data: bytes) -> None:
    """Reject a body with too many JSON values, before it is decoded.

    The number of values is estimated from the punctuation. This is an upper bound, because punctuation inside
    strings counts as well.

    Raises:
        ApiError: 400 if there are too many values.
    """
    num_values = data.count(b",") + 8 * sum(map(data.count, (b"[", b"{", b":")))
    if b"\\u00" in data:  # a string may be JSON that is decoded later: count its escaped punctuation as well
        num_values += 8 * len(_ESCAPED_MARK.findall(data)) + len(_ESCAPED_COMMA.findall(data))
    if num_values > settings.max_body_values:
        most = settings.max_body_values
        raise bad_request(
            None,
            f"the body has up to {num_values} JSON values, but the server allows {most} (max_body_values); "
            "send a smaller body",
        )


def check_body(settings: ServerSettings, body: Any) -> None:
    """Reject a body with a list that is too long or a value that is nested too deeply.

    Raises:
        ApiError: 400 that names the field.
    """
    counts = {
        "messages": ("max_messages", "messages"),
        "content_free": ("max_messages", "messages"),
        "input": ("max_messages", "messages"),
        "continuations": ("max_requests", "continuations"),
        "prompts": ("max_requests", "prompts"),
        "items": ("max_requests", "items"),
        "documents": ("max_requests", "documents"),
        "labels": ("max_requests", "labels"),
        "scale": ("max_requests", "grades"),
        "allowed_token_ids": ("max_token_ids", "ids"),
        "stop_token_ids": ("max_token_ids", "ids"),
        "logit_bias": ("max_token_ids", "entries"),
        "bad_words": ("max_bad_words", "texts"),
        "stop": ("max_stop", "texts"),
    }
    if isinstance(body, AnswersBody):
        counts["input"] = ("max_requests", "texts")
    for name, (limit, of) in counts.items():
        value = getattr(body, name, None)
        if isinstance(value, list | dict):
            check_count(settings, limit, name, len(value), of)
    asked = getattr(body, "logprob_token_ids", None)
    named: dict[str, list[Any]] = {
        "logprob_token_ids": asked or [] if isinstance(body, LoglikelihoodBody) else [asked],
        "label_token_ids": [getattr(body, "label_token_ids", None)],
    }
    for name, lists in named.items():
        for ids in lists:
            check_count(settings, "max_logprob_token_ids", name, _most_named(ids or ()), "ids per position")
    stops = getattr(body, "stop", None) or []
    stop_bytes = sum(map(utf8_bytes, [stops] if isinstance(stops, str) else stops))
    check_count(settings, "max_stop_bytes", "stop", stop_bytes, "bytes")
    prompts = getattr(body, "prompt", None)
    if isinstance(prompts, list) and not all(isinstance(prompt, int) for prompt in prompts[:1]):
        check_count(settings, "max_requests", "prompt", len(prompts), "prompts")
        # Every prompt's request processes these fields again.
        shared = len(prompts) * sum(num_values(getattr(body, name, None)) for name in SHARED_FIELDS)
        check_count(settings, "max_body_values", "prompt", shared, "values, counted once per prompt")
    for name in FREE_FIELDS:
        if is_deeper(getattr(body, name, None), MAX_DEPTH):
            raise bad_request(name, f"is nested deeper than {MAX_DEPTH} levels (max_depth)")


def _most_named(ids: Sequence[Any]) -> int:
    """Return the largest number of ids at one position."""
    lists = [one for one in ids if isinstance(one, list)]
    return max(map(len, lists)) if lists else len(ids)


SHARED_FIELDS: Final = (
    "stop",
    "stop_token_ids",
    "logprob_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "response_format",
    "logits_processors_args",
    "structured_outputs",
    *GUIDED,
)
"""Fields without a limit on their size that apply to each prompt in a body."""


def num_values(value: Any) -> int:
    """Return the number of nested values; every `CHARS_A_VALUE` characters of text count as one more."""
    count, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, list):
            pending += item
        else:
            count += 1 + (len(item) // CHARS_A_VALUE if isinstance(item, str) else 0)
    return count


FREE_FIELDS: Final = (
    "messages",
    "content_free",
    "input",
    "response_format",
    "text",
    "logits_processors_args",
    "tools",
    "tool_choice",
    "guided_json",
    "structured_outputs",
    "chat_template_kwargs",
)
"""Fields whose contents have no declared type and may be nested to any depth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Upper bounds on the resources that requests use."""

    requests: int
    tokens: int
    logprob_bytes: int

    @classmethod
    def of(cls, requests: Sequence[Request], vocab_size: int, num_echoes: int = 1) -> Cost:
        """Return the cost of requests if the reply contains each prompt `num_echoes` times."""
        samples = sum(request.params.num_samples for request in requests)
        tokens = sum(
            len(request.prompt_token_ids) + request.params.num_samples * request.params.max_tokens
            for request in requests
        )
        return cls(
            requests=samples,
            tokens=tokens,
            logprob_bytes=sum(_logprob_bytes(request, vocab_size, num_echoes) for request in requests),
        )

    @classmethod
    def of_rows(cls, num_rows: int, at_once: int, vocab_size: int) -> Cost:
        """Return the cost of `num_rows` next-token rows, at most `at_once` of which run concurrently."""
        return cls(requests=at_once, tokens=num_rows, logprob_bytes=at_once * vocab_size * WHOLE_ROW_BYTES)

    @classmethod
    def of_routes(cls, requests: Sequence[Request], shape: ModelShape | None) -> Cost:
        """Return the additional cost of requests that report expert routes of a model with this shape."""
        num_routes = 0 if shape is None else shape.num_expert_layers * shape.experts_per_token
        num_tokens = sum(
            request.params.num_samples * (len(request.prompt_token_ids) + request.params.max_tokens)
            for request in requests
            if request.params.return_routed_experts
        )
        return cls(requests=0, tokens=0, logprob_bytes=num_tokens * num_routes * ROUTE_BYTES)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            requests=self.requests + other.requests,
            tokens=self.tokens + other.tokens,
            logprob_bytes=self.logprob_bytes + other.logprob_bytes,
        )


class NoRoomError(ApiError):
    """429: the free capacity is smaller than `cost`, the cost of the request."""

    def __init__(self, what: str, cost: Cost) -> None:
        full = server_full(what)
        super().__init__(full.status, full.message, code=full.code, headers=full.headers)
        self.cost = cost


class Ticket:
    """Reserved capacity for one request, until it is released."""

    def __init__(self, limits: Limits, cost: Cost, caller: str) -> None:
        self._limits = limits
        self._cost: Cost | None = cost
        self._caller = caller

    def release(self) -> None:
        """Release the capacity; a second call does nothing."""
        cost, self._cost = self._cost, None
        if cost is not None:
            self._limits.subtract(cost, self._caller)


class _Waiter:
    """A request that waits in its caller's queue for a ticket."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.ticket: Ticket | None = None
        self._loop = asyncio.get_running_loop()
        self._admitted = self._loop.create_future()

    def admit(self, ticket: Ticket) -> bool:
        """Hand over a ticket; return False if the waiter's event loop is closed. Any thread may call this."""
        self.ticket = ticket
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            self.ticket = None
            return False
        return True

    async def admission(self) -> Ticket:
        """Wait for the ticket."""
        await self._admitted
        assert self.ticket is not None
        return self.ticket

    def _wake(self) -> None:
        if not self._admitted.done():  # the waiter may have given up
            self._admitted.set_result(None)


class Limits:
    """Counts requests in progress and queues those that wait for capacity; thread-safe."""

    def __init__(self, settings: ServerSettings) -> None:
        self._max = {
            "requests": ("max_requests", settings.max_requests),
            "tokens": ("max_tokens_in_flight", settings.max_tokens_in_flight),
            "logprob_bytes": ("max_logprob_bytes", settings.max_logprob_bytes),
        }
        self._max_waiting, self._wait_timeout_s = settings.max_waiting, settings.wait_timeout_s
        self._in_use = Counter[str]()
        self._by_caller: dict[str, Counter[str]] = {}  # only callers with requests in progress
        self._queues: dict[str, deque[_Waiter]] = {}  # by caller, next turn first; no empty queues
        self._lock = runtime.Lock()

    def admit(self, cost: Cost, caller: str = "", requests: Sequence[Request] = ()) -> Ticket:
        """Reserve capacity for a caller.

        Raises:
            ApiError: 400 if the cost alone exceeds a limit; it names the parameter of `requests` that causes
                most of the cost, if there is one.
            NoRoomError: the free capacity is too small, or earlier requests from the caller are waiting.
        """
        for name, (limit, most) in self._max.items():
            amount = getattr(cost, name)
            if amount > most:
                raise bad_request(
                    _main_parameter(name, amount, requests),
                    f"the request may need {amount} {UNITS[name]}, but the server allows {most} ({limit}); "
                    "send a smaller request, or raise the limit",
                )
        with self._lock:
            if (full := self._full(cost, caller)) is not None:
                raise NoRoomError(full, cost)
            if cost.requests and caller in self._queues:  # a finished reply (no requests) need not queue
                raise NoRoomError(f"{len(self._queues[caller])} earlier requests of this client wait", cost)
            self._add(cost, caller, 1)
        return Ticket(self, cost, caller)

    async def wait(self, cost: Cost, caller: str) -> Ticket:
        """Wait until capacity is free, and reserve it; each caller's requests are served in order of arrival.

        Raises:
            ApiError: 429 if too many requests from the caller wait, or no capacity was free in time.
        """
        waiter = _Waiter(cost)
        with self._lock:
            num_waiting = len(self._queues.get(caller, ()))
            if num_waiting >= self._max_waiting:
                raise server_full(f"{num_waiting} requests of this client are already waiting (max_waiting)")
            self._queues.setdefault(caller, deque()).append(waiter)
            self._admit_waiters()  # capacity may have been freed since `admit` looked
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                return await waiter.admission()
        except TimeoutError as error:
            self._leave(waiter, caller)
            raise server_full(f"no capacity within {self._wait_timeout_s:g} s (wait_timeout_s)") from error
        except BaseException:
            self._leave(waiter, caller)
            raise

    def subtract(self, cost: Cost, caller: str) -> None:
        """Release reserved capacity."""
        with self._lock:
            self._add(cost, caller, -1)
            if not any(self._by_caller[caller].values()):
                del self._by_caller[caller]
            self._admit_waiters()

    def in_use(self) -> dict[str, int]:
        """Return the amount of each resource in use, by name."""
        return {name: self._in_use[name] for name in self._max}

    def _full(self, cost: Cost, caller: str) -> str | None:
        """Describe the usage of the first resource that is too small for a cost; None if all suffice."""
        for name, (_, most) in self._max.items():
            amount = getattr(cost, name)
            holds = self._by_caller.get(caller, Counter())[name] + amount
            if self._in_use[name] + amount > _max_for(most, holds):
                return f"{name}: {self._in_use[name]} of {most} in use"
        return None

    def _admit_waiters(self) -> None:
        """Admit the waiting requests that fit, round-robin over callers; the lock must be held."""
        callers = deque(self._queues)
        while callers:
            caller = callers.popleft()
            waiter = self._queues[caller][0]
            if self._full(waiter.cost, caller) is not None:
                continue
            queue = self._queues.pop(caller)
            queue.popleft()
            if queue:
                self._queues[caller] = queue
                callers.append(caller)
            if waiter.admit(Ticket(self, waiter.cost, caller)):
                self._add(waiter.cost, caller, 1)

    def _leave(self, waiter: _Waiter, caller: str) -> None:
        """Remove a waiter that gave up waiting, or release its ticket if it has already received one."""
        with self._lock:
            queue = self._queues.get(caller, deque())
            if (ticket := waiter.ticket) is None and waiter in queue:
                queue.remove(waiter)
                if not queue:
                    del self._queues[caller]
                self._admit_waiters()  # the next request may need less
        if ticket is not None:
            ticket.release()

    def _add(self, cost: Cost, caller: str, sign: int) -> None:
        own = self._by_caller.setdefault(caller, Counter())
        for name in self._max:
            self._in_use[name] += sign * getattr(cost, name)
            own[name] += sign * getattr(cost, name)


class InProgress:
    """Limits one kind of concurrent work, with a reserve as in `Limits`; not thread-safe."""

    def __init__(self, most: int, what: str) -> None:
        self._max = most
        self._what = what
        self._by_caller = Counter[str]()

    @contextmanager
    def hold(self, caller: str) -> Iterator[None]:
        """Count one more job of a caller until the block ends.

        Raises:
            ApiError: 429 if the limit is reached.
        """
        total = self._by_caller.total()
        if total >= _max_for(self._max, self._by_caller[caller] + 1):
            raise server_full(f"{self._what}: {total} of {self._max} in use")
        self._by_caller[caller] += 1
        try:
            yield
        finally:
            self._by_caller[caller] -= 1
            if not self._by_caller[caller]:
                del self._by_caller[caller]


def _main_parameter(resource: str, amount: int, requests: Sequence[Request]) -> str | None:
    """Return the parameter that causes most of the use of a resource, or None (such as for long prompts)."""
    if not requests or resource == "logprob_bytes":  # which depends on more parameters
        return None
    params = requests[0].params  # all requests of a reply have the same number of samples
    of_samples = "best_of" if params.best_of else "n"
    if resource == "requests":
        return of_samples if params.num_samples > 1 else None
    num_generated = sum(request.params.num_samples * request.params.max_tokens for request in requests)
    if 2 * num_generated <= amount:
        return None
    return "max_tokens" if params.max_tokens >= params.num_samples else of_samples


def _max_for(most: int, holds: int) -> int:
    """Return the limit on the total use that applies to a caller whose own use would become `holds`.

    The limit includes the reserve if `holds` is small.
    """
    reserve = most // RESERVE_PART
    return most + reserve if holds <= max(reserve // RESERVE_PART, 1) else most


class Lifetime:
    """State of a server's shutdown."""

    def __init__(self, drain_s: float) -> None:
        self.drain_s = drain_s
        self.is_draining = False  # new requests are rejected
        self.is_over = False  # running requests are cut off as well

    def check_open(self) -> None:
        """Reject new work once shutdown has begun.

        Raises:
            ApiError: 503, whose `Retry-After` is the drain time, rounded up, and at least 1 s.
        """
        if self.is_draining:
            headers = {"Retry-After": str(max(math.ceil(self.drain_s), 1))}
            message = "the server is shutting down; retry later or on another server"
            raise ApiError(503, message, code="draining", headers=headers)

    def check(self) -> None:
        """Raise an error if the drain time is over, so that unfinished work is aborted.

        Raises:
            ApiError: 503 if the drain time is over.
        """
        if self.is_over:
            message = (
                f"the server shut down before the request finished (drain time {self.drain_s:g} s); retry it"
            )
            raise ApiError(503, message, code="shut_down")


def row_entries(params: SamplingParams, k: int | None, vocab_size: int) -> int:
    """Return the maximum number of entries in a row: `k` alternatives, the chosen token, and requested ids.

    Returns 0 if `k` is None.
    """
    if k is None:
        return 0
    num_top = vocab_size if k == -1 else min(k, vocab_size)
    ids = params.logprob_token_ids
    num_named = NUM_IDS * params.digest + (ids.widest if isinstance(ids, IdLists) else len(ids or ()))
    return num_top + 1 + num_named


def _logprob_bytes(request: Request, vocab_size: int, num_echoes: int) -> int:
    params = request.params

    def row_bytes(k: int | None) -> int:
        return row_entries(params, k, vocab_size) * ENTRY_BYTES

    stages = 2 if params.logprobs_mode == "both" else 1
    num_bytes = params.num_samples * params.max_tokens * row_bytes(params.logprobs) * stages
    num_scored = max(len(request.prompt_token_ids) - (request.first_scored or 0), 0)
    num_bytes += num_echoes * num_scored * row_bytes(params.prompt_logprobs)
    return num_bytes + (vocab_size * WHOLE_ROW_BYTES if request.wants_row else 0)
