"""structured-logprobs: the log-probability of each value of a JSON reply."""

from __future__ import annotations

import json
from typing import Any

import openai_
from asked import RESPONSE_FORMAT, REVIEW, answer, rows_of
from openai import OpenAI
from structured_logprobs.main import add_logprobs


def ask_json(url: str, model: str) -> tuple[Any, list[tuple[str, float]]]:
    """Ask for JSON of a schema; compare each value's log-probability with the server's."""
    reply = OpenAI(base_url=url, api_key="none").chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": REVIEW}],
        temperature=0,
        logprobs=True,
        response_format=RESPONSE_FORMAT,
        extra_body={"field_logprobs": True},
    )
    (found,) = add_logprobs(reply).log_probs
    fields = {field["pointer"]: field["logprob"] for field in reply.choices[0].model_extra["fields"]}
    assert abs(found["stars"] - fields["/stars"]) < 1e-6, (found, fields)
    assert found["mood"] < fields["/mood"] + 1e-6, (found, fields)  # includes the quotation marks
    choice = reply.choices[0]
    return json.loads(choice.message.content), rows_of(choice.logprobs.content)


if __name__ == "__main__":
    answer(ask_json, openai_.ask_tool, "structured-logprobs", "openai")
