"""Server shutdown: it drains, late requests get an error, and a second signal ends it at once."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from logprobe.testing import holding_steps
from server_process import PATIENCE_S, Attacked, eventually, serving_process

ATTACKS = Path(__file__).parent / "attacks"
BODY = {"prompt": "the cat", "max_tokens": 60, "ignore_eos": True}
SLOW = {**BODY, "stream": True, "logits_processors_args": {"sleep_s": 0.5}}


def events_of(lines: Any) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_what_is_cut_off_ends_with_an_error_and_what_comes_late_is_sent_away(
    path: str, new_server: Any, tiny_llm: Any
) -> None:
    body = BODY if path == "/v1/completions" else {"input": "the cat", "max_output_tokens": 60}
    with new_server(drain_s=2.0) as server:
        found: dict[bool, httpx.Response] = {}

        def ask(is_stream: bool) -> None:
            found[is_stream] = server.post(path, **body, stream=is_stream)

        threads = [threading.Thread(target=ask, args=(is_stream,)) for is_stream in (False, True)]
        with holding_steps(tiny_llm.engine):
            for thread in threads:
                thread.start()
            eventually(lambda: server.service.limits.in_use()["requests"] == 2, "they are not in progress")
            server.service.lifetime.is_draining = True
            for late in (server.post("/v1/completions", **BODY), server.get("/ready")):
                assert late.status_code == 503
                assert late.headers["retry-after"] == "2"
                assert late.json()["error"]["code"] == "draining"
            for probe in (server.get("/health"), server.get("/ping"), server.post("/ping")):
                assert (probe.status_code, probe.json()) == (200, {"status": "draining"})
            assert server.get("/v1/models").status_code == 200
            server.service.lifetime.is_over = True
            for thread in threads:
                thread.join(PATIENCE_S)
        assert found[False].status_code == 503
        assert found[False].json()["error"]["code"] == "shut_down"
        events = events_of(found[True].text.splitlines())
        if path == "/v1/completions":
            assert events.pop() == "[DONE]"
        assert "shut_down" in events[-1]


def slow_stream(server: Attacked, then: Any) -> tuple[list[str], bool]:
    """Stream at half a second per token; return the events, and whether the stream was cut off."""
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    events: list[str] = []
    try:
        with httpx.stream("POST", url, json=SLOW, timeout=PATIENCE_S) as reply:
            for line in filter(None, reply.iter_lines()):
                events += events_of([line])
                if len(events) == 1:
                    then()
    except httpx.RemoteProtocolError:
        return events, True
    return events, False


def serving_slowly(folder: Path, *flags: str) -> Any:
    return serving_process(folder, "--logits-processors", "hostile_processors:FaultyLogitsProcessor", *flags)


def test_a_server_process_says_what_it_waits_for_and_ends_what_is_late(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ATTACKS), prepend=os.pathsep)
    with serving_slowly(tiny_model_folder, "--drain-s", "1") as server:
        events, is_cut = slow_stream(server, lambda: server.process.send_signal(signal.SIGTERM))
        assert server.process.wait(PATIENCE_S) == 0
    assert not is_cut
    assert events.pop() == "[DONE]"
    assert json.loads(events.pop())["error"]["code"] == "shut_down"
    assert len(events) < SLOW["max_tokens"]
    log = "".join(server.log)
    assert "1 requests in progress have 1 s to finish" in log
    assert "1 requests did not finish in time" in log


def test_a_second_signal_ends_a_server_at_once(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ATTACKS), prepend=os.pathsep)
    with serving_slowly(tiny_model_folder, "--drain-s", "1000") as server:

        def interrupt_twice() -> None:
            server.process.send_signal(signal.SIGINT)
            eventually(
                lambda: "1 requests in progress" in "".join(server.log), "it does not say what it waits for"
            )
            server.process.send_signal(signal.SIGINT)

        events, is_cut = slow_stream(server, interrupt_twice)
        assert server.process.wait(PATIENCE_S) == 130
    assert is_cut or "[DONE]" not in events
    assert len(events) < SLOW["max_tokens"]
