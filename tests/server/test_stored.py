"""Stored responses are kept by owner and within a byte limit."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from logprobe.server.http.errors import ApiError
from logprobe.server.stored import StoredResponses

RESPONSE: dict[str, Any] = {"id": "resp-1", "output": ["a"]}
MESSAGES = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a"}]


def test_what_one_owner_keeps_no_other_finds_or_drops() -> None:
    stored = StoredResponses(4, 1000, 1000)
    stored.keep(b"one", RESPONSE, MESSAGES)
    assert stored.find(b"one", "resp-1").messages() == MESSAGES
    for ask in (stored.find, stored.drop):
        with pytest.raises(ApiError, match="'resp-1' is not stored"):
            ask(b"two", "resp-1")
    stored.drop(b"one", "resp-1")
    with pytest.raises(ApiError, match="'resp-1' is not stored"):
        stored.find(b"one", "resp-1")


def test_the_conversation_counts_as_the_response_does() -> None:
    stored = StoredResponses(4, 1000, 1000)
    long = [MESSAGES[0] | {"logprobs": ["x" * 400]}]
    for number in range(3):
        stored.keep(b"", RESPONSE | {"id": f"resp-{number}"}, long)
    with pytest.raises(ApiError, match="is not stored"):
        stored.find(b"", "resp-0")
    assert stored.find(b"", "resp-2").num_bytes > 400
    stored.keep(b"", RESPONSE | {"id": "resp-3"}, [{"x" * 1000: None}])
    with pytest.raises(ApiError, match="is not stored"):
        stored.find(b"", "resp-3")


@pytest.mark.parametrize(("max_responses", "max_bytes"), [(8, 100_000), (100, 1200)])
def test_one_owner_pushes_out_no_others(max_responses: int, max_bytes: int) -> None:
    stored = StoredResponses(max_responses, max_bytes, 1000)
    stored.keep(b"other", RESPONSE, MESSAGES)
    for number in range(200):
        stored.keep(b"hog", RESPONSE | {"id": f"resp-{number + 2}"}, MESSAGES)
    assert stored.find(b"other", "resp-1").messages() == MESSAGES
    assert stored.find(b"hog", "resp-201").messages() == MESSAGES
    with pytest.raises(ApiError, match="is not stored"):
        stored.find(b"hog", "resp-2")


def test_a_conversation_that_no_body_could_hold_is_not_kept() -> None:
    """Without this limit a conversation would grow turn by turn to the whole store, and be read at once."""
    stored = StoredResponses(4, 10_000, 250)
    stored.keep(b"", RESPONSE, MESSAGES * 2)
    assert stored.find(b"", "resp-1").messages() == MESSAGES * 2
    stored.keep(b"", RESPONSE | {"id": "resp-2"}, MESSAGES * 4)
    with pytest.raises(ApiError, match="is not stored"):
        stored.find(b"", "resp-2")


def test_only_one_of_two_concurrent_deletions_succeeds() -> None:
    stored, both = StoredResponses(4, 10_000, 1000), threading.Barrier(2)
    ended: list[bool] = []

    def drop() -> None:
        both.wait()
        try:
            stored.drop(b"", "resp-1")
        except ApiError:
            ended.append(False)
        else:
            ended.append(True)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            stored.keep(b"", RESPONSE, MESSAGES)
            threads = [threading.Thread(target=drop) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert (ended.count(True), ended.count(False)) == (300, 300)
