"""`POST /v1/next_token_logprobs`: whole next-token distributions, in binary.

Before it: HTTP. After it: one engine request a prompt; those of all clients share its steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from starlette.responses import Response

from logprobe.sampling import SamplingParams
from logprobe.server.http.decode import read
from logprobe.server.http.sse import while_connected
from logprobe.server.limits import Cost
from logprobe.server.openai.bodies import NextTokenBody
from logprobe.server.openai.prompts import as_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request as HttpRequest

    from logprobe.engine.request import RequestOutput
    from logprobe.server.service import Service
    from logprobe.transport.messages import Admitted

TYPE = "application/vnd.safetensors"


async def next_token_logprobs(request: HttpRequest, service: Service) -> Response:
    """Answer with a safetensors body: `logprobs` (prompts, vocabulary), nats, one row a prompt in order."""
    body, admitted = await read(request, service, NextTokenBody, understand)
    ticket = service.limits.admit(Cost.of([one.request for one in admitted], service.vocab_size))
    try:
        outputs = await while_connected(request.receive, service.run_all(admitted), service.check_engine)
    finally:
        ticket.release()
    # Megabytes are copied: elsewhere, so that other clients' streams go on.
    data = await service.workers.run(lambda: _packed(outputs, body.dtype, service.name_of(body.lora)))
    service.metrics.bytes_out.inc(len(data))
    return Response(data, media_type=TYPE)


def understand(body: NextTokenBody, service: Service) -> tuple[NextTokenBody, list[Admitted]]:
    """A request for each prompt, admitted."""
    service.choose_weights(body)
    service.log_body("next_token_logprobs", body)
    service.check_texts([prompt for prompt in body.prompts if isinstance(prompt, str)], "prompts")
    prompts = [
        service.text.encode(prompt) if isinstance(prompt, str) else as_ids(prompt, "prompts")
        for prompt in body.prompts
    ]
    requests = service.client.requests.of_one_call()
    base, params = service.new_id("next"), SamplingParams(max_tokens=1, lora=body.lora)
    return body, [
        requests.admit(ids, params, wants_row=True, request_id=f"{base}-{number}")
        for number, ids in enumerate(prompts)
    ]


def _packed(outputs: Sequence[RequestOutput], dtype: str, model: str) -> bytes:
    from safetensors.numpy import save

    rows = [output.outputs[0].row for output in outputs]
    table = np.stack([row for row in rows if row is not None])
    told = {"stage": "raw", "unit": "nats", "model": model}
    if dtype == "float16":
        # What float16 cannot hold becomes its least number; only real -inf stays that.
        least = np.finfo(np.float16).min
        table = np.where(np.isneginf(table), table, np.maximum(table, least)).astype(np.float16)
    data: bytes = save({"logprobs": table}, metadata=told)
    return data
