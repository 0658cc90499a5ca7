"""Build a Lark grammar (llguidance's dialect) for replies that call tools.

The grammar puts the model's markers around each call and makes the arguments match the tool's JSON schema.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from logprobe.errors import ParameterError, require
from logprobe.text.channels.split import opens_reasoning
from logprobe.text.tools import Tool, read_tools

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logprobe.text.channels.forms import CallMarks, ResponseForm

ANY_TOOL: Final = "required"
PLAIN_NAME: Final = re.compile(r"[\w.-]+")


def call_format(
    form: ResponseForm,
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    *,
    parallel: bool,
    prefix: str = "",
) -> dict[str, Any]:
    """Return the `response_format` for replies that call tools in the model's own call syntax.

    Args:
        form: the syntax of the model's replies.
        tools: tools in OpenAI's format.
        choice: `required` to call at least one tool, or the name of a tool to call exactly once.
        parallel: True to allow several calls.
        prefix: the rendered conversation. If it ends within reasoning, the reply must first finish the
            reasoning.

    Raises:
        ParameterError: a tool is malformed, `choice` is not a known name, or the call syntax has no grammar.
    """
    known = read_tools(tools)
    called = [number for number, tool in enumerate(known) if choice in (ANY_TOOL, tool.name)]
    names = ", ".join(tool.name for tool in known) or "none"
    require(called, "tool_choice", f"is not the name of a tool; known: {names}", got=choice)
    if form.calls is None:
        other = "cannot be expressed as a grammar; use auto"
        raise ParameterError("tool_choice", f"the call syntax {form.name!r} {other}")
    is_thinking = opens_reasoning(form, prefix)
    lines = [
        f"start: {'thought ' if is_thinking else ''}calls",
        *(_thought(form) if is_thinking else ()),
        *_calls(form, form.calls, called, is_one=not parallel or choice != ANY_TOOL),
        *(line for number in called for line in _call(form, form.calls, known[number], number)),
    ]
    return {"type": "ebnf", "ebnf": "\n".join(lines)}


def _calls(form: ResponseForm, marks: CallMarks, called: Sequence[int], *, is_one: bool) -> list[str]:
    is_one = is_one or marks.between is None
    further = "" if is_one else f"({_terminals(form, marks.between or '')} call)*"
    return [
        f"calls: {_terminals(form, marks.first)} call {further} {_terminals(form, marks.last)}",
        f"call: {' | '.join(f'call_{number}' for number in called)}",
    ]


def _call(form: ResponseForm, marks: CallMarks, tool: Tool, number: int) -> list[str]:
    """Return the grammar rules for a call of one tool."""
    is_plain = "{name}" not in marks.open or PLAIN_NAME.fullmatch(tool.name)
    problem = f"is not allowed in the call syntax {form.name!r}; use letters, digits, _, - and ."
    require(is_plain, f"tools[{number}].function.name", problem, got=tool.name)
    before, after = marks.open.replace("{name}", tool.name), marks.close
    if marks.arguments is not None:
        before += f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{marks.arguments}": '
        after = "}" + after
    return [
        f"call_{number}: {_terminals(form, before)} arguments_{number} {_terminals(form, after)}",
        f"arguments_{number}: %json {_schema_text(tool, number)}",
    ]


def _schema_text(tool: Tool, number: int) -> str:
    from logprobe.processors.builtin.grammar import JSON_STYLE

    try:
        return json.dumps({"type": "object", **tool.parameters, "x-guidance": JSON_STYLE})
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(
            f"tools[{number}].function.parameters", f"cannot be written as JSON: {error}"
        ) from error


def _thought(form: ResponseForm) -> list[str]:
    """Return the grammar rules for the rest of the reasoning, up to and including its end marker."""
    end = form.thought_end
    if end is None:
        raise ParameterError(
            "tool_choice", "the end of the model's reasoning cannot be expressed as a grammar; use auto"
        )
    if end in form.special:  # a special token cannot occur in ordinary text
        return [f"thought: THOUGHT {_terminals(form, end)}", r"THOUGHT: /(.|\n)*/"]
    return [f"thought[suffix={json.dumps(end, ensure_ascii=False)}]: /(.|\\n)*/"]


def _terminals(form: ResponseForm, text: str) -> str:
    """Return a text as a sequence of grammar terminals, in which special tokens are written as ids."""
    contents = sorted(form.special, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, contents))})", text) if contents else [text]
    return " ".join(_terminal(form, piece) for piece in pieces if piece)


def _terminal(form: ResponseForm, piece: str) -> str:
    token_id = form.special.get(piece)
    return json.dumps(piece, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"
