"""Requests whose end a proxy and this server could place differently (RFC 9112)."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from logprobe.server.http.protocol import MAX_HEADER_BYTES, MAX_PIPELINED
from server_process import PATIENCE_S

if TYPE_CHECKING:
    from server_process import Attacked

BODY = b'{"prompt": "the cat", "max_tokens": 2}'
HEADER = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
SECOND = b"GET /second HTTP/1.1\r\nHost: localhost\r\n\r\n"  # a 404 if it is processed
LAST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQA\r\n"


def with_length(value: bytes) -> bytes:
    return HEADER + b"Content-Length:" + value + b"\r\n\r\n" + BODY


def with_coding(value: bytes) -> bytes:
    return HEADER + b"Transfer-Encoding:" + value + b"\r\n\r\n" + CHUNKS


def in_chunks(data: bytes) -> bytes:
    return HEADER + CHUNKED + b"\r\n" + data


def with_line(line: bytes) -> bytes:
    return HEADER + line + b"\r\n" + LENGTH + b"\r\n" + BODY


SIZE = b"%x" % len(BODY)
END = b"\r\n0\r\n\r\n"
FAULTY = {
    "a length and chunks": HEADER + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "chunks and a length": HEADER + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "no length and chunks": HEADER + b"Content-Length: 0\r\n" + CHUNKED + b"\r\n" + CHUNKS,
    "two lengths": HEADER + LENGTH + b"Content-Length: 0\r\n\r\n" + BODY,
    "the same length twice": HEADER + 2 * LENGTH + b"\r\n" + BODY,
    "a list of lengths": with_length(b" 38, 38"),
    "a positive length": with_length(b" +38"),
    "a negative length": with_length(b" -1"),
    "a hexadecimal length": with_length(b" 0x26"),
    "a length in two words": with_length(b" 3 8"),
    "a length of 2**64": with_length(b" %d" % 2**64),
    "a length of 2**64 more": with_length(b" %d" % (2**64 + len(BODY))),
    "an empty length": with_length(b" "),
    "a folded line": with_line(b"X-A: b\r\n c"),
    "a folded length": with_length(b"\r\n 38"),
    "a folded coding": with_coding(b"\r\n chunked"),
    "a folded first line": b"POST /v1/completions HTTP/1.1\r\n Host: a\r\nHost: localhost\r\n\r\n",
    "LF alone everywhere": (HEADER + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY,
    "LF alone in one line": with_line(b"X-A: b\nX-C: d"),
    "LF alone at the end": HEADER + LENGTH + b"\n" + BODY,
    "CR alone": with_line(b"X-A: b\rX-C: d"),
    "CR before a length": with_line(b"X-A: b\rContent-Length: 0"),
    "CR twice": HEADER + LENGTH + b"\r\r\n" + BODY,
    "a space before the colon": HEADER + b"Content-Length : 38\r\n\r\n" + BODY,
    "a tab before the colon": HEADER + b"Content-Length\t: 38\r\n\r\n" + BODY,
    "a coding with a space before the colon": with_line(b"Transfer-Encoding : chunked"),
    "a coding after a vertical tab": with_line(b"Transfer-Encoding:\x0bchunked"),
    "an unknown coding": with_coding(b" xchunked"),
    "an unknown coding and a length": with_line(b"Transfer-Encoding: xchunked"),
    "identity and a length": with_line(b"Transfer-Encoding: identity"),
    "an empty coding and a length": with_line(b"Transfer-Encoding: "),
    "gzip in chunks": with_coding(b" gzip, chunked"),
    "gzip in chunks, in two lines": with_coding(b" gzip\r\nTransfer-Encoding: chunked"),
    "chunks in gzip": with_coding(b" chunked, gzip"),
    "chunks twice": HEADER + 2 * CHUNKED + b"\r\n" + CHUNKS,
    "a quoted coding": with_coding(b' "chunked"'),
    "a coding with a parameter": with_coding(b" chunked;q=1"),
    "a positive chunk": in_chunks(b"+" + SIZE + b"\r\n" + BODY + END),
    "a negative chunk": in_chunks(b"-" + SIZE + b"\r\n" + BODY + END),
    "a chunk of 0x": in_chunks(b"0x" + SIZE + b"\r\n" + BODY + END),
    "a chunk after a space": in_chunks(b" " + SIZE + b"\r\n" + BODY + END),
    "a chunk before a space": in_chunks(SIZE + b" \r\n" + BODY + END),
    "a chunk of digits with a line between": in_chunks(b"2_6\r\n" + BODY + END),
    "a chunk of 2**64 more": in_chunks(b"1%016x\r\n" % len(BODY) + BODY + END),
    "a chunk of no size": in_chunks(b"\r\n" + BODY + END),
    "a chunk after LF": in_chunks(SIZE + b"\n" + BODY + END),
    "a chunk after an extension and LF": in_chunks(SIZE + b";a\n" + BODY + END),
    "a chunk after an extension with LF": in_chunks(SIZE + b';a="\n"\r\n' + BODY + END),
    "a chunk before LF": in_chunks(SIZE + b"\r\n" + BODY + b"\n0\r\n\r\n"),
    "a chunk before other bytes": in_chunks(SIZE + b"\r\n" + BODY + b"XX0\r\n\r\n"),
    "a chunk before the next": in_chunks(SIZE + b"\r\n" + BODY + b"0\r\n\r\n"),
    "a last chunk before LF": in_chunks(SIZE + b"\r\n" + BODY + b"\r\n0\n\n"),
    "a length as trailer": in_chunks(CHUNKS[:-2] + b"Content-Length: 100\r\n\r\n"),
    "a coding as trailer": in_chunks(CHUNKS[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"),
    "a trailer that is none": in_chunks(CHUNKS[:-2] + b"X Y: 1\r\n\r\n"),
    "NUL in a value": with_line(b"X-A: a\0b"),
    "NUL in a name": with_line(b"X-\0A: b"),
    "NUL after a name": HEADER + b"Content-Length\0: 38\r\n\r\n" + BODY,
    "a name that is not ASCII": with_line("X-ä: b".encode()),
    "an empty name": with_line(b": b"),
    "a line without a colon": with_line(b"XA"),
    "two hosts": GET + b"Host: localhost\r\n\r\n",
    "no host": GET.replace(b"Host: localhost\r\n", b"") + b"\r\n",
    "two origins": GET + b"Origin: http://localhost\r\nOrigin: http://a.example\r\n\r\n",
    "two keys": GET + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
    "two media types": with_line(b"Content-Type: text/plain"),
    "CONNECT": b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n",
    "a target without a path": b"GET localhost HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "another version": b"GET /health HTTP/1.2\r\nHost: localhost\r\n\r\n",
    "no version": b"GET /health\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tabs in the first line": b"GET\t/health\tHTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a space before the method": b" " + HEADER + LENGTH + b"\r\n" + BODY,
    "a path that is not ASCII": b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "an upgrade with two lengths": HEADER + UPGRADE + LENGTH + b"Content-Length: 0\r\n\r\n" + BODY,
}
VALID = {
    "a length": (HEADER + LENGTH + b"\r\n" + BODY, 200),
    "a length after a tab": (with_length(b"\t38 "), 200),
    "a length with zeros": (with_length(b" 00000000000000000000038"), 200),
    "chunks": (in_chunks(CHUNKS), 200),
    "a coding in capitals": (HEADER + CHUNKED.upper() + b"\r\n" + CHUNKS, 200),
    "a chunk with zeros": (in_chunks(b"0" * 50 + SIZE + b"\r\n" + BODY + END), 200),
    "a chunk with an extension": (in_chunks(SIZE + b';a="b"\r\n' + BODY + END), 200),
    "an origin as trailer": (in_chunks(CHUNKS[:-2] + b"Origin: http://a.example\r\n\r\n"), 200),
    "a value that is not ASCII": (with_line("X-A: ä".encode()), 200),
    "a whole URL": (GET.replace(b" /", b" http://localhost/") + b"\r\n", 200),
    "a whole URL of another host": (GET.replace(b" /", b" http://a.example/") + b"\r\n", 403),
    "a whole URL with a name before it": (GET.replace(b" /", b" http://localhost@a.example/") + b"\r\n", 403),
    "a body that is a request": (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(SECOND) + SECOND,
        200,
    ),
    "a refused body that is a request": (
        b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(SECOND) + SECOND,
        404,
    ),
    "a body after an upgrade": (HEADER + UPGRADE + LENGTH + b"\r\n" + BODY, 200),
    "chunks after an upgrade": (HEADER + UPGRADE + CHUNKED + b"\r\n" + CHUNKS, 200),
    "no body after an upgrade": (GET + UPGRADE + b"\r\n", 200),
}


def replies_to(server: Attacked, *parts: bytes) -> list[int]:
    """Return the statuses of all replies to parts sent one after the other, until the server closes."""
    data = b""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as link, suppress(ConnectionError):
        for place, part in enumerate(parts):
            if place:
                assert server.get("/health").status == 200  # the server has read the part before
            link.sendall(part)
        while part := link.recv(1 << 16):
            data += part
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_request_is_a_400_and_nothing_after_it_is_run(attacked: Attacked, name: str) -> None:
    assert replies_to(attacked, FAULTY[name] + SECOND + LAST) == [400]


@pytest.mark.parametrize("name", VALID)
def test_a_valid_request_ends_where_it_says(attacked: Attacked, name: str) -> None:
    request, status = VALID[name]
    assert replies_to(attacked, request + LAST) == [status, 200]
    assert replies_to(attacked, request + SECOND + LAST) == [status, 404, 200]


@pytest.mark.parametrize("ask", [b"", UPGRADE])
def test_a_body_that_comes_later_is_no_request(attacked: Attacked, ask: bytes) -> None:
    header = HEADER + ask + b"Content-Length: %d\r\n\r\n" % len(SECOND)
    assert replies_to(attacked, header, SECOND + LAST) == [400, 200]


def test_the_requests_before_a_faulty_one_are_answered(attacked: Attacked) -> None:
    request = HEADER + LENGTH + b"\r\n" + BODY
    assert replies_to(attacked, request + b"rubbish\r\n\r\n" + LAST) == [200]
    assert replies_to(attacked, 2 * request + b"rubbish\r\n\r\n" + LAST) == [200, 200]
    assert replies_to(attacked, request + in_chunks(b"ZZ\r\n") + LAST) == [200]
    assert replies_to(attacked, request + HEADER + b"X: " + b"a" * (2 * MAX_HEADER_BYTES)) in ([200], [])


def test_nothing_is_written_into_the_reply_to_an_earlier_request(attacked: Attacked) -> None:
    body = BODY[:-1] + b', "stream": true}'
    streamed = HEADER + b"Content-Length: %d\r\n\r\n" % len(body) + body
    for faulty in (in_chunks(b"ZZ\r\n"), b"rubbish\r\n\r\n", GET + in_chunks(b"ZZ\r\n")):
        assert replies_to(attacked, streamed + faulty) == [200]


def test_a_target_that_is_a_whole_url_may_have_no_path(attacked: Attacked) -> None:
    for target in (b"http://localhost", b"http://localhost?a=1"):
        asked = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % target
        assert replies_to(attacked, asked + LAST) == [200, 200]  # the web page


def test_a_connection_that_is_to_close_runs_no_other_request(attacked: Attacked) -> None:
    assert replies_to(attacked, LAST + SECOND) == [200]
    both = UPGRADE.replace(b"Upgrade, HTTP2-Settings", b"Upgrade, Close")
    assert replies_to(attacked, GET + both + b"\r\n" + SECOND) == [200]
    old = HEADER.replace(b"1.1", b"1.0")
    assert replies_to(attacked, old + LENGTH + b"\r\n" + BODY + SECOND) == [200]


def test_a_header_that_is_too_large_is_a_431(attacked: Attacked) -> None:
    lines = b"".join(b"X-%d: a\r\n" % number for number in range(MAX_HEADER_BYTES // 8))
    told = replies_to(attacked, HEADER + lines + LENGTH + b"\r\n" + BODY + LAST)
    assert told in ([431], [])  # reset if bytes were unread
    url = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"a" * MAX_HEADER_BYTES)
    assert replies_to(attacked, url + LAST) in ([431], [])
    fewer = lines[: MAX_HEADER_BYTES // 2].rpartition(b"X")[0]
    assert replies_to(attacked, HEADER + fewer + LENGTH + b"\r\n" + BODY + LAST) == [200, 200]


def test_a_megabyte_of_a_chunks_extension_is_cut_off(attacked: Attacked) -> None:
    with attacked.watched():
        told = replies_to(attacked, in_chunks(SIZE + b";a=" + b"b" * (1 << 20)))
    assert told in ([431], [])  # reset if bytes were unread


def test_pipelined_requests_are_bounded(attacked: Attacked) -> None:
    slow = b'{"prompt": "the cat", "max_tokens": 100, "n": 20, "ignore_eos": true}'
    first = HEADER + b"Content-Length: %d\r\n\r\n" % len(slow) + slow
    few = replies_to(attacked, first + SECOND * (MAX_PIPELINED - 1) + LAST)
    assert few == [200] + [404] * (MAX_PIPELINED - 1) + [200]
    before = psutil.Process(attacked.process.pid).memory_info().rss
    many = replies_to(attacked, first + SECOND * 5_000)
    assert many in ([200] + [404] * MAX_PIPELINED, [])  # reset if bytes were unread
    assert psutil.Process(attacked.process.pid).memory_info().rss < 1.1 * before
    attacked.check_alive()
