"""Unmodified client libraries, in their own environments, against `logprobe serve` with real weights.

Each script checks what its client returned. Here the body that the client sent is sent again directly, and
its log-probabilities must equal the client's. `pytest -rP` shows the versions of the clients.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from server_process import PATIENCE_S, serving_process

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
RIVALS = HERE.parents[1] / ".rivals"
ENVIRONMENTS = {
    "openai_": "clients",
    "langchain_openai_": "clients",
    "openai_agents_": "clients",
    "pydantic_ai_": "clients",
    "instructor_": "clients_2",
    "litellm_": "clients_2",
    "dspy_": "clients_2",
    "llm_structured_confidence_": "clients",
    "structured_logprobs_": "structured_logprobs",
}
# Nats. The second request may run in another batch, and uses the prefix cache of the first.
TOLERANCE = 1e-4
PASSED_ON = ("content-type", "authorization", "accept")

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(
        not all((RIVALS / name / "bin/python").exists() for name in ENVIRONMENTS.values()),
        reason="clients have environments of their own: `make test-clients` builds them",
    ),
]


class Exchange:
    """A client's request and the reply to it."""

    def __init__(self, path: str, body: Any, reply: httpx.Response) -> None:
        self.path, self.body, self.reply = path, body, reply


class Between:
    """A proxy between client and server that forwards and records everything."""

    def __init__(self, url: str) -> None:
        self.exchanges: list[Exchange] = []
        between = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name: self.headers[name] for name in PASSED_ON if name in self.headers}
                reply = httpx.post(url + self.path, content=data, headers=headers, timeout=PATIENCE_S)
                between.exchanges.append(Exchange(self.path, json.loads(data), reply))
                self.send_response(reply.status_code)
                self.send_header("Content-Type", reply.headers["Content-Type"])
                self.send_header("Content-Length", str(len(reply.content)))
                self.end_headers()
                self.wfile.write(reply.content)

            def log_message(self, *_: Any) -> None:
                """Suppress the default log."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"


@contextmanager
def between(url: str) -> Iterator[Between]:
    made = Between(url)
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        thread.join()
        made.server.server_close()


@pytest.fixture(scope="module")
def url(smollm2_folder: Path) -> Iterator[str]:
    # Default settings, except for the name and a larger KV cache.
    flags = ("--served-model-name", "smollm2", "--kv-cache-memory-bytes", "200000000")
    with serving_process(smollm2_folder, *flags) as server:
        yield f"http://127.0.0.1:{server.port}"


def run(script: str, url: str, task: str) -> dict[str, Any]:
    """Run a script in its environment, without this project on its path; return its output line."""
    python = RIVALS / ENVIRONMENTS[script] / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # No client may fetch prices or send telemetry.
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    command = [str(python), str(HERE / f"{script}.py"), url, "smollm2", task]
    done = subprocess.run(
        command, env=environment | quiet, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_in(reply: Any) -> list[tuple[str, float]]:
    """Return the token and log-probability of each row of a chat or responses reply."""
    if "choices" in reply:
        rows = reply["choices"][0]["logprobs"]["content"]
    else:
        (message,) = reply["output"]
        rows = message["content"][0]["logprobs"]
    return [(row["token"], row["logprob"]) for row in rows]


@pytest.mark.parametrize("script", ENVIRONMENTS)
def test_json_comes_with_the_servers_own_numbers(script: str, url: str) -> None:
    with between(url) as client:
        found = run(script, client.url, "json")
    sys.stdout.write(f"{found['versions']}\n")
    last = client.exchanges[-1]
    assert [exchange.reply.status_code for exchange in client.exchanges] == [200], refusals(client)
    direct = httpx.post(url + last.path, json=last.body, timeout=PATIENCE_S).json()
    wanted = rows_in(direct)
    assert [token for token, _ in found["rows"]] == [token for token, _ in wanted]
    numbers = [logprob for _, logprob in found["rows"]]
    assert numbers == pytest.approx([logprob for _, logprob in wanted], abs=TOLERANCE)


@pytest.mark.parametrize("script", ENVIRONMENTS)
def test_a_tool_is_called_by_name_with_arguments(script: str, url: str) -> None:
    with between(url) as client:
        found = run(script, client.url, "tool")
    sys.stdout.write(f"{found}\n")
    assert [exchange.reply.status_code for exchange in client.exchanges] == [200], refusals(client)
    assert client.exchanges[-1].body["tools"]


def refusals(client: Between) -> list[str]:
    return [exchange.reply.text for exchange in client.exchanges if exchange.reply.status_code != 200]
