"""The buffers and operations of a decoder's step; steps of a few rows as one launch (CPU).

At one row, hundreds of launches from Python cost more than the products they start. So the kernel stages of a
step are recorded once for each number of rows, on buffers of their own, which every such step fills anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from logprobe.kernels.attention.api import RowPlan, ScoreRule, rows_stage
from logprobe.kernels.stages import Series, Stage

if TYPE_CHECKING:
    from logprobe.engine.forward.attention import AttentionPlan
    from logprobe.engine.forward.kv_cache import KVPool
    from logprobe.engine.forward.lora import LoraRows

MAX_ROWS = 64  # of a recorded step; the products serve any number


@dataclass(frozen=True, slots=True)
class HostOperation:
    """Work of the host between kernel stages; a step that has any cannot be recorded."""

    run: Callable[[], object]


Operation: TypeAlias = Stage | HostOperation


@dataclass(slots=True, kw_only=True)
class Step:
    """The buffers that the operations of a step of M rows read and write."""

    hidden: torch.Tensor  # (M, hidden size)
    normed: torch.Tensor  # (M, hidden size)
    branch: torch.Tensor  # (M, hidden size): output of attention or the feed-forward part before a norm
    projected: torch.Tensor  # (M, queries + keys + values)
    query: torch.Tensor  # (M, heads, head_dim)
    attended: torch.Tensor  # (M, heads, head_dim)
    inner: torch.Tensor  # (M, feed-forward size)
    values: torch.Tensor  # (M, feed-forward size): where gates and values are products of their own
    angles: dict[str, tuple[torch.Tensor, torch.Tensor]]  # cosines and sines, (M, rotary_dim) each
    query_scales: torch.Tensor | None  # (M,)
    slots: torch.Tensor  # (M,) int64
    pool: KVPool
    loras: LoraRows | None = None  # None: no row runs under LoRA weights

    def lora_operations(self, *product: Any, **part: Any) -> list[HostOperation]:
        """Return a call of `LoraRows.add_` with these arguments; empty if no row runs under LoRA weights."""
        loras = self.loras
        return [] if loras is None else [HostOperation(lambda: loras.add_(*product, **part))]

    def first_rows(self, num_rows: int) -> Step:
        """Return the first rows of all buffers as views."""

        def cut(part: Any) -> Any:
            if isinstance(part, torch.Tensor):
                return part[:num_rows]
            if isinstance(part, dict):
                return {kind: tuple(map(cut, angles)) for kind, angles in part.items()}
            return part

        return replace(self, **{part.name: cut(getattr(self, part.name)) for part in fields(self)})


Attend: TypeAlias = Callable[[Step, int, ScoreRule], Operation]
"""The attention of one layer, by its index: from `step.query` and the KV cache into `step.attended`."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A recorded step of one number of rows: its buffers, and its stages as one series."""

    step: Step
    contexts: RowPlan
    series: Series


class Launches:
    """Runs steps of a few rows on one KV cache; each number of rows is recorded when it first comes."""

    def __init__(
        self,
        step: Step,
        max_len: int,
        *,
        fill: Callable[..., None],
        operations: Callable[[Step, Attend], list[Operation]],
    ) -> None:
        """Make the contexts of all steps; nothing is recorded yet.

        Args:
            step: the buffers of a step of MAX_ROWS rows.
            max_len: tokens of the longest context.
            fill: `Decoder.fill`.
            operations: `Decoder.operations`.
        """
        self._step, self._fill, self._operations = step, fill, operations
        self._recorded: dict[int, Launch] = {}
        self._contexts = RowPlan(
            queries=np.arange(MAX_ROWS, dtype=np.int32),
            begins=np.zeros(MAX_ROWS, dtype=np.int32),
            lengths=np.zeros(MAX_ROWS, dtype=np.int32),
            slots=np.zeros(MAX_ROWS * max_len, dtype=np.int32),
        )

    def can_run(self, plan: AttentionPlan) -> bool:
        """Return True if a step has few rows on this KV cache, each attended by the row kernel."""
        is_few = plan.rows is not None and not plan.chunks and len(plan.slots) <= MAX_ROWS
        return is_few and plan.pool is self._step.pool

    def run(
        self, ids: torch.Tensor, places: torch.Tensor, plan: AttentionPlan, *, is_long: bool
    ) -> torch.Tensor:
        """(M,) ids and positions → the last hidden states, (M, hidden size), valid until the next step."""
        assert plan.rows is not None
        launch = self._recorded.get(len(ids))
        if launch is None:
            launch = self._recorded[len(ids)] = self._record(len(ids))
        self._fill(launch.step, ids, places, is_long=is_long)
        launch.step.slots.copy_(plan.slots)
        contexts, rows = launch.contexts, plan.rows
        contexts.begins[:], contexts.lengths[:] = rows.begins, rows.lengths
        contexts.slots[: len(rows.slots)] = rows.slots
        launch.series.run()
        return launch.step.normed

    def _record(self, num_rows: int) -> Launch:
        plan = self._contexts
        contexts = RowPlan(
            plan.queries[:num_rows], plan.begins[:num_rows], plan.lengths[:num_rows], plan.slots
        )

        def attend(step: Step, layer: int, rule: ScoreRule) -> Stage:
            keys, values = step.pool.keys[layer], step.pool.values[layer]
            return rows_stage(step.query, keys, values, contexts, step.attended, rule)

        step = self._step.first_rows(num_rows)
        operations = self._operations(step, attend)
        stages = [operation for operation in operations if isinstance(operation, Stage)]
        assert len(stages) == len(operations), "a recorded step has no host operations"
        return Launch(step, contexts, Series(stages))
