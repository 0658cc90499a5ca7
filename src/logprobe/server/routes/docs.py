"""`GET /openapi.json` returns the OpenAPI document; `GET /docs` shows it as a web page without scripts."""

from __future__ import annotations

import json
from functools import cache
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response

from logprobe.server.openai.openapi import document
from logprobe.server.routes.facts import PAGE_HEADERS, hashed

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from logprobe.server.service import Service

    Schema = dict[str, Any]

REF: Final = "#/components/schemas/"


async def openapi(request: HttpRequest, service: Service) -> Response:
    """Return the OpenAPI document of this server."""
    routes = request.app.state.routes
    return await service.documents.reply(request, "openapi", lambda: json.dumps(document(routes)).encode())


async def docs(request: HttpRequest, _: Service) -> Response:
    """Return a web page of all routes with their fields."""
    html, policy = assemble_docs(request.app.state.routes)
    headers = PAGE_HEADERS | {"Content-Security-Policy": policy}
    return Response(html, media_type="text/html", headers=headers)


@cache
def assemble_docs(routes: tuple[tuple[str, str, Any], ...]) -> tuple[bytes, str]:
    """Return the page for these routes, and a Content-Security-Policy that allows only its own style."""
    folder = resources.files("logprobe.server") / "page"
    style, html = ((folder / name).read_text("utf-8") for name in ("docs.css", "docs.html"))
    described = document(routes)
    schemas = described["components"]["schemas"]
    sections = [
        _operation(method, path, operation, schemas)
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
    ]
    named = [
        f'<h3 id="{escape(name)}">{escape(name)}</h3>{_fields(one)}' for name, one in sorted(schemas.items())
    ]
    whole = (
        html.replace("/*STYLE*/", style)
        .replace("<!--VERSION-->", escape(described["info"]["version"]))
        .replace("<!--ROUTES-->", "\n".join(sections))
        .replace("<!--SCHEMAS-->", "\n".join(named))
    )
    rules = f"default-src 'none'; img-src data:; style-src {hashed(style)}"
    return whole.encode(), f"{rules}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Schema]) -> str:
    heading = f"<b>{method.upper()}</b> <code>{escape(path)}</code> {escape(operation['summary'])}"
    parts = []
    for parameter in operation.get("parameters", ()):
        kind = f"{_type(parameter['schema'])}, in the {parameter['in']}"
        parts.append(f"<p><code>{escape(parameter['name'])}</code>: {kind}</p>")
    if "requestBody" in operation:
        schema = _schema_of(operation["requestBody"]["content"])
        parts.append(f"<h4>Request</h4>{_fields(schemas[_name(schema)])}")
    replies = operation["responses"]["200"]["content"].items()
    shown = ", ".join(f"{escape(kind)}: {_type(content['schema'])}" for kind, content in replies)
    parts.append(f"<h4>Reply</h4><p>{shown}</p>")
    return f"<details><summary>{heading}</summary>{''.join(parts)}</details>"


def _schema_of(contents: dict[str, Any]) -> Schema:
    schema: Schema = contents["application/json"]["schema"]
    return schema


def _fields(schema: Schema) -> str:
    """Return a table of an object's fields."""
    required = schema.get("required", ())
    about = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    rows = []
    for name, field in schema.get("properties", {}).items():
        default = "required" if name in required else _default(field)
        rows.append(f"<tr><td><code>{escape(name)}</code><td>{_type(field)}<td>{default}")
    return about + (f"<table><tr><th>field<th>type<th>default{''.join(rows)}</table>" if rows else "")


def _default(field: Schema) -> str:
    return f"<code>{escape(json.dumps(field['default']))}</code>" if field.get("default") is not None else ""


def _type(schema: Schema) -> str:
    """Return a type as HTML, with links to the schemas it refers to."""
    if "$ref" in schema:
        name = escape(_name(schema))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array" and "items" in schema and schema["items"]:
        return f"list of {_type(schema['items'])}"
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
    limits = [f" {sign} {schema[name]}" for name, sign in bounds.items() if name in schema]
    return escape(str(schema.get("type", "any")) + ",".join(limits))


def _name(schema: Schema) -> str:
    name: str = schema["$ref"]
    return name.removeprefix(REF)
