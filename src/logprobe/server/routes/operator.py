"""Operator routes: load and unload LoRA weights, replace the model's weights, clear the prefix cache."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from logprobe.errors import LogprobeError, ModelError, ParameterError
from logprobe.server.http.decode import read
from logprobe.server.http.errors import as_api_error, bad_request
from logprobe.server.http.replies import json_reply
from logprobe.server.openai.bodies import LoadLoraBody, UnloadLoraBody, UpdateWeightsBody

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    from logprobe.server.service import Service

B = TypeVar("B", LoadLoraBody, UnloadLoraBody, UpdateWeightsBody)


async def load_lora_adapter(request: HttpRequest, service: Service) -> Response:
    """Load LoRA weights from a folder on the server; `load_inplace` replaces weights of the same name."""
    body = await read(request, service, LoadLoraBody, _checked)
    service.check_new_name(body.lora_name)
    if not body.load_inplace and body.lora_name in service.engine.list_loras():
        raise bad_request("lora_name", "is already loaded; set load_inplace, or choose another name")
    with _reading("lora_path"):
        await asyncio.to_thread(service.engine.add_lora, body.lora_name, body.lora_path)
    service.models.keep(service)
    return json_reply({"id": body.lora_name, "object": "model", "root": body.lora_path})


async def unload_lora_adapter(request: HttpRequest, service: Service) -> Response:
    """Unload LoRA weights: new requests for them are rejected, running requests finish."""
    body = await read(request, service, UnloadLoraBody, _checked)
    try:
        service.engine.remove_lora(body.lora_name)
    except ParameterError as error:
        raise as_api_error(error).at("lora_name") from error
    service.models.keep(service)
    return json_reply({"id": body.lora_name, "object": "model", "deleted": True})


async def update_weights_from_disk(request: HttpRequest, service: Service) -> Response:
    """Replace the model's weights with those in a folder on the server; the architecture must be the same."""
    body = await read(request, service, UpdateWeightsBody, _checked)
    with _reading("model_path"):
        version = await asyncio.to_thread(
            service.engine.load_weights,
            body.model_path,
            version=body.weight_version,
            finishes=not body.abort_all_requests,
        )
    service.models.keep(service)
    return json_reply({"success": True, "weight_version": version})


async def reset_prefix_cache(_: HttpRequest, service: Service) -> Response:
    """Clear the prefix cache, except prefixes in use by running requests; results do not change."""
    service.engine.forget_prefixes()
    return json_reply({"success": True})


@contextmanager
def _reading(field: str) -> Iterator[None]:
    """Turn an error inside the `with` block, such as an unreadable path, into a 400 that names `field`."""
    try:
        yield
    except ModelError as error:
        raise bad_request(field, str(error)) from error
    except LogprobeError:
        raise
    except (OSError, ValueError) as error:  # NUL in the path, or a path that is too long
        reason = getattr(error, "strerror", None) or error
        raise bad_request(field, f"cannot be read ({reason}); use a folder on the server") from error


def _checked(body: B, service: Service) -> B:
    service.check_model(body.model)
    return body
