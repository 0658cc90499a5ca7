"""`Link`: sends HTTP requests to one server and raises its failures as this library's errors.

A link belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, final

import msgspec
import numpy as np

from logprobe.engine.protocol import Capabilities
from logprobe.errors import (
    EngineClosedError,
    ParameterError,
    PromptTooLongError,
    ServerError,
)
from logprobe.next_token.rows import SampledIds
from logprobe.transport.http_client import HttpClient, HttpReply, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.errors import LogprobeError
    from logprobe.next_token.rows import Prefix, Row
    from logprobe.records.values import IntArray
    from logprobe.sampling import SamplingParams

T = TypeVar("T")

# maximum size of a reply about the server, and of the fixed part of other replies
FACTS_BYTES: Final = 1 << 20
TOKENIZER_BYTES: Final = 1 << 28
TOKEN_BYTES: Final = 256  # maximum size of a token in a sample, with its id and text as JSON
MAX_OF_ANY: Final = 1 << 48  # upper bound on any size that a server reports
MASS_TOLERANCE: Final = 1e-3


class Told(msgspec.Struct):
    """The error object in a server's reply."""

    message: str = ""
    param: str | None = None
    code: str | None = None


class Failure(msgspec.Struct):
    """The body of a reply whose status is not 2xx."""

    error: Told


@final
class Link(HttpClient):
    """HTTP client for the server at `url`; `timeout_s` includes retries while the server is full.

    Raises:
        MissingPackageError: httpx is not installed.
        ParameterError: an argument is invalid.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        super().__init__(url, api_key, timeout_s, timeout_name="request_timeout")

    async def get(self, path: str, max_bytes: int) -> bytes:
        """Return the body of the reply to a GET request.

        Raises:
            ParameterError: the server rejects a value or the API key.
            ServerError: the server failed, stayed full, cannot be reached or took too long, or its reply is
                longer than `max_bytes`.
        """
        return (await self._successful("GET", path, None, max_bytes)).data

    async def post(self, path: str, body: Any, max_bytes: int, accept: str | None = None) -> HttpReply:
        """Return the reply to a POST request with a JSON body; raises the errors of `get`.

        `accept` is the `Accept` header of the request.
        """
        return await self._successful("POST", path, msgspec.json.encode(body), max_bytes, accept)

    async def _successful(
        self, method: str, path: str, content: bytes | None, max_bytes: int, accept: str | None = None
    ) -> HttpReply:
        reply = await self.exchange(method, path, content, max_bytes, accept)
        if not reply.is_success:
            raise as_error(reply.status, reply.data, f"{method} {self.url}{path}")
        return reply


def as_error(status: int, content: bytes, what: str) -> LogprobeError:
    """Convert a reply whose status is not 2xx to an exception; `what` names the request."""
    try:
        failure = msgspec.json.decode(content, type=Failure).error
    except (ValueError, RecursionError):
        return ServerError(
            f"{what}: status {status} without an error of a logprobe server; check the address"
        )
    message, param = printable(failure.message), failure.param and printable(failure.param)
    if status in {401, 403}:
        return ParameterError("api_key", message)
    if status == 503:
        return EngineClosedError(f"{what}: {message}")
    if status not in {400, 404} or param is None:
        return ServerError(f"{what}: status {status}: {message}")
    kind = PromptTooLongError if failure.code == "context_length_exceeded" else ParameterError
    return kind(param, message.removeprefix(f"{param}: "))


def decoded(data: bytes, kind: type[T], what: str) -> T:
    """Decode a JSON reply to the type `kind`; `what` names the request in errors.

    Raises:
        ServerError: the reply is not JSON, or does not match `kind`.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise ServerError(
            f"{what}: is not a logprobe server ({printable(str(error))}); check the address"
        ) from error


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
"""Fields of `SamplingParams` that are sent with a sample, under the same names."""


class Limits(msgspec.Struct):
    """Limits that a server reports."""

    max_body_bytes: int
    max_requests: int
    max_tokens_in_flight: int
    max_logprob_bytes: int
    max_body_values: int = 1 << 19


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Properties of a server, fetched when it is first contacted."""

    capabilities: Capabilities
    limits: Limits
    loras: dict[str, str]  # name → path on the server


class _Settings(msgspec.Struct):
    limits: Limits


class _Model(msgspec.Struct):
    id: str
    root: str = ""
    parent: str | None = None  # set for LoRA adapters


class _Models(msgspec.Struct):
    data: list[_Model]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


class _Completion(msgspec.Struct):
    choices: list[_Choice]


async def meet(link: Link) -> ServerFacts:
    """Fetch a server's capabilities, limits and LoRA adapters.

    Raises:
        ParameterError: the server rejects the API key.
        ServerError: the server cannot be reached, or is not a logprobe server.
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
            raise ServerError(f"{link.url}: is not a logprobe server ({name} is {size}); check the address")
    first = models[0].id if models else None  # the model that /v1/capabilities describes
    loras = {model.id: model.root for model in models if model.parent is not None and model.parent == first}
    return ServerFacts(capabilities, limits, loras)


class RowsSource(msgspec.Struct, frozen=True):
    """The weights that computed the rows of a reply, as reported by the server."""

    weight_version: str | None = None
    weights: str | None = None  # precision and layout
    logits_dtype: str | None = None
    lora_version: str | None = None


class _Head(msgspec.Struct):
    """The metadata in the header of a safetensors body."""

    source: RowsSource = msgspec.field(name="__metadata__", default_factory=RowsSource)

    @classmethod
    def of(cls, data: bytes) -> _Head:
        """Decode the header of a valid safetensors body."""
        stop = 8 + int.from_bytes(data[:8], "little")
        return msgspec.json.decode(data[8:stop], type=cls)


async def ask_rows(link: Link, prefixes: Sequence[Prefix], vocab_size: int) -> tuple[list[Row], RowsSource]:
    """Fetch the rows of prefixes in order, and their source; all prefixes must have the same LoRA adapter.

    Raises:
        LogprobeError: the request failed, or the reply is not valid.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    prompts = [prefix.token_ids.tolist() for prefix in prefixes]
    max_bytes = FACTS_BYTES + 4 * vocab_size * len(prompts)
    data = (await link.post(ROWS, {"prompts": prompts, "lora": prefixes[0].lora}, max_bytes)).data
    where = f"{link.url}{ROWS}"
    try:
        table, source = load(data)["logprobs"], _Head.of(data).source
    except (SafetensorError, KeyError, ValueError) as error:
        raise ServerError(f"{where}: the reply has no rows ({printable(str(error))})") from error
    want = (len(prefixes), vocab_size)
    if table.shape != want or table.dtype != np.float32:
        raise ServerError(f"{where}: returned {table.dtype} {table.shape}, expected float32 {want}")
    with np.errstate(over="ignore"):
        masses = np.exp(table).sum(axis=1)
    # NaN, +inf and log-probabilities above 0 fail this check as well.
    if not (np.abs(masses - 1) < MASS_TOLERANCE).all():
        raise ServerError(
            f"{where}: returned rows that are not log-probabilities: probabilities do not sum to 1"
        )
    return [_owned(row) for row in table], source


async def ask_sample(link: Link, prompt: IntArray, params: SamplingParams, vocab_size: int) -> SampledIds:
    """Fetch one sample, as in `SampledIds.before_stop`; raises the same errors as `ask_rows`."""
    if not params.max_tokens:  # a server rejects max_tokens=0
        return SampledIds()
    carried = {name: getattr(params, name) for name in CARRIED}
    body = {"prompt": prompt.tolist(), **carried, "return_token_ids": True}
    where = f"{link.url}{SAMPLES}"
    reply = await link.post(SAMPLES, body, FACTS_BYTES + params.max_tokens * TOKEN_BYTES)
    choices = decoded(reply.data, _Completion, where).choices
    ids = choices[0].token_ids if len(choices) == 1 else [-1]
    if len(ids) > params.max_tokens or not all(0 <= token_id < vocab_size for token_id in ids):
        raise ServerError(f"{where}: the reply is not a sample of up to {params.max_tokens} tokens")
    return SampledIds.before_stop(ids, choices[0].finish_reason, params)


def _owned(row: Any) -> Any:
    """Return a read-only copy of a row, because a view would keep the whole reply in memory."""
    own = row.copy()
    own.flags.writeable = False
    return own
