"""Buffers and operations of a decoder step, and recorded launches for steps with few rows (CPU).

With one row, launching hundreds of kernels from Python takes longer than the matrix products themselves. So
the kernel stages of a step are recorded once for each number of rows, on fixed buffers that every later step
with that number of rows refills, as with CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from logprobe.kernels.attention.api import RowPlan, ScoreRule, rows_stage
from logprobe.kernels.stages import Series, Stage

if TYPE_CHECKING:
    from logprobe.engine.forward.cpu.attention import AttentionPlan
    from logprobe.engine.forward.cpu.lora import LoraRows
    from logprobe.engine.forward.kv_cache import KVPool
    from logprobe.engine.protocol import Capture
    from logprobe.kernels.arrays import Array

MAX_ROWS = 64  # maximum rows of a recorded step


@dataclass(frozen=True, slots=True)
class HostOperation:
    """A Python call between kernel stages; a step that contains one cannot be recorded."""

    run: Callable[[], object]


Operation: TypeAlias = Stage | HostOperation


@dataclass(slots=True, kw_only=True)
class Step:
    """The buffers that the operations of a step with M rows read and write."""

    hidden: Array  # (M, hidden size)
    normed: Array  # (M, hidden size)
    branch: Array  # (M, hidden size): second norm output, or attention or MLP output before a norm
    projected: Array  # (M, queries + keys + values)
    query: Array  # (M, heads, head_dim)
    attended: Array  # (M, heads, head_dim)
    inner: Array  # (M, intermediate size)
    values: Array  # (M, intermediate size): used if gates and values are separate products
    angles: dict[str, tuple[Array, Array]]  # cosines and sines, (M, rotary_dim) each
    query_scales: Array | None  # (M,)
    slots: Array  # (M,) int64
    pool: KVPool
    loras: LoraRows | None = None  # None: no row uses LoRA weights
    capture: Capture | None = None  # None: no activations are kept

    def lora_operations(self, *product: Any, **part: Any) -> list[HostOperation]:
        """Return an operation that calls `LoraRows.add_` with these arguments, in a list.

        The list is empty if no row uses LoRA weights.
        """
        loras = self.loras
        return [] if loras is None else [HostOperation(lambda: loras.add_(*product, **part))]

    def first_rows(self, num_rows: int) -> Step:
        """Return a step whose buffers are views of the first `num_rows` rows of this step's buffers."""

        def cut(part: Any) -> Any:
            if isinstance(part, np.ndarray):
                return part[:num_rows]
            if isinstance(part, dict):
                return {kind: tuple(map(cut, angles)) for kind, angles in part.items()}
            return part

        return replace(self, **{part.name: cut(getattr(self, part.name)) for part in fields(self)})


Attend: TypeAlias = Callable[[Step, int, ScoreRule], Operation]
"""Given step, layer and score rule, returns the operation that writes attention outputs to `step.attended`.

The operation reads the queries from `step.query`.
"""


@dataclass(frozen=True, slots=True)
class Launch:
    """A recorded step for a fixed number of rows: its buffers, attention contexts and kernel stages."""

    step: Step
    contexts: RowPlan
    series: Series


class Launches:
    """Runs steps with few rows on one KV cache; the first step with a given number of rows is recorded."""

    def __init__(self, step: Step, max_len: int) -> None:
        """Allocate the arrays for attention contexts that all recorded steps share.

        Args:
            step: buffers for a step with MAX_ROWS rows.
            max_len: maximum context length in tokens.
        """
        self._step = step
        self._recorded: dict[int, Launch] = {}
        self._contexts = RowPlan(
            queries=np.arange(MAX_ROWS, dtype=np.int32),
            begins=np.zeros(MAX_ROWS, dtype=np.int32),
            lengths=np.zeros(MAX_ROWS, dtype=np.int32),
            slots=np.zeros(MAX_ROWS * max_len, dtype=np.int32),
        )

    def can_run(self, plan: AttentionPlan) -> bool:
        """Return True if a plan has at most MAX_ROWS rows, uses this KV cache, and has no prompt chunks."""
        is_few = plan.rows is not None and not plan.chunks and len(plan.slots) <= MAX_ROWS
        return is_few and plan.pool is self._step.pool

    def run(
        self,
        ids: Array,
        places: Array,
        plan: AttentionPlan,
        *,
        is_long: bool,
        fill: Callable[..., None],
        operations: Callable[[Step, Attend], list[Operation]],
    ) -> Array:
        """Run a step with M rows; return its final hidden states, (M, hidden size).

        The returned array is valid until the next step.

        Args:
            ids: (M,) int64 token ids.
            places: (M,) int64 positions.
            plan: a plan that `can_run` accepts.
            is_long: use the long rotary frequencies (longrope).
            fill: `Decoder.fill`. Neither it nor `operations` is kept, because a reference back to the decoder
                would leave its weights to the garbage collector.
            operations: `Decoder.operations`.
        """
        assert plan.rows is not None
        launch = self._recorded.get(len(ids))
        if launch is None:
            launch = self._recorded[len(ids)] = self._record(len(ids), operations)
        fill(launch.step, ids, places, is_long=is_long)
        launch.step.slots[:] = plan.slots
        contexts, rows = launch.contexts, plan.rows
        contexts.begins[:], contexts.lengths[:] = rows.begins, rows.lengths
        contexts.slots[: len(rows.slots)] = rows.slots
        launch.series.run()
        return launch.step.normed

    def _record(self, num_rows: int, operations: Callable[[Step, Attend], list[Operation]]) -> Launch:
        plan = self._contexts
        contexts = RowPlan(
            plan.queries[:num_rows], plan.begins[:num_rows], plan.lengths[:num_rows], plan.slots
        )

        def attend(step: Step, layer: int, rule: ScoreRule) -> Stage:
            keys, values = step.pool.keys[layer], step.pool.values[layer]
            return rows_stage(step.query, keys, values, contexts, step.attended, rule)

        step = self._step.first_rows(num_rows)
        made = operations(step, attend)
        stages = [operation for operation in made if isinstance(operation, Stage)]
        assert len(stages) == len(made), "a recorded step has no host operations"
        return Launch(step, contexts, Series(stages))
