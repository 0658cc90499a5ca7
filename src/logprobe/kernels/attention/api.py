"""Attention of single query tokens over the KV cache (CPU).

Each row is one query token with its own context: the slots of all tokens that the token attends to. Keys and
values are read in place, without a gather or copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels.arrays import as_array
from logprobe.kernels.stages import Stage, items_for_threads

if TYPE_CHECKING:
    import torch

    from logprobe.kernels.arrays import Array

NO_WINDOW = 1 << 30


@dataclass(slots=True)
class RowPlan:
    """Query rows and their contexts: row i attends to `slots[begins[i] : begins[i] + lengths[i]]`."""

    queries: Array  # (num_rows,) int32, index of the query token among the step's packed tokens
    begins: Array  # (num_rows,) int32, index into `slots`
    lengths: Array  # (num_rows,) int32
    slots: Array  # (sum of contexts,) int32


class RowPlanBuilder:
    """Collects the short spans of a step into a `RowPlan`."""

    def __init__(self) -> None:
        self._queries: list[int] = []
        self._begins: list[int] = []
        self._lengths: list[int] = []
        self._slots: list[Array] = []
        self._num_slots = 0

    def add(self, first_row: int, start: int, slots: Array) -> None:
        """Add the tokens at positions [start, len(slots)) of a sequence.

        `slots` are the slots of all positions of the sequence; the token at `start` is packed token
        `first_row` of the step.
        """
        for position in range(start, len(slots)):
            self._queries.append(first_row + position - start)
            self._begins.append(self._num_slots)
            self._lengths.append(position + 1)
        self._slots.append(slots)
        self._num_slots += len(slots)

    def build(self) -> RowPlan | None:
        """Return the plan; None if no span was added."""
        if not self._queries:
            return None
        queries, begins, lengths = np.array([self._queries, self._begins, self._lengths], dtype=np.int32)
        return RowPlan(queries, begins, lengths, np.concatenate(self._slots))


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """Parameters of attention scores: scale, sliding window, soft cap and sinks."""

    scale: float
    window: int | None = None  # sliding window in tokens, including the token itself
    softcap: float | None = None  # score → softcap · tanh(score / softcap)
    # (heads,) attention sink scores: they take part in the softmax, but have no values
    sinks: Array | torch.Tensor | None = field(default=None, compare=False)

    @property
    def sink_scores(self) -> Array | None:
        """(heads,) float32 sink scores; None without sinks."""
        if self.sinks is None:
            return None
        sinks = self.sinks if isinstance(self.sinks, np.ndarray) else self.sinks.float().numpy(force=True)
        return sinks.astype(np.float32).ravel()


def attend_rows(query: Array, keys: Array, values: Array, plan: RowPlan, out: Array, rule: ScoreRule) -> None:
    """Write the attention output of each row in `plan` to `out`, using all threads.

    Args:
        query: (num_tokens, heads, key_dim) float32.
        keys: (num_slots, kv_heads, key_dim) float32, one layer's cache.
        values: (num_slots, kv_heads, value_dim) float32, one layer's cache.
        plan: the rows and their context slots, in order of position; the last slot is that of the row's
            token.
        out: (num_tokens, heads, value_dim) float32, contiguous; only the rows in `plan` are written.
        rule: how scores are computed.
    """
    rows_stage(np.ascontiguousarray(as_array(query)), keys, values, plan, out, rule).run()


def rows_stage(query: Array, keys: Array, values: Array, plan: RowPlan, out: Array, rule: ScoreRule) -> Stage:
    """Return a stage that computes `attend_rows`; `query` must be contiguous."""
    # The heads of a slot are contiguous; they are split between items only if rows alone give too few items.
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


def attention_args(query: Array, keys: Array, values: Array, out: Array, rule: ScoreRule) -> dict[str, Any]:
    """Return the arguments that the kernels for rows and for chunks have in common."""
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
