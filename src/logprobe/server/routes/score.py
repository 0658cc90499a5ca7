"""`POST /v1/score`: what the model gives to continuations of a context or a conversation.

Before it: HTTP. After it: one engine request a continuation; their common context is computed once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.responses import Response

from logprobe.engine.client import Split
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
    from logprobe.server.service import Service
    from logprobe.text.edge import TextEdge

ARROW_TYPE = "application/vnd.apache.arrow.stream"


async def score(request: HttpRequest, service: Service) -> Response:
    """Score each continuation: its tokens' logprobs, their sum, and the usual normalised forms; nats."""
    body, pairs, alone = await read(request, service, ScoreBody, understand)
    base, params = service.new_id("score"), SamplingParams(max_tokens=0, prompt_logprobs=0, lora=body.lora)
    names = [f"{base}-{number}" for number in range(len(pairs) + len(alone))]
    admitted = service.client.admit_splits([*pairs, *alone], params, names)
    ticket = service.limits.admit(Cost.of([one.request for one in admitted], service.vocab_size))
    try:
        outputs = await while_connected(request.receive, service.run_all(admitted), service.check_engine)
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


def understand(body: ScoreBody, service: Service) -> tuple[ScoreBody, list[Split], list[Split]]:
    """Each continuation with its context, and, where that is asked, by itself."""
    service.choose_weights(body)
    service.log_body("score", body)
    contexts = [body.context] if isinstance(body.context, str) else []
    continuations = [text for text in body.continuations if isinstance(text, str)]
    # A context is tokenised with each continuation.
    service.check_texts(contexts * max(len(continuations), 1) + continuations, "continuations")
    laid_out = None if body.messages is None else service.lay_out(body.messages)
    pairs = [_split(body, laid_out, continuation, service) for continuation in body.continuations]
    return body, pairs, [service.client.alone(pair) for pair in pairs] if body.unconditional else []


def _reply(request: HttpRequest, service: Service, reply: dict[str, Any]) -> Response:
    found = reply["data"]
    if ARROW_TYPE in request.headers.get("accept", ""):
        return Response(_as_arrow(found), media_type=ARROW_TYPE)
    numbered = [{"index": index, **one} for index, one in enumerate(found)]
    return Response(encode(service, reply | {"data": numbered}), media_type=JSON_TYPE)


def _split(body: ScoreBody, laid_out: str | None, continuation: str | list[int], service: Service) -> Split:
    if (body.context is None) == (body.messages is None):
        raise bad_request("context", "give either context or messages")
    if not continuation:
        raise bad_request("continuations", "one is empty; there is nothing to score")
    if laid_out is not None:
        return _answer(laid_out, continuation, service.text)
    if isinstance(body.context, str) != isinstance(continuation, str):
        raise bad_request("continuations", "context and continuations must both be texts or both be ids")
    for name, ids in (("context", body.context), ("continuations", continuation)):
        if isinstance(ids, list):
            as_ids(ids, name)
    return service.client.split((body.context or continuation[:0], continuation))


def _answer(laid_out: str, continuation: str | list[int], text: TextEdge) -> Split:
    """A conversation and a candidate for the assistant's turn."""
    before = text.encode(laid_out, add_special_tokens=False)
    if not isinstance(continuation, str):
        return Split(np.concatenate([before, as_ids(continuation, "continuations")]), len(before))
    whole = text.encode(laid_out + continuation, add_special_tokens=False)
    return Split(whole, min(len(before), len(whole) - 1))


def _scored(output: RequestOutput, pair: Split, service: Service) -> dict[str, Any]:
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
