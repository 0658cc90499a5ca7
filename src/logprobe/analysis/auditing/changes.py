"""Store numbers for later audits, and compare with those of an earlier one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.analysis.auditing.fit import BETTER, finite
from logprobe.analysis.auditing.report import Evidence, StoredPrompt, StoredRow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.analysis.auditing.findings import Findings
    from logprobe.analysis.auditing.fit import Fitted
    from logprobe.analysis.auditing.report import AuditReport


def stored(fitted: Fitted) -> Iterator[StoredPrompt]:
    """Yield the chosen numbers of plain prompts, and the first rows of greedy completions."""
    group = fitted.places[0][0]
    if group.ask.params != ({} if group.where == "prompt" else {"temperature": 0}):
        return
    by_group: dict[int, list[int]] = {}
    for index, (of, place) in enumerate(fitted.places):
        if fitted.is_chosen[index] if of.where == "prompt" else place.t == 0:
            by_group.setdefault(id(of), []).append(index)
    for indices in by_group.values():
        group = fitted.places[indices[0]][0]
        yield StoredPrompt(
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


def compare_with_before(
    before: AuditReport, prompts: list[StoredPrompt], findings: Findings, max_nats: float
) -> None:
    """Add findings for numbers that should have changed since an earlier audit but did not, or vice versa."""
    known = {
        (prompt.ask, prompt.token_ids, row.position, row.token_id): row
        for prompt in before.stored
        for row in prompt.rows
    }
    moved: dict[str, list[tuple[float, Evidence]]] = {"stale-weights": [], "changed-unasked": []}
    compared = 0
    for prompt in prompts:
        for row in prompt.rows:
            was = known.get((prompt.ask, prompt.token_ids, row.position, row.token_id))
            if (
                was is None
                or row.theirs is None
                or row.ours is None
                or was.theirs is None
                or was.ours is None
            ):
                continue
            compared += 1
            theirs_moved, ours_moved = abs(row.theirs - was.theirs), abs(row.ours - was.ours)
            evidence = Evidence(
                ask=prompt.ask,
                prompt=prompt.prompt,
                position=row.position,
                where=prompt.where,
                theirs=row.theirs,
                ours=row.ours,
                note=f"before: theirs {was.theirs:.4f}, ours {was.ours:.4f}",
            )
            if ours_moved > BETTER * max_nats and theirs_moved <= max_nats:
                moved["stale-weights"].append((ours_moved, evidence))
            elif ours_moved <= max_nats and theirs_moved > max_nats:
                moved["changed-unasked"].append((theirs_moved, evidence))
    if not compared:
        title = "nothing of the earlier report could be compared: it has other prompts or forms"
        findings.add("left-out", title, severity="note")
    titles = {
        "stale-weights": "{count} of {of} numbers stayed where the weights changed them up to {worst} nats",
        "changed-unasked": "{count} of {of} numbers changed up to {worst} nats though the weights did not",
    }
    for kind, sizes in moved.items():
        if sizes:
            findings.add(
                kind,
                titles[kind],
                evidence=[evidence for _, evidence in sizes],
                worst=max(size for size, _ in sizes),
                count=len(sizes),
                of=compared,
            )
