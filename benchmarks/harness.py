"""What every benchmark shares: contestants in turn, ratios pair by pair, targets, tables, results.

A benchmark makes `Figure`s with `alternate` and hands them to `publish`; `report.py` writes the docs.
"""

import argparse
import datetime as dt
import json
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from machine import machine_facts, read_bandwidth, weight_bytes
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent / "rivals"))
from process import RIVALS, RivalError, RivalProcess

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS = "logprobe"
DEFAULT_MODEL = "smollm2"
FLOOR = "floor"
WARM_UP_SEED = 1_000_000

Contestant = tuple[str, str]  # rival, variant
Inputs = Mapping[str, Any]  # one call's keyword arguments


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and extremes of repeated measurements."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Summarise at least one sample."""
        return cls(median=statistics.median(samples), minimum=min(samples), maximum=max(samples))


@dataclass(frozen=True, kw_only=True)
class Target:
    """Ours ``at_least`` times as good as ``against`` (contestant or floor), or one's median ``at_most``."""

    against: str | None = None
    at_least: float | None = None
    at_most: float | None = None

    def describe(self, unit: str) -> str:
        """Say the target in a table's cell."""
        if self.at_most is not None:
            return f"{self.against or ''} ≤ {self.at_most:g} {unit}".strip()
        return f"≥ {self.at_least:g} x {self.against}"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What was measured: aligned samples a contestant, ours under `OURS`, and what ours is held against."""

    name: str
    unit: str
    better: str  # "higher" or "lower"
    samples: Mapping[str, Sequence[float]]
    targets: Sequence[Target] = ()
    notes: Sequence[str] = field(default_factory=list)

    def ratio(self, against: str) -> Spread | None:
        """How many times as good ours is, pair by pair of the same round; None where one was not measured."""
        ours = self.samples.get(OURS, ())
        pairs = list(zip(ours, self.samples.get(against, ()), strict=False))
        if not pairs:
            return None
        return Spread.of([a / b if self.better == "higher" else b / a for a, b in pairs])

    def verdict(self, target: Target) -> str:
        """``met``, ``missed`` or ``not measured``."""
        if target.at_most is not None:
            samples = self.samples.get(target.against or OURS)
            good = None if not samples else statistics.median(samples) <= target.at_most
        else:
            ratio = self.ratio(target.against or OURS)
            good = None if ratio is None else ratio.median >= (target.at_least or 0.0)
        return {None: "not measured", True: "met", False: "missed"}[good]


Measure = Callable[[int], float]  # the round's number -> one sample


def alternate(contestants: Mapping[str, Measure], rounds: int) -> tuple[dict[str, list[float]], list[str]]:
    """Measure A, B, A, B, …; one that fails leaves the race with a note, and ours fails the run."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    notes: list[str] = []
    racing = dict(contestants)
    for number in range(rounds):
        for name, measure in list(racing.items()):
            try:
                samples[name].append(measure(number))
            except RivalError as error:
                if name.startswith(OURS):
                    raise
                del racing[name], samples[name]
                notes.append(f"{name} left the race: {error}")
    return samples, notes


@dataclass(frozen=True, kw_only=True)
class Options:
    """A benchmark's command line."""

    is_smoke: bool
    is_json: bool
    rounds: int
    model: str
    rivals: tuple[str, ...]
    is_bfloat16: bool = False

    @property
    def has_bfloat16(self) -> bool:
        """True if contestants that compute in bfloat16 take part: by option, or because this CPU has AMX."""
        from logprobe.kernels.native import library

        return self.is_bfloat16 or library().has_tiles


def parse_options(description: str, default_model: str = DEFAULT_MODEL) -> Options:
    """Read the command line that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--smoke", action="store_true", help="seconds, ours alone, nothing saved")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default=default_model, help="known name or folder")
    parser.add_argument("--rivals", default=",".join(RIVALS), help="comma-separated; ours always runs")
    bfloat16 = "add bf16x3, and rivals in bfloat16, to decode, score and real, as on processors with AMX"
    parser.add_argument("--bfloat16", action="store_true", help=bfloat16)
    given = parser.parse_args()
    return Options(
        is_smoke=given.smoke,
        is_json=given.json,
        rounds=1 if given.smoke else given.rounds,
        model=given.model,
        is_bfloat16=given.bfloat16,
        rivals=(OURS,) if given.smoke else (OURS, *filter(None, given.rivals.replace(OURS, "").split(","))),
    )


def label_of(name: str, variant: str) -> str:
    """A rival's variant in tables; our default is just our name."""
    return OURS if (name, variant) == (OURS, "default") else f"{name} {variant}"


class Arena:
    """Owns the rivals' processes of one run; each is started when first asked."""

    def __init__(self, options: Options) -> None:
        from logprobe.models import resolve

        self.options = options
        self._files = resolve(options.model)
        self.model_folder = self._files.folder
        self._running: dict[str, RivalProcess] = {}  # by rival, or rival and variant of `Rival.bfloat16`
        self._warm: set[tuple[Contestant, str, Any]] = set()

    @cached_property
    def float_folder(self) -> Path:
        """The model as other programs read it: its own folder, or an export to float32 that is made once."""
        from logprobe.models.cache import home, new_entry
        from logprobe.models.export import export_model
        from logprobe.models.resolution import has_gguf

        if not has_gguf(self.model_folder):
            return self.model_folder
        folder = home() / "benchmarks" / self.model_folder.name
        with new_entry(folder) as partial:
            if partial is not None:
                export_model(self._files, partial, dtype="float32")
        return folder

    def labels(self, *wanted: str, bfloat16: bool = False) -> dict[str, Contestant]:
        """Table label -> (rival, variant), of the wanted rivals that the run includes and that are there.

        With `bfloat16`, their variants in bfloat16 are included where the run has them.
        """
        included = [RIVALS[name] for name in wanted if name in self.options.rivals]
        has_bfloat16 = bfloat16 and self.options.has_bfloat16
        return {
            label_of(rival.name, variant): (rival.name, variant)
            for rival in included
            if rival.is_installed
            for variant in (*rival.variants, *(rival.bfloat16 if has_bfloat16 else ()))
        }

    def missing(self, *wanted: str) -> list[str]:
        """Notes on wanted rivals without an environment."""
        included = [RIVALS[name] for name in wanted if name in self.options.rivals]
        return [
            f"{rival.name} is not installed (make rivals)" for rival in included if not rival.is_installed
        ]

    def ask(self, contestant: Contestant, verb: str, inputs: Sequence[Inputs], **job: Any) -> dict[str, Any]:
        """Give a job to a contestant."""
        name, variant = contestant
        rival, key = RIVALS[name], name
        common: dict[str, Any] = {"verb": verb, "model_folder": str(self.folder_of(name))}
        if variant in rival.bfloat16:
            key, common["options"] = f"{name} {variant}", rival.bfloat16[variant]
            variant = rival.variants[0]
        if key not in self._running:
            self._running[key] = RivalProcess(rival, log_name=key)
        for other, process in self._running.items():
            process.resume() if other == key else process.pause()
        return self._running[key].ask({**common, "variant": variant, "inputs": list(inputs), **job})

    def folder_of(self, name: str) -> Path:
        """Where a rival reads the model."""
        return self.model_folder if name == OURS else self.float_folder

    def ask_warm(
        self,
        contestant: Contestant,
        verb: str,
        inputs_of: Callable[[int], Sequence[Inputs]],
        seed: int,
        **job: Any,
    ) -> dict[str, Any]:
        """Give the job ``inputs_of(seed)``; a contestant's first one of its kind runs other inputs before."""
        kind = (contestant, verb, inputs_of)
        warm_up = () if kind in self._warm else inputs_of(WARM_UP_SEED)
        self._warm.add(kind)
        return self.ask(contestant, verb, [*warm_up, *inputs_of(seed)], warm_up=len(warm_up), **job)

    def floor(self, num_rows: int) -> Measure:
        """Rows a second where each `num_rows` of them wait for one reading of the weights, and for no more.

        It takes its turn like a contestant: the memory of a shared machine has a speed of the moment.
        """
        size = weight_bytes(self.float_folder)

        def measure(_number: int) -> float:
            for process in self._running.values():
                process.pause()
            return num_rows * read_bandwidth() / size

        return measure

    def close(self, name: str) -> None:
        """End one rival's processes, so that its next job starts it afresh."""
        for key in [key for key in self._running if key.split()[0] == name]:
            self._running.pop(key).close()
        self._warm = {kind for kind in self._warm if kind[0][0] != name}

    def __enter__(self) -> Self:
        # A run that is told to end still ends its rivals: they are sessions of their own and would stay.
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
        return self

    def __exit__(self, *_: object) -> None:
        for name in {key.split()[0] for key in self._running}:
            self.close(name)


def as_json(figure: Figure) -> dict[str, Any]:
    """A figure with its spreads, ratios and verdicts worked out."""
    others = [name for name in figure.samples if name != OURS]
    ratios = {name: ratio for name in others if (ratio := figure.ratio(name))}
    return asdict(figure) | {
        "spreads": {name: asdict(Spread.of(samples)) for name, samples in figure.samples.items() if samples},
        "ratios": {name: asdict(ratio) for name, ratio in ratios.items()},
        "targets": [
            asdict(target) | {"text": target.describe(figure.unit), "verdict": figure.verdict(target)}
            for target in figure.targets
        ],
    }


def number(value: float) -> str:
    """A figure in three digits, or whole."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def print_table(title: str, figures: Sequence[Figure], console: Console) -> None:
    """One line a contestant of each figure."""
    table = Table(title=title)
    for heading in ("figure", "contestant", "median", "min - max", "ours is", "target", "verdict"):
        table.add_column(heading)
    for figure in figures:
        targets = {target.against or OURS: target for target in figure.targets}
        for name, samples in figure.samples.items():
            spread, ratio = Spread.of(samples), None if name == OURS else figure.ratio(name)
            target = targets.get(name)
            table.add_row(
                f"{figure.name} ({figure.unit})",
                name,
                f"{spread.median:.4g}",
                f"{spread.minimum:.4g} - {spread.maximum:.4g}",
                f"{ratio.median:.2f} x" if ratio else "",
                target.describe(figure.unit) if target else "",
                figure.verdict(target) if target else "",
            )
    console.print(table)
    for note in dict.fromkeys(note for figure in figures for note in figure.notes):
        console.print(f"note: {note}")


def save(bench: str, content: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Put one benchmark's content into the day's file, beside the others'."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{dt.datetime.now(tz=dt.UTC):%Y-%m-%d}.json"
    benches = json.loads(path.read_text(encoding="utf-8"))["benches"] if path.exists() else {}
    whole = {"benches": benches | {bench: content}}
    path.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def publish(bench: str, figures: Sequence[Figure], options: Options) -> None:
    """Print the table (or JSON to stdout), and save the figures unless this is a smoke run."""
    content = {"machine": machine_facts(), "figures": [as_json(figure) for figure in figures]}
    if options.model != DEFAULT_MODEL:
        bench = f"{bench} --model {Path(options.model).name}"
    if set(options.rivals) < {OURS, *RIVALS}:  # a race of fewer stands beside that of all
        bench = f"{bench} --rivals {','.join(options.rivals[1:])}"
    if options.is_bfloat16:  # saved beside the usual contestants' figures
        bench = f"{bench} --bfloat16"
    if options.is_json:
        print(json.dumps(content))
    else:
        print_table(bench, figures, Console(width=None if sys.stdout.isatty() else 160))
    if not options.is_smoke:
        print(f"saved to {save(bench, content).relative_to(ROOT)}", file=sys.stderr)
