"""`GET /`: the page, one self-contained file that uses nothing but this server's public API."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from logprobe.server.service import Service


async def page(_: HttpRequest, __: Service) -> Response:
    """Give the page for people: type a text and see the numbers of every token."""
    html, policy = assemble()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(html, media_type="text/html", headers=headers)


@cache
def assemble() -> tuple[bytes, str]:
    """The file, and the policy under which a browser runs its own script and style and no others."""
    folder = resources.files("logprobe.server") / "page"
    style, script = ((folder / name).read_text("utf-8") for name in ("page.css", "page.js"))
    html = (folder / "page.html").read_text("utf-8")
    whole = html.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    rules = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "script-src": _hashed(script),
        "style-src": _hashed(style),
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return whole.encode(), "; ".join(f"{name} {value}" for name, value in rules.items())


def _hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
