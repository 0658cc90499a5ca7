"""Tool calls that clients send as history are parsed in linear time, off the event loop."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.text.channels import split
from logprobe.text.channels.calls import read_calls
from reply_forms import REPLIES, edge_of, form_of

if TYPE_CHECKING:
    from collections.abc import Iterator

DEPTH = 90
BYTES = 1 << 20
# Far from both: parsing the text again at each level would take more than 50 times as long.
MAX_TIMES = 15
TALKS = (
    "{% for tool in tools or [] %}[{{ tool.function | tojson }}]{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(depth: int, num_bytes: int) -> str:
    """Build a call nested in the `function` of others, each holding an equal share of `num_bytes`."""
    rest = json.dumps("the cat " * (num_bytes // (depth - 1) // 8))
    return (
        f'{{"rest": {rest}, "function": ' * (depth - 1)
        + '{"name": "now", "arguments": {}}'
        + "}" * (depth - 1)
    )


def test_a_nested_call_is_read_in_linear_time() -> None:
    reply = REPLIES["qwen2.5"]
    field = form_of(reply, edge_of([b"a"], reply.special, reply.template)).template.fields["tool_calls"]

    def seconds(data: bytes) -> float:
        times = []
        for _ in range(5):
            start = time.thread_time()
            assert [one.call.name for one in read_calls(field, data, {}, lambda value: value)] == ["now"]
            times.append(time.thread_time() - start)
        return min(times)

    nested, flat = (call(depth, BYTES).encode() for depth in (DEPTH, 2))
    assert abs(len(nested) - len(flat)) < BYTES / 4
    assert seconds(nested) < MAX_TIMES * seconds(flat)


@pytest.fixture
def talks(long_llm: Any, serve_llm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A served model whose chat template renders tool calls."""
    monkeypatch.setattr(long_llm.text.tokenizer, "chat_template", TALKS)
    with serve_llm(long_llm) as running:
        yield running


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_that_the_prompt_has_begun_is_read_beside_the_event_loop(
    talks: Any, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    threads: list[str] = []

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read_calls(*args)

    monkeypatch.setattr(split, "read_calls", noted)
    begun = "<tool_call>" + call(2, 6_000)
    reply = talks.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": begun}],
        continue_final_message=True,
        add_generation_prompt=False,
        tools=[{"type": "function", "function": {"name": "now"}}],
        n=8,
        max_tokens=3,
        ignore_eos=True,
        stream=is_stream,
    )
    assert reply.status_code == 200, reply.text
    assert len(threads) == 8
    assert all(name.startswith("logprobe-http-write") for name in threads), threads
