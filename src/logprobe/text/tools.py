"""Describe tools, calls and results in plain text for chat templates without tool support.

The format is that of Hermes and Qwen 2.5: tools are described in a system message, calls become text in the
assistant message, and results become a user message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logprobe.errors import ParameterError, require
from logprobe.text.dropped import OWN_TEXT, FieldPath, is_implied, refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.text.dropped import Messages

TOOLS_TEXT: Final = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Parse tools in OpenAI's format.

    Raises:
        ParameterError: a tool has no name, has the name of another tool, or its parameters are not an object
            schema.
    """
    found: dict[str, Tool] = {}
    for number, tool in enumerate(tools):
        where = f"tools[{number}].function"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise ParameterError(
                f"{where}.name", "must be a string; a tool is {type: function, function: {name, ...}}"
            )
        require(name not in found, f"{where}.name", f"is also the name of another tool: {name!r}; rename one")
        parameters = function.get("parameters")
        parameters = {"properties": {}, "additionalProperties": False} if parameters is None else parameters
        is_object = isinstance(parameters, Mapping) and parameters.get("type", "object") == "object"
        require(is_object, f"{where}.parameters", "must be a JSON schema of type object", got=parameters)
        found[name] = Tool(name, parameters)
    return list(found.values())


def as_texts(
    messages: Messages, tools: Sequence[Mapping[str, Any]] | None
) -> list[tuple[list[dict[str, Any]], list[int]]]:
    """Return variants of the messages with tools, calls and results as text, the preferred variant first.

    The tools are described in a system message or, for templates that reject system messages, at the start of
    the first user message. Consecutive tool results are merged into one message. Each variant is a list of
    messages, and a list with the index of the caller's message for each message; the index is `OWN_TEXT` for
    a system message that was added.

    Raises:
        ParameterError: a tool is malformed, or a result has a field that the text would not contain.
    """
    said, numbers = _without_fields(messages)
    if not tools:
        return [(said, numbers)]
    text = _tools_text(tools)
    if said[0]["role"] == "system":
        return [([_joined(said[0], said[0]["content"], text), *said[1:]], numbers)]
    ways = [([{"role": "system", "content": text}, *said], [OWN_TEXT, *numbers])]
    if said[0]["role"] == "user":
        ways.append(([_joined(said[0], text, said[0]["content"]), *said[1:]], numbers))
    return ways


def _joined(message: dict[str, Any], *texts: str) -> dict[str, Any]:
    return message | {"content": "\n\n".join(text for text in texts if text)}


def _without_fields(messages: Messages) -> tuple[list[dict[str, Any]], list[int]]:
    said: list[dict[str, Any]] = []
    numbers: list[int] = []
    for number, message in enumerate(messages):
        if message["role"] != "tool":
            said.append(_without_calls(message))
        elif number and messages[number - 1]["role"] == "tool":
            said[-1]["content"] += f"\n{_result_text(messages, number)}"
            continue
        else:
            said.append({"role": "user", "content": _result_text(messages, number)})
        numbers.append(number)
    return said, numbers


def _tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    read_tools(tools)
    return TOOLS_TEXT.format(tools="\n".join(_json_text(tool, f"tools[{n}]") for n, tool in enumerate(tools)))


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant" or "tool_calls" not in message:
        return message
    texts = [message["content"]] if message["content"] else []
    for call in message["tool_calls"]:
        called = {name: call["function"][name] for name in ("name", "arguments")}
        texts.append(f"<tool_call>\n{_json_text(called, 'messages')}\n</tool_call>")
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return rest | {"content": "\n".join(texts)}


def _result_text(messages: Messages, number: int) -> str:
    message = messages[number]
    for field in (name for name in message if name not in {"role", "content"}):
        path = FieldPath(number, field)
        if not is_implied(messages, path):
            raise ParameterError(str(path), refusal(path))
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _json_text(value: Mapping[str, Any], where: str) -> str:
    """Return a value as JSON, formatted as chat templates do."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(where, f"cannot be written as JSON: {error}") from error
