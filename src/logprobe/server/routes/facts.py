"""Informational routes: web page, health, models, capabilities, processors, metrics and tokenizer."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import asdict
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response

from logprobe import __version__
from logprobe.ignored_kwargs import FIELDS_WITHOUT_EFFECT, NEUTRAL_FIELDS
from logprobe.server.http.decode import read
from logprobe.server.http.errors import bad_request, engine_unavailable
from logprobe.server.http.replies import Document, json_reply
from logprobe.server.limits import limit_table
from logprobe.server.openai.bodies import DetokenizeBody, TokenizeBody
from logprobe.server.openai.fields import ENGINE_FIELDS, LOGPROBS_FIELDS, SAMPLING_FIELDS
from logprobe.server.openai.ignored_fields import CONDITIONS, TEMPLATE_FIELDS
from logprobe.server.openai.prompts import check_texts, encode_messages, layout_of
from logprobe.server.openai.tools import functions_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from logprobe.server.service import Service


PAGE_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def health(_: HttpRequest, service: Service) -> Response:
    """Check that the server and its engines are alive; 503 means that the server must be restarted."""
    for one in service.models.loaded:
        one.check_engine()
    return json_reply({"status": "draining" if service.lifetime.is_draining else "ok"})


async def ready(_: HttpRequest, service: Service) -> Response:
    """Check that new requests are accepted; 503 during shutdown or while no engine process is running."""
    service.check_engine()
    service.lifetime.check_open()
    stats = service.engine.stats()
    if not stats.is_up:
        raise engine_unavailable(stats.why_down)
    down = {"down": stats.why_down} if stats.why_down else {}
    return json_reply({"status": "ready", **down})


async def version(_: HttpRequest, __: Service) -> Response:
    """Return the version of this server, in vLLM's format."""
    return json_reply({"version": __version__})


async def models(request: HttpRequest, service: Service) -> Response:
    """List the models and LoRA weights, under all names that requests may use."""
    return Document.of(msgspec.json.encode({"object": "list", "data": _models(service)})).reply(request)


async def model(request: HttpRequest, service: Service) -> Response:
    """Describe a model or LoRA weights."""
    name = request.path_params["model"]
    entries = {entry["id"]: entry for entry in _models(service)}
    if name not in entries:
        service.check_model(name)
        owner = service.models.owner_of(name) or service
        name = owner.model_name  # an alias returns the entry of its model
    return json_reply(entries[name])


async def capabilities(_: HttpRequest, service: Service) -> Response:
    """Describe what the engine supports, the accepted fields, and the limits and their current usage."""
    return json_reply(
        asdict(service.engine.capabilities())
        | {
            "logprobs_mode": service.settings.logprobs_mode,
            "max_logprobs": service.settings.max_logprobs,
            "max_logprobs_of": dict.fromkeys(LOGPROBS_FIELDS, service.settings.max_logprobs),
            "fields": sorted(set(SAMPLING_FIELDS) & ENGINE_FIELDS),
            "unsupported_fields": sorted({*SAMPLING_FIELDS, *NEUTRAL_FIELDS} - ENGINE_FIELDS),
            "fields_without_effect": sorted(
                FIELDS_WITHOUT_EFFECT.keys() - CONDITIONS.keys() - TEMPLATE_FIELDS
            ),
            "reply_form": _reply_form(service),
            "limits": limit_table(service.settings),
            "in_use": service.limits.in_use(),
        }
    )


async def server_info(_: HttpRequest, service: Service) -> Response:
    """Return the configuration in vLLM's format, as trainers query it before they start."""
    facts = service.engine.capabilities()
    config = {
        "model_config": {
            "model": service.model_name,
            "dtype": f"torch.{facts.dtype}",
            "max_model_len": facts.max_model_len,
            "logprobs_mode": service.settings.logprobs_mode,
            "max_logprobs": service.settings.max_logprobs,
        },
        "parallel_config": {"world_size": 1, "data_parallel_size": _world_size(service)},
        "lora_config": None,  # only operators load LoRA weights
        "weight_transfer_config": None,  # weights are loaded from files
    }
    return json_reply({"vllm_config": config})


async def get_world_size(_: HttpRequest, service: Service) -> Response:
    """Return the number of engine processes (at least 1)."""
    return json_reply({"world_size": _world_size(service)})


def _world_size(service: Service) -> int:
    return max(service.engine.capabilities().num_processes, 1)


def _reply_form(service: Service) -> dict[str, Any] | None:
    """Describe the format by which replies are split into channels; None if replies are not split."""
    form = service.reply_form()
    if form is None:
        return None
    return {"name": form.name, "has_reasoning": form.has_reasoning, "tools": form.tools}


async def logits_processors(request: HttpRequest, service: Service) -> Response:
    """List the registered logits processors, and others with which the server can be started."""
    return await service.documents.reply(request, "logits_processors", lambda: _processors(service))


def _processors(service: Service) -> bytes:
    from logprobe.processors import available_processors, describe_processor

    registered = [describe_processor(processor) | {"registered": True} for processor in service.processors]
    names = {description["name"] for description in registered}
    others = [describe_processor(name) for name in available_processors()]
    rest = [entry | {"registered": False} for entry in others if entry["name"] not in names]
    return msgspec.json.encode({"object": "list", "data": registered + rest})


async def metrics(_: HttpRequest, service: Service) -> Response:
    """Return all metrics in Prometheus' text format."""
    text = await service.metrics.text()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def tokenize(request: HttpRequest, service: Service) -> Response:
    """Convert a text or a conversation to token ids."""
    return await read(request, service, TokenizeBody, _tokenized)


def _tokenized(body: TokenizeBody, service: Service) -> Response:
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt", "give either prompt or messages")
    if body.messages is not None:
        ids = encode_messages(body.messages, service, layout_of(body, service, functions_of(body.tools)))
    else:
        assert body.prompt is not None
        check_texts([body.prompt], "prompt", service, is_whole=False)
        ids = service.text.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    tokens: list[int] = ids.tolist()
    reply: dict[str, Any] = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": service.capabilities.max_model_len,
    }
    if body.return_token_strs:
        reply["token_strs"] = [service.text.vocabulary.token_text(token_id) for token_id in tokens]
    return json_reply(reply)


async def detokenize(request: HttpRequest, service: Service) -> Response:
    """Convert token ids to text; invalid UTF-8 is shown as U+FFFD."""
    return await read(request, service, DetokenizeBody, _detokenized)


def _detokenized(body: DetokenizeBody, service: Service) -> Response:
    service.check_model(body.model)
    outside = [token_id for token_id in body.tokens if not 0 <= token_id < service.vocab_size][:1]
    if outside:
        raise bad_request("tokens", f"token id {outside[0]} is outside [0, {service.vocab_size})")
    data = service.text.vocabulary.bytes_of(body.tokens)
    return json_reply({"prompt": data.decode("utf-8", "replace")})


async def tokenizer(request: HttpRequest, service: Service) -> Response:
    """Return the tokenizer as a `tokenizer.json`, so that clients can tokenize locally."""
    to_json = service.text.backend.to_str
    return await service.documents.reply(request, "tokenizer", lambda: to_json().encode())


async def tokenizer_info(request: HttpRequest, service: Service) -> Response:
    """Return special tokens, chat template and vocabulary size of the tokenizer."""
    return await service.documents.reply(request, "tokenizer_info", lambda: _tokenizer_info(service))


def _tokenizer_info(service: Service) -> bytes:
    text, source = service.text, service.text.template_source
    special = {name: source.special_tokens_map.get(name) for name in ("eos_token", "bos_token", "pad_token")}
    ids = {
        f"{name}_id": None if token is None else text.backend.token_to_id(token)
        for name, token in special.items()
    }
    facts = {**special, **ids, "chat_template": source.chat_template, "vocab_size": service.vocab_size}
    return msgspec.json.encode(facts)


def _models(service: Service) -> list[dict[str, Any]]:
    """Return a model entry for every name that a request may use.

    The entries are not cached, because LoRA adapters can be loaded and unloaded.
    """
    loaded = [_model(one, *served) for one in service.models.loaded for served in one.served()]
    asleep = [
        {"id": name, "object": "model", "created": service.created, "owned_by": "logprobe"}
        for name in service.models.asleep()
    ]
    states = [(loaded, "loaded"), (asleep, "unloaded")]  # as in llama.cpp's server
    return [entry | {"status": {"value": state}} for entries, state in states for entry in entries]


def _model(service: Service, name: str, folder: str | None) -> dict[str, Any]:
    base = {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "logprobe",
        "max_model_len": service.capabilities.max_model_len,
        "weight_version": service.engine.capabilities().weight_version,
        "quantization": service.engine.capabilities().quantization,
    }
    return base if folder is None else base | {"root": folder, "parent": service.model_name}


async def page(_: HttpRequest, __: Service) -> Response:
    """Return the web page that shows the log-probabilities of a text's tokens."""
    html, policy = assemble()
    headers = PAGE_HEADERS | {"Content-Security-Policy": policy}
    return Response(html, media_type="text/html", headers=headers)


@cache
def assemble() -> tuple[bytes, str]:
    """Return the HTML page, and a Content-Security-Policy that allows only its own script and style."""
    folder = resources.files("logprobe.server") / "page"
    style, script = ((folder / name).read_text("utf-8") for name in ("page.css", "page.js"))
    html = (folder / "page.html").read_text("utf-8")
    whole = html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    rules = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "script-src": hashed(script),
        "style-src": hashed(style),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return whole.encode(), "; ".join(f"{name} {value}" for name, value in rules.items())


def hashed(text: str) -> str:
    """Return the source expression of an inline script or style for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
