"""Check log-probabilities under other circumstances: repeated, cached, concurrent, streamed, other lengths.

First, replies are compared with earlier replies to the same request. Then prompts of other lengths, prompts
with a cached prefix, and prompts made of generated tokens are compared with the exact log-probabilities.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

import numpy as np

from logprobe.analysis.auditing.endpoint import Refusal
from logprobe.analysis.auditing.fit import CAP, IMPOSSIBLE, allowance_of, distance, finite
from logprobe.analysis.auditing.forms import Ask, Reply
from logprobe.analysis.auditing.report import Steadiness
from logprobe.analysis.auditing.rows import align_completion, align_prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from logprobe.analysis.auditing.compare import Comparison
    from logprobe.analysis.auditing.forms import Row
    from logprobe.analysis.auditing.report import Where
    from logprobe.analysis.auditing.session import Session
    from logprobe.analysis.measures import Floats

NEIGHBOURS: Final = (1, 8, 32, 45)
QUICK_NEIGHBOURS: Final = (1, 8)
LENGTHS: Final = (64, 128, 256, 512, 1024)
QUICK_LENGTHS: Final = (64, 512)
NEIGHBOUR_TOKENS: Final = 24
PROBE_TOKENS: Final = 12
# A prompt of 64 tokens and the 72 tokens generated after it are then scored as one prompt.
SCORED: Final = (64, 72)
START_S: Final = 0.02  # seconds to wait for concurrent requests to start
UNSTEADY: Final = ("unsteady-repeated", "unsteady-cached", "unsteady-after-generation", "unsteady-order")
PROBE: Final = (
    "In the morning the harbour lay still, and the boats that had come in by night were tied up in rows. "
    "Nobody spoke of the storm."
)
OTHER: Final = (
    "Twelve times twelve is one hundred and forty-four, which the children learn by heart in spring."
)
CONTINUED: Final = "A list of the months of the year, one after the other: January, February,"


@dataclass(slots=True)
class Difference:
    """The difference between the log-probabilities in a reply and the ones that they should equal."""

    is_equal: bool = True
    worst: float | None = None  # the largest difference, nats; None if nothing could be compared
    begins_at: int | None = None  # the first row that differs
    theirs: float | None = None  # the two log-probabilities with the largest difference, nats
    ours: float | None = None
    where: Where = "completion"

    def add(self, row: int, size: float, theirs: float | None, ours: float | None, limit: float) -> None:
        """Add the difference `size` in a row, in nats; a difference above `limit` makes `is_equal` False."""
        if size > limit and self.begins_at is None:
            self.is_equal, self.begins_at = False, row
        if size > (self.worst or 0.0):
            self.worst, self.theirs, self.ours = size, theirs, ours

    def is_beyond(self, max_nats: float) -> bool:
        """Return True if the largest difference exceeds `max_nats`."""
        return not self.is_equal and (self.worst is None or self.worst > max_nats)


def difference(before: Reply, reply: Reply, wheres: Iterable[Where] = ("prompt", "completion")) -> Difference:
    """Compare two replies row by row, with tokens identified as the server reports them."""
    found = Difference()
    for where in wheres:
        rows, others = getattr(before, where), getattr(reply, where)
        found.is_equal &= rows == others
        if rows is None or others is None:
            continue
        found.worst = found.worst or 0.0
        for index, (row, other) in enumerate(zip_longest(rows, others)):
            if row == other:
                continue
            size, first, second = _row_difference(row, other)
            if size > found.worst:
                found.where = where
            found.add(index, size, second, first, limit=-1.0)  # any difference at all counts
            if where == "completion" and _key(row) != _key(other):
                break  # later rows have another context
    return found


def _key(row: Row | None) -> object:
    return row if row is None or row.chosen is None else row.chosen.key


def _row_difference(row: Row | None, other: Row | None) -> tuple[float, float | None, float | None]:
    """Find the shared token whose logprobs differ most; return the difference (nats) and both logprobs."""
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
class Steady:
    """Runs the checks on one server, and collects the results."""

    session: Session
    comparison: Comparison
    max_len: int
    is_quick: bool
    is_known: bool  # True if the server runs the model that the exact rows come from
    rows: list[Steadiness] = field(default_factory=list)
    wrong_from: int | None = None  # first row from which scored prompts are known to be wrong

    @property
    def form(self) -> str:
        """The form of the repeated requests, or an empty string if the server supports none."""
        return self.session.prompt_form or self.session.completion_form or ""

    async def run(self) -> None:
        """Run all checks that are possible with the forms of requests that the server answers."""
        if not self.form:
            return
        await self._compare_replies()
        if self.session.prompt_form is not None and self.is_known:
            self.session.tell("generated and scored")
            await self.session.settle()
            await self._score_generated()
            self.session.tell("prompts of many lengths")
            await self._score_extended()
            await self._score_lengths()
        else:
            why = "rows of short prompts are wrong" if self.session.prompt_form else "it gives no prompt rows"
            title = f"lengths, prefixes and scored generations were not looked at: {why}"
            self.comparison.findings.add("left-out", title, is_note=True)

    # -- comparison with an earlier reply ------------------------------------------------------------------

    async def _compare_replies(self) -> None:
        form, writer = self.form, self.session.completion_form or self.form
        await self._observe("unsteady-repeated", "three times alone", self._new_probe(), times=2)
        await self._observe("unsteady-cached", "with its prefix cached", self._new_probe(), num_before=1)
        if self.session.prompt_form is not None:
            params = {"temperature": 1.0, "seed": 3}
            after = Ask(form=writer, prompt=CONTINUED, max_tokens=8, params=params)
            probe = self._probe(form, OTHER)
            await self._observe("unsteady-after-generation", "after a generation", probe, after=after)
        for count in QUICK_NEIGHBOURS if self.is_quick else NEIGHBOURS:
            for probed in dict.fromkeys([form, writer]):
                name = f"beside {count} other{'s' if count > 1 else ''} ({probed})"
                beside = [self._neighbour(writer, index) for index in range(count)]
                probe = self._probe(probed, OTHER)
                await self._observe("unsteady-beside-others", name, probe, beside=beside)
        for first, second in ((CONTINUED, OTHER), (OTHER, CONTINUED)):
            probe, after = self._probe(form, first), self._probe(form, second)
            await self._observe("unsteady-order", "after another prompt", probe, after=after)
        for route in ("completions", "chat"):
            if route in self.session.extras:
                params = {"temperature": 0}
                ask = Ask(form=route, prompt=CONTINUED, max_tokens=PROBE_TOKENS, params=params).as_chat()
                await self._observe("stream-differs", f"streamed ({route})", ask, is_stream=True)

    async def _observe(
        self,
        kind: str,
        name: str,
        ask: Ask,
        *,
        num_before: int = 2,
        after: Ask | None = None,
        beside: Sequence[Ask] = (),
        is_stream: bool = False,
        times: int = 1,
    ) -> None:
        """Send a request `num_before` times and again under another circumstance, and compare the replies.

        The last of the first replies is compared with the replies under the other circumstance: `after`
        another request, `beside` concurrent requests, or as a stream.
        """
        session, findings = self.session, self.comparison.findings
        session.tell(name)
        await session.settle()
        before = [await session.ask(ask) for _ in range(num_before)][-1]
        if after is not None:
            await session.ask(after)
        running = [asyncio.ensure_future(session.ask(other)) for other in beside]
        try:
            if running:
                await asyncio.sleep(START_S)
            replies = [await session.ask(replace(ask, stream=is_stream)) for _ in range(times)]
        finally:
            await asyncio.gather(*running)
        given = [reply for reply in replies if isinstance(reply, Reply)]
        if not isinstance(before, Reply) or len(given) < len(replies):
            if not is_stream:  # `fields` reports refused streams
                title = f"not looked at, as a request was refused: {name}"
                findings.add("left-out", title, is_note=True)
            return
        if is_stream and not given[0].completion:  # the server ignores `logprobs` in streams
            return
        wheres: tuple[Where, ...] = ("completion",) if is_stream else ("prompt", "completion")
        all_found = [difference(before, reply, wheres) for reply in given]
        found = max(all_found, key=lambda one: (not one.is_equal, one.worst or 0))
        if is_stream and before.text != given[0].text:
            found.is_equal, found.worst = False, max(found.worst or 0.0, CAP)
        # Log-probabilities that change after a generation also change during one.
        is_generating = bool(beside) and ask.form != session.completion_form
        is_excused = is_generating and findings.has("unsteady-after-generation")
        self._add(kind, name, ask, found, is_excused=is_excused, requests=times)

    def _add(
        self,
        kind: str,
        name: str,
        ask: Ask,
        found: Difference,
        *,
        is_excused: bool = False,
        requests: int = 1,
    ) -> None:
        """Record the result of a check, and add a fault if log-probabilities differ too much.

        No fault is added if `is_excused`, or if the same request, sent alone, already gives different
        replies.
        """
        self.rows.append(
            Steadiness(
                circumstance=name,
                requests=requests,
                is_equal=found.is_equal,
                worst=found.worst,
                begins_at=found.begins_at,
            )
        )
        findings = self.comparison.findings
        if not found.is_beyond(self.comparison.max_nats) or is_excused or findings.has("unsteady-repeated"):
            return
        evidence = ask.evidence(
            found.begins_at, where=found.where, theirs=found.theirs, ours=found.ours, note=name
        )
        findings.add(kind, evidence=[evidence], worst=found.worst or CAP)

    # -- comparison with the exact numbers -----------------------------------------------------------------

    async def _score_generated(self) -> None:
        """Generate tokens, then score them as a prompt; the log-probabilities should be the same."""
        session, writer = self.session, self.session.completion_form
        ids = self._of_length(min(SCORED[0], self.max_len // 2))
        is_unsteady = self.comparison.findings.has(*UNSTEADY)
        if writer is None or ids is None or not session.takes_ids or is_unsteady:
            return
        params = {"temperature": 1.0, "seed": 11}
        max_tokens = min(SCORED[1], self.max_len - len(ids) - 2)
        ask = Ask(form=writer, prompt=ids, max_tokens=max_tokens, num_top=1, params=params)
        reply = await session.ask(replace(ask, params={**params, "ignore_eos": True}))
        if isinstance(reply, Refusal):
            reply = await session.ask(ask)
        await session.settle()
        if not isinstance(reply, Reply) or not reply.completion:
            return
        aligned = align_completion(reply, self.comparison.reader.tokens)
        whole = ids + aligned.ids
        if not aligned.pairs or aligned.num_unknown or len(whole) > self.max_len:
            return
        exact = self.comparison.reader.reference.chosen(whole)
        pairs = [(len(ids) + at, row) for at, row in aligned.pairs]
        errors = [error for _, _, error in self._errors(writer, pairs, exact)]
        prompt = self._prompt_ask(whole)
        found = await self._beside_exact(prompt, whole)
        if found is None or not errors:
            return
        is_right = float(np.quantile(errors, 0.9)) <= self.comparison.max_nats
        name = "generated, then scored as a prompt"
        self._add("prefill-decode", name, prompt, found, is_excused=not is_right)
        if is_right and found.is_beyond(self.comparison.max_nats):
            self.wrong_from = found.begins_at

    async def _score_extended(self) -> None:
        """Score a prompt whose beginning is cached, and a new prompt of similar length."""
        tokens = self.comparison.reader.tokens
        text = f"{self._cut(OTHER)} {self._cut(PROBE, 4)}"
        new = f"Note {secrets.token_hex(3)}. {text}"
        ask = replace(self._probe(self.form), prompt=text)
        cold = await self._beside_exact(replace(ask, prompt=new), tokens.encode(new))
        found = await self._beside_exact(ask, tokens.encode(text))
        if cold is not None and found is not None:
            # If a prompt is wrong without a cached prefix, the cache is not the reason.
            is_excused = cold.is_beyond(self.comparison.max_nats)
            self._add("unsteady-cached", "after a cached prefix", ask, found, is_excused=is_excused)

    async def _score_lengths(self) -> None:
        """Score prompts with lengths near the sizes at which servers split prompts."""
        room = self.max_len - self.session.min_tokens.get(self.form, 0)
        for length in QUICK_LENGTHS if self.is_quick else LENGTHS:
            for size in (length - 1, length, length + 1):
                ids = self._of_length(size) if size <= room else None
                if ids is None:
                    continue
                ask = self._prompt_ask(ids)
                if found := await self._beside_exact(ask, ids):
                    self._add("wrong-at-length", f"prompt of {size} tokens", ask, found)
                else:
                    unanswered = f"a prompt of {size} tokens is not answered with rows"
                    self.comparison.findings.add("error", unanswered, is_note=True)

    async def _beside_exact(self, ask: Ask, ids: tuple[int, ...]) -> Difference | None:
        """Compare a prompt's token logprobs with the exact ones; return None without prompt rows."""
        reply = await self.session.ask(ask) if len(ids) <= self.max_len else None
        if not isinstance(reply, Reply) or not reply.prompt:
            return None
        reader = self.comparison.reader
        exact = reader.reference.chosen(ids)
        aligned = align_prompt(reply.prompt, ids, reader.tokens)
        reader.num_rows += len(aligned.pairs)
        found = Difference(worst=0.0, where="prompt")
        for position, theirs, error in self._errors(ask.form, aligned.pairs, exact):
            if self.wrong_from is None or position < self.wrong_from:
                ours = finite(exact[position - 1])
                found.add(position, error, finite(theirs), ours, limit=self.comparison.max_nats)
        return found

    def _errors(
        self, form: str, pairs: Iterable[tuple[int, Row]], exact: Floats
    ) -> Iterator[tuple[int, float, float]]:
        """Yield each prompt token's position, reported logprob and error, in nats.

        `exact` has the exact logprobs, in nats; exact[0] belongs to position 1.
        """
        has_filled = self.comparison.findings.has("filled-in")
        for position, row in pairs:
            if row.chosen is None:
                continue
            theirs = np.array([-np.inf if row.chosen.logprob is None else row.chosen.logprob])
            if has_filled and (theirs[0] == 0 or theirs[0] <= IMPOSSIBLE):
                continue
            error = distance(theirs, exact[position - 1 : position])
            error -= allowance_of(self.comparison.roundings.get(form), theirs)
            yield position, float(theirs[0]), max(float(error[0]), 0.0)

    # -- prompts -------------------------------------------------------------------------------------------

    def _probe(self, form: str, text: str = PROBE) -> Ask:
        """Return a short request whose log-probabilities are compared."""
        generated = 0 if form == self.session.prompt_form else PROBE_TOKENS
        return Ask(form=form, prompt=self._cut(text), max_tokens=generated, params={"temperature": 0})

    def _new_probe(self) -> Ask:
        """Return a probe with a unique beginning, so that no prefix of it is cached."""
        return self._probe(self.form, f"Note {secrets.token_hex(3)}. {PROBE}")

    def _neighbour(self, form: str, index: int) -> Ask:
        text = f"Letter number {index}: dear friend, " + "how are you? " * (index % 7)
        max_tokens = min(NEIGHBOUR_TOKENS, self.max_len // 4)
        params = {"temperature": 1.0, "seed": index}
        return Ask(form=form, prompt=self._cut(text), max_tokens=max_tokens, params=params)

    def _cut(self, text: str, share: int = 2) -> str:
        """Return the beginning of a text, cut to at most the server's context length / `share`."""
        return self.comparison.reader.tokens.cut(text, self.max_len // share)

    def _prompt_ask(self, ids: tuple[int, ...]) -> Ask:
        """Return a request with a prompt of ids, or of text if the server does not accept ids."""
        vocabulary = self.comparison.reader.tokens.vocabulary
        prompt = ids if self.session.takes_ids else vocabulary.bytes_of(ids).decode()
        return Ask(form=self.form, prompt=prompt, num_top=1)

    def _of_length(self, size: int) -> tuple[int, ...] | None:
        """Return a prompt of `size` tokens with a beginning of its own for each size.

        Returns None if a server that accepts only text would tokenize the prompt differently.
        """
        tokens = self.comparison.reader.tokens
        text = f"Chapter {size}. " + " ".join([PROBE, OTHER, CONTINUED] * (size // 24 + 1))
        ids = tokens.encode(text)[:size]
        if not self.session.takes_ids:  # a truncated text often tokenizes differently
            again = tokens.encode(tokens.vocabulary.bytes_of(ids).decode("utf-8", "replace"))
            return ids if len(ids) == size and again == ids else None
        return ids if len(ids) == size else None
