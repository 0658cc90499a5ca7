"""Frozen server settings; each is a flag of `logprobe serve` and an environment variable `LOGPROBE_*`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logprobe.config import strict_keywords
from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.config import EngineConfig


@strict_keywords
@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Addresses, keys, models, limits, timeouts and logging of the server.

    Args:
        host: address to listen on; by default, only this machine can connect.
        port: port to listen on; 0 selects a free one.
        metrics_port: additional port on 127.0.0.1 that serves `/metrics` without a key; 0 selects a free one.
        api_key: API key that requests must send as `Authorization: Bearer KEY`. Any of several keys is
            accepted; without keys, no key is required. If other machines can reach the server, a key must
            have at least 16 characters.
        api_key_file: file with further API keys, one per line; reloaded on SIGHUP.
        operator_key: key of operators, who may load LoRA weights and replace the model's weights over HTTP.
            Any of several keys is accepted; without keys, these routes are disabled. At least 16 characters.
        ssl_certfile: TLS certificate (PEM, with its chain), to serve HTTPS.
        ssl_keyfile: private key of the certificate; None: in the same file.
        model_name: name of the model in requests and replies; None: the name or path that it is loaded by.
        served_model_name: further names of the model; without model_name, replies use the first of them.
        lora: LoRA weights to load at startup, as NAME=PATH of a local folder; requests select them with
            `lora` or `model`.
        also_model: further models, as NAME=MODEL, where MODEL is a name or path like that of the first
            model. A further model is loaded on the first request that names it as `model`. Tables
            [models.NAME] of a configuration file override its settings.
        preload: names of further models to load at startup.
        max_models_bytes: memory for further models, in bytes of their weight files and KV caches; the least
            recently used model is unloaded to make room. None: the memory that is free after the first
            model is loaded.
        response_template: JSON file, in the format of transformers' `response_template`, with the markers
            that delimit reasoning and tool calls; None: derived from the chat template.
        trust_request_chat_template: render the `chat_template` of a request; the template is a program that
            runs in a sandbox. By default, a request with a template gets 400.
        logprobs_mode: distribution of log-probabilities in replies if the request selects none:
            raw_logprobs (the model's), processed_logprobs (the one that tokens are sampled from), or both.
        max_logprobs: maximum alternatives per token that a request may ask for; -1: no limit.
        max_body_bytes: maximum size of a request body.
        max_body_values: maximum JSON values in a body; an object, a list and a key count as eight each.
        max_text_bytes: maximum text to tokenize per request.
        max_messages: maximum messages of a conversation.
        max_token_ids: maximum ids in a list of token ids other than a prompt, and entries of logit_bias.
        max_logprob_token_ids: maximum ids per position in logprob_token_ids; -1: no limit.
        max_bad_words: maximum texts in bad_words.
        max_stop: maximum stop strings.
        max_stop_bytes: maximum total size of the stop strings.
        strict_fields: reject every unknown field of a body with 400; by default, unknown fields that cannot
            change the reply are ignored and named in the `Warning` header.
        max_requests: maximum completions in progress or waiting, of all requests together; also the maximum
            prompts, continuations, documents, or prompts times labels of one request, and with max_waiting
            the maximum concurrent HTTP requests of a route. A client (identified by key, or else address)
            with few requests in progress may exceed this and the next two limits by an eighth, so that one
            client cannot block all others.
        max_tokens_in_flight: maximum prompt tokens plus tokens to generate of these completions.
        max_logprob_bytes: maximum memory for the log-probabilities of these completions, in records and
            replies.
        max_waiting: maximum requests of one client that wait for capacity; further ones get 429 at once.
            0: no request waits.
        max_field_rows: maximum next-token rows for `field_logprobs: "members"` in one reply, for all choices
            and values together; values that are not scored then are reported as `unresolved`.
        buffer_rows: token rows that a stream may be ahead of its client before the request is paused.
        max_stored: maximum stored responses of `/v1/responses`; when full, the oldest response of the key
            that stores most is deleted.
        max_stored_bytes: maximum total size of stored responses and their conversations, in bytes of JSON.
        header_timeout_s: maximum time to wait for a request on an open connection, and for its header to
            arrive.
        body_timeout_s: maximum time for the body of a request to arrive.
        wait_timeout_s: maximum time that a request waits for capacity before it gets 429.
        write_timeout_s: maximum time that a client may leave sent data unread; then the connection is closed.
        stall_s: time in one step after which the engine counts as stuck.
        drain_s: time for requests in progress to finish after SIGTERM or Ctrl-C; a second signal aborts them.
        allowed_host: further host names that requests may use for this server; * allows all.
        cors_origin: web origins that may call the server; none by default.
        log_level: minimum log level: debug, info, warning or error.
        log_format: text, or json for one JSON object per line.
        access_log: log a line for each finished request.
        log_requests: log the bodies of requests.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    metrics_port: int | None = None
    api_key: tuple[str, ...] = ()
    api_key_file: str | None = None
    operator_key: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    model_name: str | None = None
    served_model_name: tuple[str, ...] = ()
    lora: tuple[str, ...] = ()
    also_model: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    max_models_bytes: int | None = None
    response_template: str | None = None
    trust_request_chat_template: bool = False
    logprobs_mode: str = "raw_logprobs"
    max_logprobs: int = 20
    max_body_bytes: int = 8 << 20
    max_body_values: int = 1 << 19
    max_text_bytes: int = 1 << 20
    max_messages: int = 2048
    max_token_ids: int = 1 << 16
    max_logprob_token_ids: int = 256
    max_bad_words: int = 1024
    max_stop: int = 64
    max_stop_bytes: int = 4096
    strict_fields: bool = False
    max_requests: int = 512
    max_tokens_in_flight: int = 4 << 20
    max_logprob_bytes: int = 2 << 30
    max_waiting: int = 64
    max_field_rows: int = 1024
    buffer_rows: int = 100
    max_stored: int = 256
    max_stored_bytes: int = 64 << 20
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    wait_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    stall_s: float = 60.0
    drain_s: float = 30.0
    allowed_host: tuple[str, ...] = ()
    cors_origin: tuple[str, ...] = ()
    log_level: str = "info"
    log_format: str = "text"
    access_log: bool = True
    log_requests: bool = False

    def __post_init__(self) -> None:
        for name, port in {"port": self.port, "metrics_port": self.metrics_port or 0}.items():
            require(0 <= port < 65536, name, f"must be in [0, 65536), got {port}")
        require(self.max_logprobs >= -1, "max_logprobs", f"must be -1 or more, got {self.max_logprobs}")
        check_keys(self.api_key, "api_key", is_public=self.is_public)
        check_keys(self.operator_key, "operator_key", is_public=True)
        is_apart = not set(self.operator_key) & set(self.api_key)
        require(is_apart, "operator_key", "is also an API key of clients; choose another")
        has_file = self.ssl_keyfile is None or self.ssl_certfile is not None
        require(has_file, "ssl_keyfile", "requires a certificate; set ssl_certfile")
        for setting in self.lora:
            name, _, path = setting.partition("=")
            require(name and path, "lora", f"must be NAME=PATH of a folder of LoRA weights, got {setting!r}")
        for setting in self.also_model:
            name, _, model = setting.partition("=")
            require(name and model, "also_model", f"must be NAME=MODEL, got {setting!r}")
        room = self.max_models_bytes
        require(room is None or room > 0, "max_models_bytes", f"must be positive, got {room}")
        require(self.max_stored >= 0, "max_stored", f"must be 0 or more, got {self.max_stored}")
        require(self.max_waiting >= 0, "max_waiting", f"must be 0 or more, got {self.max_waiting}")
        require(self.drain_s >= 0, "drain_s", f"must be 0 or more, got {self.drain_s}")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            require(value in choices, name, f"must be one of {', '.join(choices)}, got {value!r}")
        known = "must be -1 or more, got"
        require(
            self.max_logprob_token_ids >= -1, "max_logprob_token_ids", f"{known} {self.max_logprob_token_ids}"
        )
        for name in POSITIVE:
            require(getattr(self, name) > 0, name, f"must be positive, got {getattr(self, name)}")

    @property
    def is_public(self) -> bool:
        """True if other machines may reach the server."""
        if self.host.lower() == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True


@dataclass(frozen=True, slots=True)
class FurtherModel:
    """An additional model: its engine configuration, and its names and limits in `settings`."""

    config: EngineConfig
    settings: ServerSettings

    @classmethod
    def of(cls, name: str, config: EngineConfig, settings: ServerSettings, **own: Any) -> FurtherModel:
        """Derive a model's settings from the server's; `own` overrides settings named in `OWN_SETTINGS`.

        Raises:
            ParameterError: a setting is invalid.
        """
        names = {"model_name": name, "served_model_name": (), "lora": (), "response_template": None}
        return cls(config, replace(settings, **names | own))

    @property
    def names(self) -> tuple[str, ...]:
        """Further names of the model."""
        return self.settings.served_model_name

    @property
    def loras(self) -> tuple[str, ...]:
        """Names of the LoRA weights that are loaded with the model."""
        return tuple(setting.partition("=")[0] for setting in self.settings.lora)


OWN_SETTINGS: Final = (
    "served_model_name",
    "lora",
    "response_template",
    "logprobs_mode",
    "max_logprobs",
    "max_requests",
    "max_tokens_in_flight",
    "max_logprob_bytes",
    "max_waiting",
    "max_field_rows",
    "buffer_rows",
    "wait_timeout_s",
    "stall_s",
)
"""Settings that each model may override; all others apply to the whole server."""
CHOICES: Final = {
    "logprobs_mode": ("raw_logprobs", "processed_logprobs", "both"),
    "log_level": ("debug", "info", "warning", "error"),
    "log_format": ("text", "json"),
}
POSITIVE: Final = (
    "max_body_bytes",
    "max_body_values",
    "max_text_bytes",
    "max_messages",
    "max_token_ids",
    "max_bad_words",
    "max_stop",
    "max_stop_bytes",
    "max_requests",
    "max_tokens_in_flight",
    "max_logprob_bytes",
    "max_field_rows",
    "max_stored_bytes",
    "buffer_rows",
    "header_timeout_s",
    "body_timeout_s",
    "wait_timeout_s",
    "write_timeout_s",
    "stall_s",
)
"""Settings that must be greater than 0."""
MIN_KEY_CHARS: Final = 16


def check_keys(keys: Sequence[str], name: str, *, is_public: bool) -> None:
    """Reject keys that could be guessed.

    Raises:
        ParameterError: a key is empty, or shorter than `MIN_KEY_CHARS` while `is_public` is set.
    """
    require(all(keys), name, "a key is empty")
    is_long = not is_public or all(len(key) >= MIN_KEY_CHARS for key in keys)
    remedy = f"must have at least {MIN_KEY_CHARS} characters if other machines can reach the server"
    require(is_long, name, f"each key {remedy}; create one with `openssl rand -hex 24`")


def read_response_template(path: str | None) -> dict[str, Any] | None:
    """Read a JSON file in the format of transformers' `response_template`; None if `path` is None.

    Raises:
        ParameterError: the file cannot be read, or is not a JSON object.
    """
    if path is None:
        return None
    try:
        template = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ParameterError("response_template", f"cannot read {path} as JSON: {reason}") from error
    require(isinstance(template, dict), "response_template", f"{path} is not a JSON object")
    read: dict[str, Any] = template
    return read
