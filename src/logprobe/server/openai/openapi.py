"""Generate the OpenAPI document from the route table and the types of bodies and replies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logprobe import __version__
from logprobe.server.openai import bodies, schemas

if TYPE_CHECKING:
    from collections.abc import Iterable

_REF: Final = "#/components/schemas/{name}"
_STREAMED: Final = {"/v1/chat/completions", "/v1/completions", "/v1/responses"}
_BINARY: Final = {"schema": {"type": "string", "format": "binary"}}
_TEXT: Final = {"schema": {"type": "string"}}


def document(routes: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
    """Return the OpenAPI document for routes, which are given as (method, path, handler)."""
    types = [*bodies.BODIES.values(), *schemas.REPLIES.values()]
    types += [schemas.ChatCompletionChunk, schemas.Error, schemas.Facts]
    _, parts = msgspec.json.schema_components(types, ref_template=_REF)
    for body in (*bodies.BODIES.values(), *bodies.NESTED.values()):
        parts[body.__name__].pop("additionalProperties", None)  # unknown fields may be ignored
    paths: dict[str, Any] = {}
    for method, path, handler in routes:
        summary = (handler.__doc__ or "").strip().split("\n")[0]
        template = path.replace(":path", "")
        paths.setdefault(template, {})[method.lower()] = _operation(method, template, summary)
    return {
        "openapi": "3.1.0",
        "info": {"title": "logprobe", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": parts,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(method: str, path: str, summary: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": f"{method.lower()}{re.sub('[^a-z0-9]+', '_', path)}",
        "responses": {
            "200": {"description": "Successful response.", "content": _contents(method, path)},
            "default": {
                "description": "Error; the message says how to correct the request.",
                "content": {"application/json": {"schema": _ref(schemas.Error)}},
            },
        },
    }
    if path in bodies.BODIES and method == "POST":
        content = {"application/json": {"schema": _ref(bodies.BODIES[path])}}
        operation["requestBody"] = {"required": True, "content": content}
    named = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if parameters := named + list(bodies.QUERIES.get(path, ())):
        operation["parameters"] = parameters
    return operation


def _contents(method: str, path: str) -> dict[str, Any]:
    """Return the schema of a route's successful reply, by media type."""
    if path in {"/", "/docs"}:
        return {"text/html": _TEXT}
    if path == "/metrics":
        return {"text/plain": _TEXT}
    if path in {"/v1/next_token_logprobs", "/v1/hidden_states"}:
        return {"application/vnd.safetensors": _BINARY}
    reply = schemas.REPLIES.get(f"{method} {path}", schemas.Facts)
    contents: dict[str, Any] = {"application/json": {"schema": _ref(reply)}}
    if method == "POST" and path in _STREAMED:
        contents["text/event-stream"] = _TEXT
        contents["application/vnd.apache.parquet"] = _BINARY
    if path == "/v1/loglikelihood" or path in _STREAMED:
        contents["application/vnd.apache.arrow.stream"] = _BINARY
    return contents


def _ref(reply: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=reply.__name__)}
