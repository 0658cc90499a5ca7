"""Runs of `score_dataset` that kept their tokens, compared with another run or with a model.

Before it: stored files. After it: `Comparison`, of logprobs alone: a file holds no whole distributions.
"""

from __future__ import annotations

from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.errors import InputError, require
from logprobe.scoring.comparison import Comparison
from logprobe.scoring.scorer import prefix_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from logprobe.scoring.scorer import Scorer

ROWS_A_CALL = 64


def compare_stored(path_a: str | Path, path_b: str | Path) -> Comparison:
    """Compare two runs of `score_dataset` that kept their tokens: logprobs alone, row by row.

    Raises:
        InputError: a file that holds no tokens, or rows or tokens that differ.
    """
    parts, num_bytes = [], 0
    for mine, theirs in zip_longest(_stored(path_a), _stored(path_b)):
        same = mine is not None and theirs is not None
        if not (same and all(mine[name] == theirs[name] for name in ("row", "token_ids"))):
            raise InputError(
                f"{path_a}, {path_b}: their rows or tokens differ; score the same data with one model"
            )
        parts.append((mine["token_logprobs"], theirs["token_logprobs"]))
        num_bytes += mine["num_bytes"]
    return _of_rows(parts, num_bytes)


def compare_with_stored(
    path: str | Path, llm: Scorer, texts: Sequence[str], *, bos: bool | None = None
) -> Comparison:
    """Compare a run of `score_dataset` that kept its tokens (A) with what a model gives the same texts (B).

    Args:
        path: the run's Parquet file.
        llm: the model.
        texts: the data of the run, from its first row on.
        bos: as the run had it.

    Raises:
        InputError: a file that holds no tokens, or tokens that are not those of the texts.
        BatchError: a request failed.
    """
    prefix = prefix_of(llm.text, bos)
    parts, num_bytes = [], 0
    stored = _stored(path)
    while rows := list(islice(stored, ROWS_A_CALL)):
        pairs = []
        for row in rows:
            has_text = row["row"] < len(texts)
            text = texts[row["row"]] if has_text else ""
            ids = np.concatenate([prefix, llm.text.encode(text, add_special_tokens=False)])
            if ids[1:].tolist() != row["token_ids"]:
                raise InputError(
                    f"{path}: row {row['row']} is not what the model reads in the data; "
                    "give the run's own data, model family and BOS"
                )
            pairs.append((ids[:1], ids[1:]))
        scores = llm.score(pairs)
        parts += [
            (row["token_logprobs"], score.token_logprobs) for row, score in zip(rows, scores, strict=True)
        ]
        num_bytes += sum(row["num_bytes"] for row in rows)
    return _of_rows(parts, num_bytes)


def _of_rows(parts: Sequence[tuple[Any, Any]], num_bytes: int) -> Comparison:
    require(parts, "files", "hold no row")
    logprobs_a, logprobs_b = (
        np.concatenate(column).astype(np.float64) for column in zip(*parts, strict=True)
    )
    return Comparison(
        unit="token",
        num_positions=len(logprobs_a),
        num_bytes=num_bytes,
        logprobs_a=logprobs_a,
        logprobs_b=logprobs_b,
    )


def _stored(path: str | Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = ["row", "token_ids", "token_logprobs", "num_bytes"]
    try:
        with pq.ParquetFile(path) as file:
            if missing := [name for name in columns if name not in file.schema_arrow.names]:
                raise InputError(f"{path}: has no column {', '.join(missing)}; score it with tokens")
            for batch in file.iter_batches(columns=columns):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error
