"""Frozen server settings, which are also the options of `logprobe serve`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from logprobe.config import strict_keywords
from logprobe.errors import InputError, ParameterError, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.analysis.confidence import FittedConfidence
    from logprobe.config import EngineConfig


_address = partial(typer.Option, rich_help_panel="Address and keys")
_models = partial(typer.Option, rich_help_panel="Models")
_limit = partial(typer.Option, rich_help_panel="Limits")
_time = partial(typer.Option, rich_help_panel="Timeouts (seconds)")
_log = partial(typer.Option, rich_help_panel="Logging")


@strict_keywords
@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Addresses, keys, models, limits, timeouts and logging of the server.

    Each annotated field is an option of `logprobe serve`; the annotation has the help text of the option.
    """

    host: Annotated[
        str, _address(help="Address to listen on; by default, only this machine can connect.")
    ] = "127.0.0.1"
    port: Annotated[int, _address(help="Port to listen on; 0 selects a free one.")] = 8000
    metrics_port: Annotated[
        int | None,
        _address(
            help="Additional port on 127.0.0.1 that serves /metrics without a key; 0 selects a free one."
        ),
    ] = None
    api_key: Annotated[
        tuple[str, ...],
        _address(
            help="API key that requests must send as `Authorization: Bearer KEY`. If several keys are set, "
            "any of them is accepted; if none is set, no key is required. If other machines can reach "
            "the server, a key must have at least 16 characters."
        ),
    ] = ()
    api_key_file: Annotated[
        str | None, _address(help="File with further API keys, one per line; reloaded on SIGHUP.")
    ] = None
    operator_key: Annotated[
        tuple[str, ...],
        _address(
            help="Key of operators, who may load LoRA weights and replace the model's weights over HTTP. "
            "If several keys are set, any of them is accepted; if none is set, these routes are "
            "disabled. A key must have at least 16 characters."
        ),
    ] = ()
    ssl_certfile: Annotated[
        str | None, _address(help="TLS certificate (PEM, with its chain), to serve HTTPS.")
    ] = None
    ssl_keyfile: Annotated[
        str | None, _address(help="Private key of the certificate; by default in the same file.")
    ] = None
    allowed_host: Annotated[
        tuple[str, ...],
        _address(help="Further host name that is accepted in the Host header; * allows all."),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        _address(
            help="Web origin that may call the server, such as https://example.com; * allows all. None by "
            "default.",
        ),
    ] = ()
    model_name: str | None = None  # name of the model in replies; None: the first of served_model_name
    served_model_name: Annotated[
        tuple[str, ...],
        _models(
            help="Name of the model in requests; the first name is also used in replies. The default is the "
            "name or path with which the model is loaded.",
        ),
    ] = ()
    lora_modules: Annotated[
        tuple[str, ...],
        _models(
            metavar="NAME=PATH",
            help="LoRA weights to load at startup, from a local folder; requests select them with `lora` "
            "or `model`.",
        ),
    ] = ()
    also_model: Annotated[
        tuple[str, ...],
        _models(
            metavar="NAME=MODEL",
            help="Further model, which is loaded on the first request that names it as `model`. MODEL is a "
            "name or path like that of the first model. To give the model settings of its own, use a table "
            "[models.NAME] of a configuration file instead.",
        ),
    ] = ()
    preload: Annotated[
        tuple[str, ...], _models(metavar="NAME", help="Further model to load at startup.")
    ] = ()
    max_models_bytes: Annotated[
        int | None,
        _models(
            help="Memory for further models: their weight files and KV caches. The least recently used "
            "model is unloaded to make room. The default is the memory that is free after the first "
            "model is loaded."
        ),
    ] = None
    response_template: Annotated[
        str | None,
        _models(
            help="JSON file, in the format of transformers' `response_template`, with the markers that "
            "delimit reasoning and tool calls; by default derived from the chat template."
        ),
    ] = None
    confidence: Annotated[
        tuple[str, ...],
        _models(
            metavar="NAME=FILE",
            help="Confidence fit, saved by `logprobe.analysis.calibrate`; requests to /v1/label select it "
            "with `confidence`.",
        ),
    ] = ()
    trust_request_chat_template: Annotated[
        bool,
        _models(
            help="Render the `chat_template` of a request; the template is a program that runs in a sandbox. "
            "By default, a request with a template gets 400."
        ),
    ] = False
    logprobs_mode: Annotated[
        str,
        _models(
            help="Distribution of log-probabilities in replies if the request selects none: raw_logprobs "
            "(the model's), processed_logprobs (the one that tokens are sampled from), or both."
        ),
    ] = "raw_logprobs"
    max_logprobs: Annotated[
        int, _limit(help="Maximum alternatives per token that a request may ask for; -1: no limit.")
    ] = 20
    max_body_bytes: Annotated[int, _limit(help="Maximum size of a request body.")] = 8 << 20
    max_body_values: Annotated[
        int, _limit(help="Maximum JSON values in a body; an object, a list and a key count as eight each.")
    ] = 1 << 19
    max_text_bytes: Annotated[int, _limit(help="Maximum bytes of text to tokenize per request.")] = 1 << 20
    max_messages: Annotated[int, _limit(help="Maximum messages of a conversation.")] = 2048
    max_token_ids: Annotated[
        int, _limit(help="Maximum ids in a list of token ids (except prompts), and entries in logit_bias.")
    ] = 1 << 16
    max_logprob_token_ids: Annotated[
        int, _limit(help="Maximum ids per position in logprob_token_ids; -1: no limit.")
    ] = 256
    max_bad_words: Annotated[int, _limit(help="Maximum texts in bad_words.")] = 1024
    max_stop: Annotated[int, _limit(help="Maximum stop strings.")] = 64
    max_stop_bytes: Annotated[int, _limit(help="Maximum total size of the stop strings.")] = 4096
    strict_fields: Annotated[
        bool,
        _limit(
            help="Reject every unknown field of a body with 400; by default, unknown fields that cannot "
            "change the reply are ignored and named in the `Warning` header."
        ),
    ] = False
    max_requests: Annotated[
        int,
        _limit(
            help="Maximum completions that are running or queued in the engine, for all requests together. "
            "One request may have at most this number of prompts, continuations, documents, or pairs "
            "of a prompt and a label. A route may have at most this number plus --max-waiting "
            "concurrent HTTP requests. A client with few requests in progress may exceed this and the "
            "next two limits by an eighth, so that one client cannot block all others. A client is "
            "identified by its key or, without keys, by its IP address."
        ),
    ] = 512
    max_tokens_in_flight: Annotated[
        int, _limit(help="Maximum prompt tokens plus tokens to generate, for these completions together.")
    ] = 4 << 20
    max_logprob_bytes: Annotated[
        int,
        _limit(help="Maximum memory for the log-probabilities of these completions, in records and replies."),
    ] = 2 << 30
    max_waiting: Annotated[
        int,
        _limit(
            help="Maximum requests of one client that wait for capacity; further ones get 429. 0: no request "
            "waits."
        ),
    ] = 64
    max_field_rows: Annotated[
        int,
        _limit(
            help='Maximum next-token rows for `field_logprobs: "members"` in one reply, for all choices and '
            "values together; the probability of values beyond this limit is reported as `unresolved`."
        ),
    ] = 1024
    buffer_rows: Annotated[
        int, _limit(help="Token rows that a stream may be ahead of its client before the request is paused.")
    ] = 100
    max_stored: Annotated[
        int,
        _limit(
            help="Maximum stored responses of /v1/responses; when full, the oldest response of the key "
            "that stores most is deleted."
        ),
    ] = 256
    max_stored_bytes: Annotated[
        int, _limit(help="Maximum total size of stored responses and their conversations, in bytes of JSON.")
    ] = 64 << 20
    header_timeout_s: Annotated[
        float,
        _time(help="Maximum time to wait for a request on an open connection, and for its header to arrive."),
    ] = 10.0
    body_timeout_s: Annotated[float, _time(help="Maximum time for the body of a request to arrive.")] = 30.0
    wait_timeout_s: Annotated[
        float, _time(help="Maximum time that a request waits for capacity before it gets 429.")
    ] = 30.0
    write_timeout_s: Annotated[
        float,
        _time(help="Maximum time that a client may leave sent data unread; then the connection is closed."),
    ] = 30.0
    stall_s: Annotated[float, _time(help="Time in one step after which the engine counts as stuck.")] = 60.0
    drain_s: Annotated[
        float,
        _time(
            help="Time for requests in progress to finish after SIGTERM or Ctrl-C; a second signal aborts "
            "them."
        ),
    ] = 30.0
    log_level: Annotated[str, _log(help="Minimum level of messages: debug, info, warning or error.")] = "info"
    log_format: Annotated[str, _log(help="text, or json for one JSON object per line.")] = "text"
    access_log: Annotated[bool, _log(help="Log a line for each finished request.")] = True
    enable_log_requests: Annotated[
        bool,
        _log(help="Log the bodies of requests."),
    ] = False

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
        for setting in self.lora_modules:
            name, _, path = setting.partition("=")
            require(
                name and path,
                "lora_modules",
                f"must be NAME=PATH of a folder of LoRA weights, got {setting!r}",
            )
        for setting in self.confidence:
            name, _, path = setting.partition("=")
            require(name and path, "confidence", f"must be NAME=FILE of a confidence fit, got {setting!r}")
        for setting in self.also_model:
            name, _, model = setting.partition("=")
            require(name and model, "also_model", f"must be NAME=MODEL, got {setting!r}")
        for origin in self.allowed_origins:
            is_origin = origin in {"*", "null"} or ("://" in origin and origin[0] != "[")
            remedy = "must be an origin such as https://example.com, or *; repeat the flag for several"
            require(is_origin, "allowed_origins", remedy, got=origin)
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
        names = {"model_name": name, "served_model_name": (), "lora_modules": (), "response_template": None}
        return cls(config, replace(settings, **names | {"confidence": ()} | own))

    @property
    def names(self) -> tuple[str, ...]:
        """Further names of the model."""
        return self.settings.served_model_name

    @property
    def loras(self) -> tuple[str, ...]:
        """Names of the LoRA weights that are loaded with the model."""
        return tuple(setting.partition("=")[0] for setting in self.settings.lora_modules)


OWN_SETTINGS: Final = (
    "served_model_name",
    "lora_modules",
    "response_template",
    "confidence",
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
    """Reject keys that could be guessed, or that clients encode differently.

    Raises:
        ParameterError: a key is empty, has other characters than visible ASCII, or is shorter than
            `MIN_KEY_CHARS` while `is_public` is set.
    """
    require(all(keys), name, "a key is empty; leave it out")
    is_visible = all(key.isascii() and key.isprintable() and " " not in key for key in keys)
    require(is_visible, name, "each key must consist of visible ASCII characters, without spaces")
    is_long = not is_public or all(len(key) >= MIN_KEY_CHARS for key in keys)
    remedy = f"must have at least {MIN_KEY_CHARS} characters if other machines can reach the server"
    require(is_long, name, f"each key {remedy}; create one with `openssl rand -hex 24`")


def read_confidences(settings: ServerSettings) -> dict[str, FittedConfidence]:
    """Read the confidence fits in the settings; return a map from name to fit.

    Raises:
        ParameterError: a file cannot be read, or is not a confidence fit.
    """
    fits: dict[str, FittedConfidence] = {}
    for setting in settings.confidence:
        from logprobe.analysis.confidence import FittedConfidence

        name, _, path = setting.partition("=")
        try:
            fits[name] = FittedConfidence.load(path)
        except InputError as error:
            raise ParameterError("confidence", str(error)) from error
    return fits


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
