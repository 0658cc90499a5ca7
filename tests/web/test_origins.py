"""In a real Chromium, pages of other origins can neither read nor use the server; allowed origins can."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from server_process import serving_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from server_process import Attacked

BODY = '{"prompt": "the cat", "max_tokens": 1}'
# The result of a request in a page: its text, or that the browser blocked it.
ASK = """async ([url, options]) => {
    try {
        const response = await fetch(url, options);
        return [response.type, response.status, await response.text()];
    } catch (error) {
        return ["refused", 0, String(error)];
    }
}"""
SEND_FORM = """([url, body, type]) => {
    const form = document.createElement("form");
    form.action = url; form.method = "post"; form.enctype = type; form.target = "frame";
    const field = document.createElement("input");
    field.name = body; field.value = "";
    form.append(field);
    document.body.append(form);
    form.submit();
}"""


class Page(BaseHTTPRequestHandler):
    """An empty page with a frame as the target of forms."""

    def do_GET(self) -> None:
        data = b'<!doctype html><meta charset="utf-8"><title>p</title><iframe name="frame"></iframe>'
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Suppress the default log."""


def pages() -> tuple[ThreadingHTTPServer, threading.Thread]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    return server, thread


@pytest.fixture(scope="module")
def origins() -> Iterator[tuple[str, str]]:
    made = [pages(), pages()]
    try:
        first, second = (f"http://127.0.0.1:{server.server_port}" for server, _ in made)
        yield first, second
    finally:
        for server, thread in made:
            server.shutdown()
            thread.join()
            server.server_close()


@pytest.fixture(scope="module")
def guarded(tiny_model_folder: Path, origins: tuple[str, str]) -> Iterator[Attacked]:
    """A server that allows the second origin."""
    with serving_process(tiny_model_folder, "--allowed-origins", origins[1]) as server:
        yield server


@pytest.fixture
def page(new_tab: Any) -> Any:
    return new_tab()


def num_requests(server: Attacked) -> float:
    """Return the number of engine requests that have ended."""
    told = server.get("/metrics").data.decode()
    return sum(
        float(value) for value in re.findall(r"^logprobe_requests_total\{.*\} (\S+)$", told, re.MULTILINE)
    )


def url_of(server: Attacked, path: str, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{server.port}{path}"


def post(media_type: str, **more: str) -> dict[str, Any]:
    return {"method": "POST", "body": BODY, "headers": {"Content-Type": media_type}, **more}


@pytest.mark.parametrize(
    "options",
    [
        post("application/json"),
        post("text/plain"),
        post("text/plain", mode="no-cors"),
        post("application/x-www-form-urlencoded", mode="no-cors"),
        {},
    ],
    ids=["JSON", "text", "opaque text", "opaque form", "reading"],
)
def test_a_page_of_another_origin_reads_nothing_and_starts_nothing(
    guarded: Attacked, page: Any, origins: tuple[str, str], options: dict[str, Any]
) -> None:
    before = num_requests(guarded)
    page.goto(origins[0])
    path = "/v1/completions" if options else "/v1/models"
    kind, status, text = page.evaluate(ASK, [url_of(guarded, path), options])
    assert kind in {"refused", "opaque"}
    assert (status, "logprobe" in text, "tiny" in text) == (0, False, False)
    assert num_requests(guarded) == before


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_a_form_starts_nothing(
    guarded: Attacked, page: Any, origins: tuple[str, str], media_type: str
) -> None:
    before = num_requests(guarded)
    page.goto(origins[0])
    with page.expect_response(url_of(guarded, "/v1/completions")) as sent:
        page.evaluate(SEND_FORM, [url_of(guarded, "/v1/completions"), BODY, media_type])
    assert sent.value.status == 403
    assert num_requests(guarded) == before


def test_a_name_that_was_rebound_to_this_machine_reads_nothing(
    guarded: Attacked, page: Any, other_name: str
) -> None:
    before = num_requests(guarded)
    answer = page.goto(url_of(guarded, "/v1/models", other_name))
    assert answer.status == 403
    # From here on a script of that name calls its own origin, which no browser blocks.
    for options in ({}, post("application/json")):
        path = "/v1/completions" if options else "/v1/models"
        kind, status, text = page.evaluate(ASK, [path, options])
        assert (kind, status) == ("basic", 403)
        assert "host_not_allowed" in text
    assert num_requests(guarded) == before


def test_a_page_of_an_allowed_origin_reads_and_drives(
    guarded: Attacked, page: Any, origins: tuple[str, str]
) -> None:
    page.goto(origins[1])
    assert page.evaluate(ASK, [url_of(guarded, "/v1/models"), {}])[1] == 200
    kind, status, text = page.evaluate(ASK, [url_of(guarded, "/v1/completions"), post("application/json")])
    assert (kind, status) == ("cors", 200)
    assert '"choices"' in text
