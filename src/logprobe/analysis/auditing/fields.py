"""What becomes of each field that is asked: answered, refused, or taken with 200 and dropped.

A field counts as answered where the reply shows its effect, by our own rows if need be: that every token of a
draw at temperature 2 is the likeliest one says that `top_k: 1` was heard, where chance would hardly do it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from logprobe.analysis.auditing.dialects import Ask, Refusal, Reply
from logprobe.analysis.auditing.distributions import distributions, log_kept_mass, tempered
from logprobe.analysis.auditing.endpoint import printable
from logprobe.analysis.auditing.reference import changed_logits, shaping_of
from logprobe.analysis.auditing.report import MAX_TEXT, Evidence, FieldAnswer
from logprobe.analysis.auditing.rows import align_completion
from logprobe.analysis.auditing.session import TRIAL_CHAT, TRIAL_TEXT
from logprobe.errors import ServerError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logprobe.analysis.auditing.findings import Findings
    from logprobe.analysis.auditing.rows import Reader
    from logprobe.analysis.auditing.session import Session

Verdict: TypeAlias = "Literal['answered', 'ignored'] | None"
CHANCE: Final = 0.02  # of tokens that would be so without the field, above which they show nothing
AT_ONCE: Final = 4
NEAR: Final = 0.05  # nats between two tokens, below which rounding may choose either
TEXT: Final = "Once upon a time there was a small village by the sea, where"
REPEATS: Final = "the cat the cat the cat the cat the cat the"
MAX_TOKENS: Final = 12


@dataclass(slots=True)
class Heard:
    """One trial's reply, with what it takes to judge it."""

    trial: Trial
    reply: Reply
    prompt_ids: tuple[int, ...]
    reader: Reader
    is_known: bool
    near: float  # nats between two tokens, below which rounding may choose either
    again: Reply | None = None

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The generated ids; None where they cannot be told."""
        aligned = align_completion(self.reply, self.reader.tokens)
        return None if aligned.is_cut or not aligned.ids else aligned.ids

    def rows(self) -> tuple[np.ndarray, tuple[int, ...]] | None:
        """Our rows of the generated tokens."""
        ids = self.ids if self.is_known else None
        if ids is None or not self.prompt_ids:
            return None
        return self.reader.reference.rows(self.prompt_ids + ids, len(self.prompt_ids)), ids


@dataclass(frozen=True, slots=True)
class Trial:
    """One field, how it is asked, and how its effect is seen; `is_standard`: OpenAI's own."""

    name: str
    params: dict[str, Any]
    is_heard: Callable[[Heard], Verdict]
    is_standard: bool = True
    forms: tuple[str, ...] = ("completions", "chat")
    base: dict[str, Any] | None = None  # what is asked beside it
    max_tokens: int = MAX_TOKENS
    text: str = TEXT
    num_top: int = 2
    is_quick: bool = True
    streams: bool = True
    twice: bool = False


def _greedy(heard: Heard) -> Verdict:
    """Whether every token is the likeliest, where chance would hardly have it so."""
    found = heard.rows()
    if found is None:
        return None
    rows, ids = found
    raw = rows.astype(np.float64)
    best, own = raw.max(axis=1), raw[np.arange(len(ids)), list(ids)]
    if np.any(best - own > heard.near):
        return "ignored"
    return "answered" if float(np.exp(best.sum())) < CHANCE else None


def _within(heard: Heard) -> Verdict:
    """Whether every token is of those that a truncation keeps, before or after the temperature."""
    found = heard.rows()
    if found is None:
        return None
    rows, ids = found
    asked = shaping_of({**(heard.trial.base or {}), **heard.trial.params})
    places = np.arange(len(ids))
    left = []
    for shaping in (asked, replace(asked, temperature=1.0)):
        kept = distributions(rows, shaping)["kept"]
        least = np.where(np.isfinite(kept), kept, np.inf).min(axis=1)
        own = tempered(rows, shaping.divisor)[places, list(ids)]
        if np.all(own >= least - heard.near):
            left.append(float(log_kept_mass(rows, shaping).sum()))
    if not left:
        return "ignored"
    return "answered" if float(np.exp(max(left))) < CHANCE else None


def _biased(heard: Heard) -> Verdict:
    """Whether what was made far likelier than all others is all that was drawn."""
    (key,) = heard.trial.params["logit_bias"]
    ids = heard.reply.completion_ids
    if ids is not None:
        return "answered" if ids and set(ids) == {int(key)} else "ignored"
    text = heard.reader.tokens.vocabulary.token_text(int(key)).strip()
    return "answered" if heard.reply.text.count(text) >= heard.trial.max_tokens - 1 else "ignored"


def _penalised(heard: Heard) -> Verdict:
    """Whether each greedy token is the likeliest after penalties, and not without them."""
    found = heard.rows()
    if found is None:
        return None
    rows, ids = found
    places = np.arange(len(ids))
    after = changed_logits(rows, heard.trial.params, ids)["penalised"]
    is_after = np.all(after.max(axis=1) - after[places, list(ids)] <= heard.near)
    is_raw = np.all(rows.max(axis=1) - rows[places, list(ids)] <= heard.near)
    if is_after and is_raw:
        return None
    return "answered" if is_after else "ignored" if is_raw else None


def _short(heard: Heard) -> Verdict:
    asked = next(iter(heard.trial.params.values()))
    count = heard.reply.num_completion_tokens
    if count is None:
        count = len(heard.reply.completion or ())
    return "answered" if count <= asked else "ignored"


def _stopped(heard: Heard) -> Verdict:
    (stop,) = heard.trial.params["stop"]
    return "ignored" if stop in heard.reply.text[: -len(stop)] else "answered"


def _two(heard: Heard) -> Verdict:
    return "answered" if len(heard.reply.texts) == 2 else "ignored"


def _same_again(heard: Heard) -> Verdict:
    if heard.again is None:
        return None
    return "answered" if heard.reply.text == heard.again.text else "ignored"


def _has_rows(heard: Heard) -> Verdict:
    return "answered" if heard.reply.completion or heard.reply.prompt else "ignored"


def _has_alternatives(heard: Heard) -> Verdict:
    rows = [row for row in heard.reply.completion or () if row is not None]
    return "answered" if rows and all(row.alternatives for row in rows) else "ignored"


def _has_prompt_rows(heard: Heard) -> Verdict:
    return "answered" if heard.reply.prompt and any(heard.reply.prompt) else "ignored"


def _echoed(heard: Heard) -> Verdict:
    return "answered" if heard.reply.text.strip().startswith(TEXT[:20]) else "ignored"


def _has_ids(heard: Heard) -> Verdict:
    return "answered" if heard.reply.completion_ids is not None else "ignored"


def _has_usage(heard: Heard) -> Verdict:
    return "answered" if heard.reply.has_usage else "ignored"


def _is_object(heard: Heard) -> Verdict:
    try:
        value = json.loads(heard.reply.text)
    except ValueError:
        return "ignored"
    return "answered" if isinstance(value, dict) and value.get("colour") == "mauve" else "ignored"


def _is_digits(heard: Heard) -> Verdict:
    text = heard.reply.text.strip()
    return "answered" if text.isdecimal() and len(text) == 4 else "ignored"


def _among(heard: Heard) -> Verdict:
    allowed = set(heard.trial.params["allowed_token_ids"])
    ids = heard.ids
    return None if ids is None else "answered" if set(ids) <= allowed else "ignored"


def _never(heard: Heard) -> Verdict:
    """A field that no server knows and that has no effect: it should have been refused."""
    del heard
    return "ignored"


SCHEMA: Final = {
    "type": "object",
    "properties": {"colour": {"enum": ["mauve"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
HOT: Final = {"temperature": 2.0, "seed": 5}
COLD: Final = {"temperature": 0}


def trials(bias_id: int, other_id: int, stop: str | None) -> list[Trial]:
    """Every field that is looked at; `stop` is a word of the form's own greedy text."""
    found = [
        Trial("temperature", {"temperature": 0}, _greedy),
        Trial("top_p", {"top_p": 0.01}, _within, base=HOT),
        Trial("logit_bias", {"logit_bias": {str(bias_id): 100}}, _biased, base=COLD, max_tokens=6),
        Trial("frequency_penalty", {"frequency_penalty": 2.0}, _penalised, base=COLD, text=REPEATS),
        Trial("presence_penalty", {"presence_penalty": 2.0}, _penalised, base=COLD, text=REPEATS),
        Trial("max_tokens", {"max_tokens": 3}, _short, base=COLD),
        Trial("n", {"n": 2}, _two, base=HOT, max_tokens=4, streams=False),
        Trial("seed", {"seed": 5}, _same_again, base={"temperature": 1.5}, twice=True),
        Trial("logprobs", {}, _has_rows, base=COLD, max_tokens=4),
        Trial("top_logprobs", {}, _has_alternatives, base=COLD, max_tokens=4),
        Trial("echo", {"echo": True}, _echoed, forms=("completions",), base=COLD, max_tokens=2),
        Trial(
            "stream_options.include_usage",
            {"stream_options": {"include_usage": True}},
            _has_usage,
            base=COLD,
            max_tokens=2,
        ),
        Trial(
            "response_format",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "colour", "schema": SCHEMA, "strict": True},
                }
            },
            _is_object,
            forms=("chat",),
            base=COLD,
            max_tokens=40,
            is_quick=False,
        ),
    ]
    if stop is not None:
        found.append(Trial("stop", {"stop": [stop]}, _stopped, base=COLD))
    further = [
        Trial("top_k", {"top_k": 1}, _within, base=HOT),
        Trial("min_p", {"min_p": 1.0}, _within, base=HOT),
        Trial("prompt_logprobs", {"prompt_logprobs": 1}, _has_prompt_rows, base=COLD, max_tokens=1),
        Trial("return_token_ids", {"return_token_ids": True}, _has_ids, base=COLD, max_tokens=2),
        Trial(
            "allowed_token_ids",
            {"allowed_token_ids": [bias_id, other_id]},
            _among,
            base=COLD,
            max_tokens=4,
        ),
        Trial("guided_regex", {"guided_regex": "[0-9]{4}"}, _is_digits, base=COLD),
        Trial(
            "structured_outputs.regex", {"structured_outputs": {"regex": "[0-9]{4}"}}, _is_digits, base=COLD
        ),
        Trial("a field that nobody knows", {"no_such_field": 1}, _never, base=COLD, max_tokens=1),
    ]
    return found + [replace(trial, is_standard=False) for trial in further]


@dataclass(slots=True)
class Fields:
    """The trials of one server, and what became of them."""

    session: Session
    reader: Reader
    findings: Findings
    is_quick: bool
    is_known: bool  # the server runs the model that our rows are of
    max_nats: float
    dropped: list[tuple[str, bool, Evidence]] = field(default_factory=list)
    num_asked: int = 0

    async def run(self) -> list[FieldAnswer]:
        """Every field in every route, whole and streamed."""
        forms = [form for form in ("completions", "chat") if form in self.session.extras]
        known = [form for form in ("completions", "chat") if form in self.session.without_rows]
        answers = []
        for form in known:
            name, detail = f"{form}.logprobs", "200, and no row"
            answers.append(FieldAnswer(field=name, form="whole", answer="ignored", detail=detail))
            prompt = TRIAL_TEXT if form == "completions" else TRIAL_CHAT[0]["content"]
            self._ignored(name, "whole", prompt, is_standard=True)
        stop: dict[str, str] = {}
        for form in forms:
            reply = await self.session.ask(self._ask(form, TEXT, COLD, MAX_TOKENS, 2))
            if isinstance(reply, Reply):
                # Some of it that is whole characters.
                words = [word for word in reply.text.split()[1:] if word.isalnum() and word.isascii()]
                if words:
                    stop[form] = words[0]
        tokens = self.reader.tokens
        bias_id, other_id = tokens.word(" blue"), tokens.word(" red")
        for form in forms:
            listed = trials(bias_id, other_id, stop.get(form))
            chosen = [
                (trial, streams)
                for trial in listed
                if form in trial.forms and (trial.is_quick or not self.is_quick)
                for streams in (False, True)
                if (not streams or trial.streams) and (streams or "stream_options" not in trial.params)
            ]
            self.session.tell(f"fields of {form}")
            asks = [
                self._ask(
                    form,
                    trial.text,
                    {**(trial.base or {}), **trial.params},
                    trial.max_tokens,
                    trial.num_top,
                    stream,
                )
                for trial, stream in chosen
            ]
            replies = await self._together(asks)
            twice = [ask for (trial, _), ask in zip(chosen, asks, strict=True) if trial.twice]
            again = iter(await self._together(twice))
            for (trial, stream), ask, one in zip(chosen, asks, replies, strict=True):
                second = next(again) if trial.twice else None
                answers.append(await self._judge(trial, form, stream, ask, one, second))
        self.num_asked = len(answers)
        self._note_ignored()
        return answers

    async def _together(self, asks: Sequence[Ask]) -> list[Reply | Refusal | ServerError]:
        """Replies, or how each could not be read."""
        slots = asyncio.Semaphore(AT_ONCE)

        async def in_turn(ask: Ask) -> Reply | Refusal | ServerError:
            async with slots:
                try:
                    return await self.session.ask(ask)
                except UnreachableError:
                    raise
                except ServerError as error:
                    return error

        return list(await asyncio.gather(*map(in_turn, asks)))

    @staticmethod
    def _ask(
        form: str, text: str, params: dict[str, Any], max_tokens: int, num_top: int, stream: bool = False
    ) -> Ask:
        prompt: Any = text if form == "completions" else ({"role": "user", "content": text},)
        return Ask(
            form=form, prompt=prompt, max_tokens=max_tokens, num_top=num_top, params=params, stream=stream
        )

    def _prompt_ids(self, ask: Ask, reply: Reply) -> tuple[int, ...]:
        if reply.prompt_ids is not None:
            return reply.prompt_ids
        return self.reader.tokens.encode_ask(ask)

    async def _judge(
        self,
        trial: Trial,
        form: str,
        stream: bool,
        ask: Ask,
        reply: Reply | Refusal | ServerError,
        again: Reply | Refusal | ServerError | None,
    ) -> FieldAnswer:
        name, how = f"{form}.{trial.name}", "stream" if stream else "whole"
        if not isinstance(reply, Reply):
            is_failure = isinstance(reply, ServerError) or reply.is_failure
            answer = "error" if is_failure else "refused"
            if is_failure:
                self.findings.add(
                    "error",
                    "{count} requests fail that could have been answered or refused",
                    severity="note",
                    evidence=[
                        Evidence(
                            ask=f"{name}, {how}",
                            prompt=ask.shown,
                            position=None,
                            where="completion",
                            note=printable(str(reply), MAX_TEXT),
                        )
                    ],
                )
            return FieldAnswer(field=name, form=how, answer=answer, detail=printable(str(reply), MAX_TEXT))  # type: ignore[arg-type]
        verdict = self._verdict(trial, form, ask, reply, again)
        if verdict == "ignored" and not trial.twice and self.session.extras[form]:
            # Our own extras may be the cause: with `return_token_ids`, vLLM leaves the prompt out of an echo.
            (plain,) = await self._together([replace(ask, is_plain=True)])
            if isinstance(plain, Reply):
                verdict = self._verdict(trial, form, ask, plain, None)
        if verdict == "ignored":
            self._ignored(name, how, ask.shown, is_standard=trial.is_standard)
        detail = {
            None: "200; whether it has an effect cannot be told",
            "ignored": "200, without effect",
            "answered": "",
        }[verdict]
        return FieldAnswer(field=name, form=how, answer=verdict or "answered", detail=detail)  # type: ignore[arg-type]

    def _verdict(
        self, trial: Trial, form: str, ask: Ask, reply: Reply, again: Reply | Refusal | ServerError | None
    ) -> Verdict:
        heard = Heard(
            trial,
            reply,
            self._prompt_ids(ask, reply),
            self.reader,
            self.is_known and not (form == "chat" and self.findings.has("template")),
            max(NEAR, 2 * self.max_nats),
            again if isinstance(again, Reply) else None,
        )
        return trial.is_heard(heard)

    def _ignored(self, name: str, how: str, prompt: str, *, is_standard: bool) -> None:
        is_wrong = is_standard and not name.endswith(".seed")
        evidence = Evidence(
            ask=f"{name} ({how})", prompt=prompt, position=None, where="completion", note="200"
        )
        self.dropped.append((name, is_wrong, evidence))

    def _note_ignored(self) -> None:
        for is_wrong, what in ((True, "fields"), (False, "fields that not every server has")):
            found = [(name, evidence) for name, wrong, evidence in self.dropped if wrong is is_wrong]
            if found:
                names = ", ".join(dict.fromkeys(name for name, _ in found))
                self.findings.add(
                    "ignored",
                    f"{what} are taken with 200 and have no effect: {printable(names, 400)}",
                    severity="fault" if is_wrong else "note",
                    evidence=[evidence for _, evidence in found],
                    count=len(found),
                    of=self.num_asked,
                )
