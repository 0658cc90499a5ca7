"""Read `tools` and `tool_choice` in chat and responses bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from logprobe.errors import ParameterError, shortened
from logprobe.server.http.errors import as_api_error, bad_request
from logprobe.server.openai.bodies import ResponsesBody
from logprobe.server.reply_channels import end_of
from logprobe.text.channels import call_format
from logprobe.text.tools import read_tools

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logprobe.server.openai.bodies import ChatBody
    from logprobe.text.channels import ResponseForm

FLAT_FIELDS: Final = frozenset({"type", "name", "description", "parameters", "strict"})
"""Fields of a tool in the responses API, which has no nested object `function`."""
ANY: Final = "required"
CHOICES: Final = "none, auto, required or {type: function, function: {name: ...}}"


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools in a request's prompt, and the calls that its reply must make."""

    functions: Sequence[Mapping[str, Any]] | None = None  # {type, function}, as chat templates expect
    form: ResponseForm | None = None  # format of a reply that must call a tool; None if calls are optional
    wanted: str = ANY  # "required", or the name of the function to call
    is_single: bool = False

    def call_format(self, prompt: str) -> dict[str, Any]:
        """Return the response format that enforces the tool calls in a reply to `prompt`.

        Raises:
            ParameterError: the calls cannot be expressed as a grammar.
        """
        assert self.form is not None, "replies that must call a tool have a format"
        assert self.functions is not None, "replies that must call a tool have tools"
        parallel = not self.is_single
        prefix = end_of(prompt)
        return call_format(self.form, self.functions, self.wanted, parallel=parallel, prefix=prefix)


NO_TOOLS: Final = Tools()


def tools_of(body: ChatBody | ResponsesBody, form: ResponseForm | None) -> Tools:
    """Read the tools in a body; with `tool_choice: none`, they are left out.

    Raises:
        ApiError: 400 if a tool is invalid, or `tool_choice` is invalid, names no tool or cannot be enforced.
    """
    functions = functions_of(body.tools, is_flat=isinstance(body, ResponsesBody))
    choice, is_single = _choice(body.tool_choice), body.parallel_tool_calls is False
    if not isinstance(choice, Named) and choice in {"none", "auto"}:
        if choice == "none" or not functions:
            return Tools()
        if is_single:
            remedy = "set tool_choice to required or to a function"
            message = f"false cannot be enforced if the model may choose whether to call a tool; {remedy}"
            raise bad_request("parallel_tool_calls", message)
        return Tools(functions)
    names = [function["function"]["name"] for function in functions]
    if not functions:
        raise bad_request("tool_choice", "requires a tool call, but there are no tools; set tools")
    if isinstance(choice, Named) and choice.name not in names:
        known = shortened(", ".join(map(repr, names)))
        message = f"{shortened(choice.name)!r} is not a tool of this request; known: {known}"
        raise bad_request("tool_choice", message)
    if form is None or form.tools is None:
        remedy = "set it to auto, or start the server with --response-template"
        message = f"cannot be enforced, because the tool call format of this model is unknown; {remedy}"
        raise bad_request("tool_choice", message)
    wanted = choice.name if isinstance(choice, Named) else choice
    return Tools(functions, form, wanted, is_single)


@dataclass(frozen=True, slots=True)
class Named:
    """A function that the reply must call."""

    name: str


def _choice(choice: str | Mapping[str, Any] | None) -> str | Named:
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice not in {"none", "auto", ANY}:
            raise bad_request("tool_choice", f"must be {CHOICES}, got {shortened(choice)!r}")
        return choice
    function = choice.get("function", {"name": choice.get("name")})
    others = choice.keys() - {"type", "function", "name"}
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str) or others:
        raise bad_request("tool_choice", f"must be {CHOICES}")
    return Named(name)


def functions_of(tools: Sequence[Mapping[str, Any]] | None, *, is_flat: bool = False) -> list[dict[str, Any]]:
    """Convert tools to the form that chat templates expect; `is_flat` is True for the responses API.

    Raises:
        ApiError: 400 if a tool is not a function with a unique name and an object schema.
    """
    functions = [_function(tool, f"tools[{number}]", is_flat) for number, tool in enumerate(tools or ())]
    try:
        read_tools(functions)
    except ParameterError as error:
        field = error.parameter.replace(".function", "") if is_flat else error.parameter
        raise as_api_error(error).at(field) from error
    return functions


def _function(tool: Mapping[str, Any], where: str, is_flat: bool) -> dict[str, Any]:
    """Convert a tool to the form that chat templates expect, without `strict`, which only the server uses."""
    if tool.get("type") != "function":
        message = "must be function; no other type of tool is supported"
        raise bad_request(f"{where}.type", message, code="unsupported_parameter")
    known = FLAT_FIELDS if is_flat else {"type", "function"}
    for name in sorted(tool.keys() - known):
        if tool[name] is not None:
            raise bad_request(f"{where}.{name}", "is not a supported field; leave it out")
    function = tool if is_flat else tool.get("function")
    if not isinstance(function, dict):
        raise bad_request(f"{where}.function", "must be an object {name, description, parameters}")
    untold = {"strict", "type"} if is_flat else {"strict"}
    said = {name: value for name, value in function.items() if name not in untold and value is not None}
    return {"type": "function", "function": said}
