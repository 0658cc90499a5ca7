"""`logprobe serve` without serving: the models and settings that flags and environment select."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.config import EngineConfig, _warn_ignored

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FIRST, SECOND = "LogitBiasLogitsProcessor", "MinTokensLogitsProcessor"


@pytest.fixture
def asked(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return the engine's and the server's settings for a command line, without starting a server."""

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
    assert "--model: is 'gemma3-270m', but the argument is 'smollm2'; set only one of them" in done.error_line


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


def test_a_model_may_follow_processors(asked: Any) -> None:
    flags = ("--logits-processors", "a:B", "c:D", "gemma3-270m", "--port", "1")
    config, settings = asked(*flags)
    assert (config.model, config.logits_processors, settings.port) == ("gemma3-270m", ("a:B", "c:D"), 1)


def test_flags_of_vllm_set_the_fields_of_their_names(asked: Any) -> None:
    flags = (
        "--max-num-seqs 8 --kv-cache-memory-bytes 9 --kv-cache-dtype auto --async-scheduling "
        "--data-parallel-size 2 --lora-modules a=b --enable-log-requests --served-model-name own"
    )
    config, settings = asked("smollm2", *flags.split())
    assert config == EngineConfig(
        max_num_seqs=8, kv_cache_memory_bytes=9, async_scheduling=True, data_parallel_size=2
    )
    assert (settings.lora_modules, settings.served_model_name) == (("a=b",), ("own",))
    assert settings.enable_log_requests


@pytest.mark.parametrize("origin", ['["*"]', "example.com", ""])
def test_what_is_no_origin_is_refused(cli: Any, origin: str) -> None:
    done = cli("serve", "--allowed-origins", origin)
    assert done.code == 2
    assert "--allowed-origins: must be an origin such as https://example.com" in done.error_line


def test_a_model_may_have_several_names(asked: Any) -> None:
    _, settings = asked("smollm2", "--served-model-name", "gpt-4o", "--served-model-name", "local")
    assert settings.served_model_name == ("gpt-4o", "local")
    assert asked("smollm2", SERVED_MODEL_NAME="gpt-4o local")[1].served_model_name == ("gpt-4o", "local")


def test_the_distribution_of_rows_is_a_flag_a_variable_and_an_entry(
    asked: Any, cli: Any, tmp_path: Path
) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('logprobs-mode = "both"')
    assert asked("smollm2")[1].logprobs_mode == "raw_logprobs"
    assert asked("smollm2", "--logprobs-mode", "processed_logprobs")[1].logprobs_mode == "processed_logprobs"
    assert asked("smollm2", LOGPROBS_MODE="both")[1].logprobs_mode == "both"
    assert asked("smollm2", "--config", str(path))[1].logprobs_mode == "both"
    done = cli("serve", "smollm2", "--logprobs-mode", "raw_logits")
    assert done.code == 2
    assert "--logprobs-mode: must be one of raw_logprobs, processed_logprobs, both" in done.error_line


def test_a_port_that_is_taken_is_one_line(cli: Any, tiny_model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = cli("serve", str(tiny_model_folder), "--port", str(port))
    assert done.code == 2
    reason = f"cannot listen on 127.0.0.1:{port} (Address already in use)"
    assert f"--port: {reason}; choose another port, or 0 for a free one" in done.error_line


def test_a_port_of_the_figures_that_is_taken_is_one_line(cli: Any, tiny_model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = cli("serve", str(tiny_model_folder), "--port", "0", "--metrics-port", str(port))
    assert done.code == 2
    assert f"--metrics-port: cannot listen on 127.0.0.1:{port} (" in done.error_line


def test_flags_of_other_programs_that_change_nothing_are_taken(
    asked: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_ignored.cache_clear()
    ports = ("--port", "8180", "--metrics-port", "8181")
    others = ("--engine-worker-queue-port", "8182", "--cache-queue-port", "8183")
    config, settings = asked("--model", "smollm2", *ports, *others, "--logits-processors", FIRST)
    assert (settings.port, settings.metrics_port) == (8180, 8181)
    assert config == EngineConfig(logits_processors=(FIRST,))
    assert {message.split()[0] for message in caplog.messages} == {
        "engine_worker_queue_port",
        "cache_queue_port",
    }
    flags = ("--enforce-eager", "smollm2", "--gpu-memory-utilization", "0.9", "--tensor-parallel-size", "1")
    flags += ("--kv-cache-dtype", "auto")
    assert asked(*flags, "--no-enable-prefix-caching", "--load-format", "auto")[0] == EngineConfig()


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--tensor-parallel-size", "2", "--engine vllm to distribute it"),
        ("--load-format", "dummy", "must be 'auto' or 'safetensors', got 'dummy'"),
        ("--num-gpu-blocks-override", "8", "did you mean '--kv-cache-memory-bytes'?"),
    ],
)
def test_those_that_would_change_something_are_wrong_use(cli: Any, flag: str, value: str, says: str) -> None:
    done = cli("serve", "smollm2", flag, value)
    assert done.code == 2
    assert f"Invalid value for {flag}: " in done.error_line
    assert says in done.error_line


def test_a_misspelt_flag_is_answered_with_those_that_there_are(cli: Any) -> None:
    done = cli("serve", "--max-num-seq", "3")
    assert done.code == 2
    assert "(Possible options: --max-num-seqs" in done.error_line


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_ours_is_one_line(cli: Any, tiny_model_folder: Path, host: str) -> None:
    done = cli("serve", str(tiny_model_folder), "--host", host, "--port", "0")
    assert done.code == 2
    assert f"--host: cannot listen on {host}:0 (" in done.error_line


CONFIG = """
model = "gemma3-270m"
port = 8123
drain-s = 2.5
allowed_host = ["a.example", "b.example"]
logits-processors = ["LogitBiasLogitsProcessor"]
enable-log-requests = true
kv-cache-memory-bytes = 1000000
"""


def test_a_file_says_what_neither_flags_nor_the_environment_say(asked: Any, tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(CONFIG)
    config, settings = asked("--config", str(path))
    assert (config.model, config.cache_config.kv_cache_memory_bytes, config.logits_processors) == (
        "gemma3-270m",
        1_000_000,
        (FIRST,),
    )
    assert (settings.port, settings.drain_s, settings.enable_log_requests) == (8123, 2.5, True)
    assert settings.allowed_host == ("a.example", "b.example")
    config, settings = asked("smollm2", "--port", "1", CONFIG=str(path), DRAIN_S="9")
    assert (config.model, settings.port, settings.drain_s, settings.enable_log_requests) == (
        "smollm2",
        1,
        9.0,
        True,
    )
    assert asked("--config", str(path), MODEL="smollm2")[0].model == "smollm2"


def test_a_file_may_have_underscores(asked: Any, tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text("kv_cache_memory_bytes = 7\nmax_num_seqs = 3\nlora_modules = ['a=b']\n")
    config, settings = asked("--config", str(path))
    assert (
        config.cache_config.kv_cache_memory_bytes,
        config.scheduler_config.max_num_seqs,
        settings.lora_modules,
    ) == (7, 3, ("a=b",))


def test_a_files_tables_are_further_models(cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr("logprobe.server.app.serve", lambda *_, **further: told.append(further["further"]))
    monkeypatch.setattr("logprobe.cli.serve.resolve", lambda name: name)
    path = tmp_path / "server.toml"
    path.write_text(
        "max-logprobs = 7\nmax-requests = 9\nlora-modules = ['own=x']\n"
        "[models.judge]\nmodel = 'gemma3-270m'\n"
        "kv-cache-memory-bytes = 12\nlogprobs-mode = 'both'\nmax-requests = 3\n"
        "served-model-name = ['j']\nlogits-processors = ['a:B']\n"
    )
    done = cli("serve", "smollm2", "--config", str(path), "--also-model", "plain=smollm2")
    assert done.code == 0, done.err
    [further] = told
    assert list(further) == ["plain", "judge"]
    judge, plain = further["judge"], further["plain"]
    assert (judge.config.model, judge.config.cache_config.kv_cache_memory_bytes) == ("gemma3-270m", 12)
    assert (judge.config.logits_processors, judge.settings.served_model_name) == (("a:B",), ("j",))
    assert (judge.settings.model_name, judge.settings.max_requests, judge.settings.max_logprobs) == (
        "judge",
        3,
        7,
    )
    assert (
        plain.config.model,
        plain.config.cache_config.kv_cache_memory_bytes,
        plain.settings.max_requests,
    ) == (
        "smollm2",
        None,
        9,
    )
    assert (judge.settings.logprobs_mode, plain.settings.logprobs_mode) == ("both", "raw_logprobs")
    assert judge.settings.lora_modules == plain.settings.lora_modules == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pord = 1", "unknown entry 'pord'; did you mean port?"),
        ("whatever-else = 1", "unknown entry 'whatever-else'; entries are named as the flags"),
        ("port = 'x'", "port"),
        ("models = 3", "models must be tables [models.NAME]"),
        ("[models.a]\nkv-cache-memory-bytes = 9", "the table [models.a] has no model"),
        ("[models.a]\nmodel = 'smollm2'\nport = 1", "[models.a]: port applies to the whole server"),
        (
            "[models.a]\nmodel = 'smollm2'\nkv-cache-memory-byte = 1",
            "[models.a]: unknown entry 'kv-cache-memory-byte'; did",
        ),
        ("[models.a]\nmodel = 'smollm2'\nkv-cache-memory-bytes = 'x'", "'--kv-cache-memory-bytes'"),
        (
            "also-model = ['a=smollm2']\n[models.a]\nmodel = 'smollm2'",
            "a is also a table of the --config file",
        ),
        ("also-model = ['a=smollm2', 'a=gemma3-270m']", "a name is used twice"),
        ("also-model = ['smollm2']", "must be NAME=MODEL"),
        ("port = -1", "--port: must be in [0, 65536), got -1"),
        ("port 1", "as TOML: "),
        (None, "as TOML: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(
    cli: Any, tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "server.toml"
    if text is not None:
        path.write_text(text)
    done = cli("serve", "--config", str(path))
    assert done.code == 2
    assert said in done.error_line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "::", "--api-key", "short"], "--api-key: each key must have at least 16 characters"),
        (["--api-key", ""], "--api-key: a key is empty"),
        (["--ssl-keyfile", "a"], "--ssl-keyfile: requires a certificate"),
    ],
)
def test_keys_and_files_that_protect_nothing_are_refused(cli: Any, arguments: list[str], said: str) -> None:
    done = cli("serve", *arguments)
    assert done.code == 2
    assert said in done.error_line
