"""HTTP client for one server, with limits on reply sizes and on the time of exchanges, and retries on 429.

Needs httpx (extra `remote`). A client belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logprobe.errors import MissingPackageError, ParameterError, ServerError, UnreachableError, require

if TYPE_CHECKING:
    import anyio
    import httpx

FULL: Final = 429
RETRY_AFTER_S: Final = 1.0
MIN_WAIT_S: Final = 0.05
ERROR_BYTES: Final = 1 << 16  # maximum number of bytes to read from an error reply
MESSAGE_CHARS: Final = 2000
# shorter than servers' keep-alive, so that no connection is reused while the server closes it
KEEP_ALIVE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class HttpReply:
    """Status, content type and body of a reply; an error's body is truncated to `ERROR_BYTES`."""

    status: int
    content_type: str
    data: bytes

    @property
    def is_success(self) -> bool:
        """True if the status is 2xx."""
        return 200 <= self.status < 300


class HttpClient:
    """HTTP client for the server at `url`.

    Args:
        url: address that begins with http:// or https://, with or without `/v1` at the end.
        api_key: key to send as a bearer token, or None.
        timeout_s: time limit for one exchange in seconds, including retries while the server is full.
        timeout_name: name of the parameter that sets `timeout_s`, for error messages.

    Raises:
        MissingPackageError: httpx is not installed.
        ParameterError: an argument is invalid.
    """

    def __init__(
        self, url: str, api_key: str | None, timeout_s: float, *, timeout_name: str = "timeout_s"
    ) -> None:
        is_url = isinstance(url, str) and url.startswith(("http://", "https://"))
        require(is_url, "url", "must begin with http:// or https://", got=url)
        is_time = isinstance(timeout_s, int | float) and timeout_s > 0
        require(is_time, timeout_name, "must be a positive number of seconds", got=timeout_s)
        has_space = api_key is not None and api_key != api_key.strip()
        require(not has_space, "api_key", "begins or ends with a space; remove it")
        try:
            import httpx
        except ImportError as error:
            raise MissingPackageError("HTTP clients need httpx; pip install 'logprobe[remote]'") from error
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._timeout_name = timeout_name
        self._failure = httpx.HTTPError
        # Request uncompressed replies, because a compressed one may expand to any size.
        self._headers = {b"Content-Type": b"application/json", b"Accept-Encoding": b"identity"}
        if api_key is not None:
            self._headers[b"Authorization"] = f"Bearer {api_key}".encode()
        limits = httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S)
        no_limit = httpx.Timeout(None)  # `exchange` applies its own limit
        try:
            self._client = httpx.AsyncClient(base_url=self.url, limits=limits, timeout=no_limit)
        except httpx.InvalidURL as error:
            raise ParameterError("url", f"{url!r} is not a valid address: {error}") from error

    async def exchange(
        self, method: str, path: str, content: bytes | None, max_bytes: int, accept: str | None = None
    ) -> HttpReply:
        """Send one request and read the whole reply, whatever its status; `accept` is the `Accept` header.

        Raises:
            ServerError: the reply is not complete in time, is compressed, or is longer than `max_bytes`.
            UnreachableError: the connection failed or broke.
        """
        import anyio

        # httpx closes its connections reliably when anyio cancels it, but not when asyncio does.
        scope = anyio.CancelScope()
        task = asyncio.ensure_future(self._within(scope, method, path, content, max_bytes, accept))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            scope.cancel()
            await asyncio.wait({task})
            raise

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _within(
        self,
        scope: anyio.CancelScope,
        method: str,
        path: str,
        content: bytes | None,
        max_bytes: int,
        accept: str | None,
    ) -> HttpReply:
        import anyio

        what = f"{method} {self.url}{path}"
        with scope:
            try:
                with anyio.fail_after(self._timeout_s):
                    return await self._retried(method, path, content, max_bytes, accept)
            except TimeoutError as error:
                raise ServerError(
                    f"{what}: no complete reply within {self._timeout_s:g} s; the server may be full; "
                    f"raise {self._timeout_name}"
                ) from error
            except self._failure as error:
                words = printable(str(error)) or type(error).__name__
                raise UnreachableError(f"{what}: {words}; is the server up?") from error
        raise asyncio.CancelledError

    async def _retried(
        self, method: str, path: str, content: bytes | None, max_bytes: int, accept: str | None
    ) -> HttpReply:
        """Repeat the request while the server replies with status 429."""
        headers = self._headers if accept is None else {**self._headers, b"Accept": accept.encode()}
        while True:
            stream = self._client.stream(method, path, content=content, headers=headers)
            async with stream as reply:
                data = await _read(reply, max_bytes, f"{method} {self.url}{path}")
            if reply.status_code != FULL:
                return HttpReply(reply.status_code, reply.headers.get("content-type", ""), data)
            await asyncio.sleep(retry_after_s(reply.headers.get("retry-after")))


async def _read(reply: httpx.Response, max_bytes: int, what: str) -> bytes:
    """Return the raw body of a reply, at most `max_bytes`."""
    coding = reply.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise ServerError(f"{what}: the reply is compressed ({printable(coding, 40)}), though not requested")
    data = bytearray()
    async for part in reply.aiter_raw():
        data += part
        if not reply.is_success and len(data) >= ERROR_BYTES:
            return bytes(data[:ERROR_BYTES])
        if len(data) > max_bytes:
            raise ServerError(
                f"{what}: the reply is longer than {max_bytes} bytes, the limit of this request"
            )
    return bytes(data)


def retry_after_s(header: str | None) -> float:
    """Return the number of seconds to wait before a retry; 1 if the header is missing or is a date."""
    try:
        wait_s = float(header or RETRY_AFTER_S)
    except ValueError:
        return RETRY_AFTER_S
    return max(wait_s, MIN_WAIT_S) if math.isfinite(wait_s) else RETRY_AFTER_S


def printable(text: str, max_chars: int = MESSAGE_CHARS) -> str:
    """Return text on one line, without control characters, truncated to `max_chars`."""
    shown = "".join(character if character.isprintable() else " " for character in text[: 4 * max_chars])
    shown = " ".join(shown.split())
    return shown if len(shown) <= max_chars else f"{shown[: max_chars - 1]}…"
