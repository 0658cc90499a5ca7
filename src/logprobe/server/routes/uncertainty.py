"""`POST /v1/uncertainty`: sample answers and measure their agreement.

`analysis.uncertainty` plans the requests and summarizes the answers; each answer is one engine request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import Response

from logprobe.analysis.uncertainty import K, LowConfidence, draw_plan
from logprobe.errors import ParameterError
from logprobe.server.http.decode import read
from logprobe.server.http.errors import as_api_error
from logprobe.server.http.replies import JSON_TYPE, while_connected
from logprobe.server.openai.bodies import UncertaintyBody
from logprobe.server.openai.fields import check_max_logprobs, uncertainty_params
from logprobe.server.openai.prompts import check_one_of, check_texts, encode_messages
from logprobe.server.reply import encode, num_cached, usage_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request as HttpRequest

    from logprobe.analysis.uncertainty import DrawPlan
    from logprobe.engine.request import RequestOutput
    from logprobe.records.values import IntArray
    from logprobe.server.service import Service
    from logprobe.transport.messages import Admitted


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """The engine requests that a plan needs."""

    body: UncertaintyBody
    plan: DrawPlan
    reply_id: str
    num_prompt: int
    admitted: list[Admitted]


async def uncertainty(request: HttpRequest, service: Service) -> Response:
    """Sample answers and measure their agreement by exact probabilities; entropies are in nats."""
    asked = await read(request, service, UncertaintyBody, prepare)
    work = service.run_until(asked.admitted, asked.plan.growing)
    outputs = await while_connected(request.receive, work, service.check_engine)
    num_entries = 2 * (asked.plan.k + 1) * sum(len(output.outputs[0].token_ids) for output in outputs)
    return await service.workers.write(lambda: _reply(service, asked, outputs), num_entries)


def prepare(body: UncertaintyBody, service: Service) -> DrawRequest:
    """Validate and admit one request for each answer."""
    service.choose_weights(body)
    service.log_body("uncertainty", body)
    try:
        plan = _plan(body, service)
        ids = _prompt(body, service)
        base, requests = service.new_id("uncertainty"), service.of_one_call()
        admitted = [
            requests.admit(ids, params, request_id=f"{base}-{number}")
            for number, params in enumerate(plan.params)
        ]
    except ParameterError as error:
        names = {"prompt": "input" if body.messages is None else "messages", "threshold": "stop_below"}
        raise as_api_error(error, names) from error
    service.admit([one.request for one in admitted])
    return DrawRequest(body, plan, base, len(ids), admitted)


def _plan(body: UncertaintyBody, service: Service) -> DrawPlan:
    most = service.settings.max_logprobs
    k = body.k or (min(K, most) if most > 0 else K)
    check_max_logprobs("k", k, service.settings)
    params = uncertainty_params(body)
    if body.stop_below is None:
        return draw_plan(body.n, params, window=body.window, k=k)
    given = {} if body.window is None else {"window": body.window}
    return draw_plan(body.n, params, stop_when=LowConfidence(threshold=body.stop_below, k=k, **given))


def _prompt(body: UncertaintyBody, service: Service) -> IntArray:
    check_one_of(body, "input")
    if body.messages is not None:
        return encode_messages(body.messages, service)
    text = body.input or ""
    check_texts([text], "input", service)
    return service.text.encode(text)


def _reply(service: Service, asked: DrawRequest, outputs: Sequence[RequestOutput]) -> Response:
    found = asked.plan.sum_up(asked.plan.answers(outputs, service.text)).to_dict()
    for answer in found["answers"]:
        del answer["self_certainty"]  # would need whole-vocabulary rows
    num_drawn = sum(len(output.outputs[0].token_ids) for output in outputs)
    reply = {
        "id": asked.reply_id,
        "object": "uncertainty",
        "created": service.now(),
        "model": service.name_of(asked.body),
        "unit": "nats",
        **found,
        "usage": usage_of(asked.num_prompt, num_drawn, num_cached(outputs[:1])),  # the prompt counts once
    }
    return Response(encode(service, reply), media_type=JSON_TYPE)
