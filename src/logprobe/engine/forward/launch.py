"""A decoder's steps of a few rows as one launch (CPU).

At one row, hundreds of launches from Python cost more than the products they start. So the stages of a step
are recorded once for each number of rows, on buffers of their own, which a step fills in.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from logprobe.kernels.attention.api import RowPlan, rows_stage
from logprobe.kernels.stages import Series

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logprobe.engine.forward.attention import AttentionPlan
    from logprobe.engine.forward.decoder import Decoder, Layer, Step
    from logprobe.engine.forward.kv_cache import KVPool
    from logprobe.kernels.stages import Stage

MOST_ROWS = 64  # of a recorded step; the products serve any number


@dataclass(frozen=True, slots=True)
class Launch:
    """A recorded step of one number of rows: its buffers, and its stages as one series."""

    step: Step
    contexts: RowPlan
    series: Series


class Launches:
    """Runs a decoder for a few rows on one pool; recorded for each number of rows when it first comes."""

    def __init__(self, decoder: Decoder, pool: KVPool, max_len: int) -> None:
        self._decoder, self._pool, self._max_len = decoder, pool, max_len
        self._recorded: dict[int, Launch] = {}
        self._contexts = RowPlan(
            queries=np.arange(MOST_ROWS, dtype=np.int32),
            begins=np.zeros(MOST_ROWS, dtype=np.int32),
            lengths=np.zeros(MOST_ROWS, dtype=np.int32),
            slots=np.zeros(MOST_ROWS * max_len, dtype=np.int32),
        )
        self._step = decoder.new_step(MOST_ROWS, pool, lambda *_: ())

    def can_run(self, plan: AttentionPlan) -> bool:
        """Whether a step has few rows on this pool, each attended by the row kernel."""
        is_few = plan.rows is not None and not plan.chunks and len(plan.slots) <= MOST_ROWS
        return is_few and plan.pool is self._pool

    def run(
        self, ids: torch.Tensor, places: torch.Tensor, plan: AttentionPlan, *, is_long: bool
    ) -> torch.Tensor:
        """(M,) ids and positions → the last hidden states, (M, hidden size), good until the next step."""
        assert plan.rows is not None
        launch = self._recorded.get(len(ids))
        if launch is None:
            launch = self._recorded[len(ids)] = self._record(len(ids))
        self._decoder.fill(launch.step, ids, places, is_long=is_long)
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

        def attend(step: Step, layer: Layer) -> Iterable[Stage]:
            pool = self._pool
            keys, values = pool.keys[layer.index], pool.values[layer.index]
            yield rows_stage(step.query, keys, values, contexts, step.attended, layer.rule)

        step = replace(_first_rows(self._step, num_rows), attend=attend)
        return Launch(step, contexts, Series([*self._decoder.stages(step)]))


def _first_rows(step: Step, num_rows: int) -> Step:
    """Views of a step's first rows."""

    def cut(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part[:num_rows]
        if isinstance(part, dict):
            return {kind: tuple(map(cut, angles)) for kind, angles in part.items()}
        return part

    return replace(step, **{part.name: cut(getattr(step, part.name)) for part in fields(step)})
