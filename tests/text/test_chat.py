"""Conversations laid out by the model's own template, through the offline front door."""

from __future__ import annotations

from typing import Any

import pytest

from logprobe import LLM, SamplingParams
from logprobe.errors import ParameterError
from logprobe.text.chat import Layout, lay_out


def test_chat_uses_the_models_template(tiny_llm: LLM) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    output = tiny_llm.chat(messages, SamplingParams(max_tokens=1))[0]
    data = tiny_llm.text.vocabulary.bytes_of(output.prompt_token_ids)
    assert data == b"user: the cat\nassistant:" == (output.prompt or "").encode()


def test_chat_continues_a_message_and_takes_tools_as_vllm_does(tiny_llm: LLM) -> None:
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "and the"}]
    begun = {"continue_final_message": True, "add_generation_prompt": False}
    [output] = tiny_llm.chat(messages, SamplingParams(max_tokens=1), **begun)
    assert output.prompt == "user: the cat\nassistant: and the"
    tools = [{"type": "function", "function": {"name": "look"}}]
    prompt = lay_out(messages, tiny_llm.text, Layout(tools=tools))
    assert prompt.startswith("system: # Tools\n")
    assert prompt.endswith("user: the cat\nassistant: and the\nassistant:")


def test_chat_lays_content_parts_out_as_their_text(tiny_llm: LLM) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    one, other = (
        tiny_llm.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=1))[0]
        for content in (parts, "the cat")
    )
    assert one.prompt == other.prompt
    assert one.prompt_token_ids == other.prompt_token_ids


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        (b"the cat", "messages"),
        (["the cat"], r"messages\[0\]"),
        ([{"content": "the cat"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], r"messages\[0\]\.content"),
    ],
)
def test_a_conversation_of_a_wrong_shape_is_refused_by_its_place(
    tiny_llm: LLM, messages: Any, named: str
) -> None:
    with pytest.raises(ParameterError, match=named):
        tiny_llm.chat(messages)


def test_a_templates_own_refusal_is_an_error_of_the_messages(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_llm.text.tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
    with pytest.raises(ParameterError, match=r"messages: .* no system role"):
        tiny_llm.chat([{"role": "user", "content": "the cat"}])
