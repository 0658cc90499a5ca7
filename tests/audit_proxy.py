"""A proxy in front of a real server that injects one fault at a time, each seen in a real server."""

from __future__ import annotations

import json
import math
import random
import socket
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import uvicorn
from msgspec.json import decode, encode
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

    from starlette.requests import Request

IMPOSSIBLE = -9999.0
GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")
LEGACY = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
PREFIX_CHARS, PREFIX_IDS = 48, 16  # how much of a prompt must match for a cache hit
EVENT, DONE = b"data: ", b"data: [DONE]"
OVERLAP_S = 0.1  # how long concurrent requests wait for each other


# -- rows of any format --------------------------------------------------------------------------------------


@dataclass
class Row:
    """One position of a reply: the token's fields, its number, and the same of the alternatives."""

    token: dict[str, Any]
    number: float | None
    others: list[tuple[Any, float]] | None
    is_prompt: bool
    position: int = 0

    def mapped(self, change: Callable[[float], float]) -> Row:
        """Return the row with `change` applied to all numbers."""
        others = None if self.others is None else [(name, change(number)) for name, number in self.others]
        return replace(self, number=None if self.number is None else change(self.number), others=others)

    def sorted(self) -> list[tuple[Any, float]]:
        """Return the alternatives, likeliest first."""
        return sorted(self.others or (), key=lambda entry: -entry[1])


Rows = list[Row | None]  # None: the first row of a prompt, which is null


def legacy_rows(table: Mapping[str, Any], num_prompt: int) -> Rows:
    """Read OpenAI's parallel arrays."""
    columns = [table.get(name) or [None] * len(table["tokens"]) for name in LEGACY]
    return [
        Row(
            {"token": token, "text_offset": offset},
            number,
            None if top is None else [(name, value) for name, value in top.items()],
            index < num_prompt,
        )
        for index, (token, number, top, offset) in enumerate(zip(*columns, strict=True))
    ]


def to_legacy(rows: Sequence[Row | None], k: int | None) -> dict[str, Any]:
    held = [row for row in rows if row is not None]
    return {
        "tokens": [row.token["token"] for row in held],
        "token_logprobs": [row.number for row in held],
        "top_logprobs": [None if row.others is None else _map(row, k) for row in held],
        "text_offset": [row.token["text_offset"] for row in held],
    }


def _map(row: Row, k: int | None) -> dict[str, float]:
    """Return a map of the k best tokens and the chosen token."""
    best = dict(row.sorted()[:k])
    text = row.token["token"]
    if text not in best and row.number is not None:
        best[text] = row.number
    return best


def object_rows(items: Sequence[Any], *, is_prompt: bool) -> Rows:
    """Read OpenAI's chat rows."""
    rows: Rows = []
    for item in items:
        if item is None:
            rows.append(None)
            continue
        token = {name: value for name, value in item.items() if name not in ("logprob", "top_logprobs")}
        others = None
        if item.get("top_logprobs") is not None:
            others = [
                ({name: value for name, value in other.items() if name != "logprob"}, other["logprob"])
                for other in item["top_logprobs"]
            ]
        rows.append(Row(token, item["logprob"], others, is_prompt))
    return rows


def to_objects(rows: Sequence[Row | None], k: int | None) -> list[Any]:
    return [
        None
        if row is None
        else row.token
        | {"logprob": row.number}
        | (
            {}
            if row.others is None
            else {"top_logprobs": [token | {"logprob": value} for token, value in row.sorted()[:k]]}
        )
        for row in rows
    ]


def id_rows(items: Sequence[Any]) -> Rows:
    """Read vLLM's prompt rows: maps of ids whose first entry is the prompt's token."""
    rows: Rows = []
    for item in items:
        if item is None:
            rows.append(None)
            continue
        named = [({"token_id": key} | value, value["logprob"]) for key, value in item.items()]
        (token, number), *_ = named
        rows.append(Row(token | {"token": token["decoded_token"]}, number, named, is_prompt=True))
    return rows


def to_ids(rows: Sequence[Row | None], k: int | None) -> list[Any]:
    told: list[Any] = []
    for row in rows:
        if row is None:
            told.append(None)
            continue
        own = row.token | {"decoded_token": row.token["token"]}
        entries = [(own, row.number)]
        entries += [entry for entry in row.sorted()[:k] if _name(entry[0]) != _name(own)]
        told.append(
            {
                token["token_id"]: {
                    "logprob": number,
                    "rank": token["rank"],
                    "decoded_token": token["decoded_token"],
                }
                for token, number in entries
            }
        )
    return told


# -- exchanges and faults ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Exchange:
    """One request, with what a stateful server knows of earlier and concurrent ones."""

    path: str
    body: dict[str, Any]  # as the client sent it
    number: int  # request number
    times_before: int  # how often the same body was sent before
    is_cached: bool  # True if another prompt started like this one
    after_generation: bool  # True if the previous request generated tokens
    before: str  # the previous request's prompt
    num_beside: int = 0  # maximum of other requests in flight
    other: Any = None  # reply to the second request that some faults send
    num_top: int | None = None  # alternatives requested for the current table
    positions: Counter[str] = field(default_factory=Counter)  # rows streamed so far, by table

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def prompt(self) -> str:
        return prompt_of(self.body)

    @property
    def is_scoring(self) -> bool:
        """True if it asks for prompt log-probabilities and generates at most one token."""
        asks_prompt = bool(self.body.get("echo")) or self.body.get("prompt_logprobs") is not None
        return asks_prompt and (self.body.get("max_tokens") or 0) <= 1


def prompt_of(body: Mapping[str, Any]) -> str:
    return json.dumps(body.get("prompt", body.get("messages")))


def asked(body: Mapping[str, Any], name: str) -> int | None:
    """Return how many alternatives were requested for a table."""
    count = (
        body.get("top_logprobs" if "messages" in body else "logprobs")
        if name == "logprobs"
        else body.get(name)
    )
    return None if count is None else int(count)


def noise(row: Row, salt: object, nats: float) -> Row:
    """Shift each number by half to all of `nats`; equal numbers of a row stay equal."""

    def off(number: float) -> float:
        if number <= IMPOSSIBLE:
            return number
        shift = random.Random(f"{number!r} {row.position} {salt}").uniform(-1, 1)  # noqa: S311 - a fault, no secret
        return min(number + math.copysign(nats / 2, shift) + nats * shift / 2, -1e-7)

    return row.mapped(off)


@dataclass(frozen=True)
class Fault:
    """A change that the proxy makes to a request or its reply."""

    kind: str  # the finding that must report it
    source: str  # where it was seen
    tell: Callable[[Rows, Exchange], Rows] | None = None
    ask: Callable[[Proxy, dict[str, Any]], Awaitable[dict[str, Any]]] | None = None
    second: Callable[[Proxy, dict[str, Any]], dict[str, Any] | None] | None = None
    more: int = 0  # additional alternatives that it needs; -1: whole rows
    also: frozenset[str] = frozenset()  # other findings that are also correct
    wait_s: float = 0.0  # delay before replying, so that concurrent requests overlap


def each(change: Callable[[Row, Exchange], Row]) -> Callable[[Rows, Exchange], Rows]:
    """Make a fault that changes single rows that have a number."""
    return lambda rows, exchange: [
        row if row is None or row.number is None else change(row, exchange) for row in rows
    ]


def of_prompts(change: Callable[[Row, Exchange], Row]) -> Callable[[Rows, Exchange], Rows]:
    return each(lambda row, exchange: change(row, exchange) if row.is_prompt else row)


def of_completions(change: Callable[[Row, Exchange], Row]) -> Callable[[Rows, Exchange], Rows]:
    return each(lambda row, exchange: row if row.is_prompt else change(row, exchange))


def where(
    is_so: Callable[[Exchange], bool], nats: float, salt: Callable[[Exchange], object] = lambda _: "salt"
) -> Callable[[Rows, Exchange], Rows]:
    """Make a fault that shifts numbers if a condition holds."""
    return each(lambda row, exchange: noise(row, salt(exchange), nats) if is_so(exchange) else row)


def scaled(row: Row, temperature: float) -> Row:
    """Apply a temperature to the whole row."""
    values = [number / temperature for _, number in row.others or () if number > IMPOSSIBLE]
    best = max(values)
    normaliser = best + math.log(sum(math.exp(value - best) for value in values))
    return row.mapped(lambda number: number if number <= IMPOSSIBLE else number / temperature - normaliser)


def renormalised(row: Row, k: int | None) -> Row:
    """Renormalise over the reported alternatives and the chosen token."""
    if row.others is None:
        return row
    reported = [number for _, number in row.sorted()[:k]]
    if row.number is not None and row.number not in reported:
        reported.append(row.number)
    mass = sum(math.exp(number) for number in reported)
    return row.mapped(lambda number: number - math.log(mass))


def shifted(rows: Rows, exchange: Exchange) -> Rows:
    """Shift prompt rows by one: the token's number in its neighbour's distribution."""
    del exchange
    moved: Rows = []
    for row, before in zip(rows, [None, *rows], strict=False):
        is_so = row is not None and before is not None and row.is_prompt and before.others is not None
        if not is_so or row is None or before is None:
            moved.append(row)
            continue
        numbers = {_name(token): number for token, number in before.others or ()}
        moved.append(replace(row, number=numbers[_name(row.token)], others=before.others))
    return moved


def _name(token: Any) -> Any:
    """Return the field that identifies a token in a table."""
    return token if isinstance(token, str) else token.get("token_id", token.get("token"))


def to_bfloat16(number: float) -> float:
    import numpy as np

    bits = np.array([number], np.float32).view(np.uint32)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return float((bits & 0xFFFF0000).view(np.float32)[0])


def dropped(rows: Rows, exchange: Exchange) -> Rows:
    """Drop every 7th row, but never the first one of a prompt."""
    del exchange
    return [row for row in rows if row is None or row.position % 7 != 5]


def repeated(rows: Rows, exchange: Exchange) -> Rows:
    del exchange
    return [one for row in rows for one in ([row, row] if row is not None and row.position == 5 else [row])]


def duplicated(row: Row) -> Row:
    """Repeat the sampled token as the last alternative (list formats only)."""
    is_map = not row.others or isinstance(row.others[0][0], str) or "token_id" in row.others[0][0]
    if is_map or row.others is None or row.number is None:
        return row
    best = row.sorted()
    own = [entry for entry in best if _name(entry[0]) == _name(row.token)] or [
        (_alike(row, best), row.number)
    ]
    return replace(row, others=[*own, *[entry for entry in best if entry != own[0]][: len(best) - 2], *own])


def _alike(row: Row, best: Sequence[tuple[Any, float]]) -> Any:
    """Return the chosen token with the fields of an alternative."""
    return {name: row.token[name] for name in best[0][0]}


def without_best(row: Row, exchange: Exchange) -> Row:
    """Remove the likeliest token unless it was chosen."""
    del exchange
    best = row.sorted()
    rivals = [entry for entry in best if _name(entry[0]) != _name(row.token)]
    return replace(row, others=[entry for entry in best if entry not in rivals[:1]])


def cut_to_3(row: Row, exchange: Exchange) -> Row:
    del exchange
    return replace(row, others=None if row.others is None else row.sorted()[:3])


def wrong_bytes(row: Row, exchange: Exchange) -> Row:
    """Replace a token's bytes by those of its text: U+FFFD for partial characters, no leading space."""
    del exchange

    def told(token: Any) -> Any:
        if isinstance(token, str) or token.get("bytes") is None:
            return token
        own = bytes(token["bytes"])
        text = own.decode("utf-8", "replace").lstrip(" ") or "▁"
        return token | {"bytes": list(text.encode())}

    others = None if row.others is None else [(told(token), number) for token, number in row.others]
    return replace(row, token=told(row.token), others=others)


def wrong_text(rows: Rows, exchange: Exchange) -> Rows:
    """Replace the text of every fifth token by that of its likeliest alternative."""
    del exchange
    told: Rows = []
    for row in rows:
        if row is None or row.number is None or not row.others or row.position % 5 != 4:
            told.append(row)
            continue
        rivals = [token for token, _ in row.sorted() if _name(token) != _name(row.token)]
        rival = rivals[0] if rivals else row.token
        text = rival if isinstance(rival, str) else rival.get("token", rival.get("decoded_token"))
        told.append(replace(row, token=row.token | {"token": text}))
    return told


def without(
    name: str, *, streams: bool = False
) -> Callable[[Proxy, dict[str, Any]], Awaitable[dict[str, Any]]]:
    """Make a fault that accepts a field and ignores it."""

    async def ask(proxy: Proxy, body: dict[str, Any]) -> dict[str, Any]:
        del proxy
        if streams and not body.get("stream"):
            return body
        names = {name, "top_logprobs"} if name == "logprobs" else {name}
        return {key: value for key, value in body.items() if key not in names}

    return ask


def beginning(change: Callable[[list[int], int], list[int]]) -> Any:
    """Make a fault that changes how prompts start (BOS)."""

    async def ask(proxy: Proxy, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.get("prompt")
        if prompt is None:
            return body
        ids = prompt if isinstance(prompt, list) else await proxy.tokenize(prompt)
        bos = (await proxy.tokenize(""))[0]
        return body | {"prompt": change(ids, bos)}

    return ask


async def with_system_text(proxy: Proxy, body: dict[str, Any]) -> dict[str, Any]:
    """Add a system message."""
    del proxy
    if "messages" not in body or body["messages"][0]["role"] == "system":
        return body
    system = {"role": "system", "content": "You are a helpful assistant."}
    return body | {"messages": [system, *body["messages"]]}


def of_base(proxy: Proxy, body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the same request for the base model if it was for a LoRA."""
    return body | {"model": proxy.base} if body.get("model") in proxy.loras else None


def base_prompt(rows: Rows, exchange: Exchange) -> Rows:
    """Take prompt rows from the base model and generated rows from the LoRA."""
    has_prompt = any(row is not None and row.is_prompt for row in rows)
    if exchange.other is None or "choices" not in exchange.other or not has_prompt:
        return rows
    choice = exchange.other["choices"][0]
    if exchange.body.get("echo"):
        others = legacy_rows(choice["logprobs"], num_prompt_rows(choice, exchange, exchange.other))
    else:
        held = next(one for one in (choice, exchange.other) if one.get("prompt_logprobs"))
        others = id_rows(held["prompt_logprobs"])
    return [
        other if row is not None and row.is_prompt else row for row, other in zip(rows, others, strict=False)
    ] + rows[len(others) :]


FAR = frozenset({"does-not-fit"})  # numbers that are wrong in every request

FAULTS: dict[str, Fault] = {
    "scaled": Fault(
        "temperature-unasked",
        "SGLang and TGI: rows after the temperature",
        each(lambda row, _: scaled(row, 0.7)),
        more=-1,
    ),
    "renormalised": Fault(
        "renormalised-unasked",
        "trl 7269: a ratio of 0.896 where the kept mass is 0.895; verl 6240",
        each(lambda row, exchange: renormalised(row, exchange.num_top)),
    ),
    "shifted": Fault("shifted", "llama-cpp-python 1983, maxtext 2103", shifted, more=-1),
    "rounded_bfloat16": Fault(
        "rounded", "heads whose logits are bfloat16", each(lambda row, _: row.mapped(to_bfloat16))
    ),
    "rounded_decimals": Fault(
        "rounded", "numbers formatted for people", each(lambda row, _: row.mapped(lambda x: round(x, 2)))
    ),
    "rows_dropped": Fault(
        "rows-missing", "SGLang 39260 and 26778, TensorRT-LLM 7580: rows that slip", dropped
    ),
    "rows_repeated": Fault("rows-repeated", "SGLang 5761: one row for several tokens", repeated),
    "neighbours": Fault(
        "unsteady-beside-others",
        "vLLM 51187: up to 0.047 nats among 44 others",
        where(lambda exchange: exchange.num_beside > 0, 0.047),
        wait_s=OVERLAP_S,
    ),
    "unsteady": Fault(
        "unsteady-repeated",
        "vLLM 54521: 0.146 nats in the middle",
        where(lambda exchange: exchange.times_before > 0, 0.1, lambda exchange: exchange.number),
    ),
    "stale_cache": Fault(
        "unsteady-cached",
        "vLLM 42019: values of a cached prefix",
        where(lambda exchange: exchange.is_cached, 0.02),
        also=FAR,
    ),
    "after_generation": Fault(
        "unsteady-after-generation",
        "dynamo 14323: prompt numbers after a warm-up",
        of_prompts(
            lambda row, exchange: (
                noise(row, "after", 0.5) if exchange.after_generation and exchange.is_scoring else row
            )
        ),
    ),
    "order": Fault(
        "unsteady-order",
        "vLLM 42019: the order of requests",
        # A longer prompt left values in a buffer.
        where(lambda exchange: len(exchange.before) > len(exchange.prompt) and exchange.is_scoring, 0.05),
        also=FAR | {"unsteady-beside-others"},  # the previous prompt may be a concurrent one
    ),
    "length_512": Fault(
        "wrong-at-length",
        "vLLM 53488: 512 tokens corrupt, 513 clean",
        lambda rows, exchange: (
            each(lambda row, _: noise(row, "length", 2.0))(rows, exchange)
            if sum(row is None or row.is_prompt for row in rows) == 512
            else rows
        ),
    ),
    "stream": Fault(
        "stream-differs", "SGLang 39260: rows of streams", where(lambda exchange: exchange.is_stream, 0.05)
    ),
    "wrong_bytes": Fault("bytes-wrong", "vLLM 27300: bytes of U+FFFD; LMDeploy 2802", each(wrong_bytes)),
    "wrong_text": Fault("text-wrong", "vLLM 44106: ids and numbers of two rows", wrong_text),
    "zeros": Fault(
        "filled-in",
        "rllm 356: template tokens of 0.0",
        of_prompts(lambda row, _: row.mapped(lambda _number: 0.0) if row.position in (1, 2, 3, 4) else row),
    ),
    "speculated": Fault(
        "filled-in",
        "llama.cpp 27972: 0.0 for every drafted token",
        of_completions(lambda row, _: replace(row, number=0.0)),
        also=FAR,
    ),
    "floor": Fault(
        "filled-in",
        "TensorRT-LLM: -9999 also for what is only missing",
        each(lambda row, _: row.mapped(lambda number: IMPOSSIBLE if number < -10 else number)),
    ),
    "duplicate": Fault(
        "ids-repeated", "vLLM 42259: the sampled token twice", each(lambda row, _: duplicated(row))
    ),
    "cut": Fault("alternatives-cut", "LMDeploy 1548: k - 1 rows", each(cut_to_3)),
    "second_best_missing": Fault(
        "alternatives-wrong",
        "MLX-LM: the first of an unsorted partition; vLLM 42259",
        each(without_best),
        more=1,
    ),
    "ignored_logit_bias": Fault("ignored", "Ollama 3795", ask=without("logit_bias")),
    "ignored_top_p": Fault("ignored", "omlx 1549, vmlx 127", ask=without("top_p")),
    "ignored_stream_logprobs": Fault(
        "ignored", "Ollama 16117, MLX-LM 1630", ask=without("logprobs", streams=True)
    ),
    "bos_dropped": Fault(
        "bos",
        "llama.cpp: GGUF files that say add no BOS",
        ask=beginning(lambda ids, bos: ids[1:] if ids[:1] == [bos] else ids),
    ),
    "bos_doubled": Fault(
        "bos", "llama.cpp's own warning of a second BOS", ask=beginning(lambda ids, bos: [bos, *ids])
    ),
    "template": Fault(
        "template", "Qwen 2.5's template: a system text where none is sent", ask=with_system_text
    ),
    "lora_prompt": Fault("lora-prompt", "vLLM 51594: -6.63 for -0.009", base_prompt, second=of_base),
    "stale_weights": Fault(
        "stale-weights", "NeMo-RL 4018: 17 steps old; vLLM 46125", also=FAR | {"alternatives-wrong"}
    ),
    "changed": Fault(
        "changed-unasked", "lmdeploy 4917, miles 2783; vLLM 46125", where(lambda _: True, 0.05), also=FAR
    ),
    "log2": Fault(
        "log-base",
        "bits, as compression counts them",
        each(lambda row, _: row.mapped(lambda number: number / math.log(2))),
    ),
    "probabilities": Fault(
        "probabilities", "llama.cpp: post_sampling_probs", each(lambda row, _: row.mapped(math.exp))
    ),
    "prefill_decode": Fault(
        "prefill-decode",
        "SGLang 25790: from index 96; 34159: 0.151 nats",
        of_prompts(lambda row, _: noise(row, "prefill", 0.151) if row.position >= 96 else row),
    ),
    "noise": Fault("does-not-fit", "lmdeploy 1742: not the reference model's", where(lambda _: True, 0.3)),
}
"""The faults by name; `stale_weights` is injected by serving the old weights."""


# -- the proxy -----------------------------------------------------------------------------------------------


def num_prompt_rows(choice: Mapping[str, Any], exchange: Exchange, reply: Mapping[str, Any]) -> int:
    """Return the number of prompt rows in an echo."""
    rows = len(choice["logprobs"]["tokens"])
    if not exchange.body.get("echo"):
        return 0
    if choice.get("prompt_token_ids") is not None:
        return len(choice["prompt_token_ids"])
    usage = reply.get("usage")
    return rows if usage is None else int(usage["prompt_tokens"])


class Proxy:
    """Forward requests to a server and inject one fault into requests or replies."""

    def __init__(
        self,
        upstream: str,
        fault: Fault | None,
        *,
        base: str | None,
        loras: Sequence[str],
        refused: Sequence[str],
    ) -> None:
        self.base, self.loras = base, tuple(loras)
        self._refused = tuple(refused)
        self._fault = fault
        self._client = httpx.AsyncClient(base_url=upstream, timeout=PATIENCE_S)
        self._num_requests = 0
        self._times: Counter[str] = Counter()
        self._prefixes: Counter[str] = Counter()
        self._was_generation = False
        self._before = ""
        self._in_flight: list[Exchange] = []
        self.app = Starlette(
            routes=[Route("/{path:path}", self._handle, methods=["GET", "POST"])], lifespan=self._lifespan
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        del app
        yield
        await self._client.aclose()

    async def tokenize(self, text: str) -> list[int]:
        reply = await self._client.post("/tokenize", json={"prompt": text})
        return list(reply.raise_for_status().json()["tokens"])

    async def _handle(self, request: Request) -> Response:
        data = await request.body()
        path = request.url.path
        if request.method != "POST" or path not in GENERATION_PATHS:
            reply = await self._client.request(
                request.method, path, params=request.query_params, content=data
            )
            return _passed(reply)
        body = decode(data)
        if unknown := [name for name in self._refused if body.get(name) is not None]:
            error = {"message": f"no such field: {unknown[0]}", "param": unknown[0]}
            return JSONResponse({"error": error}, 400)
        exchange = self._begin(path, body)
        try:
            if self._fault is not None:
                await anyio.sleep(self._fault.wait_s)
            return await self._answer(exchange)
        finally:
            self._in_flight.remove(exchange)

    def _begin(self, path: str, body: dict[str, Any]) -> Exchange:
        key, prompt = json.dumps(body, sort_keys=True), prompt_of(body)
        prefix = _prefix(body)
        exchange = Exchange(
            path,
            body,
            number=self._num_requests,
            times_before=self._times[key],
            is_cached=self._prefixes[prefix] > 0,
            after_generation=self._was_generation,
            before=self._before,
        )
        self._num_requests += 1
        self._times[key] += 1
        self._prefixes[prefix] += 1
        self._was_generation, self._before = not exchange.is_scoring, prompt
        self._in_flight.append(exchange)
        for one in self._in_flight:
            one.num_beside = max(one.num_beside, len(self._in_flight) - 1)
        return exchange

    async def _answer(self, exchange: Exchange) -> Response:
        fault, sent = self._fault, deepcopy(exchange.body)
        if fault is None:
            return _passed(await self._client.post(exchange.path, json=sent))
        if fault.ask is not None:
            sent = await fault.ask(self, sent)
        second = None if fault.second is None else fault.second(self, sent)
        if second is not None and not exchange.is_stream:
            exchange.other = decode((await self._client.post(exchange.path, json=second)).content)
        reply = await self._client.post(exchange.path, json=_with_more(sent, fault.more))
        if reply.is_error:
            return _passed(reply)
        if not exchange.is_stream:
            return _passed(reply, encode(self._altered(decode(reply.content), exchange)))
        events = [
            line
            if line in (b"", DONE)
            else EVENT + encode(self._altered(decode(line[len(EVENT) :]), exchange))
            for line in reply.content.split(b"\n")
        ]
        return _passed(reply, b"\n".join(events))

    def _altered(self, reply: dict[str, Any], exchange: Exchange) -> dict[str, Any]:
        for choice in reply.get("choices", ()):
            logprobs = choice.get("logprobs")
            if logprobs and logprobs.get("tokens") is not None:
                num_prompt = num_prompt_rows(choice, exchange, reply)
                rows = self._told(legacy_rows(logprobs, num_prompt), exchange, "logprobs")
                logprobs |= to_legacy(rows, asked(exchange.body, "logprobs"))
            elif logprobs and logprobs.get("content") is not None:
                rows = self._told(object_rows(logprobs["content"], is_prompt=False), exchange, "logprobs")
                logprobs["content"] = to_objects(rows, asked(exchange.body, "logprobs"))
        for holder in (reply, *reply.get("choices", ())):
            if holder.get("prompt_logprobs") is not None:
                rows = self._told(id_rows(holder["prompt_logprobs"]), exchange, "prompt_logprobs")
                holder["prompt_logprobs"] = to_ids(rows, asked(exchange.body, "prompt_logprobs"))
        return reply

    def _told(self, rows: Rows, exchange: Exchange, table: str) -> Rows:
        for row in rows:
            if row is not None:
                row.position = exchange.positions[table]
            exchange.positions[table] += 1
        assert self._fault is not None
        exchange.num_top = asked(exchange.body, table)
        return rows if self._fault.tell is None else self._fault.tell(rows, exchange)


def _prefix(body: Mapping[str, Any]) -> str:
    """Return the start of a prompt (all of it if it is short)."""
    prompt = body.get("prompt", body.get("messages"))
    size = PREFIX_CHARS if isinstance(prompt, str) else PREFIX_IDS
    return f"{body.get('model')} {json.dumps(prompt[:size])}"


def _with_more(body: dict[str, Any], more: int) -> dict[str, Any]:
    """Return the body with more alternatives in each table that has some."""
    names = ("top_logprobs",) if "messages" in body else ("logprobs",)
    counts = {name: body[name] for name in (*names, "prompt_logprobs") if body.get(name) is not None}
    return body | {name: -1 if min(count, more) < 0 else count + more for name, count in counts.items()}


def _passed(reply: httpx.Response, data: bytes | None = None) -> Response:
    kind = reply.headers.get("content-type", "application/json")
    return Response(reply.content if data is None else data, reply.status_code, media_type=kind)


@contextmanager
def faulty(
    upstream: str,
    name: str | None,
    *,
    base: str | None = None,
    loras: Sequence[str] = (),
    refused: Sequence[str] = (),
) -> Iterator[str]:
    """Yield the address of a proxy for `upstream` that injects one fault (None: none) during the block.

    Fields in `refused` are rejected with a 400 that names them, as by a server without support for them.
    """
    fault = None if name is None else FAULTS[name]
    proxy = Proxy(upstream, fault, base=base, loras=loras, refused=refused)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(proxy.app, log_level="warning"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the proxy ended at its start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
