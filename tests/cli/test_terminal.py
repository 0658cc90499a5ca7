"""Commands on a real terminal, in subprocesses: interrupts, widths, colours."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pexpect
import psutil
import pytest
from rich.cells import cell_len

from server_process import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
LOADED = "…"  # ends the line that names what is loaded
SOME = r"\S{20}"  # a part of an endless reply


@pytest.fixture(scope="module")
def endless_model(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with a context for minutes of text; its greedy text never ends."""
    folder = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(tiny_model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 17}))
    return str(folder)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Any]]:
    """Start a command on a terminal with some columns."""
    started = []

    def start(*arguments: str, columns: int = 80, **environment: str) -> Any:
        command = str(Path(sys.executable).with_name("logprobe"))
        hidden = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "COLORTERM"}
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        env |= {"TERM": "xterm-256color"} | environment
        size = (50, columns)
        child = pexpect.spawn(
            command,
            [*arguments],
            env=env,
            dimensions=size,
            timeout=PATIENCE_S,
            encoding="utf-8",
            preexec_fn=heed_interrupts,
        )
        started.append(child)
        return child

    yield start
    for child in started:
        if child.isalive():
            child.kill(signal.SIGKILL)
            child.wait()
        child.close()


def heed_interrupts() -> None:
    """Restore the default SIGINT handler, which background processes ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ended(child: Any) -> tuple[int, str]:
    """Return the exit code of a command and its output since the last read."""
    child.expect(pexpect.EOF)
    child.wait()  # otherwise it is killed after half a second
    child.close()
    return child.exitstatus, child.before


def await_rest(child: Any) -> None:
    """Wait until a command reads a key: an interrupt just after its prompt is only seen with the next key."""
    process = psutil.Process(child.pid)
    eventually(lambda: process.status() == psutil.STATUS_SLEEPING, "it never rests")


ANSWER = ("--temperature", "0", "--max-tokens", "100000", "--kv-cache-memory-bytes", "100000000")


def test_an_interrupt_ends_a_completion_and_keeps_what_came(terminal: Any, endless_model: str) -> None:
    child = terminal("generate", "the cat", "--logprobs", "0", *ANSWER, "--model", endless_model)
    child.expect_exact(LOADED)
    child.expect(SOME)
    child.sendintr()
    child.expect("logprob +rank +entropy")
    code, shown = ended(child)
    assert code == 130
    rows = [line for line in ESCAPES.sub("", shown).splitlines() if re.match(r" *\d+  ", line)]
    assert rows
    assert "surprisal in nats" in shown
    assert "Traceback" not in shown


def test_a_conversation_outlives_an_interrupt(terminal: Any, endless_model: str, tmp_path: Path) -> None:
    child = terminal("chat", *ANSWER, "--plain", "--model", endless_model)
    child.expect_exact("you> ")
    child.sendline("the cat")
    child.expect(SOME)
    child.sendintr()
    child.expect(r"\[\d+ tokens, [\d.]+ nats per token, perplexity [\d.]+\]")
    child.expect_exact("you> ")
    child.sendline(f"/save {tmp_path / 'talk.json'}")
    child.expect_exact("saved 2 messages")
    child.sendline("/save /nowhere/talk.json")
    child.expect("error: /nowhere/talk.json: cannot be written")
    child.sendline("/nope")
    child.expect("error: unknown command /nope; /help lists all commands")
    child.expect_exact("you> ")
    await_rest(child)
    child.sendintr()  # nothing runs: the first interrupt does not end it
    child.expect_exact("Ctrl-D to quit")
    child.expect_exact("you> ")
    child.sendeof()
    assert ended(child)[0] == 0
    user, answer = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert (user["role"], user["content"]) == ("user", "the cat")
    assert answer["tokens"]
    assert answer["content"]


def test_a_text_is_shaded_and_fits(terminal: Any, tiny_model_folder: Path) -> None:
    text = "the cat and the dog and " * 8
    child = terminal("score", "--text", text, "--model", str(tiny_model_folder), columns=60)
    code, shown = ended(child)
    assert code == 0
    assert "\x1b[38;5;" in shown
    plain = ESCAPES.sub("", shown).replace("\r\n", "\n")
    assert text in plain
    below = plain.partition("surprisal in nats")[2]
    assert all(cell_len(line) <= 60 for line in below.splitlines())
    assert re.search(r"^perplexity +[\d.]+", below, re.MULTILINE)
