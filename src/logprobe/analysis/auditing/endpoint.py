"""`Endpoint`: the server that is asked, and its failures as this library's errors.

A `Connection` belongs to one event loop. What a server refuses (4xx) is an answer, as an audit tells what it
has not; what it cannot do at all is an error of one line, without the key.
"""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self, final

from logprobe.errors import (
    ModelError,
    ParameterError,
    ServerError,
    UnreachableError,
    require,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    import httpx

FULL: Final = 429
REFUSED_KEY: Final = (401, 403)
MAX_BYTES: Final = 1 << 25  # of one reply: 1,024 prompt rows of 20 alternatives are some 3 MB
# One JSON value for so many bytes of the limit, as each takes up to a hundred in memory; those rows have
# some 200,000 values, a fifth of what a reply of the default limit may have.
BYTES_PER_VALUE: Final = 32
# One of them stands before, after or between values, or ends an event of a stream.
_SEPARATORS: Final = (b"[", b"{", b",", b"\n", b"\r")
ERROR_BYTES: Final = 1 << 16
RETRY_AFTER_S: Final = 1.0
MIN_WAIT_S: Final = 0.05
MESSAGE_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 60.0  # of one request, waits for a full server included
    max_in_flight: int = 64
    max_bytes: int = MAX_BYTES  # of one reply


@dataclass(frozen=True, slots=True, init=False)
class Endpoint:
    """An OpenAI-compatible server; `url` with or without `/v1`.

    Args:
        url: http:// or https://.
        api_key: sent as a bearer token; it stands in no message.
        timeout_s: of one request, waits for a full server included.
        max_in_flight: most requests at once.
        max_bytes: of one reply.

    Raises:
        ParameterError: a value that cannot be used.
    """

    url: str
    settings: _Settings

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        max_in_flight: int = 64,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        is_url = isinstance(url, str) and url.startswith(("http://", "https://"))
        require(is_url, "url", "must begin with http:// or https://", got=url)
        has_user = "@" in url.split("//", 1)[1].split("/", 1)[0]
        require(not has_user, "url", "holds a user or a password; give a key as api_key")
        is_time = isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf
        require(is_time, "timeout_s", "must be a positive number of seconds", got=timeout_s)
        require(max_in_flight >= 1, "max_in_flight", "must be at least 1", got=max_in_flight)
        require(max_bytes >= 1, "max_bytes", "must be at least 1", got=max_bytes)
        is_key = api_key is None or (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable())
        require(is_key, "api_key", "must be of printable ASCII characters")
        object.__setattr__(self, "url", url.rstrip("/").removesuffix("/v1"))
        settings = _Settings(
            api_key=api_key, timeout_s=timeout_s, max_in_flight=max_in_flight, max_bytes=max_bytes
        )
        object.__setattr__(self, "settings", settings)


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply: its status and its JSON, or of one other than 2xx the server's words."""

    status: int
    value: Any
    words: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether the server took the request."""
        return 200 <= self.status < 300


@final
class Connection:
    """Requests to one endpoint, within one event loop.

    Raises:
        ModelError: httpx is not installed.
        ParameterError: an address that cannot be used.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ModelError("an audit needs httpx; pip install 'logprobe[remote]'") from error
        self.url = endpoint.url
        self.settings = endpoint.settings
        self.num_requests = 0
        self._failure = httpx.HTTPError
        self._slots = asyncio.Semaphore(self.settings.max_in_flight)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.settings.api_key is not None:
            self._headers["Authorization"] = f"Bearer {self.settings.api_key}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        try:
            # Each exchange has a limit of its own.
            self._client = httpx.AsyncClient(base_url=self.url, limits=limits, timeout=httpx.Timeout(None))
        except httpx.InvalidURL as error:
            raise ParameterError("url", f"{self.url!r} is no address: {error}") from error

    async def get(self, path: str) -> Answered:
        """The reply of a GET; errors as `post`."""
        return await self._exchange("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Answered:
        """The reply to a body; of a stream (`stream: true`) the list of its events.

        Raises:
            ParameterError: the server refuses the key.
            ServerError: no whole reply that can be parsed within `timeout_s`, no JSON, or too much of it.
            UnreachableError: no connection, or one that broke.
        """
        return await self._exchange("POST", path, body)

    async def close(self) -> None:
        """Let the connections go."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> Answered:
        import anyio

        what = f"{method} {self.url}{path}"
        async with self._slots:
            self.num_requests += 1
            try:
                # httpx ends what it has begun where anyio gives it up.
                with anyio.fail_after(self.settings.timeout_s):
                    status, kind, data = await self._once_not_full(method, path, body)
                    return await anyio.to_thread.run_sync(
                        self._answered, status, kind, data, what, abandon_on_cancel=True
                    )
            except TimeoutError as error:
                limit = f"{self.settings.timeout_s:g} s"
                raise ServerError(f"{what}: no whole reply within {limit}; raise timeout_s") from error
            except self._failure as error:
                words = self._printable(str(error) or type(error).__name__)
                raise UnreachableError(f"{what}: {words}; is the server up?") from error

    def _answered(self, status: int, kind: str, data: bytes, what: str) -> Answered:
        if status in REFUSED_KEY:
            words = _words_of(data)
            raise ParameterError("api_key", f"the server refuses it ({status}): {self._printable(words)}")
        if not 200 <= status < 300:
            return Answered(status, None, self._printable(_words_of(data)))
        num_values = sum(map(data.count, _SEPARATORS))
        most = max(self.settings.max_bytes // BYTES_PER_VALUE, ERROR_BYTES)
        if num_values > most:
            raise ServerError(f"{what}: the reply has more than {most} JSON values; raise max_bytes")
        value = self._events(data, what) if "event-stream" in kind else self._json(data, what)
        return Answered(status, value)

    async def _once_not_full(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[int, str, bytes]:
        content = None if body is None else json.dumps(body).encode()
        while True:
            asked = self._client.stream(method, path, content=content, headers=self._headers)
            async with asked as reply:
                most = self.settings.max_bytes if reply.is_success else ERROR_BYTES
                data = await _read(reply, most, f"{method} {self.url}{path}")
            if reply.status_code != FULL:
                return reply.status_code, reply.headers.get("content-type", ""), data
            await asyncio.sleep(_retry_after_s(reply.headers.get("retry-after")))

    def _json(self, data: bytes, what: str) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            start = self._printable(data.decode("utf-8", "replace"), 60)
            raise ServerError(
                f"{what}: answers what is no JSON ({start!r}); is it the right address?"
            ) from error

    def _events(self, data: bytes, what: str) -> list[Any]:
        """The JSON of each event of a stream (WHATWG server-sent events), up to `[DONE]`."""
        events = []
        for line in data.splitlines():
            if not line.startswith(b"data:"):
                continue
            value = line.removeprefix(b"data:").strip()
            if value == b"[DONE]":
                break
            event = self._json(value, what)
            if isinstance(event, dict) and "error" in event and not event.get("choices"):
                raise ServerError(f"{what}: the stream fails: {self._printable(_words_of(value))}")
            events.append(event)
        return events

    def _printable(self, text: str, max_chars: int = MESSAGE_CHARS) -> str:
        """A server's words as a terminal may show them, without the key."""
        if self.settings.api_key:
            text = text.replace(self.settings.api_key, "…")
        return printable(text, max_chars)


def printable(text: str, max_chars: int = MESSAGE_CHARS) -> str:
    """A text in one line, without control characters, cut where it is long."""
    shown = "".join(character if character.isprintable() else " " for character in text[: 4 * max_chars])
    shown = " ".join(shown.split())
    return shown if len(shown) <= max_chars else f"{shown[: max_chars - 1]}…"


async def _read(reply: httpx.Response, max_bytes: int, what: str) -> bytes:
    coding = reply.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise ServerError(f"{what}: the reply is compressed ({printable(coding, 40)}), unasked")
    data = bytearray()
    async for part in reply.aiter_raw():
        data += part
        if len(data) > max_bytes:
            if not reply.is_success:
                break  # its first words do
            raise ServerError(f"{what}: the reply is longer than {max_bytes} bytes")
    return bytes(data[:max_bytes])


def _retry_after_s(header: str | None) -> float:
    """Seconds that a full server asks to wait; a date, or nothing, counts as one second."""
    try:
        asked_s = float(header or RETRY_AFTER_S)
    except ValueError:
        return RETRY_AFTER_S
    return max(asked_s, MIN_WAIT_S) if math.isfinite(asked_s) else RETRY_AFTER_S


def _words_of(data: bytes) -> str:
    """What the body of a refusal says: the message of OpenAI's shape, of others, or its text."""
    text = data.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    return value if isinstance(value, str) else json.dumps(value)
