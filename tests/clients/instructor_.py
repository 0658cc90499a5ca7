"""instructor: a class from a reply in JSON mode, and in tool mode (its default)."""

from __future__ import annotations

from typing import Any, Literal

import instructor
from asked import REVIEW, TOOL_NAME, WEATHER, answer, rows_of
from openai import OpenAI
from pydantic import BaseModel


class Review(BaseModel):
    """A review in two words."""

    mood: Literal["happy", "sad"]
    stars: Literal[1, 2, 3, 4, 5]


class get_weather(BaseModel):  # noqa: N801 - the tool's name
    """Tell the weather in a city."""

    city: str


def ask_json(url: str, model: str) -> tuple[Any, list[tuple[str, float]]]:
    """Ask for JSON of a class; return the output with its log-probabilities."""
    client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=instructor.Mode.JSON_SCHEMA)
    review, reply = client.chat.completions.create_with_completion(
        model=model,
        response_model=Review,
        messages=[{"role": "user", "content": REVIEW}],
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    return review.model_dump(), rows_of(reply.choices[0].logprobs.content)


def ask_tool(url: str, model: str) -> tuple[str, Any]:
    """Return the tool call that instructor makes and parses."""
    client = instructor.from_openai(OpenAI(base_url=url, api_key="none"))
    weather, reply = client.chat.completions.create_with_completion(
        model=model,
        response_model=get_weather,
        messages=[{"role": "user", "content": WEATHER}],
        temperature=0,
    )
    call, *_ = reply.choices[0].message.tool_calls  # the model may have called it several times
    assert call.function.name == TOOL_NAME, call
    return call.function.name, weather.model_dump()


if __name__ == "__main__":
    answer(ask_json, ask_tool, "instructor", "openai")
