"""Decode steps as CUDA graphs: one launch for all kernels of a step.

There is one graph for each batch size (ROWS) and each bound of the longest context (powers of two from
MIN_KEYS up). A graph is captured at its first use, and reads its inputs from buffers at fixed addresses.
Steps are padded to the batch size with empty rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from logprobe.engine.forward.torch.cuda.plan import StepArrays
from logprobe.kernels.triton.attention import Tiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from logprobe.engine.forward.kv_cache import KVPool
    from logprobe.engine.forward.torch.cuda.plan import SpanPlan

ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
MIN_KEYS: Final = 512
MAX_CONTEXT_SLOTS: Final = 1 << 22  # total context tokens of a step; 16 MB of int32


class StepGraphs:
    """Runs decode steps on one KV cache as CUDA graphs."""

    def __init__(
        self, forward: Callable[..., Tensor], pool: KVPool, max_len: int, device: torch.device
    ) -> None:
        """Allocate the input buffers.

        Args:
            forward: `CudaDecoder.forward`.
            pool: the KV cache.
            max_len: maximum length of a context in tokens.
            device: device of the decoder.
        """
        self._forward, self._pool, self._device = forward, pool, device
        self._graphs: dict[tuple[int, int, bool], tuple[Any, Tensor]] = {}
        self._memory: Any = None  # shared by all graphs: each step's result is used before the next runs
        self._stream: Any = None  # of all captures; the default one belongs to the first GPU that captured
        self._num_slots = min(ROWS[-1] * max_len, MAX_CONTEXT_SLOTS)
        # Six arrays by row: token id, position, slot, start and length of the context, number of tokens.
        self._columns = torch.zeros(6 * ROWS[-1], dtype=torch.int32, device=device)
        self._contexts = torch.zeros(self._num_slots, dtype=torch.int32, device=device)
        self._numbers = torch.arange(ROWS[-1], dtype=torch.int32, device=device)

    def can_run(self, plan: SpanPlan) -> bool:
        """Return True if a plan is a decode step on this cache whose texts and contexts fit the buffers."""
        num_rows = len(plan.lengths)
        is_few = plan.pool is self._pool and 0 < num_rows <= ROWS[-1] and plan.is_decode
        return is_few and sum(map(len, plan.contexts)) <= self._num_slots

    def run(
        self, token_ids: NDArray[Any], positions: NDArray[Any], plan: SpanPlan, *, is_long: bool
    ) -> Tensor:
        """Run a step; return its final hidden states, (num_tokens, hidden size).

        The returned tensor is valid until the next step.
        """
        num_rows = len(plan.lengths)
        size = next(size for size in ROWS if size >= num_rows)
        max_keys = max(MIN_KEYS, 1 << (plan.max_context - 1).bit_length())
        columns = np.zeros((6, size), np.int32)
        columns[2, num_rows:] = -1
        lengths = [len(slots) for slots in plan.contexts]
        begins = np.cumsum([0, *lengths])[:-1]
        columns[5, :num_rows] = 1
        columns[:5, :num_rows] = np.stack([token_ids, positions, plan.new_slots, begins, lengths])
        self._fill(self._columns, columns.ravel())
        self._fill(self._contexts, plan.flat_contexts)
        key = size, max_keys, is_long
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, hidden = self._graphs[key]
        graph.replay()
        return hidden[:num_rows]

    def _fill(self, target: Tensor, numbers: NDArray[np.int32]) -> None:
        host = torch.from_numpy(numbers).pin_memory()
        target[: len(numbers)].copy_(host, non_blocking=True)

    def _capture(self, size: int, max_keys: int, is_long: bool) -> tuple[Any, Tensor]:
        ids, positions, slots, begins, lengths, counts = torch.split(self._columns[: 6 * size], size)
        tiles = Tiles(
            tokens=self._numbers[:size],
            counts=counts,
            begins=begins,
            lengths=lengths,
            slots=self._contexts,
            max_tokens=1,
            max_keys=max_keys,
        )
        step = StepArrays(ids, positions, slots, (tiles,))
        cuda: Any = torch.cuda  # its type annotations are incomplete
        stream = self._stream = self._stream or cuda.Stream(self._device)
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):  # compiles the kernels; a second run of a step changes nothing
            self._forward(step, self._pool, is_long=is_long)
        cuda.current_stream().wait_stream(stream)
        graph = cuda.CUDAGraph()
        # "thread_local", because other threads copy results to the host during the capture.
        with cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
            hidden = self._forward(step, self._pool, is_long=is_long)
        self._memory = graph.pool()
        return graph, hidden
