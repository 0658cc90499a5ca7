"""Select log-probabilities to store for later audits, and compare with those from an earlier audit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logprobe.analysis.auditing.fit import BETTER, finite
from logprobe.analysis.auditing.report import Evidence, StoredPrompt, StoredRow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logprobe.analysis.auditing.fit import Fitted
    from logprobe.analysis.auditing.report import AuditReport, Findings


def stored_prompts(fitted: Fitted) -> Iterator[StoredPrompt]:
    """Yield what to store: logprobs of prompt tokens, or those at the first position of greedy completions.

    Prompts are stored if they were requested without sampling parameters, and completions if they were
    requested with `temperature: 0` alone.
    """
    if fitted.ask.params != ({} if fitted.ask.wants_prompt else {"temperature": 0}):
        return
    for owner, group in enumerate(fitted.groups):
        is_kept = fitted.is_chosen if group.ask.wants_prompt else fitted.t == 0
        rows = [
            StoredRow(
                position=group.first + int(fitted.t[index]),
                token_id=int(fitted.ids[index]),
                theirs=finite(fitted.theirs[index]),
                ours=finite(fitted.raw[index]),
            )
            for index in np.flatnonzero(is_kept & (fitted.owner == owner))
        ]
        if rows:
            yield StoredPrompt(
                ask=fitted.label,
                where=fitted.ask.where,
                prompt=group.ask.shown,
                token_ids=fitted.tokens.encode_ask(group.ask),
                rows=tuple(rows),
            )


def compare_with_before(
    before: AuditReport, prompts: Sequence[StoredPrompt], findings: Findings, max_nats: float
) -> None:
    """Add findings for logprobs that wrongly changed, or wrongly stayed the same, since an earlier audit."""
    known = {
        (prompt.ask, prompt.token_ids, row.position, row.token_id): (row.theirs, row.ours)
        for prompt in before.stored
        for row in prompt.rows
    }
    moved: dict[str, list[tuple[float, Evidence]]] = {"stale-weights": [], "changed-unasked": []}
    compared = 0
    for prompt in prompts:
        for row in prompt.rows:
            theirs, ours = known.get((prompt.ask, prompt.token_ids, row.position, row.token_id), (None, None))
            if row.theirs is None or row.ours is None or theirs is None or ours is None:
                continue
            compared += 1
            theirs_moved, ours_moved = abs(row.theirs - theirs), abs(row.ours - ours)
            evidence = Evidence(
                ask=prompt.ask,
                prompt=prompt.prompt,
                position=row.position,
                where=prompt.where,
                theirs=row.theirs,
                ours=row.ours,
                note=f"before: theirs {theirs:.4f}, ours {ours:.4f}",
            )
            if ours_moved > BETTER * max_nats and theirs_moved <= max_nats:
                moved["stale-weights"].append((ours_moved, evidence))
            elif ours_moved <= max_nats and theirs_moved > max_nats:
                moved["changed-unasked"].append((theirs_moved, evidence))
    if not compared:
        title = "nothing of the earlier report could be compared: it has other prompts or forms"
        findings.add("left-out", title, is_note=True)
    for kind, sizes in moved.items():
        if sizes:
            worst, evidence_of_all = max(size for size, _ in sizes), [evidence for _, evidence in sizes]
            findings.add(kind, evidence=evidence_of_all, worst=worst, count=len(sizes), of=compared)
