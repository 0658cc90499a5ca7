"""DSPy: a signature through its JSON adapter, and a tool through the model's native calls."""

from __future__ import annotations

import json
from typing import Any, Literal

import dspy
from asked import RESPONSE_FORMAT, REVIEW, TOOL, WEATHER, answer, rows_of


class Review(dspy.Signature):
    """Give a review's mood and its stars."""

    review: str = dspy.InputField()
    mood: Literal["happy", "sad"] = dspy.OutputField()
    stars: Literal[1, 2, 3, 4, 5] = dspy.OutputField()


def ask_json(url: str, model: str) -> tuple[Any, list[tuple[str, float]]]:
    """Return the fields of a signature, with log-probabilities."""
    # For unknown models DSPy assumes few features, so the schema is sent explicitly.
    lm = _lm(url, model, logprobs=True, top_logprobs=2, response_format=RESPONSE_FORMAT)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Review)(review=REVIEW)
    return {"mood": found.mood, "stars": found.stars}, rows_of(found.logprobs.content)


def ask_tool(url: str, model: str) -> tuple[str, Any]:
    """Force a tool call; return its name and arguments."""
    (reply,) = _lm(url, model)(WEATHER, tools=[TOOL], tool_choice="required")
    call, *_ = reply["tool_calls"]  # the model may have called it several times
    return call.function.name, json.loads(call.function.arguments)


def _lm(url: str, model: str, **settings: Any) -> dspy.LM:
    fixed = {"api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 200, "cache": False}
    return dspy.LM(f"openai/{model}", **fixed, **settings)


if __name__ == "__main__":
    answer(ask_json, ask_tool, "dspy")
