"""Pad records of different lengths into (B, T) arrays with a mask, for batched losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from logprobe.errors import MissingPackageError, require
from logprobe.records.flat import FlatLogprobs
from logprobe.records.rows import EXTRAS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from logprobe.records.rows import Column
    from logprobe.records.store.columns import Array

Padding: TypeAlias = Literal["right", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedLogprobs:
    """Chosen tokens of B records, padded to T columns; the padding is 0 (`pad_token_id` in `token_ids`).

    The fields are NumPy arrays; `to` returns them as torch tensors.
    """

    token_ids: Column  # (B, T) int64, `pad_token_id` where `mask` is False
    logprobs: Column  # (B, T) float32, nats
    mask: Column  # (B, T) bool, True at real tokens
    extras: dict[str, Column] = field(default_factory=dict)  # (B, T) each; columns that all records have

    @property
    def entropy(self) -> Column | None:
        """(B, T) float32, nats; None if any record lacks it."""
        return self.extras.get("entropy")

    @property
    def log_kept_mass(self) -> Column | None:
        """(B, T) float32, nats; None if any record lacks it."""
        return self.extras.get("log_kept_mass")

    def to(self, device: torch.device | str) -> PaddedLogprobs:
        """Return all columns as torch tensors on a device; on the CPU they share the arrays' memory.

        Raises:
            MissingPackageError: torch is not installed.
        """
        try:
            import torch
        except ImportError as error:
            raise MissingPackageError("tensors need torch; pip install 'logprobe[torch]'") from error
        return PaddedLogprobs(
            token_ids=torch.as_tensor(self.token_ids, device=device),
            logprobs=torch.as_tensor(self.logprobs, device=device),
            mask=torch.as_tensor(self.mask, device=device),
            extras={name: torch.as_tensor(column, device=device) for name, column in self.extras.items()},
        )


def to_padded(
    records: Sequence[FlatLogprobs],
    *,
    length: int | None = None,
    side: Padding = "right",
    pad_token_id: int = 0,
) -> PaddedLogprobs:
    """Stack the chosen tokens of records and their log-probabilities into padded arrays of one shape.

    Args:
        records: records of completions or scores. Every position must have entries; a prompt's first
            position has none.
        length: number of columns T; None for the length of the longest record.
        side: side on which padding is added.
        pad_token_id: token id of the padding.

    Raises:
        ParameterError: `records` is one record, a record is longer than `length`, a position has no entries,
            or `side` is unknown.
    """
    is_one = isinstance(records, FlatLogprobs)
    require(not is_one, "records", "must be a list of records; pass [record] for one")
    require(side in ("right", "left"), "side", f"must be right or left, got {side!r}")
    for number, record in enumerate(records):
        is_whole = bool((np.diff(record.arrays.offsets) > 0).all())
        require(is_whole, "records", f"record {number} has a position without entries; slice it off")
    longest = max(map(len, records), default=0)
    width = longest if length is None else length
    require(longest <= width, "length", f"is {width}, but a record has {longest} positions")

    def padded(columns: Sequence[Array], dtype: npt.DTypeLike, fill: int = 0) -> Array:
        table = np.full((len(records), width), fill, dtype)
        for row, values in zip(table, columns, strict=True):
            row[slice(len(values)) if side == "right" else slice(width - len(values), None)] = values
        return table

    extras = [record.extras for record in records]
    chosen = [record.chosen_entries() for record in records]
    return PaddedLogprobs(
        token_ids=padded([entries.token_ids for entries in chosen], np.int64, pad_token_id),
        logprobs=padded([entries.logprobs for entries in chosen], np.float32),
        mask=padded([np.ones(len(record), np.bool_) for record in records], np.bool_),
        extras={
            name: padded([columns[name] for columns in extras], dtype)
            for name, dtype in EXTRAS.items()
            if extras and all(name in columns for columns in extras)
        },
    )
