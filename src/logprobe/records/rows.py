"""Rows of numbers: `DeviceRows` where they are computed, `HostRows` from there to the record.

Before them: the extraction kernels and the sampler. After them: messages, and the records of requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from logprobe.records.store.columns import Array

Send: TypeAlias = "Callable[[Tensor], Callable[[], Tensor]]"
"""Begins to copy a tensor to the host; what it returns waits for the copy and gives it."""
EXTRAS: Final[dict[str, np.dtype[Any]]] = {
    "entropy": np.dtype(np.float32),  # nats, of the position's whole distribution
    "log_kept_mass": np.dtype(np.float32),  # nats, of what masks and truncation kept of a processed row
    "varentropy": np.dtype(np.float32),  # nats squared, variance of the surprisal under the distribution
    "margin": np.dtype(np.float32),  # nats between the two likeliest; inf where no second one is possible
}
"""The further columns of one number a position.

What is named here crosses every wall and stands in records, bytes, Arrow, tables and JSON as soon as a kernel
or the sampler fills it. Each that a kernel gives has a flag of its name in `SamplingParams`.
NaN says that none was given; every other number may stand, the infinite ones too (JSON has -9999 and 9999).
The order is that of the columns in files: new ones come last, and none is ever moved.
"""
KERNEL_EXTRAS: Final = tuple(name for name in EXTRAS if name != "log_kept_mass")
"""Those that a kernel gives to who asks; the sampler knows the other one, with every processed row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenLogprobs:
    """Log-probabilities of token ids that the caller named, any number a row."""

    offsets: Tensor  # (B + 1,) int64: row b owns entries [offsets[b], offsets[b + 1])
    token_ids: Tensor  # (N,) int32
    logprobs: Tensor  # (N,) float32, nats
    ranks: Tensor  # (N,) int32: 1 + number of strictly greater logits

    def rows(self, start: int, stop: int) -> GivenLogprobs:
        """Rows [start, stop); the offsets stay absolute, into the same entries."""
        return GivenLogprobs(
            offsets=self.offsets[start : stop + 1],
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            ranks=self.ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Rows of logits, each reduced to the numbers asked for; column 0 is the chosen token."""

    token_ids: Tensor  # (B, k + 1) int32; row b holds num_logprobs[b] + 1 entries, the rest is undefined
    logprobs: Tensor  # (B, k + 1) float32, nats
    ranks: Tensor  # (B,) int32, of the chosen token: 1 + number of strictly greater logits
    lse: Tensor  # (B,) float32, log-sum-exp of the row's logits
    num_logprobs: Tensor  # (B,) int32, k of each row
    is_valid: Tensor  # (B,) bool; False where the row held NaN or +inf, or nothing but -inf
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # (B,) each, the columns of EXTRAS asked for
    given: GivenLogprobs | None = None  # ids that the caller named; None where there are none

    def __repr__(self) -> str:
        return f"<DeviceRows: {len(self.ranks)} rows, k = {self.token_ids.shape[1] - 1}>"

    @property
    def entropy(self) -> Tensor | None:
        """(B,) float32, nats; None where it was not asked for."""
        return self.extras.get("entropy")

    def rows(self, start: int, stop: int) -> DeviceRows:
        """Rows [start, stop) as views; the named ids keep their absolute offsets."""
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
        """The same rows on the host: views of what lies on the CPU, else one packed copy."""
        return self.arriving(lambda packed: packed.cpu)()

    def arriving(self, send: Send) -> Callable[[], HostRows]:
        """`to_host` in two: what lies elsewhere is sent now, and what is returned waits for it."""
        tensors = [self.token_ids, self.logprobs, self.ranks, *self.extras.values()]
        if self.given is not None:
            tensors += [self.given.offsets, self.given.token_ids, self.given.logprobs, self.given.ranks]
        arrive = arriving(tensors, send)

        def rows() -> HostRows:
            token_ids, logprobs, ranks, *others = arrive()
            count = len(self.extras)
            extras = dict(zip(self.extras, others, strict=False))
            given = GivenLists.of(*others[count:]) if self.given is not None else None
            return HostRows(token_ids, logprobs, ranks, extras, given)

        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenLists:
    """Log-probabilities of ids that the caller named, any number a row, on the host."""

    offsets: Array  # (N + 1,) int64: row n owns entries [offsets[n], offsets[n + 1])
    token_ids: Array  # (M,) int32
    logprobs: Array  # (M,) float32, nats
    ranks: Array  # (M,) int32: 1 + number of strictly greater logits

    @classmethod
    def of(cls, offsets: Array, token_ids: Array, logprobs: Array, ranks: Array) -> GivenLists:
        """The columns in the order of `columns`."""
        return cls(offsets=offsets, token_ids=token_ids, logprobs=logprobs, ranks=ranks)

    def rows(self, start: int, stop: int) -> GivenLists:
        """Rows [start, stop); shares memory."""
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
        """The named ids of several runs of rows; a run without any has rows without any."""
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
        """Offsets, ids, logprobs and ranks, as `FlatLogprobs.append_rows` takes them."""
        return [self.offsets, self.token_ids, self.logprobs, self.ranks]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLists:
    """The ids that masks and truncation kept of each row's distribution, on the host."""

    offsets: Array  # (N + 1,) int64: row n owns entries [offsets[n], offsets[n + 1])
    token_ids: Array  # (M,) ascending within a row; the narrowest integers that hold the vocabulary

    @classmethod
    def of(cls, runs: Sequence[Array]) -> KeptLists:
        """One run of ids a row."""
        return cls(offsets=np.cumsum([0, *map(len, runs)]), token_ids=np.concatenate(runs))

    @classmethod
    def joined(cls, parts: Sequence[HostRows]) -> KeptLists | None:
        """The kept ids of several runs of rows; a run without any has rows without any."""
        if all(part.kept is None for part in parts):
            return None
        none = np.empty(0, np.uint16)
        return cls.of(
            [run for part in parts for run in ([none] * len(part) if part.kept is None else part.kept.runs())]
        )

    def runs(self) -> list[Array]:
        """The ids of each row."""
        return np.split(self.token_ids, self.offsets[1:-1])

    def rows(self, start: int, stop: int) -> KeptLists:
        """Rows [start, stop); shares no memory, so that one row does not keep a step."""
        offsets = self.offsets[start : stop + 1]
        ids = self.token_ids[int(offsets[0]) : int(offsets[-1])]
        return KeptLists(offsets=offsets - offsets[0], token_ids=ids.copy())


class HostRows:
    """Rows of one width on the host; nothing is changed once they are made.

    A row that held NaN or +inf, or nothing but -inf, has rank 0. A row that asked for fewer alternatives than
    there is room for holds its own first; what follows is undefined, and `narrowed` leaves it away.
    """

    # No dataclass: msgspec would write one field by field, and rows cross a wall as ranges of blocks.
    __slots__ = ("extras", "given", "kept", "logprobs", "ranks", "token_ids")

    token_ids: Final[Array]  # (N, k + 1) int32, column 0 the chosen token
    logprobs: Final[Array]  # (N, k + 1) float32, nats
    ranks: Final[Array]  # (N,) int32, of the chosen token: 1 + number of strictly greater logits
    extras: Final[Mapping[str, Array]]  # (N,) each, the columns of EXTRAS that there are
    given: Final[GivenLists | None]  # ids that the caller named; None where there are none
    kept: Final[
        KeptLists | None
    ]  # the ids that masks and truncation kept; None where they were not asked for

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
        """Alternatives that each row has room for."""
        return int(self.token_ids.shape[1]) - 1

    @property
    def is_valid(self) -> Array:
        """(N,) bool; False where the row held NaN or +inf, or nothing but -inf."""
        is_valid: Array = self.ranks > 0
        return is_valid

    def rows(self, start: int, stop: int) -> HostRows:
        """Rows [start, stop); shares memory, but for the kept ids."""
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
        """The same rows with `k` alternatives each, in a block of its own: it keeps no wider one."""
        if k == self.k:
            return self
        # Single numbers too: what came from a device is one array, with the wide columns in it.
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
        """One or more runs of rows, one after another; narrow ones are filled up with zeros."""
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
    """Each column that one of them has; NaN in the others."""
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
    """A list, an array or a tensor of any device as an array; bfloat16, which NumPy has not, as float32."""
    if not hasattr(values, "detach"):
        return np.asarray(values)
    import torch

    tensor: Tensor = values.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def on_host(tensors: Sequence[Tensor]) -> list[Array]:
    """Tensors as arrays: views of what lies on the CPU, one packed copy of what lies elsewhere."""
    return arriving(tensors, lambda packed: packed.cpu)()


def arriving(tensors: Sequence[Tensor], send: Send) -> Callable[[], list[Array]]:
    """`on_host` in two: what lies elsewhere is packed and sent now, and what is returned waits for it."""
    import torch

    if all(tensor.device.type == "cpu" for tensor in tensors):
        return lambda: [tensor.numpy() for tensor in tensors]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    # Each begins at a multiple of 8 bytes, so that its view is aligned.
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
