"""The OpenAI client."""

from __future__ import annotations

import json
from typing import Any

from asked import RESPONSE_FORMAT, REVIEW, TOOL, WEATHER, answer, rows_of
from openai import OpenAI


def ask_json(url: str, model: str) -> tuple[Any, list[tuple[str, float]]]:
    """Ask for JSON of a schema; return the output with its log-probabilities."""
    reply = OpenAI(base_url=url, api_key="none").chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": REVIEW}],
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        response_format=RESPONSE_FORMAT,
    )
    choice = reply.choices[0]
    return json.loads(choice.message.content), rows_of(choice.logprobs.content)


def ask_tool(url: str, model: str) -> tuple[str, Any]:
    """Force a tool call; return its name and arguments."""
    reply = OpenAI(base_url=url, api_key="none").chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": WEATHER}],
        temperature=0,
        tools=[TOOL],
        tool_choice="required",
    )
    assert reply.choices[0].finish_reason == "tool_calls", reply
    call, *_ = reply.choices[0].message.tool_calls  # the model may have called it several times
    return call.function.name, json.loads(call.function.arguments)


if __name__ == "__main__":
    answer(ask_json, ask_tool, "openai")
