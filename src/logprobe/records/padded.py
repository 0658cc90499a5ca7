"""Records of different lengths → tensors of one shape with a mask, as losses over batches take them.

Before it: the records of completions or scores. After it: a trainer.
"""

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
    """The chosen tokens of B records in T columns; where `mask` is False the numbers are 0."""

    token_ids: torch.Tensor  # (B, T) int64, the padding's id where masked
    logprobs: torch.Tensor  # (B, T) float32, nats
    mask: torch.Tensor  # (B, T) bool
    extras: dict[str, torch.Tensor] = field(default_factory=dict)  # (B, T) each, the columns that all have

    @property
    def entropy(self) -> torch.Tensor | None:
        """(B, T) float32, nats; None where a record has none."""
        return self.extras.get("entropy")

    @property
    def log_kept_mass(self) -> torch.Tensor | None:
        """(B, T) float32, nats; None where a record has none."""
        return self.extras.get("log_kept_mass")

    def to(self, device: torch.device | str) -> PaddedLogprobs:
        """The same on another device."""
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
    """The chosen tokens of records, with their numbers, as tensors of one shape.

    Args:
        records: those of completions or scores; a position without numbers (a prompt's first) is refused.
        length: columns; None: as many as the longest record has positions.
        side: where the padding stands.
        pad_token_id: the id that stands there.

    Raises:
        ParameterError: a record longer than `length`, a position without numbers, an unknown side.
    """
    import torch

    require(side in ("right", "left"), "side", f"must be right or left, got {side!r}")
    for number, record in enumerate(records):
        is_whole = bool((np.diff(record.arrays.offsets) > 0).all())
        require(is_whole, "records", f"number {number} has a position without numbers; slice it off")
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
