"""KV cache and hidden states of decoders that compute with torch tensors, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from logprobe.kernels.arrays import as_array
from logprobe.kernels.placement import as_tensor

if TYPE_CHECKING:
    from logprobe.engine.forward.process_memory import PagedMemory
    from logprobe.kernels.arrays import Array
    from logprobe.models.lora import LoraWeights
    from logprobe.records.values import IntArray


def new_zeros(shape: tuple[int, ...], dtype: str, device: str, memory: PagedMemory | None) -> torch.Tensor:
    """Return a zeroed tensor, allocated from `memory` unless that is None."""
    own: torch.dtype = getattr(torch, dtype)
    if memory is None:
        return torch.zeros(shape, dtype=own, device=device)
    bits = {2: np.int16, 4: np.int32}[own.itemsize]  # NumPy has no bfloat16
    return torch.from_numpy(memory.take(shape, bits)).view(own)


@torch.inference_mode()
def rows_of(hidden: torch.Tensor, slots: IntArray) -> Array | torch.Tensor:
    """Return the rows of `hidden` in `slots`: an array on a CPU, a tensor on a GPU."""
    indices = torch.from_numpy(slots.astype(np.int64)).to(hidden.device)
    return _as_rows(hidden.index_select(0, indices))


@torch.inference_mode()
def logits_of(decoder: Any, hidden: Array | torch.Tensor, lora: LoraWeights | None) -> Array | torch.Tensor:
    """Return float32 logits (rows, vocabulary) of states: an array on a CPU, a tensor on a GPU."""
    return _as_rows(decoder.head(as_tensor(hidden), lora))


def _as_rows(rows: torch.Tensor) -> Array | torch.Tensor:
    return as_array(rows) if rows.device.type == "cpu" else rows
