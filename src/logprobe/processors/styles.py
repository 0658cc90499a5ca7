"""Processors written for other engines, registered as they are: one instance, shown a step in its own words.

A class says its style by the argument of its `update_state`: `batch` is this library's own; `batch_update` is
told what has changed of the batch, and meets every row; `share_inputs` looks at all slots that run, and meets
the requests that give its arguments. It need not know this library: `styled` derives what the pipeline runs.
"""

from __future__ import annotations

import functools
import inspect
import types
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, final

from logprobe.errors import ParameterError
from logprobe.processors.interface import LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logprobe.config import EngineConfig
    from logprobe.processors.batch import BatchRow, BatchState, RowKey


class MoveDirectionality(Enum):
    """Whether a row is moved to another's index, or two change places."""

    UNIDIRECTIONAL = "one way"
    SWAP = "both ways"

    def __eq__(self, other: object) -> bool:
        """By name: a processor may compare with the same words of the engine that it was written for."""
        return self.name == getattr(other, "name", None)

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """What has changed of a batch, to be taken in this order: removed, added, moved.

    An added row at an index that was taken replaces what was there.
    """

    batch_size: int
    removed: Sequence[int]  # indices, descending
    added: Sequence[tuple[int, Any, list[int], Sequence[int]]]  # index, params, prompt, output (it grows)
    moved: Sequence[tuple[int, int, MoveDirectionality]]  # from, to


@final
class StyledParams:
    """A request's parameters with its processors' arguments as `extra_args`, None where it gives none."""

    def __init__(self, params: Any, extra_args: dict[str, Any] | None) -> None:
        self._params = params
        self.extra_args = extra_args or None

    @classmethod
    def of(cls, params: Any) -> StyledParams:
        """Those of a request's `SamplingParams`."""
        return cls(params, dict(getattr(params, "logits_processors_args", None) or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._params, name)


class UpdateStyle(LogitsProcessor):
    """Is told what has changed of the batch (`batch_update`), and meets every row."""

    applies_to_all: ClassVar[bool] = True
    keeps_rows: ClassVar[bool] = True  # it does not say otherwise

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing: where the class's own calls `super().__init__`, it means another's."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise `ValueError` where a request's parameters can never be served; from any thread."""


class SlotStyle(LogitsProcessor):
    """Looks at all slots that run (`share_inputs`), and meets the requests that give its arguments."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing, as above."""


STYLES: dict[str, Any] = {"batch_update": UpdateStyle, "share_inputs": SlotStyle}


def styled(kind: Any) -> Any:
    """The class that a class written in another style runs as, derived from it; any other as it is.

    What the class itself says (`applies_to_all`, `keeps_rows`, `Args`, ...) comes before its style's.

    Raises:
        ParameterError: it cannot be derived from.
    """
    style = _style_of(kind)
    return kind if style is None or issubclass(kind, style) else _derived(kind, style)


def arguments_of(kind: type, config: EngineConfig) -> list[Any]:
    """What `__init__` of an `UpdateStyle` gets of (config, device, is_pin_memory): as much as it asks for."""
    import torch

    device = torch.device("cpu" if config.device == "auto" else config.device)
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


class Updates:
    """Tells one instance of `UpdateStyle` what has changed since it was told last."""

    def __init__(self, update_state: Callable[[BatchUpdate | None], object]) -> None:
        self._update_state = update_state
        self._told: list[RowKey] | None = []  # by index; None: it failed, and may hold anything
        self._num_told = 0  # the most rows that it was ever told of

    def show(self, batch: BatchState) -> None:
        """Call `update_state`, with None where the rows are the same in the same order."""
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
        names["keeps_state"] = True  # a row of a draft has no index to be told by
    try:
        return types.new_class(kind.__name__, (kind, style), exec_body=lambda body: body.update(names))
    except TypeError as error:
        raise ParameterError("logits_processors", f"{kind!r} cannot be derived from: {error}") from error


def _has_own_init(kind: type) -> bool:
    return kind.__init__ is not UpdateStyle.__init__  # type: ignore[misc]


def _added(index: int, row: BatchRow) -> tuple[int, Any, list[int], Sequence[int]]:
    return (index, StyledParams.of(row.params), [*map(int, row.prompt_token_ids)], row.output_token_ids)


def _anew(rows: Sequence[BatchRow], num_told: int) -> BatchUpdate:
    """All rows from the start: each replaces what may be there, and what is beyond them goes."""
    added = [_added(index, row) for index, row in enumerate(rows)]
    return BatchUpdate(len(rows), [*range(len(rows), num_told)][::-1], added, [])


def _changes(known: Sequence[RowKey], rows: Sequence[BatchRow]) -> BatchUpdate:
    """From one order of rows to another: new ones take freed indices, the last ones what is left of these."""
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
