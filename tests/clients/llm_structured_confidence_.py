"""llm-structured-confidence: the confidence in each value of a JSON reply."""

from __future__ import annotations

import json
from typing import Any

import openai_
from asked import RESPONSE_FORMAT, REVIEW, SCHEMA, answer, rows_of
from llm_structured_confidence import extract_logprobs
from openai import OpenAI


def ask_json(url: str, model: str) -> tuple[Any, list[tuple[str, float]]]:
    """Ask for JSON of a schema; compare each value's probability with the server's."""
    reply = OpenAI(base_url=url, api_key="none").chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": REVIEW}],
        temperature=0,
        logprobs=True,
        top_logprobs=5,
        response_format=RESPONSE_FORMAT,
        extra_body={"field_logprobs": True},
    )
    found = {entry.path: entry for entry in extract_logprobs(reply, response_schema=SCHEMA)}
    for field in reply.choices[0].model_extra["fields"]:
        entry = found.get(field["pointer"].removeprefix("/"))
        if entry is not None:
            assert entry.value == field["value"], (entry, field)
            assert abs(entry.field_logprob.joint_logprob - field["logprob"]) < 1e-6, (entry, field)
    choice = reply.choices[0]
    return json.loads(choice.message.content), rows_of(choice.logprobs.content)


if __name__ == "__main__":
    answer(ask_json, openai_.ask_tool, "llm-structured-confidence", "openai")
