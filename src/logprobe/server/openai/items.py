"""The items of `/v1/responses` → messages, and back as a client lists them.

Before it: a typed body and what is stored. After it: the chat template.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from logprobe.errors import ParameterError, shortened
from logprobe.server.http.errors import ApiError, as_api_error, bad_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logprobe.records.values import IntArray
    from logprobe.server.openai.bodies import ResponsesBody
    from logprobe.server.service import Service
    from logprobe.server.stored import Messages

LABELS: Final = ("type", "id", "status")
"""Fields of an item that tell of it, and say nothing to the model."""
ORDERS: Final = ("asc", "desc")
MAX_LISTED: Final = 100

_MESSAGE: Final = re.compile(r"messages(?:\[(\d+)\])?(.*)", re.DOTALL)


def read_conversation(body: ResponsesBody, service: Service, owner: bytes) -> tuple[Messages, IntArray]:
    """The conversation so far, with what was stored before, and its ids ready for the answer.

    Raises:
        ApiError: what cannot be laid out, by the field of this body that said it.
    """
    before: Messages = []
    if body.previous_response_id is not None:
        before = service.stored.find(owner, body.previous_response_id, "previous_response_id").messages()
    system: Messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    said = before + _as_messages(body.input)
    try:
        return said, service.read_messages(system + said)
    except (ParameterError, ApiError) as error:
        raise _by_item(as_api_error(error), body, len(system), len(before)) from error


def _as_messages(items: str | list[dict[str, Any]]) -> Messages:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not items:
        raise bad_request("input", "is empty; give a text or messages")
    for place, item in enumerate(items):
        if item.get("type", "message") != "message":
            raise bad_request(f"input[{place}].type", "only messages are read", code="unsupported_parameter")
    return [{name: value for name, value in item.items() if name not in LABELS} for item in items]


def _by_item(error: ApiError, body: ResponsesBody, num_system: int, num_before: int) -> ApiError:
    """An error of a message as one of the field that it came from."""
    is_message = _MESSAGE.fullmatch(error.param or "")
    if is_message is None:
        return error
    number, rest = is_message.groups()
    place = None if number is None else int(number) - num_system - num_before
    field = "input"
    if place is not None and place < -num_before:
        field = "instructions"
    elif place is not None and place < 0:
        field = "previous_response_id"
    elif place is not None and not isinstance(body.input, str):
        field = f"input[{place}]{rest}"
    return bad_request(field, error.message.removeprefix(f"{error.param}: "), code=error.code)


def list_items(response_id: str, messages: Messages, query: Mapping[str, str]) -> dict[str, Any]:
    """A page of the messages that a response answered, as OpenAI lists them.

    Raises:
        ApiError: a parameter that is unknown or out of range.
    """
    if unknown := query.keys() - {"limit", "order", "after"}:
        raise bad_request(min(unknown), "is no parameter of this route", code="unknown_parameter")
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ORDERS:
        raise bad_request("order", f"must be one of {', '.join(ORDERS)}, got {shortened(order)!r}")
    if not re.fullmatch(r"[0-9]{1,3}", limit) or not 1 <= int(limit) <= MAX_LISTED:
        raise bad_request("limit", f"must be an integer in [1, {MAX_LISTED}], got {shortened(limit)!r}")
    own_id = response_id.replace("resp", "msg", 1)
    items = [_as_item(f"{own_id}-{number}", message) for number, message in enumerate(messages)]
    items = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        places = [number for number, item in enumerate(items) if item["id"] == after]
        if not places:
            raise bad_request("after", f"there is no item {shortened(after)!r}")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(items),
    }


def _as_item(item_id: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as an item; more than one part of text is given back as such."""
    is_own = message["role"] == "assistant"
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    extras: dict[str, Any] = {"annotations": [], "logprobs": []} if is_own else {}
    kind = "output_text" if is_own else "input_text"
    parts = [{"type": kind, "text": text} | extras for text in texts]
    others = {name: value for name, value in message.items() if name not in {"role", "content"}}
    own = {"id": item_id, "type": "message", "role": message["role"], "status": "completed"}
    return others | own | {"content": parts}
