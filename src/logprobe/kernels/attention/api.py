"""Attention of single rows over the key/value pool, read in place (CPU).

Each row is one query token with its own context: the slots of all tokens it may see. Keys and values
are read where they lie; nothing is gathered or copied. Before it: the attention plan of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from logprobe.kernels.stages import Stage, items_for_threads

if TYPE_CHECKING:
    from torch import Tensor

Array: TypeAlias = NDArray[Any]
NO_WINDOW = 1 << 30


@dataclass(slots=True)
class RowPlan:
    """Query rows and their contexts: row r of the packed tokens sees `length` slots from `begin` on."""

    queries: Array  # (num_rows,) int32, row of the packed tokens
    begins: Array  # (num_rows,) int32, into slots
    lengths: Array  # (num_rows,) int32
    slots: Array  # (sum of contexts,) int32


class RowPlanBuilder:
    """Collects the short spans of a step."""

    def __init__(self) -> None:
        self._queries: list[int] = []
        self._begins: list[int] = []
        self._lengths: list[int] = []
        self._slots: list[Array] = []
        self._num_slots = 0

    def add(self, first_row: int, start: int, slots: Array) -> None:
        """Positions [start, len(slots)) of a sequence stand at `first_row` of the packed tokens."""
        for position in range(start, len(slots)):
            self._queries.append(first_row + position - start)
            self._begins.append(self._num_slots)
            self._lengths.append(position + 1)
        self._slots.append(slots)
        self._num_slots += len(slots)

    def build(self) -> RowPlan | None:
        """The plan as arrays; None where no span was added."""
        if not self._queries:
            return None
        queries, begins, lengths = np.array([self._queries, self._begins, self._lengths], dtype=np.int32)
        return RowPlan(queries, begins, lengths, np.concatenate(self._slots))


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """How scores are made: scaled, soft-capped, and over which part of the context."""

    scale: float
    window: int | None = None  # see only the last so many tokens
    softcap: float | None = None  # score → softcap · tanh(score / softcap)
    # (heads,) scores beside the context's: they take weight and give nothing
    sinks: Tensor | None = field(default=None, compare=False)

    @property
    def sink_scores(self) -> Array | None:
        """The sinks, float32; None where there are none."""
        return None if self.sinks is None else self.sinks.float().flatten().numpy(force=True)


def attend_rows(
    query: Tensor, keys: Tensor, values: Tensor, plan: RowPlan, out: Tensor, rule: ScoreRule
) -> None:
    """Write each planned row's attention into `out`, rows and heads on all threads.

    Args:
        query: (num_tokens, heads, key_dim) float32.
        keys: (num_slots, kv_heads, key_dim) float32, one layer's pool.
        values: (num_slots, kv_heads, value_dim) float32, likewise.
        plan: which rows, and the slots each may see, oldest first; its own token's slot is the last.
        out: (num_tokens, heads, value_dim) float32, contiguous; only the planned rows are written.
        rule: how scores are made.
    """
    rows_stage(query.contiguous(), keys, values, plan, out, rule).run()


def rows_stage(
    query: Tensor, keys: Tensor, values: Tensor, plan: RowPlan, out: Tensor, rule: ScoreRule
) -> Stage:
    """`attend_rows` of contiguous queries, ready to run."""
    # All heads of a slot lie together; apart they only serve to keep every thread busy.
    parts = 1 if len(plan.queries) >= items_for_threads() else keys.shape[1]
    return Stage(
        "attend_rows",
        "AttentionArgs",
        num_items=len(plan.queries) * parts,
        **attention_args(query, keys, values, out, rule),
        rows=plan.queries,
        begins=plan.begins,
        lengths=plan.lengths,
        slots=plan.slots,
        parts=parts,
    )


def attention_args(
    query: Tensor, keys: Tensor, values: Tensor, out: Tensor, rule: ScoreRule
) -> dict[str, Any]:
    """What both kernels take."""
    return {
        "query": query,
        "keys": keys,
        "values": values,
        "out": out,
        "sinks": rule.sink_scores,
        "heads": query.shape[1],
        "kv_heads": keys.shape[1],
        "key_dim": keys.shape[2],
        "value_dim": values.shape[2],
        "window": NO_WINDOW if rule.window is None else rule.window,
        "scale": rule.scale,
        "softcap": rule.softcap or 0.0,
    }
