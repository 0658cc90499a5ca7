"""What each client is asked, and how its script tells what it got: the standard library alone.

A script runs in its client's own environment as `python NAME_.py URL MODEL json` or `... tool`, and prints
one line of JSON.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Rows = list[tuple[str, float]]

REVIEW = (
    "The soup was cold and nobody said sorry. Give this review's mood, and its stars from 1 to 5, as JSON."
)
MOODS = ["happy", "sad"]
SCHEMA = {
    "type": "object",
    "properties": {
        "mood": {"type": "string", "enum": MOODS},
        "stars": {"type": "integer", "enum": [1, 2, 3, 4, 5]},
    },
    "required": ["mood", "stars"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "review", "schema": SCHEMA, "strict": True},
}
WEATHER = "What is the weather in Paris? Call the tool."
TOOL_NAME = "get_weather"
TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Tell the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def answer(
    ask_json: Callable[[str, str], tuple[Any, Rows]],
    ask_tool: Callable[[str, str], tuple[str, Any]],
    *packages: str,
) -> None:
    """Do what the command line says, hold it to what was asked, and print it.

    `ask_json(url, model)` gives a review and the rows of its tokens, `ask_tool` the name of the tool that was
    called and its arguments.
    """
    url, model, task = sys.argv[1:]
    if task == "json":
        review, rows = ask_json(url, model)
        check_review(review)
        assert rows, "no log-probabilities"
        assert all(logprob <= 0 for _, logprob in rows), rows
        found: dict[str, Any] = {"review": review, "rows": rows}
    else:
        name, arguments = ask_tool(url, model)
        assert name == TOOL_NAME, name
        assert isinstance(arguments["city"], str), arguments
        found = {"name": name, "arguments": arguments}
    versions = {package: version(package) for package in packages}
    sys.stdout.write(json.dumps(found | {"versions": versions}) + "\n")


def check_review(review: Any) -> None:
    """Hold a review to the schema."""
    assert review.keys() == {"mood", "stars"}, review
    assert review["mood"] in MOODS, review
    assert review["stars"] in range(1, 6), review


def rows_of(content: Any) -> Rows:
    """Token and log-probability of each row that OpenAI's client read."""
    return [(row.token, row.logprob) for row in content]
