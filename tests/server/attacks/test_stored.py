"""Stored replies are only visible to the client that stored them, and all stored bytes count."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import fuzz

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server_process import Attacked, Reply

SAID = "the number is 42"
MAX_ALIKE = 16  # equal digits of two ids, of 32 hexadecimal ones; 2 by chance
LONG = 4_000_000


def ask(server: Attacked, key: str, method: str, path: str, **body: Any) -> Reply:
    headers = {"Authorization": f"Bearer {key}", "Content_Type": "application/json"}
    return server.ask(method, path, json.dumps(body).encode() if body else None, **headers)


def stored(server: Attacked, key: str = "one", **more: Any) -> str:
    reply = ask(server, key, "POST", "/v1/responses", **{"input": SAID, "max_output_tokens": 1} | more)
    assert reply.status == 200, reply.data[:300]
    made: str = json.loads(reply.data)["id"]
    return made


@pytest.fixture(scope="module")
def keyed(serve_process: Any) -> Iterator[Attacked]:
    """A server with two API keys."""
    with serve_process("--api-key", "one", "--api-key", "two") as server:
        yield server


@pytest.fixture(scope="module")
def foreign(keyed: Attacked) -> str:
    """The id of a reply stored with the key 'one'."""
    return stored(keyed)


def test_the_ids_of_replies_have_nothing_in_common(attacked: Attacked) -> None:
    chat = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 1}
    ids = [stored(attacked) for _ in range(3)]
    ids += [json.loads(attacked.post("/v1/chat/completions", **chat).data)["id"] for _ in range(2)]
    for one, other in itertools.combinations([made.partition("-")[2] for made in ids], 2):
        assert len(one) == 32
        assert sum(mine == its for mine, its in zip(one, other, strict=True)) < MAX_ALIKE


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/responses/{}", {}),
        ("GET", "/v1/responses/{}/input_items", {}),
        ("DELETE", "/v1/responses/{}", {}),
        ("POST", "/v1/responses", {"input": "what is it?", "previous_response_id": "{}"}),
    ],
)
def test_a_stored_reply_is_there_for_its_own_key_alone(
    keyed: Attacked, method: str, path: str, body: dict[str, str]
) -> None:
    own, unknown = stored(keyed), f"resp-{'0' * 32}"

    def by(key: str, response_id: str) -> Reply:
        named = {name: text.format(response_id) for name, text in body.items()}
        return ask(keyed, key, method, path.format(response_id), **named)

    refused, never = by("two", own), by("two", unknown)
    assert refused.status == never.status == 404
    assert refused.data == never.data.replace(unknown.encode(), own.encode())
    assert by("one", own).status == 200


@st.composite
def guesses(draw: Any, known: str = "") -> str:
    """Generate ids similar to a known one, and ids of any form."""
    near = st.integers(0, len(known) - 1).map(lambda place: f"{known[:place]}0{known[place + 1 :]}")
    made = st.sampled_from(["", ".", "..", "%00", "resp-", "resp", "msg-0", "0" * 32, "input_items"])
    kinds = st.one_of(
        near,
        st.just(known),
        st.just(known.replace("resp", "msg")),
        st.just(known.upper()),
        st.just(f"{known}-0"),
        st.text("0123456789abcdef", max_size=40).map("resp-{}".format),
        st.text("abc-_.~%20", max_size=12),
        made,
    )
    guess: str = draw(kinds)
    return guess


@pytest.mark.fuzz
@fuzz()
@given(
    data=st.data(),
    method=st.sampled_from(["GET", "DELETE", "POST"]),
    rest=st.sampled_from(["", "/input_items", "?include=x", "/input_items?after=x", "/input_items?limit=0"]),
)
def test_no_guess_finds_or_ends_what_another_key_stored(
    keyed: Attacked, foreign: str, data: st.DataObject, method: str, rest: str
) -> None:
    guess = data.draw(guesses(foreign))
    if method == "POST":
        body = {"input": "and?", "max_output_tokens": 1, "previous_response_id": guess}
        reply = ask(keyed, "two", "POST", "/v1/responses", **body)
    else:
        reply = ask(keyed, "two", method, f"/v1/responses/{guess}{rest}")
    assert reply.status in {307, 400, 404, 405}, reply.data[:300]  # 307: redirect for an extra slash
    assert SAID.encode() not in reply.data
    assert SAID in ask(keyed, "one", "GET", f"/v1/responses/{foreign}/input_items").data.decode()


def test_a_long_name_of_an_empty_field_is_refused_and_not_kept(attacked: Attacked) -> None:
    message = {"role": "user", "content": "the cat", "k" * 1_000_000: None}
    for path, body in {
        "/v1/chat/completions": {"messages": [message], "max_tokens": 1},
        "/v1/responses": {"input": [message], "max_output_tokens": 1},
        "/v1/loglikelihood": {"messages": [message], "continuations": [" a"]},
        "/v1/label": {"messages": [message], "labels": [" a"]},
        "/v1/judge": {"messages": [message]},
        "/tokenize": {"messages": [message]},
    }.items():
        reply = attacked.post(path, **body)
        assert reply.status == 400, path
        assert reply.error["param"].startswith(("messages[0].kkk", "input[0].kkk"))
        assert len(reply.data) < 1000


def test_stored_messages_are_in_the_bound_of_what_is_stored(serve_process: Any) -> None:
    with serve_process("--max-stored-bytes", "1000000") as server:
        # Logprobs in an input part are accepted and ignored.
        part = {"type": "output_text", "text": "the cat", "logprobs": ["x" * LONG]}
        asked = {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 1}
        server.check_alive()
        with server.watched():
            ids = [stored(server, **asked) for _ in range(30)]
        assert {server.get(f"/v1/responses/{one}").status for one in ids} == {404}
