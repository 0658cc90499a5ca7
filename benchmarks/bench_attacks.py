"""This measures what a second client feels while a first one sends its worst: its slowest `/health`.

One row an attack: requests that froze or ended the server before it had limits, beside them requests that
the limits just let through, and what connections send, keep or do not read; the first row is twenty honest
requests at once. A process of its own asks for the health without a pause and, from another address, for one
completion after another, each of which must be answered. All of it in each layout. Then what a hostile model
folder and a hostile audited server may take of who loads or audits them.
"""

import asyncio
import contextlib
import http.server
import itertools
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from connections import CONNECTIONS
from harness import OURS, Arena, Figure, Target, parse_options, publish
from servers import Served, our_program, serving

MAX_MS = 100.0  # over what honest clients do to the health
MAX_GROWTH = 10.0  # percent of the memory before the attacks
NUM_GAPS = 8  # between tokens, at least, of which a median is taken
LOOPS = "loops"  # a further model, by its chat template
NESTED_LOOPS = "{% for a in range(99999) %}" * 3 + "a" + "{% endfor %}" * 3
REFUSED_S = 1.0  # within which a hostile folder is refused
AUDIT_TIMEOUT_S = 10.0
MESSAGES = [{"role": "user", "content": "the cat"}]
LAYOUTS = {
    OURS: (),
    "an engine process": ("--engine-process",),
    "two replicas": ("--data-parallel-size", "2"),
}
CONTROL = "20 completions at once"
KV_BYTES = str(1 << 28)  # of which everything is in use before the memory is noted: it fills, whoever asks
# Asks a port for the health and, from another address, for completions; prints a line once it has begun. When
# its input ends, it prints the slowest answer of either, s.
WATCHER = """
import http.client, json, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
stop, begun = threading.Event(), threading.Barrier(3, timeout=60)
def slowest(source, pause_s, *request):
    link, worst = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), source_address=(source, 0)), 0.0
    while not stop.wait(pause_s if worst else 0):
        start = time.perf_counter()
        link.request(*request)
        reply = link.getresponse()
        data = reply.read()
        assert reply.status == 200, (reply.status, data)
        took = time.perf_counter() - start
        if not worst:
            begun.wait()
        worst = max(worst, took)
    return worst
body = json.dumps({"prompt": "a dog", "max_tokens": 4, "ignore_eos": True})
with ThreadPoolExecutor() as threads:
    asked = ("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    others = threads.submit(slowest, "127.0.0.2", 0.1, *asked)
    health = threads.submit(slowest, "127.0.0.1", 0.005, "GET", "/health")
    begun.wait()
    print("begun", flush=True)
    sys.stdin.read()
    stop.set()
print(health.result(), others.result())
"""

Body = dict[str, Any]
CHAT, COMPLETIONS, SCORE = "/v1/chat/completions", "/v1/completions", "/v1/loglikelihood"


def ref_chain(length: int) -> Body:
    """A schema in which each definition is the next one."""
    links: Body = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {"type": "string"}}}


def binary_tree(depth: int) -> Body:
    """A schema of nested objects of two fields."""
    if not depth:
        return {"type": "integer"}
    child = binary_tree(depth - 1)
    return {"type": "object", "properties": {"a": child, "b": child}, "required": ["a", "b"]}


def rules(length: int) -> str:
    """A grammar in which each rule is the next one."""
    chain = "".join(f"r{i}: r{i + 1}\n" for i in range(length))
    return f'start: r0\n{chain}r{length}: "a"\n'


def alternatives(num_ways: int, num_keys: int) -> Body:
    """A schema of so many values, each of which may have so many parts."""
    parts: Body = {f"p{number}": True for number in range(num_keys)}
    return {"properties": parts, "anyOf": [{"enum": [number]} for number in range(num_ways)]}


def begun_call(depth: int) -> tuple[str, Body]:
    """A chat that goes on with a call within so many others, in 64 choices."""
    call = '{"function":' * depth + '{"name":"now","arguments":{}}' + "}" * depth
    return chat(
        messages=[*MESSAGES, {"role": "assistant", "content": f"<tool_call>{call}"}],
        continue_final_message=True,
        add_generation_prompt=False,
        tools=[{"type": "function", "function": {"name": "now"}}],
        n=64,
        stream=True,
    )


def chat(**more: Any) -> tuple[str, Body]:
    """A short chat request."""
    return CHAT, {"messages": MESSAGES, "max_tokens": 4, **more}


def completion(**more: Any) -> tuple[str, Body]:
    """A short completions request."""
    return COMPLETIONS, {"prompt": "the cat", "max_tokens": 4, **more}


def said(text: str) -> list[Body]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def with_schema(schema: Body) -> tuple[str, Body]:
    """A chat held to a schema."""
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


# Loads folders, each twice, and prints how long it took the second time until the slowest was refused.
REFUSER = """
import sys, time
import torch, transformers
from logprobe import LLM
from logprobe.errors import ModelError
took = []
for folder in sys.argv[1:] * 2:
    start = time.perf_counter()
    try:
        LLM(folder)
    except ModelError:
        took.append(time.perf_counter() - start)
    else:
        raise SystemExit(f"{folder} was loaded")
print(max(took[len(took) // 2 :]))
"""

ATTACKS: dict[str, Callable[[], tuple[str, Body]]] = {
    "a schema of 3,000 references": lambda: with_schema(ref_chain(3_000)),
    "a schema of 9,900 references": lambda: with_schema(ref_chain(9_900)),
    "a grammar of 100,000 rules": lambda: chat(response_format={"type": "ebnf", "ebnf": rules(100_000)}),
    "a grammar of 9,900 rules": lambda: chat(response_format={"type": "ebnf", "ebnf": rules(9_900)}),
    "a schema as a tree of depth 12": lambda: with_schema(binary_tree(12)),
    "a schema as a tree of depth 10": lambda: with_schema(binary_tree(10)),
    "a choice of 200,000 texts": lambda: chat(
        response_format={"type": "choice", "choice": [f"v{i}" for i in range(200_000)]}
    ),
    "49,152 named ids at 400 positions": lambda: completion(
        prompt=[5] * 400, prompt_logprobs=0, logprobs=0, logprob_token_ids=list(range(49_152))
    ),
    "256 named ids at 400 positions": lambda: completion(
        prompt=[5] * 400, prompt_logprobs=0, logprobs=0, logprob_token_ids=list(range(256))
    ),
    "1,600,000 prompts of one letter": lambda: completion(prompt=["a"] * 1_600_000),
    "1,600,000 continuations": lambda: (SCORE, {"context": "a", "continuations": ["b"] * 1_600_000}),
    "500 continuations": lambda: (SCORE, {"context": "a", "continuations": ["b"] * 500}),
    "a conversation of 300 KB of digits with 16 continuations": lambda: (
        SCORE,
        {"messages": said("1" * 300_000), "continuations": ["a"] * 16},
    ),
    "a conversation of 30 KB with 512 continuations": lambda: (
        SCORE,
        {"messages": said("1" * 30_000), "continuations": ["a"] * 512},
    ),
    "a conversation of 1,700 bytes with 512 continuations": lambda: (
        SCORE,
        {"messages": said("1" * 1_700), "continuations": ["a"] * 512},
    ),
    "500 prompts with 65,000 ids that end a text": lambda: completion(
        prompt=[[5]] * 500, stop_token_ids=[6] * 65_000
    ),
    "500 prompts with 1,000 ids that end a text": lambda: completion(
        prompt=[[5]] * 500, stop_token_ids=[6] * 1_000
    ),
    "8 MB of digits": lambda: completion(prompt="1" * 8_000_000),
    "1 MB of digits to tokenise": lambda: ("/tokenize", {"prompt": "1" * 1_000_000}),
    "8 MB of digits to tokenise": lambda: ("/tokenize", {"prompt": "1" * 8_000_000}),
    "200,000 messages": lambda: chat(messages=MESSAGES * 200_000),
    "2,000 messages": lambda: chat(messages=MESSAGES * 2_000),
    "2,000,000 allowed ids": lambda: completion(allowed_token_ids=[1] * 2_000_000),
    "65,000 allowed ids": lambda: completion(allowed_token_ids=[1] * 65_000),
    "200,000 banned words": lambda: completion(bad_words=["ab"] * 200_000),
    "1,000 banned words": lambda: completion(bad_words=[f"word {i}" for i in range(1_000)]),
    "a field's name of 7,900,000 letters": lambda: completion(**{"temperatur" * 790_000: 1}),
    "an empty field of a message with a name of 7,900,000": lambda: chat(
        messages=[{**MESSAGES[0], "k" * 7_900_000: None}]
    ),
    "an echo of 2,000 tokens with 20 alternatives": lambda: completion(
        prompt=[5, 6, 7, 8] * 500, echo=True, logprobs=20, max_tokens=1
    ),
    "a name of LoRA weights of 7,900,000 letters": lambda: completion(lora="x" * 7_900_000),
    "a name of a model of 1,900,000 lists": lambda: completion(model=[[]] * 1_900_000),
    "64 choices that go on with a call within 900 others": lambda: begun_call(900),
    "64 choices that go on with a call within 90 others": lambda: begun_call(90),
    "a model's chat template of nested loops": lambda: chat(model=LOOPS),
    "the members of 1,900 alternatives with 250 parts each": lambda: completion(
        logprobs=0,
        field_logprobs="members",
        response_format={"type": "json_schema", "json_schema": {"schema": alternatives(1_900, 250)}},
    ),
}

NUM_GETS = 400  # at once
GETS = {
    f"{NUM_GETS} GETs of {path}": path
    for path in ("/v1/tokenizer", "/openapi.json", "/v1/logits_processors", "/v1/models", "/metrics")
}


NUMBERS = itertools.count(5)


def unseen(length: int) -> list[int]:
    """A prompt of which the server knows no beginning yet."""
    return [next(NUMBERS), *range(5, 5 + length - 1)]


# What one client may send while another one's tokens stream.
HEAVY: dict[str, Callable[[], tuple[str, Body]]] = {
    "a prompt of 2,000 tokens": lambda: completion(prompt=unseen(2_000), max_tokens=1),
    "an echo of 1,000 tokens with 20 alternatives": lambda: completion(
        prompt=unseen(1_000), echo=True, logprobs=20, max_tokens=0
    ),
    "128 completions": lambda: completion(n=128, max_tokens=16, temperature=1, ignore_eos=True),
    "500 prompts of one token": lambda: completion(prompt=[[5 + number] for number in range(500)]),
    "32 completions by an ambiguous grammar": lambda: completion(
        n=32, max_tokens=32, temperature=1, response_format={"type": "ebnf", "ebnf": AMBIGUOUS}
    ),
}
HEAVY_IN_SMOKE = "128 completions"
AMBIGUOUS = 'start: e\ne: e e | e e e | "a" | "b" | "a" "b"\n'


def gaps_ms(served: Served, is_over: Callable[[], bool]) -> list[float]:
    """Milliseconds between the tokens of a stream, until something is over or the stream ends."""
    body = {"prompt": "the cat", "max_tokens": 400, "stream": True, "ignore_eos": True}
    gaps, before = [], 0.0
    with served.open(COMPLETIONS, body) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                gaps += [1000 * (now - before)] if before else []
                before = now
                if is_over() and len(gaps) >= NUM_GAPS:
                    break
    return gaps


def neighbour_ms(served: Served, name: str) -> float:
    """How long a neighbour's next token takes beside a heavy request, median."""
    path, body = HEAVY[name]()
    with ThreadPoolExecutor(1) as thread:
        heavy = thread.submit(served.post, path, body)
        beside = gaps_ms(served, heavy.done)
        heavy.result()
    return statistics.median(beside)


@dataclass
class Felt:
    """What others felt beside an attack, a number a round."""

    health_ms: list[float] = field(default_factory=list)
    completion_ms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # until the attack had its answer


@contextlib.contextmanager
def watched(port: int, felt: Felt) -> Iterator[None]:
    """Note the slowest answers to others while the block runs."""
    watcher = subprocess.Popen(
        [sys.executable, "-c", WATCHER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert watcher.stdout is not None
    watcher.stdout.readline()  # it has begun
    try:
        yield
    finally:
        told, _ = watcher.communicate(timeout=300)
        health, completion = map(float, told.split())
        felt.health_ms.append(1000 * health)
        felt.completion_ms.append(1000 * completion)


def attack(served: Served, name: str, felt: Felt) -> None:
    """Send one, and wait for its answer."""
    port = int(served.url.rsplit(":", 1)[1])
    with watched(port, felt):
        start = time.perf_counter()
        if name == CONTROL:
            with ThreadPoolExecutor(20) as threads:
                list(
                    threads.map(
                        lambda number: served.post(*completion(max_tokens=16, seed=number)), range(20)
                    )
                )
        elif name in GETS:
            get_many(port, GETS[name])
        elif name in CONNECTIONS:
            CONNECTIONS[name](port)
        else:
            path, body = ATTACKS[name]()
            # Most deserve a refusal. A reply may be a stream: its bytes are read, whatever they are.
            with contextlib.suppress(urllib.error.HTTPError), served.open(path, body) as reply:
                reply.read()
        felt.seconds.append(time.perf_counter() - start)


def get_many(port: int, path: str) -> None:
    """Ask for one path on many connections, then read all replies."""
    asked = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(NUM_GETS)]
        for link in links:
            link.sendall(asked)
        for link in links:
            while link.recv(1 << 20):
                pass


def memory_bytes(served: Served) -> int:
    """What the server's processes hold."""
    port = int(served.url.rsplit(":", 1)[1])
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "serve" in words and str(port) in words:
                return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
    raise RuntimeError("the server is gone")


@dataclass
class Layout:
    """What was measured of one layout."""

    felt: dict[str, Felt]  # by attack
    growth: float  # percent of the memory before the attacks
    beside_ms: dict[str, list[float]]  # a neighbour's next token, by heavy request
    alone_ms: float


def measure(arena: Arena, flags: tuple[str, ...], names: list[str]) -> Layout:
    """Send every attack in every round, to one server."""
    options = arena.options
    # Never asked for: where there are several models, what a body names is read before the rest of it.
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(looping_folder(arena.model_folder))
        also = ("--also-model", f"unused={arena.model_folder}", "--also-model", f"{LOOPS}={folder}")
        served_with = ("--max-logprobs", "20", "--kv-cache-memory-bytes", KV_BYTES, *also, *flags)
        served = stack.enter_context(serving(our_program(arena.model_folder, *served_with)))
        for name in names:  # a first time, so that what is kept is there
            attack(served, name, Felt())
        before, felt = memory_bytes(served), {name: Felt() for name in names}
        for _ in range(options.rounds):
            for name in names:
                attack(served, name, felt[name])
        growth = 100 * (memory_bytes(served) / before - 1)
        served.post(*completion())  # it still serves
        heavy = [HEAVY_IN_SMOKE] if options.is_smoke else list(HEAVY)
        beside = {name: [neighbour_ms(served, name) for _ in range(options.rounds)] for name in heavy}
        return Layout(felt, growth, beside, statistics.median(gaps_ms(served, lambda: True)))


@contextlib.contextmanager
def looping_folder(model: Path) -> Iterator[Path]:
    """The model's folder with another chat template."""
    with tempfile.TemporaryDirectory() as folder:
        for file in model.iterdir():
            if file.name != "chat_template.jinja":
                Path(folder, file.name).symlink_to(file.resolve())
        Path(folder, "chat_template.jinja").write_text(NESTED_LOOPS)
        yield Path(folder)


def refusal_s(model: Path) -> float:
    """How long the slowest of some hostile folders takes until it is refused, in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place, name) for name in ("layers", "header")]
        for folder in folders:
            folder.mkdir()
            for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
                shutil.copy(model / name, folder)
            (folder / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
        config = json.loads((folders[0] / "config.json").read_text()) | {"num_hidden_layers": 2**31}
        (folders[0] / "config.json").write_text(json.dumps(config))
        told = subprocess.run(
            [sys.executable, "-c", REFUSER, *map(str, folders)], check=True, capture_output=True, text=True
        )
        return float(told.stdout)


class EmptyLists(http.server.BaseHTTPRequestHandler):
    """Answers everything with 32 MB of empty lists."""

    def do_POST(self) -> None:
        """Answer."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        with contextlib.suppress(OSError):  # who audits has read enough
            self.wfile.write(b"[" + b"[]," * (32_000_000 // 3) + b"[]]")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def audited_s() -> float:
    """How long one question to a server of empty lists takes until it is given up."""
    from logprobe.analysis.auditing.endpoint import Connection, Endpoint
    from logprobe.errors import ServerError

    async def ask(url: str) -> None:
        async with Connection(Endpoint(url, timeout_s=AUDIT_TIMEOUT_S)) as connection:
            await connection.send("/v1/completions", {"prompt": "the cat"})

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), EmptyLists) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        start = time.perf_counter()
        try:
            asyncio.run(ask(f"http://127.0.0.1:{server.server_address[1]}"))
        except ServerError:
            return time.perf_counter() - start
        finally:
            server.shutdown()
    raise RuntimeError("32 MB of empty lists were taken")


def main() -> None:
    """Attack a server of each layout."""
    options = parse_options(__doc__ or "")
    names = [CONTROL, *ATTACKS, *GETS, *CONNECTIONS]
    layouts = LAYOUTS
    if options.is_smoke:
        names = [CONTROL, *list(ATTACKS)[:2], *list(GETS)[:1], *list(CONNECTIONS)[:1]]
        layouts = {OURS: LAYOUTS[OURS]}
    with Arena(options) as arena:
        found = {name: measure(arena, flags, names) for name, flags in layouts.items()}
        refused = [refusal_s(arena.model_folder) for _ in range(options.rounds)]
    audited = [audited_s() for _ in range(options.rounds)]
    most_ms = {
        layout: statistics.median(one.felt[CONTROL].health_ms) + MAX_MS for layout, one in found.items()
    }
    figures = []
    for name in names:
        felt = {layout: one.felt[name] for layout, one in found.items()}
        figures += [
            Figure(
                name=f"slowest health during {name}",
                unit="ms",
                better="lower",
                samples={layout: one.health_ms for layout, one in felt.items()},
                targets=[Target(against=layout, at_most=round(most)) for layout, most in most_ms.items()],
                notes=[f"{name}: answered after {max(felt[OURS].seconds):.2f} s at most"]
                if name in ATTACKS
                else [],
            ),
            Figure(
                name=f"another client's slowest completion during {name}",
                unit="ms",
                better="lower",
                samples={layout: one.completion_ms for layout, one in felt.items()},
            ),
        ]
    figures.append(
        Figure(
            name="memory after all of them",
            unit="percent more",
            better="lower",
            samples={layout: [one.growth] for layout, one in found.items()},
            targets=[Target(against=layout, at_most=MAX_GROWTH) for layout in found],
        )
    )
    figures += [
        Figure(
            name=f"a neighbour's next token beside {name}",
            unit="ms",
            better="lower",
            samples={layout: one.beside_ms[name] for layout, one in found.items()},
            notes=[f"a neighbour's next token beside nothing: {found[OURS].alone_ms:.1f} ms"],
        )
        for name in found[OURS].beside_ms
    ]
    alone = {
        "until a hostile model folder is refused": (refused, REFUSED_S),
        "until an audited server's 32 MB of empty lists are refused": (audited, AUDIT_TIMEOUT_S),
    }
    figures += [
        Figure(
            name=name,
            unit="s",
            better="lower",
            samples={OURS: samples},
            targets=[Target(against=OURS, at_most=most)],
        )
        for name, (samples, most) in alone.items()
    ]
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
