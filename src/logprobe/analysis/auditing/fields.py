"""Try the fields of OpenAI's API, with and without streaming: are they applied, refused, or silently ignored?

A field counts as answered if the reply shows its effect. The exact rows help to see it: if every token
sampled at temperature 2 is the most likely one, then `top_p: 0.01` was applied, since this is unlikely by
chance.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from logprobe.analysis.auditing.distributions import (
    Shaping,
    changed_logits,
    distributions,
    log_kept_mass,
    tempered,
)
from logprobe.analysis.auditing.endpoint import Refusal
from logprobe.analysis.auditing.forms import Ask, Reply
from logprobe.analysis.auditing.report import MAX_TEXT, Evidence, FieldAnswer
from logprobe.analysis.auditing.rows import align_completion
from logprobe.analysis.auditing.session import TRIAL_TEXT, WITHOUT_ROWS
from logprobe.errors import ServerError, UnreachableError
from logprobe.transport.http_client import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from logprobe.analysis.auditing.compare import Comparison
    from logprobe.analysis.auditing.session import Session
    from logprobe.analysis.measures import Floats

How: TypeAlias = Literal["whole", "stream"]
CHANCE: Final = 0.02  # tokens prove nothing if they are at least this likely without the field
MAX_AT_ONCE: Final = 4  # concurrent requests
NEAR: Final = 0.05  # nats; if two tokens differ by less, rounding decides which is the more likely one
TEXT: Final = "Once upon a time there was a small village by the sea, where"
REPEATS: Final = "the cat the cat the cat the cat the cat the"
HOT: Final = {"temperature": 2.0, "seed": 5}
COLD: Final = {"temperature": 0}


@dataclass(slots=True)
class Seen:
    """The reply to a trial, with the data that shows the effect of the trial's field."""

    params: Mapping[str, Any]
    reply: Reply
    ids: tuple[int, ...]
    # (T, V) exact log-probabilities at the generated tokens, nats; None if they prove nothing.
    rows: Floats | None
    near: float  # nats; logprobs that differ by less count as equal

    def own(self, rows: Floats) -> Floats:
        """Return the log-probabilities that `rows`, (T, V) nats, give the generated tokens, (T,) nats."""
        return rows[np.arange(len(self.ids)), list(self.ids)]

    def are_best(self, rows: Floats) -> bool:
        """Return True if each generated token is the most likely one in its row of `rows`, (T, V) nats."""
        return bool(np.all(rows.max(axis=1) - self.own(rows) <= self.near))


def _is_greedy(seen: Seen) -> bool | None:
    """Return True if every generated token is the most likely one; None if this is likely by chance."""
    if seen.rows is None:
        return None
    is_likely = float(np.exp(seen.rows.max(axis=1).sum())) >= CHANCE
    return False if not seen.are_best(seen.rows) else None if is_likely else True


def _is_within(seen: Seen) -> bool | None:
    """Return True if the requested truncation, before or after the temperature, keeps every generated token.

    Returns None if this is undecidable.
    """
    if seen.rows is None:
        return None
    asked = Shaping.of(seen.params)
    masses = []
    for shaping in (asked, replace(asked, temperature=1.0)):
        kept = distributions(seen.rows, shaping)["kept"]
        least = np.where(np.isfinite(kept), kept, np.inf).min(axis=1)
        if np.all(seen.own(tempered(seen.rows, shaping.divisor)) >= least - seen.near):
            masses.append(float(log_kept_mass(seen.rows, shaping).sum()))
    if not masses:
        return False
    return True if float(np.exp(max(masses))) < CHANCE else None


def _is_penalised(seen: Seen) -> bool | None:
    """Return True if the greedy tokens are the most likely ones only after penalties; None if undecidable."""
    if seen.rows is None:
        return None
    after = changed_logits(seen.rows, seen.params, seen.ids)["penalised"]
    is_after, is_raw = seen.are_best(after), seen.are_best(seen.rows)
    return None if is_after == is_raw else is_after


def _is_short(seen: Seen) -> bool:
    count = seen.reply.num_completion_tokens
    return bool((len(seen.reply.completion or ()) if count is None else count) <= seen.params["max_tokens"])


def _has_alternatives(seen: Seen) -> bool:
    return bool(seen.reply.completion) and all(row.alternatives for row in seen.reply.completion or ())


@dataclass(frozen=True, slots=True)
class Trial:
    """A request that tries one field, and the test for the field's effect.

    `params` has the field and `beside` the other parameters. `is_heard` returns None if the reply does not
    show whether the field was applied.
    """

    name: str
    params: Mapping[str, Any]
    is_heard: Callable[[Seen], bool | None]
    beside: Mapping[str, Any] = field(default_factory=lambda: COLD)
    max_tokens: int = 12
    text: str = TEXT
    hows: tuple[How, ...] = ("whole", "stream")

    def ask(self, form: str, how: How = "whole") -> Ask:
        """Return the request of this trial as a completion or a chat (`form`), whole or streamed (`how`)."""
        params = {**self.beside, **self.params}
        is_stream = how == "stream"
        return Ask(
            form=form,
            prompt=self.text,
            max_tokens=self.max_tokens,
            num_top=2,
            params=params,
            stream=is_stream,
        ).as_chat()


def trials(form: str, bias_id: int, bias_text: str, stop: str | None) -> list[Trial]:
    """Return all trials for completions or chats (`form`).

    `bias_id` and `bias_text` are the token for the trial of `logit_bias`, and `stop` is a word of the greedy
    completion, if known.
    """

    def is_biased(seen: Seen) -> bool:
        ids = seen.reply.completion_ids
        return seen.reply.text.count(bias_text) >= 5 if ids is None else bool(ids) and {*ids} == {bias_id}

    def is_stopped(seen: Seen) -> bool:
        return stop is not None and stop not in seen.reply.text[: -len(stop)]

    def has_echo(seen: Seen) -> bool:
        return seen.reply.text.strip().startswith(TEXT[:20])

    def has_usage(seen: Seen) -> bool:
        return seen.reply.has_usage

    usage, include = "stream_options.include_usage", {"stream_options": {"include_usage": True}}
    found = [
        Trial("temperature", {"temperature": 0}, _is_greedy, {}),
        Trial("top_p", {"top_p": 0.01}, _is_within, HOT),
        Trial("logit_bias", {"logit_bias": {str(bias_id): 100}}, is_biased, max_tokens=6),
        Trial("frequency_penalty", {"frequency_penalty": 2.0}, _is_penalised, text=REPEATS),
        Trial("presence_penalty", {"presence_penalty": 2.0}, _is_penalised, text=REPEATS),
        Trial("max_tokens", {"max_tokens": 3}, _is_short),
        Trial("n", {"n": 2}, lambda seen: seen.reply.num_choices == 2, HOT, max_tokens=4, hows=("whole",)),
        Trial("logprobs", {}, lambda seen: bool(seen.reply.completion), max_tokens=4),
        Trial("top_logprobs", {}, _has_alternatives, max_tokens=4),
        Trial(usage, include, has_usage, max_tokens=2, hows=("stream",)),
    ]
    found += [Trial("echo", {"echo": True}, has_echo, max_tokens=2)] if form == "completions" else []
    return found + ([] if stop is None else [Trial("stop", {"stop": [stop]}, is_stopped)])


@dataclass(slots=True)
class Fields:
    """Tries all fields on one server."""

    session: Session
    comparison: Comparison
    is_known: bool  # True if the server runs the model that the exact rows come from
    ignored: list[Evidence] = field(default_factory=list)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_AT_ONCE))

    async def run(self) -> list[FieldAnswer]:
        """Try every field on every route that the server answers, with and without streaming."""
        answers = []
        for form in ("completions", "chat"):
            if form in self.session.without_rows:
                name = f"{form}.logprobs"
                self._add_ignored(name, "whole", TRIAL_TEXT)
                answers.append(FieldAnswer(field=name, form="whole", answer="ignored", detail=WITHOUT_ROWS))
            if form in self.session.extras:
                self.session.tell(f"fields of {form}")
                tried = await self._trials(form)
                answers += await asyncio.gather(
                    *(self._answer(form, trial, how) for trial in tried for how in trial.hows)
                )
        if self.ignored:
            names = ", ".join(dict.fromkeys(evidence.ask.partition(" ")[0] for evidence in self.ignored))
            detail, count, of = printable(names, 400), len(self.ignored), len(answers)
            self.comparison.findings.add("ignored", detail, evidence=self.ignored, count=count, of=of)
        return answers

    async def _trials(self, form: str) -> list[Trial]:
        tokens = self.comparison.reader.tokens
        reply = await self.session.ask(Trial("", {}, _is_short).ask(form))
        text = reply.text if isinstance(reply, Reply) else ""
        words = [word for word in text.split()[1:] if word.isalnum() and word.isascii()]
        bias_id = tokens.of_word(" blue")
        return trials(form, bias_id, tokens.show(bias_id).strip(), words[0] if words else None)

    async def _answer(self, form: str, trial: Trial, how: How) -> FieldAnswer:
        """Send the request of one trial, and return the result."""
        name, ask = f"{form}.{trial.name}", trial.ask(form, how)
        reply = await self._try(ask)
        if not isinstance(reply, Reply):
            detail = printable(str(reply), MAX_TEXT)
            if isinstance(reply, Refusal) and not reply.is_failure:
                return FieldAnswer(field=name, form=how, answer="refused", detail=detail)
            title = "{count} requests fail that could have been answered or refused"
            evidence = [_evidence(name, how, ask.shown, detail)]
            self.comparison.findings.add("error", title, is_note=True, evidence=evidence)
            return FieldAnswer(field=name, form=how, answer="error", detail=detail)
        is_heard = trial.is_heard(self._seen(ask, reply))
        if is_heard is False and self.session.extras[form]:
            # Our extra fields may be the cause: with `return_token_ids`, vLLM omits the prompt from an echo.
            plain = await self._try(replace(ask, is_plain=True))
            if isinstance(plain, Reply):
                is_heard = trial.is_heard(self._seen(ask, plain))
        if is_heard is False:
            self._add_ignored(name, how, ask.shown)
            return FieldAnswer(field=name, form=how, answer="ignored", detail="200, without effect")
        detail = "" if is_heard else "200; whether it has an effect cannot be told"
        return FieldAnswer(field=name, form=how, answer="answered", detail=detail)

    async def _try(self, ask: Ask) -> Reply | Refusal | ServerError:
        """Send a request, and return the reply, the refusal, or the error if the reply cannot be read."""
        try:
            async with self.slots:
                return await self.session.ask(ask)
        except UnreachableError:
            raise
        except ServerError as error:
            return error

    def _seen(self, ask: Ask, reply: Reply) -> Seen:
        comparison, tokens = self.comparison, self.comparison.reader.tokens
        prompt_ids = tokens.encode_ask(ask) if reply.prompt_ids is None else reply.prompt_ids
        aligned = align_completion(reply, tokens)
        is_known = self.is_known and not (ask.is_chat and comparison.findings.has("template"))
        rows = None
        if is_known and prompt_ids and aligned.ids and not aligned.num_unknown:
            exact = comparison.reader.reference.rows(prompt_ids + aligned.ids, len(prompt_ids))
            rows = exact.astype(np.float64)
        return Seen(ask.params, reply, aligned.ids, rows, max(NEAR, 2 * comparison.max_nats))

    def _add_ignored(self, name: str, how: How, prompt: str) -> None:
        self.ignored.append(_evidence(name, how, prompt, "200"))


def _evidence(name: str, how: How, prompt: str, note: str) -> Evidence:
    return Evidence(ask=f"{name} ({how})", prompt=prompt, position=None, where="completion", note=note)
