"""vLLM's fields of chat and text completions, and vLLM's `stop_reason` in replies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.server import service as service_module
from reply_forms import stop_in

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "the cat and the dog"}]
SHOUT = "{% for m in messages %}<{{ m.role | upper }}>{{ m.content }}{% endfor %}{{ mood }}:"


def ok(reply: Any) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def choice_of(server: Any, path: str, **asked: Any) -> dict[str, Any]:
    (choice,) = ok(server.post(path, **asked))["choices"]
    return dict(choice)


def chunks_of(server: Any, path: str, **asked: Any) -> list[dict[str, Any]]:
    text = server.post(path, **asked, stream=True).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [event["choices"][0] for event in events]


@pytest.fixture(scope="module")
def trusting(tiny_llm: Any, serve_llm: Any) -> Iterator[Any]:
    """A server that renders the templates of requests."""
    with serve_llm(tiny_llm, trust_request_chat_template=True) as running:
        yield running


# -- stop_reason ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_stop_reason_is_the_stop_string_or_token_id(server: Any, path: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 30, "seed": 1, "return_token_ids": True, "ignore_eos": True}
    asked |= {"messages": MESSAGES} if path == CHAT else {"prompt": "the cat"}
    free = choice_of(server, path, **asked)
    assert (free["finish_reason"], free["stop_reason"]) == ("length", None)
    text = free["message"]["content"] if path == CHAT else free["text"]
    stop = stop_in(text)
    stopped = choice_of(server, path, **asked, stop=[stop])
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    end = free["token_ids"][5]
    stopped = choice_of(server, path, **asked, stop_token_ids=[end])
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", end)
    chunks = chunks_of(server, path, **asked, stop_token_ids=[end])
    assert [chunk.get("stop_reason") for chunk in chunks if chunk["finish_reason"]] == [end]
    assert {chunk.get("stop_reason") for chunk in chunks if not chunk["finish_reason"]} <= {None}


def test_the_models_own_end_has_no_stop_reason(server: Any) -> None:
    eos = server.llm.text.eos_token_id
    choice = choice_of(server, COMPLETIONS, prompt="a", max_tokens=5, allowed_token_ids=[eos])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


# -- truncate_prompt_tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_last_tokens_of_a_prompt_are_kept(server: Any, path: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 2, "return_token_ids": True}
    asked |= {"messages": MESSAGES} if path == CHAT else {"prompt": "the cat and the dog"}

    def ids(**more: Any) -> list[int]:
        reply = ok(server.post(path, **asked, **more))
        assert reply["usage"]["prompt_tokens"] == len(found(reply))
        return found(reply)

    def found(reply: dict[str, Any]) -> list[int]:
        ids: list[int] = (reply if path == CHAT else reply["choices"][0])["prompt_token_ids"]
        return ids

    whole = ids()
    assert ids(truncate_prompt_tokens=3) == whole[-3:]
    assert ids(truncate_prompt_tokens=10_000) == ids(truncate_prompt_tokens=-1) == whole
    refused = server.post(path, **asked, truncate_prompt_tokens=0)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_minus_one_keeps_what_fits_before_the_new_tokens(server: Any, path: str) -> None:
    text, limit = "the cat " * 400, server.service.capabilities.max_model_len
    asked: dict[str, Any] = {"max_tokens": 7, "ignore_eos": True}
    asked |= {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    usage = ok(server.post(path, **asked, truncate_prompt_tokens=-1))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (limit + 1 - 7, 7)
    refused = server.post(path, **asked)
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_an_echo_is_the_kept_part_with_its_rows(server: Any) -> None:
    asked = {"max_tokens": 0, "echo": True, "logprobs": 0}
    text = "the cat and the dog"
    whole = choice_of(server, COMPLETIONS, prompt=text, **asked)
    cut = choice_of(server, COMPLETIONS, prompt=text, truncate_prompt_tokens=2, **asked)
    assert cut["logprobs"]["tokens"] == whole["logprobs"]["tokens"][-2:]
    assert cut["text"] == "".join(cut["logprobs"]["tokens"])
    assert cut["logprobs"]["token_logprobs"][0] is None


# -- request_id ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "prefix"), [(CHAT, "chatcmpl"), (COMPLETIONS, "cmpl")])
def test_the_request_id_ends_the_replys_id_and_may_be_used_again(server: Any, path: str, prefix: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 2, "request_id": "mine/1"}
    asked |= {"messages": MESSAGES} if path == CHAT else {"prompt": ["a", "b"]}
    for _ in range(2):
        reply = server.post(path, **asked)
        assert ok(reply)["id"] == f"{prefix}-mine/1"
        assert "warning" not in reply.headers
    refused = server.post(path, **asked | {"request_id": "a b"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")


# -- chat_template -------------------------------------------------------------------------------------------


def test_a_template_of_the_request_needs_the_operators_consent(server: Any) -> None:
    for path in (CHAT, "/tokenize"):
        refused = server.post(path, messages=MESSAGES, chat_template=SHOUT)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
        assert "--trust-request-chat-template" in refused.json()["error"]["message"]


def test_a_template_that_is_not_allowed_is_not_parsed(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    monkeypatch.setattr(
        service_module, "variables_of", lambda template: parsed.append(template) or frozenset()
    )
    refused = server.post(CHAT, messages=MESSAGES, chat_template=SHOUT, enable_thinking=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
    assert SHOUT not in parsed


def test_a_template_of_the_request_replaces_the_models(trusting: Any) -> None:
    asked = {"messages": MESSAGES, "chat_template": SHOUT, "chat_template_kwargs": {"mood": "glad"}}
    reply = ok(trusting.post(CHAT, **asked, max_tokens=1, return_token_ids=True))
    want = trusting.llm.text.encode("<USER>the cat and the dogglad:", add_special_tokens=False).tolist()
    assert reply["prompt_token_ids"] == want
    assert ok(trusting.post("/tokenize", **asked))["tokens"] == want
    assert str(SHOUT) not in trusting.llm.text.sound_shapes


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ raise_exception('no') }}", "{{ messages.__class__.__mro__ }}", "nothing"]
)
def test_a_template_that_fails_or_drops_the_messages_is_a_400(trusting: Any, template: str) -> None:
    for kwargs in ({}, {"mood": "glad"}):
        asked = {"messages": MESSAGES, "chat_template": template, "chat_template_kwargs": kwargs}
        refused = trusting.post(CHAT, **asked, max_tokens=1)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"].startswith(("messages", "chat_template_kwargs.mood"))


# -- skip_special_tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_special_tokens_are_shown_on_request(server: Any, path: str) -> None:
    text = server.llm.text
    special = next(one for one in sorted(text.special_token_ids) if one != text.eos_token_id)
    plain, mark = 71, text.vocabulary.token_text(special)
    asked: dict[str, Any] = {"max_tokens": 12, "seed": 3, "allowed_token_ids": [special, plain]}
    asked |= {"logit_bias": {str(special): 5, str(plain): 5}, "return_token_ids": True, "logprobs": True}
    asked |= {"messages": MESSAGES} if path == CHAT else {"prompt": "the cat", "logprobs": 0}
    hidden = choice_of(server, path, **asked)
    shown = choice_of(server, path, **asked, skip_special_tokens=False)
    assert shown["token_ids"] == hidden["token_ids"]
    assert {special, plain} <= set(shown["token_ids"])
    ids, letter = shown["token_ids"], text.vocabulary.token_text(plain)
    want = "".join(mark if one == special else letter for one in ids)
    said = [one["message"]["content"] if path == CHAT else one["text"] for one in (hidden, shown)]
    assert said == [want.replace(mark, ""), want]
    chunks = chunks_of(server, path, **asked, skip_special_tokens=False)
    parts = [one["delta"].get("content", "") if path == CHAT else one["text"] for one in chunks]
    assert "".join(parts) == want
    if path == CHAT:
        rows = shown["logprobs"]["content"]
        assert b"".join(bytes(row["bytes"]) for row in rows).decode() == want
    else:
        offsets = shown["logprobs"]["text_offset"]
        assert [want[a:b] for a, b in zip(offsets, [*offsets[1:], None], strict=True)] == [
            mark if one == special else letter for one in ids
        ]


def test_the_token_that_ended_the_text_is_shown_only_if_asked(server: Any) -> None:
    text = server.llm.text
    eos, mark = text.eos_token_id, text.vocabulary.token_text(text.eos_token_id)
    asked: dict[str, Any] = {"prompt": "a", "max_tokens": 3, "allowed_token_ids": [eos]}
    asked |= {"skip_special_tokens": False}
    assert choice_of(server, COMPLETIONS, **asked)["text"] == ""
    assert choice_of(server, COMPLETIONS, **asked, include_stop_str_in_output=True)["text"] == mark
    assert choice_of(server, COMPLETIONS, **asked, ignore_eos=True)["text"] == mark * 3


def test_a_stop_string_cuts_a_text_with_special_tokens_at_the_same_place(server: Any) -> None:
    text = server.llm.text
    special = next(one for one in sorted(text.special_token_ids) if one != text.eos_token_id)
    letter, mark = text.vocabulary.token_text(71), text.vocabulary.token_text(special)
    asked: dict[str, Any] = {"prompt": "the cat", "max_tokens": 40, "seed": 3, "stop": [letter * 3]}
    asked |= {"allowed_token_ids": [special, 71], "logit_bias": {str(special): 5, "71": 5}}
    shown = choice_of(server, COMPLETIONS, **asked, skip_special_tokens=False, return_token_ids=True)
    assert shown["stop_reason"] == letter * 3
    assert shown["text"].replace(mark, "") == choice_of(server, COMPLETIONS, **asked)["text"]
    chunks = chunks_of(server, COMPLETIONS, **asked, skip_special_tokens=False)
    assert "".join(chunk["text"] for chunk in chunks) == shown["text"]
    ids, num_plain = shown["token_ids"], shown["text"].replace(mark, "").count(letter)
    seen = [one for at, one in enumerate(ids) if one == special and ids[:at].count(71) <= num_plain]
    assert shown["text"].count(mark) == len(seen)
