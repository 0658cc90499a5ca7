"""Pydantic AI: structured output by the model's JSON mode, and by tools (its default)."""

from __future__ import annotations

from typing import Any, Literal

from asked import REVIEW, TOOL_NAME, WEATHER, answer
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Review(BaseModel):
    """A review in two words."""

    mood: Literal["happy", "sad"]
    stars: Literal[1, 2, 3, 4, 5]


class Place(BaseModel):
    """Where it is to be told."""

    city: str


def ask_json(url: str, model: str) -> tuple[Any, list[tuple[str, float]]]:
    """Ask for JSON of a class; return the output with its log-probabilities."""
    settings = {"temperature": 0, "openai_logprobs": True, "openai_top_logprobs": 2}
    agent = Agent(_model(url, model), output_type=NativeOutput(Review), model_settings=settings)
    found = agent.run_sync(REVIEW)
    (part,) = found.response.parts
    rows = part.provider_details["logprobs"]
    return found.output.model_dump(), [(row["token"], row["logprob"]) for row in rows]


def ask_tool(url: str, model: str) -> tuple[str, Any]:
    """Ask with an output tool; return its name and arguments."""
    output = ToolOutput(Place, name=TOOL_NAME, description="Tell the weather in a city.")
    agent = Agent(_model(url, model), output_type=output, model_settings={"temperature": 0})
    found = agent.run_sync(WEATHER)
    call, *_ = found.response.tool_calls  # the model may have called it several times
    return call.tool_name, found.output.model_dump()


def _model(url: str, model: str) -> OpenAIResponsesModel:
    """Return the model that `openai:NAME` would make, for another base URL."""
    return OpenAIResponsesModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))


if __name__ == "__main__":
    answer(ask_json, ask_tool, "pydantic-ai-slim", "openai")
