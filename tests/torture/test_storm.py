"""Many concurrent requests of all kinds, a third aborted: none lost, none wrong, nothing leaked."""

from __future__ import annotations

import http.client
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import load

from server_process import eventually, serving_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from server_process import Attacked

NUM_REQUESTS, CONCURRENCY, ABORTED_PART = 96, 24, 3
NUM_LATE_THREADS = 4  # threads that a pool may still start later, for any number of requests
MAX_DIFFERENCE = 5e-5  # nats, of one number between two batches
WORDS = ["the", " cat", " and", " dog", " of", " a", " in", " on", " th", "er", "1", " é"]

Ask = tuple[str, dict[str, Any]]


def text(rng: random.Random, length: int = 12) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(1, length)))


def sampled(rng: random.Random) -> dict[str, Any]:
    return {
        "max_tokens": rng.randint(1, 30),
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "seed": rng.randint(0, 99),
        "return_token_ids": True,
    }


def chat(rng: random.Random, **more: Any) -> Ask:
    messages = [{"role": "user", "content": text(rng)}]
    return "/v1/chat/completions", {"messages": messages, "logprobs": True, **sampled(rng), **more}


def completion(rng: random.Random, **more: Any) -> Ask:
    return "/v1/completions", {"prompt": text(rng), "logprobs": 5, **sampled(rng), **more}


KINDS: dict[str, Callable[[random.Random], Ask]] = {
    "chat": lambda rng: chat(rng, top_logprobs=rng.randint(0, 20)),
    "a streamed chat": lambda rng: chat(rng, top_logprobs=3, stream=True),
    "samples": lambda rng: completion(rng, n=rng.randint(2, 9)),
    "an echo": lambda rng: completion(rng, prompt=text(rng, 60), echo=True, max_tokens=0, logprobs=20),
    "a streamed completion": lambda rng: completion(rng, stream=True),
    "named ids": lambda rng: completion(rng, logprob_token_ids=rng.sample(range(256), 9)),
    "both stages": lambda rng: completion(rng, logprobs_mode="both", top_p=0.9, logit_bias={"70": 2}),
    "odd forms": lambda rng: completion(
        rng,
        logit_bias={str(rng.randrange(256)): rng.randint(-9, 9), "70": 2.5},
        allowed_token_ids=[rng.randrange(256) for _ in range(200)] * 2,
        frequency_penalty=rng.randint(-2, 2),
        **dict.fromkeys(("top_p", "min_p", "repetition_penalty"), 1),
        **{name: [] for name in ("stop", "stop_token_ids", "bad_words", "logprob_token_ids")},
        logits_processors_args={},
    ),
    "a grammar": lambda rng: completion(rng, response_format={"type": "regex", "regex": "[a-d ]{1,20}"}),
    "prompts": lambda rng: completion(rng, prompt=[text(rng) for _ in range(rng.randint(2, 8))]),
    "LoRA": lambda rng: completion(rng, lora="wide"),
    "scores": lambda rng: (
        "/v1/loglikelihood",
        {"context": text(rng), "continuations": [text(rng), text(rng)]},
    ),
    "labels": lambda rng: (
        "/v1/label",
        {"input": [text(rng), text(rng)], "labels": [" the", " dog", " 1"]},
    ),
    "label tokens": lambda rng: (
        rng.choice(["/generative_scoring", "/v1/score"]),
        {"query": text(rng), "items": [text(rng), text(rng)], "label_token_ids": [5, 6]},
    ),
    "grades": lambda rng: ("/v1/judge", {"input": text(rng), "scale": [*range(1, 11)]}),
    "documents": lambda rng: (
        "/v1/rerank",
        {"query": text(rng), "documents": [text(rng)], "template": ["", "{query}: {document}", ""]},
    ),
    "rows": lambda rng: ("/v1/next_token_logprobs", {"prompts": [text(rng) for _ in range(4)]}),
}


@pytest.fixture(scope="module", params=[(), ("--engine-process",)], ids=["thread", "process"])
def stormy(
    request: pytest.FixtureRequest, tiny_model_folder: Path, adapter_folders: dict[str, Path]
) -> Iterator[Attacked]:
    """The tiny Llama with LoRA weights, in a process with few batch rows and slots."""
    flags = (
        "--lora-modules",
        f"wide={adapter_folders['wide']}",
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "64",
        *request.param,
    )
    with serving_process(tiny_model_folder, *flags) as server:
        yield server


def send(server: Attacked, ask: Ask, *, num_bytes: int | None = None) -> bytes | None:
    """Return the reply's body, or None if aborted (at once, or after some bytes of a stream)."""
    path, body = ask
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    try:
        link.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        if num_bytes is not None and not (num_bytes and body.get("stream")):
            return None
        with link.getresponse() as response:  # owns the socket if the server closes the connection
            data = response.read(num_bytes)
        assert response.status == 200, data[:500]
        return data if num_bytes is None else None
    finally:
        link.close()


def numbers_of(ask: Ask, data: bytes) -> tuple[Any, Any]:
    """Return a reply's content without its ids: (words and ids, numbers)."""
    path, body = ask
    if path == "/v1/next_token_logprobs":
        return None, load(data)["logprobs"]
    if body.get("stream"):
        events = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        reply: Any = _whole([json.loads(event) for event in events], body)
    else:
        reply = json.loads(data)
    words: list[Any] = []
    numbers: list[float] = []
    _walk(reply, words, numbers)
    return words, np.array(numbers)


def _whole(events: list[Any], body: dict[str, Any]) -> Any:
    """Merge the chunks of a stream, independent of the steps they came in."""
    choices = [choice for event in events for choice in event["choices"]]
    rows = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    if "messages" in body:
        said = "".join(choice["delta"].get("content") or "" for choice in choices)
        return [said, [row for one in rows for row in one["content"]]]
    said = "".join(choice["text"] for choice in choices)
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [said, *([value for one in rows for value in one[name]] for name in columns)]


def _walk(value: Any, words: list[Any], numbers: list[float]) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in {"id", "created", "cached_tokens"}:  # depend on earlier requests
                words.append(name)
                _walk(inner, words, numbers)
    elif isinstance(value, list):
        for inner in value:
            _walk(inner, words, numbers)
    elif isinstance(value, float):
        numbers.append(value)
    else:
        words.append(value)


def figures(server: Attacked) -> dict[str, float]:
    """Return the state of the engine and the limits, and the process's handles."""
    told = server.get("/metrics").data.decode()
    names = ("waiting_requests", "running_requests", "paused_requests", "free_slots")
    held = {
        # Summed over replicas.
        name: sum(map(float, re.findall(rf"^logprobe_{name}(?:\{{.*\}})? (\S+)$", told, re.MULTILINE)))
        for name in names
    }
    held |= json.loads(server.get("/v1/capabilities").data)["in_use"]
    process = psutil.Process(server.process.pid)

    def is_listening_only() -> bool:
        return all(link.status == psutil.CONN_LISTEN for link in process.net_connections("tcp"))

    # Handles of the two requests above count until the server has seen them close.
    eventually(is_listening_only, "connections stay open")
    return held | {"handles": process.num_fds(), "threads": process.num_threads()}


def run_storm(server: Attacked, seed: int) -> dict[int, tuple[Ask, bytes]]:
    """Run many requests; return the replies of those that were not aborted."""
    rng = random.Random(seed)  # noqa: S311 - drawn for tests
    names = list(KINDS)
    asks = [KINDS[names[number % len(names)]](rng) for number in range(NUM_REQUESTS)]
    limits = [rng.choice([0, 1, 300]) if rng.randrange(ABORTED_PART) == 0 else None for _ in asks]

    def one(number: int) -> bytes | None:
        return send(server, asks[number], num_bytes=limits[number])

    with ThreadPoolExecutor(CONCURRENCY) as threads:
        replies = list(threads.map(one, range(NUM_REQUESTS)))
    kept = {number: data for number, data in enumerate(replies) if data is not None}
    assert len(kept) == limits.count(None), "a reply was lost"
    assert NUM_REQUESTS // 2 < len(kept) < NUM_REQUESTS
    return {number: (asks[number], data) for number, data in kept.items()}


def test_nothing_is_lost_nothing_is_wrong_and_nothing_stays(stormy: Attacked) -> None:
    run_storm(stormy, seed=1)  # first, so that lazily loaded modules do not count
    eventually(lambda: is_idle(figures(stormy)), "requests of the first storm stay")
    start, memory = figures(stormy), stormy.memory_bytes
    replies = run_storm(stormy, seed=2)

    eventually(lambda: is_idle(figures(stormy)), "requests of the second storm stay")
    now = figures(stormy)
    assert now["threads"] <= start["threads"] + NUM_LATE_THREADS
    assert now | {"threads": 0} == start | {"threads": 0}
    eventually(lambda: stormy.memory_bytes < 1.1 * memory, "the memory does not come back")
    worst, num_numbers = 0.0, 0
    for ask, data in replies.values():
        words, numbers = numbers_of(ask, data)
        alone = send(stormy, ask)
        assert alone is not None
        words_alone, numbers_alone = numbers_of(ask, alone)
        assert words == words_alone, ask
        finite = numbers_alone != -np.inf
        assert ((numbers == -np.inf) == ~finite).all()
        worst = max(worst, float(np.abs(numbers[finite] - numbers_alone[finite]).max(initial=0)))
        num_numbers += numbers.size
    assert num_numbers > 10_000
    assert worst <= MAX_DIFFERENCE, f"{num_numbers} numbers, the worst off by {worst}"


def is_idle(held: dict[str, float]) -> bool:
    names = ("waiting_requests", "running_requests", "paused_requests", "requests", "tokens", "logprob_bytes")
    return not any(held[name] for name in names)
