"""This measures 32 chat streams at once over HTTP, 20 logprobs a token, beside the same work in process.

Rates are all generated tokens over the time from the first request to the last stream's end. A gap is the
time between two arrivals of tokens in one stream; its 99th percentile is held against the median gap.

It also compares the formats of replies: bytes a token, whole and streamed, and the server's processor time
for the rows of a long prompt that were computed before.
"""

import asyncio
import contextlib
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop
from harness import OURS, Arena, Figure, Measure, Target, alternate, parse_options, publish
from process import RIVALS, RivalError
from servers import MODEL_NAME, TOP, Served, our_program, serving, vllm_program

NUM_STREAMS = 32
NUM_TOKENS = 48
IN_PROCESS = "in process"
VLLM_SERVER = "vllm server"
REST_S = 4.0  # vLLM's worker spins on a core for three seconds after its last request
WEIGHTS = "checkpoint"  # the same in both
TOPICS = ("lighthouses", "rivers", "bread", "clocks", "bees", "maps", "bridges", "snow")


def conversations(number: int) -> list[list[dict[str, str]]]:
    """One conversation a stream, none of which is asked twice."""
    return [
        [{"role": "user", "content": f"{number}.{stream} Tell me about {TOPICS[stream % len(TOPICS)]}."}]
        for stream in range(NUM_STREAMS)
    ]


def stream_rate(served: Served, num_tokens: int, number: int) -> float:
    """Tokens a second over all streams of one round."""
    bodies = [
        {
            "model": MODEL_NAME,
            "messages": messages,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": TOP,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for messages in conversations(number)
    ]
    start = time.perf_counter()
    ends = uvloop.run(_run_all(served, bodies))
    spent = time.perf_counter() - start
    for _, times in ends:
        served.gaps_ms += [1e3 * (b - a) for a, b in pairwise(times)]
    return sum(count for count, _ in ends) / spent


async def _run_all(served: Served, bodies: list[dict[str, Any]]) -> list[tuple[int, list[float]]]:
    return await asyncio.gather(*(_follow(served, body) for body in bodies))


async def _follow(served: Served, body: dict[str, Any]) -> tuple[int, list[float]]:
    """Read one stream to its end; its tokens, and when some of them came."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    follower = Follower(host, json.dumps(body).encode())
    await asyncio.get_running_loop().create_connection(lambda: follower, host, int(port))
    tail = await follower.end
    found = re.search(rb'"completion_tokens": ?(\d+)', tail)
    if found is None or int(found[1]) != body["max_tokens"]:
        raise RivalError(f"{served.url}: a stream ended early: {tail[-300:]!r}")
    return int(found[1]), follower.times


class Follower(asyncio.Protocol):
    """One stream's reader, which does as little as can be: it shares the processor with the server."""

    def __init__(self, host: str, body: bytes) -> None:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body
        self._tail = b""
        self.times: list[float] = []
        self.end: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Ask."""
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note when tokens came."""
        if b'"logprob":' in data:
            self.times.append(time.perf_counter())
        self._tail = (self._tail + data)[-4096:]

    def connection_lost(self, exc: Exception | None) -> None:
        """Hand over what came last, which tells whether all had come."""
        del exc
        if not self.end.done():
            self.end.set_result(self._tail)


def rested(measure: Measure, number: int) -> float:
    """Measure once the contestant of before has come to rest."""
    time.sleep(REST_S)
    return measure(number)


def in_process_rate(arena: Arena, ours: Served, num_tokens: int, number: int) -> float:
    """Tokens a second of the same prompts through `LLM.generate`."""

    def inputs(seed: int) -> list[dict[str, Any]]:
        ids = [ours.post("/tokenize", {"messages": one})["tokens"] for one in conversations(seed)]
        return [{"prompts": ids, "new_tokens": num_tokens, "logprobs": TOP}]

    job = arena.ask((OURS, "default"), "decode", inputs(number), options={"weights": WEIGHTS})
    (spent,) = job["timings_s"]
    return NUM_STREAMS * num_tokens / float(spent)


ARROW = "application/vnd.apache.arrow.stream"
FORMATS = {OURS: ARROW, "ours as JSON": "application/json"}  # what we are held against JSON with
NUM_CHOICES = 16
SCORED_WORDS, REPEATS = 1000, 8  # up to 1.5 tokens a word; the rival takes 2,048


def bytes_a_token(served: Served, accept: str, num_tokens: int, number: int, *, stream: bool) -> float:
    """Size of the reply to one conversation, over its tokens."""
    (messages, *_) = conversations(number)
    body = {"model": MODEL_NAME, "messages": messages, "max_tokens": num_tokens, "n": NUM_CHOICES}
    asked = {"ignore_eos": True, "logprobs": True, "top_logprobs": TOP, "stream": stream, "seed": number}
    with served.open("/v1/chat/completions", {**body, **asked}, Accept=accept) as reply:
        return len(reply.read()) / (num_tokens * NUM_CHOICES)


def scoring_ms(served: Served, accept: str, num_tokens: int, number: int) -> float:
    """Processor time of the server for one scored prompt that it has scored before, so most is the reply."""
    words = "".join(f" {TOPICS[(number + place * place) % len(TOPICS)]}" for place in range(num_tokens))
    body = {"model": MODEL_NAME, "prompt": words, "max_tokens": 1, "prompt_logprobs": TOP}
    for repeat in range(REPEATS + 1):
        if repeat == 1:
            before = served.cpu_s()
        with served.open("/v1/completions", body, Accept=accept) as reply:
            reply.read()
    time.sleep(0.05)
    return 1e3 * (served.cpu_s() - before) / REPEATS


def compare_formats(servers: Mapping[str, tuple[Served, str]], num_tokens: int, rounds: int) -> list[Figure]:
    """The cost of rows in each format."""
    num_scored = SCORED_WORDS if num_tokens == NUM_TOKENS else 50
    measures: dict[tuple[str, str], Callable[..., float]] = {
        (f"whole chat replies, logprobs {TOP}", "bytes/token"): partial(bytes_a_token, stream=False),
        (f"chat streams, logprobs {TOP}", "bytes/token"): partial(bytes_a_token, stream=True),
        (f"processor time of a scored prompt of {num_scored} words, known rows", "ms"): scoring_ms,
    }
    figures = []
    for (name, unit), measure in measures.items():
        count = num_scored if unit == "ms" else num_tokens
        samples = {
            contestant: [measure(served, accept, count, number) for number in range(rounds)]
            for contestant, (served, accept) in servers.items()
        }
        targets = [Target(against="ours as JSON", at_least=1.0)]
        figures.append(Figure(name=name, unit=unit, better="lower", samples=samples, targets=targets))
    return figures


def main() -> None:
    """Race the servers."""
    options = parse_options(__doc__ or "")
    num_tokens = 4 if options.is_smoke else NUM_TOKENS
    notes: list[str] = []
    with Arena(options) as arena, contextlib.ExitStack() as stack:
        ours = stack.enter_context(serving(our_program(arena.model_folder, "--weights", WEIGHTS)))
        contestants: dict[str, Measure] = {
            OURS: partial(stream_rate, ours, num_tokens),
            IN_PROCESS: partial(in_process_rate, arena, ours, num_tokens),
        }
        if "vllm" in options.rivals and RIVALS["vllm"].is_installed:
            try:
                theirs = stack.enter_context(serving(vllm_program(arena.float_folder)))
                contestants[VLLM_SERVER] = partial(stream_rate, theirs, num_tokens)
            except RivalError as error:
                notes.append(f"{VLLM_SERVER} is left out: {error}")
        if len(contestants) > 2:
            contestants = {name: partial(rested, measure) for name, measure in contestants.items()}
        for number, measure in enumerate(contestants.values()):
            measure(1000 + number)  # warm-up
        ours.gaps_ms.clear()
        samples, more = alternate(contestants, options.rounds)
        formats = {name: (ours, accept) for name, accept in FORMATS.items()}
        if VLLM_SERVER in samples:
            formats[VLLM_SERVER] = (theirs, "application/json")
        of_formats = compare_formats(formats, num_tokens, options.rounds)
    notes += [*more, *arena.missing("vllm")]
    publish(Path(__file__).stem, [*figures(samples, ours.gaps_ms, notes), *of_formats], options)


def figures(samples: Mapping[str, list[float]], gaps_ms: list[float], notes: list[str]) -> list[Figure]:
    """The rates and the evenness of our streams."""
    targets = [Target(against=IN_PROCESS, at_least=0.9), Target(against=VLLM_SERVER, at_least=2.0)]
    name = f"chat streams, {NUM_STREAMS} at once, logprobs {TOP}"
    if theirs := samples.get(VLLM_SERVER):
        bound = statistics.median(a / b for a, b in zip(samples[IN_PROCESS], theirs, strict=True))
        notes = [*notes, f"the engine alone, without HTTP, makes {bound:.2f} x the tokens of {VLLM_SERVER}"]
    rate = Figure(name=name, unit="tokens/s", better="higher", samples=samples, targets=targets, notes=notes)
    # A few tokens of a small model can all arrive in one read.
    spread = (
        [statistics.quantiles(gaps_ms, n=100)[98] / statistics.median(gaps_ms)] if len(gaps_ms) > 1 else []
    )
    evenness = Figure(
        name=f"{name}: 99th percentile of gaps over their median",
        unit="x",
        better="lower",
        samples={OURS: spread} if spread else {},
        targets=[Target(at_most=3.0)],
    )
    return [rate, evenness]


if __name__ == "__main__":
    main()
