"""`POST /v1/loglikelihood`: log-probabilities of continuations, given a context or a conversation.

Each continuation is one engine request; the context that they share is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from starlette.responses import Response

from logprobe.analysis.score_requests import admit_splits, scored_total
from logprobe.errors import ParameterError
from logprobe.records.forms.finite import finite_fields
from logprobe.server.http.decode import read
from logprobe.server.http.errors import as_api_error, bad_request
from logprobe.server.http.replies import ARROW_TYPE, JSON_TYPE, media_type_of, while_connected
from logprobe.server.limits import row_entries
from logprobe.server.openai.bodies import LoglikelihoodBody
from logprobe.server.openai.prompts import as_ids, check_one_of, check_texts, layout_of, render_messages
from logprobe.server.openai.tools import functions_of
from logprobe.server.reply import encode, num_cached, usage_of
from logprobe.text.boundary import Split, split_texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request as HttpRequest

    from logprobe.analysis import Score
    from logprobe.engine.request import Requests
    from logprobe.records import LogprobsInfo
    from logprobe.records.values import IntArray, TokenTable
    from logprobe.sampling import SamplingParams
    from logprobe.server.service import Service, SplitResult
    from logprobe.text.boundary import BoundaryRule
    from logprobe.transport.messages import Admitted

LAYOUT_FIELDS: Final = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
SCORE_ENTRIES: Final = 32  # cost of one continuation's scores, in entries of a reply


async def loglikelihood(request: HttpRequest, service: Service) -> Response:
    """Score continuations: log-probability of each token and of the whole (nats), and normalized scores."""
    is_arrow = media_type_of(request, (ARROW_TYPE,)) == ARROW_TYPE
    prepared = await read(request, service, LoglikelihoodBody, prepare)
    admitted = prepared.admitted
    work = service.run_splits(prepared.splits, admitted, prepared.requests, prepared.sampling)
    results = await while_connected(request.receive, work, service.check_engine)
    num_entries = None  # the first Arrow reply imports pyarrow
    if not is_arrow:
        num_entries = sum(
            SCORE_ENTRIES + len(pair.continuation) * row_entries(one.request.params, 0, 0)
            for pair, one in zip(prepared.pairs, admitted, strict=False)
        )
    return await service.workers.write(
        lambda: _reply(service, prepared, results, is_arrow=is_arrow), num_entries
    )


def _reply(
    service: Service, prepared: LoglikelihoodRequest, results: Sequence[SplitResult], *, is_arrow: bool
) -> Response:
    pairs = prepared.pairs
    bare = results[len(pairs) :]
    totals = [scored_total(*result) for result in bare] if bare else [None] * len(pairs)
    rows = [
        fields_of(service.client.as_score(pair, *result, total), service.text.vocabulary)
        for pair, result, total in zip(pairs, results, totals, strict=False)
    ]
    num_tokens = sum(len(pair.token_ids) for pair in pairs)
    info = results[0][0].info
    assert info is not None, "prompt_logprobs were requested"
    if is_arrow:
        data = _as_arrow(rows, info)
        service.metrics.bytes_out.inc(len(data))
        return Response(data, media_type=ARROW_TYPE)
    reply = {
        "id": prepared.reply_id,
        "object": "loglikelihood",
        "model": prepared.model,
        "unit": "nats",
        "data": [{"index": index, **finite_fields(fields)} for index, fields in enumerate(rows)],
        "usage": usage_of(num_tokens, 0, num_cached(output for output, _ in results[: len(pairs)])),
    }
    if "processed" in info.stages:
        reply["logprobs_info"] = info.to_dict()
    return Response(encode(service, reply), media_type=JSON_TYPE)


@dataclass(frozen=True, slots=True)
class LoglikelihoodRequest:
    """The engine requests: each continuation after its context and, for `unconditional`, alone."""

    reply_id: str
    model: str  # name in the reply
    pairs: list[Split]
    splits: list[Split]  # the pairs, then the continuations alone
    admitted: list[Admitted]  # one request per split
    requests: Requests
    sampling: SamplingParams | None


def prepare(body: LoglikelihoodBody, service: Service) -> LoglikelihoodRequest:
    """Validate and admit the requests that score a body's continuations."""
    service.choose_weights(body)
    service.log_body("loglikelihood", body)
    contexts = [body.context] if isinstance(body.context, str) else []
    continuations = [text for text in body.continuations if isinstance(text, str)]
    # The context is tokenized with each continuation.
    check_texts(contexts * max(len(continuations), 1) + continuations, "continuations", service)
    laid_out, before = _read_context(body, len(continuations), service)
    pairs = [
        _split(laid_out, before, continuation, body.boundary, service) for continuation in body.continuations
    ]
    alone = [service.client.alone(pair) for pair in pairs] if body.unconditional else []
    base, params = service.new_id("loglikelihood"), service.params_for(body, max_tokens=0, prompt_logprobs=0)
    sampling = None if body.temperature is None else replace(params, temperature=body.temperature)
    asked = [*_with_named_ids(body, params, pairs, service), *[params] * len(alone)]
    requests, splits = service.of_one_call(), [*pairs, *alone]
    admitted = [
        one
        for number, (split, own) in enumerate(zip(splits, asked, strict=True))
        for one in admit_splits([split], own, requests, [f"{base}-{number}"], sampling=sampling)
    ]
    service.admit([request.request for request in admitted])
    return LoglikelihoodRequest(base, service.name_of(body), pairs, splits, admitted, requests, sampling)


def _with_named_ids(
    body: LoglikelihoodBody, params: SamplingParams, pairs: Sequence[Split], service: Service
) -> list[SamplingParams]:
    """Return the sampling parameters for each continuation, with the token ids to report for it."""
    if body.logprob_token_ids is None:
        return [params] * len(pairs)
    if len(body.logprob_token_ids) != len(pairs):
        message = f"must have one list per continuation, got {len(body.logprob_token_ids)} for {len(pairs)}"
        raise bad_request("logprob_token_ids", message)
    return [
        service.client.with_named_ids(params, ids, pair, name="logprob_token_ids")
        for ids, pair in zip(body.logprob_token_ids, pairs, strict=True)
    ]


def _read_context(
    body: LoglikelihoodBody, num_times: int, service: Service
) -> tuple[str | None, str | IntArray]:
    """Return the rendered conversation and its ids; without messages, return None and the context."""
    check_one_of(body, "context")
    for name in LAYOUT_FIELDS if body.messages is None else ():
        if getattr(body, name) is not None:
            raise bad_request(name, f"applies only to messages; leave out {name}, or send messages instead")
    if isinstance(body.context, str):
        return None, body.context
    if body.messages is not None:
        text = render_messages(body.messages, service, layout_of(body, service, functions_of(body.tools)))
        check_texts([text] * num_times, "messages", service)  # tokenized with each continuation
        return text, service.text.encode(text, add_special_tokens=False)
    ids, limit = as_ids(body.context or [], "context"), service.capabilities.max_model_len
    if len(ids) > limit:  # checked early, because the ids are copied for each continuation
        message = f"has {len(ids)} tokens; at most {limit} are allowed before a continuation"
        raise bad_request("context", message, code="context_length_exceeded")
    return None, ids if len(ids) else service.text.prefix()


def _split(
    laid_out: str | None,
    before: str | IntArray,
    continuation: str | list[int],
    rule: BoundaryRule,
    service: Service,
) -> Split:
    if not continuation:
        raise bad_request("continuations", "a continuation is empty; there is nothing to score")
    if isinstance(continuation, list):
        ids = as_ids(continuation, "continuations")
        if not isinstance(before, str):
            return Split(np.concatenate([before, ids]), len(before))
    elif laid_out is not None:
        try:
            return split_texts(service.text, laid_out, [continuation], rule=rule, is_laid_out=True)[0]
        except ParameterError as error:
            raise as_api_error(error, {"context": "messages", "continuation": "continuations"}) from error
    elif isinstance(before, str):
        return service.client.split((before, continuation), rule)
    raise bad_request("continuations", "context and continuations must both be texts or both be ids")


def fields_of(score: Score, table: TokenTable) -> dict[str, Any]:
    """Return a continuation's fields in the reply; an impossible token has -inf, which is -9999 in JSON."""
    fields: dict[str, Any] = {
        "logprob": score.logprob,
        "mean_logprob": score.mean_logprob,
        "logprob_per_byte": score.logprob_per_byte,
        "logprob_per_char": score.logprob_per_char,
        "boundary": score.boundary,
        "is_greedy": score.is_greedy,
        "num_tokens": score.num_tokens,
        "num_bytes": score.num_bytes,
        "num_chars": score.num_chars,
        "token_ids": score.token_ids,
        "tokens": [table.token_text(token_id) for token_id in score.token_ids],
        "token_logprobs": score.token_logprobs,
        "ranks": score.ranks,
    }
    if score.unconditional_logprob is not None:
        fields |= {"unconditional_logprob": score.unconditional_logprob, "pmi": score.pmi}
    given = None if score.record is None else score.record.given
    if given is not None:
        entries = given.arrays
        columns = {"ids": entries.token_ids, "logprobs": entries.logprobs, "ranks": entries.ranks}
        bounds = [*pairwise(entries.offsets.tolist())]
        for name, column in columns.items():
            values = column.tolist()
            fields[f"given_{name}"] = [values[start:stop] for start, stop in bounds]
    return fields


def _as_arrow(rows: list[dict[str, Any]], info: LogprobsInfo) -> bytes:
    from logprobe._arrow import pa
    from logprobe.records.forms.arrow import INFO_KEY

    names = dict.fromkeys(name for row in rows for name in row)  # not every row has named ids
    columns = {name: [row.get(name) for row in rows] for name in names}
    table = pa.table(columns, metadata={INFO_KEY: info.to_json()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data
