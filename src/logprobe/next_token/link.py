"""`Link`: exchanges with one server, its failures as this library's errors.

Before it: `HttpEngine`. After it: the network. A link belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, Final, final

import msgspec

from logprobe.config import require
from logprobe.errors import (
    EngineClosedError,
    ModelError,
    ParameterError,
    PromptTooLongError,
    ServerError,
    UnreachableError,
)

if TYPE_CHECKING:
    import httpx

    from logprobe.errors import LogprobeError

FULL: Final = 429
RETRY_AFTER_S: Final = 1.0
LEAST_WAIT_S: Final = 0.05
KEEP_ALIVE_S: Final = 2.0  # less than servers keep a link open, so that none is used as it closes


class Told(msgspec.Struct):
    """What a server says of a failure."""

    message: str = ""
    param: str | None = None
    code: str | None = None


class Failure(msgspec.Struct):
    """The body of a reply other than 2xx."""

    error: Told


@final
class Link:
    """Exchanges with the server at `url`, each within `timeout_s`, waits for a full server included.

    Raises:
        ModelError: httpx is not installed.
        ParameterError: a value that cannot be used.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        is_url = isinstance(url, str) and url.startswith(("http://", "https://"))
        require(is_url, "url", f"must begin with http:// or https://, got {url!r}")
        is_time = isinstance(timeout_s, int | float) and timeout_s > 0
        require(is_time, "request_timeout", f"must be a positive number of seconds, got {timeout_s!r}")
        try:
            import httpx
        except ImportError as error:
            raise ModelError("RemoteLM needs httpx; pip install 'logprobe[remote]'") from error
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._failure = httpx.HTTPError
        self._headers = {b"Content-Type": b"application/json"}
        if api_key is not None:
            self._headers[b"Authorization"] = f"Bearer {api_key}".encode()
        limits = httpx.Limits(keepalive_expiry=KEEP_ALIVE_S)
        no_limit = httpx.Timeout(None)  # each exchange has its own
        try:
            self._client = httpx.AsyncClient(base_url=self.url, limits=limits, timeout=no_limit)
        except httpx.InvalidURL as error:
            raise ParameterError("url", f"{url!r} is no address: {error}") from error

    async def get(self, path: str) -> bytes:
        """The body of a reply.

        Raises:
            ParameterError: the server refuses a value, or the key.
            ServerError: the server failed, stayed full, cannot be reached or took too long.
        """
        return await self._exchange("GET", path, None)

    async def post(self, path: str, body: Any) -> bytes:
        """The body of the reply to a JSON body; errors as `get`."""
        return await self._exchange("POST", path, msgspec.json.encode(body))

    async def close(self) -> None:
        """Let the connections go."""
        await self._client.aclose()

    async def _exchange(self, method: str, path: str, content: bytes | None) -> bytes:
        what = f"{method} {self.url}{path}"
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._once_not_full(method, path, content)
        except TimeoutError as error:
            raise ServerError(
                f"{what}: no reply within {self._timeout_s} s; is the server full? raise request_timeout"
            ) from error
        except self._failure as error:
            raise UnreachableError(f"{what}: {error or type(error).__name__}; is the server up?") from error
        if not reply.is_success:
            raise as_error(reply.status_code, reply.content, what)
        return reply.content

    async def _once_not_full(self, method: str, path: str, content: bytes | None) -> httpx.Response:
        while True:
            reply = await self._client.request(method, path, content=content, headers=self._headers)
            if reply.status_code != FULL:
                return reply
            await asyncio.sleep(retry_after_s(reply.headers.get("retry-after")))


def retry_after_s(header: str | None) -> float:
    """Seconds that a full server asks a client to wait; a date, or nothing, counts as one second."""
    try:
        asked_s = float(header or RETRY_AFTER_S)
    except ValueError:
        return RETRY_AFTER_S
    return max(asked_s, LEAST_WAIT_S) if math.isfinite(asked_s) else RETRY_AFTER_S


def as_error(status: int, content: bytes, what: str) -> LogprobeError:
    """What a reply other than 2xx means to the caller."""
    try:
        told = msgspec.json.decode(content, type=Failure).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ServerError(f"{what}: status {status}, and no word of this library's server; is it one?")
    message = told.message
    if status in {401, 403}:
        return ParameterError("api_key", message)
    if status == 503:
        return EngineClosedError(f"{what}: {message}")
    if status not in {400, 404} or told.param is None:
        return ServerError(f"{what}: status {status}: {message}")
    kind = PromptTooLongError if told.code == "context_length_exceeded" else ParameterError
    return kind(told.param, message.removeprefix(f"{told.param}: "))
