"""`Link`: exchanges with one server, its failures as this library's errors.

A link belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, final

import anyio
import msgspec
import numpy as np

from logprobe.engine.protocol import Capabilities
from logprobe.errors import (
    EngineClosedError,
    ModelError,
    ParameterError,
    PromptTooLongError,
    ServerError,
    UnreachableError,
    require,
)
from logprobe.next_token.rows import SampledIds

if TYPE_CHECKING:
    from collections.abc import Sequence

    import httpx

    from logprobe.errors import LogprobeError
    from logprobe.next_token.rows import Prefix, Row
    from logprobe.records.values import IntArray
    from logprobe.sampling import SamplingParams

T = TypeVar("T")

FULL: Final = 429
RETRY_AFTER_S: Final = 1.0
MIN_WAIT_S: Final = 0.05
ERROR_BYTES: Final = 1 << 16  # of a reply that reports a failure
FACTS_BYTES: Final = 1 << 20  # of a reply about the server; of what stands around others
TOKENIZER_BYTES: Final = 1 << 28
TOKEN_BYTES: Final = 256  # of one token of a sample: its id and its text as JSON
MAX_OF_ANY: Final = 1 << 48  # no size is as large
MASS_TOLERANCE: Final = 1e-3
MESSAGE_CHARS: Final = 2000
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
        # What is sent compressed may grow to any size.
        self._headers = {b"Content-Type": b"application/json", b"Accept-Encoding": b"identity"}
        if api_key is not None:
            self._headers[b"Authorization"] = f"Bearer {api_key}".encode()
        limits = httpx.Limits(keepalive_expiry=KEEP_ALIVE_S)
        no_limit = httpx.Timeout(None)  # each exchange has its own
        try:
            self._client = httpx.AsyncClient(base_url=self.url, limits=limits, timeout=no_limit)
        except httpx.InvalidURL as error:
            raise ParameterError("url", f"{url!r} is no address: {error}") from error

    async def get(self, path: str, max_bytes: int) -> bytes:
        """The body of a reply.

        Raises:
            ParameterError: the server refuses a value, or the key.
            ServerError: the server failed, stayed full, cannot be reached or took too long, or its reply is
                longer than `max_bytes`.
        """
        return await self._exchange("GET", path, None, max_bytes)

    async def post(self, path: str, body: Any, max_bytes: int) -> bytes:
        """The body of the reply to a JSON body; errors as `get`."""
        return await self._exchange("POST", path, msgspec.json.encode(body), max_bytes)

    async def close(self) -> None:
        """Let the connections go."""
        await self._client.aclose()

    async def _exchange(self, method: str, path: str, content: bytes | None, max_bytes: int) -> bytes:
        # httpx ends what it has begun where anyio gives it up, and not where asyncio cancels it: connections
        # that it was closing would stay open.
        scope = anyio.CancelScope()
        task = asyncio.ensure_future(self._within(scope, method, path, content, max_bytes))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            scope.cancel()
            await asyncio.wait({task})
            raise

    async def _within(
        self, scope: anyio.CancelScope, method: str, path: str, content: bytes | None, max_bytes: int
    ) -> bytes:
        with scope:
            return await self._reply(method, path, content, max_bytes)
        raise asyncio.CancelledError

    async def _reply(self, method: str, path: str, content: bytes | None, max_bytes: int) -> bytes:
        what = f"{method} {self.url}{path}"
        try:
            with anyio.fail_after(self._timeout_s):
                status, data = await self._once_not_full(method, path, content, max_bytes)
        except TimeoutError as error:
            raise ServerError(
                f"{what}: no reply within {self._timeout_s} s; is the server full? raise request_timeout"
            ) from error
        except self._failure as error:
            raise UnreachableError(f"{what}: {error or type(error).__name__}; is the server up?") from error
        if not 200 <= status < 300:
            raise as_error(status, data, what)
        return data

    async def _once_not_full(
        self, method: str, path: str, content: bytes | None, max_bytes: int
    ) -> tuple[int, bytes]:
        while True:
            asked = self._client.stream(method, path, content=content, headers=self._headers)
            async with asked as reply:
                most = max_bytes if reply.is_success else ERROR_BYTES
                data = await _read(reply, most, f"{method} {self.url}{path}")
            if reply.status_code != FULL:
                return reply.status_code, data
            await asyncio.sleep(retry_after_s(reply.headers.get("retry-after")))


async def _read(reply: httpx.Response, max_bytes: int, what: str) -> bytes:
    """A reply's bytes as they come over the wire, no more than `max_bytes`.

    Raises:
        ServerError: there are more, or they are compressed, which was not asked for.
    """
    coding = reply.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise ServerError(f"{what}: the reply is compressed ({printable(coding)}), unasked")
    data = bytearray()
    async for part in reply.aiter_raw():
        data += part
        if len(data) > max_bytes:
            raise ServerError(
                f"{what}: the reply is longer than {max_bytes} bytes, which is all that was asked"
            )
    return bytes(data)


def retry_after_s(header: str | None) -> float:
    """Seconds that a full server asks a client to wait; a date, or nothing, counts as one second."""
    try:
        asked_s = float(header or RETRY_AFTER_S)
    except ValueError:
        return RETRY_AFTER_S
    return max(asked_s, MIN_WAIT_S) if math.isfinite(asked_s) else RETRY_AFTER_S


def as_error(status: int, content: bytes, what: str) -> LogprobeError:
    """What a reply other than 2xx means to the caller."""
    try:
        failure = msgspec.json.decode(content, type=Failure).error
    except (ValueError, RecursionError):
        return ServerError(f"{what}: status {status}, and no word of this library's server; is it one?")
    message, param = printable(failure.message), failure.param and printable(failure.param)
    if status in {401, 403}:
        return ParameterError("api_key", message)
    if status == 503:
        return EngineClosedError(f"{what}: {message}")
    if status not in {400, 404} or param is None:
        return ServerError(f"{what}: status {status}: {message}")
    kind = PromptTooLongError if failure.code == "context_length_exceeded" else ParameterError
    return kind(param, message.removeprefix(f"{param}: "))


def printable(text: str) -> str:
    """A server's words as a terminal may show them: one line, no control characters, cut where long."""
    shown = "".join(character if character.isprintable() else " " for character in text[:MESSAGE_CHARS])
    return " ".join(shown.split())


def decoded(data: bytes, kind: type[T], what: str) -> T:
    """A reply's JSON.

    Raises:
        ServerError: it is no JSON, or of another shape.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise ServerError(f"{what}: is no server of this library ({printable(str(error))})") from error


ROWS = "/v1/next_token_logprobs"
SAMPLES = "/v1/completions"
CARRIED: Final = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "lora",
)
"""What a remote sample takes of `SamplingParams`, under the same names."""


class Limits(msgspec.Struct):
    """What a server lets through at once."""

    max_body_bytes: int
    max_requests: int
    max_tokens_in_flight: int
    max_logprob_bytes: int
    max_body_values: int = 1 << 19


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server is, when it is met."""

    capabilities: Capabilities
    limits: Limits
    loras: dict[str, str]  # name → path over there


class _Settings(msgspec.Struct):
    limits: Limits


class _Model(msgspec.Struct):
    id: str
    root: str = ""
    parent: str | None = None  # LoRA weights have one


class _Models(msgspec.Struct):
    data: list[_Model]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


class _Completion(msgspec.Struct):
    choices: list[_Choice]


async def meet(link: Link) -> ServerFacts:
    """Ask a server what it is.

    Raises:
        ParameterError: it refuses the key.
        ServerError: it cannot be reached, or is another kind of server.
    """
    facts, listed = await asyncio.gather(
        link.get("/v1/capabilities", FACTS_BYTES), link.get("/v1/models", FACTS_BYTES)
    )
    capabilities = decoded(facts, Capabilities, link.url)
    limits = decoded(facts, _Settings, link.url).limits
    models = decoded(listed, _Models, link.url).data
    for name, size in {
        "vocab_size": capabilities.vocab_size,
        "max_model_len": capabilities.max_model_len,
        **msgspec.structs.asdict(limits),
    }.items():
        if not 0 < size < MAX_OF_ANY:
            raise ServerError(f"{link.url}: is no server of this library ({name} is {size})")
    first = models[0].id if models else None  # the one whose capabilities these are
    loras = {model.id: model.root for model in models if model.parent is not None and model.parent == first}
    return ServerFacts(capabilities, limits, loras)


class RowsSource(msgspec.Struct, frozen=True):
    """What gave the rows of an exchange, as far as its server says."""

    weight_version: str | None = None
    weights: str | None = None  # their layout
    logits_dtype: str | None = None
    lora_version: str | None = None


class _Head(msgspec.Struct):
    """The header of a safetensors body, as far as it says where its numbers come from."""

    source: RowsSource = msgspec.field(name="__metadata__", default_factory=RowsSource)

    @classmethod
    def of(cls, data: bytes) -> _Head:
        """The header of a body that was read."""
        stop = 8 + int.from_bytes(data[:8], "little")
        return msgspec.json.decode(data[8:stop], type=cls)


async def ask_rows(link: Link, prefixes: Sequence[Prefix], vocab_size: int) -> tuple[list[Row], RowsSource]:
    """Whole rows of prefixes under the same LoRA weights, in order, and what gave them.

    Raises:
        LogprobeError: the exchange failed, or gave something else.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    prompts = [prefix.token_ids.tolist() for prefix in prefixes]
    max_bytes = FACTS_BYTES + 4 * vocab_size * len(prompts)
    data = await link.post(ROWS, {"prompts": prompts, "lora": prefixes[0].lora}, max_bytes)
    where = f"{link.url}{ROWS}"
    try:
        table, source = load(data)["logprobs"], _Head.of(data).source
    except (SafetensorError, KeyError, ValueError) as error:
        raise ServerError(f"{where}: the reply holds no rows ({printable(str(error))})") from error
    want = (len(prefixes), vocab_size)
    if table.shape != want or table.dtype != np.float32:
        raise ServerError(f"{where}: gave {table.dtype} {table.shape}, not float32 {want}")
    with np.errstate(over="ignore"):
        masses = np.exp(table).sum(axis=1)
    # NaN and +inf fail as well, and nothing above 0 can be part of a sum of 1.
    if not (np.abs(masses - 1) < MASS_TOLERANCE).all():
        raise ServerError(f"{where}: gave rows that are no log-probabilities: a row's mass is not 1")
    return [_owned(row) for row in table], source


async def ask_sample(link: Link, prompt: IntArray, params: SamplingParams, vocab_size: int) -> SampledIds:
    """One completion, without the stop id that ended it; errors as `ask_rows`."""
    if not params.max_tokens:  # a server refuses to be asked for nothing
        return SampledIds()
    carried = {name: getattr(params, name) for name in CARRIED}
    body = {"prompt": prompt.tolist(), **carried, "return_token_ids": True}
    where = f"{link.url}{SAMPLES}"
    data = await link.post(SAMPLES, body, FACTS_BYTES + params.max_tokens * TOKEN_BYTES)
    choices = decoded(data, _Completion, where).choices
    ids = choices[0].token_ids if len(choices) == 1 else [-1]
    if len(ids) > params.max_tokens or not all(0 <= token_id < vocab_size for token_id in ids):
        raise ServerError(f"{where}: the reply is no sample of up to {params.max_tokens} tokens")
    return SampledIds.before_stop(ids, choices[0].finish_reason, params)


def _owned(row: Any) -> Any:
    """A row of its own memory: a view would keep its whole exchange."""
    own = row.copy()
    own.flags.writeable = False
    return own
