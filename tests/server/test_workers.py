"""What is written and read beside the event loop: how much may wait, and what is not refused."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import chain
from typing import Any

import pytest

from logprobe.server.http.errors import ApiError
from logprobe.server.http.workers import MAX_JOBS, Workers

MOST = 32  # tokens that are written at once; the tiny model has room for 128


def test_reading_is_refused_where_too_many_wait_and_writing_waits_for_none_of_them() -> None:
    async def fill() -> list[str]:
        workers, is_over = Workers(), threading.Event()
        jobs = [asyncio.ensure_future(workers.run(is_over.wait)) for _ in range(MAX_JOBS)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="wait to be read") as refused:
            await workers.run(str)
        assert refused.value.status == 429
        written = await workers.write(lambda: "whole")
        is_over.set()
        await asyncio.gather(*jobs)
        return [written, await workers.run(lambda: "read")]

    assert asyncio.run(fill()) == ["whole", "read"]


@pytest.mark.parametrize("length", [8, 100])
def test_what_a_stream_tells_of_a_long_prompt_is_written_in_a_worker(
    server: Any, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    jobs, write = [], Workers.write

    async def counted(workers: Workers, job: Any) -> Any:
        jobs.append(job)
        return await write(workers, job)

    prompts = [[5 + number] * length for number in range(2)]
    asked = {"prompt": prompts, "echo": True, "logprobs": 3, "max_tokens": 3, "temperature": 0}
    whole = server.post("/v1/completions", **asked).json()
    monkeypatch.setattr(Workers, "write", counted)
    monkeypatch.setattr("logprobe.server.reply.QUICK_TOKENS", MOST)
    text = server.post("/v1/completions", stream=True, **asked).text
    assert len(jobs) == (len(prompts) if length > MOST else 0)
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    for choice in whole["choices"]:
        told = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        for name, values in choice["logprobs"].items():
            assert list(chain(*(one["logprobs"][name] for one in told))) == values


def test_the_end_of_a_long_response_is_written_in_a_worker(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, write = [], Workers.write

    async def counted(workers: Workers, job: Any) -> Any:
        jobs.append(job)
        return await write(workers, job)

    monkeypatch.setattr(Workers, "write", counted)
    monkeypatch.setattr("logprobe.server.reply.QUICK_TOKENS", MOST)
    asked = {"input": "the cat", "max_output_tokens": MOST, "stream": True, "ignore_eos": True}
    text = server.post("/v1/responses", **asked).text
    assert len(jobs) == 1
    assert text.rstrip().splitlines()[-1].startswith('data: {"type":"response.incomplete"')
