"""Run processors that were written for other engines, unchanged, by calling them in their engine's style.

The name of `update_state`'s argument selects the style. `batch` is this library's style. With
`batch_update` (vLLM), the processor gets the changes of the batch, and every row. With `share_inputs`
(slot-based engines), it gets all running slots, and changes the rows of requests that set its arguments.
The class need not import this library: `styled` derives the class that the pipeline runs. Such classes get
torch tensors, which on a CPU share the memory of the rows.
"""

from __future__ import annotations

import functools
import inspect
import types
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, final

from logprobe.errors import ParameterError
from logprobe.kernels.placement import torch_for
from logprobe.processors.interface import LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logprobe.config import EngineConfig
    from logprobe.processors.batch import BatchRow, BatchState, RowKey


class MoveDirectionality(Enum):
    """Direction of a move in a batch: one row moves to another index, or two rows are swapped."""

    UNIDIRECTIONAL = "one way"
    SWAP = "both ways"

    def __eq__(self, other: object) -> bool:
        """Compare by name, so that members equal the members of the other engine's enum."""
        return self.name == getattr(other, "name", None)

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """Changes of a batch, to be applied in this order: removed, added, moved.

    An added row at an occupied index replaces the previous row.
    """

    batch_size: int
    removed: Sequence[int]  # indices, descending
    added: Sequence[tuple[int, Any, list[int], Sequence[int]]]  # index, params, prompt, live output list
    moved: Sequence[tuple[int, int, MoveDirectionality]]  # from, to


@final
class StyledParams:
    """A request's parameters, with its processor arguments as `extra_args` (None if there are none)."""

    def __init__(self, params: Any, extra_args: dict[str, Any] | None) -> None:
        self._params = params
        self.extra_args = extra_args or None

    @classmethod
    def of(cls, params: Any) -> StyledParams:
        """Create an instance from a request's `SamplingParams`."""
        return cls(params, dict(getattr(params, "logits_processors_args", None) or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._params, name)


class UpdateStyle(LogitsProcessor):
    """Base class of processors that receive every row and the changes of the batch (`batch_update`)."""

    applies_to_all: ClassVar[bool] = True
    keeps_rows: ClassVar[bool] = True  # this style cannot declare it, so assume that rows are recorded

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept any arguments, since a subclass may call `super().__init__` with its engine's arguments."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise `ValueError` if a request's parameters cannot be used; called from any thread."""


class SlotStyle(LogitsProcessor):
    """Base class of processors that get all running slots (`share_inputs`) and change their rows."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept any arguments, as in `UpdateStyle`."""


_PURPOSE = "logits processors in the style of vLLM or of slot-based engines"
STYLES: dict[str, Any] = {"batch_update": UpdateStyle, "share_inputs": SlotStyle}


def styled(kind: Any) -> Any:
    """Return a class derived from `kind` and the base class of its style; `kind` itself if it has no style.

    Attributes that the class sets (`applies_to_all`, `keeps_rows`, `Args`, ...) take precedence.

    Raises:
        ParameterError: the class cannot be subclassed.
    """
    style = _style_of(kind)
    return kind if style is None or issubclass(kind, style) else _derived(kind, style)


def arguments_of(kind: type, config: EngineConfig) -> list[Any]:
    """Return those of (config, device, is_pin_memory) that the `__init__` of an `UpdateStyle` class takes."""
    device = torch_for(_PURPOSE).device("cpu" if config.device == "auto" else config.device)
    in_order = (config, device, False)
    by_name = {"device": device, "is_pin_memory": False}
    values: list[Any] = []
    for index, parameter in enumerate(inspect.signature(kind).parameters.values()):
        if parameter.kind is parameter.VAR_POSITIONAL and _has_own_init(kind):
            values += in_order[index:]
        is_positional = parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
        is_known = parameter.name in by_name or parameter.name.endswith("config")
        is_asked = is_known or parameter.default is parameter.empty
        if not is_positional or not is_asked or index >= len(in_order):
            break
        values.append(by_name.get(parameter.name, in_order[index]))
    return values


def needs_tensors(processor: LogitsProcessor) -> bool:
    """Return True if a processor gets torch tensors; torch is then imported."""
    return isinstance(processor, UpdateStyle | SlotStyle) and torch_for(_PURPOSE) is not None


class Updates:
    """Computes the changes of the batch since the last update, for one `UpdateStyle` instance."""

    def __init__(self, update_state: Callable[[BatchUpdate | None], object]) -> None:
        self._update_state = update_state
        # keys by index; None after a failure, when the processor's state is unknown
        self._told: list[RowKey] | None = []
        self._num_told = 0  # largest number of rows in any update

    def show(self, batch: BatchState) -> None:
        """Call `update_state` with the changes, or with None if rows and order are unchanged."""
        known, self._told = self._told, None
        keys = [row.key for row in batch.rows]
        if known is None:
            update: BatchUpdate | None = _anew(batch.rows, self._num_told)
        else:
            update = None if known == keys else _changes(known, batch.rows)
        self._num_told = max(self._num_told, len(keys))
        self._update_state(update)
        self._told = keys


def _style_of(kind: Any) -> Any:
    try:
        parameters = list(inspect.signature(kind.update_state).parameters)
    except (AttributeError, TypeError, ValueError):
        return None
    return STYLES.get(parameters[1]) if len(parameters) > 1 else None


@functools.cache
def _derived(kind: Any, style: Any) -> Any:
    names: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    if style is UpdateStyle:
        names["keeps_state"] = True  # rows of draft tokens have no index in this style
    try:
        return types.new_class(kind.__name__, (kind, style), exec_body=lambda body: body.update(names))
    except TypeError as error:
        raise ParameterError("logits_processors", f"{kind!r} cannot be subclassed: {error}") from error


def _has_own_init(kind: type) -> bool:
    return kind.__init__ is not UpdateStyle.__init__  # type: ignore[misc]


def _added(index: int, row: BatchRow) -> tuple[int, Any, list[int], Sequence[int]]:
    return (index, StyledParams.of(row.params), [*map(int, row.prompt_token_ids)], row.output_token_ids)


def _anew(rows: Sequence[BatchRow], num_told: int) -> BatchUpdate:
    """Return an update that adds all rows again and removes rows at higher indices."""
    added = [_added(index, row) for index, row in enumerate(rows)]
    return BatchUpdate(len(rows), [*range(len(rows), num_told)][::-1], added, [])


def _changes(known: Sequence[RowKey], rows: Sequence[BatchRow]) -> BatchUpdate:
    """Return the update from one order of rows to another.

    New rows take the indices of removed rows; indices that are still free are filled with the last rows.
    """
    keys = [row.key for row in rows]
    wanted, before = set(keys), set(known)
    at: list[RowKey | None] = [key if key in wanted else None for key in known]
    freed = [index for index, key in enumerate(at) if key is None]
    added = []
    for row in rows:
        if row.key in before:
            continue
        if freed:
            index = freed.pop(0)
            at[index] = row.key
        else:
            index = len(at)
            at.append(row.key)
        added.append(_added(index, row))
    moved = []
    for index in freed:
        while at and at[-1] is None:
            at.pop()
        if index < len(at):
            moved.append((len(at) - 1, index, MoveDirectionality.UNIDIRECTIONAL))
            at[index] = at.pop()
    where = {key: index for index, key in enumerate(at)}
    for index, key in enumerate(keys):
        if (source := where[key]) != index:
            moved.append((source, index, MoveDirectionality.SWAP))
            at[source], at[index] = at[index], key
            where[at[source]] = source
    return BatchUpdate(len(rows), freed[::-1], added, moved)
