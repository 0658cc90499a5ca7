"""OpenAI's Agents SDK, which uses /v1/responses by default."""

from __future__ import annotations

import json
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from asked import REVIEW, WEATHER, answer
from openai import AsyncOpenAI
from pydantic import BaseModel


class Review(BaseModel):
    """A review in two words."""

    mood: Literal["happy", "sad"]
    stars: Literal[1, 2, 3, 4, 5]


@function_tool
def get_weather(city: str) -> str:
    """Tell the weather in a city."""
    return f"It rains in {city}."


def ask_json(url: str, model: str) -> tuple[Any, list[tuple[str, float]]]:
    """Ask for JSON of a class; return the output with its log-probabilities."""
    _use(url)
    settings = ModelSettings(temperature=0, top_logprobs=2)
    agent = Agent("critic", model=model, model_settings=settings, output_type=Review)
    found = Runner.run_sync(agent, REVIEW)
    (message,) = found.raw_responses[0].output
    return found.final_output.model_dump(), [(row.token, row.logprob) for row in message.content[0].logprobs]


def ask_tool(url: str, model: str) -> tuple[str, Any]:
    """Force a tool call whose result is the agent's result."""
    _use(url)
    agent = Agent(
        "forecaster",
        model=model,
        model_settings=ModelSettings(temperature=0, tool_choice="required"),
        tools=[get_weather],
        tool_use_behavior="stop_on_first_tool",
    )
    found = Runner.run_sync(agent, WEATHER)
    call, *_ = found.raw_responses[0].output  # the model may have called it several times
    arguments = json.loads(call.arguments)
    assert found.final_output == f"It rains in {arguments['city']}."
    return call.name, arguments


def _use(url: str) -> None:
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=url, api_key="none"))


if __name__ == "__main__":
    answer(ask_json, ask_tool, "openai-agents", "openai")
