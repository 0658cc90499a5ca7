"""How much callers may have in progress, all together and each."""

from __future__ import annotations

import pytest

from logprobe.server import ServerSettings
from logprobe.server.http.errors import ApiError
from logprobe.server.limits import Cost, Limits


def cost(requests: int, tokens: int = 1) -> Cost:
    return Cost(requests=requests, tokens=tokens, logprob_bytes=0)


def test_one_caller_may_have_all_there_is_and_others_still_a_little() -> None:
    limits = Limits(ServerSettings(max_requests=512))
    hog = limits.admit(cost(512), "hog")
    with pytest.raises(ApiError, match="512 of 512"):
        limits.admit(cost(1), "hog")
    with pytest.raises(ApiError, match="512 of 512"):
        limits.admit(cost(9), "other")
    tickets = [limits.admit(cost(8), f"other{number}") for number in range(8)]
    with pytest.raises(ApiError, match="576 of 512"):
        limits.admit(cost(1), "one more")
    for ticket in (hog, *tickets):
        ticket.release()
        ticket.release()
    assert set(limits.in_use().values()) == {0}
    limits.admit(cost(512), "other0")


def test_a_caller_that_is_small_in_one_way_is_not_let_in_for_another() -> None:
    limits = Limits(ServerSettings(max_requests=64, max_tokens_in_flight=6400))
    limits.admit(cost(1, 6400), "hog")
    with pytest.raises(ApiError, match="tokens"):
        limits.admit(cost(1, 101), "other")
    limits.admit(cost(1, 100), "other")


def test_what_is_beyond_a_limit_is_refused_for_good_whoever_asks() -> None:
    with pytest.raises(ApiError, match="max_requests") as caught:
        Limits(ServerSettings(max_requests=8)).admit(cost(9), "other")
    assert caught.value.status == 400
