"""`audit`: ask a server what we know, and tell where it differs.

Requests go out one at a time, so that what runs beside one is known, but for the neighbours and the fields.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.analysis.auditing.dialects import CHAT_FORMS, PROMPT_FORMS, Ask, Refusal, Reply
from logprobe.analysis.auditing.endpoint import Connection, Endpoint, printable
from logprobe.analysis.auditing.fields import Fields
from logprobe.analysis.auditing.findings import Findings
from logprobe.analysis.auditing.fit import (
    BETTER,
    Group,
    allowance_of,
    cause_of,
    errors_of,
    finite,
    fit,
    judge,
    mark_filled,
    rounding_of,
)
from logprobe.analysis.auditing.precision import distances, own_runs
from logprobe.analysis.auditing.reference import Reference
from logprobe.analysis.auditing.report import (
    MAX_TEXT,
    AuditReport,
    Errors,
    Evidence,
    StoredPrompt,
    StoredRow,
)
from logprobe.analysis.auditing.rows import Reader, check_alternatives
from logprobe.analysis.auditing.session import Session
from logprobe.analysis.auditing.steady import Steady
from logprobe.analysis.auditing.tokens import Tokens
from logprobe.errors import ServerError, UnreachableError, require

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from logprobe.analysis.auditing.fit import Fitted
    from logprobe.analysis.auditing.report import Distance
    from logprobe.analysis.measures import Floats
    from logprobe.analysis.scorer import Scorer

MAX_NATS: Final = 1e-3
MAX_TEXTS: Final = 32
MAX_PROMPT_TOKENS: Final = 48  # of a prompt whose rows are compared whole
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
"""Findings after which our rows say little of what a server should give next."""
PLAIN: Final[tuple[dict[str, Any], ...]] = ({"temperature": 0}, {"temperature": 1.0, "seed": 1})
CHAT_SHAPES: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0},
    {"temperature": 0.5, "top_p": 0.9, "seed": 8},
)
SYSTEMS: Final = ("You are a helpful assistant.", "")
"""System texts that servers are known to add."""


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
    precision: bool = False,
    quick: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> AuditReport:
    """Compare what a server reports with the same rows computed exactly.

    Args:
        endpoint: an OpenAI-compatible server, by its address, or with a key and limits as an `Endpoint`.
        llm: the same weights here; its rows are the reference.
        model: its name over there; None: the first that the server lists.
        texts: prompts; None: six of our own, or those of `before`.
        lora: the name of LoRA weights over there, whose rows `llm` gives.
        base: the model without them; None: `llm.with_lora(None)`.
        before: an earlier report of the same endpoint, to find what changed and what did not.
        max_nats: the largest difference from the reference that passes; a server in bfloat16 needs some 0.3.
        precision: also compute the rows in other precisions, and tell which is nearest.
        quick: fewer lengths and neighbours.
        progress: called with the requests done, those planned, and what is looked at.

    Raises:
        ParameterError: a value that cannot be used, `lora` without its weights here, or a key that the server
            refuses.
        ServerError: the server cannot be reached, answers no known form, or does not answer in time.
        ModelError: httpx is not installed.
    """
    require(max_nats > 0, "max_nats", "must be positive", got=max_nats)
    is_texts = texts is None or (
        not isinstance(texts, str) and len(texts) > 0 and all(isinstance(one, str) and one for one in texts)
    )
    require(is_texts, "texts", "must be a list of texts that are not empty", got=texts)
    where = Endpoint(endpoint) if isinstance(endpoint, str) else endpoint
    if precision:
        own_runs(llm)  # refuses before anything is asked
    if base is None and lora is not None:
        remedy = "give llm.with_lora(NAME), or base beside merged weights"
        require(llm.lora is not None, "lora", f"needs an llm that runs on these weights: {remedy}")
        base = llm.with_lora(None)  # type: ignore[attr-defined]
    run = _Run(
        endpoint=where,
        llm=llm,
        base=base,
        model=model,
        lora=lora,
        texts=None if texts is None else tuple(texts[:MAX_TEXTS]),
        before=before,
        max_nats=max_nats,
        has_precision=precision,
        is_quick=quick,
        progress=progress,
    )
    return _run_here_or_beside(run.report())


def _run_here_or_beside(work: Coroutine[Any, Any, AuditReport]) -> AuditReport:
    """Run to its end, on a thread of its own where this one has an event loop (notebooks)."""
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
    llm: Scorer
    base: Scorer | None
    model: str | None
    lora: str | None
    texts: tuple[str, ...] | None
    before: AuditReport | None
    max_nats: float
    has_precision: bool
    is_quick: bool
    progress: Callable[[int, int, str], None] | None
    findings: Findings = field(default_factory=Findings)
    heard: list[tuple[Ask, Reply]] = field(default_factory=list)
    errors: list[Errors] = field(default_factory=list)
    distributions: dict[str, str] = field(default_factory=dict)
    stored: list[StoredPrompt] = field(default_factory=list)
    worst: float = 0.0
    # Contexts, the tokens after each, and their numbers.
    samples: list[tuple[tuple[int, ...], tuple[int, ...], Floats]] = field(default_factory=list)

    async def report(self) -> AuditReport:
        """Ask, compare, and put together what was found."""
        async with Connection(self.endpoint) as connection:
            server = await self._meet(connection)
            num_ids = len(self.llm.text.vocabulary)
            session = Session(connection, num_ids, self.lora or self.model, progress=self.progress)
            session.planned = 150 if self.is_quick else 260
            await session.meet()
            self._note_forms(session)
            tokens = Tokens(self.llm.text)
            reader = Reader(tokens, Reference(self.llm), self.findings)
            await self._ask_all(session, tokens)
            session.tell("comparing")
            roundings = self._compare(reader)
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
            fields = await Fields(
                session, reader, self.findings, self.is_quick, is_known, self.max_nats
            ).run()
            self._compare_with_before()
            session.tell("precision")
            precision = self._precision() if self.has_precision else ()
            if reader.num_unknown:
                self.findings.add(
                    "unidentified",
                    "{count} entries are of tokens that cannot be told by their id, bytes or text",
                    severity="note",
                    count=reader.num_unknown,
                    of=max(reader.num_rows, 1),
                )
            requests = connection.num_requests
        return AuditReport(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            endpoint=self.endpoint.url,
            model=self.model or "",
            lora=self.lora,
            server=server,
            ours=reader.reference.info,
            max_nats=self.max_nats,
            asks=tuple(dict.fromkeys(ask.label for ask, _ in self.heard)),
            requests=requests,
            rows=reader.num_rows,
            distributions=self.distributions,
            errors=tuple(self.errors),
            steadiness=tuple(steady.rows),
            fields=tuple(fields),
            findings=self.findings.listed(),
            stored=tuple(self.stored),
            worst_nats=self.worst,
            precision=precision,
        )

    def _max_len(self) -> int:
        return int(self.llm.engine.capabilities().max_model_len)

    async def _meet(self, connection: Connection) -> str | None:
        """The model's name over there, and what the server says that it is."""
        listed = await connection.get("/v1/models")
        data = listed.value.get("data") if listed.is_ok and isinstance(listed.value, dict) else None
        first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
        if self.model is None and isinstance(first.get("id"), str):
            self.model = first["id"]
        words = [str(first["owned_by"])] if isinstance(first.get("owned_by"), str) else []
        for path, name in (("/version", "version"), ("/props", "build_info")):
            found = await self._fact(connection, path, name)
            if found is not None:
                words.append(found)
                break
        return printable(" ".join(words), MAX_TEXT) or None

    @staticmethod
    async def _fact(connection: Connection, path: str, name: str) -> str | None:
        try:
            answered = await connection.get(path)
        except UnreachableError:
            raise
        except ServerError:  # a page, where others have a fact
            return None
        value = answered.value.get(name) if answered.is_ok and isinstance(answered.value, dict) else None
        return value if isinstance(value, str) else None

    def _note_forms(self, session: Session) -> None:
        for form, words in session.refused.items():
            if form not in ("generate", "completion"):
                title = f"the server has no {form}: {printable(words, MAX_TEXT)}"
                self.findings.add("form", title, severity="note")
        for form, words in session.without_rows.items():
            if form not in ("completions", "chat"):
                self.findings.add("form", f"{form}: {words}", severity="note")

    # -- asking --------------------------------------------------------------------------------------------

    async def _ask_all(self, session: Session, tokens: Tokens) -> None:
        asks = list(self._asks(session, tokens))
        session.tell("prompts")
        was_generating = True
        for ask in asks:
            is_prompt = ask.form in PROMPT_FORMS
            if is_prompt and was_generating:
                await session.settle()
            was_generating = not is_prompt
            reply = await session.ask(ask)
            if isinstance(reply, Reply):
                self.heard.append((ask, reply))
            else:
                self._note_refused(ask, reply)
            session.tell(ask.label)

    def _note_refused(self, ask: Ask, refusal: Refusal) -> None:
        kind = "error" if refusal.is_failure else "form"
        title = f"{ask.label} is not answered ({{count}} requests)"
        evidence = Evidence(
            ask=ask.label, prompt=ask.shown, position=None, where="completion", note=str(refusal)
        )
        self.findings.add(kind, title, severity="note", evidence=[evidence])

    def _asks(self, session: Session, tokens: Tokens) -> Iterator[Ask]:
        """Every request whose rows are compared whole, prompts first."""
        texts = self._texts(tokens)
        for form in PROMPT_FORMS:
            if form in session.extras:
                for text in texts:
                    yield Ask(form=form, prompt=text, num_top=NUM_TOP)
                shape = {"temperature": 0.5, "top_p": 0.9}
                yield Ask(form=form, prompt=texts[0], num_top=NUM_TOP, params=shape)
        bias = {str(tokens.encode_plain(b" the")[0]): 3.0, str(tokens.encode_plain(b" a")[0]): -2.0}
        shapes: tuple[dict[str, Any], ...] = (
            {"temperature": 0.5, "seed": 2},
            {"temperature": 0.7, "top_p": 0.8, "seed": 3},
            {"temperature": 1.0, "frequency_penalty": 0.7, "presence_penalty": 0.3, "seed": 4},
            {"temperature": 1.0, "logit_bias": bias, "seed": 5},
            {"temperature": 0.6, "top_p": 0.9, "frequency_penalty": 0.5, "seed": 6},
            {"temperature": 1.3, "top_k": 8, "seed": 7},
        )
        for form in ("completions", "generate", "completion"):
            if form not in session.extras:
                continue
            for shape in PLAIN:
                for text in texts:
                    yield Ask(form=form, prompt=text, max_tokens=GENERATED, num_top=NUM_TOP, params=shape)
            for shape in shapes:
                for text in (texts[0], texts[-1]):
                    yield Ask(form=form, prompt=text, max_tokens=GENERATED, num_top=NUM_TOP, params=shape)
        for form in CHAT_FORMS:
            if form in session.extras and tokens.has_template:
                for shape in CHAT_SHAPES:
                    for chat in CHATS:
                        yield Ask(form=form, prompt=chat, max_tokens=GENERATED, num_top=NUM_TOP, params=shape)

    def _texts(self, tokens: Tokens) -> tuple[str, ...]:
        """The prompts, none longer than what is compared whole."""
        texts = self.texts
        if texts is None and self.before is not None:
            prompts = [one for one in self.before.stored if _form_of(one.ask) not in CHAT_FORMS]
            texts = tuple(filter(None, dict.fromkeys(tokens.text_of(one.token_ids) for one in prompts)))
        room = min(MAX_PROMPT_TOKENS, self._max_len() - GENERATED - 2)
        return tuple(tokens.cut(text, room) for text in texts or filter(tokens.can_encode, TEXTS))

    # -- comparing -----------------------------------------------------------------------------------------

    def _compare(self, reader: Reader) -> dict[str, str]:
        """All that was heard, ask by ask, completions before chats, whose layout they bear out.

        Form → the grid that its numbers lie on.
        """
        roundings = self._roundings()
        labels: dict[tuple[str, str], list[tuple[Ask, Reply]]] = {}
        for ask, reply in self.heard:
            for where in ("prompt", "completion"):
                wants_prompt = ask.form in PROMPT_FORMS or ask.form == "chat prompt_logprobs"
                if (where == "prompt") == wants_prompt or ask.form == "generate":
                    labels.setdefault((ask.label, where), []).append((ask, reply))
        for (_, where), pairs in labels.items():
            groups = [group for ask, reply in pairs if (group := self._group(reader, where, ask, reply))]
            fitted = fit(groups, reader.tokens)
            if fitted is None:
                continue
            form = fitted.ask.form
            if form in roundings:
                fitted.allowance = allowance_of(roundings[form], fitted.theirs)
            judge(fitted, self.findings, self.max_nats)
            check_alternatives(fitted, self.findings, self.max_nats)
            self._take(fitted)
        return roundings

    def _roundings(self) -> dict[str, str]:
        """Form → the grid that all its numbers lie on."""
        numbers: dict[str, list[float]] = {}
        for ask, reply in self.heard:
            for row in [*(reply.prompt or ()), *(reply.completion or ())]:
                entries = [] if row is None else [row.chosen, *(row.alternatives or ())]
                numbers.setdefault(ask.form, []).extend(
                    entry.logprob for entry in entries if entry is not None and entry.logprob is not None
                )
        found = {}
        for form, values in numbers.items():
            rounding = rounding_of(np.array(values))
            if rounding is None:
                continue
            found[form] = rounding
            # Rounding moves a number half as far as cutting does.
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

    def _group(self, reader: Reader, where: str, ask: Ask, reply: Reply) -> Group | None:
        """Numbers beside ours, after the prompt that they fit: as told, or another."""
        own = reader.tokens.encode_ask(ask)
        ids = own if reply.prompt_ids is None else reply.prompt_ids
        read = reader.prompt if where == "prompt" else reader.completion
        if reply.prompt_ids is not None and own and reply.prompt_ids != own:
            self._note_other_ids(reader.tokens, ask, own, reply.prompt_ids)
        group = read(ask, reply, ids, is_quiet=True)
        if group is not None and self._is_off(group, reader.tokens):
            found = self._elsewhere(reader, where, ask, reply, ids, own, group)
            if isinstance(found, Group):
                return found
            ids = found
        return read(ask, reply, ids)

    def _is_off(self, group: Group, tokens: Tokens) -> bool:
        """Whether most numbers of one reply are of no distribution, by no cause."""
        fitted = fit([group], tokens)
        if fitted is None:
            return False
        mark_filled(fitted, self.max_nats)
        rounding = rounding_of(fitted.theirs)
        if rounding is not None:
            fitted.allowance = allowance_of(rounding, fitted.theirs)
        used = ~fitted.is_filled
        is_off = used.any() and float(np.median((fitted.errors - fitted.allowance)[used])) > self.max_nats
        return bool(is_off) and cause_of(fitted, self.max_nats) is None

    def _median(self, group: Group | None, tokens: Tokens) -> float:
        fitted = None if group is None else fit([group], tokens)
        return np.inf if fitted is None else float(np.median(fitted.errors))

    def _elsewhere(
        self,
        reader: Reader,
        where: str,
        ask: Ask,
        reply: Reply,
        ids: tuple[int, ...],
        own: tuple[int, ...],
        group: Group,
    ) -> Group | tuple[int, ...]:
        """The ids of a prompt that begins or is laid out otherwise, or a group of the base model's rows.

        A chat that is laid out in no known way has a group of no places.
        """
        read = reader.prompt if where == "prompt" else reader.completion
        least = self._median(group, reader.tokens)
        evidence = self._evidence(group, reader.tokens)
        if self.base is not None:
            other = Reader(reader.tokens, Reference(self.base), Findings())
            of_base = (other.prompt if where == "prompt" else other.completion)(
                ask, reply, ids, is_quiet=True
            )
            if self._median(of_base, reader.tokens) * BETTER < least:
                assert of_base is not None
                self._note_base(where, evidence, least)
                return of_base
        is_chat = ask.form in CHAT_FORMS
        variants = reader.tokens.variants(ids)
        if own and own != ids:
            variants["as the tokenizer has it"] = own
        layouts, refused = reader.tokens.layouts(ask, SYSTEMS) if is_chat else ({}, {})
        for name, other_ids in {**variants, **layouts}.items():
            found = read(ask, reply, other_ids, is_quiet=True)
            if self._median(found, reader.tokens) * BETTER >= least:
                continue
            kind = "template" if name in layouts else "bos"
            title = (
                f"chats are laid out otherwise than the model's template says: {name} ({{count}} replies)"
                if kind == "template"
                else f"numbers are those of a prompt {name} ({{count}} replies, up to {{worst}} nats)"
            )
            self.findings.add(kind, title, evidence=evidence, worst=least)
            return other_ids
        if is_chat and least > BETTER * self._mean_error("completions"):
            counted = reply.num_prompt_tokens
            is_other = counted is not None and counted != len(own)
            note = f"; it counts {counted} prompt tokens, the template has {len(own)}" if is_other else ""
            title = f"chats are laid out otherwise than the model's template says ({{count}} replies{note})"
            self.findings.add("template", title, evidence=evidence, worst=least)
            for name, words in refused.items():
                title = f"chats {name} were not looked at: {printable(words, MAX_TEXT)}"
                self.findings.add("left-out", title, severity="note")
            group.places.clear()
            return group
        return ids

    def _mean_error(self, form: str) -> float:
        """The mean error of a form's rows as far as they were compared, at least what may be; nats."""
        found = [one.mean for one in self.errors if _form_of(one.ask) == form]
        return max([*found, self.max_nats]) if found else np.inf

    def _note_base(self, where: str, evidence: list[Evidence], worst: float) -> None:
        if where == "prompt":
            title = "prompt rows are those of the model without its LoRA weights, up to {worst} nats"
            self.findings.add("lora-prompt", title, evidence=evidence, worst=worst)
        else:
            title = "the LoRA weights that were asked have no effect: {count} replies are the base model's"
            self.findings.add("lora-ignored", title, evidence=evidence, worst=worst)

    def _evidence(self, group: Group, tokens: Tokens) -> list[Evidence]:
        fitted = fit([group], tokens)
        return [] if fitted is None else fitted.evidence(fitted.errors > self.max_nats)[:2]

    def _note_other_ids(self, tokens: Tokens, ask: Ask, own: tuple[int, ...], told: tuple[int, ...]) -> None:
        is_chat = ask.form in CHAT_FORMS
        is_bos = told in tokens.variants(own).values()
        kind = "bos" if is_bos and not is_chat else "template" if is_chat else "does-not-fit"
        at = next((i for i, (a, b) in enumerate(zip(own, told, strict=False)) if a != b), len(own))
        title = {
            "bos": "prompts begin otherwise than the tokenizer says ({count} requests)",
            "template": "chats are laid out otherwise than the model's template says ({count} requests)",
            "does-not-fit": "prompts are cut into other tokens than the tokenizer's ({count} requests)",
        }[kind]
        evidence = Evidence(
            ask=ask.label,
            prompt=ask.shown,
            position=at,
            where="prompt",
            token=tokens.show(told[at]) if at < len(told) else None,
            note=f"ids {list(told[:4])}…, ours {list(own[:4])}…",
        )
        self.findings.add(kind, title, evidence=[evidence])

    def _take(self, fitted: Fitted) -> None:
        """Keep what the report tells of one ask."""
        self.distributions[fitted.label] = fitted.name
        found = errors_of(fitted)
        self.errors += found
        self.worst = max([self.worst, *(one.worst for one in found)])
        group = fitted.places[0][0]
        if fitted.name == "raw" and (group.where == "prompt" or not self.samples):
            self._sample(fitted)
        is_greedy = group.where == "completion" and group.ask.params == {"temperature": 0}
        if is_greedy or (group.where == "prompt" and not group.ask.params):
            self._store(fitted)

    def _sample(self, fitted: Fitted) -> None:
        """Keep the chosen numbers of an ask, by which a precision is told."""
        numbers: dict[int, tuple[Group, Floats]] = {}
        for index, (group, place) in enumerate(fitted.places):
            if fitted.is_chosen[index] and not fitted.is_filled[index]:
                of_group = numbers.setdefault(id(group), (group, np.full(len(group.ids), np.nan)))
                of_group[1][place.t] = fitted.theirs[index]
        self.samples += [(group.context, group.ids, values) for group, values in numbers.values()]

    def _precision(self) -> tuple[Distance, ...]:
        """The distance of their raw numbers from our own runs in several precisions."""
        if not self.samples:
            title = "the precision was not looked at: no ask has the model's own rows"
            self.findings.add("left-out", title, severity="note")
            return ()
        found, refused = distances(own_runs(self.llm), self.samples)
        for precision, words in refused.items():
            title = f"{precision} was not looked at: our own run is refused ({printable(words, MAX_TEXT)})"
            self.findings.add("left-out", title, severity="note")
        return found

    def _store(self, fitted: Fitted) -> None:
        """Chosen numbers of prompts, and the first alternatives of greedy replies, for a later audit."""
        by_group: dict[int, list[int]] = {}
        for index, (group, place) in enumerate(fitted.places):
            is_first = group.where == "completion" and place.t == 0
            if fitted.is_chosen[index] if group.where == "prompt" else is_first:
                by_group.setdefault(id(group), []).append(index)
        for indices in by_group.values():
            group = fitted.places[indices[0]][0]
            self.stored.append(
                StoredPrompt(
                    ask=fitted.label,
                    where=group.where,
                    prompt=group.ask.shown,
                    token_ids=fitted.tokens.encode_ask(group.ask),
                    rows=tuple(
                        StoredRow(
                            position=fitted.places[index][1].position,
                            token_id=int(fitted.ids[index]),
                            theirs=finite(fitted.theirs[index]),
                            ours=finite(fitted.raw[index]),
                        )
                        for index in indices
                    ),
                )
            )

    # -- before --------------------------------------------------------------------------------------------

    def _compare_with_before(self) -> None:
        """What should have changed since an earlier audit and did not, and what should not have and did."""
        if self.before is None:
            return
        known = {(one.ask, one.token_ids): one for one in self.before.stored}
        stale: list[tuple[float, Evidence]] = []
        changed: list[tuple[float, Evidence]] = []
        compared = 0
        for now in self.stored:
            then = known.get((now.ask, now.token_ids))
            if then is None:
                continue
            old = {(row.position, row.token_id): row for row in then.rows}
            for row in now.rows:
                was = old.get((row.position, row.token_id))
                values = None if was is None else (row.theirs, row.ours, was.theirs, was.ours)
                if values is None or None in values:
                    continue
                theirs, ours, theirs_before, ours_before = (float(one) for one in values if one is not None)
                compared += 1
                ours_moved, theirs_moved = abs(ours - ours_before), abs(theirs - theirs_before)
                evidence = Evidence(
                    ask=now.ask,
                    prompt=now.prompt,
                    position=row.position,
                    where=now.where,
                    theirs=theirs,
                    ours=ours,
                    note=f"before: theirs {theirs_before:.4f}, ours {ours_before:.4f}",
                )
                if ours_moved > BETTER * self.max_nats and theirs_moved <= self.max_nats:
                    stale.append((ours_moved, evidence))
                elif ours_moved <= self.max_nats and theirs_moved > self.max_nats:
                    changed.append((theirs_moved, evidence))
        if not compared:
            title = "nothing of the earlier report could be compared: it has other prompts or forms"
            self.findings.add("left-out", title, severity="note")
        stayed = "{count} of {of} numbers stayed where the weights changed them by up to {worst} nats"
        moves = "{count} of {of} numbers changed by up to {worst} nats though the weights did not"
        for kind, title, moved in (("stale-weights", stayed, stale), ("changed-unasked", moves, changed)):
            if moved:
                self.findings.add(
                    kind,
                    title,
                    evidence=[evidence for _, evidence in moved],
                    worst=max(size for size, _ in moved),
                    count=len(moved),
                    of=compared,
                )


def _form_of(label: str) -> str:
    """The form that a label begins with."""
    return label.partition(", ")[0].partition(" (")[0]


__all__ = ["MAX_NATS", "audit"]
