"""`POST /v1/label`, `/v1/judge` and `/v1/rerank`: probabilities of possible answers.

`analysis.labels` plans the requests and summarizes the scores. Each answer is one engine request; prefixes
that several requests share are computed once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from starlette.responses import Response

from logprobe.analysis import labels
from logprobe.analysis.score_requests import admit_splits
from logprobe.errors import ParameterError
from logprobe.records.forms.finite import finite_fields
from logprobe.server.http.decode import read
from logprobe.server.http.errors import ApiError, as_api_error, bad_request
from logprobe.server.http.replies import JSON_TYPE, while_connected
from logprobe.server.limits import check_count, utf8_bytes
from logprobe.server.openai.bodies import JudgeBody, LabelBody, RerankBody
from logprobe.server.openai.prompts import check_one_of, check_texts, render_messages
from logprobe.server.reply import encode, num_cached, usage_of
from logprobe.server.routes.loglikelihood import SCORE_ENTRIES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.requests import Request as HttpRequest

    from logprobe.analysis.classification import Classification
    from logprobe.analysis.labels import Asked, Judgement, Plan
    from logprobe.analysis.score import Score
    from logprobe.engine.request import Requests
    from logprobe.records.values import IntArray
    from logprobe.server.service import ChoosesWeights, Service, SplitResult
    from logprobe.text.boundary import Split
    from logprobe.text.chat import Conversation
    from logprobe.transport.messages import Admitted

    HasPrompts: TypeAlias = LabelBody | JudgeBody

T = TypeVar("T")
B = TypeVar("B", LabelBody, JudgeBody, RerankBody)


async def label(request: HttpRequest, service: Service) -> Response:
    """Score labels after a text or a conversation: log-probabilities (nats) and normalized probabilities."""
    return await _answered(request, service, LabelBody, prepare_label)


async def judge(request: HttpRequest, service: Service) -> Response:
    """Return the distribution of a grade: mean, standard deviation, and the probability of other answers."""
    return await _answered(request, service, JudgeBody, prepare_judge)


async def rerank(request: HttpRequest, service: Service) -> Response:
    """Rank documents by relevance to a query (0 to 1), the most relevant first."""
    return await _answered(request, service, RerankBody, prepare_rerank)


async def _answered(
    request: HttpRequest, service: Service, body_type: type[B], prepare: Callable[[B, Service], AnswerRequest]
) -> Response:
    asked = await read(request, service, body_type, prepare)
    work = service.run_splits(asked.splits, asked.admitted, asked.requests)
    results = await while_connected(request.receive, work, service.check_engine)
    num_entries = sum(SCORE_ENTRIES + len(split.continuation) for split in asked.splits)
    return await service.workers.write(lambda: _reply(service, asked, results), num_entries)


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """The engine requests for a plan's pairs, and the function that makes the reply from the scores."""

    splits: list[Split]
    admitted: list[Admitted]
    requests: Requests
    fields: Callable[[Sequence[Score], dict[str, Any]], dict[str, Any]]  # (scores, usage) → reply


def _reply(service: Service, asked: AnswerRequest, results: Sequence[SplitResult]) -> Response:
    scores = [
        service.client.as_score(split, *result) for split, result in zip(asked.splits, results, strict=True)
    ]
    num_tokens = sum(len(split.token_ids) for split in asked.splits)
    reply = asked.fields(scores, usage_of(num_tokens, 0, num_cached(output for output, _ in results)))
    return Response(encode(service, reply), media_type=JSON_TYPE)


def _admit(
    plan: Plan[T],
    body: ChoosesWeights,
    service: Service,
    base: str,
    fields: Callable[[T, dict[str, Any]], dict[str, Any]],
) -> AnswerRequest:
    splits = [service.client.split(pair) for pair in plan.pairs]
    params = service.params_for(body, max_tokens=0, prompt_logprobs=0)
    names = [f"{base}-{number}" for number in range(len(splits))]
    requests = service.of_one_call()
    admitted = admit_splits(splits, params, requests, names)
    service.admit([request.request for request in admitted])
    return AnswerRequest(splits, admitted, requests, lambda scores, usage: fields(plan.sum_up(scores), usage))


# -- labels and grades ---------------------------------------------------------------------------------------


def prepare_label(body: LabelBody, service: Service) -> AnswerRequest:
    """Validate and admit one request for each pair of a prompt and a label's text."""
    prompts = _open(body, "label", service)
    has_empty = body.correction == "calibrated"
    count = (len(prompts) + has_empty) * body.num_answers
    check_count(service.settings, "max_requests", "labels", count, "pairs of a prompt and a label text")
    confidence = None if body.confidence is None else service.confidence_named(body.confidence)
    named = labels.texts_of(body.labels)
    texts = [text for texts in named.values() for text in texts]
    empty = [body.content_free] if isinstance(body.content_free, str) else []
    _check_texts("input", [*(text for text in prompts if isinstance(text, str)), *empty], len(texts), service)
    _check_texts("labels", texts, len(prompts) + has_empty, service)

    def lay_out() -> Plan[list[Classification]]:
        return labels.classify_plan(
            service.text,
            prompts,
            body.labels,
            correction=body.correction,
            content_free=body.content_free,
            confidence=confidence,
            read=lambda messages: _read(messages, body, len(texts), service),
        )

    return _admit_answers("label", lay_out, _labelled, body, service)


def prepare_judge(body: JudgeBody, service: Service) -> AnswerRequest:
    """Validate and admit one request for each pair of a prompt and a grade's spelling."""
    prompts = _open(body, "judge", service)
    count = len(prompts) * body.num_answers
    check_count(service.settings, "max_requests", "scale", count, "pairs of a prompt and a grade")
    _check_texts("input", [text for text in prompts if isinstance(text, str)], body.num_answers, service)
    scale = labels.SCALE if body.scale is None else body.scale

    def lay_out() -> Plan[list[Judgement]]:
        plan = labels.judge_plan(
            service.text,
            prompts,
            scale,
            read=lambda messages: _read(messages, body, body.num_answers, service),
        )
        check_count(
            service.settings,
            "max_requests",
            "scale",
            len(plan.pairs),
            "pairs of a prompt and a grade's spelling",
        )
        return plan

    return _admit_answers("judge", lay_out, _judged, body, service)


def _open(body: HasPrompts, name: str, service: Service) -> list[Asked]:
    """Resolve the model of a body, and return the prompts: texts, or a single conversation."""
    service.choose_weights(body)
    service.log_body(name, body)
    check_one_of(body, "input")
    if body.messages is not None:
        return [body.messages]
    if not body.input and body.input != "":
        raise bad_request("input", "is empty; give a text or a list of texts")
    return [body.input] if isinstance(body.input, str) else [*(body.input or [])]


def _admit_answers(
    name: str,
    lay_out: Callable[[], Plan[list[T]]],
    fields_of: Callable[[T], dict[str, Any]],
    body: HasPrompts,
    service: Service,
) -> AnswerRequest:
    base, model, created = service.new_id(name), service.name_of(body), service.now()

    def reply(found: Sequence[T], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": base,
            "object": "list",
            "created": created,
            "model": model,
            "unit": "nats",
            "data": [{"index": index, **finite_fields(fields_of(one))} for index, one in enumerate(found)],
            "usage": usage,
        }

    try:
        return _admit(lay_out(), body, service, base, reply)
    except ParameterError as error:
        field = "input" if body.messages is None else "messages"
        raise as_api_error(error, {"prompt": field, "prompts": field}) from error


def _labelled(one: Classification) -> dict[str, Any]:
    fields = {
        "label": one.label,
        "labels": list(one.labels),
        "num_classes": len(one.labels),
        "probs": list(one.probabilities.values()),
        "logprobs": one.logprobs.tolist(),
        "corrected": one.corrected.tolist(),
        "mass": one.mass,
        "margin": None if len(one.labels) == 1 else one.margin,
        "boundary": one.boundary,
    }
    if one.confidence is not None:
        found = one.confidence
        fields["confidence"] = {
            "label": found.label,
            "probability": found.probability,
            "probs": found.shares.tolist(),
            "label_set": [*found.label_set],
        }
    return fields


def _judged(one: Judgement) -> dict[str, Any]:
    return {
        "expectation": one.expectation,
        "spread": one.spread,
        "off_scale": one.off_scale,
        "scale": list(one.scale),
        "probs": list(one.grades.probabilities.values()),
        "logprobs": one.grades.logprobs.tolist(),
        "boundary": one.grades.boundary,
    }


def _read(messages: Conversation, body: HasPrompts, num_times: int, service: Service) -> IntArray:
    """Convert a conversation to token ids, after checking its size multiplied by the number of answers."""
    try:
        text = render_messages(messages, service)
        _check_texts("messages", [text], num_times, service)
    except (ApiError, ParameterError) as error:
        failure = as_api_error(error)
        if isinstance(body, JudgeBody) or messages is not body.content_free or failure.param is None:
            raise
        raise failure.at(failure.param.replace("messages", "content_free", 1)) from error
    return service.text.encode(text, add_special_tokens=False)


# -- documents -----------------------------------------------------------------------------------------------


def prepare_rerank(body: RerankBody, service: Service) -> AnswerRequest:
    """Validate and admit two requests per document, one for each answer."""
    service.choose_weights(body)
    service.log_body("rerank", body)
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    layout = {name: getattr(body, name) for name in ("task", "template", "labels")}
    layout = {name: value for name, value in layout.items() if value is not None}
    before, pair, after = layout.get("template", labels.RERANK_TEMPLATE)
    beside = sum(map(utf8_bytes, (before, pair, after, body.query, layout.get("task", labels.RERANK_TASK))))
    count = len(documents) * beside + sum(map(utf8_bytes, documents))
    check_count(service.settings, "max_text_bytes", "documents", count, "bytes of text in all prompts")
    check_texts(documents, "documents", service)
    check_texts([body.query, before, pair, after], "query", service)
    plan = labels.rerank_plan(service.text, body.query, documents, **layout)
    base, model = service.new_id("rerank"), service.name_of(body)

    def reply(scores: list[float], usage: dict[str, Any]) -> dict[str, Any]:
        del usage["completion_tokens"]  # not in Jina's and Cohere's format
        results = ranked(scores, None if body.return_documents is False else documents)
        return {"id": base, "model": model, "usage": usage, "results": results[: body.top_n or None]}

    return _admit(plan, body, service, base, reply)


def ranked(scores: Sequence[float], documents: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return document indices with scores, best first; ties keep their order, and NaN comes last."""
    order = sorted(range(len(scores)), key=lambda place: (math.isnan(scores[place]), -scores[place]))
    results = [finite_fields({"index": place, "relevance_score": scores[place]}) for place in order]
    if documents is None:
        return results
    return [result | {"document": {"text": documents[result["index"]]}} for result in results]


def _check_texts(param: str, texts: Sequence[str], num_times: int, service: Service) -> None:
    """Check the size of texts in bytes, multiplied by the number of times that each is tokenized."""
    count = num_times * sum(map(utf8_bytes, texts))
    check_count(
        service.settings,
        "max_text_bytes",
        param,
        count,
        "bytes of text, counted each time the text is tokenized",
    )
    check_texts(texts, param, service)
