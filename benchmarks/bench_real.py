"""This measures a model of real size: loads, memory, disk, generation, prompts and next-token rows.

The model has random weights in the shape of Llama 3.2 1B (`make_model.py`), as safetensors of bfloat16 and as
GGUF files; `--model` names another shape, or a folder with its GGUF files beside it. In each round every
contestant starts in a process of its own, answers one token, does all its work and ends: one model is in
memory at a time. Ours starts again and again: a first load has an empty cache, a later one what the first
has left. The others have one load. Before each the files are read once, so that the page cache holds them
if it has room. On processors with AMX, or with `--bfloat16`, our arithmetic `bf16x3` takes part too, and vLLM
in float32.

Peak memory is the kernel's own high-water mark (VmHWM) up to the first token, which counts pages of mapped
files and leaves out child processes that have ended; anonymous memory is the highest of readings every 20 ms,
without those pages and with those processes. The floor is one reading of a step's weights at the memory's
speed of the same round. `multiply-adds alone` is the float32 peak of the same round (`peak.py`). llama.cpp's
server gives no log-probabilities of a prompt, and all alternatives of a token only as JSON.
"""

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import gguf
import numpy as np
from harness import FLOOR, OURS, Figure, Options, Target, parse_options, publish
from machine import read_bandwidth
from make_model import MIXES, SHAPES, make_model
from peak import multiply_adds_per_s
from process import ENVIRONMENTS, RIVALS, RivalError, RivalProcess
from prompts import prompts
from protocol import process_tree

from logprobe.models import resolve

DEFAULT_SHAPE = "llama-1b"
MODELS = ENVIRONMENTS / "models"
TOP = 20
PROMPT_LEN, NEW_TOKENS = 32, 32
BATCHES = (1, 8, 32)
NUM_LONG, LONG_LEN = 2, 512
NUM_PREFIXES, SHARED_LEN, OWN_LEN, NUM_ROUNDS = 32, 8, 8, 4
FEWER_PREFIXES = {"llama_cpp": 4}  # of which each takes seconds
LIMIT_S = 3600.0  # of one job: a large model may take it
MB = 1e6
READING_S = 0.02

SLOT_LEN = 128  # tokens of one of llama.cpp's requests at most

BFLOAT16, BF16_MIX = "bfloat16", "bf16"  # the folder's form, and the GGUF file of the same weights
WHOLE = "transformers float32"
PEAK = "multiply-adds alone"
BANDWIDTH, MULTIPLY_ADDS = "bytes/s", "multiply-adds/s"
FIRST, LATER, DISK, PROMPTS, ROWS = "first load", "later load", "disk", "prompts", "rows"
PEAK_OF = {FIRST: "peak memory, first load", LATER: "peak memory, later load"}
ANONYMOUS_OF = {FIRST: "anonymous memory, first load", LATER: "anonymous memory, later load"}
EMBEDDINGS = {"model.embed_tokens.weight", "token_embd.weight"}


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """Who runs which form of the weights, and how it is told to."""

    label: str
    rival: str
    variant: str
    form: str
    path: Path
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Work:
    """How much is asked for: a smoke run asks for next to nothing."""

    folder: Path
    batches: Sequence[int] = BATCHES
    new_tokens: int = NEW_TOKENS
    num_long: int = NUM_LONG
    long_len: int = LONG_LEN
    num_prefixes: int = NUM_PREFIXES
    num_rounds: int = NUM_ROUNDS

    def decode(self, batch: int, new_tokens: int, seed: int) -> dict[str, Any]:
        """One call."""
        texts = prompts(self.folder, batch, PROMPT_LEN, seed)
        return {"prompts": texts, "new_tokens": new_tokens, "logprobs": TOP}

    def score(self, count: int, seed: int) -> dict[str, Any]:
        """One call."""
        return {"prompts": prompts(self.folder, count, self.long_len, seed), "top": TOP}

    def next_token(self, count: int, num_rounds: int, seed: int) -> dict[str, Any]:
        """One call: prefixes that share their beginning, and the tokens that extend them after each round."""
        [shared] = prompts(self.folder, 1, SHARED_LEN, seed)
        tails = prompts(self.folder, count, OWN_LEN + num_rounds, seed + 500)
        rounds = [[tail[OWN_LEN + number] for tail in tails] for number in range(num_rounds)]
        return {"prefixes": [[*shared, *tail[:OWN_LEN]] for tail in tails], "rounds": rounds}


class AnonymousMemory(threading.Thread):
    """The most memory that a process and its children hold besides mapped files, by readings."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._ended = threading.Event()
        self._highest = 0

    def run(self) -> None:
        """Read until told to stop."""
        while not self._ended.wait(READING_S):
            with contextlib.suppress(OSError):  # a child may end while it is read
                self._highest = max(self._highest, sum(map(_anonymous_bytes, process_tree(self._pid))))

    def stop(self) -> int:
        """The highest reading, in bytes."""
        self._ended.set()
        self.join()
        return self._highest


def _anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


class Visit:
    """One contestant's turn in one round; `found` holds what was measured, by quantity."""

    def __init__(self, contestant: Contestant, work: Work, seed: int) -> None:
        self.found: dict[str, float] = {}
        self._contestant, self._work, self._seed = contestant, work, seed

    @classmethod
    def made(cls, contestant: Contestant, work: Work, seed: int) -> Self:
        """Run all of it."""
        visit = cls(contestant, work, seed)
        visit._ours() if contestant.rival == OURS else visit._theirs()
        return visit

    @classmethod
    def compiled(cls, contestant: Contestant, work: Work) -> None:
        """Run ours with as little as compiles its kernels."""
        cls.made(contestant, replace(work, new_tokens=2, num_long=1, long_len=64, num_rounds=1), seed=0)

    def _ours(self) -> None:
        with tempfile.TemporaryDirectory(dir=ENVIRONMENTS) as home:
            with self._opened(FIRST, LOGPROBE_HOME=home):
                pass
            with self._opened(LATER, LOGPROBE_HOME=home) as process:
                process.pause()
                self.found[BANDWIDTH], self.found[MULTIPLY_ADDS] = read_bandwidth(), multiply_adds_per_s()
                process.resume()
                self._decode(process)
                self._score(process)
            with RivalProcess(RIVALS[OURS], environment={"LOGPROBE_HOME": home}) as process:
                self._next_token(process)
            self.found[DISK] = _disk_bytes(Path(home)) / MB

    def _theirs(self) -> None:
        with self._opened(FIRST) as process:
            self._decode(process)
            if self._contestant.rival != "llama_cpp":
                self._score(process)
            self._next_token(process)
        for of_load in (PEAK_OF, ANONYMOUS_OF):
            self.found[of_load[LATER]] = self.found[of_load[FIRST]]
        self.found[LATER] = self.found[FIRST]

    @contextlib.contextmanager
    def _opened(self, load: str, **environment: str) -> Iterator[RivalProcess]:
        """A process that has answered one token."""
        _read_through(self._contestant.path)
        with RivalProcess(RIVALS[self._contestant.rival], environment=environment) as process:
            memory = AnonymousMemory(process.pid)
            memory.start()
            try:
                job = self._ask(process, "decode", [self._work.decode(1, 1, seed=0)])
                self.found[load] = time.perf_counter() - process.started
            finally:
                self.found[ANONYMOUS_OF[load]] = memory.stop() / MB
            self.found[PEAK_OF[load]] = max(job["load_peak_bytes"], job["peak_bytes"]) / MB
            yield process

    def _ask(self, process: RivalProcess, verb: str, inputs: list[Any], warm_up: int = 0) -> dict[str, Any]:
        one = self._contestant
        job = {"verb": verb, "variant": one.variant, "model_folder": str(one.path), "options": one.options}
        return process.ask({**job, "inputs": inputs, "warm_up": warm_up}, timeout_s=LIMIT_S)

    def _decode(self, process: RivalProcess) -> None:
        """Tokens a second in the steady state: the prompts' cost drops out."""
        work, seed = self._work, 10 * self._seed
        for batch in work.batches:
            counts = (2, 1, work.new_tokens)  # the first warms up
            calls = [work.decode(batch, count, seed + number) for number, count in enumerate(counts)]
            first_s, all_s = self._ask(process, "decode", calls, warm_up=1)["timings_s"]
            self.found[f"decode {batch}"] = batch * (work.new_tokens - 1) / (all_s - first_s)

    def _score(self, process: RivalProcess) -> None:
        work, seed = self._work, 10 * self._seed
        calls = [work.score(1, seed + 3), work.score(work.num_long, seed + 4)]
        [seconds] = self._ask(process, "score", calls, warm_up=1)["timings_s"]
        self.found[PROMPTS] = work.num_long * work.long_len / seconds

    def _next_token(self, process: RivalProcess) -> None:
        work, seed = self._work, 10 * self._seed
        count = min(work.num_prefixes, FEWER_PREFIXES.get(self._contestant.rival, work.num_prefixes))
        calls = [work.next_token(1, 1, seed + 5), work.next_token(count, work.num_rounds, seed + 6)]
        [seconds] = self._ask(process, "next_token", calls, warm_up=1)["timings_s"]
        self.found[ROWS] = count * work.num_rounds / seconds


def files_of(path: Path) -> list[Path]:
    """The weights of a folder, or the GGUF file."""
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def file_bytes(path: Path) -> int:
    """Size of the weights as they are given."""
    return sum(file.stat().st_size for file in files_of(path))


def _read_through(path: Path) -> None:
    for file in files_of(path):
        with file.open("rb") as stream:
            while stream.read(1 << 24):
                pass


def _disk_bytes(folder: Path) -> int:
    return sum(512 * path.lstat().st_blocks for path in folder.rglob("*"))


def stored(path: Path) -> dict[str, tuple[int, int]]:
    """Tensor -> how many weights it has, and bytes in its file."""
    if not path.is_dir():
        return {one.name: (int(one.n_elements), int(one.n_bytes)) for one in gguf.GGUFReader(path).tensors}
    found: dict[str, tuple[int, int]] = {}
    for file in files_of(path):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            found[name] = (int(np.prod(entry["shape"])), end - start)
    return found


def of_a_step(path: Path) -> tuple[int, int]:
    """Weights and bytes that a step goes through: no factors, no table of embeddings that is no head."""
    tensors = stored(path)
    is_untied = bool(tensors.keys() & {"lm_head.weight", "output.weight"})
    unread = {"rope_freqs.weight", *(EMBEDDINGS if is_untied else ())}
    read = [one for name, one in tensors.items() if name not in unread]
    return sum(count for count, _ in read), sum(size for _, size in read)


def contestants(paths: Mapping[str, Path], options: Options) -> list[Contestant]:
    """All that are asked for and can run; `paths` are the folder, and GGUF files by their mix."""
    folder = paths["folder"]
    mixes = {mix: path for mix, path in paths.items() if mix != "folder"}
    of_floats = partial(Contestant, form=BFLOAT16, path=folder)
    found = [of_floats(label=OURS, rival=OURS, variant="default")]
    found += [
        Contestant(label=OURS, rival=OURS, variant="default", form=mix, path=path)
        for mix, path in mixes.items()
        if mix != BF16_MIX
    ]
    others = [("transformers", "float32"), ("transformers", BFLOAT16), ("vllm", BFLOAT16)]
    if options.has_bfloat16:
        settings = {"arithmetic": "bf16x3"}
        found += [replace(one, label=f"{OURS} bf16x3", options=settings) for one in found]
        others.append(("vllm", "float32"))
    found += [
        of_floats(label=f"{rival} {dtype}", rival=rival, variant="best", options={"dtype": dtype})
        for rival, dtype in others
    ]
    slots = {"num_slots": max(BATCHES), "context_len": max(BATCHES) * SLOT_LEN}
    for mix, path in mixes.items():
        form = BFLOAT16 if mix == BF16_MIX else mix
        weights = {"weights": str(path), **slots}
        label = f"llama_cpp {form}"
        found.append(
            Contestant(label=label, rival="llama_cpp", variant=mix, form=form, path=path, options=weights)
        )
    return [one for one in found if one.rival in options.rivals and RIVALS[one.rival].is_installed]


Samples = dict[tuple[str, str], list[dict[str, float]]]  # (label, form) -> what each round found


def race(racing: list[Contestant], work: Work, rounds: int) -> tuple[Samples, list[str]]:
    """All contestants in turn, round by round; one that fails leaves with a note, and ours fails the run."""
    samples: Samples = {(one.label, one.form): [] for one in racing}
    notes = []
    for number in range(rounds):
        for one in list(racing):
            try:
                samples[one.label, one.form].append(Visit.made(one, work, number + 1).found)
            except RivalError as error:
                if one.rival == OURS:
                    raise
                racing.remove(one)
                del samples[one.label, one.form]
                notes.append(f"{one.label} left the race: {error}")
    return samples, notes


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form of the weights: its file, and what was found of those that run it."""

    name: str
    path: Path
    samples: Samples
    notes: Sequence[str]

    def figures(self, batches: Sequence[int], long_len: int) -> list[Figure]:
        """All of them."""
        file_mb = file_bytes(self.path) / MB
        memory = [Target(at_most=round(1.25 * file_mb + 500))]
        return [
            self._figure(FIRST, "s", Target(against=WHOLE, at_least=0.4)),
            self._figure(LATER, "s"),
            *(self._figure(quantity, "MB", *memory) for quantity in PEAK_OF.values()),
            *(self._figure(quantity, "MB") for quantity in ANONYMOUS_OF.values()),
            self._figure(DISK, "MB", Target(at_most=round(1.1 * file_mb))),
            *map(self._decode, batches),
            self._rate(
                PROMPTS, f"prompts of {long_len} tokens, top {TOP}", 1, Target(against=WHOLE, at_least=1.2)
            ),
            self._figure(
                ROWS, "rows/s", name=f"next-token rows of prefixes of {SHARED_LEN + OWN_LEN} tokens"
            ),
        ]

    def _decode(self, batch: int) -> Figure:
        theirs = f"llama_cpp {self.name}"
        targets = [Target(against=theirs, at_least=1.1 if batch == 1 else 2.5)]
        if batch == 1:
            targets.append(Target(against=FLOOR, at_least=0.9))
        return self._rate(f"decode {batch}", f"decode, batch {batch}, logprobs {TOP}", batch, *targets)

    def _rate(self, quantity: str, name: str, batch: int, *targets: Target) -> Figure:
        """A figure of tokens a second, with what the machine allows beside it."""
        weights, size = of_a_step(self.path)
        ours = self.samples[OURS, self.name]
        limits = {PEAK: [one[MULTIPLY_ADDS] / weights for one in ours]}
        if quantity.startswith("decode"):
            limits[FLOOR] = [batch * one[BANDWIDTH] / size for one in ours]
        return self._figure(quantity, "tokens/s", *targets, name=name, limits=limits)

    def _figure(
        self,
        quantity: str,
        unit: str,
        *targets: Target,
        name: str = "",
        limits: Mapping[str, Sequence[float]] | None = None,
    ) -> Figure:
        found = {
            label: [one[quantity] for one in rounds]
            for (label, form), rounds in self.samples.items()
            if (form == self.name or label == WHOLE) and quantity in rounds[0]
        }
        return Figure(
            name=f"{self.name}, {file_bytes(self.path) / MB:,.0f} MB: {name or quantity}",
            unit=unit,
            better="higher" if unit.endswith("/s") else "lower",
            samples=found | dict(limits or {}),
            targets=targets,
            notes=self.notes,
        )


def given_model(options: Options) -> dict[str, Path]:
    """The model's folder, and the GGUF files beside it by their mix; a shape that is named is made."""
    if options.model in SHAPES:
        return make_model(options.model, MODELS, () if options.is_smoke else tuple(MIXES))
    folder = resolve(options.model).folder
    beside = {mix: folder.with_name(f"{folder.name}-{mix}.gguf") for mix in MIXES}
    return {"folder": folder} | {mix: path for mix, path in beside.items() if path.exists()}


def main() -> None:
    """Run the race; a first load of each form that is not counted compiles its kernels."""
    options = parse_options(__doc__ or "", DEFAULT_SHAPE)
    paths = given_model(options)
    work = Work(folder=paths["folder"])
    if options.is_smoke:
        work = Work(
            folder=paths["folder"], batches=(1, 2), new_tokens=4, num_long=1, long_len=64, num_prefixes=2,
            num_rounds=1,
        )  # fmt: skip
    ENVIRONMENTS.mkdir(exist_ok=True)
    racing = contestants(paths, options)
    if not options.is_smoke:
        for one in racing:
            if one.rival == OURS:
                Visit.compiled(one, work)
    samples, notes = race(racing, work, options.rounds)
    asked = {one.rival for one in racing}
    notes += [
        f"{rival} is asked for the rows of {count} of {work.num_prefixes} prefixes"
        for rival, count in FEWER_PREFIXES.items()
        if rival in asked
    ]
    figures = []
    for label, name in samples:
        if label == OURS:
            form = Form(name=name, path=paths.get(name, paths["folder"]), samples=samples, notes=notes)
            figures += form.figures(work.batches, work.long_len)
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
