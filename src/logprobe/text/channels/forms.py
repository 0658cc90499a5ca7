"""Determine a model's reasoning and tool-call markers from its chat template.

The result contains a `response_template` as defined by transformers. It is assembled from two tables, one of
reasoning markers and one of call syntaxes. A table row applies if the chat template contains its markers;
the model's name is not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from logprobe.errors import ParameterError
from logprobe.text.channels.response_template import load_response_template
from logprobe.text.chat import chat_template_of, takes_tools

if TYPE_CHECKING:
    from logprobe.text.channels.response_template import ResponseTemplate
    from logprobe.text.edge import TextEdge

Fields = Mapping[str, Any]

REASONING: Final = ("reasoning_content", "reasoning", "thinking")
"""Names that response templates use for the reasoning field."""
CALLS: Final = "tool_calls"
CONTENT: Final = {"content": {"content": "text"}}
MAX_FORMS: Final = 16  # cached per tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMarks:
    """Texts around the calls in a reply, as needed for a grammar; `{name}` stands for the function name."""

    first: str = ""  # before all calls
    open: str = ""  # before each call's JSON
    close: str = ""  # after each call's JSON
    between: str | None = None  # between two calls; None if a reply has at most one call
    last: str = ""  # after all calls
    # key of the arguments in a call's JSON; None if the JSON is the arguments
    arguments: str | None = "arguments"


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """Syntax of a model's replies."""

    name: str
    spec: Fields  # transformers' `response_template`
    template: ResponseTemplate = field(repr=False, compare=False)  # `spec`, validated
    has_reasoning: bool
    # Where the model reads about the tools: in the chat template's output or, if the template does not
    # support tools, in a generated system message. None if tools are supported but the call syntax is
    # unknown.
    tools: Literal["template", "text"] | None
    calls: CallMarks | None = None  # None if there is no grammar for this call syntax
    thought_end: str | None = None  # marker that ends reasoning
    special: Mapping[str, int] = field(default_factory=dict)  # special tokens in the two fields above -> ids


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """A call syntax: a row of `CALL_ROWS`."""

    name: str
    marks: tuple[str, ...]  # all of them must appear in the chat template
    fields: Fields
    calls: CallMarks | None
    # none of these may appear: they indicate another syntax with the same markers
    others: tuple[str, ...] = ()


def _called(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


_WHOLE: Final = {"type": "function", "function": "{content}"}
_NAMED: Final = _called("{name}", "{content}")

_HERMES: Final = _Calls(
    name="hermes",
    marks=("<tool_call>",),
    fields={
        CALLS: {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": _WHOLE,
        }
    },
    calls=CallMarks(open="<tool_call>\n", close="\n</tool_call>", between="\n"),
    others=("<invoke", "<tool_calls>"),
)


def _mistral(first: str) -> _Calls:
    listed = {
        "open": "[TOOL_CALLS]",
        "close": "</s>",
        "content": "json",
        "transform": _called("{name}", "{arguments}"),
        "transform_each": True,
    }
    return _Calls(
        name="mistral",
        marks=(first,),
        fields={CALLS: listed},
        calls=CallMarks(first=f"{first}[", between=", ", last="]"),
    )


# Names and whitespace in the patterns have a maximum length, because a partial match is held back and
# searched again with each token.
def _deepseek(name: str, before: str, after: str, *, between: str, marks: tuple[str, ...] = ()) -> _Calls:
    """Build a row for a DeepSeek syntax whose calls read <call begin>`before` arguments `after`<call end>."""
    first, call, end = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    last = "<｜tool▁calls▁end｜>"
    opened = re.escape(call + before).replace(r"\{name\}", r"(?P<name>[^\n<]{1,128})")
    listed = {
        "open_pattern": rf"(?:{first}\s{{0,4}})?{opened}",
        "close": after + end,
        "repeats": True,
        "content": "json",
        "transform": _NAMED,
    }
    return _Calls(
        name=name,
        marks=(call, *marks),
        fields={CALLS: listed, "content": {"close": last, "content": "text"}},
        calls=CallMarks(
            first=first, open=call + before, close=after + end, between=between, last=last, arguments=None
        ),
    )


_START: Final = r"(?:<\|start\|>assistant)?"
_TO: Final = r" to=functions\.(?P<name>[\w.-]{1,128})"
CALL_ROWS: Final = (
    _Calls(
        name="harmony",
        marks=("<|channel|>", "<|message|>", "<|call|>"),
        fields={
            "reasoning_content": {
                "open_pattern": _START + r"<\|channel\|>analysis<\|message\|>",
                "close": ["<|end|>", "<|return|>"],
                "repeats": True,
                "join": "\n",
            },
            CALLS: {
                # The recipient may come before the channel or after it.
                "open_pattern": _START
                + rf"(?:{_TO}<\|channel\|>(?:commentary|analysis)"
                + rf"|<\|channel\|>(?:commentary|analysis){_TO})"
                + r"\s{0,4}(?:<\|constrain\|>)?(?:json)?\s{0,4}<\|message\|>",
                "close": "<|call|>",
                "repeats": True,
                "content": "json",
                "transform": _NAMED,
            },
            "content": {
                "open_pattern": _START + r"<\|channel\|>(?:final|commentary)<\|message\|>",
                "close": ["<|end|>", "<|return|>"],
                "repeats": True,
                "join": "\n",
            },
            "stray": {"content": "text"},
        },
        calls=CallMarks(
            open="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            close="<|call|>",
            arguments=None,
        ),
    ),
    _Calls(
        name="gemma4",
        marks=("<|tool_call>call:",),
        fields={
            CALLS: {
                "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]{1,128})",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": _NAMED,
            },
            "content": {"close": ["<turn|>", "<|tool_response>", "<eos>"], "content": "text"},
        },
        calls=None,
    ),
    _deepseek(
        "deepseek", "function<｜tool▁sep｜>{name}\n```json\n", "\n```", between="\n", marks=("```json",)
    ),
    _deepseek("deepseek-v3.1", "{name}<｜tool▁sep｜>", "", between=""),
    _Calls(
        name="mistral-named",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        fields={
            CALLS: {
                "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[\s]{1,128})"
                r"(?:\[CALL_ID\][^\[]{1,64})?\[ARGS\]",
                "close_pattern": r"</s>|(?=\[TOOL_CALLS\])",
                "repeats": True,
                "content": "json",
                "transform": _NAMED,
            }
        },
        calls=CallMarks(open="[TOOL_CALLS]{name}[ARGS]", between="", arguments=None),
    ),
    _mistral("[TOOL_CALLS] "),
    _mistral("[TOOL_CALLS]"),
    _Calls(
        name="qwen-xml",
        marks=("<tool_call>", "<function="),
        fields={
            CALLS: {
                "open_pattern": r"<tool_call>\s{0,4}<function=(?P<name>[^>\n]{1,128})>",
                "close_pattern": r"</function>\s{0,4}</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]{1,128})>(?P<value>.*?)</parameter>",
                    "value_parser": {"name": "text"},  # strips whitespace
                },
                "transform": _NAMED,
            }
        },
        calls=None,
    ),
    _Calls(
        name="glm",
        marks=("<tool_call>", "<arg_key>"),
        fields={
            CALLS: {
                "open_pattern": r"<tool_call>(?P<name>[^\s<]{1,128})",
                "close": "</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>[^<]{1,128})</arg_key>\s{0,4}"
                    r"<arg_value>(?P<value>.*?)</arg_value>"
                },
                "transform": _NAMED,
            }
        },
        calls=None,
    ),
    _HERMES,
    _Calls(
        name="llama",
        marks=("<|start_header_id|>", '{"name": function name, "parameters": '),
        fields={
            CALLS: {
                # These calls have no marker: a message that starts with such a JSON object is a call.
                "open_pattern": r"(?:<\|python_tag\|>|\A)\s{0,4}"
                r'(?=\{\s{0,8}"(?:name|type|function)"\s{0,4}:)',
                "close": ["<|eot_id|>", "<|eom_id|>"],
                "repeats": True,
                "content": "json",
                "transform": _WHOLE,
            }
        },
        calls=CallMarks(arguments="parameters"),
    ),
)
_REASONING_ROWS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("</think>", {"open": "<think>", "close": "</think>"}),
    ("[/THINK]", {"open": "[THINK]", "close": "[/THINK]"}),
    ("<|channel>thought", {"open": "<|channel>thought\n", "close": "<channel|>"}),
)
_ANCHORS: Final = (
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<｜Assistant｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁end｜>",
    "[/INST]",
    "[/TOOL_RESULTS]",
    "<start_of_turn>model\n",
    "<|turn>model\n",
    "<tool_response|>",
    "<|start|>assistant",
    "<|assistant|>",
)
"""Texts that directly precede a reply in known chat formats."""
# In other formats a reply starts at the end of the prompt, or before a reasoning marker at its end.
_NO_ANCHOR: Final = r"\A.*?(?=(?:(?:<think>|\[THINK\])\s*)?\Z)"


def template_of(text: TextEdge, override: Fields | None = None) -> ResponseForm | None:
    """Return the syntax of the model's replies; None if it is unknown, in which case all text is content.

    `override` (a `response_template`) takes precedence over the tokenizer's `response_template`, which takes
    precedence over the tables in this module. If the chat template does not support tools, calls have Hermes
    syntax, because `lay_out` then adds a system message that asks for this syntax.

    Raises:
        ParameterError: `override` is not a response template.
    """
    source = text.template_source
    chat_template = chat_template_of(source)
    if chat_template is None:
        return None
    own = getattr(source, "response_template", None)
    given = own if override is None else override
    key = (chat_template, _json_of(given), override is None)
    if key not in text.response_forms:
        form = _form_of(text, chat_template, given, is_own=override is None)
        if len(text.response_forms) >= MAX_FORMS:
            return form
        text.response_forms[key] = form
    known: ResponseForm | None = text.response_forms[key]
    return known


def _json_of(given: Fields | None) -> str:
    try:
        return json.dumps(given, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError("response_template", f"is not a JSON object: {error}") from error


def _form_of(
    text: TextEdge, chat_template: str, given: Fields | None, *, is_own: bool
) -> ResponseForm | None:
    tools: Literal["template", "text"] | None = "template" if takes_tools(chat_template) else "text"
    row = _HERMES if tools == "text" else _row_of(chat_template)
    if given is None:
        spec = _spec_of(chat_template, row)
        name = "thinking" if row is None else row.name
    else:
        spec = _completed(given, _HERMES if tools == "text" else None)
        name = "tokenizer" if is_own else "given"
    if spec is None:
        return None
    fields = spec["fields"]
    # The tables do not describe the call syntax of a template given by the caller.
    is_listed = row is not None and (is_own or fields.get(CALLS) == row.fields[CALLS])
    calls = row.calls if row is not None and is_listed else None
    thought_end = _thought_end(fields)
    return ResponseForm(
        name=name,
        spec=spec,
        has_reasoning=any(name in fields for name in REASONING),
        tools=tools if CALLS in fields else None,
        calls=calls,
        thought_end=thought_end,
        special=_special_tokens(text, calls or CallMarks(), thought_end or ""),
        template=load_response_template(spec),
    )


def _row_of(chat_template: str) -> _Calls | None:
    """Return the first row with all of its `marks` and none of its `others` in the chat template."""
    for row in CALL_ROWS:
        is_other = any(mark in chat_template for mark in row.others)
        if all(mark in chat_template for mark in row.marks) and not is_other:
            return row
    return None


def _spec_of(chat_template: str, row: _Calls | None) -> dict[str, Any] | None:
    """Build a response template from the markers in a chat template; None if there are no known markers."""
    fields: dict[str, Any] = {}
    for mark, reasoning in _REASONING_ROWS:
        if mark in chat_template:
            fields["reasoning_content"] = reasoning | {"content": "text"}
    fields |= {} if row is None else row.fields
    if not fields:
        return None
    anchors = [anchor for anchor in _ANCHORS if anchor.rstrip() in chat_template]
    anchor: dict[str, Any] = {"start_anchor": anchors} if anchors else {"start_anchor_pattern": _NO_ANCHOR}
    return {"defaults": {"role": "assistant"}, **anchor, "fields": CONTENT | fields}


def _completed(given: Fields, row: _Calls | None) -> dict[str, Any]:
    """Validate a response template; if it defines no calls, add the call syntax in `row`, if any."""
    load_response_template(given)
    fields = given["fields"]
    if row is not None and CALLS not in fields:
        fields = {**fields, CALLS: row.fields[CALLS]}
    return {**given, "fields": fields}


def _thought_end(fields: Fields) -> str | None:
    """Return the marker that ends reasoning, the first one if there are several; None if there is none."""
    closes = [fields[name].get("close") for name in REASONING if name in fields]
    first = closes[0] if closes else None
    return first[0] if isinstance(first, list) else first


def _special_tokens(text: TextEdge, calls: CallMarks, thought_end: str) -> dict[str, int]:
    """Return the special tokens that the markers of calls and reasoning contain, as a map from text to id."""
    marks = "\n".join((calls.first, calls.open, calls.close, calls.between or "", calls.last, thought_end))
    tokens = {
        text.vocabulary.token_bytes(token_id).decode("utf-8", "replace"): token_id
        for token_id in text.special_token_ids
    }
    return {content: token_id for content, token_id in tokens.items() if content and content in marks}
