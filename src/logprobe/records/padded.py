"""Pad records of different lengths into (B, T) tensors with a mask, for batched losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from logprobe.errors import require
from logprobe.records.rows import EXTRAS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from logprobe.records.flat import FlatLogprobs
    from logprobe.records.store.columns import Array

Padding: TypeAlias = Literal["right", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedLogprobs:
    """Chosen tokens of B records, padded to T columns; the padding is 0 (`pad_token_id` in `token_ids`)."""

    token_ids: torch.Tensor  # (B, T) int64, `pad_token_id` where `mask` is False
    logprobs: torch.Tensor  # (B, T) float32, nats
    mask: torch.Tensor  # (B, T) bool, True at real tokens
    # (B, T) each; columns that all records have
    extras: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def entropy(self) -> torch.Tensor | None:
        """(B, T) float32, nats; None if any record lacks it."""
        return self.extras.get("entropy")

    @property
    def log_kept_mass(self) -> torch.Tensor | None:
        """(B, T) float32, nats; None if any record lacks it."""
        return self.extras.get("log_kept_mass")

    def to(self, device: torch.device | str) -> PaddedLogprobs:
        """Copy all tensors to a device."""
        return PaddedLogprobs(
            token_ids=self.token_ids.to(device),
            logprobs=self.logprobs.to(device),
            mask=self.mask.to(device),
            extras={name: values.to(device) for name, values in self.extras.items()},
        )


def to_padded(
    records: Sequence[FlatLogprobs],
    *,
    length: int | None = None,
    side: Padding = "right",
    pad_token_id: int = 0,
) -> PaddedLogprobs:
    """Stack the chosen tokens of records and their log-probabilities into padded tensors of one shape.

    Args:
        records: records of completions or scores. Every position must have entries; a prompt's first
            position has none.
        length: number of columns T; None for the length of the longest record.
        side: side on which padding is added.
        pad_token_id: token id of the padding.

    Raises:
        ParameterError: a record is longer than `length`, a position has no entries, or `side` is unknown.
    """
    import torch

    require(side in ("right", "left"), "side", f"must be right or left, got {side!r}")
    for number, record in enumerate(records):
        is_whole = bool((np.diff(record.arrays.offsets) > 0).all())
        require(is_whole, "records", f"record {number} has a position without entries; slice it off")
    longest = max(map(len, records), default=0)
    width = longest if length is None else length
    require(longest <= width, "length", f"is {width}, but a record has {longest} positions")

    def tensor(columns: Sequence[Array], dtype: npt.DTypeLike, fill: int = 0) -> torch.Tensor:
        table = np.full((len(records), width), fill, dtype)
        for row, values in zip(table, columns, strict=True):
            row[slice(len(values)) if side == "right" else slice(width - len(values), None)] = values
        return torch.from_numpy(table)

    extras = [record.extras for record in records]
    chosen = [record.chosen_entries() for record in records]
    return PaddedLogprobs(
        token_ids=tensor([entries.token_ids for entries in chosen], np.int64, pad_token_id),
        logprobs=tensor([entries.logprobs for entries in chosen], np.float32),
        mask=tensor([np.ones(len(record), np.bool_) for record in records], np.bool_),
        extras={
            name: tensor([columns[name] for columns in extras], dtype)
            for name, dtype in EXTRAS.items()
            if extras and all(name in columns for columns in extras)
        },
    )
