"""Check a server's API: are OpenAI's fields applied, and are the texts and bytes in replies the tokens'?

No log-probabilities are computed; only the model's tokenizer is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logprobe.analysis.auditing.endpoint import Connection, Endpoint, Refusal
from logprobe.analysis.auditing.forms import CHAT_FORMS, Ask, Reply, Row
from logprobe.analysis.auditing.report import MAX_TEXT, Finding, Findings
from logprobe.analysis.auditing.run import CHATS, GENERATED, MAX_PROMPT_TOKENS, TEXTS, in_new_loop
from logprobe.analysis.auditing.session import WITHOUT_ROWS, Session
from logprobe.analysis.auditing.tokens import Tokens
from logprobe.errors import ServerError, UnreachableError
from logprobe.transport.http_client import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe.analysis.auditing.forms import Entry
    from logprobe.analysis.auditing.session import Extras, Progress
    from logprobe.analysis.scorer import Scorer

EXTRAS: Final[tuple[Extras, ...]] = ({"return_token_ids": True}, {})
REPLACEMENT: Final = "\ufffd"  # replaces bytes of an incomplete character
NEAR: Final = 0.2  # nats; rounding may reorder tokens that differ by less
TEXT: Final = "Once upon a time there was a small village by the sea, where"
REPEATS: Final = "the cat the cat the cat the cat the cat the"
HOT: Final[dict[str, Any]] = {"temperature": 2.0, "seed": 5}
COLD: Final = {"temperature": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceReport:
    """Departures of one endpoint from OpenAI's API."""

    endpoint: str
    model: str
    server: str | None  # `owned_by` of the model, usually the server's name
    requests: int
    # By name, such as "chat.top_p (stream)": "applied", "unclear", "ignored", or "refused" with the message.
    fields: dict[str, str]
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings without notes."""
        return tuple(one for one in self.findings if one.severity == "fault")

    def to_dict(self) -> dict[str, Any]:
        """Return the kinds of faults and all fields as JSON-compatible values."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return {"conformance": [one.kind for one in self.faults]} | values


def check_conformance(
    endpoint: str | Endpoint, llm: Scorer, *, model: str | None = None, progress: Progress | None = None
) -> ConformanceReport:
    """Try the fields of OpenAI's API on a server, and check the tokens' texts and bytes in its replies.

    Args:
        endpoint: an OpenAI-compatible server: its URL, or an `Endpoint` with a key and limits.
        llm: the model that the server runs, loaded here; only its tokenizer is used.
        model: the model's name on the server; None uses the first model that the server lists.
        progress: called with the number of requests done and the current check.

    Raises:
        ParameterError: an argument is invalid, or the server rejects the key.
        ServerError: the server cannot be reached, answers neither completions nor chats, or times out.
        MissingPackageError: httpx is not installed.
    """
    server = Endpoint(endpoint) if isinstance(endpoint, str) else endpoint

    async def run() -> ConformanceReport:
        async with Connection(server) as connection:
            num_ids = len(llm.text.vocabulary)
            session = Session(connection, num_ids, model, progress, EXTRAS)
            await session.meet()
            checks = Conformance(session, Tokens(llm.text))
            await checks.check_rows()
            # Fields that request token ids may change replies: vLLM then omits the prompt from an echo.
            session.extras = {form: {} for form in session.extras}
            await checks.try_fields()
            return ConformanceReport(
                endpoint=server.url,
                model=session.model or "",
                server=session.owner,
                requests=connection.num_requests,
                fields=checks.fields,
                findings=checks.findings.listed(),
            )

    return in_new_loop(run)


@dataclass(slots=True)
class Conformance:
    """Runs the checks on one server, and collects the results."""

    session: Session
    tokens: Tokens
    findings: Findings = field(default_factory=Findings)
    fields: dict[str, str] = field(default_factory=dict)

    # -- texts, bytes and alternatives ---------------------------------------------------------------------

    async def check_rows(self) -> None:
        """Check the rows in replies of every form that the server answers."""
        texts = [self.tokens.cut(one, MAX_PROMPT_TOKENS) for one in TEXTS if self.tokens.can_encode(one)]
        for form in self.session.extras:
            self.session.tell(form)
            for prompt in CHATS if form in CHAT_FORMS else texts:
                for params in (COLD, {"temperature": 1.0, "seed": 1}):
                    ask = Ask(form=form, prompt=prompt, max_tokens=GENERATED, params=params)
                    reply = await self._ask(ask)
                    if isinstance(reply, Reply):
                        self._check_reply(ask, reply)

    def _check_reply(self, ask: Ask, reply: Reply) -> None:
        prompt_ids = self.tokens.encode_ask(ask) if reply.prompt_ids is None else reply.prompt_ids
        for rows, ids in ((reply.prompt, prompt_ids), (reply.completion, reply.completion_ids)):
            known = ids if rows and ids and len(rows) == len(ids) else None
            for at, row in enumerate(rows or ()):
                if row is not None:
                    for kind, note in self._faults_of(ask, row, None if known is None else known[at]):
                        self.findings.add(kind, note, evidence=[ask.evidence(at, note=note)])

    def _faults_of(self, ask: Ask, row: Row, token_id: int | None) -> Iterator[tuple[str, str]]:
        """Yield the faults of a row as (kind, description); `token_id` is the chosen token, if known."""
        alternatives = row.alternatives or ()
        entries = [] if row.chosen is None or token_id is None else [(row.chosen, token_id)]
        for entry in alternatives:
            known = None if entry.token_id is None else self.tokens.id_of(entry)
            entries += [] if known is None else [(entry, known)]
        for entry, own_id in entries:
            if not self._is_right_text(entry, own_id):
                yield "text-wrong", f"text {entry.text!r:.40}, the token has {self.tokens.show(own_id)!r}"
            own = self.tokens.vocabulary.token_bytes(own_id)
            if not self._is_right_bytes(entry, own_id):
                yield "bytes-wrong", f"bytes {entry.data!r:.40}, the token has {own!r:.40}"
        # Servers that replace incomplete characters give several tokens the same bytes.
        is_whole = [entry for entry in alternatives if REPLACEMENT not in (entry.text or "")]
        ids = [one for one in map(self.tokens.id_of, is_whole) if one is not None]
        if len({*ids}) < len(ids):
            yield "ids-repeated", ""
        # In a map by text, tokens with the same text are one entry.
        is_map = any(entry.token_id is None and entry.data is None for entry in alternatives)
        if alternatives and not is_map and len(alternatives) < ask.num_top:
            yield "alternatives-cut", f"{len(alternatives)} of {ask.num_top}"

    def _is_right_text(self, entry: Entry, token_id: int) -> bool:
        """Return True if the entry's text is one that servers write for this token."""
        text, own = entry.text, self.tokens.vocabulary.token_bytes(token_id).decode("utf-8", "ignore")
        if not text or REPLACEMENT in text or text.strip() == own.strip():
            return True
        tokenizer, shown = self.tokens.edge.tokenizer, self.tokens.vocabulary.token_text(token_id)
        return text in {shown, tokenizer.decode([token_id]), tokenizer.convert_ids_to_tokens(token_id)}

    def _is_right_bytes(self, entry: Entry, token_id: int) -> bool:
        """Return True if the entry's bytes are this token's bytes, or empty for a special token."""
        data, own = entry.data, self.tokens.vocabulary.token_bytes(token_id)
        if data is None or data.lstrip() == own.lstrip() != b"" or data == own:
            return True
        return self.tokens.is_special(token_id) and not data

    # -- fields --------------------------------------------------------------------------------------------

    async def try_fields(self) -> None:
        """Try every field on every route that the server answers, with and without streaming."""
        for form in ("completions", "chat"):
            if self.session.absent.get(form) == WITHOUT_ROWS:
                self.fields[f"{form}.logprobs (whole)"] = "ignored"
            if form in self.session.extras:
                greedy, repeated = [await self._greedy(form, prompt) for prompt in (TEXT, REPEATS)]
                for trial in trials(form, greedy, repeated, self.tokens):
                    self.session.tell(f"{form}.{trial.name}")
                    for stream in trial.streams:
                        name = f"{form}.{trial.name} ({'stream' if stream else 'whole'})"
                        self.fields[name] = await self._answer(trial, replace(trial.ask, stream=stream))
        if ignored := [name for name, answer in self.fields.items() if answer == "ignored"]:
            detail = printable(", ".join(ignored), 400)
            self.findings.add("ignored", detail, count=len(ignored), of=len(self.fields))

    async def _greedy(self, form: str, prompt: str) -> str:
        reply = await self._ask(Ask(form=form, prompt=prompt, max_tokens=12, params=COLD).as_chat())
        return reply.text if isinstance(reply, Reply) else ""

    async def _answer(self, trial: Trial, ask: Ask) -> str:
        """Send the request of one trial, and return the answer as in `ConformanceReport.fields`."""
        reply = await self._ask(ask)
        if not isinstance(reply, Reply):
            return f"refused: {printable(str(reply), MAX_TEXT)}"
        is_applied = trial.is_applied(reply)
        return "unclear" if is_applied is None else "applied" if is_applied else "ignored"

    async def _ask(self, ask: Ask) -> Reply | Refusal | ServerError:
        """Send a request, and return the reply, the refusal, or the error if the reply cannot be read."""
        try:
            return await self.session.ask(ask)
        except UnreachableError:
            raise
        except ServerError as error:
            return error


@dataclass(frozen=True, slots=True)
class Trial:
    """A request that uses one field.

    `is_applied` tests for the field's effect; it returns None if the reply does not show whether there was an
    effect.
    """

    name: str
    ask: Ask
    is_applied: Callable[[Reply], bool | None]
    streams: tuple[bool, ...] = (False, True)


def trials(form: str, greedy: str, repeated: str, tokens: Tokens) -> Iterator[Trial]:
    """Yield the trials for completions or chats (`form`).

    `greedy` and `repeated` are the server's greedy completions of `TEXT` and `REPEATS`.
    """
    bias_id = tokens.of_word(" blue")
    bias_text = tokens.show(bias_id).strip()
    words = [word for word in greedy.split()[1:] if word.isalnum() and word.isascii()]

    def ask(max_tokens: int = 12, prompt: str = TEXT, **params: Any) -> Ask:
        params = {**COLD, **params}
        return Ask(form=form, prompt=prompt, max_tokens=max_tokens, num_top=2, params=params).as_chat()

    def is_changed(reply: Reply) -> bool | None:
        return True if reply.text != repeated else None  # a penalty may leave the text as it is

    def has_alternatives(reply: Reply) -> bool:
        return bool(reply.completion) and all(row.alternatives for row in reply.completion or ())

    yield Trial("temperature", ask(), _is_greedy)
    yield Trial("top_p", ask(**HOT, top_p=1e-6), _is_greedy)
    bias = ask(6, logit_bias={str(bias_id): 100})
    yield Trial("logit_bias", bias, lambda reply: reply.text.count(bias_text) >= 5)
    yield Trial("frequency_penalty", ask(prompt=REPEATS, frequency_penalty=2.0), is_changed)
    yield Trial("presence_penalty", ask(prompt=REPEATS, presence_penalty=2.0), is_changed)
    yield Trial("max_tokens", ask(3), lambda reply: len(reply.completion or ()) <= 3)
    yield Trial("n", ask(4, **HOT, n=2), lambda reply: reply.num_choices == 2, streams=(False,))
    yield Trial("logprobs", ask(4), lambda reply: bool(reply.completion))
    yield Trial("top_logprobs", ask(4), has_alternatives)
    usage = ask(2, stream_options={"include_usage": True})
    yield Trial("stream_options.include_usage", usage, lambda reply: reply.has_usage, streams=(True,))
    if form == "completions":
        yield Trial("echo", ask(2, echo=True), lambda reply: reply.text.strip().startswith(TEXT[:20]))
    if words:
        stop = words[0]
        yield Trial("stop", ask(stop=[stop]), lambda reply: stop not in reply.text[: -len(stop)])


def _is_greedy(reply: Reply) -> bool | None:
    """Return True if no alternative is more likely than the generated token; None without alternatives."""
    gaps = [
        entry.logprob - row.chosen.logprob
        for row in reply.completion or ()
        if row.chosen is not None and row.chosen.logprob is not None
        for entry in row.alternatives or ()
        if entry.logprob is not None
    ]
    return max(gaps) <= NEAR if gaps else None
