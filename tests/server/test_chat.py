"""`/v1/chat/completions` with OpenAI's own client."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest

from reply_forms import stop_in

MESSAGES: Any = [{"role": "user", "content": "the cat and the dog"}]


def create(client: Any, **options: Any) -> Any:
    model = client.models.list().data[0].id
    return client.chat.completions.create(**{"model": model, "messages": MESSAGES, "max_tokens": 6} | options)


def fold(chunks: Any, index: int = 0) -> dict[str, Any]:
    """Merge the text, rows and finish reason of one choice of a stream."""
    found: dict[str, Any] = {"text": "", "rows": [], "reason": None}
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            found["text"] += choice.delta.content or ""
            found["rows"] += [row.model_dump() for row in choice.logprobs.content] if choice.logprobs else []
            found["reason"] = choice.finish_reason or found["reason"]
    return found


def own_bytes(rows: Any) -> bytes:
    return b"".join(bytes(row["bytes"]) for row in rows)


def test_the_numbers_are_those_of_the_offline_front_door(server: Any, client: Any) -> None:
    from logprobe import SamplingParams

    reply = create(client, logprobs=True, top_logprobs=3, seed=5)
    (output,) = server.llm.chat(MESSAGES, SamplingParams(max_tokens=6, logprobs=3, seed=5))
    (completion,) = output.outputs
    assert reply.choices[0].message.content == completion.text
    record = completion.logprobs
    for row, token_id, position in zip(
        reply.choices[0].logprobs.content, completion.token_ids, record, strict=True
    ):
        assert row.token == server.llm.text.vocabulary.token_text(token_id)
        assert row.logprob == position[token_id].logprob
        best = sorted(position.values(), key=lambda entry: entry.rank)[:3]
        assert [one.logprob for one in row.top_logprobs] == [entry.logprob for entry in best]


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_holds_what_the_whole_reply_holds(client: Any, seed: int) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 4, "seed": seed, "max_tokens": 25}
    whole = create(client, **asked).choices[0]
    told = fold(create(client, stream=True, **asked))
    assert told["text"] == whole.message.content
    assert told["rows"] == [row.model_dump() for row in whole.logprobs.content]
    assert told["reason"] == whole.finish_reason


@pytest.mark.parametrize("seed", range(5))
def test_the_bytes_of_the_rows_are_the_text(client: Any, seed: int) -> None:
    choice = create(client, logprobs=True, seed=seed, max_tokens=25).choices[0]
    rows = [row.model_dump() for row in choice.logprobs.content]
    assert own_bytes(rows).decode("utf-8", "replace") == choice.message.content


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_a_text_that_ends_inside_a_character_has_a_replacement_and_its_rows_the_bytes(
    client: Any, server: Any, num_tokens: int
) -> None:
    ids = server.llm.text.encode("a🐈", add_special_tokens=False).tolist()
    assert len(ids) == 4, "the character is of three tokens"
    data = server.llm.text.bytes_of(ids[:num_tokens])
    form = {"type": "choice", "choice": ["a🐈"]}
    asked: dict[str, Any] = {"logprobs": True, "max_tokens": num_tokens, "response_format": form}
    # The grammar may use other tokens with the same bytes.
    asked["extra_body"] = {"allowed_token_ids": [*ids, 1]}
    whole, told = create(client, **asked).choices[0], fold(create(client, stream=True, **asked))
    rows = [row.model_dump() for row in whole.logprobs.content]
    assert own_bytes(rows) == own_bytes(told["rows"]) == data
    text = {1: "a", 2: "a\ufffd", 3: "a\ufffd", 4: "a🐈"}[num_tokens]
    assert whole.message.content == told["text"] == text == data.decode("utf-8", "replace")


def test_k_means_k(client: Any) -> None:
    for k in (0, 1, 5, 20):
        choice = create(client, logprobs=True, top_logprobs=k).choices[0]
        assert all(len(row.top_logprobs) == k for row in choice.logprobs.content)


def test_a_k_beyond_the_vocabulary_gives_the_vocabulary(client: Any, server: Any) -> None:
    choice = create(client, logprobs=True, top_logprobs=10_000, max_tokens=1).choices[0]
    assert len(choice.logprobs.content[0].top_logprobs) == server.service.vocab_size


def test_logprobs_is_null_where_it_was_not_asked(server: Any) -> None:
    reply = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=2).json()
    assert reply["choices"][0]["logprobs"] is None
    asked = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=2, logprobs=True).json()
    assert set(asked["choices"][0]["logprobs"]) == {"content", "refusal"}
    assert asked["choices"][0]["logprobs"]["refusal"] is None


def test_several_choices_come_whole_and_streamed_alike(client: Any) -> None:
    asked: dict[str, Any] = {"n": 3, "seed": 2, "logprobs": True, "max_tokens": 10}
    whole = create(client, **asked)
    chunks = list(create(client, stream=True, **asked))
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) > 1
    for choice in whole.choices:
        told = fold(chunks, choice.index)
        assert told["text"] == choice.message.content
        assert told["rows"] == [row.model_dump() for row in choice.logprobs.content]


def test_a_stream_opens_with_the_role_and_closes_with_the_reason_and_usage(client: Any) -> None:
    asked = {"seed": 1, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(create(client, logprobs=True, **asked))
    first, *_, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].logprobs is None
    assert last.choices[0].finish_reason == "length"
    assert last.choices[0].logprobs is None
    assert usage.choices == []
    assert usage.usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stop_string_cuts_text_and_rows_alike(client: Any) -> None:
    free = create(client, logprobs=True, seed=1, max_tokens=30).choices[0]
    text = free.message.content
    stop = stop_in(text)
    asked: dict[str, Any] = {"logprobs": True, "seed": 1, "max_tokens": 30, "stop": stop}
    whole, told = create(client, **asked).choices[0], fold(create(client, stream=True, **asked))
    assert whole.message.content == text[: text.index(stop)] == told["text"]
    assert whole.finish_reason == told["reason"] == "stop"
    rows = [row.model_dump() for row in whole.logprobs.content]
    assert rows == told["rows"]
    assert own_bytes(rows).decode("utf-8", "replace").startswith(whole.message.content)
    assert len(own_bytes(rows[:-1])) < len(whole.message.content.encode())


def test_temperature_changes_no_raw_number(client: Any) -> None:
    cold = create(client, logprobs=True, top_logprobs=2, temperature=0, max_tokens=1)
    hot = create(client, logprobs=True, top_logprobs=2, temperature=2, top_p=0.1, max_tokens=1)
    assert cold.choices[0].logprobs.content[0].top_logprobs == hot.choices[0].logprobs.content[0].top_logprobs


def test_content_may_come_in_parts(client: Any, server: Any) -> None:
    parts = [{"type": "text", "text": "the cat "}, {"type": "text", "text": "and the dog"}]
    whole = create(client, temperature=0)
    in_parts = create(client, temperature=0, messages=[{"role": "user", "content": parts}])
    assert in_parts.choices[0].message.content == whole.choices[0].message.content
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    refused = server.post("/v1/chat/completions", messages=[{"role": "user", "content": image}])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[0].content"


def test_without_max_tokens_the_context_is_the_limit(server: Any) -> None:
    reply = server.post("/v1/chat/completions", messages=MESSAGES, ignore_eos=True).json()
    assert reply["usage"]["total_tokens"] == server.service.capabilities.max_model_len + 1
    assert reply["choices"][0]["finish_reason"] == "length"


def test_the_processed_distribution_comes_beside_the_raw_one(server: Any) -> None:
    asked: dict[str, Any] = {
        "messages": MESSAGES,
        "max_tokens": 3,
        "logprobs": True,
        "top_logprobs": 5,
        "temperature": 0.5,
        "top_k": 2,
        "seed": 0,
    }
    raw = server.post("/v1/chat/completions", **asked).json()["choices"][0]["logprobs"]
    both = server.post("/v1/chat/completions", logprobs_mode="both", **asked).json()
    found = both["choices"][0]["logprobs"]
    assert found["content"] == raw["content"]
    assert both["logprobs_info"]["stages"] == ["raw", "processed"]
    alone = server.post("/v1/chat/completions", logprobs_mode="processed_logprobs", **asked).json()
    assert alone["choices"][0]["logprobs"]["content"] == found["processed_content"]
    for row in found["processed_content"]:
        assert [one["logprob"] > -9999 for one in row["top_logprobs"]] == [True, True], "top_k is 2"


def test_extensions_add_fields_only_when_asked(server: Any) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 4, "logprobs": True, "seed": 3}
    plain = server.post("/v1/chat/completions", **asked).json()
    extended = server.post(
        "/v1/chat/completions",
        entropy=True,
        logprob_token_ids=[5, 200],
        return_token_ids=True,
        prompt_logprobs=1,
        prompt_rows=True,
        **asked,
    ).json()
    choice = extended["choices"][0]
    # With entropy the kernel uses another loop, whose last bit depends on the compiler.
    pairs = zip(choice["logprobs"]["content"], plain["choices"][0]["logprobs"]["content"], strict=True)
    for one, other in pairs:
        assert one == other | {"logprob": pytest.approx(other["logprob"], abs=1e-6)}
    assert set(plain["choices"][0]) == {"index", "message", "logprobs", "finish_reason", "stop_reason"}
    assert len(choice["token_ids"]) == 4
    assert all(value >= 0 for value in choice["logprobs"]["entropy"])
    assert [[one["token_id"] for one in row] for row in choice["logprobs"]["given"]] == [[5, 200]] * 4
    assert len(extended["prompt_token_ids"]) == extended["usage"]["prompt_tokens"]
    assert extended["prompt_rows"][0] is None
    assert [row["token_id"] for row in extended["prompt_rows"][1:]] == extended["prompt_token_ids"][1:]
    assert "prompt_logprobs" not in extended


def test_a_stream_carries_the_extensions_in_increments(server: Any) -> None:
    asked: dict[str, Any] = {
        "messages": MESSAGES,
        "max_tokens": 9,
        "logprobs": True,
        "seed": 3,
        "entropy": True,
        "return_token_ids": True,
        "prompt_logprobs": 0,
        "logprobs_mode": "both",
    }
    whole = server.post("/v1/chat/completions", **asked).json()
    text = server.post("/v1/chat/completions", stream=True, **asked).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    rows = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    expected = whole["choices"][0]
    assert list(chain(*(choice.get("token_ids", []) for choice in choices))) == expected["token_ids"]
    for name in ("content", "processed_content", "entropy", "log_kept_mass"):
        assert list(chain(*(row[name] for row in rows))) == expected["logprobs"][name]
    told = [chunk for chunk in chunks if "prompt_logprobs" in chunk]
    assert [chunk["prompt_logprobs"] for chunk in told] == [whole["prompt_logprobs"]]


@pytest.mark.parametrize(("is_added", "num_more"), [(True, 1), (False, 0), (None, 0)])
def test_special_tokens_are_added_to_a_conversation_where_it_says_so(
    server: Any, is_added: bool | None, num_more: int
) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 1}
    plain = server.post("/v1/chat/completions", **asked).json()["usage"]["prompt_tokens"]
    reply = server.post("/v1/chat/completions", **asked, add_special_tokens=is_added).json()
    assert reply["usage"]["prompt_tokens"] == plain + num_more
