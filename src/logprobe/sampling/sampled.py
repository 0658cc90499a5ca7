"""`SampledRows`: the tokens drawn from some rows of a step, and the numbers that were asked about them.

Before it: the sampler, a chunk of rows at a time. After it: the recorder, which cuts it into messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from logprobe.records.rows import DeviceRows, HostRows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logprobe.records.host import Send
    from logprobe.records.store.columns import Array

PER_ROW = ("sampled_token_ids", "is_valid", "num_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """Tokens sampled from B rows; `logprobs_rows` and `processed_rows` say which rows' numbers there are."""

    sampled_token_ids: Array  # (B,) integers
    is_valid: Array  # (B,) bool; False: the logits held NaN or +inf, or nothing but -inf
    num_logprobs: Array  # (B,) integers, the alternatives that each row asked for; 0 where it asked for none
    logprobs: DeviceRows | HostRows | None = None  # raw; None: not asked for
    logprobs_rows: Array  # (B,) integers, the row of `logprobs`; -1: none
    processed_logprobs: HostRows | None = None  # of what the tokens were drawn from
    processed_rows: Array  # (B,) integers, the row of `processed_logprobs`; -1: none
    whole_rows: dict[int, Array] = field(default_factory=dict)  # row → its distribution, (V,) nats, read-only

    @classmethod
    def joined(cls, parts: Sequence[SampledRows]) -> SampledRows:
        """Several parts of a step, on the host, one after another."""
        if len(parts) == 1:
            return parts[0]
        raw, raw_rows = _joined([(part.raw_on_host, part.logprobs_rows) for part in parts])
        processed, rows = _joined([(part.processed_logprobs, part.processed_rows) for part in parts])
        starts = np.cumsum([0, *(part.batch_size for part in parts)]).tolist()
        return cls(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in PER_ROW},
            logprobs=raw,
            logprobs_rows=raw_rows,
            processed_logprobs=processed,
            processed_rows=rows,
            whole_rows={
                start + row: whole
                for start, part in zip(starts, parts, strict=False)
                for row, whole in part.whole_rows.items()
            },
        )

    @property
    def batch_size(self) -> int:
        """Number of rows that were drawn from."""
        return len(self.sampled_token_ids)

    @property
    def raw_on_host(self) -> HostRows | None:
        """The raw numbers, which are on the host by now."""
        assert not isinstance(self.logprobs, DeviceRows), "a step's numbers are on the host by now"
        return self.logprobs

    def to_host(self) -> SampledRows:
        """The same with the raw numbers on the host."""
        raw = self.logprobs
        return replace(self, logprobs=raw.to_host()) if isinstance(raw, DeviceRows) else self

    def arriving(self, send: Send | None) -> Callable[[], SampledRows]:
        """`to_host` in two: copies begin now where they can be sent, and what is returned waits for them."""
        raw = self.logprobs
        if send is None or not isinstance(raw, DeviceRows):
            return self.to_host
        arrive = raw.arriving(send)
        return lambda: replace(self, logprobs=arrive())


def _joined(parts: Sequence[tuple[HostRows | None, Array]]) -> tuple[HostRows | None, Array]:
    """The numbers of some rows of each part → all of them, and for each row of all parts its place there."""
    present = [rows for rows, _ in parts if rows is not None]
    starts = np.cumsum([0, *(0 if rows is None else len(rows) for rows, _ in parts)]).tolist()
    places = [np.where(own < 0, -1, own + start) for (_, own), start in zip(parts, starts, strict=False)]
    return HostRows.joined(present) if present else None, np.concatenate(places)
