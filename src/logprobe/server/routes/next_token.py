"""`POST /v1/next_token_logprobs`: full next-token distributions, in binary.

Each prompt is one engine request; requests from all clients are batched.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from logprobe.server.http.decode import read
from logprobe.server.http.replies import StreamedReply, while_connected
from logprobe.server.openai.bodies import NextTokenBody
from logprobe.server.openai.prompts import as_ids, check_texts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    from logprobe.engine.request import RequestOutput
    from logprobe.server.service import Service
    from logprobe.transport.messages import Admitted

TYPE = "application/vnd.safetensors"


async def next_token_logprobs(request: HttpRequest, service: Service) -> Response:
    """Return a safetensors body: `logprobs` (num_prompts, vocab_size) in nats, one row per prompt.

    Rows are streamed in order as they are computed; if a later row fails, the reply is cut off.
    """
    body, admitted = await read(request, service, NextTokenBody, prepare)
    outputs = service.results(admitted)
    first = await while_connected(request.receive, anext(outputs), service.check_engine)
    dtype = np.dtype(body.dtype)
    metadata = {"stage": "raw", "unit": "nats"} | origin(first, service.name_of(body))
    shape = len(admitted), service.vocab_size
    head, num_data_bytes = safetensors_head({"logprobs": shape}, f"F{8 * dtype.itemsize}", metadata)
    num_bytes = len(head) + num_data_bytes
    service.metrics.bytes_out.inc(num_bytes)
    headers = {"content-type": TYPE, "content-length": str(num_bytes)}
    return StreamedReply(_table(head, first, outputs, dtype), headers, check=service.check_engine)


async def _table(
    head: bytes, first: RequestOutput, others: AsyncGenerator[RequestOutput], dtype: np.dtype[Any]
) -> AsyncGenerator[bytes]:
    async with aclosing(others):
        yield head
        yield _row_bytes(first, dtype)
        del first
        async for output in others:
            yield _row_bytes(output, dtype)
            await asyncio.sleep(0)  # let other clients' streams run between rows that are ready


def _row_bytes(output: RequestOutput, dtype: np.dtype[Any]) -> bytes:
    row = output.outputs[0].row
    assert row is not None, "the request has wants_row"
    if dtype == np.float16:
        # Clamp to float16's minimum, so that only true -inf becomes -inf.
        row = np.where(np.isneginf(row), row, np.maximum(row, np.finfo(np.float16).min))
    return row.astype(dtype, copy=False).tobytes()


def origin(output: RequestOutput, model: str) -> dict[str, str]:
    """Return metadata on what computed an output: model, weights, arithmetic and versions.

    All outputs of one HTTP request have the same metadata.
    """
    if output.info is None:
        return {"model": model}
    names = ("weights", "arithmetic", "logits_dtype", "weight_version", "lora_version", "logprobe_version")
    known = {name: getattr(output.info, name) for name in names}
    return {"model": model} | {name: value for name, value in known.items() if value is not None}


def safetensors_head(
    shapes: Mapping[str, tuple[int, ...]], dtype: str, metadata: Mapping[str, str]
) -> tuple[bytes, int]:
    """Return the beginning of a safetensors body, and the number of bytes of the tensors that follow.

    The beginning consists of the header's size and the header, which has `metadata` as `__metadata__`. The
    tensors must follow in the order of `shapes`. `dtype` is the safetensors name of their type, such as F32.
    """
    entries, start = {}, 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape) * int(dtype[1:]) // 8
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, stop)}
        start = stop
    header = msgspec.json.encode({"__metadata__": metadata, **entries})
    header += b" " * (-len(header) % 8)  # align the tensors
    return len(header).to_bytes(8, "little") + header, start


def prepare(body: NextTokenBody, service: Service) -> tuple[NextTokenBody, list[Admitted]]:
    """Validate and admit one request for each prompt."""
    service.choose_weights(body)
    service.log_body("next_token_logprobs", body)
    check_texts([prompt for prompt in body.prompts if isinstance(prompt, str)], "prompts", service)
    prompts = [
        service.text.encode(prompt) if isinstance(prompt, str) else as_ids(prompt, "prompts")
        for prompt in body.prompts
    ]
    requests = service.of_one_call()
    base, params = service.new_id("next"), service.params_for(body, max_tokens=1)
    admitted = [
        requests.admit(ids, params, wants_row=True, request_id=f"{base}-{number}")
        for number, ids in enumerate(prompts)
    ]
    service.admit([request.request for request in admitted])
    return body, admitted
