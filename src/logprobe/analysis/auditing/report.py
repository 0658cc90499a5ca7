"""Report of an audit: findings with evidence, errors, steadiness, fields, and numbers for a later audit.

Plain, JSON-serializable data; nothing here sends requests or computes rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

from logprobe.errors import InputError, ParameterError

if TYPE_CHECKING:
    from pathlib import Path

VERSION: Final = 2
MAX_EVIDENCE: Final = 5
PLOT_FLOOR_NATS: Final = 1e-8  # equal numbers are drawn here on the logarithmic axis
MAX_TEXT: Final = 80  # characters of a prompt, a token or a server's message

Severity: TypeAlias = Literal["fault", "note"]
Area: TypeAlias = Literal["numbers", "conformance"]
Verdict: TypeAlias = Literal["PASS", "FAIL"]
Where: TypeAlias = Literal["prompt", "completion"]
Answer: TypeAlias = Literal["answered", "refused", "ignored", "error"]

NUMBER_KINDS: Final[dict[str, str]] = {
    "temperature-unasked": "numbers are of a distribution after a temperature that nobody asked",
    "renormalised-unasked": "numbers are renormalised over a part of the vocabulary, unasked",
    "shifted": "rows stand at the position of their neighbour",
    "rounded": "numbers are rounded after they were computed",
    "rows-missing": "tokens have no row",
    "rows-repeated": "tokens have two rows",
    "unsteady-repeated": "the same request, alone, has other numbers the next time",
    "unsteady-beside-others": "numbers change where other requests run",
    "unsteady-cached": "numbers change once a prefix is cached",
    "unsteady-after-generation": "numbers of a prompt change after a generation",
    "unsteady-order": "numbers depend on the order of requests",
    "wrong-at-length": "numbers are wrong for prompts of some lengths",
    "stream-differs": "a stream has other numbers than a whole reply",
    "filled-in": "numbers stand where none was computed",
    "alternatives-wrong": "the alternatives are not the likeliest tokens",
    "bos": "prompts begin otherwise than the tokenizer says",
    "template": "chats are laid out otherwise than the model's template says",
    "lora-prompt": "prompt rows of a LoRA request are those of the base model",
    "lora-ignored": "generated rows of a LoRA request are those of the base model",
    "stale-weights": "numbers stayed where the weights changed",
    "changed-unasked": "numbers changed where the weights stayed",
    "log-base": "numbers are logarithms of another base",
    "probabilities": "numbers are probabilities, not their logarithms",
    "prefill-decode": "generated rows are right, and the same tokens scored as a prompt are wrong",
    "does-not-fit": "numbers are of no distribution that was computed",
}
"""Kinds of findings about wrong or missing numbers, or numbers of another prompt → their meaning."""

CONFORMANCE_KINDS: Final[dict[str, str]] = {
    "bytes-wrong": "bytes are not those of the token",
    "text-wrong": "a token's text is that of another token",
    "ids-repeated": "a token stands twice among the alternatives",
    "alternatives-cut": "fewer alternatives than asked",
    "ignored": "a field is taken and has no effect",
    "error": "a request failed that should not",
    "form": "a form that the server has not, or refuses by name",
    "unidentified": "tokens that cannot be told by id, bytes or text",
    "left-out": "a check that could not be made",
}
"""Kinds of findings about departures from OpenAI's API, whatever the numbers → their meaning."""

KINDS: Final[dict[str, str]] = NUMBER_KINDS | CONFORMANCE_KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One occurrence of a finding; numbers in nats, None if missing or impossible (-inf)."""

    ask: str
    prompt: str
    position: int | None
    where: Where
    token: str | None = None
    theirs: float | None = None
    ours: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault or note."""

    kind: str
    severity: Severity
    title: str
    count: int
    of: int
    worst_nats: float | None = None
    evidence: tuple[Evidence, ...] = ()
    correction: str | None = None

    @property
    def area(self) -> Area:
        """Verdict that the finding belongs to."""
        return "numbers" if self.kind in NUMBER_KINDS else "conformance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors of one ask's numbers against the distribution that fits them best; nats."""

    ask: str
    of: Literal["chosen", "alternatives"]
    distribution: str
    count: int
    worst: float
    mean: float
    p99: float
    kl: float | None = None
    rank_flips: int = 0
    widest_flip: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Steadiness:
    """Comparison of an ask under another circumstance with its first reply."""

    circumstance: str
    requests: int
    is_equal: bool
    worst: float | None = None
    begins_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldAnswer:
    """Result of trying one request field."""

    field: str
    form: Literal["whole", "stream"]
    answer: Answer
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """One number for a later audit to compare; None is impossible (-inf)."""

    position: int
    token_id: int
    theirs: float | None
    ours: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrompt:
    """Stored numbers of one prompt."""

    ask: str
    where: Where
    prompt: str
    token_ids: tuple[int, ...]
    rows: tuple[StoredRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The findings of one audit of one endpoint."""

    created: str  # ISO 8601, UTC
    endpoint: str
    model: str
    lora: str | None
    server: str | None  # name and version as the server states them
    ours: dict[str, Any]  # of the model that computed the exact rows, as `LogprobsInfo` has it
    max_nats: float
    asks: tuple[str, ...]
    requests: int
    rows: int
    distributions: dict[str, str]
    errors: tuple[Errors, ...]
    steadiness: tuple[Steadiness, ...]
    fields: tuple[FieldAnswer, ...]
    findings: tuple[Finding, ...]
    stored: tuple[StoredPrompt, ...]
    worst_nats: float
    version: int = VERSION

    @property
    def numbers(self) -> Verdict:
        """PASS if numbers were compared, errors are within `max_nats`, and numbers have no other fault."""
        is_near = bool(self.errors) and self.worst_nats <= self.max_nats
        return "PASS" if is_near and not self.faults("numbers") else "FAIL"

    def faults(self, area: Area) -> tuple[Finding, ...]:
        """Return the faults of one verdict, without notes."""
        return tuple(one for one in self.findings if one.severity == "fault" and one.area == area)

    def plot(self, path: str | Path) -> None:
        """Plot the endpoint's numbers of stored prompts against the exact ones (needs the extra `plot`).

        Raises:
            ParameterError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ParameterError("plot", "needs matplotlib; pip install 'logprobe[plot]'") from error

        figure = Figure(figsize=(9, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for where in ("prompt", "completion"):
            numbers = np.array(
                [
                    (row.position, row.theirs, row.ours)
                    for prompt in self.stored
                    if prompt.where == where
                    for row in prompt.rows
                    if row.theirs is not None and row.ours is not None
                ]
            ).reshape(-1, 3)
            positions, theirs, ours = numbers.T
            left.plot(ours, theirs, ".", markersize=2, label=where)
            right.plot(positions, np.maximum(np.abs(theirs - ours), PLOT_FLOOR_NATS), ".", markersize=2)
        left.axline((0, 0), slope=1, linewidth=0.8)
        left.set(xlabel="exact logprob (nats)", ylabel="endpoint's logprob (nats)")
        left.legend()
        right.axhline(self.max_nats, linewidth=0.8)
        right.set(xlabel="position", ylabel="difference (nats)", yscale="log")
        figure.savefig(path, format="png")

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON-compatible values, with both verdicts."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        conformance = [finding.kind for finding in self.faults("conformance")]
        return {"numbers": self.numbers, "conformance": conformance} | values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AuditReport:
        """Build a report from the values of `to_dict`.

        Raises:
            InputError: the values are not a report, or have another version.
        """
        version = values.get("version") if isinstance(values, dict) else None
        if version != VERSION:
            raise InputError(f"audit report: version {VERSION} is read here, got {version!r:.60}")
        try:
            return msgspec.convert(values, cls)
        except (msgspec.ValidationError, RecursionError) as error:
            raise InputError(f"audit report: {error}") from error
