"""`SampledRows`: the tokens drawn from some rows of a step, and the numbers that were asked about them.

Before it: the sampler, a chunk of rows at a time. After it: the recorder, which cuts it into messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from logprobe.records.rows import DeviceRows, HostRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.records.host import Send
    from logprobe.records.store.columns import Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledRows:
    """Tokens sampled from B rows; `logprobs_rows` and `processed_rows` say which rows' numbers there are."""

    sampled_token_ids: Array  # (B,) integers
    is_valid: Array  # (B,) bool; False: the logits held NaN or +inf, or nothing but -inf
    num_logprobs: Array  # (B,) integers, the alternatives that each row asked for; 0 where it asked for none
    # Raw; None: not asked for. Where they are on their way to the host: what waits for them.
    logprobs: DeviceRows | HostRows | Callable[[], HostRows] | None = None
    logprobs_rows: Array  # (B,) integers, the row of `logprobs`; -1: none
    processed_logprobs: HostRows | None = None  # of what the tokens were drawn from
    processed_rows: Array  # (B,) integers, the row of `processed_logprobs`; -1: none
    whole_rows: dict[int, Array] = field(default_factory=dict)  # row → its distribution, (V,) nats, read-only

    @property
    def has_rows(self) -> bool:
        """Whether numbers of any row were asked for."""
        return self.logprobs is not None or self.processed_logprobs is not None

    def to_host(self) -> SampledRows:
        """The same with the raw numbers on the host."""
        raw = self.logprobs
        return replace(self, logprobs=raw.to_host()) if isinstance(raw, DeviceRows) else self

    def sent(self, send: Send | None) -> SampledRows:
        """The same, whose raw numbers are sent to the host now where they can be; `cut` waits for them."""
        raw = self.logprobs
        if not isinstance(raw, DeviceRows):
            return self
        return replace(self, logprobs=cache(raw.to_host if send is None else raw.arriving(send)))

    def cut(self, row: int, count: int) -> tuple[HostRows | None, HostRows | None]:
        """Raw and processed numbers of rows [row, row + count), which asked for the same; None: for none.

        Waits until the raw ones are on the host.
        """
        assert not isinstance(self.logprobs, DeviceRows), "they were sent"
        raw = self.logprobs() if callable(self.logprobs) else self.logprobs
        k = int(self.num_logprobs[row])
        return (
            _cut(raw, int(self.logprobs_rows[row]), count, k),
            _cut(self.processed_logprobs, int(self.processed_rows[row]), count, k),
        )


def _cut(rows: HostRows | None, first: int, count: int, k: int) -> HostRows | None:
    """Rows that lie together from `first` on, with `k` alternatives each; none below 0."""
    return None if rows is None or first < 0 else rows.rows(first, first + count).narrowed(k)
