"""What other servers send, in the shapes of their own documents, and what becomes of it."""

from __future__ import annotations

from typing import Any

from logprobe.analysis.auditing.endpoint import Refusal
from logprobe.analysis.auditing.forms import Ask, Entry, Reply, Row, read


def reply_of(form: str, value: Any, **asked: Any) -> Reply:
    found = read(value, Ask(form=form, prompt="a b", **asked), "POST /")
    assert isinstance(found, Reply)
    return found


def test_openai_completions() -> None:
    logprobs = {
        "tokens": [" c", "token_id:7"],
        "token_logprobs": [-1, -2.5],
        "top_logprobs": [{" c": -1, " d": -3}, None],
        "text_offset": [3, 5],
    }
    value = {"choices": [{"text": " cd", "logprobs": logprobs}], "usage": {"completion_tokens": 2}}
    found = reply_of("completions", value)
    assert found.completion == (
        Row(Entry(-1.0, None, " c"), (Entry(-1.0, None, " c"), Entry(-3.0, None, " d"))),
        Row(Entry(-2.5, 7), None),
    )
    assert (found.text, found.num_completion_tokens) == (" cd", 2)


def test_an_echo_is_split_where_the_generated_tokens_begin() -> None:
    logprobs = {"tokens": ["a", " b", " c"], "token_logprobs": [None, -2, -3], "top_logprobs": None}
    value = {"choices": [{"text": "a b c", "logprobs": logprobs}], "usage": {"completion_tokens": 1}}
    found = reply_of("echo", value, max_tokens=1)
    assert found.prompt == (None, Row(Entry(-2.0, None, " b"), None))
    assert found.completion == (Row(Entry(-3.0, None, " c"), None),)


def test_an_echo_that_counts_a_token_without_a_row_keeps_the_prompts_rows() -> None:
    # vLLM 0.32 with max_tokens 0 beside return_token_ids.
    logprobs = {"tokens": ["a", " b"], "token_logprobs": [None, -2], "top_logprobs": None}
    choice = {"text": "", "logprobs": logprobs, "token_ids": [9], "prompt_token_ids": [3, 4]}
    found = reply_of("echo", {"choices": [choice], "usage": {"completion_tokens": 1}}, max_tokens=0)
    assert found.prompt == (None, Row(Entry(-2.0, None, " b"), None))
    assert found.completion == ()


def test_prompt_rows_of_vllm() -> None:
    rows = [
        None,
        {
            "9": {"logprob": -4.0, "rank": 12, "decoded_token": " b"},
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": " x"},
        },
    ]
    choice = {"text": "", "prompt_logprobs": rows, "prompt_token_ids": [3, 9], "token_ids": []}
    found = reply_of("prompt_logprobs", {"choices": [choice]})
    assert found.prompt_ids == (3, 9)
    assert found.prompt is not None
    assert found.prompt[0] is None
    assert found.prompt[1] == Row(Entry(-4.0, 9, " b"), (Entry(-4.0, 9, " b"), Entry(-0.5, 5, " x")))


def test_where_rows_are_missing_the_first_of_a_row_is_its_token() -> None:
    rows = [None, {"5": {"logprob": -4.0}, "9": {"logprob": -0.5}}]
    found = reply_of(
        "prompt_logprobs", {"choices": [{"prompt_logprobs": rows, "prompt_token_ids": [3, 9, 5]}]}
    )
    assert found.prompt is not None
    assert found.prompt[1] is not None
    assert found.prompt[1].chosen == Entry(-4.0, 5)


def test_completions_of_llama_cpp_have_the_shape_of_chats() -> None:
    top = {"id": 5, "token": " x", "bytes": [32, 120], "logprob": -2.0}
    row = {"id": 6, "token": " c", "bytes": [32, 99], "logprob": -0.25, "top_logprobs": [top]}
    want = (Row(Entry(-0.25, 6, " c", b" c"), (Entry(-2.0, 5, " x", b" x"),)),)
    assert (
        reply_of("completions", {"choices": [{"text": " c", "logprobs": {"content": [row]}}]}).completion
        == want
    )


def test_a_stream_comes_to_the_whole() -> None:
    row = {"token": "a", "logprob": -1, "bytes": [97], "top_logprobs": []}
    events = [
        {"choices": [{"index": 0, "delta": {"role": "assistant"}, "logprobs": None}]},
        {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [row]}}]},
        {"choices": [{"index": 1, "delta": {"content": "other"}}]},
        {
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": "a"},
                    "logprobs": {"content": [row]},
                    "finish_reason": "stop",
                }
            ]
        },
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
    ]
    ask = Ask(form="chat", prompt=({"role": "user", "content": "?"},), stream=True)
    found = read(events, ask, "POST /")
    assert isinstance(found, Reply)
    assert (found.text, found.num_completion_tokens) == ("aa", 2)
    assert found.completion == (Row(Entry(-1.0, None, "a", b"a"), ()),) * 2


def test_events_of_a_stream_may_have_no_choices_and_no_index() -> None:
    events: list[Any] = [
        {"id": "ping"},
        {"choices": [{"index": None, "text": " c", "token_ids": [4]}]},
        {"choices": None},
        {"choices": [{"text": " d", "token_ids": [5]}]},
        {"usage": {"completion_tokens": 2}},
    ]
    found = reply_of("completions", events, stream=True)
    assert (found.text, found.completion_ids, found.num_completion_tokens) == (" c d", (4, 5), 2)


def test_a_whole_reply_to_a_stream_is_a_refusal() -> None:
    ask = Ask(form="completions", prompt="a", stream=True)
    assert isinstance(read({"choices": []}, ask, "POST /"), Refusal)


def test_what_is_no_number_of_json_is_none_and_never_a_crash() -> None:
    for number in (float("-inf"), float("nan"), 1e305):
        logprobs = {"tokens": ["a"], "token_logprobs": [number]}
        found = reply_of("completions", {"choices": [{"text": "a", "logprobs": logprobs}]})
        assert found.completion is not None
        assert found.completion[0].chosen == Entry(None, None, "a")


def test_a_body_has_the_words_of_its_form() -> None:
    ask = Ask(form="completions", prompt=(1, 2), max_tokens=3, num_top=4, params={"temperature": 0.5})
    body = ask.body({"return_token_ids": True})
    expected = {"prompt": [1, 2], "max_tokens": 3, "logprobs": 4, "temperature": 0.5}
    assert body == expected | {"return_token_ids": True}
    assert Ask(form="echo", prompt="a").body({})["echo"] is True
    assert Ask(form="prompt_logprobs", prompt="a", num_top=2).body({})["prompt_logprobs"] == 2
    chat = Ask(form="chat", prompt=({"role": "user", "content": "?"},), stream=True).body({})
    assert (chat["logprobs"], chat["top_logprobs"], chat["stream"]) == (True, 5, True)
