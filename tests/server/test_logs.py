"""Server logs: one line per request, as text or JSON, without content of clients."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.server import ServerSettings
from logprobe.server.logs import JsonLines, TextLines
from server_process import Attacked, eventually, serving_process

if TYPE_CHECKING:
    from pathlib import Path

WORDS = "a-text-of-the-client"
A_DAY = timedelta(days=1)


def asked(server: Attacked) -> None:
    """Send a normal, a streamed and an invalid request, a probe, and one to an unknown path."""
    body = {"prompt": f"the cat {WORDS}", "max_tokens": 3, "ignore_eos": True}
    server.send("/v1/completions", json.dumps(body).encode(), X_Request_Id="mine-1")
    server.send("/v1/completions", json.dumps(body | {"stream": True}).encode(), X_Request_Id="mine-2")
    server.send("/v1/completions", json.dumps({WORDS: 1}).encode(), X_Request_Id="mine 3 has spaces")
    server.get("/health")
    server.get(f"/{WORDS}")


def lines_of(server: Attacked, num: int, of: str) -> list[str]:
    eventually(lambda: sum(of in line for line in server.log) >= num, "lines are missing")
    return [line for line in server.log if of in line]


def test_a_line_of_json_tells_what_each_request_came_to(tiny_model_folder: Path) -> None:
    with serving_process(tiny_model_folder, "--log-format", "json", "--served-model-name", "tiny") as server:
        asked(server)
        found = [*map(json.loads, lines_of(server, 4, '"logprobe.access"'))]
    # A line is written when its request has ended, which is after the client has the whole reply.
    by_id = {one["request_id"]: one for one in found}
    whole, stream = by_id.pop("mine-1"), by_id.pop("mine-2")
    refused, unknown = sorted(by_id.values(), key=lambda one: one["status"])
    assert {one["client"] for one in (whole, stream, refused, unknown)} == {"127.0.0.1"}
    assert whole["request_id"] == "mine-1"
    assert (whole["method"], whole["route"], whole["status"], whole["model"]) == (
        "POST",
        "/v1/completions",
        200,
        "tiny",
    )
    assert whole["completion_tokens"] == stream["completion_tokens"] == 3
    assert whole["prompt_tokens"] == stream["prompt_tokens"] > 1
    assert stream["request_id"] == "mine-2"
    assert 0 < stream["first_token_s"] <= stream["seconds"]
    assert (refused["status"], unknown["status"], unknown["route"]) == (400, 404, None)
    assert re.fullmatch("req_[0-9a-f]{32}", refused["request_id"])
    lines = [json.loads(line) for line in server.log]
    assert all(line["level"] for line in lines)
    assert all(abs(datetime.now(UTC) - datetime.fromisoformat(line["time"])) < A_DAY for line in lines)
    assert WORDS not in "".join(server.log)


def test_lines_of_text_say_the_same_and_can_be_turned_off(tiny_model_folder: Path) -> None:
    with serving_process(tiny_model_folder) as server:
        asked(server)
        found = lines_of(server, 4, "logprobe.access")
    whole, stream = (next(line for line in found if name in line) for name in ("[mine-1]", "[mine-2]"))
    assert re.search(
        r"127.0.0.1 POST /v1/completions: 200 by \S+ in [\d.]+ s, \d+ \+ 3 tokens \[mine-1\]$", whole
    )
    assert re.search(r", first token after [\d.]+ s, \d+ \+ 3 tokens \[mine-2\]$", stream)
    assert WORDS not in "".join(server.log)
    with serving_process(tiny_model_folder, "--no-access-log", "--log-level", "debug") as server:
        asked(server)
    assert not [line for line in server.log if "logprobe.access" in line]


def test_bodies_are_logged_where_the_operator_asks_for_them(tiny_model_folder: Path) -> None:
    with serving_process(tiny_model_folder, "--enable-log-requests") as server:
        asked(server)
        [line, *_] = lines_of(server, 1, WORDS)
    assert "[mine-1]" in line


@pytest.mark.parametrize("formatter", [TextLines(), JsonLines()])
def test_no_line_begins_where_a_client_wants_it_to(formatter: logging.Formatter) -> None:
    forged = "a\n2026-01-01 INFO logprobe: forged\r\x1b[31m\u2028"
    error = ValueError(forged)
    record = logging.LogRecord("x", logging.ERROR, "", 0, "said %s", (forged,), (type(error), error, None))
    lines = formatter.format(record).splitlines()
    assert len(lines) == 1 or all(line.startswith("  | ") for line in lines[1:])
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(("name", "value"), [("log_level", "loud"), ("log_format", "xml")])
def test_words_that_are_none_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: must be one of"):
        ServerSettings(**{name: value})


def test_a_reply_bears_the_id_that_its_client_gave_it(server: Any) -> None:
    import httpx

    for given in ("abc-1", "a" * 128):
        assert (
            httpx.get(f"{server.url}/health", headers={"X-Request-Id": given}).headers["x-request-id"]
            == given
        )
    for given in ("a" * 129, "two words"):
        assert (
            httpx.get(f"{server.url}/health", headers={"X-Request-Id": given}).headers["x-request-id"]
            != given
        )
