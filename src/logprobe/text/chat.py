"""Render a conversation with the model's chat template, as text or as token ids.

Messages have OpenAI's format. Nothing is dropped silently: a field is either rendered by the template or
rejected with an error that names its path, such as `messages[2].name`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from logprobe.errors import ParameterError, require
from logprobe.text.dropped import KNOWN_ROLES, check_laid_out
from logprobe.text.rendering import PROCESS
from logprobe.text.template_cost import is_cheap
from logprobe.text.tools import as_texts

if TYPE_CHECKING:
    from logprobe.records.values import IntArray
    from logprobe.text.edge import TextEdge

Conversation: TypeAlias = "Sequence[Mapping[str, Any]]"
Conversations: TypeAlias = "str | Conversation | Sequence[Conversation]"
"""A text, the content parts of one user message, one conversation, or a list of conversations."""

OWN_VARIABLES: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception"}
    | {"strftime_now", "bos_token", "eos_token", "pad_token", "unk_token"}
)
GENERATION_TAG: Final = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
TEXT_PARTS: Final = ("text", "input_text", "output_text")
EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})  # values of a message field that mean "not set"
FILLER: Final = "-"  # stands in for an empty last message that is to be continued
MAX_TEMPLATE_CHARS: Final = 1 << 18
MAX_SHAPES: Final = 1024  # limit on cached conversation shapes that are known to be rendered completely
MAX_SHAPE_MESSAGES: Final = 128
MAX_SHAPE_CHARS: Final = 256  # limit on the repr of the template variables
# Fields in a reply's content part that a client may send back; they only annotate the text.
PART_REPORTS: Final = ("annotations", "logprobs", "processed_logprobs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Options for rendering a conversation; names as in transformers and OpenAI-compatible servers."""

    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = None  # None: True unless the last message is continued
    continue_final_message: bool = False
    chat_template: str | None = None  # None: the model's
    chat_template_kwargs: Mapping[str, Any] | None = None  # extra template variables

    def __post_init__(self) -> None:
        both = self.continue_final_message and self.add_generation_prompt
        message = "cannot be combined with add_generation_prompt, which begins a new message; set one of them"
        require(not both, "continue_final_message", message)

    @property
    def begins_a_message(self) -> bool:
        """True if the text ends with the start of the assistant's turn."""
        return self.add_generation_prompt is not False and not self.continue_final_message


ANSWER: Final = Layout()
"""Default layout, which ends with the start of the assistant's turn."""


def as_conversations(messages: Conversations) -> list[Conversation]:
    """Return `messages` as a list of conversations; a text or a list of content parts is one user message.

    Raises:
        ParameterError: `messages` is not a conversation, or a conversation is empty.
    """
    if isinstance(messages, str):
        return [[{"role": "user", "content": messages}]]
    is_list = isinstance(messages, Sequence) and not isinstance(messages, bytes)
    known = "must be a list of messages, a list of such lists, or a string"
    require(is_list, "messages", known, got=messages)
    are_lists = [isinstance(item, list | tuple) for item in messages]
    require(
        all(are_lists) or not any(are_lists),
        "messages",
        "mixes messages and lists of messages; give only messages, or only lists of messages",
    )
    if not messages:
        return []
    many: list[Any] = list(messages) if are_lists[0] else [messages]
    for index, conversation in enumerate(many):
        require(conversation, f"messages[{index}]", "is empty; give at least one message")
    if not are_lists[0] and all(isinstance(item, Mapping) and _is_part(item) for item in messages):
        return [[{"role": "user", "content": list(messages)}]]
    return cast("list[Conversation]", many)


def _is_part(item: Mapping[str, Any]) -> bool:
    return "type" in item and "role" not in item


def is_plain(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if all messages have a known role, and no fields other than role and content."""
    return all(
        message.keys() <= {"role", "content"} and message.get("role") in KNOWN_ROLES for message in messages
    )


def read_messages(messages: Conversation, text: TextEdge, layout: Layout = ANSWER) -> IntArray:
    """Render a conversation as in `lay_out` and return its token ids, (num_tokens,) int32."""
    return text.encode(lay_out(messages, text, layout), add_special_tokens=False)


def lay_out(messages: Conversation, text: TextEdge, layout: Layout = ANSWER) -> str:
    """Render a conversation with the model's chat template; the role `developer` becomes `system`.

    If the template does not support tools, then tools, calls and results are written into message texts
    (`tools.as_texts`).

    Raises:
        ParameterError: there is no template, a role is missing, a content part is not text, or the template
            raises an error or would ignore something, such as whitespace around a message to continue.
    """
    source = text.template_source
    if layout.chat_template is not None:
        source = _GivenTemplate(layout.chat_template, source.special_tokens_map)
    if source.chat_template is None:
        raise ParameterError(
            "messages", "the model has no chat template; use text completion (generate, /v1/completions)"
        )
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    require(is_list and messages, "messages", "must be a list of at least one message")
    plain = [_plain_message(message, index) for index, message in enumerate(messages)]
    variables = layout.chat_template_kwargs or {}
    require(isinstance(variables, Mapping), "chat_template_kwargs", "must be a dict", got=variables)
    tools, variables = _plain_tools(layout.tools), dict(variables)
    ways = [(plain, list(range(len(plain))))]
    has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in plain)
    if (tools or has_calls) and _says_tools(source, tools):
        ways, tools = as_texts(plain, tools), None
    elif has_calls:
        ways.append(([_with_argument_texts(message) for message in plain], ways[0][1]))
    _check_variables(variables, _template_for(source.chat_template, tools))

    def render(messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None = tools) -> str:
        # If a template trims contents, transformers also strips line breaks before an empty last message.
        is_empty = layout.continue_final_message and not messages[-1]["content"]
        if is_empty:
            messages = [*messages[:-1], messages[-1] | {"content": FILLER}]
        laid_out = _render(source, messages, tools, layout, variables)
        return laid_out.removesuffix(FILLER) if is_empty else laid_out

    plain, numbers, laid_out = _first_rendered(render, ways)
    if layout.continue_final_message:
        where = f"messages[{numbers[-1]}].content"
        message = "begins or ends with whitespace, which the model's chat template trims; remove it"
        require(laid_out.endswith(plain[-1]["content"]), where, message)
    if tools is not None:
        _check_tools(lambda: render(plain, None), laid_out)
    shape = _shape_of(plain, layout)
    is_given = layout.chat_template is not None  # not cached: each request may bring its own
    known = set() if is_given else text.sound_shapes.setdefault(str(source.chat_template), set())
    if shape is None or shape not in known:
        is_sound = check_laid_out(plain, render, laid_out, numbers)
        if shape is not None and is_sound and len(known) < MAX_SHAPES:
            known.add(shape)
    return laid_out


@dataclass(frozen=True, slots=True)
class _GivenTemplate:
    """A chat template that replaces the model's."""

    chat_template: str
    special_tokens_map: Mapping[str, Any]


def _render(
    source: Any,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    layout: Layout,
    variables: Mapping[str, Any],
) -> str:
    """Render the chat template, in a subprocess unless the template is known to be cheap to render.

    Raises:
        ParameterError: rendering exceeds the time limit.
    """
    from logprobe.text.templates import render_chat  # with jinja2

    template = _template_for(source.chat_template, tools)
    arguments: dict[str, Any] = {
        "messages": messages,
        "tools": tools,
        "add_generation_prompt": layout.begins_a_message,
        "continue_final_message": layout.continue_final_message,
        "variables": {**source.special_tokens_map, **variables},
    }
    if is_cheap(template):
        return render_chat(template, **arguments)
    size = len(template)
    require(
        size <= MAX_TEMPLATE_CHARS,
        "messages",
        f"the model's chat template has {size} characters, more than {MAX_TEMPLATE_CHARS}; use a shorter one",
    )
    return PROCESS.render(template, arguments)


def _template_for(templates: str | Mapping[str, str], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return the chat template; of several, `tool_use` for conversations with tools, otherwise `default`."""
    if isinstance(templates, str):
        return templates
    name = "tool_use" if tools is not None and "tool_use" in templates else "default"
    known = ", ".join(sorted(templates))
    require(
        name in templates,
        "messages",
        f"the model's chat templates ({known}) have no default; use text completion",
    )
    return templates[name]


def _first_rendered(
    render: Callable[[Sequence[dict[str, Any]]], str], ways: Sequence[tuple[list[dict[str, Any]], list[int]]]
) -> tuple[list[dict[str, Any]], list[int], str]:
    """Return the first variant of the messages that the template accepts, its indices, and the rendered text.

    Raises:
        ParameterError: the template accepts no variant; the message is the error for the first one.
    """
    errors: list[Exception] = []
    for messages, numbers in ways:
        try:
            return messages, numbers, render(messages)
        except ParameterError:  # time limit
            raise
        except Exception as error:  # noqa: BLE001 - a template is a program and may raise anything
            errors.append(error)
    raise ParameterError("messages", f"the model's chat template raised an error: {errors[0]}") from errors[0]


def _with_argument_texts(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its calls as JSON texts, which some templates expect."""
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
    calls = [
        call | {"function": {**function, "arguments": text}}
        for call, function, text in zip(message["tool_calls"], functions, texts, strict=True)
    ]
    return message | {"tool_calls": calls}


def _shape_of(messages: Sequence[dict[str, Any]], layout: Layout) -> str | None:
    """Return a key made of the roles and layout of a plain conversation; None if it is not plain."""
    if layout.tools or len(messages) > MAX_SHAPE_MESSAGES or not is_plain(messages):
        return None
    turns = [f"{message['role']}{':' if message['content'] else ''}" for message in messages]
    variables = repr(sorted((layout.chat_template_kwargs or {}).items()))
    if len(variables) > MAX_SHAPE_CHARS:
        return None
    return f"{' '.join(turns)} {layout.begins_a_message} {layout.continue_final_message} {variables}"


def _plain_tools(tools: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
    if not tools:
        return None
    are_objects = isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)
    require(are_objects, "tools", "must be a list of objects {type: function, function: ...}")
    return tools


def _check_tools(render_bare: Any, laid_out: str) -> None:
    try:
        is_ignored = render_bare() == laid_out
    except ParameterError:
        raise
    except Exception:  # noqa: BLE001 - a template that fails without tools renders them
        is_ignored = False
    require(not is_ignored, "tools", "the model's chat template ignores them; describe them in a message")


def chat_template_of(source: Any) -> str | None:
    """Return the chat template for conversations with tools; None if the tokenizer has no such template."""
    template: str | dict[str, str] | None = source.chat_template
    if isinstance(template, dict):
        return template.get("tool_use", template.get("default"))
    return template


@functools.lru_cache(maxsize=16)
def takes_tools(template: str) -> bool:
    """Return True if a chat template reads the variable `tools`."""
    from jinja2 import TemplateSyntaxError

    try:
        return "tools" in variables_of(template)
    except TemplateSyntaxError:
        return True  # the syntax error is reported when the template is rendered


def _says_tools(source: Any, tools: Sequence[Mapping[str, Any]] | None) -> bool:
    """Return True if the template ignores tools, so that tools, calls and results must be written as text."""
    template = chat_template_of(source)
    assert template is not None, "the caller checked it"
    # If no tools are given, calls are left to a template that renders calls.
    return not takes_tools(template) and (bool(tools) or "tool_calls" not in template)


def _check_variables(variables: Mapping[str, Any], template: str) -> None:
    """Raise `ParameterError` for variables that are reserved or that the template does not read."""
    from jinja2 import TemplateSyntaxError

    for name in variables:
        require(name not in OWN_VARIABLES, f"chat_template_kwargs.{name}", "is reserved; leave it out")
        try:
            known = sorted(variables_of(template) - OWN_VARIABLES)
        except TemplateSyntaxError:
            return  # the syntax error is reported when the template is rendered
        message = f"is not read by the model's chat template; it reads {', '.join(known) or 'none'}"
        require(name in known, f"chat_template_kwargs.{name}", message)


@functools.lru_cache(maxsize=16)
def variables_of(template: str) -> frozenset[str]:
    """Return the names that a chat template reads but does not set; empty for very large templates."""
    from jinja2 import meta, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if len(template) > MAX_TEMPLATE_CHARS:
        return frozenset()
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    plain = GENERATION_TAG.sub("", template)  # a transformers extension that marks assistant text
    try:
        tree = environment.parse(plain)
        for constant in tree.find_all(nodes.Const):
            # otherwise jinja2 folds constant expressions, which can become arbitrarily large
            constant.value = ""
        return frozenset(meta.find_undeclared_variables(tree))
    except RecursionError:
        return frozenset()


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    require(isinstance(message, Mapping), where, "must be a dict with role and content", got=message)
    role = message.get("role")
    if not isinstance(role, str):
        raise ParameterError(f"{where}.role", "must be a string")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part_text(part, f"{where}.content") for part in content)
    elif content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise ParameterError(f"{where}.content", "must be a string or a list of text parts")
    # Clients send null for fields that a reply did not have.
    fields = {name: value for name, value in message.items() if value not in EMPTY}
    if "tool_calls" in fields:
        fields["tool_calls"] = _plain_calls(fields["tool_calls"], f"{where}.tool_calls")
    return fields | {"role": "system" if role == "developer" else role, "content": content}


def _plain_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments parsed from JSON texts to objects, as templates expect."""
    require(isinstance(calls, list), where, "must be a list of calls")
    return [_plain_call(call, f"{where}[{number}]") for number, call in enumerate(calls)]


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    is_call = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    require(is_call, where, "must be {id, type: function, function: {name, arguments}}")
    assert isinstance(function, Mapping)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"{where}.function.arguments", f"are not valid JSON: {error}") from error
    require(isinstance(arguments, Mapping), f"{where}.function.arguments", "must be an object")
    return {**call, "function": {**function, "arguments": arguments}}


def _part_text(part: Any, where: str) -> str:
    is_part = isinstance(part, dict) and part.get("type") in TEXT_PARTS
    if not is_part or not isinstance(part.get("text"), str):
        raise ParameterError(where, "has a part that is not {type: text, text: ...}; only text is supported")
    others = [name for name, value in part.items() if value and name not in {"type", "text", *PART_REPORTS}]
    if others:
        raise ParameterError(f"{where}.{others[0]}", "is not rendered by chat templates; leave it out")
    text: str = part["text"]
    return text
