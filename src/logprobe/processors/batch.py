"""The rows of an engine step and their samples, which a processor's `update_state` receives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np

from logprobe.kernels.placement import torch_for
from logprobe.processors.arguments import keys_of, plain, to_args

if TYPE_CHECKING:
    import msgspec
    from numpy.typing import NDArray
    from torch import Tensor

    from logprobe.processors.arguments import RequestParams

RowKey: TypeAlias = tuple[str, int, int]


@final
class ArgsView(Mapping[str, Any]):
    """A request's processor arguments as plain values; `a["x"]` and `a.x` return a value, or None."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, key: str) -> Any:
        return self._values.get(key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # probed by copy and pickle
            raise AttributeError(name)
        return self._values.get(name)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, or `default` if it is missing."""
        return self._values.get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"ArgsView({self._values!r})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRow:
    """One row of logits, with its sample and the request's arguments for one processor."""

    request_id: str
    args: Any  # the processor's `Args`; an `ArgsView` if it declares none
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # tokens generated so far; the list grows between steps
    params: RequestParams | None = None  # the request's `SamplingParams`
    sample: int = 0  # index of the sample within its request
    serial: int = 0  # distinguishes requests that reuse an id one after the other
    arguments: ArgsView = field(default_factory=ArgsView)  # all arguments of the request, as plain values

    @property
    def key(self) -> RowKey:
        """Key for per-sample state, which stays the same in all steps even if the row's index changes."""
        return (self.request_id, self.sample, self.serial)

    @property
    def name(self) -> str:
        """The request id, followed by `#` and the sample's index if the index is not 0."""
        return f"{self.request_id}#{self.sample}" if self.sample else self.request_id


@final
class BatchState(Mapping[str, Any]):
    """The rows of a step, in the order of the logits' rows, and the changes since the previous step.

    It is also a mapping in the format of slot-based engines, with torch tensors and lists as values. For B
    rows, it has these keys:

    - `stop_flags`: (B, 1) bool, all False;
    - `req_ids`: list of B strings;
    - `logits_processors_args`: list of B `ArgsView`s;
    - `prompt_ids`: (B, longest prompt) int64, padded with -1;
    - `prompt_lens`: (B, 1) int64;
    - `pre_ids`: the generated tokens, (B, longest output) int64, padded with -1;
    - `next_tokens`: the last generated token or -1, (B, 1) int64;
    - `step_idx`: the number of generated tokens, (B, 1) int64.
    """

    def __init__(self, rows: Sequence[BatchRow], previous: Sequence[BatchRow] = ()) -> None:
        self.rows = tuple(rows)
        self._previous = tuple(previous)

    @cached_property
    def keys_of_rows(self) -> frozenset[RowKey]:
        """The keys of all rows."""
        return frozenset(row.key for row in self.rows)

    @cached_property
    def added(self) -> list[int]:
        """Indices of the rows whose samples were not in the previous step: new ones, and resumed ones."""
        before = {row.key for row in self._previous}
        return [index for index, row in enumerate(self.rows) if row.key not in before]

    @cached_property
    def removed(self) -> list[BatchRow]:
        """Rows of the previous step that are not in this one: finished or preempted samples."""
        return [row for row in self._previous if row.key not in self.keys_of_rows]

    @cached_property
    def moved(self) -> list[tuple[int, int]]:
        """Pairs (previous index, current index) of the rows whose index changed."""
        before = {row.key: index for index, row in enumerate(self._previous)}
        indices = [(before.get(row.key, index), index) for index, row in enumerate(self.rows)]
        return [(old, new) for old, new in indices if old != new]

    @cached_property
    def is_same(self) -> bool:
        """True if rows and arguments equal those of the previous step, in the same order."""
        return len(self.rows) == len(self._previous) and all(
            row.key == before.key and row.args is before.args
            for row, before in zip(self.rows, self._previous, strict=True)
        )

    def __getitem__(self, key: str) -> Any:
        return _VIEWS[key](self.rows)

    def __iter__(self) -> Iterator[str]:
        return iter(_VIEWS)

    def __len__(self) -> int:
        return len(_VIEWS)


def as_batch(batch: BatchState | Mapping[str, Any], args_type: type[msgspec.Struct]) -> BatchState:
    """Convert the inputs of a slot-based engine to a `BatchState`; slots with a stop flag are skipped.

    A `BatchState` is returned unchanged.
    """
    if isinstance(batch, BatchState):
        return batch
    slots = [slot for slot, is_stopped in enumerate(plain(batch["stop_flags"])) if not _first(is_stopped)]
    return BatchState([_slot_row(batch, slot, args_type) for slot in slots])


def _slot_row(inputs: Mapping[str, Any], slot: int, args_type: type[msgspec.Struct]) -> BatchRow:
    values = dict(inputs["logits_processors_args"][slot] or {})
    known = {key: plain(values[key]) for key in keys_of(args_type) if values.get(key) is not None}
    names = inputs.get("req_ids")
    return BatchRow(
        request_id=str(slot) if names is None else names[slot],
        args=to_args(known, args_type, "logits_processors_args"),
        prompt_token_ids=_slot_ids(inputs, "prompt_ids", "prompt_lens", slot),
        output_token_ids=_slot_ids(inputs, "pre_ids", "step_idx", slot),
        arguments=ArgsView(values),
    )


def _slot_ids(inputs: Mapping[str, Any], ids_key: str, count_key: str, slot: int) -> list[int]:
    if inputs.get(ids_key) is None:
        return []
    ids = [token_id for token_id in plain(inputs[ids_key][slot]) if token_id >= 0]
    counts = inputs.get(count_key)
    return ids if counts is None else ids[: _first(plain(counts[slot]))]


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _padded(lists: Sequence[Sequence[int]]) -> Tensor:
    longest = max((len(ids) for ids in lists), default=0)
    padded = np.full((len(lists), longest), -1, np.int64)
    for index, ids in enumerate(lists):
        padded[index, : len(ids)] = ids
    return _tensor(padded)


def _column(values: Sequence[int]) -> Tensor:
    return _tensor(np.array(values, np.int64).reshape(-1, 1))


def _tensor(values: NDArray[Any]) -> Tensor:
    tensor: Tensor = torch_for("processors of slot-based engines").from_numpy(values)
    return tensor


_VIEWS: dict[str, Callable[[Sequence[BatchRow]], Any]] = {
    "stop_flags": lambda rows: _tensor(np.zeros((len(rows), 1), np.bool_)),
    "req_ids": lambda rows: [row.name for row in rows],
    "logits_processors_args": lambda rows: [row.arguments for row in rows],
    "prompt_ids": lambda rows: _padded([row.prompt_token_ids for row in rows]),
    "prompt_lens": lambda rows: _column([len(row.prompt_token_ids) for row in rows]),
    "pre_ids": lambda rows: _padded([row.output_token_ids for row in rows]),
    "next_tokens": lambda rows: _column([(row.output_token_ids or [-1])[-1] for row in rows]),
    "step_idx": lambda rows: _column([len(row.output_token_ids) for row in rows]),
}
