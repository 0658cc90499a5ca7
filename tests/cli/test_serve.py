"""`logprobe serve` up to the door: which model and which settings the flags and the environment ask for."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FIRST, SECOND = "LogitBiasLogitsProcessor", "MinTokensLogitsProcessor"


@pytest.fixture
def asked(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The engine's and the server's settings that a command line comes to, without a server."""

    def serve(*arguments: str, **environment: str) -> tuple[Any, Any]:
        told: list[Any] = []
        monkeypatch.setattr("logprobe.server.app.serve", lambda *settings, **_: told.append(settings))
        monkeypatch.setattr("logprobe.cli.serve.resolve", lambda name: name)
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(f"LOGPROBE_{name}", value)
            done = cli("serve", *arguments)
        assert done.code == 0, done.err
        [(config, settings)] = told
        return config, settings

    return serve


@pytest.mark.parametrize(
    ("arguments", "environment", "model"),
    [
        ([], {}, "smollm2"),
        (["gemma3-270m"], {}, "gemma3-270m"),
        (["--model", "gemma3-270m"], {}, "gemma3-270m"),
        (["smollm2", "--model", "smollm2"], {}, "smollm2"),
        ([], {"MODEL": "gemma3-270m"}, "gemma3-270m"),
        (["smollm2"], {"MODEL": "gemma3-270m"}, "smollm2"),
        (["--model", "smollm2"], {"MODEL": "gemma3-270m"}, "smollm2"),
    ],
)
def test_the_model_is_the_one_that_is_named(
    asked: Any, arguments: list[str], environment: dict[str, str], model: str
) -> None:
    config, settings = asked(*arguments, **environment)
    assert (config.model, settings.model_name) == (model, model)


def test_two_models_are_wrong_use(cli: Any) -> None:
    done = cli("serve", "smollm2", "--model", "gemma3-270m")
    assert done.code == 2
    assert "--model: is 'gemma3-270m', but the argument is 'smollm2'; give one of them" in done.error_line


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--logits-processors", FIRST, SECOND], {}),
        (["--logits-processors", f"{FIRST},{SECOND}"], {}),
        (["--logits-processors", FIRST, "--logits-processors", SECOND], {}),
        ([], {"LOGITS_PROCESSORS": f"{FIRST} {SECOND}"}),
        ([], {"LOGITS_PROCESSORS": f"{FIRST},{SECOND}"}),
        ([], {"LOGITS_PROCESSORS": f"{FIRST}, {SECOND}"}),
    ],
)
def test_processors_are_named_in_every_usual_way(
    asked: Any, arguments: list[str], environment: dict[str, str]
) -> None:
    config, _ = asked("smollm2", *arguments, **environment)
    assert config.logits_processors == (FIRST, SECOND)


def test_a_model_may_have_several_names(asked: Any) -> None:
    _, settings = asked("smollm2", "--served-model-name", "gpt-4o", "--served-model-name", "local")
    assert settings.served_model_name == ("gpt-4o", "local")
    assert asked("smollm2", SERVED_MODEL_NAME="gpt-4o local")[1].served_model_name == ("gpt-4o", "local")


def test_a_port_that_is_taken_is_one_line(cli: Any, tiny_model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = cli("serve", str(tiny_model_folder), "--port", str(port))
    assert done.code == 1
    reason = f"127.0.0.1:{port} cannot be listened on (Address already in use)"
    assert done.error_line == f"port: {reason}; choose another; 0: a free one"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_ours_is_one_line(cli: Any, tiny_model_folder: Path, host: str) -> None:
    done = cli("serve", str(tiny_model_folder), "--host", host, "--port", "0")
    assert done.code == 1
    assert done.error_line.startswith(f"host: {host}:0 cannot be listened on (")
