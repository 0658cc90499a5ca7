"""Replies of a hostile server give a short error, and never use more memory than the request needs."""

from __future__ import annotations

import gzip
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import save

from fuzzing import fuzz
from logprobe import RemoteLLM
from logprobe.errors import LogprobeError, ParameterError, ServerError
from logprobe.transport.http_client import FULL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 60  # errors are raised much faster, also on a busy machine
VOCAB_SIZE = 16
FACTS = {
    "engine": "native",
    "model": "m",
    "device": "cpu",
    "dtype": "float32",
    "weights": "checkpoint",
    "vocab_size": VOCAB_SIZE,
    "max_model_len": 64,
    "num_slots": 64,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "prompt_logprobs_with_prefix_cache": True,
    "stages": ["raw_logprobs"],
    "limits": {
        "max_body_bytes": 1 << 20,
        "max_requests": 64,
        "max_tokens_in_flight": 1 << 16,
        "max_logprob_bytes": 1 << 24,
    },
}
GOOD: dict[str, Any] = {
    "/v1/capabilities": FACTS,
    "/v1/models": {"data": [{"id": "m"}]},
    "/tokenizer_info": {"bos_token_id": 1},
}
EVEN = np.full((1, VOCAB_SIZE), -np.log(VOCAB_SIZE), dtype=np.float32)


@contextmanager
def server_with(answers: dict[str, Any]) -> Iterator[str]:
    """Serve JSON, bytes, or (status, headers, bytes) for each path; None never ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = (GOOD | answers).get(self.path, {})
            if answer is None:
                self._endless()
                return
            if not isinstance(answer, tuple):
                answer = (200, {}, answer if isinstance(answer, bytes) else json.dumps(answer).encode())
            status, headers, data = answer
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            """Suppress the default log."""

        def _endless(self) -> None:
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(1 << 20))
            except OSError:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def rows_of(table: Any) -> bytes:
    data: bytes = save({"logprobs": table})
    return data


def with_value(value: float) -> bytes:
    table = EVEN.copy()
    table[0, 3] = value
    return rows_of(table)


HOSTILE: dict[str, dict[str, Any]] = {
    "endless facts": {"/v1/capabilities": None},
    "endless models": {"/v1/models": None},
    "endless rows": {"/v1/next_token_logprobs": None},
    "a bomb": {
        "/v1/next_token_logprobs": (200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(1 << 28), 9)),
    },
    "NaN": {"/v1/next_token_logprobs": with_value(float("nan"))},
    "+5": {"/v1/next_token_logprobs": with_value(5.0)},
    "+inf": {"/v1/next_token_logprobs": with_value(float("inf"))},
    "no mass": {"/v1/next_token_logprobs": rows_of(np.full_like(EVEN, -np.inf))},
    "half the mass": {"/v1/next_token_logprobs": rows_of(EVEN - np.float32(np.log(2)))},
    "no rows": {"/v1/next_token_logprobs": b"\x08\0\0\0\0\0\0\0{}      "},
    "a huge header": {"/v1/next_token_logprobs": b"\xff" * 16},
    "JSON facts of another kind": {"/v1/capabilities": {"engine": 3}},
    "facts that are no UTF-8": {"/v1/capabilities": b'{"engine": "\xff"}'},
    "nested facts": {"/v1/capabilities": b"[" * 100_000},
    "a vocabulary of less than nothing": {"/v1/capabilities": FACTS | {"vocab_size": -1}},
    "a vocabulary beyond all": {"/v1/capabilities": FACTS | {"vocab_size": 2**62}},
    "words without end": {
        "/v1/next_token_logprobs": (400, {}, b'{"error": {"message": "' + b"a" * 60_000 + b'"}}')
    },
    "an error without end": {"/v1/next_token_logprobs": (500, {}, b"a" * (1 << 24))},
    "escapes": {
        "/v1/next_token_logprobs": (
            400,
            {},
            json.dumps(
                {"error": {"message": "\x1b[2J\x1b]0;x\x07 gone", "param": "\x1b[1m", "code": "x"}}
            ).encode(),
        ),
    },
}


def ask(url: str, timeout_s: float = 20) -> None:
    lm = RemoteLLM(url, request_timeout=timeout_s)
    try:
        lm.next_token_logprobs_sync([1, 2])
    finally:
        lm.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_reply_is_one_short_error(name: str) -> None:
    process = psutil.Process()
    before, start = process.memory_info().rss, time.monotonic()
    with server_with(HOSTILE[name]) as url, pytest.raises((ServerError, ParameterError)) as caught:
        ask(url, 2 * LIMIT_S)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 3000
    assert time.monotonic() - start < LIMIT_S
    assert process.memory_info().rss - before < 1 << 27


def test_a_good_reply_passes() -> None:
    table = EVEN.copy()
    table[0, :2] = -np.inf, -np.log(VOCAB_SIZE / 2)
    with server_with({"/v1/next_token_logprobs": rows_of(table)}) as url:
        lm = RemoteLLM(url)
        assert np.array_equal(lm.next_token_logprobs_sync([1, 2]), table[0])
        lm.close()


SAMPLE: Callable[..., dict[str, Any]] = lambda ids: {  # noqa: E731 - one line of JSON
    "choices": [{"token_ids": ids, "finish_reason": "length"}]
}


@pytest.mark.parametrize(
    "reply",
    [SAMPLE([1] * 5), SAMPLE([VOCAB_SIZE]), SAMPLE([-1]), SAMPLE([10**30]), {"choices": []}, b"\xff", None],
)
def test_a_sample_of_other_tokens_is_an_error(reply: Any) -> None:
    import asyncio

    with server_with({"/v1/completions": reply}) as url:
        lm = RemoteLLM(url, request_timeout=2 * LIMIT_S)
        with pytest.raises(ServerError):
            asyncio.run(lm.sample([1], 4, []))
        lm.close()


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe", b'{"version":"1.0"}'])
def test_what_is_no_tokenizer_is_an_error(data: bytes) -> None:
    with server_with({"/v1/tokenizer": data}) as url:
        lm = RemoteLLM(url, request_timeout=2 * LIMIT_S)
        with pytest.raises(LogprobeError):
            _ = lm.tokenizer
        lm.close()


ANSWER = st.one_of(
    st.binary(max_size=40),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=6,
    ),
    st.builds(
        lambda name, value: FACTS | {name: value}, st.sampled_from(sorted(FACTS)), st.integers() | st.text()
    ),
    st.builds(rows_of, arrays(np.float32, (1, VOCAB_SIZE))),
    st.builds(
        lambda place, value: rows_of(EVEN)[:place] + value + rows_of(EVEN)[place + len(value) :],
        st.integers(0, 90),
        st.binary(min_size=1, max_size=9),
    ),
)
PATHS = st.sampled_from(["/v1/capabilities", "/v1/models", "/tokenizer_info", "/v1/next_token_logprobs"])


@pytest.mark.fuzz
@fuzz(0.5)
@given(path=PATHS, answer=ANSWER, status=st.sampled_from([200, 200, 200, 400, 429, 500]))
def test_every_reply_is_rows_or_one_short_error(path: str, answer: Any, status: int) -> None:
    data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    with server_with({path: (status, {}, data)}) as url:
        try:
            ask(url, 0.3 if status == FULL else 20)  # a full server is retried until the timeout
        except (ServerError, ParameterError) as error:
            message = str(error)
            assert message.isprintable()
            assert len(message) < 3000
