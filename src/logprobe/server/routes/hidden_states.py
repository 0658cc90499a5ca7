"""`POST /v1/hidden_states`: hidden states of the tokens of prompts, in binary."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from logprobe.engine.plan.capture import layers_of
from logprobe.server.http.decode import read
from logprobe.server.http.errors import bad_request
from logprobe.server.http.replies import StreamedReply, while_connected
from logprobe.server.limits import Cost
from logprobe.server.openai.bodies import HiddenStatesBody
from logprobe.server.openai.prompts import as_ids, check_texts
from logprobe.server.routes.next_token import TYPE, origin, safetensors_head

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    from logprobe.engine.request import RequestOutput
    from logprobe.server.service import Service
    from logprobe.transport.messages import Admitted

NUM_COPIES = 3  # of the states: a step's, the whole output's, and the reply's


async def hidden_states(request: HttpRequest, service: Service) -> Response:
    """Return a safetensors body with a float32 tensor (tokens, layers, hidden size) per prompt.

    The tensors are named by the prompts' indices and are streamed in order; if a later prompt fails, the
    reply is cut off.
    """
    body, admitted = await read(request, service, HiddenStatesBody, prepare)
    shape = service.capabilities.shape
    assert shape is not None, "requests were admitted"
    layers = layers_of(body.layers, shape, "layers")
    outputs = service.results(admitted)
    first = await while_connected(request.receive, anext(outputs), service.check_engine)
    metadata = origin(first, service.name_of(body)) | {"layers": msgspec.json.encode(layers).decode()}
    lengths = [len(one.request.prompt_token_ids) for one in admitted]
    shapes = {str(number): (length, len(layers), shape.hidden_size) for number, length in enumerate(lengths)}
    head, num_data_bytes = safetensors_head(shapes, "F32", metadata)
    num_bytes = len(head) + num_data_bytes
    service.metrics.bytes_out.inc(num_bytes)
    headers = {"content-type": TYPE, "content-length": str(num_bytes)}
    return StreamedReply(_tensors(head, first, outputs), headers, check=service.check_engine)


async def _tensors(
    head: bytes, first: RequestOutput, others: AsyncGenerator[RequestOutput]
) -> AsyncGenerator[bytes]:
    async with aclosing(others):
        yield head
        yield _tensor_bytes(first)
        del first
        async for output in others:
            yield _tensor_bytes(output)
            await asyncio.sleep(0)  # let other clients' streams run between prompts that are ready


def _tensor_bytes(output: RequestOutput) -> bytes:
    states = output.prompt_hidden_states
    assert states is not None, "the request has return_hidden_states"
    return states.tobytes()


def prepare(body: HiddenStatesBody, service: Service) -> tuple[HiddenStatesBody, list[Admitted]]:
    """Validate and admit one request for each prompt."""
    service.choose_weights(body)
    service.log_body("hidden_states", body)
    shape = service.capabilities.shape
    if shape is None:
        raise bad_request(
            "layers", "this server's engine does not report hidden states; use the native engine"
        )
    num_layers = len(layers_of(body.layers, shape, "layers"))
    check_texts([prompt for prompt in body.prompts if isinstance(prompt, str)], "prompts", service)
    prompts = [
        service.text.encode(prompt) if isinstance(prompt, str) else as_ids(prompt, "prompts")
        for prompt in body.prompts
    ]
    requests = service.of_one_call()
    base = service.new_id("hidden")
    params = service.params_for(body, max_tokens=0, return_hidden_states=body.layers)
    admitted = [
        requests.admit(ids, params, request_id=f"{base}-{number}") for number, ids in enumerate(prompts)
    ]
    num_bytes = sum(map(len, prompts)) * num_layers * shape.hidden_size * 4 * NUM_COPIES
    states = Cost(requests=0, tokens=0, logprob_bytes=num_bytes)
    service.admit([request.request for request in admitted], beside=states)
    return body, admitted
