"""Check log-probabilities of repeated, cached, concurrent and streamed requests, and of other prompt lengths.

First, replies are compared with earlier replies to the same request (`Circumstance`). Then the
log-probabilities of prompts of other lengths, and of a prompt with generated tokens, are compared with the
exact ones.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import numpy as np

from logprobe.analysis.auditing.endpoint import Refusal
from logprobe.analysis.auditing.fit import CAP, allowance_of, distance, finite, is_impossible
from logprobe.analysis.auditing.forms import Ask, Reply
from logprobe.analysis.auditing.report import Steadiness
from logprobe.analysis.auditing.rows import align_completion, align_prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from logprobe.analysis.auditing.compare import Comparison
    from logprobe.analysis.auditing.forms import Row
    from logprobe.analysis.auditing.report import Where
    from logprobe.analysis.auditing.session import Session
    from logprobe.analysis.measures import Floats

NEIGHBOURS: Final = (1, 8, 32, 45)  # numbers of concurrent requests
QUICK_NEIGHBOURS: Final = (1, 8)
LENGTHS: Final = (64, 128, 256, 512, 1024)  # prompts are tested at these lengths, one less and one more
QUICK_LENGTHS: Final = (64, 512)
# A prompt of 64 tokens and the 72 tokens generated after it are then scored as one prompt.
SCORED: Final = (64, 72)
START_S: Final = 0.02  # seconds to wait for concurrent requests to start
UNSTEADY: Final = ("unsteady-repeated", "unsteady-cached", "unsteady-after-generation", "unsteady-order")
GREEDY: Final = {"temperature": 0}
PROBE: Final = (
    "In the morning the harbour lay still, and the boats that had come in by night were tied up in rows. "
    "Nobody spoke of the storm."
)
OTHER: Final = (
    "Twelve times twelve is one hundred and forty-four, which the children learn by heart in spring."
)
CONTINUED: Final = "A list of the months of the year, one after the other: January, February,"


@dataclass(frozen=True, slots=True)
class Circumstance:
    """A request that is sent `num_before` times, and then `times` times under another circumstance."""

    kind: str  # kind of fault if the replies differ
    name: str
    ask: Ask
    num_before: int = 2
    times: int = 1
    after: Ask | None = None  # request that is sent in between
    beside: tuple[Ask, ...] = ()  # concurrent requests
    stream: bool = False


@dataclass(slots=True)
class Difference:
    """The difference between the log-probabilities in a reply and the ones that they should equal."""

    worst: float = 0.0  # the largest difference, nats
    begins_at: int | None = None  # the first row that differs
    theirs: float | None = None  # the two log-probabilities with the largest difference, nats
    ours: float | None = None
    where: Where = "completion"


def difference(before: Reply, reply: Reply, wheres: Iterable[Where] = ("prompt", "completion")) -> Difference:
    """Compare two replies row by row; tokens are matched by the id, text and bytes in the replies."""
    found = Difference()
    for where in wheres:
        pairs = zip_longest(getattr(before, where) or (), getattr(reply, where) or ())
        for index, (row, other) in enumerate(pairs):
            if row == other:
                continue
            size, first, second = _row_difference(row, other)
            if found.begins_at is None:
                found.begins_at = index
            if size > found.worst:
                found.worst, found.theirs, found.ours, found.where = size, second, first, where
            if where == "completion" and _key(row) != _key(other):
                break  # later rows have another context
    return found


def _key(row: Row | None) -> object:
    return row if row is None or row.chosen is None else row.chosen.key


def _row_difference(row: Row | None, other: Row | None) -> tuple[float, float | None, float | None]:
    """Compare two rows token by token; return the largest difference in nats, and its two logprobs."""
    first, second = _numbers(row), _numbers(other)
    sizes = [
        (0.0 if a == b else CAP if a is None or b is None else abs(a - b), a, b)
        for a, b in ((first[key], second[key]) for key in first.keys() & second.keys())
    ]
    return max(sizes, key=lambda one: one[0]) if sizes else (CAP, None, None)


def _numbers(row: Row | None) -> dict[object, float | None]:
    entries = () if row is None else (*(row.alternatives or ()), row.chosen)
    return {entry.key: entry.logprob for entry in entries if entry is not None}


@dataclass(slots=True)
class Circumstances:
    """Runs the checks on one server, and collects the results."""

    session: Session
    comparison: Comparison
    max_len: int
    is_quick: bool
    is_known: bool  # True if the server runs the model that the exact rows come from
    rows: list[Steadiness] = field(default_factory=list)
    wrong_from: int | None = None  # first row from which scored prompts are known to be wrong

    async def run(self) -> None:
        """Run all checks that are possible with the forms of requests that the server answers."""
        session, form = self.session, self.session.prompt_form or self.session.completion_form
        if form is None:
            return
        for circumstance in self._circumstances(form, session.completion_form or form):
            session.tell(circumstance.name)
            await self._observe(circumstance)
        if session.prompt_form is not None and self.is_known:
            session.tell("generated and scored")
            await session.settle()
            await self._score_generated(session.prompt_form)
            session.tell("prompts of many lengths")
            await self._score_lengths(session.prompt_form)
        else:
            why = "the server returns no prompt rows" if self.is_known else "rows of short prompts are wrong"
            title = f"prompt lengths and scoring of generated tokens were not checked: {why}"
            self.comparison.findings.add("left-out", title, is_note=True)

    # -- comparison with an earlier reply ------------------------------------------------------------------

    def _circumstances(self, form: str, writer: str) -> Iterator[Circumstance]:
        """Yield the circumstances for requests of a form; `writer` is a form that generates tokens."""
        first, second = self._probe(form, CONTINUED), self._probe(form, OTHER)
        yield Circumstance("unsteady-repeated", "three times alone", self._new_probe(form), times=2)
        yield Circumstance("unsteady-cached", "with its prefix cached", self._new_probe(form), num_before=1)
        if self.session.prompt_form is not None:
            generation = self._neighbour(writer, 3)
            yield Circumstance("unsteady-after-generation", "after a generation", second, after=generation)
        for count in QUICK_NEIGHBOURS if self.is_quick else NEIGHBOURS:
            beside = tuple(self._neighbour(writer, index) for index in range(count))
            for probed in dict.fromkeys([form, writer]):
                name = f"beside {count} other{'s' if count > 1 else ''} ({probed})"
                probe = self._probe(probed, OTHER)
                yield Circumstance("unsteady-beside-others", name, probe, beside=beside)
        yield Circumstance("unsteady-order", "after another prompt", first, after=second)
        yield Circumstance("unsteady-order", "after another prompt", second, after=first)
        for route in ("completions", "chat"):
            if route in self.session.extras:
                ask = Ask(form=route, prompt=CONTINUED, max_tokens=12, params=GREEDY).as_chat()
                yield Circumstance("stream-differs", f"streamed ({route})", ask, stream=True)

    async def _observe(self, circumstance: Circumstance) -> None:
        """Compare the replies under a circumstance with the last reply to the same request before it."""
        session, findings, ask = self.session, self.comparison.findings, circumstance.ask
        await session.settle()
        before = [await session.ask(ask) for _ in range(circumstance.num_before)][-1]
        if circumstance.after is not None:
            await session.ask(circumstance.after)
        running = [asyncio.ensure_future(session.ask(other)) for other in circumstance.beside]
        try:
            if running:
                await asyncio.sleep(START_S)
            again = replace(ask, stream=circumstance.stream)
            replies = [await session.ask(again) for _ in range(circumstance.times)]
        finally:
            await asyncio.gather(*running)
        given = [reply for reply in replies if isinstance(reply, Reply)]
        if not isinstance(before, Reply) or len(given) < len(replies):
            title = f"not checked, because a request was refused: {circumstance.name}"
            findings.add("left-out", title, is_note=True)
            return
        if circumstance.stream and not given[0].completion:  # the server ignores `logprobs` in streams
            return
        wheres: tuple[Where, ...] = ("completion",) if circumstance.stream else ("prompt", "completion")
        found = max((difference(before, reply, wheres) for reply in given), key=lambda one: one.worst)
        if circumstance.stream and before.text != given[0].text:
            found.begins_at, found.worst = found.begins_at or 0, max(found.worst, CAP)
        # Log-probabilities that change after a generation also change during one.
        is_generating = bool(circumstance.beside) and ask.form != session.completion_form
        is_excused = is_generating and findings.has("unsteady-after-generation")
        self._add(circumstance.kind, circumstance.name, ask, found, is_excused=is_excused)

    def _add(self, kind: str, name: str, ask: Ask, found: Difference, *, is_excused: bool = False) -> None:
        """Record the result of a check, and add a fault if log-probabilities differ too much.

        No fault is added if `is_excused`, or if an earlier check found that replies differ even when a
        request is repeated alone.
        """
        findings, at = self.comparison.findings, found.begins_at
        self.rows.append(Steadiness(circumstance=name, is_equal=at is None, worst=found.worst, begins_at=at))
        is_beyond = at is not None and found.worst > self.comparison.max_nats
        if is_beyond and not is_excused and not findings.has("unsteady-repeated"):
            evidence = ask.evidence(at, where=found.where, theirs=found.theirs, ours=found.ours, note=name)
            findings.add(kind, evidence=[evidence], worst=found.worst)

    # -- comparison with the exact numbers -----------------------------------------------------------------

    async def _score_generated(self, form: str) -> None:
        """Generate tokens, then score them as a prompt; the log-probabilities should be the same."""
        session, writer, tokens = self.session, self.session.completion_form, self.comparison.reader.tokens
        ids = self._prompt_of(min(SCORED[0], self.max_len // 2))
        if writer is None or ids is None or self.comparison.findings.has(*UNSTEADY):
            return
        params = {"temperature": 1.0, "seed": 11}
        max_tokens = min(SCORED[1], self.max_len - len(ids) - 2)
        ask = Ask(form=writer, prompt=ids, max_tokens=max_tokens, num_top=1, params=params)
        reply = await session.ask(replace(ask, params={**params, "ignore_eos": True}))
        if isinstance(reply, Refusal):
            reply = await session.ask(ask)
        await session.settle()
        aligned = align_completion(reply, tokens) if isinstance(reply, Reply) else None
        if aligned is None or not aligned.pairs or aligned.num_unknown:
            return
        whole = ids + aligned.ids
        exact = self.comparison.reader.reference.chosen(whole)
        pairs = [(len(ids) + at, row) for at, row in aligned.pairs]
        _, _, errors = self._errors(writer, pairs, exact)
        found = await self._beside_exact(form, whole)
        if found is not None and len(errors):
            is_right = float(np.quantile(errors, 0.9)) <= self.comparison.max_nats
            prompt = Ask(form=form, prompt=whole)
            name = "generated, then scored as a prompt"
            self._add("prefill-decode", name, prompt, found, is_excused=not is_right)
            if is_right:
                self.wrong_from = found.begins_at

    async def _score_lengths(self, form: str) -> None:
        """Score prompts with lengths near the sizes at which servers split prompts."""
        room = self.max_len - self.session.min_tokens.get(form, 0)
        for length in QUICK_LENGTHS if self.is_quick else LENGTHS:
            for size in (length - 1, length, length + 1):
                ids = self._prompt_of(size) if size <= room else None
                if ids is None:
                    continue
                if found := await self._beside_exact(form, ids):
                    ask = Ask(form=form, prompt=ids)
                    self._add("wrong-at-length", f"prompt of {size} tokens", ask, found)
                else:
                    unanswered = f"no prompt rows are returned for a prompt of {size} tokens"
                    self.comparison.findings.add("left-out", unanswered, is_note=True)

    async def _beside_exact(self, form: str, ids: tuple[int, ...]) -> Difference | None:
        """Compare a prompt's logprobs with the exact ones; return None if the reply has no prompt rows."""
        reply = await self.session.ask(Ask(form=form, prompt=ids, num_top=1))
        if not isinstance(reply, Reply) or not reply.prompt:
            return None
        reader = self.comparison.reader
        exact = reader.reference.chosen(ids)
        aligned = align_prompt(reply.prompt, ids, reader.tokens)
        reader.num_rows += len(aligned.pairs)
        positions, theirs, errors = self._errors(form, aligned.pairs, exact)
        if self.wrong_from is not None:
            errors[positions >= self.wrong_from] = 0.0
        if not len(errors):
            return Difference()
        off, worst = positions[errors > self.comparison.max_nats], int(errors.argmax())
        return Difference(
            worst=float(errors[worst]),
            begins_at=int(off[0]) if len(off) else None,
            theirs=finite(theirs[worst]),
            ours=finite(exact[positions[worst] - 1]),
            where="prompt",
        )

    def _errors(
        self, form: str, pairs: Sequence[tuple[int, Row]], exact: Floats
    ) -> tuple[NDArray[np.int64], Floats, Floats]:
        """Return the positions of N tokens, their reported logprobs, and the errors, (N,) nats.

        `exact` has the exact logprobs, in nats; exact[0] belongs to position 1.
        """
        given = [(position, row.chosen.logprob) for position, row in pairs if row.chosen is not None]
        positions = np.array([position for position, _ in given], np.int64)
        theirs = np.array([-np.inf if number is None else number for _, number in given], np.float64)
        allowance = allowance_of(self.comparison.roundings.get(form), theirs)
        errors = np.maximum(distance(theirs, exact[positions - 1]) - allowance, 0.0)
        if self.comparison.findings.has("filled-in"):
            errors[(theirs == 0) | is_impossible(theirs)] = 0.0
        return positions, theirs, errors

    # -- prompts -------------------------------------------------------------------------------------------

    def _probe(self, form: str, text: str) -> Ask:
        """Return a short request whose log-probabilities are compared."""
        generated = 0 if form == self.session.prompt_form else 12
        prompt = self.comparison.reader.tokens.cut(text, self.max_len // 2)
        return Ask(form=form, prompt=prompt, max_tokens=generated, params=GREEDY)

    def _new_probe(self, form: str) -> Ask:
        """Return a probe with a unique beginning, so that no prefix of it is cached."""
        return self._probe(form, f"Note {secrets.token_hex(3)}. {PROBE}")

    def _neighbour(self, form: str, index: int) -> Ask:
        """Return a request that generates tokens."""
        text = f"Letter number {index}: dear friend, " + "how are you? " * (index % 7)
        prompt = self.comparison.reader.tokens.cut(text, self.max_len // 2)
        params = {"temperature": 1.0, "seed": index}
        return Ask(form=form, prompt=prompt, max_tokens=min(24, self.max_len // 4), params=params)

    def _prompt_of(self, size: int) -> tuple[int, ...] | None:
        """Return a prompt of `size` tokens; prompts of different sizes start differently."""
        text = f"Chapter {size}. " + " ".join([PROBE, OTHER, CONTINUED] * (size // 24 + 1))
        ids = self.comparison.reader.tokens.encode(text)[:size]
        return ids if len(ids) == size else None
