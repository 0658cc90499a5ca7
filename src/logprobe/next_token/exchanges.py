"""What `HttpEngine` says to a server of this library, and how it reads the replies.

Before it: the engine's requests. After it: `Link`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from logprobe.engine.backend import Capabilities
from logprobe.engine.request import CompletionOutput
from logprobe.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.engine.request import Request
    from logprobe.next_token.link import Link

ROWS = "/v1/next_token_logprobs"
SAMPLES = "/v1/completions"


class Limits(msgspec.Struct):
    """What a server lets through at once."""

    max_body_bytes: int
    max_requests: int
    max_tokens_in_flight: int
    max_logprob_bytes: int


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
    parent: str | None = None  # an adapter has one


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
    told, listed = await asyncio.gather(link.get("/v1/capabilities"), link.get("/v1/models"))
    try:
        capabilities = msgspec.json.decode(told, type=Capabilities)
        limits = msgspec.json.decode(told, type=_Settings).limits
        models = msgspec.json.decode(listed, type=_Models).data
    except msgspec.DecodeError as error:
        raise ServerError(f"{link.url}: is no server of this library ({error})") from error
    loras = {model.id: model.root for model in models if model.parent is not None}
    return ServerFacts(capabilities, limits, loras)


async def ask_rows(link: Link, requests: Sequence[Request], vocab_size: int) -> list[CompletionOutput]:
    """Whole rows after the prompts of requests under one adapter, in their order.

    Raises:
        LogprobeError: the exchange failed, or gave something else.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    prompts = [request.prompt_token_ids.tolist() for request in requests]
    data = await link.post(ROWS, {"prompts": prompts, "lora": requests[0].adapter})
    try:
        table = load(data)["logprobs"]
    except (SafetensorError, KeyError) as error:
        raise ServerError(f"{link.url}{ROWS}: the reply holds no rows ({error})") from error
    want = (len(requests), vocab_size)
    if table.shape != want or table.dtype != np.float32:
        raise ServerError(f"{link.url}{ROWS}: gave {table.dtype} {table.shape}, not float32 {want}")
    return [CompletionOutput(index=0, row=_owned(row), finish_reason="length") for row in table]


async def ask_sample(link: Link, request: Request) -> CompletionOutput:
    """One completion; errors as `ask_rows`."""
    params = request.params
    if not params.max_tokens:  # a server refuses to be asked for nothing
        return CompletionOutput(index=0, finish_reason="length")
    body: dict[str, Any] = {
        "prompt": request.prompt_token_ids.tolist(),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "stop_token_ids": list(params.stop_token_ids or ()),
        "ignore_eos": params.ignore_eos,
        "lora": request.adapter,
        "return_token_ids": True,
    }
    data = await link.post(SAMPLES, body)
    try:
        [choice] = msgspec.json.decode(data, type=_Completion).choices
    except ValueError as error:  # not JSON, of another shape, or not one choice
        raise ServerError(f"{link.url}{SAMPLES}: the reply is no sample ({error})") from error
    return CompletionOutput(index=0, token_ids=choice.token_ids, finish_reason=choice.finish_reason)


def _owned(row: Any) -> Any:
    """A row of its own memory: a view would keep its whole exchange."""
    own = row.copy()
    own.flags.writeable = False
    return own
