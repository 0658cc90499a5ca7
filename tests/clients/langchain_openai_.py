"""LangChain's ChatOpenAI: structured output, and tools bound to a model."""

from __future__ import annotations

from typing import Any, Literal

from asked import REVIEW, TOOL_NAME, WEATHER, answer
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Review(BaseModel):
    """A review in two words."""

    mood: Literal["happy", "sad"]
    stars: Literal[1, 2, 3, 4, 5]


@tool
def get_weather(city: str) -> str:
    """Tell the weather in a city."""
    return f"It rains in {city}."


def ask_json(url: str, model: str) -> tuple[Any, list[tuple[str, float]]]:
    """Ask for JSON of a class; return the output with its log-probabilities."""
    chat = ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0, logprobs=True, top_logprobs=2)
    found = chat.with_structured_output(Review, include_raw=True).invoke(REVIEW)
    assert found["parsing_error"] is None, found
    content = found["raw"].response_metadata["logprobs"]["content"]
    return found["parsed"].model_dump(), [(row["token"], row["logprob"]) for row in content]


def ask_tool(url: str, model: str) -> tuple[str, Any]:
    """Force a tool call; return its name and arguments."""
    chat = ChatOpenAI(model=model, base_url=url, api_key="none", temperature=0)
    reply = chat.bind_tools([get_weather], tool_choice=TOOL_NAME).invoke(WEATHER)
    assert not reply.invalid_tool_calls, reply
    call, *_ = reply.tool_calls  # the model may have called it several times
    return call["name"], call["args"]


if __name__ == "__main__":
    answer(ask_json, ask_tool, "langchain-openai", "openai")
