"""`logprobe chat`: chat with a model in the terminal, with tokens shaded by surprisal."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.cli.generate import SeedOption, TemperatureOption
from logprobe.cli.options import ModelFlags
from logprobe.cli.rows import token_rows
from logprobe.cli.shade import CompletionPrinter, can_shade, legend
from logprobe.cli.tables import console
from logprobe.errors import InputError, LogprobeError
from logprobe.sampling import SamplingParams
from logprobe.text.chat import read_messages

if TYPE_CHECKING:
    from rich.console import Console

    from logprobe.llm import LLM

HELP = """\
/help         show this list
/system TEXT  set the system message; without a text, remove it
/reset        clear the conversation
/save FILE    write the conversation as JSON, with the log-probabilities of all answers
/quit         quit (also Ctrl-D or an empty line)
Ctrl-C interrupts an answer and keeps its text so far."""
PROMPT = "you> "


def chat(
    *,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    shade: Annotated[
        bool | None,
        typer.Option(
            "--shade/--plain", help="Shade each token by its surprisal; default: on terminals only."
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Maximum tokens per answer.", rich_help_panel="Sampling")
    ] = 256,
    temperature: TemperatureOption = 0.7,
    seed: SeedOption = None,
    model: ModelFlags,
) -> None:
    """Chat with a model; each token is shaded by its surprisal.

    Each line of standard input is a user message. An empty line, Ctrl-D or /quit ends the chat; /help lists
    all commands. Ctrl-C interrupts an answer, but does not end the chat. After each answer, its mean
    surprisal in nats and its perplexity under the model's raw distribution are printed. When the
    conversation no longer fits into the context, its oldest messages are dropped, with a note.

    Examples:
        logprobe chat --system "Answer in one sentence."
        echo "What is the capital of France?" | logprobe chat --temperature 0
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, logprobs=0)
    screen = console(is_forced=bool(shade))
    is_shaded = can_shade(screen) and shade is not False
    with model.open() as llm:
        _check_template(llm)
        conversation = Conversation(llm, params, screen, is_shaded=is_shaded)
        conversation.set_system(system or "")
        conversation.run(is_interactive=sys.stdin.isatty())


def _check_template(llm: LLM) -> None:
    """Raise an error before the first turn if the model has no usable chat template."""
    read_messages([{"role": "user", "content": "-"}], llm.text)


class Conversation:
    """A conversation in the terminal: reads lines, and prints answers and the output of commands."""

    def __init__(self, llm: LLM, params: SamplingParams, screen: Console, *, is_shaded: bool) -> None:
        self._llm = llm
        self._params = params
        self._screen = screen
        self._is_shaded = is_shaded
        self._system: list[dict[str, Any]] = []
        self._turns: list[dict[str, Any]] = []  # messages from user, assistant, user, ...
        self._tokens: list[list[Any]] = []  # token rows of each answer in `_turns`
        self._commands = {
            "/help": self._help,
            "/system": self.set_system,
            "/reset": self._reset,
            "/save": self._save,
        }

    def run(self, *, is_interactive: bool) -> None:
        """Answer each line of standard input until it ends.

        Raises:
            LogprobeError: an answer failed, and the input is not interactive.
        """
        if is_interactive:
            with suppress(ImportError):  # enables line editing; not available on all platforms
                import readline  # noqa: F401
            typer.echo("Ctrl-D to quit, /help for commands", err=True)
            if self._is_shaded:
                self._screen.print(legend())
        while (line := _next_line(is_interactive=is_interactive)) is not None:
            try:
                self._take(line)
            except LogprobeError as error:
                if not is_interactive:
                    raise
                typer.echo(f"error: {' '.join(str(error).split())}", err=True)

    def set_system(self, text: str) -> None:
        """Set the system message; an empty text removes it."""
        self._system = [{"role": "system", "content": text}] if text else []

    def _take(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name in self._commands:
            self._commands[name](rest.strip())
        elif name.startswith("/"):
            typer.echo(f"error: unknown command {name}; /help lists all commands", err=True)
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        self._turns.append({"role": "user", "content": line})
        printer = CompletionPrinter(self._llm, self._params, self._screen, is_shaded=self._is_shaded)
        try:
            printer.run(self._fitting_prompt())
        except LogprobeError:
            del self._turns[-1:]  # remove the unanswered message
            raise
        if printer.output is None:  # interrupted before the first token
            del self._turns[-1:]
            return
        completion = printer.output.outputs[0]
        assert completion.logprobs is not None, "requested by logprobs=0"
        self._turns.append({"role": "assistant", "content": printer.text})
        self._tokens.append(token_rows(completion.token_ids, completion.logprobs, self._llm.text.vocabulary))
        typer.echo(_summary(completion.cumulative_logprob or 0.0, len(completion.token_ids)))

    def _fitting_prompt(self) -> list[int]:
        """Return the conversation as token ids, after dropping old turns to leave room for an answer."""
        context = self._llm.engine.capabilities().max_model_len
        limit = context - min(self._params.max_tokens, context // 2)
        num_forgotten = 0
        while True:
            ids: list[int] = read_messages(self._system + self._turns, self._llm.text).tolist()
            if len(ids) <= limit or len(self._turns) == 1:
                break
            del self._turns[:2], self._tokens[:1]
            num_forgotten += 2
        if num_forgotten:
            note = f"note: the conversation exceeds the context; dropped the oldest {num_forgotten} messages"
            typer.echo(f"{note} (a smaller --max-tokens leaves more room)", err=True)
        return ids

    def _help(self, _: str) -> None:
        typer.echo(HELP, err=True)

    def _reset(self, _: str) -> None:
        self._turns, self._tokens = [], []

    def _save(self, name: str) -> None:
        if not name:
            typer.echo("error: /save requires a file name: /save FILE", err=True)
            return
        answers = iter(self._tokens)
        messages = [
            message | ({"tokens": next(answers)} if message["role"] == "assistant" else {})
            for message in self._system + self._turns
        ]
        try:
            Path(name).expanduser().write_text(json.dumps({"messages": messages}, indent=1), "utf-8")
        except OSError as error:
            reason = error.strerror or error
            typer.echo(f"error: {name}: cannot be written ({reason}); use another file", err=True)
        else:
            typer.echo(f"saved {len(messages)} messages to {name}", err=True)


def _summary(total: float, count: int) -> str:
    mean = -total / max(count, 1)
    return f"[{count} tokens, {mean:.2f} nats per token, perplexity {exp(mean):.2f}]"


def _next_line(*, is_interactive: bool) -> str | None:
    """Return the next line of input, or None at the end of input, at an empty line or at `/quit`.

    Raises:
        InputError: the line is not UTF-8.
    """
    while True:
        try:
            line = input(PROMPT if is_interactive else "").strip()
            line.encode()  # in some locales Python reads an invalid byte as a surrogate
        except EOFError:
            return None
        except UnicodeError as error:
            remedy = "convert it first, for example with iconv -t UTF-8"
            raise InputError(f"standard input: is not UTF-8 text; {remedy}") from error
        except KeyboardInterrupt:
            if not is_interactive:
                raise
            typer.echo("\nCtrl-D to quit", err=True)
        else:
            return None if line in {"", "/quit"} else line
