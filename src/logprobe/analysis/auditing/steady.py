"""Whether numbers stay where only the circumstance changes: asked again, beside others, cached, streamed.

Each check asks one prompt as it was asked before, and once more under the circumstance that it is about.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from logprobe.analysis.auditing.dialects import Ask, Refusal, Reply
from logprobe.analysis.auditing.fit import CAP, IMPOSSIBLE, allowance_of, distance, finite
from logprobe.analysis.auditing.report import Evidence, Steadiness
from logprobe.analysis.auditing.rows import align_completion, align_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.analysis.auditing.dialects import Entry, Row
    from logprobe.analysis.auditing.findings import Findings
    from logprobe.analysis.auditing.rows import Reader
    from logprobe.analysis.auditing.session import Session
    from logprobe.analysis.measures import Floats

NEIGHBOURS: Final = (1, 8, 32, 45)
QUICK_NEIGHBOURS: Final = (1, 8)
LENGTHS: Final = (64, 128, 256, 512, 1024)
QUICK_LENGTHS: Final = (64, 512)
NEIGHBOUR_TOKENS: Final = 24
PROBE_TOKENS: Final = 12
UNSTEADY: Final = ("unsteady-repeated", "unsteady-cached", "unsteady-after-generation", "unsteady-order")
PROBE: Final = (
    "In the morning the harbour lay still, and the boats that had come in by night were tied up in rows. "
    "Nobody spoke of the storm."
)
OTHER: Final = (
    "Twelve times twelve is one hundred and forty-four, which the children learn by heart in spring."
)
CONTINUED: Final = "A list of the months of the year, one after the other: January, February,"


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two replies to one ask are apart."""

    is_equal: bool
    worst: float | None  # nats; None where nothing could be compared
    begins_at: int | None  # the first row that differs
    theirs: float | None = None  # the two numbers at the worst
    before: float | None = None
    where: str = "completion"

    def is_beyond(self, max_nats: float) -> bool:
        """Whether it is more than may be."""
        return not self.is_equal and (self.worst is None or self.worst > max_nats)


def difference(before: Reply, reply: Reply) -> Difference:
    """Row by row, each token by its own words."""
    worst, begins_at, is_equal = None, None, True
    at: tuple[float | None, float | None, str] = (None, None, "completion")
    for where, rows, others in (
        ("prompt", before.prompt, reply.prompt),
        ("completion", before.completion, reply.completion),
    ):
        if rows is None or others is None:
            if (rows is None) != (others is None):
                is_equal = False
            continue
        for index, (row, other) in enumerate(zip(rows, others, strict=False)):
            if row == other:
                worst = worst or 0.0
                continue
            is_equal = False
            begins_at = index if begins_at is None else begins_at
            size, first, second = _row_difference(row, other)
            if size is not None and (worst is None or size > worst):
                worst, at = size, (first, second, where)
            if where == "completion" and not _is_same_token(row, other):
                break  # what follows follows other tokens
        else:
            if len(rows) != len(others):
                is_equal = False
                begins_at = min(len(rows), len(others)) if begins_at is None else begins_at
                worst = max(worst or 0.0, CAP)
    return Difference(is_equal, worst, begins_at, at[1], at[0], at[2])


def _is_same_token(row: Row | None, other: Row | None) -> bool:
    if row is None or other is None or row.chosen is None or other.chosen is None:
        return row is other
    return _key(row.chosen) == _key(other.chosen)


def _key(entry: Entry) -> tuple[int | None, str | None, bytes | None]:
    return entry.token_id, entry.text, entry.data


def _row_difference(row: Row | None, other: Row | None) -> tuple[float | None, float | None, float | None]:
    """The largest difference of two rows' numbers of the same tokens, and the two."""
    if row is None or other is None:
        return CAP, None, None
    first = {_key(one): one.logprob for one in row.alternatives or ()}
    second = {_key(one): one.logprob for one in other.alternatives or ()}
    if row.chosen is not None and other.chosen is not None:
        first[_key(row.chosen)] = row.chosen.logprob
        second[_key(other.chosen)] = other.chosen.logprob
    worst: tuple[float | None, float | None, float | None] = (None, None, None)
    for key in first.keys() & second.keys():
        a, b = first[key], second[key]
        size = 0.0 if a == b else CAP if a is None or b is None else abs(a - b)
        if worst[0] is None or size > worst[0]:
            worst = (size, a, b)
    return worst if worst[0] is not None else (CAP, None, None)


@dataclass(slots=True)
class Steady:
    """The checks of one server, and what they found."""

    session: Session
    reader: Reader
    findings: Findings
    max_nats: float
    max_len: int
    is_quick: bool
    prompt_fits: bool  # rows of plain prompts are the model's
    roundings: dict[str, str]  # form → the grid of its numbers
    rows: list[Steadiness] = field(default_factory=list)
    wrong_from: int | None = None  # the row from which on scored prompts are known to be wrong

    async def run(self) -> None:
        """All checks that the server's forms allow."""
        session = self.session
        form = session.prompt_form or session.completion_form
        if form is None:
            return
        await session.settle()
        session.tell("the same request again")
        if not await self._repeated(form):
            return
        if session.prompt_form is not None:
            session.tell("before and after a generation")
            await self._after_generation(session.prompt_form)
        session.tell("beside other requests")
        await self._beside(form)
        session.tell("in another order")
        await self._order(form)
        session.tell("streamed and whole")
        await self._streamed()
        if session.prompt_form is None:
            title = "lengths and scored generations were not looked at: the server gives no rows of prompts"
            self.findings.add("left-out", title, severity="note")
            return
        await session.settle()
        if not self.prompt_fits:
            title = "lengths and prefixes were not looked at: rows of short prompts are wrong"
            self.findings.add("left-out", title, severity="note")
            return
        session.tell("generated and scored")
        await self._prefill(session.prompt_form)
        await self._extended(session.prompt_form)
        session.tell("prompts of many lengths")
        await self._lengths(session.prompt_form)

    # -- alone ---------------------------------------------------------------------------------------------

    def _probe(self, form: str, text: str = PROBE) -> Ask:
        generated = 0 if form == self.session.prompt_form else PROBE_TOKENS
        return Ask(form=form, prompt=self._cut(text, 2), max_tokens=generated, params={"temperature": 0})

    def _cut(self, text: str, share: int) -> str:
        """The beginning of a text, at most a share of the context."""
        return self.reader.tokens.cut(text, self.max_len // share)

    async def _repeated(self, form: str) -> bool:
        """A prompt that was never asked, four times: the later ones beside each other, then the first."""
        text = self._cut(f"Note {secrets.token_hex(3)}. {PROBE}", 2)
        replies = [await self.session.ask(self._probe(form, text)) for _ in range(4)]
        heard = [reply for reply in replies if isinstance(reply, Reply)]
        if len(heard) < len(replies):
            self.findings.add(
                "left-out", "steadiness was not looked at: the probe was refused", severity="note"
            )
            return False
        probe = self._probe(form, text)
        again = _widest([difference(heard[1], one) for one in heard[2:]])
        self._note("three times alone", 3, again)
        cold = difference(heard[0], heard[1])
        self._note("with its prefix cached", 1, cold)
        if again.is_beyond(self.max_nats):
            title = "the same request, alone, has other numbers the next time, up to {worst} nats"
            self._wrong("unsteady-repeated", title, probe, again)
        elif cold.is_beyond(self.max_nats):
            title = "a prompt has other numbers once it is cached, up to {worst} nats"
            self._wrong("unsteady-cached", title, probe, cold)
        return True

    async def _extended(self, form: str) -> None:
        """A longer prompt whose beginning is cached, beside the exact rows; and one as long that is new."""
        text = f"{self._cut(OTHER, 2)} {self._cut(PROBE, 4)}"
        ask = replace(self._probe(form), prompt=text)
        cold = await self._beside_reference(replace(ask, prompt=f"Note {secrets.token_hex(3)}. {text}"))
        found = await self._beside_reference(ask)
        if cold is None or found is None:
            return
        self._note("after a cached prefix", 1, found)
        # What is wrong without a cache, too, is wrong by its place or its length.
        if found.is_beyond(self.max_nats) and not cold.is_beyond(self.max_nats):
            title = (
                "a prompt whose beginning is cached has other numbers than the model's, up to {worst} nats"
            )
            self._wrong("unsteady-cached", title, ask, found)

    async def _beside_reference(self, ask: Ask) -> Difference | None:
        """A text's prompt rows beside ours; None where they cannot be had."""
        ids = self.reader.tokens.encode(str(ask.prompt))
        reply = await self.session.ask(ask) if len(ids) <= self.max_len else None
        if not isinstance(reply, Reply) or not reply.prompt:
            return None
        worst, first, pair = self._errors(reply, ids)
        return Difference(worst <= self.max_nats, worst, first, pair[0], pair[1], "prompt")

    # -- beside others -------------------------------------------------------------------------------------

    async def _beside(self, form: str) -> None:
        forms = dict.fromkeys([form, self.session.completion_form or form])
        baselines = {}
        for name in forms:
            ask = self._probe(name, OTHER)
            await self.session.ask(ask)
            baselines[name] = (ask, await self.session.ask(ask))
        for count in QUICK_NEIGHBOURS if self.is_quick else NEIGHBOURS:
            for name, (ask, before) in baselines.items():
                if not isinstance(before, Reply):
                    continue
                reply = await self._with_neighbours(ask, count)
                if not isinstance(reply, Reply):
                    continue
                found = difference(before, reply)
                others = "1 other" if count == 1 else f"{count} others"
                self._note(f"beside {others} ({name})", 1, found)
                is_after = name != self.session.completion_form and self.findings.has(
                    "unsteady-after-generation"
                )
                if found.is_beyond(self.max_nats) and not is_after:
                    title = "numbers change where other requests run, up to {worst} nats"
                    self._wrong("unsteady-beside-others", title, ask, found, f"beside {others}")

    async def _with_neighbours(self, ask: Ask, count: int) -> Reply | Refusal:
        session = self.session
        form = session.completion_form or session.prompt_form
        assert form is not None
        neighbours = [
            Ask(
                form=form,
                prompt=self._cut(f"Letter number {index}: dear friend, " + "how are you? " * (index % 7), 2),
                max_tokens=min(NEIGHBOUR_TOKENS, self.max_len // 4),
                params={"temperature": 1.0, "seed": index},
            )
            for index in range(count)
        ]
        running = [asyncio.ensure_future(session.ask(one)) for one in neighbours]
        try:
            await asyncio.sleep(0.02)  # they are on their way
            return await session.ask(ask)
        finally:
            await asyncio.gather(*running, return_exceptions=False)

    # -- after others --------------------------------------------------------------------------------------

    async def _after_generation(self, form: str) -> None:
        await self.session.settle()
        ask = self._probe(form, OTHER)
        await self.session.ask(ask)
        before = await self.session.ask(ask)
        writer = self.session.completion_form or form
        await self.session.ask(
            Ask(form=writer, prompt=CONTINUED, max_tokens=8, params={"temperature": 1.0, "seed": 3})
        )
        after = await self.session.ask(ask)
        await self.session.settle()
        if not (isinstance(before, Reply) and isinstance(after, Reply)):
            return
        found = difference(before, after)
        self._note("after a generation", 1, found)
        if found.is_beyond(self.max_nats):
            title = "a prompt scored right after a generation has other numbers, up to {worst} nats"
            self._wrong("unsteady-after-generation", title, ask, found)

    async def _order(self, form: str) -> None:
        """A and B each after itself, then each after the other."""
        asks = {"A": self._probe(form, CONTINUED), "B": self._probe(form, OTHER)}
        replies = [(name, await self.session.ask(asks[name])) for name in "AABBABBA"]
        own = {"A": replies[1][1], "B": replies[3][1]}
        found = [
            (name, difference(own[name], reply))  # type: ignore[arg-type]
            for (name, reply) in replies[4:]
            if isinstance(reply, Reply) and isinstance(own[name], Reply)
        ]
        if not found:
            return
        name, widest = max(found, key=lambda one: one[1].worst or 0.0)
        self._note("in another order", len(found), _widest([one for _, one in found]))
        if widest.is_beyond(self.max_nats):
            title = "numbers depend on which prompt was asked before, up to {worst} nats"
            self._wrong("unsteady-order", title, asks[name], widest)

    # -- streamed ------------------------------------------------------------------------------------------

    async def _streamed(self) -> None:
        for form in self.session.stream_forms:
            prompt = CONTINUED if form == "completions" else ({"role": "user", "content": CONTINUED},)
            ask = Ask(form=form, prompt=prompt, max_tokens=12, params={"temperature": 0})
            await self.session.ask(ask)
            whole = await self.session.ask(ask)
            stream = await self.session.ask(replace(ask, stream=True))
            if not (isinstance(whole, Reply) and isinstance(stream, Reply) and stream.completion):
                continue  # the fields tell it
            found = difference(replace(whole, prompt=None), replace(stream, prompt=None))
            self._note(f"streamed ({form})", 1, found)
            if found.is_beyond(self.max_nats) or whole.text != stream.text:
                title = "a stream has other numbers than a whole reply, up to {worst} nats"
                self._wrong("stream-differs", title, ask, found)

    # -- lengths -------------------------------------------------------------------------------------------

    async def _lengths(self, form: str) -> None:
        room = self.max_len - max(self.session.least.get(form, 0), 0)
        sizes = [
            size + by
            for size in (QUICK_LENGTHS if self.is_quick else LENGTHS)
            for by in (-1, 0, 1)
            if size + by <= room
        ]
        if not sizes:
            return
        prompts = [ids for size in sizes if (ids := self._of_length(size)) is not None]
        references = self.reader.reference.chosen(prompts)
        wrong: list[tuple[int, float, int | None, Ask, tuple[float | None, float | None]]] = []
        unanswered: list[tuple[int, str]] = []
        for ids, exact in zip(prompts, references, strict=True):
            ask = self._prompt_ask(form, ids)
            reply = await self.session.ask(ask)
            if not isinstance(reply, Reply) or not reply.prompt:
                unanswered.append((len(ids), _words(reply)))
                continue
            worst, first, pair = self._errors(reply, ids, exact)
            found = Difference(worst <= self.max_nats, worst, first)
            self._note(f"prompt of {len(ids)} tokens", 1, found)
            if worst > self.max_nats:
                wrong.append((len(ids), worst, first, ask, pair))
        if unanswered:
            lengths = ", ".join(str(size) for size, _ in unanswered)
            title = f"prompts of {lengths} tokens are not answered: {unanswered[0][1]}"
            self.findings.add("error", title, severity="note", count=len(unanswered), of=len(prompts))
        if wrong:
            lengths = ", ".join(str(size) for size, *_ in wrong)
            self.findings.add(
                "wrong-at-length",
                f"prompts of {lengths} tokens have wrong numbers, up to {{worst}} nats; "
                f"{len(prompts) - len(wrong)} other lengths are right",
                evidence=[
                    Evidence(
                        ask=ask.form,
                        prompt=ask.shown,
                        position=first,
                        where="prompt",
                        theirs=pair[0],
                        ours=pair[1],
                        note=f"{size} tokens, from row {first} on",
                    )
                    for size, _, first, ask, pair in wrong
                ],
                worst=max(worst for _, worst, *_ in wrong),
                count=len(wrong),
                of=len(prompts),
            )

    def _prompt_ask(self, form: str, ids: tuple[int, ...]) -> Ask:
        """A prompt by its ids, or by its text where the server takes no ids."""
        tokens = self.reader.tokens
        prompt = ids if self.session.takes_ids else tokens.vocabulary.bytes_of(ids).decode()
        return Ask(form=form, prompt=prompt, num_top=1)

    def _of_length(self, size: int) -> tuple[int, ...] | None:
        """A prompt of so many tokens, each of its own beginning; None where its text is cut otherwise."""
        tokens = self.reader.tokens
        text = f"Chapter {size}. " + " ".join([PROBE, OTHER, CONTINUED] * (size // 24 + 1))
        ids = tokens.encode(text)[:size]
        if len(ids) < size:
            return None
        if not self.session.takes_ids:
            again = tokens.encode(tokens.vocabulary.bytes_of(ids).decode("utf-8", "replace"))
            return ids if again == ids else None
        return ids

    def _errors(
        self, reply: Reply, ids: tuple[int, ...], exact: Floats | None = None
    ) -> tuple[float, int | None, tuple[float | None, float | None]]:
        """The worst chosen number of a prompt, the first that is off, and the two numbers there."""
        if exact is None:
            (exact,) = self.reader.reference.chosen([ids])
        aligned = align_prompt(reply.prompt or (), ids, self.reader.tokens)
        worst, first = 0.0, None
        pair: tuple[float | None, float | None] = (None, None)
        for position, row in aligned.pairs:
            if position < 1 or row.chosen is None:
                continue
            theirs = np.array([-np.inf if row.chosen.logprob is None else row.chosen.logprob])
            error = float(distance(theirs, exact[position - 1 : position])[0])
            is_filled = theirs[0] == 0 or theirs[0] <= IMPOSSIBLE or not np.isfinite(theirs[0])
            if is_filled and self.findings.has("filled-in"):
                continue
            if self.wrong_from is not None and position >= self.wrong_from:
                continue
            error = max(error - self._allowance(float(theirs[0])), 0.0)
            if error > self.max_nats and first is None:
                first = position
            if error > worst:
                worst, pair = error, (row.chosen.logprob, finite(exact[position - 1]))
        self.reader.num_rows += len(aligned.pairs)
        return worst, first, pair

    def _allowance(self, number: float) -> float:
        """How far the rounding that was found may move a number, nats."""
        rounding = self.roundings.get(self.session.prompt_form or "")
        return 0.0 if rounding is None else float(allowance_of(rounding, np.array([number]))[0])

    # -- generated, then scored ----------------------------------------------------------------------------

    async def _prefill(self, form: str) -> None:
        """Score what the server generated as a prompt: the same tokens, the same numbers."""
        writer = self.session.completion_form
        if writer is None or not self.session.takes_ids or self.findings.has(*UNSTEADY):
            return
        size = min(64, self.max_len // 2)
        ids = self._of_length(size)
        if ids is None:
            return
        ask = Ask(
            form=writer,
            prompt=ids,
            max_tokens=min(72, self.max_len - size - 2),
            num_top=1,
            params={"temperature": 1.0, "seed": 11, "ignore_eos": True},
        )
        reply = await self.session.ask(ask)
        if isinstance(reply, Refusal):
            ask = replace(ask, params={"temperature": 1.0, "seed": 11})
            reply = await self.session.ask(ask)
        await self.session.settle()
        if not isinstance(reply, Reply) or not reply.completion:
            return
        aligned = align_completion(reply, self.reader.tokens)
        whole = ids + aligned.ids
        if not aligned.ids or aligned.is_cut or len(whole) > self.max_len:
            return
        (exact,) = self.reader.reference.chosen([whole])
        generated = [
            abs(row.chosen.logprob - exact[len(ids) - 1 + at])
            for at, row in aligned.pairs
            if row.chosen is not None and row.chosen.logprob is not None
        ]
        scored = await self.session.ask(self._prompt_ask(form, whole))
        if not isinstance(scored, Reply) or not scored.prompt or not generated:
            return
        worst, first, pair = self._errors(scored, whole, exact)
        found = Difference(worst <= self.max_nats, worst, first, *pair, "prompt")
        self._note("generated, then scored as a prompt", 1, found)
        is_generated_right = float(np.quantile(generated, 0.9)) <= self.max_nats
        if found.is_beyond(self.max_nats) and is_generated_right:
            title = (
                "generated rows are right, and the same tokens scored as a prompt are wrong "
                f"from row {first} on, up to {{worst}} nats"
            )
            self._wrong("prefill-decode", title, ask, found)
            self.wrong_from = first

    # -- noting --------------------------------------------------------------------------------------------

    def _note(self, circumstance: str, requests: int, found: Difference) -> None:
        self.rows.append(
            Steadiness(
                circumstance=circumstance,
                requests=requests,
                is_equal=found.is_equal,
                worst=found.worst,
                begins_at=found.begins_at,
            )
        )

    def _wrong(self, kind: str, title: str, ask: Ask, found: Difference, note: str = "") -> None:
        """A finding, unless what the same request gives alone changes anyway."""
        if kind != "unsteady-repeated" and self.findings.has("unsteady-repeated"):
            return
        evidence = Evidence(
            ask=ask.label,
            prompt=ask.shown,
            position=found.begins_at,
            where="prompt" if found.where == "prompt" else "completion",
            theirs=found.theirs,
            ours=found.before,
            note=note or "ours: the number without the circumstance",
        )
        self.findings.add(kind, title, evidence=[evidence], worst=found.worst or CAP)


def _widest(found: Sequence[Difference]) -> Difference:
    """The one with the largest difference."""
    return max(found, key=lambda one: (not one.is_equal, one.worst or 0.0))


def _words(reply: Reply | Refusal) -> str:
    return str(reply) if isinstance(reply, Refusal) else "no row"
