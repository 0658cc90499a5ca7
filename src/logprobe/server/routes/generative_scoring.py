"""`POST /generative_scoring` and `POST /v1/score`: probabilities of label tokens after a query and an item.

The two routes have the formats of vLLM and of SGLang. Each item is one engine request, whose prompt joins the
query and the item; the probabilities are those of the next token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from starlette.responses import Response

from logprobe.records.forms.finite import finite
from logprobe.sampling import SamplingParams
from logprobe.server.http.decode import read
from logprobe.server.http.errors import bad_request
from logprobe.server.http.replies import JSON_TYPE, while_connected
from logprobe.server.openai.bodies import GenerativeScoringBody, LabelTokensBody, TokenScoreBody
from logprobe.server.openai.prompts import as_ids, check_texts
from logprobe.server.reply import encode, num_cached, usage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from starlette.requests import Request as HttpRequest

    from logprobe.engine.request import RequestOutput
    from logprobe.records.values import IntArray
    from logprobe.server.service import Service
    from logprobe.transport.messages import Admitted

B = TypeVar("B", GenerativeScoringBody, TokenScoreBody)


async def generative_scoring(request: HttpRequest, service: Service) -> Response:
    """Return the probability of the first label token after each item, in vLLM's format."""
    return await _scored(request, service, GenerativeScoringBody, prepare_generative_scoring, _as_vllm)


async def score(request: HttpRequest, service: Service) -> Response:
    """Return the probability of every label token after each item, in SGLang's format."""
    return await _scored(request, service, TokenScoreBody, prepare_score, _as_sglang)


@dataclass(frozen=True, slots=True)
class LabelTokensRequest:
    """The engine requests, one per item."""

    body: LabelTokensBody
    reply_id: str
    admitted: list[Admitted]


async def _scored(
    request: HttpRequest,
    service: Service,
    body_type: type[B],
    prepare: Callable[[B, Service], LabelTokensRequest],
    form: Callable[[Service, LabelTokensRequest, Sequence[RequestOutput]], dict[str, Any]],
) -> Response:
    asked = await read(request, service, body_type, prepare)
    outputs = await while_connected(request.receive, service.run_all(asked.admitted), service.check_engine)
    num_entries = len(outputs) * len(asked.body.label_token_ids)
    data = await service.workers.write(lambda: encode(service, form(service, asked, outputs)), num_entries)
    return Response(data, media_type=JSON_TYPE)


def prepare_generative_scoring(body: GenerativeScoringBody, service: Service) -> LabelTokensRequest:
    """Tokenize the query and each item separately, as vLLM does, and admit a request for each item."""
    service.choose_weights(body)
    service.log_body("generative_scoring", body)
    texts = [part for part in [body.query, *body.items] if isinstance(part, str)]
    check_texts(texts, "items", service)

    def ids_of(part: str | list[int], name: str, *, is_first: bool) -> IntArray:
        if isinstance(part, str):
            return service.text.encode(part, add_special_tokens=is_first and body.add_special_tokens)
        return as_ids(part, name)

    query = ids_of(body.query, "query", is_first=not body.item_first)
    items = [ids_of(item, "items", is_first=body.item_first) for item in body.items]
    prompts = _joined(query, items, body, service)
    return _admit(body, service, prompts, service.reply_id("generative-scoring", body.request_id))


def prepare_score(body: TokenScoreBody, service: Service) -> LabelTokensRequest:
    """Join the texts, or the token ids, of the query and each item, and admit a request for each item."""
    service.choose_weights(body)
    service.log_body("score", body)
    query, items = body.query, [body.items] if isinstance(body.items, str) else body.items
    prompts: list[IntArray] = []
    texts = [item for item in items if isinstance(item, str)]
    if isinstance(query, str) and len(texts) == len(items):
        check_texts([*[query] * len(texts), *texts], "items", service)  # the query is read with each item
        joined = [text + query if body.item_first else query + text for text in texts]
        prompts = [service.text.encode(text) for text in joined]
    elif isinstance(query, list) and not texts:
        parts = [as_ids(item, "items") for item in items]
        prompts = _joined(as_ids(query, "query"), parts, body, service)
    else:
        raise bad_request("items", "must be of the same kind as query: both texts, or both token ids")
    return _admit(body, service, prompts, service.new_id("score"))


def _joined(
    query: IntArray, items: Sequence[IntArray], body: LabelTokensBody, service: Service
) -> list[IntArray]:
    """Return a prompt for each item; a query that is too long is rejected before it is copied."""
    limit = service.capabilities.max_model_len
    if len(query) > limit:
        message = f"has {len(query)} tokens; at most {limit} are allowed next to an item"
        raise bad_request("query", message, code="context_length_exceeded")
    return [np.concatenate([item, query] if body.item_first else [query, item]) for item in items]


def _admit(
    body: LabelTokensBody, service: Service, prompts: Sequence[IntArray], reply_id: str
) -> LabelTokensRequest:
    ids = body.label_token_ids
    if len({*ids}) < len(ids):
        raise bad_request("label_token_ids", "has an id twice; give each id once")
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=0, logprob_token_ids=ids, lora=body.lora)
    requests = service.of_one_call()
    admitted = [requests.admit(prompt, params) for prompt in prompts]
    service.admit([one.request for one in admitted])
    return LabelTokensRequest(body, reply_id, admitted)


def _probabilities(output: RequestOutput, body: LabelTokensBody) -> NDArray[np.float64]:
    """Return the probabilities of the label tokens, (num_labels,); NaN if they are normalized and all 0."""
    record = output.outputs[0].logprobs
    assert record is not None, "logprobs were requested"
    assert record.given is not None, "logprob_token_ids were requested"
    entries = record.given.arrays
    by_id = dict(zip(entries.token_ids.tolist(), entries.logprobs.tolist(), strict=True))
    logprobs = np.array([by_id[token_id] for token_id in body.label_token_ids], np.float64)
    if not body.apply_softmax:
        return np.exp(logprobs)
    with np.errstate(invalid="ignore"):  # all are -inf
        shares: NDArray[np.float64] = np.exp(logprobs - logprobs.max())
        normalized: NDArray[np.float64] = shares / shares.sum()
        return normalized


def _as_vllm(service: Service, asked: LabelTokensRequest, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    scores = finite(np.array([_probabilities(output, asked.body)[0] for output in outputs]))
    return {
        "id": asked.reply_id,
        "object": "list",
        "created": service.now(),
        "model": service.name_of(asked.body),
        "data": [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)],
        "usage": usage_of(_num_prompt_tokens(outputs), len(outputs), num_cached(outputs)),
    }


def _as_sglang(
    service: Service, asked: LabelTokensRequest, outputs: Sequence[RequestOutput]
) -> dict[str, Any]:
    return {
        "scores": [finite(_probabilities(output, asked.body)) for output in outputs],
        "model": service.name_of(asked.body),
        "usage": usage_of(_num_prompt_tokens(outputs), 0, num_cached(outputs)),
        "object": "scoring",
    }


def _num_prompt_tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(output.prompt_token_ids) for output in outputs)
