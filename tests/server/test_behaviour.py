"""Keys, limits, clients that disconnect or lag, and server shutdown."""

from __future__ import annotations

import gzip
import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from logprobe.server import ServerSettings
from logprobe.testing import check_integrity, failing_steps, holding_steps
from server_process import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG = {"prompt": "the cat", "max_tokens": 120, "ignore_eos": True}


def stats(server: Any) -> Any:
    return server.service.engine.stats()


def is_idle(server: Any) -> bool:
    now = stats(server)
    return now.running == now.waiting == 0 and set(server.service.limits.in_use().values()) == {0}


@contextmanager
def raw_request(server: Any, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request on a raw socket with a small receive window, so that slow reading takes effect at once."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
    head += "\r\nContent-Type: application/json"
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = server.url.removeprefix("http://").partition(":")
        link.settimeout(PATIENCE_S)
        link.connect((host, int(port)))
        link.sendall(head.encode() + b"\r\n\r\n" + data)
        yield link


def test_keys_let_in_who_brings_one(new_server: Any) -> None:
    with new_server(api_key=("one", "two")) as server:
        assert server.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/v1/capabilities"):
            refused = server.get(path)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        for key, status in {"one": 200, "two": 200, "onetwo": 401, "o": 401, "ö": 401}.items():
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert (
                httpx.get(f"{server.url}/v1/models", headers=headers, timeout=PATIENCE_S).status_code
                == status
            )


@pytest.mark.parametrize(("path", "status"), [("/v1/chat", 404), ("/v1/chat/completions", 405)])
def test_what_is_no_route_is_named_and_told_where_the_routes_stand(
    server: Any, path: str, status: int
) -> None:
    reply = server.get(path)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, "no_such_route")
    assert error["message"] == f"GET {path} is not a route; GET /docs lists all routes"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/chat/completions"),
        ("POST", "/completions"),
        ("GET", "/models"),
        ("GET", "/models/a/b"),
        ("DELETE", "/responses/resp-1"),
    ],
)
def test_a_base_url_without_v1_is_told_what_it_lacks(server: Any, method: str, path: str) -> None:
    reply = httpx.request(method, server.url + path, timeout=PATIENCE_S)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "no_such_route")
    remedy = f"use /v1{path} (does the client's base_url lack /v1?)"
    assert error["message"] == f"{method} {path} is not a route; {remedy}"


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/v1/embeddings", "POST /v1/rerank"),
        ("/embeddings", "POST /v1/rerank"),
        ("/v1/messages", "POST /v1/chat/completions"),
        ("/v1/classify", "POST /v1/label"),
        ("/classify", "POST /v1/label"),
    ],
)
def test_a_route_of_another_server_is_a_404_that_names_what_to_use(
    server: Any, path: str, remedy: str
) -> None:
    reply = server.post(path, model="default", input="a")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "no_such_route")
    assert remedy in reply.json()["error"]["message"]


def test_openais_client_shows_what_its_base_url_lacks(server: Any) -> None:
    with (
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match=r"use /v1/chat/completions \(does the client's base_url"),
    ):
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": "a"}])


def test_a_body_that_is_too_large_is_refused(new_server: Any) -> None:
    with new_server(max_body_bytes=1000) as server:
        reply = server.post("/v1/completions", prompt="a" * 2000)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("encodings", "status"),
    [
        (["gzip"], 415),
        (["br"], 415),
        (["identity, GZIP"], 415),
        (["identity", "zstd"], 415),
        (["Identity"], 200),
        ([""], 200),
    ],
)
def test_a_compressed_body_is_refused(server: Any, encodings: list[str], status: int) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    data = gzip.compress(body) if encodings == ["gzip"] else body
    headers = [("Content-Type", "application/json"), *(("Content-Encoding", name) for name in encodings)]
    reply = httpx.post(f"{server.url}/v1/completions", content=data, headers=headers, timeout=PATIENCE_S)
    assert reply.status_code == status, reply.text
    if status == 415:
        error = reply.json()["error"]
        assert error["code"] == "unsupported_content_encoding"
        assert "Content-Encoding" in error["message"]
        assert reply.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("settings", [{"max_waiting": 0}, {"wait_timeout_s": 0.05}])
def test_a_full_server_says_when_to_come_back(new_server: Any, settings: dict[str, float]) -> None:
    with new_server(max_requests=2, **settings) as server:
        with (
            holding_steps(server.llm),
            raw_request(server, "/v1/completions", {**LONG, "n": 2, "stream": True}),
        ):
            eventually(lambda: num_in_progress(server) == 2, "the request never began")
            reply = server.post("/v1/completions", prompt="a", max_tokens=1)
            assert reply.status_code == 429
            assert reply.headers["retry-after"] == "1"
            assert reply.json()["error"]["type"] == "rate_limit_error"
        eventually(lambda: is_idle(server), "the request never ended")
        assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
        never = server.post("/v1/completions", prompt="a", n=3)
        assert never.status_code == 400


def num_queued(server: Any) -> float:
    found: float = server.service.metrics.registry.get_sample_value("logprobe_queued_requests")
    return found


@pytest.mark.parametrize("size", ["small", "large"])
def test_requests_wait_for_room_and_are_served_once_there_is(new_server: Any, size: str) -> None:
    body = {"prompt": "a", "max_tokens": 1, **({} if size == "small" else {"user": "a" * 300_000})}
    with new_server(max_requests=2, max_waiting=2, wait_timeout_s=PATIENCE_S) as server:
        with ThreadPoolExecutor(2) as clients:
            with (
                holding_steps(server.llm),
                raw_request(server, "/v1/completions", {**LONG, "n": 2, "stream": True}),
            ):
                eventually(lambda: num_in_progress(server) == 2, "the request never began")
                replies = [clients.submit(server.post, "/v1/completions", **body) for _ in range(2)]
                eventually(lambda: num_queued(server) == 2, "they do not wait")
                assert "logprobe_queued_requests 2.0" in server.get("/metrics").text
                refused = server.post("/v1/completions", **body)
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                assert num_in_progress(server) == 2
            assert [reply.result().status_code for reply in replies] == [200, 200]
        eventually(lambda: is_idle(server), "the requests never ended")
        assert num_queued(server) == 0


def test_a_client_that_leaves_while_it_waits_gives_its_place_back(new_server: Any) -> None:
    with new_server(max_requests=2, max_waiting=1, wait_timeout_s=PATIENCE_S) as server:
        with (
            holding_steps(server.llm),
            raw_request(server, "/v1/completions", {**LONG, "n": 2, "stream": True}),
        ):
            eventually(lambda: num_in_progress(server) == 2, "the request never began")
            for _ in range(2):
                with raw_request(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}):
                    eventually(lambda: num_queued(server) == 1, "it does not wait")
                eventually(lambda: num_queued(server) == 0, "its place is not given back")
        eventually(lambda: is_idle(server), "the request never ended")


def test_a_server_that_ends_tells_requests_that_wait(new_server: Any) -> None:
    with (
        new_server(max_requests=2, wait_timeout_s=PATIENCE_S) as server,
        ThreadPoolExecutor(1) as clients,
        holding_steps(server.llm),
        raw_request(server, "/v1/completions", {**LONG, "n": 2, "stream": True}),
    ):
        eventually(lambda: num_in_progress(server) == 2, "the request never began")
        waiting = clients.submit(server.post, "/v1/completions", prompt="a", max_tokens=1)
        eventually(lambda: num_queued(server) == 1, "it does not wait")
        server.service.lifetime.is_draining = True
        reply = waiting.result()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in reply.headers


@pytest.mark.parametrize(
    ("settings", "body"),
    [
        ({"max_tokens_in_flight": 50}, {"max_tokens": 60}),
        ({"max_logprob_bytes": 10_000}, {"max_tokens": 100, "logprobs": 20}),
    ],
)
def test_tokens_and_bytes_of_logprobs_are_limited(new_server: Any, settings: Any, body: Any) -> None:
    with new_server(**settings) as server:
        assert server.post("/v1/completions", prompt="a", **body).status_code == 400
        assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200


MANY = 10**12


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": MANY}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 20, "n": 3}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "n": 40}, "n"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "best_of": 40}, "best_of"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True, "n": 100}, "n"),
        ("/v1/completions", {"prompt": [5] * 60, "max_tokens": 1}, None),
        ("/v1/chat/completions", {"max_tokens": MANY}, "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": MANY}, "max_completion_tokens"),
        ("/v1/chat/completions", {"max_tokens": MANY, "max_completion_tokens": MANY}, "max_tokens"),
        ("/v1/responses", {"input": "a", "max_output_tokens": MANY}, "max_output_tokens"),
        ("/v1/uncertainty", {"input": "a", "n": 2, "max_tokens": MANY}, "max_tokens"),
        ("/v1/loglikelihood", {"context": [5], "continuations": [[5] * 60]}, None),
    ],
)
def test_a_request_beyond_a_limit_names_the_field_that_makes_it_large(
    new_server: Any, path: str, body: dict[str, Any], param: str | None
) -> None:
    if path.startswith("/v1/chat"):
        body = {"messages": [{"role": "user", "content": "a"}], **body}
    with new_server(max_tokens_in_flight=50, max_requests=64) as server:
        reply = server.post(path, **body)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["param"] == param, error
        assert error["message"].startswith(f"{param}: the request" if param else "the request"), error


def test_a_prompt_counts_once_for_each_choice_that_begins_with_it(new_server: Any) -> None:
    with new_server(max_logprob_bytes=100_000) as server:
        body = {"prompt": [5] * 100, "max_tokens": 1, "logprobs": 0, "echo": True}
        assert server.post("/v1/completions", **body).status_code == 200
        refused = server.post("/v1/completions", n=8, **body)
        assert refused.status_code == 400
        assert "max_logprob_bytes" in refused.json()["error"]["message"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_frees_its_place_at_once(new_server: Any, is_stream: bool) -> None:
    with new_server() as server:
        with holding_steps(server.llm):
            with raw_request(server, "/v1/completions", {**LONG, "stream": is_stream, "n": 3}):
                eventually(lambda: num_in_progress(server) == 3, "the request never began")
            eventually(lambda: num_in_progress(server) == 0, "its place is kept while a step lasts")
        eventually(lambda: is_idle(server), "the request never ended")
        check_integrity(server.llm)


def num_in_progress(server: Any) -> int:
    found: int = server.service.limits.in_use()["requests"]
    return found


def is_held(server: Any) -> bool:
    """Return True if all that runs is paused and stays so (at first, socket buffers still take data)."""
    before = stats(server)
    time.sleep(0.2)
    after = stats(server)
    return after.pauses == before.pauses and all(one.paused == one.running > 0 for one in (before, after))


def test_a_slow_reader_is_paused_and_loses_nothing(new_server: Any) -> None:
    body = {**LONG, "n": 8, "seed": 3, "logprobs": 20, "return_token_ids": True}
    with new_server(buffer_rows=4) as server:
        whole = server.post("/v1/completions", **body).json()
        with raw_request(server, "/v1/completions", {**body, "stream": True}) as link:
            eventually(lambda: is_held(server), "it goes on for a reader that reads nothing")
            fast = server.post("/v1/completions", prompt="a dog", max_tokens=20)
            assert fast.status_code == 200
            data = b""
            while b"[DONE]" not in data:
                part = link.recv(1 << 16)
                assert part, "it ended before its end"
                data += part
        text = data.decode()
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        for choice in whole["choices"]:
            told = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
            assert [i for one in told for i in one["token_ids"]] == choice["token_ids"]
            assert "".join(one["text"] for one in told) == choice["text"]
        eventually(lambda: is_idle(server), "the request never ended")


def test_an_engine_failure_is_a_500_or_an_event_and_the_server_stays(new_server: Any) -> None:
    with new_server() as server:
        with failing_steps(server.llm, RuntimeError("broken weights")):
            reply = server.post("/v1/completions", prompt="zzz new", max_tokens=2)
            assert reply.status_code == 500
            assert "broken weights" in reply.json()["error"]["message"]
            text = server.post("/v1/completions", prompt="zzz new", max_tokens=2, stream=True).text
            *_, failed, done = filter(None, text.splitlines())
            assert json.loads(failed[6:])["error"]["type"] == "server_error"
            assert done == "data: [DONE]"
        assert server.post("/v1/completions", prompt="zzz new", max_tokens=2).status_code == 200


def test_a_request_is_logged_only_where_that_is_asked(
    new_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "logprobe.server")
    for is_asked in (False, True):
        with new_server(enable_log_requests=is_asked) as server:
            server.post("/v1/completions", prompt="a secret", max_tokens=1)
        assert ("a secret" in caplog.text) == is_asked


def test_metrics_count_what_was_done_and_refused(new_server: Any) -> None:
    def read() -> dict[str, float]:
        lines = [line for line in server.get("/metrics").text.splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    bias = '{processor="LogitBiasLogitsProcessor"}'
    with new_server() as server:
        before = read()  # the engine is shared, and counts its processors from its own start
        server.post("/v1/completions", prompt="the cat", max_tokens=3, logprobs=1, ignore_eos=True)
        server.post("/v1/completions", prompt="the cat", logprobs=99)
        server.post("/v1/completions", prompt="the cat", max_tokens=2, logit_bias={"5": 1.0}, ignore_eos=True)
        figures = read()
    assert figures['logprobe_requests_total{state="length"}'] == 2
    assert figures["logprobe_completion_tokens_total"] == 5
    assert figures["logprobe_logprob_rows_total"] == 3
    assert figures['logprobe_rejected_total{param="logprobs"}'] == 1
    for name, grown in {"rows": 2, "failures": 0}.items():
        metric = f"logprobe_processor_{name}_total{bias}"
        assert figures[metric] - before.get(metric, 0) == grown
    metric = f"logprobe_processor_seconds_total{bias}"
    assert figures[metric] > before.get(metric, 0)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer one", 200),
        ("bearer one", 200),
        ("BEARER  one", 200),
        ("one", 401),
        ("Basic one", 401),
        ("Bearer", 401),
        ("Bearerone", 401),
        ("Bearer one two", 401),
    ],
)
def test_a_key_comes_as_a_bearer_in_any_case_and_never_bare(
    new_server: Any, header: str, status: int
) -> None:
    with new_server(api_key=("one",)) as server:
        reply = httpx.get(f"{server.url}/v1/models", headers={"Authorization": header}, timeout=PATIENCE_S)
        assert reply.status_code == status


def test_browsers_of_other_origins_are_let_in_only_by_name(new_server: Any) -> None:
    headers = {"Origin": "https://a.example"}
    for origins, told in {(): None, ("https://a.example",): "https://a.example"}.items():
        with new_server(allowed_origins=origins) as server:
            reply = httpx.get(f"{server.url}/health", headers=headers, timeout=PATIENCE_S)
            assert reply.headers.get("access-control-allow-origin") == told
            assert reply.status_code == (200 if told else 403)
            own = httpx.get(f"{server.url}/health", headers={"Origin": server.url}, timeout=PATIENCE_S)
            assert own.status_code == 200


def test_every_reply_has_an_id_of_its_own(server: Any) -> None:
    replies = [server.get("/health"), server.get("/none"), server.post("/v1/completions")]
    ids = {reply.headers["x-request-id"] for reply in replies}
    assert len(ids) == len(replies)


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong in (
        {"port": 70000},
        {"metrics_port": -1},
        {"max_logprobs": -2},
        {"api_key": ("",)},
        {"api_key": ("zwölf",)},
        {"api_key": ("one two",)},
        {"operator_key": ("0123456789abcdef\n",)},
        {"max_requests": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ServerSettings(**wrong)


def test_a_signal_lets_running_requests_end_and_then_the_server(tiny_model_folder: Path) -> None:
    program = Path(sys.executable).with_name("logprobe")
    command = [program, "serve", str(tiny_model_folder), "--port", "0"]
    with subprocess.Popen(
        [*command, "--served-model-name", "tiny", "--kv-cache-memory-bytes", "2000000"],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if "listening" in line).split()[-1]
        body = {**LONG, "max_tokens": 100, "stream": True, "model": "tiny"}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert "data: [DONE]" in rest
        assert process.wait(timeout=PATIENCE_S) == 0


def test_a_model_goes_by_each_of_its_names_and_by_default(new_server: Any) -> None:
    with new_server(served_model_name=("first", "second")) as server:
        for name in ("first", "second", "default", None):
            reply = server.post("/v1/completions", prompt="a", max_tokens=1, model=name)
            assert reply.status_code == 200, name
            assert reply.json()["model"] == "first"
        refused = server.post("/v1/completions", prompt="a", model="third")
        assert refused.status_code == 404
        assert "use 'first' or 'second'" in refused.json()["error"]["message"]


def test_every_name_of_a_model_is_listed(new_server: Any) -> None:
    names = {"served_model_name": ("first", "second", "first")}
    for own, listed in {None: ["first", "second"], "own": ["own", "first", "second"]}.items():
        with new_server(model_name=own, **names) as server:
            found = server.get("/v1/models").json()["data"]
            assert [one["id"] for one in found] == listed
            assert all(one == found[0] | {"id": one["id"]} for one in found)
            for one in found:
                assert server.get(f"/v1/models/{one['id']}").json() == one
            assert server.get("/v1/models/default").json() == found[0]


def test_python_m_logprobe_is_the_command_line() -> None:
    command = [sys.executable, "-m", "logprobe", "serve", "a", "--model", "b"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "set only one of them" in ended.stderr
