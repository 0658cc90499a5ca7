"""The requests that every client makes, and how its script reports the results; standard library only.

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
    """Run the task of the command line, check the result and print it.

    `ask_json(url, model)` returns a review and its token rows, `ask_tool` the name and the arguments of the
    tool call.
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
    """Check a review against the schema."""
    assert review.keys() == {"mood", "stars"}, review
    assert review["mood"] in MOODS, review
    assert review["stars"] in range(1, 6), review


def rows_of(content: Any) -> Rows:
    """Return the token and log-probability of each row of OpenAI's client."""
    return [(row.token, row.logprob) for row in content]
