"""`make torture`: minutes of mixed requests in every layout, with faults, and drawn against scored.

In each layout a server process gets requests of every kind that `test_storm` knows, whole and streamed; some
clients leave, read slowly, or send what is no body. An operator has the model's weights and the LoRA weights
replaced by the same ones all the while, and another program puts other files in the place of the weights and
back. Where the engine is a process of its own it is killed, stopped and starved every few seconds, and killed
while its files are others or `TMPDIR` is gone. At the end a sample of the replies is asked for again, alone,
and every number compared, bit for bit.

Drawn against scored: the numbers of generated tokens and those of the same tokens scored afterwards, from
kept prefixes, cold, and in chunks, alone and among others.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psutil
import pytest
import safetensors.torch
from harness import machine_facts, save
from process import RIVALS
from test_storm import KINDS, figures, is_idle, numbers_of, send

from conftest import save_adapters, save_tiny_llama
from server_process import Attacked, eventually, serving_process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from test_storm import Ask

    from logprobe import LLM


@dataclass(frozen=True)
class Layout:
    """How a server is run."""

    name: str
    flags: tuple[str, ...] = ()
    is_harmed: bool = False  # its engine's processes are, which are started again
    is_exact: bool = True  # numbers do not depend on other rows of the batch
    replaces: bool = True  # the model's own weights; other files may lie in their place, too
    has_lora: bool = True
    python: Path = Path(sys.executable)


INVARIANT: Final = "--batch-invariant"
ON_VLLM: Final = ("--engine", "vllm", "--engine-options", '{"enforce_eager": true}')
VLLM_PYTHON: Final = RIVALS["virtual_lm"].python
# vLLM on a CPU ends at prompt_logprobs once it is ready for LoRA weights.
LAYOUTS: Final = (
    Layout("one process", (INVARIANT,)),
    Layout("engine process", (INVARIANT, "--engine-process"), is_harmed=True),
    Layout("two replicas", (INVARIANT, "--data-parallel-size", "2"), is_harmed=True),
    Layout("vLLM", ON_VLLM, is_exact=False, replaces=False, has_lora=False, python=VLLM_PYTHON),
)
NUM_CLIENTS = 12
FAULT_EVERY_S, REPLACE_EVERY_S, HEALTH_EVERY_S = 6.0, 5.0, 0.02
OPERATOR_KEY: Final = "an-operators-own-key"
NUM_CONTROL = 200
STOPPED_S, AWAY_S, STARVED_TIMES = 2.0, 3.0, 20
MAX_REPLAYED = 400
TIMEOUT_S = 300.0
ROWS: Final = "/v1/next_token_logprobs"
READY: Final = b'{"status":"ready"}'
FULL: Final = frozenset({429, 503})
BAD_BODIES: Final = (b"", b"{", b"[]", b'{"prompt": 5.5}', b'{"prompt": "a", "max_tokens": -1}', b"\xff" * 99)
DRAWN_BATCHES, DRAWN_LEN, DRAWN_TOP = (1, 8, 32, 128), 64, 5


@dataclass
class Tally:
    """What became of one layout's requests."""

    layout: str
    is_exact: bool
    minutes: float
    ended: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    replayed: int = 0
    numbers: int = 0
    differing: int = 0  # numbers whose bits are others when asked for alone
    worst_nats: float = 0.0
    left_behind: dict[str, float] = field(default_factory=dict)  # of slots, handles and the like
    health_p99_ms: float = 0.0
    idle_health_p99_ms: float = 0.0  # before the requests

    @property
    def sent(self) -> int:
        """All requests."""
        return self.ended.total()

    @property
    def is_well(self) -> bool:
        """Whether nothing was lost, wrong or left behind."""
        num_off = self.differing if self.is_exact else 0
        return not (self.ended["lost"] or self.ended["wrong"] or num_off or self.left_behind)


class Client(threading.Thread):
    """Sends one request after the other until the time is over."""

    def __init__(
        self, server: Attacked, seed: int, stop: threading.Event, *, has_lora: bool, is_harmed: bool
    ) -> None:
        super().__init__()
        self.ended: Counter[str] = Counter()
        self.replies: list[tuple[Ask, bytes]] = []
        self.complaints: list[str] = []
        self._is_harmed = is_harmed
        self._kinds = [kind for name, kind in KINDS.items() if has_lora or name != "LoRA"]
        self._server, self._stop_event = server, stop
        self._rng = random.Random(seed)  # noqa: S311 - drawn for tests

    def run(self) -> None:
        """Count how each ended."""
        while not self._stop_event.is_set():
            ask = self._rng.choice(self._kinds)(self._rng)
            how = self._rng.choices(["whole", "leave", "slow", "bad"], [12, 3, 1, 1])[0]
            try:
                outcome, data = self._one(ask, how)
            except http.client.IncompleteRead as error:
                # Rows that have begun to come have no other way to say that their process was killed.
                outcome = "error" if ask[0] == ROWS and self._is_harmed else "lost"
                data = repr(error).encode()
            except (OSError, http.client.HTTPException) as error:
                outcome, data = "lost", repr(error).encode()
            self.ended[outcome] += 1
            if outcome == "result":
                self.replies.append((ask, data))
            elif outcome in {"lost", "wrong"}:
                self.complaints.append(f"{outcome}: {how} {json.dumps(ask)[:300]}: {data[-300:]!r}")

    def _one(self, ask: Ask, how: str) -> tuple[str, bytes]:
        path, body = ask
        if how == "leave":
            send(self._server, ask, num_bytes=self._rng.choice([0, 1, 300]))
            return "left", b""
        sent = self._rng.choice(BAD_BODIES) if how == "bad" else json.dumps(body).encode()
        link = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=TIMEOUT_S)
        try:
            link.request("POST", path, sent, {"Content-Type": "application/json"})
            with link.getresponse() as reply:
                if how == "slow":
                    data = b""
                    while piece := reply.read(256):
                        data += piece
                        time.sleep(0.02)
                else:
                    data = reply.read()
                return outcome_of(body, how, reply.status, data), data
        finally:
            link.close()


def outcome_of(body: dict[str, Any], how: str, status: int, data: bytes) -> str:
    """One of `result`, `error`, `refused`, and what must not be: `lost`, `wrong`."""
    if how == "bad":
        return "refused" if 400 <= status < 500 else "wrong"
    if status in FULL:
        return "refused" if status == 429 else "error"
    if status != 200:
        return "error" if status == 500 and b'"error"' in data else "wrong"
    if not body.get("stream"):
        return "result"
    if not data.endswith(b"data: [DONE]\n\n"):
        return "lost"
    return "error" if b'data: {"error"' in data else "result"


@dataclass(frozen=True)
class Files:
    """What faults take away and bring back."""

    weights: Path  # the file that a server loaded
    others: Path  # the same tensors with other numbers
    temporary: Path  # the server's TMPDIR

    @classmethod
    def of(cls, folder: Path, parent: Path) -> Files:
        """Prepare those of a model's folder in an empty folder."""
        weights, others, temporary = folder / "model.safetensors", parent / "others", parent / "tmp"
        state = safetensors.torch.load_file(weights)
        safetensors.torch.save_file(
            {name: weight * 0.9 for name, weight in state.items()}, others, {"format": "pt"}
        )
        temporary.mkdir()
        return cls(weights, others, temporary)


class Faults(threading.Thread):
    """Harms the engine's processes and takes files away, one fault every few seconds."""

    def __init__(
        self, server: Attacked, files: Files, seed: int, stop: threading.Event, *, is_harmed: bool
    ) -> None:
        """`is_harmed`: processes are; else only the files of weights are replaced."""
        super().__init__()
        self.done: Counter[str] = Counter()
        self._server, self._files, self._stop_event = server, files, stop
        self._is_harmed = is_harmed
        self._rng = random.Random(seed)  # noqa: S311 - drawn for tests

    def run(self) -> None:
        """Do one after the other."""
        faults = {
            "killed": psutil.Process.kill,
            "stopped": self.stop,
            "starved": self.starve,
            "killed without TMPDIR": self.kill_without_temporary,
            "killed beside other weight files": self.kill_beside_other_weights,
        }
        while not self._stop_event.wait(FAULT_EVERY_S):
            if not self._is_harmed:
                with self.other_weights():
                    time.sleep(AWAY_S)
                self.done["other weight files"] += 1
                continue
            engines = engine_processes(self._server)
            if not engines:
                continue
            kind = self._rng.choice([*faults])
            try:
                faults[kind](self._rng.choice(engines))
                self.done[kind] += 1
            except psutil.NoSuchProcess:
                continue

    @staticmethod
    def stop(process: psutil.Process) -> None:
        """Stop a process for some seconds."""
        process.suspend()
        time.sleep(STOPPED_S)
        process.resume()

    @staticmethod
    def starve(process: psutil.Process) -> None:
        """Leave a process a part of the time."""
        for _ in range(STARVED_TIMES):
            process.suspend()
            time.sleep(0.05)
            process.resume()
            time.sleep(0.02)

    def kill_without_temporary(self, process: psutil.Process) -> None:
        """Kill a process while the folder is away that the next one needs."""
        away = self._files.temporary.with_suffix(".away")
        self._files.temporary.rename(away)
        try:
            process.kill()
            time.sleep(AWAY_S)
        finally:
            away.rename(self._files.temporary)

    def kill_beside_other_weights(self, process: psutil.Process) -> None:
        """Kill a process while the next one finds files with other numbers, which it must not serve."""
        with self.other_weights():
            process.kill()
            time.sleep(AWAY_S)

    @contextmanager
    def other_weights(self) -> Iterator[None]:
        """Put a file with other numbers in the place of the weights, as programs do that save a model."""
        weights = self._files.weights
        kept, new = weights.with_suffix(".kept"), weights.with_suffix(".new")
        os.link(weights, kept)
        try:
            shutil.copyfile(self._files.others, new)
            new.replace(weights)
            yield
        finally:
            kept.replace(weights)


class Operator(threading.Thread):
    """Has weights replaced by the same ones, one kind after the other."""

    def __init__(self, server: Attacked, folders: dict[str, Path], stop: threading.Event) -> None:
        """`folders` holds those of LoRA weights by their names, and the model's under `model`."""
        super().__init__()
        self.done: Counter[str] = Counter()
        self._server, self._folders, self._stop_event = server, folders, stop

    def run(self) -> None:
        """Count what was replaced, and what was not: a process that ends meanwhile fails the order."""
        headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        for name in itertools.cycle(self._folders):
            if self._stop_event.wait(REPLACE_EVERY_S):
                return
            folder = str(self._folders[name])
            if name == "model":
                path, body = (
                    "/update_weights_from_disk",
                    {"model_path": folder, "weight_version": "the same"},
                )
            else:
                path = "/v1/load_lora_adapter"
                body = {"lora_name": name, "lora_path": folder, "load_inplace": True}
            reply = self._server.send(path, json.dumps(body).encode(), **headers)
            is_done = reply.status == 200
            self.done[f"{'model' if name == 'model' else 'LoRA'} {'' if is_done else 'not '}replaced"] += 1
            if not is_done:
                print(f"not replaced: {reply.data[:300]!r}", file=sys.stderr)


class Health(threading.Thread):
    """Asks for the health all the time."""

    def __init__(self, server: Attacked, stop: threading.Event) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._server, self._stop_event = server, stop

    def run(self) -> None:
        """Note how long each answer took, whatever it says: an engine may just be down."""
        while not self._stop_event.wait(HEALTH_EVERY_S):
            began_s = time.perf_counter()
            self._server.get("/health")
            self.seconds.append(time.perf_counter() - began_s)


def p99_ms(seconds: list[float]) -> float:
    """The length that one in a hundred passes."""
    return float(np.quantile(seconds, 0.99)) * 1000 if seconds else 0.0


def engine_processes(server: Attacked) -> list[psutil.Process]:
    """Those of a server's children that run a model."""
    children = psutil.Process(server.process.pid).children()
    return [one for one in children if "resource_tracker" not in " ".join(one.cmdline())]


def tortured(
    layout: Layout, folder: Path, adapters: dict[str, Path], parent: Path, minutes: float, seed: int
) -> Tally:
    """One layout: the requests, the faults, the replay, and what is left."""
    tally = Tally(layout.name, layout.is_exact, minutes)
    folders = {"wide": adapters["wide"]} if layout.has_lora else {}
    flags = ("--lora-modules", f"wide={adapters['wide']}") if layout.has_lora else ()
    files = Files.of(folder, parent)
    if layout.replaces:  # from a copy, as other files lie in the model's own place at times
        folders["model"] = Path(shutil.copytree(folder, parent / "model"))
    flags += ("--max-num-seqs", "16", "--max-num-batched-tokens", "64")
    flags += ("--operator-key", OPERATOR_KEY, "--no-access-log", *layout.flags)
    environment = {"TMPDIR": str(files.temporary)}
    with serving_process(folder, *flags, python=layout.python, environment=environment) as server:
        storm(server, layout, folders, None, 0.2, seed)  # what is loaded when first needed is there
        eventually(lambda: is_idle(figures(server)), "requests stay")
        start, memory = figures(server), server.memory_bytes
        enough = threading.Event()
        idle = Health(server, enough)
        idle.start()
        eventually(lambda: len(idle.seconds) >= NUM_CONTROL, "the health is not told")
        enough.set()
        tally.idle_health_p99_ms = p99_ms(idle.seconds)
        clients, tally.faults, health = storm(server, layout, folders, files, minutes, seed + 1)
        tally.health_p99_ms = p99_ms(health.seconds)
        for client in clients:
            tally.ended += client.ended
            print(*client.complaints, sep="\n", end="\n" if client.complaints else "", file=sys.stderr)
        eventually(lambda: is_idle(figures(server)), "requests stay")
        replies = [reply for client in clients for reply in client.replies]
        sample = random.Random(seed).sample(replies, min(len(replies), MAX_REPLAYED))  # noqa: S311
        for ask, data in sample:
            replay(server, ask, data, tally)
        eventually(lambda: is_idle(figures(server)), "requests stay")
        tally.left_behind = left_behind(start, figures(server))
        if server.memory_bytes > 1.2 * memory:
            tally.left_behind["memory, MB"] = (server.memory_bytes - memory) / 1e6
    return tally


def storm(
    server: Attacked,
    layout: Layout,
    folders: dict[str, Path],
    files: Files | None,
    minutes: float,
    seed: int,
) -> tuple[list[Client], Counter[str], Health]:
    """Requests for some minutes; who sent them, what was done meanwhile, and how the health was told.

    `files`: what faults take away; None: there are no faults.
    """
    stop = threading.Event()
    is_harmed = files is not None and layout.is_harmed
    seeds = [1000 * seed + number for number in range(NUM_CLIENTS)]
    clients = [Client(server, one, stop, has_lora="wide" in folders, is_harmed=is_harmed) for one in seeds]
    operator, health = Operator(server, folders, stop), Health(server, stop)
    faults = []
    if files is not None and layout.replaces:
        faults = [Faults(server, files, seed, stop, is_harmed=is_harmed)]
    threads = [*clients, operator, health, *faults]
    for thread in threads:
        thread.start()
    stop.wait(60 * minutes)
    stop.set()
    for thread in threads:
        thread.join()
    eventually(lambda: server.get("/ready").data == READY, "an engine process stays down")
    return clients, sum((one.done for one in faults), operator.done), health


def replay(server: Attacked, ask: Ask, data: bytes, tally: Tally) -> None:
    """Ask again, alone, and compare words and numbers."""
    alone = send(server, ask)
    assert alone is not None
    (words, numbers), (words_alone, numbers_alone) = numbers_of(ask, data), numbers_of(ask, alone)
    tally.replayed += 1
    if words != words_alone:
        tally.ended["wrong"] += 1
        print(f"wrong: {json.dumps(ask)[:300]}", file=sys.stderr)
        return
    numbers, numbers_alone = np.asarray(numbers), np.asarray(numbers_alone)
    is_other = numbers != numbers_alone
    tally.numbers += numbers.size
    tally.differing += int(is_other.sum())
    if is_other.any():
        tally.worst_nats = max(tally.worst_nats, float(np.abs(numbers - numbers_alone)[is_other].max()))


def left_behind(start: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """What there is more of, or of free slots less."""
    more = {name: now[name] - start[name] for name in start if name not in {"threads", "free_slots"}}
    more["free_slots"] = start["free_slots"] - now["free_slots"]
    return {name: value for name, value in more.items() if value > 0}


# -- drawn against scored ------------------------------------------------------------------------------------


def drawn_against_scored(model: str, num_tokens: int, arithmetic: str) -> list[dict[str, Any]]:
    """For each number of neighbours and way of scoring: tokens, and how many of their numbers differ."""
    from logprobe import LLM

    rows = []
    settings: dict[str, Any] = {
        "kv_cache_memory_bytes": 1 << 29,
        "max_num_seqs": max(DRAWN_BATCHES),
        "arithmetic": arithmetic,
    }
    with LLM(model, **settings) as llm, LLM(model, **settings, max_num_batched_tokens=160) as small:
        for batch in DRAWN_BATCHES:
            drawn = draw(llm, batch, num_tokens // len(DRAWN_BATCHES))
            ways = {"kept prefixes": llm, "cold": llm, "chunks of 160": small}
            for way, scorer in ways.items():
                if way != "kept prefixes":
                    scorer.engine.forget_prefixes()
                num_numbers, num_other = compare(scorer, drawn)
                rows.append({"among": batch, "scored": way, "numbers": num_numbers, "differing": num_other})
                print(rows[-1], flush=True)
    return rows


Drawn = list[tuple[list[int], list[int], np.ndarray]]


def draw(llm: LLM, batch: int, num_tokens: int) -> Drawn:
    """Prompts, tokens drawn after them, and the numbers of these: (tokens, 1 + k) ids' log-probabilities."""
    from logprobe import SamplingParams

    rng = np.random.default_rng(batch)
    vocab_size = llm.engine.capabilities().vocab_size
    drawn: Drawn = []
    while sum(len(tokens) for _, tokens, _ in drawn) < num_tokens:
        prompts = [rng.integers(5, vocab_size - 5, rng.integers(4, 40)).tolist() for _ in range(batch)]
        params = [
            SamplingParams(
                max_tokens=DRAWN_LEN, logprobs=DRAWN_TOP, ignore_eos=True, seed=int(rng.integers(1 << 30))
            )
            for _ in prompts
        ]
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            [completion] = output.outputs
            drawn.append((prompt, list(completion.token_ids), numbers_in(completion.logprobs)))
    return drawn


def compare(llm: LLM, drawn: Drawn) -> tuple[int, int]:
    """How many numbers there are, and how many have other bits when the tokens are scored."""
    from logprobe import SamplingParams

    params = SamplingParams(max_tokens=0, prompt_logprobs=DRAWN_TOP)
    outputs = llm.generate([prompt + tokens for prompt, tokens, _ in drawn], params)
    num_numbers = num_other = 0
    for (prompt, _, numbers), output in zip(drawn, outputs, strict=True):
        scored = numbers_in(output.prompt_logprobs[len(prompt) :])
        num_numbers += numbers.size
        num_other += int((scored.view(np.uint32) != numbers.view(np.uint32)).sum())
    return num_numbers, num_other


def numbers_in(record: Any) -> np.ndarray:
    """The chosen token's and the k best's log-probabilities of each position, (T, 1 + k) float32."""
    best = record.top_entries().logprobs.reshape(len(record), DRAWN_TOP)
    return np.column_stack([record.chosen_entries().logprobs, best]).astype(np.float32)


# -- the program ---------------------------------------------------------------------------------------------


@contextmanager
def models() -> Iterator[tuple[Path, dict[str, Path]]]:
    """The suite's tiny Llama and LoRA weights of it."""
    with tempfile.TemporaryDirectory() as parent:
        factory = pytest.TempPathFactory(Path(parent), 1, "all", lambda *_, **__: None, _ispytest=True)
        folder = save_tiny_llama(factory.mktemp("tiny-llama"), head_dim=32)  # as vLLM wants it on a CPU
        yield folder, save_adapters(folder, factory)


def main() -> int:
    """Run all, print and keep the tables; 1 where something was lost, wrong or left behind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="of all layouts together; 0: none")
    parser.add_argument("--tokens", type=int, default=1 << 16, help="drawn and scored; 0: none")
    parser.add_argument("--model", default="smollm2", help="of which they are drawn")
    parser.add_argument("--arithmetic", default="auto", help="with which they are drawn and scored")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print, and keep nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    tallies = []
    layouts = [layout for layout in LAYOUTS if options.minutes and layout.python.exists()]
    with models() as (folder, adapters):
        for number, layout in enumerate(layouts):
            seed = options.seed + 10 * number
            with tempfile.TemporaryDirectory() as parent:
                minutes = options.minutes / len(layouts)
                tallies.append(tortured(layout, folder, adapters, Path(parent), minutes, seed))
            print(as_line(tallies[-1]), flush=True)
    tokens, arithmetic = options.tokens, options.arithmetic
    drawn = drawn_against_scored(options.model, tokens, arithmetic) if tokens else []
    content = {
        "machine": machine_facts(),
        "layouts": [as_content(tally) for tally in tallies],
        "drawn": [{"model": options.model, "arithmetic": arithmetic, **row} for row in drawn],
    }
    if options.json:
        print(json.dumps(content))
    else:
        save("torture", content)
    is_well = all(tally.is_well for tally in tallies) and not any(row["differing"] for row in drawn)
    return 0 if is_well else 1


def as_content(tally: Tally) -> dict[str, Any]:
    """What became of a layout, as JSON holds it."""
    return vars(tally) | {"ended": dict(tally.ended), "faults": dict(tally.faults), "sent": tally.sent}


def as_line(tally: Tally) -> str:
    """What became of a layout, for people."""
    ended = ", ".join(f"{count} {name}" for name, count in sorted(tally.ended.items()))
    faults = ", ".join(f"{count} {name}" for name, count in sorted(tally.faults.items())) or "no faults"
    return (
        f"{tally.layout}: {tally.sent} sent in {tally.minutes:.1f} min ({ended}; {faults}); "
        f"{tally.replayed} replayed, {tally.differing} of {tally.numbers} numbers differ "
        f"(worst {tally.worst_nats:.2g} nats); "
        f"health p99 {tally.health_p99_ms:.1f} ms, idle {tally.idle_health_p99_ms:.1f}; "
        f"left behind: {tally.left_behind or 'nothing'}"
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
