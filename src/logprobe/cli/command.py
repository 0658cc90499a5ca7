"""The class of all commands: help in panels with examples, and errors that name flags."""

from __future__ import annotations

import inspect
import re
from contextlib import contextmanager
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Final

import typer
from typer.core import TyperCommand

from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

EXAMPLES: Final = "Examples:\n"
# A parameter in a message, with its value if it has one: max_model_len, device='cpu', options={'a': 1}.
# The keys of a dict in a message, as in {'a': 1}, are no parameters.
_PARAMETER: Final = re.compile(r"\b([a-z]\w*)\b(?:=('[^']*'|\{[^}]*\}|\w+))?(?!':)")


class Command(TyperCommand):
    """A command of `logprobe`.

    The docstring's lines after `Examples:` are printed verbatim. Options of the same `rich_help_panel` are
    listed together.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error about one of its parameters becomes a usage error that names the flag."""
        try:
            return super().invoke(ctx)
        except ParameterError as error:
            flags = {param.name: _flag_of(param) for param in self.params}
            if error.parameter not in flags:
                raise
            raise typer.BadParameter(
                in_flags(_message(error), flags), ctx=ctx, param_hint=flags[error.parameter]
            ) from error

    def format_help_text(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the name in the base class
        """Write the description, then the examples."""
        text, _, examples = inspect.cleandoc(self.help or "").partition(EXAMPLES)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text.strip())
        if examples:
            with formatter.section("Examples"):
                for line in dedent(examples).splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options of each panel."""
        panels: dict[str, list[tuple[str, str]]] = {}
        param: Any
        for param in self.get_params(ctx):
            if (line := param.get_help_record(ctx)) is not None:
                is_argument = param.param_type_name == "argument"
                panel = "Arguments" if is_argument else param.rich_help_panel or "Options"
                panels.setdefault(panel, []).append(line)
        for panel in sorted(panels, key="Options".__eq__):  # "Options" has --help, and is the last
            with formatter.section(panel):
                formatter.write_dl(panels[panel])


def _flag_of(param: Any) -> str:
    is_option: bool = param.param_type_name == "option"
    return str(param.opts[0] if is_option else param.metavar or param.name.upper())


def _message(error: ParameterError) -> str:
    return str(error).removeprefix(f"{error.parameter}: ")


def in_flags(message: str, flags: Mapping[str, str]) -> str:
    """Replace Python parameters in a message, such as max_model_len or truncation='window', with flags."""

    def flag(match: re.Match[str]) -> str:
        name, value = match.groups()
        # A word without underscores is a parameter only with a value: "device" is also plain English.
        if name not in flags or (value is None and "_" not in name):
            return match[0]
        if value in {None, "True"}:
            return flags[name]
        json = "'" + value.replace("'", '"') + "'"
        return f"{flags[name]} {json if value[0] == '{' else value.strip(chr(39))}"

    return _PARAMETER.sub(flag, message)


@contextmanager
def naming(**flags: str) -> Iterator[None]:
    """Re-raise a `ParameterError` as a usage error that names a flag, as in `naming(prompt="--text")`."""
    try:
        yield
    except ParameterError as error:
        if error.parameter not in flags:
            raise
        raise typer.BadParameter(_message(error), param_hint=flags[error.parameter]) from error
