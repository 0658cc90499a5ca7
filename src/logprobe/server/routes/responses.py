"""`POST /v1/responses`: OpenAI's responses API, with `GET` and `DELETE` for stored responses."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response

from logprobe.errors import ParameterError, shortened
from logprobe.server.answers import answer
from logprobe.server.http.decode import read
from logprobe.server.http.errors import ApiError, as_api_error, bad_request
from logprobe.server.http.replies import JSON_TYPE, json_reply
from logprobe.server.openai.bodies import MAX_LISTED, ORDERS, ResponsesBody
from logprobe.server.openai.fields import responses_params
from logprobe.server.openai.items import InputItems, as_items
from logprobe.server.openai.prompts import encode_laid_out, render_messages, template_variables
from logprobe.server.openai.response import ResponseShape, ResponsesRequest
from logprobe.server.openai.tools import NO_TOOLS, tools_of
from logprobe.server.routes.chat import admit_reply
from logprobe.text.chat import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request as HttpRequest

    from logprobe.server.openai.tools import Tools
    from logprobe.server.service import Service
    from logprobe.server.stored import Messages, StoredResponse

_MESSAGE: Final = re.compile(r"messages(?:\[(\d+)\])?(.*)", re.DOTALL)


async def create_response(request: HttpRequest, service: Service) -> Response:
    """Create a response."""
    owner = service.keys.owner_of(request.headers)
    prepared = await read(request, service, ResponsesBody, partial(prepare, owner=owner))
    shape = ResponseShape(service, prepared)
    return await answer(request, service, prepared.generation, shape, is_stream=bool(prepared.body.stream))


def prepare(body: ResponsesBody, service: Service, owner: bytes) -> ResponsesRequest:
    """Validate and admit a request; `owner` is a digest of the request's API key."""
    service.choose_weights(body)
    service.log_body("responses", body)
    has_tools = body.tools is not None or body.tool_choice is not None
    tools = tools_of(body, service.reply_form()) if has_tools else NO_TOOLS
    messages, prompt = read_conversation(body, service, owner, tools)
    ids = encode_laid_out(prompt, service)
    generation, splitter = admit_reply(
        service, body, prompt, ids, tools, responses_params, service.new_id("resp")
    )
    return ResponsesRequest(owner, body, messages, generation, splitter)


def read_conversation(
    body: ResponsesBody, service: Service, owner: bytes, tools: Tools
) -> tuple[Messages, str]:
    """Return a body's conversation as messages and as a rendered prompt.

    The messages begin with the stored conversation of the previous response, if the body names one.

    Raises:
        ApiError: 404 if the previous response is not stored, or 400 if the conversation cannot be rendered.
    """
    before: Messages = []
    if body.previous_response_id is not None:
        before = service.stored.find(owner, body.previous_response_id, "previous_response_id").messages()
    system: Messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = InputItems(body.input)
    messages = before + items.messages
    variables = template_variables(body, service.template_variables(body))
    layout = Layout(tools=tools.functions, chat_template_kwargs=variables)
    try:
        text = render_messages(system + messages, service, layout, reasoning_field="input.reasoning")
    except (ParameterError, ApiError) as error:
        raise _by_item(as_api_error(error), items, len(system), len(before)) from error
    return messages, text


def _by_item(error: ApiError, items: InputItems, num_system: int, num_before: int) -> ApiError:
    """Convert an error about a message to one about the body field from which the message comes."""
    is_message = _MESSAGE.fullmatch(error.param or "")
    if is_message is None:
        return error
    number, rest = is_message.groups()
    index = None if number is None else int(number) - num_system - num_before
    field = "input"
    if index is not None and index < -num_before:
        field = "instructions"
    elif index is not None and index < 0:
        field = "previous_response_id"
    elif index is not None:
        field = items.path_of(index, rest)
    return error.at(field)


async def get_response(request: HttpRequest, service: Service) -> Response:
    """Return a stored response."""
    return Response(_find_stored(request, service).response, media_type=JSON_TYPE)


async def list_input_items(request: HttpRequest, service: Service) -> Response:
    """List the input items of a stored response, by default the latest first."""
    stored, query = _find_stored(request, service), dict(request.query_params)

    def written() -> bytes:
        before = stored.messages()[:-1]  # the last message is the answer
        return msgspec.json.encode(list_items(request.path_params["response_id"], before, query))

    return Response(
        await service.workers.read(written, len(stored.conversation), service.caller), media_type=JSON_TYPE
    )


def list_items(response_id: str, messages: Messages, query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of a response's input items, in OpenAI's list format.

    Raises:
        ApiError: 400 if a query parameter is unknown or invalid.
    """
    if unknown := query.keys() - {"limit", "order", "after"}:
        raise bad_request(min(unknown), "unknown query parameter", code="unknown_parameter")
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ORDERS:
        raise bad_request("order", f"must be one of {', '.join(ORDERS)}, got {shortened(order)!r}")
    if not re.fullmatch(r"[0-9]{1,3}", limit) or not 1 <= int(limit) <= MAX_LISTED:
        raise bad_request("limit", f"must be an integer in [1, {MAX_LISTED}], got {shortened(limit)!r}")
    own_id = response_id.replace("resp", "msg", 1)
    numbered = enumerate(messages)
    items = [item for number, message in numbered for item in as_items(message, f"{own_id}-{number}")]
    items = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        matches = [number for number, item in enumerate(items) if item["id"] == after]
        if not matches:
            raise bad_request("after", f"there is no item {shortened(after)!r}")
        items = items[matches[0] + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(items),
    }


async def delete_response(request: HttpRequest, service: Service) -> Response:
    """Delete a stored response."""
    response_id = request.path_params["response_id"]
    service.stored.drop(service.keys.owner_of(request.headers), response_id)
    return json_reply({"id": response_id, "object": "response.deleted", "deleted": True})


def _find_stored(request: HttpRequest, service: Service) -> StoredResponse:
    return service.stored.find(service.keys.owner_of(request.headers), request.path_params["response_id"])
