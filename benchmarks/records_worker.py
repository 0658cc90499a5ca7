"""One contestant of `bench_records.py` in a process of its own: jobs in, one figure out, a JSON line each.

A contestant is a container that is filled row by row; the jobs are the same for all. It runs in the
contestant's environment, so it imports nothing but NumPy until its container asks for more.
"""

import gc
import importlib
import json
import resource
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

WARM_UP_ROWS = 1_024


class Step(NamedTuple):
    """Rows of a step: the chosen token, then the k best."""

    token_ids: Any  # (n, k + 1) int32
    logprobs: Any  # (n, k + 1) float32
    ranks: Any  # (n,) int32


@dataclass(frozen=True, slots=True)
class Frozen:
    """One candidate as a frozen dataclass, the usual way."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class ListStore:
    """Six Python lists and the loop of vLLM's `append_fast`: its stand-in where it is not installed."""

    def __init__(self) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []

    def append_fast(self, token_ids: Any, logprobs: Any, ranks: Any, decoded_tokens: Any) -> None:
        """Add one position."""
        self.start_indices.append(len(self.token_ids))
        rows = zip(token_ids, logprobs, ranks, decoded_tokens, strict=False)
        for token_id, logprob, rank, text in rows:
            self.token_ids.append(token_id)
            self.logprobs.append(logprob)
            self.ranks.append(rank)
            self.decoded_tokens.append(text)
        self.end_indices.append(len(self.token_ids))

    def __getitem__(self, index: int) -> dict[int, Frozen]:
        place = slice(self.start_indices[index], self.end_indices[index])
        values = map(Frozen, self.logprobs[place], self.ranks[place], self.decoded_tokens[place])
        return dict(zip(self.token_ids[place], values, strict=True))


class DictList(list[Any]):
    """A list of dicts."""

    def append_fast(self, token_ids: Any, logprobs: Any, ranks: Any, decoded_tokens: Any) -> None:
        """Add one position."""
        self.append(dict(zip(token_ids, map(Frozen, logprobs, ranks, decoded_tokens), strict=False)))


def make_steps(num_rows: int, k: int, vocab_size: int) -> Step:
    """Rows like a model's: nine chosen tokens of ten among the k best, the rest anywhere."""
    rng = np.random.default_rng(7)
    rows = np.arange(num_rows)
    spread = vocab_size // (4 * k)
    top = rng.permuted(np.tile(np.arange(4 * k), (num_rows, 1)), axis=1)[:, :k] * spread + spread - 1
    logprobs = -np.sort(rng.exponential(3, (num_rows, k)), axis=1).astype(np.float32)
    places = np.minimum(rng.geometric(0.5, num_rows) - 1, k - 1)
    is_inside = rng.random(num_rows) < 0.9
    ids = np.column_stack([np.where(is_inside, top[rows, places], 1), top]).astype(np.int32)
    chosen = np.where(is_inside, logprobs[rows, places], np.float32(-20))
    ranks = np.where(is_inside, places + 1, rng.integers(k + 1, vocab_size, num_rows)).astype(np.int32)
    return Step(ids, np.column_stack([chosen, logprobs]).astype(np.float32), ranks)


def fill_rows(container: Any, step: Step, rows_a_call: int) -> None:
    """Append a step's arrays, `rows_a_call` at a time."""
    for at in range(0, len(step.ranks), rows_a_call):
        place = slice(at, at + rows_a_call)
        container.append_rows(step.token_ids[place], step.logprobs[place], step.ranks[place])


def fill_fast(container: Any, step: Step, _: int) -> None:
    """Append row by row from Python columns, which an engine must make of its arrays first."""
    ranks = step.ranks.tolist()
    width = step.token_ids.shape[1]
    for row, rank in enumerate(ranks):
        ids, logprobs = step.token_ids[row].tolist(), step.logprobs[row].tolist()
        container.append_fast(ids, logprobs, chain((rank,), range(1, width)), repeat(None))


def fill_texts(container: Any, step: Step, _: int) -> None:
    """`fill_fast` with the texts of a table, which is what a tokenizer's list of pieces is."""
    ranks = step.ranks.tolist()
    width, texts = (
        step.token_ids.shape[1],
        [f" tok{token_id}" for token_id in range(step.token_ids.max() + 1)],
    )
    for row, rank in enumerate(ranks):
        ids, logprobs = step.token_ids[row].tolist(), step.logprobs[row].tolist()
        of_rank, decoded = chain((rank,), range(1, width)), [texts[token_id] for token_id in ids]
        container.append_fast(ids, logprobs, of_rank, decoded)


def fill_dicts(container: Any, step: Step, _: int) -> None:
    """Append row by row as dicts of candidates, made of the same arrays."""
    from logprobe.records import Logprob

    ranks = step.ranks.tolist()
    width = step.token_ids.shape[1]
    for row, rank in enumerate(ranks):
        ids, logprobs = step.token_ids[row].tolist(), step.logprobs[row].tolist()
        position: dict[int, Any] = {}
        for token_id, logprob, place in zip(ids, logprobs, chain((rank,), range(1, width)), strict=True):
            position.setdefault(token_id, Logprob(logprob, place))
        container.append(position)


def build(job: dict[str, Any], make: Callable[[], Any], fill: Callable[..., None]) -> float:
    """Rows a second."""
    step = make_steps(job["num_rows"], job["k"], job["vocab_size"])
    fill(make(), Step(*(column[:WARM_UP_ROWS] for column in step)), job["rows_a_call"])
    container = make()
    gc.collect()
    started = time.perf_counter()
    fill(container, step, job["rows_a_call"])
    container[len(step.ranks) - 1]  # rows that wait to be packed are packed now
    return len(step.ranks) / (time.perf_counter() - started)


def held_bytes(job: dict[str, Any], make: Callable[[], Any], fill: Callable[..., None]) -> float:
    """Bytes an entry that Python and NumPy hold, spare room and all."""
    step = make_steps(job["num_rows"], job["k"], job["vocab_size"])
    fill(make(), Step(*(column[:WARM_UP_ROWS] for column in step)), job["rows_a_call"])
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    container = make()
    fill(container, step, job["rows_a_call"])
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    num_entries = len(container.token_ids) if hasattr(container, "token_ids") else sum(map(len, container))
    return held / num_entries


def value_bytes(job: dict[str, Any], make: Callable[[], Any], fill: Callable[..., None]) -> float:
    """Bytes an entry of the values alone, texts not counted."""
    record = make()
    fill(record, make_steps(job["num_rows"], job["k"], job["vocab_size"]), 1)
    return float(record.nbytes / record.num_entries)


def index(job: dict[str, Any], make: Callable[[], Any], fill: Callable[..., None]) -> float:
    """Positions a second, each read as a dict."""
    container = make()
    fill(container, make_steps(job["num_rows"], job["k"], job["vocab_size"]), job["rows_a_call"])
    started = time.perf_counter()
    for place in range(job["num_rows"]):
        container[place]
    return float(job["num_rows"]) / (time.perf_counter() - started)


class Table:
    """Texts as a model's vocabulary would give them."""

    def token_text(self, token_id: int) -> str:
        """Text of one token."""
        return f" tok{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token."""
        return self.token_text(token_id).encode()


def chat_json(job: dict[str, Any], make: Callable[[], Any], fill: Callable[..., None]) -> float:
    """Positions a second, from the record to the bytes of a chat reply's `content`."""
    from logprobe.records import ChatEncoder

    record, encoder = make(), ChatEncoder(Table())
    fill(record, make_steps(job["num_rows"], job["k"], job["vocab_size"]), job["rows_a_call"])
    encoder.content(record)
    started = time.perf_counter()
    content = encoder.content(record)
    assert content.count(b'"top_logprobs"') == len(record)
    return len(record) / (time.perf_counter() - started)


def pydantic_json(job: dict[str, Any], _: Any, __: Any) -> float:
    """The same bytes from a list of dicts with texts, through pydantic models."""
    from pydantic import BaseModel

    class Top(BaseModel):
        token: str
        logprob: float
        bytes: list[int] | None

    class Entry(Top):
        top_logprobs: list[Top]

    class Content(BaseModel):
        content: list[Entry]

    step = make_steps(job["num_rows"], job["k"], job["vocab_size"])
    rows = [
        [(f" tok{token_id}", logprob) for token_id, logprob in zip(ids, logprobs, strict=True)]
        for ids, logprobs in zip(step.token_ids.tolist(), step.logprobs.tolist(), strict=True)
    ]

    def encode() -> str:
        entries = []
        for row in rows:
            top = [Top(token=t, logprob=number, bytes=list(t.encode())) for t, number in row[1:]]
            text, number = row[0]
            entries.append(Entry(token=text, logprob=number, bytes=list(text.encode()), top_logprobs=top))
        return Content(content=entries).model_dump_json()

    encode()
    started = time.perf_counter()
    encode()
    return len(rows) / (time.perf_counter() - started)


def make_values(job: dict[str, Any], _: Any, __: Any) -> float:
    """Candidates a second as `kind`: our dataclass, a msgspec Struct, or a frozen dataclass."""
    import msgspec

    from logprobe.records import Logprob

    fields = [("logprob", float), ("rank", int | None), ("decoded_token", str | None)]
    struct = msgspec.defstruct("Struct", fields, frozen=True, gc=False)
    make = {"dataclass": Logprob, "msgspec Struct": struct, "frozen dataclass": Frozen}[job["kind"]]
    columns = [[-0.5] * 20_000, [1] * 20_000, ["a"] * 20_000]
    started = time.perf_counter()
    for _ in map(make, *columns):
        pass
    return 20_000 / (time.perf_counter() - started)


def growth(job: dict[str, Any], make: Callable[[], Any], fill: Callable[..., None]) -> float:
    """Time a position in the last tenth of one record of `num_rows` positions, over that in the first."""
    step = make_steps(1000, job["k"], job["vocab_size"])
    fill(make(), step, 1)
    record, seconds = make(), []
    for _ in range(job["num_rows"] // 1000):
        started = time.perf_counter()
        fill(record, step, 1)
        seconds.append(time.perf_counter() - started)
    last = seconds[-max(len(seconds) // 10, 1) :]
    first = seconds[: max(len(seconds) // 10, 1)]
    return float(np.median(last) / np.median(first))


def data_set(job: dict[str, Any], make: Callable[[], Any], fill: Callable[..., None]) -> float:
    """Peak memory while writing `num_rows` rows of a data set, over that at a first `share` of them."""
    from logprobe.records import ParquetWriter

    record = make()
    fill(record, make_steps(1000, job["k"], job["vocab_size"]), 1000)
    peaks = []
    with tempfile.TemporaryDirectory() as folder, ParquetWriter(Path(folder) / "rows.parquet") as writer:
        for request in range(job["num_rows"] // 1000):
            writer.write(str(request), record)
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peaks[-1] / peaks[max(int(len(peaks) * job["share"]), 1) - 1]


JOBS = {
    "build": build,
    "held_bytes": held_bytes,
    "value_bytes": value_bytes,
    "index": index,
    "chat_json": chat_json,
    "pydantic_json": pydantic_json,
    "make_values": make_values,
    "growth": growth,
    "data_set": data_set,
}


def contestant(name: str) -> tuple[Callable[[], Any], Callable[..., None]]:
    """How to make the container, and how to fill it."""
    if name in {"list of dicts", "lists"}:
        return {"list of dicts": DictList, "lists": ListStore}[name], fill_fast
    module = {"vllm": "vllm.logprobs"}.get(name, "logprobe.records")
    make = importlib.import_module(module).FlatLogprobs
    fills = {"logprobe": fill_rows, "logprobe texts": fill_texts, "logprobe dicts": fill_dicts}
    return make, fills.get(name, fill_fast)


def main() -> None:
    """Answer jobs until the input ends."""
    make, fill = contestant(sys.argv[1])
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps({"value": JOBS[job["job"]](job, make, fill)}), flush=True)


if __name__ == "__main__":
    main()
