"""`Endpoint`, the server to audit, and `Connection`, which sends requests to it.

A rejected request is returned as a `Refusal`, because the audit reports what a server lacks. A failed
exchange raises an error.
"""

from __future__ import annotations

import json
import math
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self, final

from logprobe.errors import ParameterError, ServerError, require
from logprobe.transport.http_client import HttpClient, printable

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_BYTES: Final = 1 << 25  # limit on one reply; 1,024 prompt rows with 20 alternatives take about 3 MB
# A reply of n bytes may have n / 32 JSON values, each of which takes up to 100 bytes in memory. The 1,024
# rows above have about 200,000 values, a fifth of the limit at `MAX_BYTES`.
BYTES_PER_VALUE: Final = 32
MIN_VALUES: Final = 1 << 16
# Each JSON value has one of these bytes before or after it; a line break ends an event in a stream.
SEPARATORS: Final = (b"[", b"{", b",", b"\n", b"\r")
MESSAGE_CHARS: Final = 300


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server.

    Args:
        url: http:// or https:// URL, with or without `/v1`.
        api_key: key that is sent as a bearer token; it does not appear in messages.
        timeout_s: timeout for one request in seconds, including waits for a busy server.
        max_bytes: maximum size of one reply, in bytes.

    Raises:
        ParameterError: a value is invalid.
    """

    url: str
    _: KW_ONLY
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 60.0
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        is_url = isinstance(self.url, str) and self.url.startswith(("http://", "https://"))
        require(is_url, "url", "must begin with http:// or https://", got=self.url)
        has_user = "@" in self.url.split("//", 1)[1].split("/", 1)[0]
        require(not has_user, "url", "must not contain a user name or password; pass the key as api_key")
        is_time = isinstance(self.timeout_s, int | float) and 0 < self.timeout_s < math.inf
        require(is_time, "timeout_s", "must be a positive number of seconds", got=self.timeout_s)
        require(self.max_bytes >= 1, "max_bytes", "must be at least 1", got=self.max_bytes)
        key = self.api_key
        is_text = isinstance(key, str) and key.isascii() and key.isprintable() and key == key.strip()
        require(key is None or is_text, "api_key", "must be printable ASCII without spaces around it")
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1"))


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that the server rejected, with its message."""

    status: int
    message: str

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"


@final
class Connection(HttpClient):
    """Sends requests to one endpoint, within one event loop; raises the errors of `HttpClient`."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint.url, endpoint.api_key, endpoint.timeout_s)
        self.num_requests = 0
        self._endpoint = endpoint

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request, and return the reply's JSON, the list of a stream's events, or a `Refusal`.

        The request is a GET if `body` is None, otherwise a POST.

        Raises:
            ParameterError: the server rejects the key.
            ServerError: the reply is incomplete after `timeout_s`, is not JSON, or is too large.
            UnreachableError: the connection failed or was lost.
        """
        self.num_requests += 1
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        what, max_bytes = f"{method} {self.url}{path}", self._endpoint.max_bytes
        reply = await self.exchange(method, path, content, max_bytes)
        if not reply.is_success:
            message = self._printable(reply.data)
            if reply.status in {401, 403}:
                raise ParameterError("api_key", f"the server rejects it ({reply.status}): {message}")
            return Refusal(reply.status, message)
        max_values = max(max_bytes // BYTES_PER_VALUE, MIN_VALUES)
        if sum(map(reply.data.count, SEPARATORS)) > max_values:
            limit = f"{max_values} JSON values, the limit for max_bytes={max_bytes}"
            raise ServerError(f"{what}: the reply has more than {limit}; raise max_bytes")
        return (self._events if "event-stream" in reply.content_type else self._json)(reply.data, what)

    def _json(self, data: bytes, what: str) -> Any:
        try:
            return json.loads(data)  # unlike msgspec, accepts the NaN and Infinity that some servers write
        except (ValueError, RecursionError) as error:
            start = self._printable(data, 60)
            message = f"{what}: the reply is not JSON ({start!r}); check the address"
            raise ServerError(message) from error

    def _events(self, data: bytes, what: str) -> list[Any]:
        """Parse the server-sent events in a stream, up to `[DONE]`."""
        events = []
        for line in data.splitlines():
            if not line.startswith(b"data:"):
                continue
            value = line.removeprefix(b"data:").strip()
            if value == b"[DONE]":
                break
            event = self._json(value, what)
            if isinstance(event, dict) and "error" in event and not event.get("choices"):
                raise ServerError(f"{what}: the stream ended with an error: {self._printable(value)}")
            events.append(event)
        return events

    def _printable(self, data: bytes, max_chars: int = MESSAGE_CHARS) -> str:
        """Return a server's message on one line, shortened and without the API key."""
        text = data.decode("utf-8", "replace")
        if self._endpoint.api_key:
            text = text.replace(self._endpoint.api_key, "…")
        return printable(text, max_chars)
