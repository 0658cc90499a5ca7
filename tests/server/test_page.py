"""The web page as served: one file, its own CSP, no key; tests in a browser are in tests/web."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.server.routes.facts import assemble

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
