"""Records as tables for inspection: one row per position, with token texts and without empty columns.

For a lossless conversion see the module `arrow`.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from logprobe.errors import MissingPackageError
from logprobe.records.forms.finite import IMPOSSIBLE, finite_fields
from logprobe.records.rows import EXTRAS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logprobe._arrow import pa
    from logprobe.records.store.rows import Rows
    from logprobe.records.values import TokenTable

ALWAYS: Final = ("position", "token_id", "token", "logprob", "rank")
# Shown after `EXTRAS` if any position has a value. The `entry_*` columns are left out: they repeat these.
OFTEN: Final = (
    "other_logprob",
    "top_ids",
    "top_tokens",
    "top_logprobs",
    "outside_top_logprob",
    "given_ids",
    "given_tokens",
    "given_logprobs",
    "given_ranks",
    "kept_ids",
)


def table(rows: Rows, tokens: TokenTable | None) -> pa.Table:
    """Return a table with one row per position; `info` is in the metadata.

    Columns: `ALWAYS`, then the non-empty ones of `EXTRAS` and `OFTEN`.
    """
    from logprobe._arrow import pa
    from logprobe.records.forms.arrow import batch_of

    batch = batch_of(rows)
    columns = {name: batch.column(name) for name in batch.schema.names}
    columns |= {name: pa.array(texts, kind) for name, (texts, kind) in _texts(rows, tokens, columns).items()}
    names = [name for name in (*EXTRAS, *OFTEN) if name in columns and _holds_something(columns[name])]
    shown = pa.table({name: columns[name] for name in (*ALWAYS, *names)})
    return shown.replace_schema_metadata(batch.schema.metadata)


def to_pandas(rows: Rows, tokens: TokenTable | None) -> Any:
    """Return `table` as a pandas data frame; integer columns with nulls use pandas' nullable dtypes."""
    try:
        import pandas as pd
    except ImportError as error:
        raise _missing("pandas") from error
    from logprobe._arrow import pa

    whole = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype()}
    return table(rows, tokens).to_pandas(types_mapper=whole.get)


def frame_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, floats: Sequence[str]) -> Any:
    """Return rows as a pandas data frame that has all of `columns`, even if there are no rows.

    The columns named in `floats` become float64, with NaN for None.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise _missing("pandas") from error
    return pd.DataFrame(rows, columns=list(columns)).astype(dict.fromkeys(floats, "float64"))


def to_polars(rows: Rows, tokens: TokenTable | None) -> Any:
    """Return `table` as a polars data frame."""
    try:
        import polars as pl
    except ImportError as error:
        raise _missing("polars") from error
    return pl.from_arrow(table(rows, tokens))


def to_dict(rows: Rows, tokens: TokenTable | None) -> dict[str, Any]:
    """Return a dict of plain values: `info`, and the rows of `table` under `positions`."""
    info = None if rows.info is None else rows.info.to_dict()
    return {"info": info, "positions": table(rows, tokens).to_pylist()}


def to_json(rows: Rows, tokens: TokenTable | None) -> str:
    """Return `to_dict` as JSON; -inf is written as -9999, which the field `floor` states, and NaN as null."""
    values = to_dict(rows, tokens)
    positions = [finite_fields(row) for row in values["positions"]]
    return json.dumps(
        {"info": values["info"], "floor": IMPOSSIBLE, "positions": positions}, ensure_ascii=False
    )


def _missing(library: str) -> MissingPackageError:
    return MissingPackageError(f"{library} is not installed; pip install 'logprobe[frames]'")


def _holds_something(column: pa.Array) -> bool:
    """Return True if any position has a value or, in a list column, a non-empty list."""
    from logprobe._arrow import pa

    return len(column.flatten() if pa.types.is_list(column.type) else column.drop_null()) > 0


def _texts(
    rows: Rows, tokens: TokenTable | None, columns: dict[str, pa.Array]
) -> dict[str, tuple[list[Any], Any]]:
    """Return the columns of token texts with their Arrow types; unknown texts are None."""
    from logprobe._arrow import pa

    known = _known_texts(rows, tokens)
    own = [
        texts.get(token_id) for texts, token_id in zip(known, columns["token_id"].to_pylist(), strict=True)
    ]
    top = [
        ids and [texts.get(token_id) for token_id in ids]
        for texts, ids in zip(known, columns["top_ids"].to_pylist(), strict=True)
    ]
    made: dict[str, tuple[list[Any], Any]] = {"token": (own, pa.string())}
    if any(text is not None for text in own):
        made["top_tokens"] = (top, pa.list_(pa.string()))
    if tokens is not None:
        given = [
            ids and [tokens.token_text(token_id) for token_id in ids]
            for ids in columns["given_ids"].to_pylist()
        ]
        made["given_tokens"] = (given, pa.list_(pa.string()))
    return made


def _known_texts(rows: Rows, tokens: TokenTable | None) -> list[dict[int, str | None]]:
    """Return the texts of each position's entries, by token id."""
    entries = rows.entries(0, rows.num_rows)
    ids, texts = entries.token_ids.tolist(), entries.text_list(tokens)
    return [
        dict(zip(ids[start:stop], texts[start:stop], strict=True))
        for start, stop in pairwise(entries.offsets.tolist())
    ]
