"""`logprobe chat`: turns from standard input, replies with their surprisal."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

from logprobe.cli.shade import harmless

if TYPE_CHECKING:
    from pathlib import Path


def test_each_line_is_a_turn_and_each_answer_says_how_sure_it_was(cli: Any, tiny_model_folder: Path) -> None:
    flags = ("--model", str(tiny_model_folder), "--max-tokens", "4", "--seed", "1")
    done = cli("chat", *flags, stdin=b"the cat\nand the dog\n\nnot read\n")
    assert done.code == 0
    found = re.findall(
        r"^\[(\d+) tokens, ([\d.]+) nats per token, perplexity [\d.]+\]$", done.out, re.MULTILINE
    )
    assert len(found) == 2
    assert all(0 < int(count) <= 4 and float(mean) > 0 for count, mean in found)


def test_shading_changes_no_text(cli: Any, tiny_model_folder: Path) -> None:
    flags = ("--model", str(tiny_model_folder), "--max-tokens", "12", "--temperature", "0")
    plain = cli("chat", *flags, stdin=b"the cat\n").out
    shaded = cli("chat", *flags, "--shade", stdin=b"the cat\n").out
    assert "\x1b[" in shaded
    assert "\x1b[" not in plain
    # Control characters are escaped, tabs become spaces.
    assert re.sub(r"\x1b\[[\d;]*m", "", shaded).split() == harmless(plain).split()


def test_a_temperature_that_cannot_be_is_wrong_use(cli: Any) -> None:
    done = cli("chat", "--temperature", "-1")
    assert done.code == 2
    assert "--temperature" in done.error_line


def messages_of(cli: Any, folder: Path, tmp_path: Path, *lines: str, flags: tuple[str, ...] = ()) -> Any:
    """Run the command with input lines; return its result and the saved conversation."""
    path = tmp_path / "talk.json"
    stdin = "".join(f"{line}\n" for line in (*lines, f"/save {path}")).encode()
    done = cli("chat", "--model", str(folder), "--seed", "1", *flags, stdin=stdin)
    return done, json.loads(path.read_text())["messages"]


def test_commands_change_what_the_model_is_told(cli: Any, tiny_model_folder: Path, tmp_path: Path) -> None:
    lines = ("the dog", "/reset", "/system be kind", "the cat")
    done, messages = messages_of(cli, tiny_model_folder, tmp_path, *lines, flags=("--max-tokens", "3"))
    assert done.code == 0
    told = [(message["role"], message["content"]) for message in messages[:2]]
    assert told == [("system", "be kind"), ("user", "the cat")]
    assert messages[2]["role"] == "assistant"
    assert len(messages[2]["tokens"]) <= 3
    assert all(row["logprob"] <= 0 for row in messages[2]["tokens"])


def test_help_and_what_is_no_command_are_told(cli: Any, tiny_model_folder: Path) -> None:
    done = cli("chat", "--model", str(tiny_model_folder), stdin=b"/help\n/save\n/what\n")
    assert (done.code, done.out) == (0, "")
    for told in (
        "/system TEXT",
        "/reset",
        "/save FILE",
        "error: /save requires a file",
        "unknown command /what",
    ):
        assert told in done.err


def test_what_no_longer_fits_is_forgotten_from_the_start(
    cli: Any, tiny_model_folder: Path, tmp_path: Path
) -> None:
    lines = [f"{word} " * 30 for word in ("the", "and", "cat")]
    flags = ("--max-tokens", "8", "--system", "be kind")
    done, messages = messages_of(cli, tiny_model_folder, tmp_path, *lines, flags=flags)
    assert done.code == 0
    assert "exceeds the context; dropped the oldest" in done.err
    assert messages[0] == {"role": "system", "content": "be kind"}
    assert messages[-2]["content"] == lines[-1].strip()
    assert len(messages) < 7
    assert all("tokens" in message for message in messages if message["role"] == "assistant")


def test_a_line_that_no_context_holds_is_one_error(cli: Any, tiny_model_folder: Path) -> None:
    done = cli("chat", "--model", str(tiny_model_folder), stdin=b"cat " * 200)
    assert done.code == 1
    assert "but at most 128 fit" in done.error_line


def test_a_model_without_a_template_is_one_error(cli: Any, tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(tiny_model_folder, folder, ignore=shutil.ignore_patterns("*.jinja"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    done = cli("chat", "--model", str(folder), stdin=b"hello\n")
    assert done.code == 1
    assert "the model has no chat template; use text completion (generate" in done.error_line


def test_input_that_is_not_utf_8_is_told(cli: Any, tiny_model_folder: Path) -> None:
    done = cli("chat", "--model", str(tiny_model_folder), "--max-tokens", "1", stdin=b"the c\xff\n")
    assert done.code == 1
    assert "standard input: is not UTF-8 text; convert it first" in done.error_line
