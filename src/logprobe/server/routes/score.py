"""`POST /v1/score`: what the model gives to continuations of a context or a conversation.

Before it: HTTP. After it: one engine request a continuation; their common context is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.responses import Response

from logprobe.engine.request import Request
from logprobe.sampling import SamplingParams
from logprobe.server.http.decode import read
from logprobe.server.http.errors import bad_request
from logprobe.server.http.sse import while_connected
from logprobe.server.limits import Cost
from logprobe.server.openai.bodies import ScoreBody
from logprobe.server.openai.prompts import as_ids
from logprobe.server.openai.replies import JSON_TYPE, encode
from logprobe.server.rows_json import finite

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from logprobe.engine.request import RequestOutput
    from logprobe.records.values import IntArray
    from logprobe.server.service import Service
    from logprobe.text.edge import TextEdge

ARROW_TYPE = "application/vnd.apache.arrow.stream"


@dataclass(frozen=True, slots=True)
class Pair:
    """Context and continuation as one sequence; the continuation begins at `start`."""

    token_ids: IntArray
    start: int


async def score(request: HttpRequest, service: Service) -> Response:
    """Score each continuation: its tokens' logprobs, their sum, and the usual normalised forms; nats."""
    body, pairs, alone = await read(request, service, ScoreBody, understand)
    base, params = service.new_id("score"), SamplingParams(max_tokens=0, prompt_logprobs=0, lora=body.lora)
    requests = [
        Request(
            request_id=f"{base}-{number}",
            prompt_token_ids=pair.token_ids,
            params=params,
            first_scored=pair.start,
        )
        for number, pair in enumerate(pairs + alone)
    ]
    for asked in requests:
        service.engine.check(asked)
    ticket = service.limits.admit(Cost.of(requests, service.vocab_size))
    try:
        outputs = await while_connected(request.receive, service.run_all(requests), service.check_engine)
    finally:
        ticket.release()
    found = [_scored(output, pair, service) for output, pair in zip(outputs, pairs, strict=False)]
    for one, output in zip(found, outputs[len(pairs) :], strict=False):
        assert output.prompt_logprobs is not None
        record = output.prompt_logprobs[-one["num_tokens"] :]
        one["unconditional_logprob"] = _sum(record.chosen_entries().logprobs)
        one["pmi"] = one["logprob"] - one["unconditional_logprob"]
    num_tokens = sum(len(pair.token_ids) for pair in pairs)
    reply = {
        "id": base,
        "object": "score",
        "model": service.name_of(body.lora),
        "unit": "nats",
        "data": found,
        "usage": {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens},
    }
    return _reply(request, service, reply)


def understand(body: ScoreBody, service: Service) -> tuple[ScoreBody, list[Pair], list[Pair]]:
    """Each continuation with its context, and, where that is asked, by itself."""
    service.choose_weights(body)
    service.log_body("score", body)
    contexts = [body.context] if isinstance(body.context, str) else []
    continuations = [text for text in body.continuations if isinstance(text, str)]
    # A context is tokenised with each continuation.
    service.check_texts(contexts * max(len(continuations), 1) + continuations, "continuations")
    laid_out = None if body.messages is None else service.lay_out(body.messages)
    pairs = [_pair(body, laid_out, continuation, service.text) for continuation in body.continuations]
    return body, pairs, [_alone(pair, service.text) for pair in pairs] if body.unconditional else []


def _reply(request: HttpRequest, service: Service, reply: dict[str, Any]) -> Response:
    found = reply["data"]
    if ARROW_TYPE in request.headers.get("accept", ""):
        return Response(_as_arrow(found), media_type=ARROW_TYPE)
    numbered = [{"index": index, **one} for index, one in enumerate(found)]
    return Response(encode(service, reply | {"data": numbered}), media_type=JSON_TYPE)


def _pair(body: ScoreBody, laid_out: str | None, continuation: str | list[int], text: TextEdge) -> Pair:
    if (body.context is None) == (body.messages is None):
        raise bad_request("context", "give either context or messages")
    if not continuation:
        raise bad_request("continuations", "one is empty; there is nothing to score")
    if laid_out is not None:
        return _answer(laid_out, continuation, text)
    context = body.context
    if isinstance(context, str) and isinstance(continuation, str):
        return Pair(*text.encode_pair(context, continuation))
    if isinstance(context, str) or isinstance(continuation, str):
        raise bad_request("continuations", "context and continuations must both be texts or both be ids")
    before = as_ids(context or [], "context")
    before = before if len(before) else text.prefix()
    return Pair(np.concatenate([before, as_ids(continuation, "continuations")]), len(before))


def _answer(laid_out: str, continuation: str | list[int], text: TextEdge) -> Pair:
    """A conversation and a candidate for the assistant's turn."""
    before = text.encode(laid_out, add_special_tokens=False)
    if not isinstance(continuation, str):
        return Pair(np.concatenate([before, as_ids(continuation, "continuations")]), len(before))
    whole = text.encode(laid_out + continuation, add_special_tokens=False)
    return Pair(whole, min(len(before), len(whole) - 1))


def _alone(pair: Pair, text: TextEdge) -> Pair:
    """The same continuation after nothing."""
    prefix = text.prefix()
    return Pair(np.concatenate([prefix, pair.token_ids[pair.start :]]), len(prefix))


def _scored(output: RequestOutput, pair: Pair, service: Service) -> dict[str, Any]:
    record = output.prompt_logprobs
    assert record is not None
    ids = pair.token_ids[pair.start :].tolist()
    chosen = record[-len(ids) :].chosen_entries()
    data = service.text.vocabulary.bytes_of(ids)
    total, num_chars = _sum(chosen.logprobs), max(len(data.decode("utf-8", "replace")), 1)
    return {
        "logprob": total,
        "logprob_per_token": total / len(ids),
        "logprob_per_byte": total / max(len(data), 1),
        "logprob_per_char": total / num_chars,
        "is_greedy": bool((chosen.ranks == 1).all()),
        "num_tokens": len(ids),
        "num_bytes": len(data),
        "token_ids": ids,
        "tokens": [service.text.vocabulary.token_text(token_id) for token_id in ids],
        "token_logprobs": finite(chosen.logprobs),
        "ranks": chosen.rank_list(),
    }


def _sum(logprobs: Any) -> float:
    """Their sum; an impossible token counts -9999."""
    return float(np.sum(np.maximum(logprobs.astype(np.float64), -9999.0)))


def _as_arrow(found: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa

    table = pa.Table.from_pylist(found)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data
