"""Check numbers under other circumstances: repeated, cached, concurrent, streamed, and at other lengths.

`circumstances` lists those in which a reply is compared with an earlier one to the same ask. Prompts of other
lengths, with cached prefixes, and of generated tokens are compared with the exact numbers.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import numpy as np

from logprobe.analysis.auditing.fit import CAP, IMPOSSIBLE, allowance_of, distance, finite
from logprobe.analysis.auditing.forms import Ask, Refusal, Reply
from logprobe.analysis.auditing.report import Evidence, Steadiness
from logprobe.analysis.auditing.rows import align_completion, align_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.analysis.auditing.findings import Findings
    from logprobe.analysis.auditing.forms import Row
    from logprobe.analysis.auditing.report import Where
    from logprobe.analysis.auditing.rows import Reader
    from logprobe.analysis.auditing.session import Session

NEIGHBOURS: Final = (1, 8, 32, 45)
QUICK_NEIGHBOURS: Final = (1, 8)
LENGTHS: Final = (64, 128, 256, 512, 1024)
QUICK_LENGTHS: Final = (64, 512)
NEIGHBOUR_TOKENS: Final = 24
PROBE_TOKENS: Final = 12
SCORED: Final = (64, 72)  # tokens of a prompt, and generated after it, that are then scored as a prompt
UNSTEADY: Final = ("unsteady-repeated", "unsteady-cached", "unsteady-after-generation", "unsteady-order")
CACHED: Final = "a prompt has other numbers once it is cached, up to {worst} nats"
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
    """The distance between the numbers of a reply and those that they should equal."""

    is_equal: bool
    worst: float | None  # nats; None where nothing could be compared
    begins_at: int | None = None  # the first row that differs
    theirs: float | None = None  # the two numbers of the worst difference
    ours: float | None = None
    where: Where = "completion"

    def is_beyond(self, max_nats: float) -> bool:
        """Return whether it exceeds the limit."""
        return not self.is_equal and (self.worst is None or self.worst > max_nats)


def difference(before: Reply, reply: Reply) -> Difference:
    """Compare two replies row by row, with tokens identified as the server reports them."""
    found = Difference(before.prompt == reply.prompt and before.completion == reply.completion, None)
    wheres: tuple[Where, ...] = ("prompt", "completion")
    for where in wheres:
        rows, others = getattr(before, where), getattr(reply, where)
        if rows is None or others is None:
            continue
        found = replace(found, worst=found.worst or 0.0)
        for index, (row, other) in enumerate(zip_longest(rows, others)):
            if row == other:
                continue
            if found.begins_at is None:
                found = replace(found, begins_at=index)
            size, first, second = _row_difference(row, other)
            if size > (found.worst or 0.0):
                found = replace(found, worst=size, theirs=second, ours=first, where=where)
            if where == "completion" and not _is_same_token(row, other):
                break  # later rows have another context
    return found


def _is_same_token(row: Row | None, other: Row | None) -> bool:
    if row is None or other is None or row.chosen is None or other.chosen is None:
        return row is other
    return row.chosen.key == other.chosen.key


def _row_difference(row: Row | None, other: Row | None) -> tuple[float, float | None, float | None]:
    """Return the largest difference of two rows' numbers of the same tokens, and the two numbers."""
    if row is None or other is None:
        return CAP, None, None
    first = {entry.key: entry.logprob for entry in row.alternatives or ()}
    second = {entry.key: entry.logprob for entry in other.alternatives or ()}
    if row.chosen is not None and other.chosen is not None:
        first[row.chosen.key] = row.chosen.logprob
        second[other.chosen.key] = other.chosen.logprob
    sizes = [
        (0.0 if a == b else CAP if a is None or b is None else abs(a - b), a, b)
        for a, b in ((first[key], second[key]) for key in first.keys() & second.keys())
    ]
    return max(sizes, key=lambda one: one[0]) if sizes else (CAP, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstance:
    """An ask to repeat under another circumstance, and the fault to report if its numbers change."""

    kind: str
    title: str
    name: str
    ask: Ask
    num_before: int = 2  # times to send the ask first; the last reply is compared
    after: tuple[Ask, ...] = ()  # sent in between
    beside: tuple[Ask, ...] = ()  # in flight at the same time
    stream: bool = False
    times: int = 1


@dataclass(slots=True)
class Steady:
    """The checks of one server, and what they observed."""

    session: Session
    reader: Reader
    findings: Findings
    max_nats: float
    max_len: int
    is_quick: bool
    prompt_fits: bool  # rows of plain prompts are the model's
    roundings: dict[str, str]  # form → precision that its numbers are rounded to
    rows: list[Steadiness] = field(default_factory=list)
    wrong_from: int | None = None  # first row from which scored prompts are known to be wrong

    @property
    def form(self) -> str:
        """Form of the repeated requests."""
        return self.session.prompt_form or self.session.completion_form or ""

    async def run(self) -> None:
        """Observe all circumstances that the server's forms allow."""
        if not self.form:
            return
        for circumstance in self.circumstances():
            self.session.tell(circumstance.name)
            await self.session.settle()
            await self._observe(circumstance)
        if self.session.prompt_form is not None and self.prompt_fits:
            self.session.tell("generated and scored")
            await self.session.settle()
            await self._scored()
            self.session.tell("prompts of many lengths")
            await self._extended()
            await self._lengths()
        else:
            why = "rows of short prompts are wrong" if self.session.prompt_form else "it gives no prompt rows"
            title = f"lengths, prefixes and scored generations were not looked at: {why}"
            self.findings.add("left-out", title, severity="note")

    # -- comparison with an earlier reply ------------------------------------------------------------------

    def circumstances(self) -> Iterator[Circumstance]:
        """Yield the circumstances in which a reply is compared with an earlier one."""
        form, writer = self.form, self.session.completion_form
        yield Circumstance(
            kind="unsteady-repeated",
            title="the same request, alone, has other numbers the next time, up to {worst} nats",
            name="three times alone",
            ask=self.probe(form, f"Note {secrets.token_hex(3)}. {PROBE}"),
            times=2,
        )
        yield Circumstance(
            kind="unsteady-cached",
            title=CACHED,
            name="with its prefix cached",
            ask=self.probe(form, f"Note {secrets.token_hex(3)}. {PROBE}"),
            num_before=1,
        )
        if self.session.prompt_form is not None:
            params = {"temperature": 1.0, "seed": 3}
            yield Circumstance(
                kind="unsteady-after-generation",
                title="a prompt scored right after a generation has other numbers, up to {worst} nats",
                name="after a generation",
                ask=self.probe(form, OTHER),
                after=(Ask(form=writer or form, prompt=CONTINUED, max_tokens=8, params=params),),
            )
        for count in QUICK_NEIGHBOURS if self.is_quick else NEIGHBOURS:
            for name in dict.fromkeys([form, writer or form]):
                yield Circumstance(
                    kind="unsteady-beside-others",
                    title="numbers change where other requests run, up to {worst} nats",
                    name=f"beside {count} other{'s' if count > 1 else ''} ({name})",
                    ask=self.probe(name, OTHER),
                    beside=tuple(self._neighbour(writer or form, index) for index in range(count)),
                )
        for first, second in ((CONTINUED, OTHER), (OTHER, CONTINUED)):
            yield Circumstance(
                kind="unsteady-order",
                title="numbers depend on which prompt was asked before, up to {worst} nats",
                name="after another prompt",
                ask=self.probe(form, first),
                after=(self.probe(form, second),),
            )
        for name in self.session.stream_forms:
            ask = Ask(form=name, prompt=CONTINUED, max_tokens=PROBE_TOKENS, params={"temperature": 0})
            yield Circumstance(
                kind="stream-differs",
                title="a stream has other numbers than a whole reply, up to {worst} nats",
                name=f"streamed ({name})",
                ask=replace(ask, prompt=({"role": "user", "content": CONTINUED},)) if ask.is_chat else ask,
                stream=True,
            )

    def _neighbour(self, form: str, index: int) -> Ask:
        text = f"Letter number {index}: dear friend, " + "how are you? " * (index % 7)
        max_tokens = min(NEIGHBOUR_TOKENS, self.max_len // 4)
        params = {"temperature": 1.0, "seed": index}
        return Ask(form=form, prompt=self.cut(text), max_tokens=max_tokens, params=params)

    async def _observe(self, circumstance: Circumstance) -> None:
        """Ask without the circumstance and under it, and compare."""
        ask, session = circumstance.ask, self.session
        before = [await session.ask(ask) for _ in range(circumstance.num_before)][-1]
        for other in circumstance.after:
            await session.ask(other)
        running = [asyncio.ensure_future(session.ask(other)) for other in circumstance.beside]
        try:
            if running:
                await asyncio.sleep(0.02)  # give them time to start
            compared = replace(ask, stream=circumstance.stream)
            replies = [await session.ask(compared) for _ in range(circumstance.times)]
        finally:
            await asyncio.gather(*running)
        given = [reply for reply in replies if isinstance(reply, Reply)]
        if not isinstance(before, Reply) or len(given) < len(replies):
            if not circumstance.stream:  # `fields` reports refused streams
                title = f"not looked at, as a request was refused: {circumstance.name}"
                self.findings.add("left-out", title, severity="note")
            return
        if circumstance.stream and not given[0].completion:  # a field that is ignored
            return
        if circumstance.stream:
            before, given = replace(before, prompt=None), [replace(given[0], prompt=None)]
        found = max(
            (difference(before, reply) for reply in given), key=lambda one: (not one.is_equal, one.worst or 0)
        )
        if circumstance.stream and before.text != given[0].text:
            found = replace(found, is_equal=False, worst=max(found.worst or 0.0, CAP))
        # Numbers that change after a generation also change during one.
        is_excused = ask.form != session.completion_form and self.findings.has("unsteady-after-generation")
        self._note(
            circumstance.kind,
            circumstance.title,
            circumstance.name,
            ask,
            found,
            is_excused=bool(circumstance.beside) and is_excused,
            requests=circumstance.times,
        )

    def _note(
        self,
        kind: str,
        title: str,
        name: str,
        ask: Ask,
        found: Difference,
        *,
        is_excused: bool = False,
        requests: int = 1,
    ) -> None:
        """Record an observation; add a fault, unless the same request alone changes anyway."""
        self.rows.append(
            Steadiness(
                circumstance=name,
                requests=requests,
                is_equal=found.is_equal,
                worst=found.worst,
                begins_at=found.begins_at,
            )
        )
        if not found.is_beyond(self.max_nats) or is_excused or self.findings.has("unsteady-repeated"):
            return
        evidence = Evidence(
            ask=ask.label,
            prompt=ask.shown,
            position=found.begins_at,
            where=found.where,
            theirs=found.theirs,
            ours=found.ours,
            note=name,
        )
        self.findings.add(kind, title, evidence=[evidence], worst=found.worst or CAP)

    # -- comparison with the exact numbers -----------------------------------------------------------------

    async def _scored(self) -> None:
        """Score generated tokens as a prompt: the same tokens should have the same numbers."""
        session, writer = self.session, self.session.completion_form
        ids = self._of_length(min(SCORED[0], self.max_len // 2))
        if writer is None or ids is None or not session.takes_ids or self.findings.has(*UNSTEADY):
            return
        params = {"temperature": 1.0, "seed": 11, "ignore_eos": True}
        max_tokens = min(SCORED[1], self.max_len - len(ids) - 2)
        ask = Ask(form=writer, prompt=ids, max_tokens=max_tokens, num_top=1, params=params)
        reply = await session.ask(ask)
        if isinstance(reply, Refusal):
            ask = replace(ask, params={"temperature": 1.0, "seed": 11})
            reply = await session.ask(ask)
        await session.settle()
        if not isinstance(reply, Reply) or not reply.completion:
            return
        aligned = align_completion(reply, self.reader.tokens)
        whole = ids + aligned.ids
        if not aligned.pairs or aligned.num_unknown or len(whole) > self.max_len:
            return
        exact = self.reader.reference.chosen(whole)
        errors = [
            abs(row.chosen.logprob - exact[len(ids) - 1 + at])
            for at, row in aligned.pairs
            if row.chosen is not None and row.chosen.logprob is not None
        ]
        found = await self._beside_exact(self._prompt_ask(whole), whole)
        if found is None or not errors:
            return
        is_right = float(np.quantile(errors, 0.9)) <= self.max_nats
        title = (
            "generated rows are right, and the same tokens scored as a prompt are wrong, up to {worst} nats"
        )
        name = "generated, then scored as a prompt"
        self._note("prefill-decode", title, name, ask, found, is_excused=not is_right)
        if is_right and found.is_beyond(self.max_nats):
            self.wrong_from = found.begins_at

    async def _extended(self) -> None:
        """Score a longer prompt whose beginning is cached, and a new one of similar length."""
        text = f"{self.cut(OTHER)} {self.cut(PROBE, 4)}"
        ask = replace(self.probe(self.form), prompt=text)
        new = replace(ask, prompt=f"Note {secrets.token_hex(3)}. {text}")
        cold = await self._beside_exact(new, self.reader.tokens.encode(str(new.prompt)))
        found = await self._beside_exact(ask, self.reader.tokens.encode(text))
        if cold is not None and found is not None:
            # A prompt that is wrong without a cache is wrong for another reason.
            is_excused = cold.is_beyond(self.max_nats)
            self._note("unsteady-cached", CACHED, "after a cached prefix", ask, found, is_excused=is_excused)

    async def _lengths(self) -> None:
        """Score prompts around the sizes at which servers split them."""
        room = self.max_len - self.session.min_tokens.get(self.form, 0)
        title = "prompts of {count} lengths have wrong numbers, up to {worst} nats"
        for length in QUICK_LENGTHS if self.is_quick else LENGTHS:
            for size in (length - 1, length, length + 1):
                ids = self._of_length(size) if size <= room else None
                if ids is None:
                    continue
                ask = self._prompt_ask(ids)
                if found := await self._beside_exact(ask, ids):
                    self._note("wrong-at-length", title, f"prompt of {size} tokens", ask, found)
                else:
                    unanswered = f"a prompt of {size} tokens is not answered with rows"
                    self.findings.add("error", unanswered, severity="note")

    async def _beside_exact(self, ask: Ask, ids: tuple[int, ...]) -> Difference | None:
        """Compare the chosen numbers of a prompt with the exact ones; None without prompt rows."""
        reply = await self.session.ask(ask) if len(ids) <= self.max_len else None
        if not isinstance(reply, Reply) or not reply.prompt:
            return None
        exact = self.reader.reference.chosen(ids)
        found = Difference(is_equal=True, worst=0.0, where="prompt")
        rounding = self.roundings.get(self.form)
        aligned = align_prompt(reply.prompt, ids, self.reader.tokens)
        self.reader.num_rows += len(aligned.pairs)
        for position, row in aligned.pairs:
            if row.chosen is None or (self.wrong_from is not None and position >= self.wrong_from):
                continue
            theirs = np.array([-np.inf if row.chosen.logprob is None else row.chosen.logprob])
            if (theirs[0] == 0 or theirs[0] <= IMPOSSIBLE) and self.findings.has("filled-in"):
                continue
            error = float(distance(theirs, exact[position - 1 : position])[0])
            if rounding is not None:
                error = max(error - float(allowance_of(rounding, theirs)[0]), 0.0)
            if error > self.max_nats and found.begins_at is None:
                found = replace(found, is_equal=False, begins_at=position)
            if error > (found.worst or 0.0):
                ours = finite(exact[position - 1])
                found = replace(found, worst=error, theirs=row.chosen.logprob, ours=ours)
        return found

    # -- prompts -------------------------------------------------------------------------------------------

    def probe(self, form: str, text: str = PROBE) -> Ask:
        """Return a short request whose numbers are compared."""
        generated = 0 if form == self.session.prompt_form else PROBE_TOKENS
        return Ask(form=form, prompt=self.cut(text), max_tokens=generated, params={"temperature": 0})

    def cut(self, text: str, share: int = 2) -> str:
        """Return the beginning of a text, at most 1 / `share` of the context."""
        return self.reader.tokens.cut(text, self.max_len // share)

    def _prompt_ask(self, ids: tuple[int, ...]) -> Ask:
        """Return a prompt as ids, or as text if the server does not accept ids."""
        prompt = ids if self.session.takes_ids else self.reader.tokens.vocabulary.bytes_of(ids).decode()
        return Ask(form=self.form, prompt=prompt, num_top=1)

    def _of_length(self, size: int) -> tuple[int, ...] | None:
        """Return a prompt of `size` tokens with a unique beginning; None if there is none."""
        tokens = self.reader.tokens
        text = f"Chapter {size}. " + " ".join([PROBE, OTHER, CONTINUED] * (size // 24 + 1))
        ids = tokens.encode(text)[:size]
        if not self.session.takes_ids:  # a truncated text often tokenizes differently
            again = tokens.encode(tokens.vocabulary.bytes_of(ids).decode("utf-8", "replace"))
            return ids if len(ids) == size and again == ids else None
        return ids if len(ids) == size else None
