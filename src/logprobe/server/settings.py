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
        host: address to listen on; the default is this machine alone.
        port: 0 takes a free one.
        metrics_port: further port, of 127.0.0.1 alone, that gives `/metrics` without a key; 0: a free one.
        api_key: key that a request must bring as `Authorization: Bearer KEY`; any of several; none: open
            to all. Where others than this machine reach the server it has 16 characters or more.
        api_key_file: a file of further keys, one a line; it is read again at SIGHUP.
        operator_key: key of who may load LoRA weights and replace the model's over HTTP, any of several;
            none: nobody may. It has 16 characters or more.
        ssl_certfile: certificate (PEM, with those above it) by which the server speaks HTTPS.
        ssl_keyfile: its private key; None: in the same file.
        model_name: the name clients use; `None` takes the model's own.
        served_model_name: further names that mean the same model; the first is the one that replies give
            where there is no model_name.
        lora: LoRA weights to load before the first request, each as NAME=PATH of a local folder; a
            request names them as `lora`, or as `model`.
        also_model: further models, each as NAME=MODEL, where MODEL is what the first one may be; a request
            names it as `model`, by which it is loaded. A configuration file's tables [models.NAME] give them
            settings of their own.
        preload: names of further models that are loaded before the first request.
        max_models_bytes: what further models may hold together, by the bytes of their files and of their
            pools of keys and values; for one more the one that is unused longest leaves. None: the memory
            that is free once the first model is loaded.
        response_template: a JSON file, in the format of transformers' `response_template`, of the marks that
            set reasoning and calls of tools apart; None: what the chat template shows.
        logprobs_mode: which numbers a reply has where its request names none: raw_logprobs, of the model's
            own distribution, processed_logprobs, of the one that tokens are drawn from, or both.
        max_logprobs: most alternatives a token that a request may ask; -1 sets no cap.
        max_body_bytes: largest request body.
        max_body_values: most JSON values of a body, where an object, a list and a key count eight.
        max_text_bytes: most text of one request that is tokenised.
        max_messages: most messages of a conversation.
        max_token_ids: most ids in a list of token ids other than a prompt, and most entries of logit_bias.
        max_logprob_token_ids: most ids whose logprobs a request may name of a position; -1 sets no cap.
        max_bad_words: most texts of bad_words.
        max_stop: most stop strings.
        max_stop_bytes: most bytes of those, together.
        strict_fields: refuse every unknown field of a body with 400; by default, those that cannot change the
            reply are ignored and named in the `Warning` header.
        max_requests: completions in progress or waiting, all requests together; also the most prompts,
            continuations, documents, or prompts times labels of one request, and with max_waiting the most
            HTTP requests of one route at once. Of this and the next two, a client (by its key, or else its
            address) that holds little may have an eighth more, so that one that fills it shuts out none.
        max_tokens_in_flight: prompt tokens and tokens to generate of those.
        max_logprob_bytes: bytes that the logprobs of those may come to, as records and replies hold them.
        max_waiting: requests of one client that may wait for room in these; one more gets 429 at once.
            0: none waits.
        max_field_rows: next-token rows that `field_logprobs: "members"` may take for one reply, all of its
            choices and values together; what is not followed then is told as `unresolved`.
        buffer_rows: token rows a stream may run ahead of its reader before its request is paused.
        max_stored: replies of `/v1/responses` kept for later; for a new one the oldest of the key that has
            most goes.
        max_stored_bytes: bytes of JSON that stored replies and their conversations may come to, together.
        header_timeout_s: how long the header of a request may take to arrive, after a reply whatever else
            comes before it.
        body_timeout_s: how long the body of a request may take to arrive.
        wait_timeout_s: how long a request may wait for room before it gets 429.
        write_timeout_s: how long a client may leave what it was sent without taking it.
        stall_s: how long the engine may be busy with one step before it counts as stuck.
        drain_s: how long running requests may go on after SIGTERM or Ctrl-C; a second signal ends them.
        allowed_host: names beside this machine's own that a request may call the server by; * allows all.
        cors_origin: web origins that may call; none by default.
        log_level: least weight of what is logged: debug, info, warning or error.
        log_format: text, or json for one object a line.
        access_log: whether a line is logged for each request that has ended.
        log_requests: whether texts of requests are logged.
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
            require(0 <= port < 65536, name, f"must lie in [0, 65536), got {port}")
        require(self.max_logprobs >= -1, "max_logprobs", f"must be -1 or more, got {self.max_logprobs}")
        check_keys(self.api_key, "api_key", is_public=self.is_public)
        check_keys(self.operator_key, "operator_key", is_public=True)
        is_apart = not set(self.operator_key) & set(self.api_key)
        require(is_apart, "operator_key", "is a client's key, too; choose another")
        has_file = self.ssl_keyfile is None or self.ssl_certfile is not None
        require(has_file, "ssl_keyfile", "is of no use without its certificate; give ssl_certfile")
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
    remedy = f"must have {MIN_KEY_CHARS} characters or more where others than this machine reach the server"
    require(is_long, name, f"each key {remedy}; make one by `openssl rand -hex 24`")


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
        raise ParameterError("response_template", f"{path} cannot be read as JSON: {reason}") from error
    require(isinstance(template, dict), "response_template", f"{path} holds no JSON object")
    read: dict[str, Any] = template
    return read
