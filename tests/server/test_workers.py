"""Work on the event loop and in worker threads: chosen by size only, on each route."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import defaultdict
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from logprobe.server import reply, rows
from logprobe.server.app import OPERATORS
from logprobe.server.http import decode
from logprobe.server.http.errors import ApiError
from logprobe.server.http.replies import ARROW_TYPE
from logprobe.server.http.workers import (
    MAX_JOBS,
    NUM_THREADS,
    QUICK_BYTES,
    QUICK_ENTRIES,
    QUICK_PROMPTS,
    Workers,
)
from logprobe.server.openai.bodies import BODIES
from logprobe.server.routes import completions, labels, loglikelihood
from logprobe.text.edge import TextEdge
from server_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

READER, WRITER = "logprobe-http-read", "logprobe-http-write"
MOST = 32  # maximum of entries written at once; the tiny model's context is 128 tokens

MESSAGES = [{"role": "user", "content": "the cat"}]
RANKED = {
    "query": "the",
    "documents": ["cat"],
    "template": ["", "{query}{document}", ":"],
    "labels": [" a", " o"],
}
SMALL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "the cat", "max_tokens": 2},
    "/v1/responses": {"input": "the cat", "max_output_tokens": 2},
    "/v1/loglikelihood": {"context": "the", "continuations": [" cat"]},
    "/v1/label": {"input": "the", "labels": [" cat"]},
    "/generative_scoring": {"query": "the", "items": [" cat"], "label_token_ids": [5, 6]},
    "/v1/score": {"query": "the", "items": [" cat"], "label_token_ids": [5, 6]},
    "/v1/judge": {"messages": MESSAGES},
    "/v1/uncertainty": {"input": "the cat", "n": 1, "max_tokens": 2, "k": 1},
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RANKED),
    "/v1/next_token_logprobs": {"prompts": ["the cat"]},
    "/v1/hidden_states": {"prompts": ["the cat"]},
    "/tokenize": {"prompt": "the cat"},
    "/v1/tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [5]},
    "/v1/detokenize": {"tokens": [5]},
}
UNBOUNDED: dict[str, tuple[str, dict[str, Any]]] = {
    "a grammar": ("/v1/completions", {"guided_regex": "a+"}),
    "a response format": (
        "/v1/chat/completions",
        {"response_format": {"type": "choice", "choice": ["a", "b"]}},
    ),
    "texts that each tokenise": ("/v1/completions", {"bad_words": ["a", "b"]}),
    "allowed ids": ("/v1/completions", {"allowed_token_ids": [5, 6]}),
    "a context that each continuation is tokenised with": (
        "/v1/loglikelihood",
        {"continuations": [" a", " cat"]},
    ),
    "many prompts": ("/v1/completions", {"prompt": ["a"] * (QUICK_PROMPTS + 1)}),
    "many continuations": ("/v1/loglikelihood", {"continuations": ["a"] * (QUICK_PROMPTS + 1)}),
    "a text that each label is tokenised with": ("/v1/label", {"labels": [" a", " cat"]}),
    "texts to label": ("/v1/label", {"input": ["a"]}),
    "a text without content": (
        "/v1/label",
        {"correction": "calibrated", "content_free": [*MESSAGES, *MESSAGES]},
    ),
    "many labels of a conversation": (
        "/v1/label",
        {"input": None, "messages": MESSAGES, "labels": [f" {name}" for name in "abcdefghi"]},
    ),
    "a text that each grade is tokenised with": ("/v1/judge", {"messages": None, "input": "a"}),
    "many answers": ("/v1/uncertainty", {"n": QUICK_PROMPTS + 1, "max_tokens": 1, "k": 1}),
    "documents that the query is tokenised with": ("/v1/rerank", {"documents": ["a", "cat"]}),
    "items that the query is tokenised with": ("/v1/score", {"items": ["a", "cat"]}),
    "many items": ("/generative_scoring", {"items": ["a"] * (QUICK_PROMPTS + 1)}),
    "a message that the template is tried on": (
        "/v1/chat/completions",
        {"messages": [*MESSAGES, {"role": "assistant", "content": "a", "name": ""}, *MESSAGES]},
    ),
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Record the threads in which bodies are decoded, texts tokenized and replies written."""
    names: dict[str, set[str]] = defaultdict(set)

    def watched(work: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            names[work].add(threading.current_thread().name.rpartition("_")[0])
            return function(*args, **options)

        return noted

    monkeypatch.setattr(decode, "decode_body", watched("decode", decode.decode_body))
    monkeypatch.setattr(TextEdge, "encode", watched("encode", TextEdge.encode))
    monkeypatch.setattr(reply, "encode", watched("write", reply.encode))
    monkeypatch.setattr(loglikelihood, "fields_of", watched("write", loglikelihood.fields_of))
    return names


@pytest.mark.parametrize("path", sorted(BODIES.keys() - OPERATORS))
def test_a_large_body_is_read_in_a_worker_and_a_small_one_at_once(
    server: Any, threads: dict[str, set[str]], path: str
) -> None:
    works = ("decode",) if "tokens" in SMALL[path] else ("decode", "encode")
    assert server.post(path, **SMALL[path]).status_code == 200
    assert not any(READER in threads.pop(work) for work in works)
    assert server.post_bytes(path, json.dumps(SMALL[path]).encode().ljust(QUICK_BYTES + 1)).status_code == 200
    assert [threads[work] for work in works] == [{READER}] * len(works)


@pytest.mark.parametrize(("path", "fields"), UNBOUNDED.values(), ids=UNBOUNDED)
def test_a_small_body_whose_bytes_do_not_bound_its_time_is_understood_in_a_worker(
    server: Any, threads: dict[str, set[str]], path: str, fields: dict[str, Any]
) -> None:
    assert server.post(path, **SMALL[path] | fields).status_code == 200
    assert threads["encode"] == {READER}


def test_what_is_stored_is_read_in_a_worker_however_small_the_body(
    server: Any, threads: dict[str, set[str]]
) -> None:
    first = server.post("/v1/responses", **SMALL["/v1/responses"]).json()["id"]
    threads.clear()
    body = SMALL["/v1/responses"] | {"previous_response_id": first}
    assert server.post("/v1/responses", **body).status_code == 200
    assert threads["encode"] == {READER}


def test_reading_is_refused_where_too_many_wait_and_writing_waits_for_none_of_them() -> None:
    async def fill() -> list[str]:
        workers, is_over = Workers(), threading.Event()
        jobs = [asyncio.ensure_future(workers.read(is_over.wait, None)) for _ in range(MAX_JOBS)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="waiting to be decoded") as refused:
            await workers.read(str, QUICK_BYTES + 1)
        assert refused.value.status == 429
        results = [await workers.read(lambda: "small", QUICK_BYTES)]
        results.append(await workers.write(lambda: "whole", QUICK_ENTRIES + 1))
        is_over.set()
        await asyncio.gather(*jobs)
        return [*results, await workers.read(lambda: "read", None)]

    assert asyncio.run(fill()) == ["small", "whole", "read"]


def test_readers_take_turns_between_callers() -> None:
    async def read() -> int:
        workers, may_begin, other_ran = Workers(), threading.Event(), threading.Event()
        started: list[int] = []

        def slow(number: int) -> None:
            started.append(number)
            may_begin.wait(PATIENCE_S)
            if number >= NUM_THREADS:
                other_ran.wait(5)

        def quick() -> int:
            other_ran.set()
            return len(started)

        hog = [asyncio.ensure_future(workers.read(partial(slow, n), None, "hog")) for n in range(20)]
        await asyncio.sleep(0)
        other = asyncio.ensure_future(workers.read(quick, None, "other"))
        await asyncio.sleep(0)
        may_begin.set()
        num_started = await other
        await asyncio.gather(*hog)
        assert sorted(started) == [*range(20)]
        return num_started

    assert asyncio.run(read()) <= NUM_THREADS + 1  # those in progress, and one more of the first caller


def test_a_job_of_a_client_that_left_is_not_run_and_errors_are_its_own() -> None:
    async def read() -> list[Any]:
        workers, may_end, ran = Workers(), threading.Event(), []

        def failing() -> None:
            raise ValueError

        busy = [asyncio.ensure_future(workers.read(may_end.wait, None)) for _ in range(NUM_THREADS)]
        await asyncio.sleep(0)
        jobs = [partial(ran.append, 0), failing, partial(ran.append, 2)]
        left, failed, last = [asyncio.ensure_future(workers.read(job, None)) for job in jobs]
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(*busy, last)
        with pytest.raises(ValueError):  # noqa: PT011 - without a message
            await failed
        return ran

    assert asyncio.run(read()) == [2]


@pytest.mark.parametrize("length", [4, 100])
def test_what_a_stream_tells_of_a_long_prompt_is_written_in_a_worker(
    server: Any, monkeypatch: pytest.MonkeyPatch, threads: dict[str, set[str]], length: int
) -> None:
    prompts = [[5 + number] * length for number in range(2)]
    asked = {"prompt": prompts, "echo": True, "logprobs": 3, "max_tokens": 3, "temperature": 0}
    whole = server.post("/v1/completions", **asked).json()
    threads.clear()
    monkeypatch.setattr("logprobe.server.http.workers.QUICK_ENTRIES", MOST)
    text = server.post("/v1/completions", stream=True, **asked).text
    assert (WRITER in threads["write"]) == (length > MOST)
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        for name, values in choice["logprobs"].items():
            assert list(chain(*(part["logprobs"][name] for part in parts))) == values


@pytest.mark.parametrize("n", [1, 8])
def test_a_prompt_that_each_choice_begins_with_counts_once_for_each_and_is_made_once(
    server: Any, monkeypatch: pytest.MonkeyPatch, threads: dict[str, set[str]], n: int
) -> None:
    made = []

    def counted(*args: Any) -> Any:
        made.append(args)
        return rows.completion_rows(*args)

    monkeypatch.setattr(completions, "completion_rows", counted)
    monkeypatch.setattr("logprobe.server.http.workers.QUICK_ENTRIES", MOST)
    prompts = [[5 + number] * (MOST // 4) for number in range(2)]
    asked = {"prompt": prompts, "echo": True, "logprobs": 0, "max_tokens": 1, "n": n}
    choices = server.post("/v1/completions", **asked).json()["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [MOST // 4 + 1] * (2 * n)
    assert (WRITER in threads["write"]) == (n > 1)
    assert len(made) == len(prompts)


@pytest.mark.parametrize("top_logprobs", [0, MOST])
def test_a_reply_of_many_alternatives_is_written_in_a_worker_however_few_its_tokens(
    server: Any, monkeypatch: pytest.MonkeyPatch, threads: dict[str, set[str]], top_logprobs: int
) -> None:
    monkeypatch.setattr("logprobe.server.http.workers.QUICK_ENTRIES", MOST)
    asked = {"messages": MESSAGES, "max_tokens": 1, "logprobs": True, "top_logprobs": top_logprobs}
    assert server.post("/v1/chat/completions", **asked).status_code == 200
    assert (WRITER in threads["write"]) == (top_logprobs == MOST)


def test_the_end_of_a_long_response_is_written_in_a_worker(
    server: Any, monkeypatch: pytest.MonkeyPatch, threads: dict[str, set[str]]
) -> None:
    monkeypatch.setattr("logprobe.server.http.workers.QUICK_ENTRIES", MOST)
    asked = {"input": "the cat", "max_output_tokens": MOST, "stream": True, "ignore_eos": True}
    text = server.post("/v1/responses", **asked).text
    assert WRITER in threads["write"]
    assert len(threads["write"]) == 2, "what streams before it is written on the event loop"
    assert text.rstrip().splitlines()[-1].startswith('data: {"type":"response.incomplete"')


def test_a_score_of_many_continuations_is_written_in_a_worker(
    server: Any, threads: dict[str, set[str]]
) -> None:
    for count, is_large in ((2, False), (100, True)):
        threads.clear()
        scores = server.post("/v1/loglikelihood", context=[5], continuations=[[5 + n] for n in range(count)])
        assert len(scores.json()["data"]) == count
        assert (threads["write"] == {WRITER}) == is_large


def test_answers_of_many_documents_are_written_in_a_worker(
    server: Any, threads: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked = labels.ranked

    def noted(*args: Any) -> Any:
        threads["write"].add(threading.current_thread().name.rpartition("_")[0])
        return ranked(*args)

    monkeypatch.setattr(labels, "ranked", noted)
    for count, is_large in ((2, False), (100, True)):
        threads.clear()
        asked = SMALL["/v1/rerank"] | {"documents": ["a"] * count}
        assert len(server.post("/v1/rerank", **asked).json()["results"]) == count
        assert (threads["write"] == {WRITER}) == is_large


def test_a_score_as_arrow_is_written_in_a_worker_however_small(
    server: Any, threads: dict[str, set[str]]
) -> None:
    headers = {"accept": ARROW_TYPE}
    asked = SMALL["/v1/loglikelihood"]
    reply = httpx.post(f"{server.url}/v1/loglikelihood", json=asked, headers=headers, timeout=PATIENCE_S)
    assert reply.headers["content-type"] == ARROW_TYPE
    assert threads["write"] == {WRITER}
