"""An audit of our own server: nothing is wrong, every form is looked at, a report can be taken up again."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from logprobe.analysis import AuditReport, audit
from logprobe.analysis.auditing.conformance import check_conformance
from logprobe.errors import ParameterError
from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe import LLM


@pytest.fixture(scope="module")
def url(tiny_llm: LLM, new_serving: Any) -> Iterator[str]:
    with new_serving(tiny_llm, ServerSettings()) as (address, _):
        yield address


@pytest.fixture(scope="module")
def report(tiny_llm: LLM, url: str) -> AuditReport:
    return audit(url, tiny_llm)


def test_our_own_server_passes(report: AuditReport) -> None:
    assert report.numbers == "PASS"
    assert report.worst_nats < 1e-4
    assert [one for one in report.findings if one.severity == "fault"] == []


def test_our_own_api_conforms(tiny_llm: LLM, url: str) -> None:
    report = check_conformance(url, tiny_llm)
    assert report.findings == ()
    assert {one.partition(":")[0] for one in report.fields.values()} <= {"applied", "unclear", "refused"}
    assert report.fields["chat.top_p (stream)"] == "applied"


def test_every_form_of_ours_is_looked_at(report: AuditReport) -> None:
    forms = {label.split(",")[0].split(" (")[0] for label in report.distributions}
    assert forms == {"echo", "prompt_logprobs", "completions", "chat", "chat prompt_logprobs"}
    assert {*report.distributions.values()} == {"raw"}
    assert all(one.is_equal or (one.worst or 0) < 1e-4 for one in report.steadiness)
    told = {one.circumstance for one in report.steadiness}
    assert {"three times alone", "after a generation", "streamed (chat)", "prompt of 64 tokens"} <= told


def test_processed_rows_are_named(tiny_llm: LLM, new_serving: Any) -> None:
    with new_serving(tiny_llm, ServerSettings(logprobs_mode="processed_logprobs")) as (address, _):
        found = audit(address, tiny_llm, quick=True)
    assert found.numbers == "PASS", found.findings
    names = {label: name for label, name in found.distributions.items() if "completion rows" in label}
    assert names["completions, temperature 0.5 (completion rows)"] == "temperature"
    assert names["completions, temperature 0.7, top_p 0.8 (completion rows)"] == "temperature+renormalised"
    assert "penalised" in {name for label, name in names.items() if "presence" in label}
    assert "masked" in {name for label, name in names.items() if "logit_bias" in label}
    assert found.worst_nats < 1e-4


def test_a_report_is_taken_up_again(report: AuditReport, tiny_llm: LLM, url: str) -> None:
    before = AuditReport.from_dict(json.loads(json.dumps(report.to_dict())))
    assert before == report
    found = audit(url, tiny_llm, before=before, quick=True)
    assert found.numbers == "PASS", found.findings
    assert [one.kind for one in found.findings] == []
    assert {(one.ask, one.prompt) for one in found.stored} == {(one.ask, one.prompt) for one in before.stored}


def test_lora_weights_over_there_need_the_same_here(tiny_llm: LLM) -> None:
    with pytest.raises(ParameterError) as caught:
        audit("http://127.0.0.1:1", tiny_llm, lora="mine")
    assert caught.value.parameter == "lora"


def test_texts_of_the_callers_own_and_a_running_loop(tiny_llm: LLM, url: str) -> None:
    async def within_a_loop() -> AuditReport:
        return audit(url, tiny_llm, texts=["a cat", "the dog " * 200], quick=True)

    found = asyncio.run(within_a_loop())
    assert found.numbers == "PASS"
    assert {one.prompt[:5] for one in found.stored if one.where == "prompt"} == {"a cat", "the d"}


@contextmanager
def with_less(
    upstream: str, *refused: str, change: Callable[[Any, Any], None] | None = None
) -> Iterator[str]:
    """A server that refuses fields by name, and the chat route, and passes on all else.

    `change` alters a whole reply in place, of the request's body and the reply's.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(httpx.get(upstream + self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            named = [name for name in refused if name in body]
            if named or "chat" in self.path:
                error = {"error": {"message": f"{named or self.path}: is not known here"}}
                self.answer(httpx.Response(400 if named else 404, json=error))
            else:
                reply = httpx.post(upstream + self.path, json=body, timeout=60)
                if change is not None and not body.get("stream") and reply.is_success:
                    value = reply.json()
                    change(body, value)
                    reply = httpx.Response(200, json=value)
                self.answer(reply)

        def answer(self, reply: httpx.Response) -> None:
            self.send_response(reply.status_code)
            self.send_header("Content-Type", reply.headers["content-type"])
            self.send_header("Content-Length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_a_server_that_has_less_gets_notes(tiny_llm: LLM, url: str) -> None:
    with with_less(url, "echo", "prompt_logprobs", "stream", "return_token_ids") as address:
        found = audit(address, tiny_llm, quick=True)
    assert found.numbers == "PASS", found.findings
    assert {label.split(",")[0] for label in found.distributions} == {"completions"}
    titles = [one.title for one in found.findings]
    for form in ("echo", "prompt_logprobs", "chat", "chat prompt_logprobs"):
        assert sum(f"has no {form}: " in title for title in titles) == 1, titles
    assert "left-out" in {one.kind for one in found.findings}
    with with_less(url, "echo", "prompt_logprobs", "stream", "return_token_ids") as address:
        report = check_conformance(address, tiny_llm)
    assert report.faults == ()
    assert report.fields["completions.echo (whole)"].startswith("refused: 400")
    assert report.fields["completions.logprobs (stream)"].startswith("refused: 400")
    assert report.fields["completions.top_p (whole)"] == "applied"


def leave_out_the_prompt(body: Any, reply: Any) -> None:
    """As vLLM does: with `return_token_ids`, the text of an echo begins after the prompt."""
    prompt = body.get("prompt")
    if body.get("echo") and body.get("return_token_ids") and isinstance(prompt, str):
        choice = reply["choices"][0]
        choice["text"] = choice["text"].removeprefix(prompt)


def test_a_field_that_only_our_extras_suppress_is_no_fault(tiny_llm: LLM, url: str) -> None:
    with with_less(url, change=leave_out_the_prompt) as address:
        report = check_conformance(address, tiny_llm)
    assert report.faults == ()
    assert report.fields["completions.echo (whole)"] == "applied"


def test_progress_is_told(tiny_llm: LLM, url: str) -> None:
    told: list[tuple[int, str]] = []
    audit(url, tiny_llm, quick=True, progress=lambda *one: told.append(one))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert "three times alone" in {what for _, what in told}


def test_the_real_model_served(real_llm: LLM, new_serving: Any) -> None:
    with new_serving(real_llm, ServerSettings()) as (address, _):
        found = audit(address, real_llm, texts=["The capital of France is Paris."], quick=True)
    assert found.numbers == "PASS", found.findings
    assert found.worst_nats < 1e-4
