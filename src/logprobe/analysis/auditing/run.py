"""`audit`: send requests to a server, compare the replies with the exact rows, and report where they differ.

Requests are sent one at a time, except the concurrent ones of `steady` and the trials of `fields`.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from logprobe.analysis.auditing.changes import compare_with_before, stored
from logprobe.analysis.auditing.endpoint import Connection, Endpoint
from logprobe.analysis.auditing.fields import Fields
from logprobe.analysis.auditing.findings import Findings
from logprobe.analysis.auditing.fit import (
    BETTER,
    allowance_of,
    cause_of,
    errors_of,
    fit,
    judge,
    mark_filled,
    rounding_of,
)
from logprobe.analysis.auditing.forms import CHAT_FORMS, PROMPT_FORMS, Ask, Refusal, Reply
from logprobe.analysis.auditing.reference import Reference
from logprobe.analysis.auditing.report import MAX_TEXT, AuditReport, Errors, Evidence, StoredPrompt
from logprobe.analysis.auditing.rows import Reader, check_alternatives
from logprobe.analysis.auditing.session import WITHOUT_ROWS, Session
from logprobe.analysis.auditing.steady import Steady
from logprobe.analysis.auditing.tokens import Tokens
from logprobe.errors import ServerError, UnreachableError, require
from logprobe.transport.http_client import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from logprobe.analysis.auditing.fit import Fitted, Group
    from logprobe.analysis.auditing.report import Where
    from logprobe.analysis.scorer import Scorer

_Rows: TypeAlias = "tuple[Where, Ask, Reply]"
MAX_NATS: Final = 1e-3
MAX_TEXTS: Final = 32
MAX_PROMPT_TOKENS: Final = 48  # of a prompt whose whole rows are compared
NUM_TOP: Final = 5
GENERATED: Final = 12
TEXTS: Final = (
    "The harbour was quiet in the early light, and the boats lay still.",
    "def area(width, height):\n    return width * height\n\nprint(area(3,",
    "In 1969, on 20 July, two people walked on the Moon for 2 hours and 31 minutes",
    "Das Wetter in München ist heute schön; à Paris, il pleut déjà 🌊 你好",
    "the cat the cat the cat the cat the cat the",
    "Q: What is the capital of France?\nA:",
)
CHATS: Final = (
    ({"role": "user", "content": "What is the capital of France? Answer with one word."},),
    (
        {"role": "system", "content": "You answer in short sentences."},
        {"role": "user", "content": "Name three colours."},
    ),
)
OF_ANOTHER: Final = (
    "does-not-fit",
    "shifted",
    "temperature-unasked",
    "renormalised-unasked",
    "log-base",
    "probabilities",
    "bos",
    "lora-prompt",
    "lora-ignored",
)
"""Faults after which the exact rows do not predict what the server should return."""
PLAIN: Final[tuple[dict[str, Any], ...]] = ({"temperature": 0}, {"temperature": 1.0, "seed": 1})
SHAPES: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0.5, "seed": 2},
    {"temperature": 0.7, "top_p": 0.8, "seed": 3},
    {"temperature": 1.0, "frequency_penalty": 0.7, "presence_penalty": 0.3, "seed": 4},
    {"temperature": 1.0, "logit_bias": {" the": 3.0, " a": -2.0}, "seed": 5},
    {"temperature": 0.6, "top_p": 0.9, "frequency_penalty": 0.5, "seed": 6},
    {"temperature": 1.3, "top_k": 8, "seed": 7},
)
CHAT_SHAPES: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0},
    {"temperature": 0.5, "top_p": 0.9, "seed": 8},
)
SYSTEMS: Final = ("You are a helpful assistant.", "")
"""System prompts that servers are known to add."""


def audit(
    endpoint: str | Endpoint,
    llm: Scorer,
    *,
    model: str | None = None,
    texts: Sequence[str] | None = None,
    lora: str | None = None,
    base: Scorer | None = None,
    before: AuditReport | None = None,
    max_nats: float = MAX_NATS,
    quick: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> AuditReport:
    """Compare the log-probabilities of a server with the same rows computed exactly.

    Args:
        endpoint: an OpenAI-compatible server: its URL, or an `Endpoint` with a key and limits.
        llm: the same weights, loaded here; its rows are the reference.
        model: the model's name on the server; None: the first that the server lists.
        texts: prompts; None: six built-in ones, or those of `before`.
        lora: the server's name for the LoRA weights that `llm` runs with.
        base: the model without the LoRA weights; None: `llm.with_lora(None)`.
        before: an earlier report of the same endpoint, to find what changed.
        max_nats: maximum difference from the reference that passes, nats; a bfloat16 server needs about 0.3.
        quick: test fewer prompt lengths and fewer concurrent requests.
        progress: called with the number of requests done, the number planned, and the current check.

    Raises:
        ParameterError: a value cannot be used, `lora` is set without its weights here, or the server rejects
            the key.
        ServerError: the server cannot be reached, answers no known form, or times out.
        ModelError: httpx is not installed.
    """
    require(max_nats > 0, "max_nats", "must be positive", got=max_nats)
    is_texts = texts is None or (
        not isinstance(texts, str)
        and len(texts) > 0
        and all(isinstance(text, str) and text for text in texts)
    )
    require(is_texts, "texts", "must be a list of texts that are not empty", got=texts)
    if base is None and lora is not None:
        remedy = "give llm.with_lora(NAME), or base beside merged weights"
        require(llm.lora is not None, "lora", f"needs an llm that runs on these weights: {remedy}")
        base = llm.with_lora(None)  # type: ignore[attr-defined]
    run = _Run(
        endpoint=Endpoint(endpoint) if isinstance(endpoint, str) else endpoint,
        tokens=Tokens(llm.text),
        llm=llm,
        base=base,
        model=model,
        lora=lora,
        texts=None if texts is None else tuple(texts[:MAX_TEXTS]),
        before=before,
        max_nats=max_nats,
        is_quick=quick,
        progress=progress,
    )
    return _run_to_end(run.report())


def _run_to_end(work: Coroutine[Any, Any, AuditReport]) -> AuditReport:
    """Run a coroutine, in a new thread if this thread already runs an event loop (notebooks)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, thread_name_prefix="logprobe-audit") as pool:
        return pool.submit(asyncio.run, work).result()


@dataclass(slots=True, kw_only=True)
class _Run:
    """One audit."""

    endpoint: Endpoint
    tokens: Tokens
    llm: Scorer
    base: Scorer | None
    model: str | None
    lora: str | None
    texts: tuple[str, ...] | None
    before: AuditReport | None
    max_nats: float
    is_quick: bool
    progress: Callable[[int, int, str], None] | None
    findings: Findings = field(default_factory=Findings)
    errors: list[Errors] = field(default_factory=list)
    distributions: dict[str, str] = field(default_factory=dict)
    stored: list[StoredPrompt] = field(default_factory=list)

    async def report(self) -> AuditReport:
        """Send the requests, compare the replies, and return the report."""
        async with Connection(self.endpoint) as connection:
            server = await self._meet(connection)
            num_ids = len(self.llm.text.vocabulary)
            session = Session(connection, num_ids, self.lora or self.model, progress=self.progress)
            session.planned = 110 if self.is_quick else 170
            await session.meet()
            self._note_forms(session)
            reader = Reader(self.tokens, Reference(self.llm), self.findings)
            replies = await self._ask_all(session)
            session.tell("comparing")
            roundings = self._roundings(replies)
            self._compare(reader, replies, roundings)
            is_known = not self.findings.has(*OF_ANOTHER)
            steady = Steady(
                session=session,
                reader=reader,
                findings=self.findings,
                max_nats=self.max_nats,
                max_len=self._max_len(),
                is_quick=self.is_quick,
                prompt_fits=is_known,
                roundings=roundings,
            )
            await steady.run()
            fields = await Fields(session, reader, self.findings, is_known, self.max_nats).run()
        if self.before is not None:
            compare_with_before(self.before, self.stored, self.findings, self.max_nats)
        if reader.num_unknown:
            self.findings.add(
                "unidentified",
                "{count} entries are of tokens that cannot be identified by their id, bytes or text",
                severity="note",
                count=reader.num_unknown,
                of=max(reader.num_rows, 1),
            )
        return AuditReport(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            endpoint=self.endpoint.url,
            model=self.model or "",
            lora=self.lora,
            server=server,
            ours=reader.reference.info,
            max_nats=self.max_nats,
            asks=tuple(dict.fromkeys(ask.label for ask, _ in replies)),
            requests=connection.num_requests,
            rows=reader.num_rows,
            distributions=self.distributions,
            errors=tuple(self.errors),
            steadiness=tuple(steady.rows),
            fields=tuple(fields),
            findings=self.findings.listed(),
            stored=tuple(self.stored),
            worst_nats=max((error.worst for error in self.errors), default=0.0),
        )

    def _max_len(self) -> int:
        return int(self.llm.engine.capabilities().max_model_len)

    async def _meet(self, connection: Connection) -> str | None:
        """Find the model's name, and return the server's name and version as it states them."""
        listed = await connection.get("/v1/models")
        data = listed.value.get("data") if listed.is_ok and isinstance(listed.value, dict) else None
        first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
        if self.model is None and isinstance(first.get("id"), str):
            self.model = first["id"]
        words = [first.get("owned_by")]
        for path, name in (("/version", "version"), ("/props", "build_info")):
            try:
                answer = await connection.get(path)
            except UnreachableError:
                raise
            except ServerError:  # other servers serve HTML at this path
                continue
            words.append(answer.value.get(name) if answer.is_ok and isinstance(answer.value, dict) else None)
        return printable(" ".join(word for word in words if isinstance(word, str)), MAX_TEXT) or None

    def _note_forms(self, session: Session) -> None:
        for form, message in session.refused.items():
            title = f"the server has no {form}: {printable(message, MAX_TEXT)}"
            self.findings.add("form", title, severity="note")
        for form in session.without_rows:
            if form not in {"completions", "chat"}:  # `fields` reports these as faults
                self.findings.add("form", f"{form}: {WITHOUT_ROWS}", severity="note")

    # -- asking --------------------------------------------------------------------------------------------

    async def _ask_all(self, session: Session) -> list[tuple[Ask, Reply]]:
        replies = []
        was_generating = True
        for ask in list(self._asks(session)):
            is_prompt = ask.form in PROMPT_FORMS
            if is_prompt and was_generating:
                await session.settle()
            was_generating = not is_prompt
            reply = await session.ask(ask)
            if isinstance(reply, Reply):
                replies.append((ask, reply))
            else:
                self._note_refused(ask, reply)
            session.tell(ask.label)
        return replies

    def _note_refused(self, ask: Ask, refusal: Refusal) -> None:
        kind = "error" if refusal.is_failure else "form"
        evidence = Evidence(
            ask=ask.label, prompt=ask.shown, position=None, where="completion", note=str(refusal)
        )
        title = f"{ask.label} is not answered ({{count}} requests)"
        self.findings.add(kind, title, severity="note", evidence=[evidence])

    def _asks(self, session: Session) -> Iterator[Ask]:
        """Yield every request whose whole rows are compared, prompts first."""
        texts = self._texts()
        for form in PROMPT_FORMS:
            if form in session.extras:
                yield from (Ask(form=form, prompt=text, num_top=NUM_TOP) for text in texts)
                yield Ask(
                    form=form, prompt=texts[0], num_top=NUM_TOP, params={"temperature": 0.5, "top_p": 0.9}
                )
        if "completions" in session.extras:
            shaped = [(shape, text) for shape in PLAIN for text in texts]
            shaped += [(shape, text) for shape in SHAPES for text in (texts[0], texts[-1])]
            for shape, text in shaped:
                params = dict(shape)
                if bias := params.get("logit_bias"):
                    ids = {word: self.tokens.encode_plain(word.encode())[0] for word in bias}
                    params["logit_bias"] = {str(ids[word]): value for word, value in bias.items()}
                yield Ask(
                    form="completions", prompt=text, max_tokens=GENERATED, num_top=NUM_TOP, params=params
                )
        for form in CHAT_FORMS:
            if form in session.extras and self.tokens.has_template:
                for shape in CHAT_SHAPES:
                    for chat in CHATS:
                        yield Ask(form=form, prompt=chat, max_tokens=GENERATED, num_top=NUM_TOP, params=shape)

    def _texts(self) -> tuple[str, ...]:
        """Return the prompts, cut to the length that is compared."""
        texts = self.texts
        if texts is None and self.before is not None:
            prompts = [prompt for prompt in self.before.stored if _form_of(prompt.ask) not in CHAT_FORMS]
            stored_texts = dict.fromkeys(self.tokens.text_of(prompt.token_ids) for prompt in prompts)
            texts = tuple(text for text in stored_texts if text)
        max_tokens = min(MAX_PROMPT_TOKENS, self._max_len() - GENERATED - 2)
        return tuple(
            self.tokens.cut(text, max_tokens) for text in texts or filter(self.tokens.can_encode, TEXTS)
        )

    # -- comparing -----------------------------------------------------------------------------------------

    def _compare(self, reader: Reader, replies: list[tuple[Ask, Reply]], roundings: dict[str, str]) -> None:
        """Compare ask by ask; completions first, as their errors help to judge the layout of chats."""
        labels: dict[tuple[str, Where], list[tuple[Ask, Reply]]] = {}
        for ask, reply in replies:
            where: Where = "prompt" if ask.wants_prompt else "completion"
            labels.setdefault((ask.label, where), []).append((ask, reply))
        for (_, where), pairs in labels.items():
            groups = [self._group(reader, where, ask, reply) for ask, reply in pairs]
            fitted = fit([group for group in groups if group is not None], self.tokens)
            if fitted is None:
                continue
            if fitted.ask.form in roundings:
                fitted.allowance = allowance_of(roundings[fitted.ask.form], fitted.theirs)
            judge(fitted, self.findings, self.max_nats)
            check_alternatives(fitted, self.findings, self.max_nats)
            self.distributions[fitted.label] = fitted.name
            self.errors += errors_of(fitted)
            self.stored += stored(fitted)

    def _roundings(self, replies: list[tuple[Ask, Reply]]) -> dict[str, str]:
        """Return, by form, the precision that numbers are rounded to, if any."""
        numbers: dict[str, list[float]] = {}
        for ask, reply in replies:
            for row in (*(reply.prompt or ()), *(reply.completion or ())):
                entries = () if row is None else (row.chosen, *(row.alternatives or ()))
                known = [
                    entry.logprob for entry in entries if entry is not None and entry.logprob is not None
                ]
                numbers.setdefault(ask.form, []).extend(known)
        found = {}
        for form, values in numbers.items():
            rounding = rounding_of(np.array(values))
            if rounding is None:
                continue
            found[form] = rounding
            # Rounding changes a number by at most half as much as truncation.
            worst = float(allowance_of(rounding, np.array(values)).max()) / 2
            self.findings.add(
                "rounded",
                f"numbers are rounded to {rounding}, up to {{worst}} nats",
                severity="fault" if worst > self.max_nats else "note",
                worst=worst,
                count=len(values),
                of=len(values),
                evidence=[
                    Evidence(ask=form, prompt="", position=None, where="completion", theirs=value)
                    for value in values[:3]
                ],
            )
        return found

    def _group(self, reader: Reader, where: Where, ask: Ask, reply: Reply) -> Group | None:
        """Return a reply's numbers with the exact rows of the prompt that they fit, sent or not."""
        own = self.tokens.encode_ask(ask)
        ids = own if reply.prompt_ids is None else reply.prompt_ids
        if own and ids != own:
            self._note_other_ids(ask, own, ids)
        rows = (where, ask, reply)
        group = reader.read(*rows, ids, is_quiet=True)
        if group is None or not self._is_off(group):
            return reader.read(*rows, ids)
        found = self._of_base(rows, ids, group) or self._after_other_prompt(reader, rows, ids, own, group)
        return found or reader.read(*rows, ids)

    def _is_off(self, group: Group) -> bool:
        """Return whether most numbers of a reply fit no distribution and no known cause."""
        fitted = fit([group], self.tokens)
        if fitted is None:
            return False
        mark_filled(fitted, self.max_nats)
        rounding = rounding_of(fitted.theirs)
        if rounding is not None:
            fitted.allowance = allowance_of(rounding, fitted.theirs)
        errors = (fitted.errors - fitted.allowance)[~fitted.is_filled]
        is_off = len(errors) > 0 and float(np.median(errors)) > self.max_nats
        return is_off and cause_of(fitted, self.max_nats) is None

    def _fitted(self, group: Group | None) -> tuple[float, Fitted | None]:
        """Return the median error of a reply's numbers, nats, and the fit."""
        fitted = None if group is None else fit([group], self.tokens)
        return (np.inf if fitted is None else float(np.median(fitted.errors))), fitted

    def _blame(self, kind: str, title: str, group: Group) -> None:
        """Add a fault that explains one reply."""
        median, fitted = self._fitted(group)
        assert fitted is not None
        evidence = fitted.evidence(fitted.errors > self.max_nats)[:2]
        self.findings.add(kind, title, evidence=evidence, worst=median)

    def _of_base(self, rows: _Rows, ids: tuple[int, ...], group: Group) -> Group | None:
        """Return the numbers with the base model's rows, if they fit these rather than the LoRA weights'."""
        if self.base is None:
            return None
        base = Reader(self.tokens, Reference(self.base), Findings())
        found = base.read(*rows, ids, is_quiet=True)
        if self._fitted(found)[0] * BETTER >= self._fitted(group)[0]:
            return None
        if rows[0] == "prompt":
            title = "prompt rows are those of the model without its LoRA weights, up to {worst} nats"
            self._blame("lora-prompt", title, group)
        else:
            title = "the LoRA weights that were asked have no effect: {count} replies are the base model's"
            self._blame("lora-ignored", title, group)
        return found

    def _after_other_prompt(
        self, reader: Reader, rows: _Rows, ids: tuple[int, ...], own: tuple[int, ...], group: Group
    ) -> Group | None:
        """Return the numbers with the rows of a prompt that begins or is laid out differently, if they fit.

        For a chat in an unknown layout, return a group without places.
        """
        _, ask, reply = rows
        worst = self._fitted(group)[0]
        others = self.tokens.beginnings(ids) | ({} if own in {ids, ()} else {"as the tokenizer has it": own})
        layouts, refused = self.tokens.layouts(ask, SYSTEMS) if ask.is_chat else ({}, {})
        for name, other_ids in {**others, **layouts}.items():
            found = reader.read(*rows, other_ids, is_quiet=True)
            if self._fitted(found)[0] * BETTER < worst:
                if name in layouts:
                    title = f"chats are laid out otherwise than the template says: {name} ({{count}} replies)"
                    self._blame("template", title, group)
                else:
                    title = f"numbers are those of a prompt {name} ({{count}} replies, up to {{worst}} nats)"
                    self._blame("bos", title, group)
                return reader.read(*rows, other_ids)
        means = [error.mean for error in self.errors if _form_of(error.ask) == "completions"]
        if not ask.is_chat or not means or worst <= BETTER * max([*means, self.max_nats]):
            return None
        counted = reply.num_prompt_tokens
        is_other = counted is not None and counted != len(own)
        note = f"; it counts {counted} prompt tokens, the template has {len(own)}" if is_other else ""
        title = f"chats are laid out otherwise than the model's template says ({{count}} replies{note})"
        self._blame("template", title, group)
        for name, message in refused.items():
            title = f"chats {name} were not looked at: {printable(message, MAX_TEXT)}"
            self.findings.add("left-out", title, severity="note")
        group.places.clear()
        return group

    def _note_other_ids(self, ask: Ask, own: tuple[int, ...], ids: tuple[int, ...]) -> None:
        if ask.is_chat:
            kind = "template"
            title = "chats are laid out otherwise than the model's template says ({count} requests)"
        elif ids in self.tokens.beginnings(own).values():
            kind, title = "bos", "prompts begin otherwise than the tokenizer says ({count} requests)"
        else:
            kind = "does-not-fit"
            title = "prompts are cut into other tokens than the tokenizer's ({count} requests)"
        at = next((i for i, (a, b) in enumerate(zip(own, ids, strict=False)) if a != b), len(own))
        evidence = Evidence(
            ask=ask.label,
            prompt=ask.shown,
            position=at,
            where="prompt",
            token=self.tokens.show(ids[at]) if at < len(ids) else None,
            note=f"ids {list(ids[:4])}…, ours {list(own[:4])}…",
        )
        self.findings.add(kind, title, evidence=[evidence])


def _form_of(label: str) -> str:
    """Return the form at the start of a label."""
    return label.partition(", ")[0].partition(" (")[0]


__all__ = ["MAX_NATS", "audit"]
