"""Input arrays of a GPU decoder's step: token ids, positions, KV slots and attention contexts.

All arrays are copied to the device in one transfer. Texts with few new tokens (decoding) use small attention
tiles, and prompt chunks use larger ones (`kernels.triton.attention`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from logprobe.kernels.triton.attention import Tiles, tile_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from logprobe.engine.forward.kv_cache import KVPool
    from logprobe.records.values import IntArray

    IntColumns = NDArray[np.int32]


@dataclass(frozen=True)
class SpanPlan:
    """The KV cache slots of a step's tokens, text by text."""

    pool: KVPool
    contexts: Sequence[IntArray]  # by text: int32 slots of the whole context, with the new tokens last
    lengths: Sequence[int]  # by text: number of new tokens
    device: torch.device

    @cached_property
    def slots(self) -> torch.Tensor:
        """The slots of all new tokens, (num_tokens,) int64 on the device."""
        return _to_device(self.new_slots.astype(np.int64), self.device)

    @cached_property
    def new_slots(self) -> IntColumns:
        """The slots of all new tokens, (num_tokens,) int32 on the host."""
        parts = [
            slots[len(slots) - length :] for slots, length in zip(self.contexts, self.lengths, strict=True)
        ]
        return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)

    @property
    def longest_chunk(self) -> int:
        """Always 0: only attention on a CPU has chunks, whose scratch memory the engine returns."""
        return 0

    @property
    def is_decode(self) -> bool:
        """True if every text has exactly one new token."""
        return all(length == 1 for length in self.lengths)

    @cached_property
    def max_context(self) -> int:
        """Number of tokens in the longest context."""
        return max((len(slots) for slots in self.contexts), default=0)

    @cached_property
    def flat_contexts(self) -> IntColumns:
        """The slots of all contexts, concatenated, int32 on the host."""
        return np.concatenate([np.asarray(slots, np.int32) for slots in self.contexts])


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Inputs of a step's kernels on the device."""

    token_ids: torch.Tensor  # (num_tokens,) int32
    positions: torch.Tensor  # (num_tokens,) int32
    slots: torch.Tensor  # (num_tokens,) int32; -1: padding row
    tiles: tuple[Tiles, ...]


def step_arrays(
    plan: SpanPlan, token_ids: NDArray[Any], positions: NDArray[Any], heads: int, kv_heads: int
) -> StepArrays:
    """Build the input arrays of a step, and copy them to the device.

    Args:
        plan: the step's slots and contexts.
        token_ids: (num_tokens,) integers.
        positions: (num_tokens,) integers.
        heads: number of query heads.
        kv_heads: number of key/value heads.
    """
    few = tile_tokens(heads, kv_heads, is_decode=True)
    many = tile_tokens(heads, kv_heads, is_decode=False)
    tiles: dict[bool, list[tuple[int, int, int, int]]] = {True: [], False: []}
    first = begin = longest = 0  # longest: context length among texts with small tiles
    for context, length in zip(plan.contexts, plan.lengths, strict=True):
        is_short = length <= few
        size = few if is_short else many
        longest = max(longest, len(context) if is_short else 0)
        for start in range(0, length, size):
            count = min(size, length - start)
            tiles[is_short].append((first + start, count, begin, len(context) - length + start + 1))
        first += length
        begin += len(context)
    kinds = [(rows, few if is_short else many, is_short) for is_short, rows in tiles.items() if rows]
    columns = [token_ids, positions, plan.new_slots]
    for rows, _, _ in kinds:
        columns.extend(np.array(rows, np.int32).T)
    ids, places, slots, *own, contexts = _copied([*columns, plan.flat_contexts], plan.device)
    made = []
    for number, (_, max_tokens, is_short) in enumerate(kinds):
        tokens, counts, begins, lengths = own[4 * number : 4 * number + 4]
        max_keys = longest if is_short else 0
        made.append(Tiles(tokens, counts, begins, lengths, contexts, max_tokens, max_keys))
    return StepArrays(ids, places, slots, tuple(made))


def _copied(columns: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy integer arrays to the device in one transfer, as int32."""
    lengths = [len(column) for column in columns]
    whole = _to_device(np.concatenate([np.asarray(column, np.int32) for column in columns]), device)
    return list(torch.split(whole, lengths))


def _to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(array)
    # Copies from pinned memory are asynchronous; PyTorch keeps the memory until the copy has ended.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
