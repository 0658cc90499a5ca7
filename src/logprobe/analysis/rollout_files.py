"""Stored samples (rollouts) and their Parquet files, in our own format or with the columns of TRL or verl.

A file has one row per completion, with the prompt ids, token ids and the sampler's logprobs. Parquet files of
records (one row per token) can be read too, but contain no prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from logprobe._arrow import pa, pq
from logprobe.analysis.io.files import reading
from logprobe.analysis.io.tables import INFO_KEY, parquet_rows, parquet_writer
from logprobe.errors import InputError, ParameterError, require
from logprobe.records.forms.arrow_validity import as_input_error
from logprobe.records.forms.versions import check_parquet, parquet_metadata
from logprobe.records.info import LogprobsInfo, check_same_info
from logprobe.records.parquet import iter_parquet
from logprobe.sampling.params import distribution_fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from logprobe.analysis.measures import Floats
    from logprobe.records import FlatLogprobs
    from logprobe.records.values import IntArray

MAX_ID: Final = 2**31 - 1
BYTES_A_GROUP: Final = 1 << 22
RECORD_COLUMNS: Final = {"request_id", "position", "token_id", "logprob"}
COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "name": ("request_id", "uid", "id"),
    "prompt_ids": ("prompt_token_ids", "prompt_ids", "prompts"),
    "prompt_mask": ("prompt_mask",),
    "token_ids": ("token_ids", "completion_ids", "response_ids", "responses"),
    "logprobs": (
        "logprobs",
        "rollout_log_probs",
        "sampling_per_token_logps",
        "old_log_probs",
        "old_per_token_logps",
    ),
    "mask": ("completion_mask", "response_mask", "loss_mask"),
    "log_kept_mass": ("log_kept_mass",),
    "top_ids": ("top_ids",),
    "top_logprobs": ("top_logprobs",),
}
"""Names of each column in our own format, TRL and verl; the first name that a file has is used."""

_SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.string()),
        pa.field("prompt_token_ids", pa.list_(pa.int32())),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("logprobs", pa.list_(pa.float32())),  # nats
        pa.field("log_kept_mass", pa.list_(pa.float32())),  # null if the logprobs are raw
        pa.field("top_ids", pa.list_(pa.list_(pa.int32()))),  # the k likeliest tokens per position
        pa.field("top_logprobs", pa.list_(pa.list_(pa.float32()))),
    ],
    parquet_metadata("rollouts"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """Additional tokens with their logprobs, any number per position."""

    offsets: IntArray  # (T + 1,): position t owns entries [offsets[t], offsets[t + 1])
    token_ids: IntArray  # (N,)
    logprobs: Floats  # (N,) nats


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A stored completion: its tokens and what the sampler reported about them."""

    name: str
    prompt_ids: IntArray | None = field(repr=False)  # None if not stored
    token_ids: IntArray = field(repr=False)  # (T,)
    logprobs: Floats = field(repr=False)  # (T,) nats, NaN if missing
    # (T,), loss mask; None means that all tokens count.
    is_counted: NDArray[np.bool_] | None = field(default=None, repr=False)
    log_kept_mass: Floats | None = field(default=None, repr=False)  # (T,) nats
    alternatives: Alternatives | None = field(default=None, repr=False)
    info: LogprobsInfo | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of_record(cls, name: str, prompt_ids: Sequence[int] | None, record: FlatLogprobs) -> Rollout:
        """Build a rollout from the record of a completion's tokens."""
        chosen, top = record.chosen_entries(), record.top_entries()
        mass = record.log_kept_mass
        return cls(
            name=name,
            prompt_ids=None if prompt_ids is None else np.asarray(prompt_ids, np.int64),
            token_ids=np.asarray(chosen.token_ids, np.int64),
            logprobs=np.ma.filled(chosen.logprobs.astype(np.float64), np.nan),
            log_kept_mass=None if mass is None else np.asarray(mass, np.float64),
            alternatives=None
            if not len(top.token_ids)
            else Alternatives(offsets=top.offsets, token_ids=top.token_ids, logprobs=top.logprobs),
            info=record.info,
        )


def write_rollouts(path: str | Path, outputs: Iterable[Any]) -> None:
    """Write the completions of `LLM.generate` outputs to a Parquet file, one row each, zstd-compressed.

    Processed logprobs (those of the sampling distribution) are written if the outputs have them, otherwise
    raw logprobs; the `LogprobsInfo` in the file's metadata says which, and has the sampling parameters.

    Raises:
        ParameterError: there are no completions, an output failed, a completion has no logprobs, or settings
            differ between completions.
    """
    require(isinstance(outputs, Iterable), "outputs", "must be a list of outputs; pass [output] for one")
    rows = _rows(outputs)
    first = next(rows, None)
    if first is None:
        raise ParameterError("outputs", "have no completions; there is nothing to write")
    info, _ = first
    with parquet_writer(path, _SCHEMA, None if info is None else info.to_json().encode()) as write:
        waiting, num_bytes = [], 0
        for other, row in chain([first], rows):
            check_same_info("outputs", f"completion {row['request_id'][0].as_py()!r}", other, info)
            waiting.append(row)
            num_bytes += row.nbytes
            if num_bytes >= BYTES_A_GROUP:
                write(pa.Table.from_batches(waiting))
                waiting, num_bytes = [], 0
        if waiting:
            write(pa.Table.from_batches(waiting))


def _rows(outputs: Iterable[Any]) -> Iterator[tuple[LogprobsInfo | None, pa.RecordBatch]]:
    """Yield each completion's `LogprobsInfo` and its row for the file."""
    for index, output in enumerate(outputs):
        fields = {} if output.params is None else distribution_fields(output.params)
        for number, completion in enumerate(output.outputs):
            error = completion.error
            require(error is None, "outputs", f"number {index} failed: {error}; leave out failed outputs")
            record = completion.processed_logprobs or completion.logprobs
            require(record is not None, "outputs", "have no logprobs; generate with logprobs=0 or more")
            row = _row(f"{output.request_id}-{number}", output.prompt_token_ids, record)
            info = None if record.info is None else msgspec.structs.replace(record.info, **fields)
            yield info, pa.RecordBatch.from_pylist([row], schema=_SCHEMA)


def _row(name: str, prompt_ids: Sequence[int], record: FlatLogprobs) -> dict[str, Any]:
    chosen, top = record.chosen_entries(), record.top_entries()
    splits = top.offsets[1:-1]
    mass = record.log_kept_mass
    has_top = len(top.token_ids) > 0
    return {
        "request_id": name,
        "prompt_token_ids": list(prompt_ids),
        "token_ids": chosen.token_ids.tolist(),
        "logprobs": chosen.logprobs.tolist(),
        "log_kept_mass": None if mass is None else mass.tolist(),
        "top_ids": [part.tolist() for part in np.split(top.token_ids, splits)] if has_top else None,
        "top_logprobs": [part.tolist() for part in np.split(top.logprobs, splits)] if has_top else None,
    }


def read_rollouts(
    path: str | Path, prompts: Mapping[str, Sequence[int]] | None = None, *, logprobs: str | None = None
) -> Iterator[Rollout]:
    """Yield stored completions one at a time, in bounded memory.

    Args:
        path: a file from `write_rollouts`, a trainer's Parquet file with columns such as `prompt_ids`,
            `completion_ids` and `logprobs` (TRL) or `prompts`, `responses` and `rollout_log_probs` (verl), or
            a file from `records.write_parquet`.
        prompts: prompt ids by completion name, for files without prompts.
        logprobs: name of the column with the logprobs, if the file has several.

    Raises:
        InputError: the file has none of these formats, or its columns are inconsistent.
    """
    with reading(path), pq.ParquetFile(path) as file:
        check_parquet(file.schema_arrow.metadata, path)
        names = file.schema_arrow.names
        if set(names) >= RECORD_COLUMNS:
            yield from _of_records(path, prompts or {})
        else:
            yield from _of_rows(path, file, _chosen_columns(path, names, logprobs), prompts or {})


def _of_records(path: str | Path, prompts: Mapping[str, Sequence[int]]) -> Iterator[Rollout]:
    for name, record in iter_parquet(path):
        yield Rollout.of_record(name, prompts.get(name), record)


def _chosen_columns(path: str | Path, names: Sequence[str], logprobs: str | None) -> dict[str, str]:
    known = COLUMNS if logprobs is None else COLUMNS | {"logprobs": (logprobs,)}
    found = {what: [name for name in own if name in names] for what, own in known.items()}
    for what in ("token_ids", "logprobs"):
        if not found[what]:
            raise InputError(f"{path}: has no column {' or '.join(known[what])}; it has {', '.join(names)}")
    return {what: own[0] for what, own in found.items() if own}


def _of_rows(
    path: str | Path, file: Any, columns: Mapping[str, str], prompts: Mapping[str, Sequence[int]]
) -> Iterator[Rollout]:
    metadata = file.schema_arrow.metadata or {}
    with as_input_error(path):
        info = LogprobsInfo.from_json(metadata[INFO_KEY]) if INFO_KEY in metadata else None
    for number, values in enumerate(parquet_rows(file, columns.values())):
        row = {what: values[name] for what, name in columns.items()}
        try:
            rollout = _rollout(row, number, prompts, info)
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{path}: row {number}: {error}") from error
        yield rollout


def _rollout(
    row: Mapping[str, Any], number: int, prompts: Mapping[str, Sequence[int]], info: LogprobsInfo | None
) -> Rollout:
    name = str(row.get("name", number))
    ids = _column(row, "token_ids", np.int64)
    assert ids is not None, "files without token ids are rejected"
    mask = _column(row, "mask", np.bool_, len(ids))
    # Masked tokens at the end are padding, whose ids may be outside the model's vocabulary.
    end = len(ids) if mask is None else int(np.flatnonzero(mask).max(initial=-1)) + 1
    logprobs = _column(row, "logprobs", np.float64, len(ids))
    mass = _column(row, "log_kept_mass", np.float64, len(ids))
    assert logprobs is not None, "files without logprobs are rejected"
    prompt = _column(row, "prompt_ids", np.int64)
    if prompt is None and name in prompts:
        prompt = np.asarray(prompts[name], np.int64)
    prompt_mask = None if prompt is None else _column(row, "prompt_mask", np.bool_, len(prompt))
    return Rollout(
        name=name,
        prompt_ids=prompt if prompt is None or prompt_mask is None else prompt[prompt_mask],
        token_ids=ids[:end],
        logprobs=logprobs[:end],
        is_counted=None if mask is None else mask[:end],
        log_kept_mass=None if mass is None else mass[:end],
        alternatives=_alternatives(row, len(ids), end),
        info=info,
    )


def _column(row: Mapping[str, Any], what: str, dtype: Any, length: int | None = None) -> Any:
    values = row.get(what)
    if values is None:
        if what in {"token_ids", "logprobs"}:
            raise InputError(f"has no {what}")
        return None
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or (length is not None and len(array) != length):
        raise InputError(f"{what} must be a list of {'numbers' if length is None else f'{length} numbers'}")
    if dtype is np.int64 and not _are_ids(array):
        raise InputError(f"{what} contains an invalid token id")
    if np.isposinf(array).any():
        raise InputError(f"{what} contains +inf")
    return array.astype(dtype)


def _alternatives(row: Mapping[str, Any], num_tokens: int, end: int) -> Alternatives | None:
    ids, logprobs = row.get("top_ids"), row.get("top_logprobs")
    if ids is None or logprobs is None or not end:
        return None
    if not (isinstance(ids, list) and isinstance(logprobs, list)):
        raise InputError("top_ids and top_logprobs must be lists")
    widths = [len(part) for part in ids[:end]]
    has_all = len(ids) == len(logprobs) == num_tokens
    if not has_all or widths != [len(part) for part in logprobs[:end]]:
        raise InputError("top_ids and top_logprobs must be lists of the same lengths, one per token")
    token_ids = np.concatenate([np.asarray(part, np.float64) for part in ids[:end]])
    numbers = np.concatenate([np.asarray(part, np.float64) for part in logprobs[:end]])
    if not _are_ids(token_ids):
        raise InputError("top_ids contains an invalid token id")
    if not (numbers < np.inf).all():
        raise InputError("top_logprobs contains NaN or +inf")
    return Alternatives(
        offsets=np.cumsum([0, *widths]), token_ids=token_ids.astype(np.int64), logprobs=numbers
    )


def _are_ids(numbers: Floats) -> bool:
    return bool(((numbers >= 0) & (numbers <= MAX_ID) & (numbers == np.floor(numbers))).all())
