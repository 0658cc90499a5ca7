"""Compare a server's log-probabilities with the exact ones, and find out which prompt they were computed for.

Log-probabilities that fit no distribution may have been computed with other weights (LoRA), with another
beginning of the prompt (BOS), or with another layout of a chat (chat template).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from logprobe.analysis.auditing.changes import stored_prompts
from logprobe.analysis.auditing.fit import (
    BETTER,
    cause_of,
    check_alternatives,
    errors_of,
    filled_in,
    fit,
    judge,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logprobe.analysis.auditing.forms import Ask, Reply
    from logprobe.analysis.auditing.report import Errors, Findings, StoredPrompt
    from logprobe.analysis.auditing.rows import Group, Reader

Ids: TypeAlias = tuple[int, ...]
SYSTEMS: Final = ("You are a helpful assistant.", "")
"""System prompts that servers are known to add."""


@dataclass(slots=True)
class Comparison:
    """Compares replies with the exact rows, and collects the measurements."""

    reader: Reader
    base: Reader | None  # reads the rows of the model without the LoRA weights
    findings: Findings
    max_nats: float
    roundings: dict[str, str] = field(default_factory=dict)  # precision of the logprobs, by form of request
    errors: list[Errors] = field(default_factory=list)
    distributions: dict[str, str] = field(default_factory=dict)
    stored: list[StoredPrompt] = field(default_factory=list)

    def compare(self, replies: Sequence[tuple[Ask, Reply]]) -> None:
        """Compare all replies with the exact rows."""
        by_label: dict[str, list[tuple[Ask, Reply]]] = {}
        for ask, reply in replies:
            by_label.setdefault(ask.label, []).append((ask, reply))
        for pairs in by_label.values():
            groups = [group for ask, reply in pairs if (group := self._group(ask, reply)) is not None]
            fitted = fit(groups, self.reader.tokens)
            if fitted is None:
                continue
            if fitted.rounding is not None:
                self.roundings[fitted.ask.form] = fitted.rounding
            judge(fitted, self.findings, self.max_nats)
            check_alternatives(fitted, self.findings, self.max_nats)
            self.distributions[fitted.label] = fitted.name
            self.errors.append(errors_of(fitted))
            self.stored += stored_prompts(fitted)

    def _group(self, ask: Ask, reply: Reply) -> Group | None:
        """Pair a reply's log-probabilities with the exact rows of the prompt that they fit.

        If they do not fit the prompt that was sent, and another prompt or model fits far better, the exact
        rows of that prompt or model are used, and a fault is added.
        """
        own = self.reader.tokens.encode_ask(ask)
        ids = own if reply.prompt_ids is None else reply.prompt_ids
        if own and ids != own:
            self._add_other_ids(ask, own, ids)
        group = self.reader.read(ask, reply, ids)
        if group is not None and self._is_off(group):
            for kind, detail, reader, other_ids in self._other_prompts(ask, ids):
                if self._median(reader.read(ask, reply, other_ids)) * BETTER < self._median(group):
                    self._blame(kind, group, detail)
                    return reader.read(ask, reply, other_ids, self.findings)
        return self.reader.read(ask, reply, ids, self.findings)

    def _other_prompts(self, ask: Ask, ids: Ids) -> Iterator[tuple[str, str, Reader, Ids]]:
        """Yield what a server may have used instead, as (kind of fault, detail, reader, prompt ids)."""
        tokens = self.reader.tokens
        if self.base is not None:
            yield "lora-prompt" if ask.wants_prompt else "lora-ignored", "", self.base, ids
        for name, other in tokens.beginnings(ids).items():
            yield "bos", name, self.reader, other
        for name, other in tokens.layouts(ask, SYSTEMS).items() if ask.is_chat else ():
            yield "template", f": {name}", self.reader, other

    def _is_off(self, group: Group) -> bool:
        """Return True if most log-probabilities in a reply fit no distribution and have no known cause."""
        fitted = fit([group], self.reader.tokens)
        if fitted is None:
            return False
        filled = filled_in(fitted, self.max_nats)
        errors = (fitted.errors - fitted.allowance)[~filled]
        is_off = len(errors) > 0 and float(np.median(errors)) > self.max_nats
        return is_off and cause_of(fitted, filled, self.max_nats) is None

    def _median(self, group: Group | None) -> float:
        """Return the median error of a reply's log-probabilities, in nats; infinity if there are none."""
        fitted = None if group is None else fit([group], self.reader.tokens)
        return np.inf if fitted is None else float(np.median(fitted.errors))

    def _blame(self, kind: str, group: Group, detail: str) -> None:
        """Add a fault of this kind for one reply that does not fit the prompt that was sent."""
        fitted = fit([group], self.reader.tokens)
        assert fitted is not None
        evidence = fitted.evidence(fitted.errors > self.max_nats)[:2]
        self.findings.add(kind, detail, evidence=evidence, worst=float(np.median(fitted.errors)))

    def _add_other_ids(self, ask: Ask, own: Ids, ids: Ids) -> None:
        """Add a fault for a reply whose prompt ids differ from the ids that our tokenizer gives (`own`)."""
        kind, detail = "does-not-fit", "the token ids of prompts differ from the tokenizer's"
        if ask.is_chat:
            kind, detail = "template", ""
        for name, other in self.reader.tokens.beginnings(own).items():
            if ids == other and not ask.is_chat:
                kind, detail = "bos", name
        at = next((i for i, (a, b) in enumerate(zip(own, ids, strict=False)) if a != b), len(own))
        token = self.reader.tokens.show(ids[at]) if at < len(ids) else None
        note = f"ids {list(ids[:4])}…, ours {list(own[:4])}…"
        self.findings.add(kind, detail, evidence=[ask.evidence(at, where="prompt", token=token, note=note)])
