"""What happens in one simulation: settings and events, drawn from a seed, and printed as a test."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the engine and of the clockwork."""

    num_replicas: int = 0  # engine processes; 0: a thread
    num_slots: int = 32
    max_num_batched_tokens: int = 16
    max_num_seqs: int = 4
    overlap: bool = False
    speculate: bool = False
    letters: int = 8
    rope_boundary: int | None = None
    is_poisoned: bool = False  # a few rows are NaN
    eagerness: float = 0.3
    step_s: float = 0.002
    high_water: int = 1000  # messages that an engine process may send ahead


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A call of one or more requests, and how its results are read."""

    at: float
    name: str
    prompts: tuple[tuple[int, ...], ...]
    params: dict[str, Any] = field(default_factory=dict)
    caller: str = ""
    forced: tuple[int, ...] | None = None
    wants_row: bool = False
    streams: bool = False
    buffer_rows: int = 64
    delay_s: float = 0.0  # before each further output is read
    leave_after: int | None = None  # outputs
    loop: int = 0


@dataclass(frozen=True, kw_only=True)
class Leave:
    """The reader is cancelled."""

    at: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Control:
    """`abort`, `pause` or `resume` of the first request of a call, or `forget` of all prefixes."""

    at: float
    do: str
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """LoRA weights are loaded under a name, or removed (`own` None); 9 are broken."""

    at: float
    name: str
    own: int | None


@dataclass(frozen=True, kw_only=True)
class Swap:
    """The model's weights are replaced; 99 are broken."""

    at: float
    weights: int
    finishes: bool = True


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something goes wrong in an engine or its process.

    `run`, `head`, `to_host`: the step raises there. `slow`: it takes `seconds`. Of a process: `kill`, `drop`
    (the connection), `freeze` (for `seconds`), `cut` (the next message to it), `cut-back` (from it).
    """

    at: float
    what: str
    replica: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Close:
    """The engine is closed, and started again if `again`; with `drains`, once all requests have ended."""

    at: float
    drains: bool = False
    again: bool = True


@dataclass(frozen=True, kw_only=True)
class Visit:
    """An HTTP request to the server."""

    at: float
    name: str
    path: str
    body: dict[str, Any]
    caller: str = "10.0.0.1"
    leaves_s: float | None = None  # after which the client disconnects
    slow_s: float = 0.0  # before each part of the body, and after each part of the reply


Event: TypeAlias = Ask | Visit | Leave | Control | Lora | Swap | Fault | Close


@dataclass(frozen=True)
class Plan:
    """One simulation; `seed` decides the order of threads, delays and durations."""

    seed: int
    settings: Settings
    events: tuple[Event, ...]

    def code(self) -> str:
        """Return a test that replays this."""
        lines = [f"        {_code(event)}," for event in self.events]
        body = "\n".join(["    events = (", *lines, "    )"])
        run = f"    simulate(Plan({self.seed}, {_code(self.settings)}, events))"
        return f"def test_replayed_{self.seed}() -> None:\n{body}\n{run}\n"


def _code(value: Any) -> str:
    shown = [
        f"{one.name}={getattr(value, one.name)!r}"
        for one in dataclasses.fields(value)
        if one.default is dataclasses.MISSING or getattr(value, one.name) != one.default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"


def draw_plan(seed: int) -> Plan:
    """Draw a plan from a seed."""
    return _Drawer(seed).plan()


class _Drawer:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = rng = random.Random(f"plan {seed}")  # noqa: S311 - not for secrets
        # Each simulation has its own mix: faults in half of them only, and few kinds at a time.
        self._span_s = rng.choice([0.05, 0.2, 1.0])
        self._stems = [self._ids(rng.randint(2, 14)) for _ in range(3)]  # prompts share these beginnings
        self._names: list[str] = []

    def plan(self) -> Plan:
        rng = self._rng
        has_twins = rng.random() < 0.2
        twins = {
            "letters": 1,
            "num_slots": rng.choice([16, 24, 32]),
            "max_num_batched_tokens": rng.choice([3, 4, 6]),
        }
        settings = self._settings(twins if has_twins else {})
        events: list[Event] = []
        kinds = [
            kind for kind in ("lora", "swap", "control", "leave", "fault", "close") if rng.random() < 0.45
        ]
        if settings.num_replicas and rng.random() < 0.6 and "fault" not in kinds:
            kinds.append("fault")
        events += [self._ask(settings, has_lora="lora" in kinds) for _ in range(rng.choice([2, 6, 12, 20]))]
        if has_twins:
            events += self._twins()
        if rng.random() < 0.25:
            events += [self._visit(settings, number) for number in range(rng.choice([3, 10, 20]))]
        if "lora" in kinds:
            loads = [Lora(at=0.0, name="x", own=1), Lora(at=0.0, name="y", own=2)]
            events += loads + [self._lora() for _ in range(rng.randint(1, 4))]
        if "swap" in kinds:
            events += [one for _ in range(rng.randint(1, 3)) for one in self._swap(settings, "lora" in kinds)]
        if "control" in kinds:
            events += [one for _ in range(rng.randint(1, 8)) for one in self._control()]
        if "leave" in kinds:
            events += [Leave(at=self._at(), name=rng.choice(self._names)) for _ in range(rng.randint(1, 5))]
        if "fault" in kinds:
            events += [self._fault(settings) for _ in range(rng.randint(1, 4))]
        if "close" in kinds and rng.random() < 0.7:
            events.append(Close(at=self._at(), drains=rng.random() < 0.5, again=rng.random() < 0.7))
        events.sort(key=lambda event: event.at)
        return Plan(self._seed, settings, tuple(events))

    def _settings(self, fixed: dict[str, Any]) -> Settings:
        rng = self._rng
        drawn: dict[str, Any] = {
            "num_replicas": rng.choice([0, 0, 1, 2]),
            "num_slots": rng.choice([8, 12, 16, 16, 24, 24, 32, 48, 64]),
            "max_num_batched_tokens": rng.choice([1, 3, 8, 16, 64]),
            "max_num_seqs": rng.choice([1, 2, 4, 8]),
            "overlap": rng.random() < 0.4,
            "speculate": rng.random() < 0.4,
            "letters": rng.choice([1, 2, 3, 8]),
            "rope_boundary": rng.choice([None, None, None, 9, 14]),
            "is_poisoned": rng.random() < 0.2,
            "eagerness": rng.choice([0.02, 0.2, 0.5]),
            "step_s": rng.choice([0.0, 0.002, 0.01]),
            "high_water": rng.choice([4, 1000]),
        }
        return Settings(**(drawn | fixed))

    def _at(self) -> float:
        return round(self._rng.random() * self._span_s, 4)

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(range(97, 105), k=count))

    def _ask(self, settings: Settings, *, has_lora: bool) -> Ask:
        rng = self._rng
        most = min(settings.num_slots, 40) - 1
        prompts = []
        for _ in range(rng.choice([1, 1, 1, 1, 3, 6])):
            stem = rng.choice(self._stems)
            prompts.append(
                (stem[: rng.randint(1, len(stem))] + self._ids(rng.choice([0, 0, 1, 3, 12])))[:most]
            )
        params: dict[str, Any] = {
            "max_tokens": rng.choice([0, 1, 2, 5, 12, 30, 30]),
            "temperature": rng.choice([0, 0, 0.3, 1.0]),
            "seed": rng.randrange(5),
        }
        options: dict[str, Any] = {
            "n": lambda: rng.choice([2, 3]),
            "logprobs": lambda: rng.choice([0, 2, 5]),
            "prompt_logprobs": lambda: rng.choice([0, 1, 3]),
            "logprobs_mode": lambda: rng.choice(["processed_logprobs", "both"]),
            "stop": lambda: [bytes(self._ids(2)).decode()],
            "stop_token_ids": lambda: self._ids(1),
            "ignore_eos": lambda: True,
            "top_k": lambda: 3,
            "frequency_penalty": lambda: 0.5,
            "logit_bias": lambda: {rng.randrange(97, 105): 2.0},
            "logits_processors_args": lambda: {"raise_after": rng.choice([0, 3, 99, 99])},
        }
        for name, draw in options.items():
            if rng.random() < (0.6 if name == "logprobs" else 0.2):
                params[name] = draw()
        if has_lora and rng.random() < 0.6:
            params["lora"] = rng.choice(["x", "y"])
        forced = None
        wants_row = False
        is_simple = len(prompts) == 1 and params["max_tokens"] > 0
        if is_simple and rng.random() < 0.1:
            params["max_tokens"] = min(params["max_tokens"], most + 1 - len(prompts[0]))
            forced = self._ids(params["max_tokens"])
        elif is_simple and rng.random() < 0.1:
            params = {"max_tokens": 1, "temperature": 0}
            wants_row = True
        streams = rng.random() < 0.5
        self._names.append(f"ask{len(self._names)}")
        return Ask(
            at=self._at(),
            name=self._names[-1],
            prompts=tuple(prompts),
            params=params,
            caller=rng.choice(["", "ann", "bob"]),
            forced=forced,
            wants_row=wants_row,
            streams=streams,
            buffer_rows=rng.choice([1, 3, 64]) if streams else 64,
            delay_s=rng.choice([0, 0, 0.01, 0.2, 1e6]) if streams else 0,
            leave_after=rng.choice([None, None, 1, 3]) if streams else None,
            loop=rng.randrange(2),
        )

    def _twins(self) -> list[Event]:
        """Requests whose prompts begin, or go on with, what others generate, in too small a cache."""
        rng, events = self._rng, []
        params = {"max_tokens": 30, "temperature": 0, "seed": 0, "ignore_eos": True}
        for _ in range(rng.choice([4, 8])):
            self._names.append(f"ask{len(self._names)}")
            ask = Ask(
                at=self._at(),
                name=self._names[-1],
                prompts=(rng.choice([(97,) * 2, (97,) * rng.randint(4, 14), (98,), (99,)]),),
                params=params | {"n": rng.choice([1, 1, 2])},
                streams=True,
                buffer_rows=rng.choice([1, 3, 64]),
                delay_s=rng.choice([0, 0.2, 1e6]),
            )
            events.append(ask)
        return events

    def _visit(self, settings: Settings, number: int) -> Visit:
        rng = self._rng
        most = min(settings.num_slots, 40)
        prompts = [
            list((rng.choice(self._stems) + self._ids(2))[: most - 3]) for _ in range(rng.choice([1, 1, 3]))
        ]
        body: dict[str, Any] = {
            "prompt": prompts,
            "max_tokens": min(rng.choice([1, 4, 12]), most - max(map(len, prompts))),
            "temperature": rng.choice([0, 0.7]),
            "seed": rng.randrange(5),
            "logprobs": rng.choice([None, 0, 3]),
            "stream": rng.random() < 0.4,
            "n": rng.choice([1, 1, 2]),
        }
        return Visit(
            at=self._at(),
            name=f"visit{number}",
            path="/v1/completions",
            body=body,
            caller=rng.choice(["10.0.0.1", "10.0.0.2"]),
            leaves_s=rng.choice([None, None, 0.0, 0.004, 0.05, 0.4]),
            slow_s=rng.choice([0, 0, 0.01, 0.2]),
        )

    def _lora(self) -> Lora:
        return Lora(at=self._at(), name=self._rng.choice("xy"), own=self._rng.choice([None, 1, 2, 3, 4, 9]))

    def _swap(self, settings: Settings, has_lora: bool) -> list[Event]:
        """A swap, and often requests that come while it waits, and leave before it is done."""
        rng, at = self._rng, self._at()
        events: list[Event] = [Swap(at=at, weights=rng.choice([1, 2, 3, 99]), finishes=rng.random() < 0.7)]
        if settings.num_replicas and rng.random() < 0.5:  # the process that is started again must have them
            events.append(Fault(at=round(at + 0.6, 4), what="kill", replica=rng.randrange(2)))
            for _ in range(3):
                ask = self._ask(settings, has_lora=has_lora)
                events.append(dataclasses.replace(ask, at=round(at + 1.5, 4)))
        for _ in range(rng.choice([0, 4])):
            ask = self._ask(settings, has_lora=has_lora)
            late = round(at + rng.choice([0.001, 0.01, 0.02, 0.3, 0.31]), 4)
            events.append(dataclasses.replace(ask, at=late))
            if rng.random() < 0.8:
                left = round(late + rng.choice([0.0005, 0.01]), 4)
                events.append(
                    rng.choice([Leave(at=left, name=ask.name), Control(at=left, do="abort", name=ask.name)])
                )
        return events

    def _control(self) -> list[Event]:
        rng, at = self._rng, self._at()
        do, name = rng.choice(["abort", "pause", "resume", "forget"]), rng.choice(self._names)
        events: list[Event] = [Control(at=at, do=do, name="" if do == "forget" else name)]
        if do == "pause" and rng.random() < 0.7:
            events.append(Control(at=round(at + rng.choice([0.001, 0.05]), 4), do="resume", name=name))
        return events

    def _fault(self, settings: Settings) -> Fault:
        rng = self._rng
        kinds = ["run", "head", "to_host", "slow"]
        if settings.num_replicas:
            kinds += ["kill", "drop", "drop", "freeze", "freeze", "cut", "cut-back"]
        what = rng.choice(kinds)
        seconds = {"slow": [0.5, 3.0, 40.0], "freeze": [0.5, 3.0, 40.0]}.get(what, [0.0])
        replica = rng.randrange(max(settings.num_replicas, 1))
        return Fault(at=self._at(), what=what, replica=replica, seconds=rng.choice(seconds))
