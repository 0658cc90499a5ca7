"""Convert items in the responses API to chat messages and back.

One assistant message corresponds to several items: reasoning, text and tool calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logprobe.server.http.errors import bad_request

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from logprobe.server.stored import Messages

LABELS: Final = ("type", "id", "status")
"""Metadata fields of an item, which the model does not see."""
REPORTS: Final = ("logprobs", "processed_logprobs", "fields", "parsed_arguments")
"""Fields of output items that are ignored when an item is sent back as input."""
FIELDS: Final = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary"),
}
"""Fields with content by item type, for items other than messages."""
REASONING_PARTS: Final = ("reasoning_text", "summary_text")
APART: Final = ("role", "content", "reasoning_content", "tool_calls")
"""Fields of a message that `as_items` converts."""


class InputItems:
    """Chat messages built from input items; records where in the input each part of a message comes from."""

    def __init__(self, items: str | Sequence[Mapping[str, Any]]) -> None:
        """Convert items to messages, or a text to a user message.

        Raises:
            ApiError: 400 that names the path of an invalid item.
        """
        self.messages: Messages = []
        self._places: list[dict[str, str]] = []  # per message: path in the message → path in the input
        if isinstance(items, str):
            self._add({"role": "user", "content": items}, "input", {})
            return
        if not items:
            raise bad_request("input", "is empty; give a text or items")
        for index, item in enumerate(items):
            self._read(item, f"input[{index}]")

    def path_of(self, message: int, rest: str) -> str:
        """Return the path in the input that corresponds to `rest`, a path in message number `message`.

        `rest` is, for example, `.tool_calls[0].function.name`.
        """
        places = self._places[message]
        for path, place in places.items():
            if path and rest.startswith(path) and rest[len(path) :][:1] in {"", ".", "["}:
                return place + rest.removeprefix(path)
        where = places[""]
        return where + rest if where.endswith("]") else where  # a text has no fields

    def _read(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            message = {name: value for name, value in item.items() if name not in LABELS}
            self._say(message, where, {f".{name}": f"{where}.{name}" for name in message})
        elif kind not in FIELDS:
            known = ", ".join(["message", *FIELDS])
            raise bad_request(f"{where}.type", f"must be one of {known}", code="unsupported_parameter")
        elif kind == "reasoning":
            if text := _reasoning_text(_fields(item, kind, where), where):
                message = {"role": "assistant", "content": "", "reasoning_content": text}
                self._add(message, where, {".reasoning_content": f"{where}.content"})
        elif kind == "function_call":
            self._call(_fields(item, kind, where), where)
        else:
            fields = _fields(item, kind, where)
            message = {"role": "tool", "tool_call_id": fields["call_id"], "content": fields["output"]}
            self._add(message, where, {".tool_call_id": f"{where}.call_id", ".content": f"{where}.output"})

    def _say(self, message: dict[str, Any], where: str, places: dict[str, str]) -> None:
        """Add a message; an assistant message is merged with the reasoning item before it."""
        last = self.messages[-1] if self.messages else {}
        has_led = last.keys() == {"role", "content", "reasoning_content"} and not last["content"]
        if has_led and message.get("role") == "assistant":
            last |= message
            self._places[-1] |= places
        else:
            self._add(message, where, places)

    def _call(self, fields: Mapping[str, Any], where: str) -> None:
        """Add a tool call to the last assistant message, or to a new one."""
        last = self.messages[-1] if self.messages else {}
        calls = last.get("tool_calls") or []
        if last.get("role") != "assistant" or not isinstance(calls, list):
            last, calls = {"role": "assistant", "content": ""}, []
            self._add(last, where, {})
        path = f".tool_calls[{len(calls)}]"
        self._places[-1] |= {f"{path}.id": f"{where}.call_id", f"{path}.function": where, path: where}
        function = {"name": fields["name"], "arguments": fields["arguments"]}
        last["tool_calls"] = [*calls, {"id": fields["call_id"], "type": "function", "function": function}]

    def _add(self, message: dict[str, Any], where: str, places: dict[str, str]) -> None:
        self.messages.append(message)
        self._places.append({"": where, **places})


def _fields(item: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """Validate an item, and return its content fields."""
    names = FIELDS[kind]
    unread = item.keys() - {*names, *LABELS, *REPORTS}
    for name in sorted(unread):
        if item[name] is not None:
            raise bad_request(f"{where}.{name}", "is not a supported field; leave it out")
    if kind == "reasoning":
        return {name: item.get(name) or [] for name in names}
    for name in names:
        is_text = isinstance(item.get(name), str) or (name == "output" and isinstance(item.get(name), list))
        if not is_text:
            kinds = "a string or a list of text parts" if name == "output" else "a string"
            raise bad_request(f"{where}.{name}", f"must be {kinds}")
    return {name: item[name] for name in names}


def _reasoning_text(fields: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item: the content if there is one, otherwise the summary."""
    name = "content" if fields["content"] else "summary"
    parts = fields[name]
    are_parts = isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") in REASONING_PARTS and isinstance(part.get("text"), str)
        for part in parts
    )
    if not are_parts:
        raise bad_request(f"{where}.{name}", "must be a list of parts {type: reasoning_text, text: ...}")
    return "".join(part["text"] for part in parts)


def as_items(message: Mapping[str, Any], own_id: str) -> Iterator[dict[str, Any]]:
    """Convert a message to items; all text parts of a message become parts of one item."""
    if message["role"] == "tool":
        label = {"id": f"{own_id}-output", "type": "function_call_output", "status": "completed"}
        yield label | {"call_id": message.get("tool_call_id"), "output": message["content"]}
        return
    others = {name: value for name, value in message.items() if name not in APART}
    if text := message.get("reasoning_content"):
        parts = [{"type": "reasoning_text", "text": text}]
        label = {"id": f"{own_id}-reasoning", "type": "reasoning", "status": "completed"}
        yield {**label, "summary": [], "content": parts}
    calls = message.get("tool_calls") or []
    if message.get("content") or not (text or calls):
        own = {"id": own_id, "type": "message", "role": message["role"], "status": "completed"}
        yield others | own | {"content": _text_parts(message)}
    for number, call in enumerate(calls):
        label = {"id": f"{own_id}-call-{number}", "type": "function_call", "status": "completed"}
        yield label | {"call_id": call.get("id")} | call["function"]


def _text_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    is_own = message["role"] == "assistant"
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    extras: dict[str, Any] = {"annotations": [], "logprobs": []} if is_own else {}
    return [{"type": "output_text" if is_own else "input_text", "text": text} | extras for text in texts]
