"""The web page as served: one file, its own CSP, no key; tests in a browser are in tests/web."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from logprobe.server.routes.facts import assemble
from server_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


def test_the_page_needs_no_key_and_tells_browsers_what_it_may_do(new_server: Callable[..., Any]) -> None:
    with new_server(api_key=("secret",)) as running:
        reply = running.get("/")
        assert running.get("/v1/models").status_code == 401
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    rules = dict(rule.split(" ", 1) for rule in reply.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", reply.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_page_of_the_api_needs_no_key_and_no_network(new_server: Callable[..., Any]) -> None:
    with new_server(api_key=("secret",)) as running:
        reply = running.get("/docs")
        described = httpx.get(
            f"{running.url}/openapi.json", headers={"Authorization": "Bearer secret"}, timeout=PATIENCE_S
        ).json()
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert reply.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"https?://|<script|<link[^>]+href=\"(?!data:)", reply.text)
    for path, operations in described["paths"].items():
        for method in operations:
            assert f"<b>{method.upper()}</b> <code>{path}</code>" in reply.text
    links = set(re.findall(r'href="#([^"]+)"', reply.text))
    assert links <= set(re.findall(r'id="([^"]+)"', reply.text)) == set(described["components"]["schemas"])
    assert "<code>truncate_prompt_tokens</code><td>integer ≥ -1 or null" in reply.text


def test_the_page_fetches_nothing_from_outside() -> None:
    html = assemble()[0].decode()
    outside = re.findall(r"https?://[^\s\"')]+", html)
    assert set(outside) == {"http://www.w3.org/2000/svg"}  # an XML namespace, not a request
    assert not re.search(r"<(link|script|img|iframe)[^>]+(src|href)=\"(?!data:)", html)
    assert "innerHTML" not in html


def test_the_pictures_are_of_this_page() -> None:
    found = json.loads((PICTURES / "page.json").read_text())
    expected = hashlib.sha256(assemble()[0]).hexdigest()
    if found["page_sha256"] != expected:
        pytest.fail(
            "the page has changed since its pictures were made: run `make screenshots` and look at them"
        )
    for name in ("page", "page-dark", "page-768", "page-380", "page-json"):
        assert (PICTURES / f"{name}.png").stat().st_size > 10_000
