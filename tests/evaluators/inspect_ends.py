"""Errors of our models in Inspect, and how their replies end: `python inspect_ends.py MODEL`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from inspect_ai.model import GenerateConfig, Model, get_model

ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "verbosity": ("the cat", {"verbosity": "low"}),
    "reasoning_effort": ("the cat", {"reasoning_effort": "high"}),
    "top_logprobs": ("the cat", {"top_logprobs": 2}),
    "extra_body": ("the cat", {"extra_body": {"temprature": 0}}),
    "short": ("the cat", {"max_tokens": 3, "logprobs": True, "extra_body": {"ignore_eos": True}}),
    "until the context is full": ("the cat", {"extra_body": {"ignore_eos": True}}),
    "too long": ("the cat " * 2000, {}),
}


async def main(name: str) -> None:
    model = get_model(f"logprobe/{name}", kv_cache_memory_bytes=1 << 21)
    found = {
        what: await end_of(model, text, GenerateConfig(**asked)) for what, (text, asked) in ASKED.items()
    }
    try:
        get_model(f"logprobe/{name}", base_url="http://127.0.0.1:8000")
    except ValueError as error:
        found["base_url"] = named(error)
    sys.stdout.write(f"\n{json.dumps(found)}\n")


async def end_of(model: Model, text: str, config: GenerateConfig) -> str:
    try:
        output = await model.generate(text, config=config)
    except ValueError as error:
        return named(error)
    rows = output.choices[0].logprobs
    numbers = (
        "" if rows is None or output.usage is None else f" {len(rows.content)} {output.usage.output_tokens}"
    )
    return f"{output.stop_reason}{numbers}"


def named(error: Any) -> str:
    return f"{type(error).__name__} {error.parameter}"


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
