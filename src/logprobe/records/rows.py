"""Per-step rows of log-probabilities: `DeviceRows` on the compute device, `HostRows` on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from logprobe.records.store.columns import Array

Column: TypeAlias = "Array | Tensor"
"""A NumPy array if the compute device is the CPU, otherwise a torch tensor."""
Send: TypeAlias = "Callable[[Tensor], Callable[[], Tensor]]"
"""Function that starts copying a tensor to the host and returns a function that waits for the copy."""
EXTRAS: Final[dict[str, np.dtype[Any]]] = {
    "entropy": np.dtype(np.float32),  # nats, entropy of the position's full distribution
    "log_kept_mass": np.dtype(np.float32),  # nats, log of the probability that masks and truncation kept
    "varentropy": np.dtype(np.float32),  # nats², variance of the surprisal under the full distribution
    "margin": np.dtype(np.float32),  # nats, difference of the two largest logprobs; inf if only one is finite
}
"""Optional columns with one number per position, and their dtypes.

A name added here is carried through IPC, records, bytes, Arrow, tables and JSON as soon as a kernel or the
sampler fills it. Each column computed by a kernel has a flag of the same name in `SamplingParams`.
NaN means that a value is missing; all other values are allowed, including infinities (-9999 and 9999 in
JSON).
The order is the column order in files: append new names, never reorder.
"""
KERNEL_EXTRAS: Final = tuple(name for name in EXTRAS if name != "log_kept_mass")
"""Columns that a kernel computes on request; `log_kept_mass` comes from the sampler with processed rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenLogprobs:
    """Log-probabilities of caller-specified token ids, any number per row."""

    offsets: Column  # (B + 1,) int64: row b owns entries [offsets[b], offsets[b + 1])
    token_ids: Column  # (N,) int32
    logprobs: Column  # (N,) float32, nats
    ranks: Column  # (N,) int32: 1 + number of strictly greater logits

    def rows(self, start: int, stop: int) -> GivenLogprobs:
        """Return rows [start, stop); the entry arrays are shared whole, so the offsets stay valid."""
        return GivenLogprobs(
            offsets=self.offsets[start : stop + 1],
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            ranks=self.ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Log-probabilities and other values computed from rows of logits; column 0 is the chosen token.

    The fields are NumPy arrays if the logits are on the CPU, otherwise torch tensors on their device.
    """

    token_ids: Column  # (B, k + 1) int32; row b has num_logprobs[b] + 1 entries, the others are undefined
    logprobs: Column  # (B, k + 1) float32, nats
    ranks: Column  # (B,) int32, of the chosen token: 1 + number of strictly greater logits
    lse: Column  # (B,) float32, log-sum-exp of the row's logits
    num_logprobs: Column  # (B,) int32, k of each row
    is_valid: Column  # (B,) bool; False if the row's logits had NaN or +inf, or only -inf
    extras: Mapping[str, Column] = field(default_factory=dict)  # (B,) each; requested columns from EXTRAS
    given: GivenLogprobs | None = None  # caller-specified ids; None if there are none

    def __repr__(self) -> str:
        return f"<DeviceRows: {len(self.ranks)} rows, k = {self.token_ids.shape[1] - 1}>"

    @property
    def entropy(self) -> Column | None:
        """(B,) float32, nats; None if not requested."""
        return self.extras.get("entropy")

    def rows(self, start: int, stop: int) -> DeviceRows:
        """Return rows [start, stop) as views; `given` is cut as in `GivenLogprobs.rows`."""
        own = slice(start, stop)
        return DeviceRows(
            token_ids=self.token_ids[own],
            logprobs=self.logprobs[own],
            ranks=self.ranks[own],
            lse=self.lse[own],
            num_logprobs=self.num_logprobs[own],
            is_valid=self.is_valid[own],
            extras={name: column[own] for name, column in self.extras.items()},
            given=None if self.given is None else self.given.rows(start, stop),
        )

    def to_host(self) -> HostRows:
        """Return the rows on the host: the arrays themselves, or one packed copy from another device."""
        return self.arriving(lambda packed: packed.cpu)()

    def arriving(self, send: Send) -> Callable[[], HostRows]:
        """Start copying as `to_host` does; return a function that waits for the copy and returns the rows."""
        columns = [self.token_ids, self.logprobs, self.ranks, *self.extras.values()]
        if self.given is not None:
            columns += [self.given.offsets, self.given.token_ids, self.given.logprobs, self.given.ranks]
        arrive = arriving(columns, send)

        def rows() -> HostRows:
            token_ids, logprobs, ranks, *others = arrive()
            count = len(self.extras)
            extras = dict(zip(self.extras, others, strict=False))
            given = GivenLists.of(*others[count:]) if self.given is not None else None
            return HostRows(token_ids, logprobs, ranks, extras, given)

        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenLists:
    """Log-probabilities of caller-specified ids, any number per row, on the host."""

    offsets: Array  # (N + 1,) int64: row n owns entries [offsets[n], offsets[n + 1])
    token_ids: Array  # (M,) int32
    logprobs: Array  # (M,) float32, nats
    ranks: Array  # (M,) int32: 1 + number of strictly greater logits

    @classmethod
    def of(cls, offsets: Array, token_ids: Array, logprobs: Array, ranks: Array) -> GivenLists:
        """Create from columns in the order of `columns`."""
        return cls(offsets=offsets, token_ids=token_ids, logprobs=logprobs, ranks=ranks)

    def rows(self, start: int, stop: int) -> GivenLists:
        """Return rows [start, stop) as views of this object's entries."""
        offsets = self.offsets[start : stop + 1]
        entries = slice(int(offsets[0]), int(offsets[-1]))
        return GivenLists(
            offsets=offsets - offsets[0],
            token_ids=self.token_ids[entries],
            logprobs=self.logprobs[entries],
            ranks=self.ranks[entries],
        )

    @classmethod
    def joined(cls, parts: Sequence[HostRows]) -> GivenLists | None:
        """Concatenate the `given` of several `HostRows`; parts without it contribute empty rows."""
        if all(part.given is None for part in parts):
            return None
        empty = [np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32)]
        columns = [empty if part.given is None else part.given.columns()[1:] for part in parts]
        counts = [
            np.zeros(len(part), np.int64) if part.given is None else np.diff(part.given.offsets)
            for part in parts
        ]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(counts))])
        return cls.of(offsets, *(np.concatenate(column) for column in zip(*columns, strict=True)))

    def columns(self) -> list[Array]:
        """Return [offsets, ids, logprobs, ranks], the order that `FlatLogprobs.append_rows` expects."""
        return [self.offsets, self.token_ids, self.logprobs, self.ranks]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLists:
    """Token ids that masks and truncation kept in each row, on the host."""

    offsets: Array  # (N + 1,) int64: row n owns entries [offsets[n], offsets[n + 1])
    token_ids: Array  # (M,) ascending within a row; narrowest integer type for the vocabulary

    @classmethod
    def of(cls, runs: Sequence[Array]) -> KeptLists:
        """Concatenate one array of ids per row."""
        return cls(offsets=np.cumsum([0, *map(len, runs)]), token_ids=np.concatenate(runs))

    @classmethod
    def joined(cls, parts: Sequence[HostRows]) -> KeptLists | None:
        """Concatenate the `kept` of several `HostRows`; parts without it contribute empty rows."""
        if all(part.kept is None for part in parts):
            return None
        none = np.empty(0, np.uint16)
        return cls.of(
            [run for part in parts for run in ([none] * len(part) if part.kept is None else part.kept.runs())]
        )

    def runs(self) -> list[Array]:
        """Return one array of ids per row."""
        return np.split(self.token_ids, self.offsets[1:-1])

    def rows(self, start: int, stop: int) -> KeptLists:
        """Return rows [start, stop) with copied ids, so that they do not keep all rows in memory."""
        offsets = self.offsets[start : stop + 1]
        ids = self.token_ids[int(offsets[0]) : int(offsets[-1])]
        return KeptLists(offsets=offsets - offsets[0], token_ids=ids.copy())


class HostRows:
    """Log-probability rows of one width in host memory; immutable once created.

    Rank 0 marks an invalid row, whose logits had NaN or +inf, or only -inf. A row for which fewer than k
    alternatives were requested fills its first columns; the other columns are undefined, and `narrowed`
    drops them.
    """

    # Not a dataclass: msgspec would encode it field by field, but rows cross processes as ranges of blocks.
    __slots__ = ("extras", "given", "kept", "logprobs", "ranks", "token_ids")

    token_ids: Final[Array]  # (N, k + 1) int32, column 0 the chosen token
    logprobs: Final[Array]  # (N, k + 1) float32, nats
    ranks: Final[Array]  # (N,) int32, of the chosen token: 1 + number of strictly greater logits
    extras: Final[Mapping[str, Array]]  # (N,) each; columns named in EXTRAS
    given: Final[GivenLists | None]  # caller-specified ids; None if there are none
    kept: Final[KeptLists | None]  # ids that masks and truncation kept; None if not requested

    def __init__(
        self,
        token_ids: Array,
        logprobs: Array,
        ranks: Array,
        extras: Mapping[str, Array] | None = None,
        given: GivenLists | None = None,
        kept: KeptLists | None = None,
    ) -> None:
        self.token_ids, self.logprobs, self.ranks = token_ids, logprobs, ranks
        self.extras = {} if extras is None else extras
        self.given, self.kept = given, kept

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"<HostRows: {len(self)} rows, k = {self.k}>"

    @property
    def k(self) -> int:
        """Number of alternatives per row."""
        return int(self.token_ids.shape[1]) - 1

    @property
    def is_valid(self) -> Array:
        """(N,) bool; False if the row's logits had NaN or +inf, or only -inf."""
        is_valid: Array = self.ranks > 0
        return is_valid

    def rows(self, start: int, stop: int) -> HostRows:
        """Return rows [start, stop) as views of this object's arrays; only the ids in `kept` are copied."""
        own = slice(start, stop)
        return HostRows(
            self.token_ids[own],
            self.logprobs[own],
            self.ranks[own],
            {name: column[own] for name, column in self.extras.items()} if self.extras else None,
            None if self.given is None else self.given.rows(start, stop),
            None if self.kept is None else self.kept.rows(start, stop),
        )

    def narrowed(self, k: int) -> HostRows:
        """Return the rows with `k` alternatives each; if narrower, as a copy, so that `self` can be freed."""
        if k == self.k:
            return self
        # Copy the 1-D columns too: arrays from a device are views of one buffer that holds all columns.
        return HostRows(
            self.token_ids[:, : k + 1].copy(),
            self.logprobs[:, : k + 1].copy(),
            self.ranks.copy(),
            {name: column.copy() for name, column in self.extras.items()},
            None if self.given is None else GivenLists.of(*map(np.copy, self.given.columns())),
            self.kept,
        )

    @classmethod
    def joined(cls, parts: Sequence[HostRows]) -> HostRows:
        """Concatenate one or more `HostRows`; narrower ones are padded with zeros."""
        if len(parts) == 1:
            return parts[0]
        k = max(part.k for part in parts)
        return cls(
            np.concatenate([_widened(part.token_ids, k) for part in parts]),
            np.concatenate([_widened(part.logprobs, k) for part in parts]),
            np.concatenate([part.ranks for part in parts]),
            _joined_extras(parts),
            GivenLists.joined(parts),
            KeptLists.joined(parts),
        )


def _widened(column: Array, k: int) -> Array:
    missing = k + 1 - column.shape[1]
    return np.pad(column, ((0, 0), (0, missing))) if missing else column


def _joined_extras(parts: Sequence[HostRows]) -> dict[str, Array]:
    """Concatenate each extra column that any part has, with NaN for the rows of parts without that column."""
    return {
        name: np.concatenate(
            [
                part.extras[name] if name in part.extras else np.full(len(part), np.nan, dtype)
                for part in parts
            ]
        )
        for name, dtype in EXTRAS.items()
        if any(name in part.extras for part in parts)
    }


def host_array(values: npt.ArrayLike | Tensor) -> Array:
    """Convert a list, an array, or a tensor on any device to a NumPy array; bfloat16 becomes float32."""
    if not hasattr(values, "detach"):
        array = np.asarray(values)
        return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    tensor: Tensor = values.detach().cpu()
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()


def on_host(columns: Sequence[Column]) -> list[Array]:
    """Return arrays, or tensors on one device, as NumPy arrays; only tensors off the CPU are copied."""
    return arriving(columns, lambda packed: packed.cpu)()


def arriving(columns: Sequence[Column], send: Send) -> Callable[[], list[Array]]:
    """Start copying as `on_host` does; return a function that waits for the copy and returns the arrays.

    Tensors on another device than the CPU become one packed copy.
    """
    if all(isinstance(column, np.ndarray) or column.device.type == "cpu" for column in columns):
        return lambda: [column if isinstance(column, np.ndarray) else column.numpy() for column in columns]
    return _arriving(columns, send)


def _arriving(tensors: Sequence[Any], send: Send) -> Callable[[], list[Array]]:
    import torch

    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    # Start each tensor at a multiple of 8 bytes, so that its view is aligned.
    starts = np.cumsum([0, *(-(-size // 8) * 8 for size in sizes)]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.uint8, device=tensors[0].device)
    for tensor, start, size in zip(tensors, starts, sizes, strict=False):
        packed[start : start + size] = tensor.contiguous().view(-1).view(torch.uint8)
    arrive = send(packed)

    def arrays() -> list[Array]:
        data = arrive()
        return [
            data[start : start + size].view(tensor.dtype).view(tensor.shape).numpy()
            for tensor, start, size in zip(tensors, starts, sizes, strict=False)
        ]

    return arrays
