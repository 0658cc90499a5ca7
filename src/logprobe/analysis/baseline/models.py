"""Save a baseline of a model, and compare models with it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from logprobe.analysis.baseline.file import (
    BaselineReader,
    BaselineWriter,
    Header,
    max_bytes,
    rows_a_block,
)
from logprobe.analysis.comparison import (
    Comparison,
    TokenPart,
    of_tokens,
    sequences,
    whole_parts,
    whole_scores,
)
from logprobe.analysis.scorer import check_scorer
from logprobe.errors import InputError, WeightsReplacedError, require
from logprobe.text.edge import SAME_TOKENS_PROBE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from logprobe.analysis.baseline.file import Run
    from logprobe.analysis.comparison import TextTokens, WholeRows
    from logprobe.analysis.scorer import Scorer
    from logprobe.records.values import IntArray
    from logprobe.text.edge import TextEdge


Waiting: TypeAlias = "tuple[IntArray, WholeRows, tuple[int, int] | None]"
"""Tokens, their rows and, if these start a text, the token before them and the text's index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Contents of a baseline file."""

    num_texts: int
    num_positions: int  # positions, each of which has a row over the whole vocabulary
    vocabulary_size: int
    num_bytes: int  # size of the file

    @property
    def share(self) -> float:
        """Size relative to a llama.cpp `--kl-divergence-base` file with the same number of rows."""
        return self.num_bytes / max(max_bytes(10 * self.num_positions, self.vocabulary_size), 1)


def save_baseline(
    llm: Scorer, texts: str | Iterable[str], path: str | Path, *, bos: bool | None = None
) -> Baseline:
    """Save a model's full next-token distributions on given texts, to compare other models with later.

    Args:
        llm: the reference model.
        texts: one or more texts, each no longer than the model's context.
        path: a name that ends in `.lpkl`; the file takes about a tenth of the bytes of llama.cpp's format.
        bos: True puts BOS (EOS if the model has no BOS) before each text, False does not, and None does what
            the tokenizer does.

    Raises:
        InputError: the file exists, or its name does not end in `.lpkl`.
        OutputError: the file cannot be written.
        ParameterError: no text has a token to score, or a text is longer than the context.
        BatchError: a request failed.
        WeightsReplacedError: the model's weights were replaced during the run.
    """
    check_scorer(llm, "llm")
    facts = llm.engine.capabilities()
    header = Header(
        vocabulary_size=facts.vocab_size,
        vocabulary=vocabulary_digest(llm.text),
        model=facts.model,
        weights=f"{facts.dtype} {facts.weights}",
        weight_version=facts.weight_version,
        lora=llm.lora,
    )
    writer = BaselineWriter(path, header)
    try:
        _write(llm, sequences([llm], texts, bos), writer, facts.vocab_size)
        require(writer.num_rows, "texts", "have no token to score; use longer texts or bos=True")
        _check_same_weights(llm, header)
        writer.finish()
    except BaseException:
        writer.leave()
        raise
    return Baseline(
        num_texts=writer.num_texts,
        num_positions=writer.num_rows,
        vocabulary_size=facts.vocab_size,
        num_bytes=writer.path.stat().st_size,
    )


def _check_same_weights(llm: Scorer, header: Header) -> None:
    if llm.engine.capabilities().weight_version != header.weight_version:
        raise WeightsReplacedError("the weights were replaced between the texts; save the baseline again")


def _write(llm: Scorer, texts: Iterator[TextTokens], writer: BaselineWriter, vocabulary_size: int) -> None:
    """Write the rows of all texts in blocks of up to `rows_a_block` rows; a block may span several texts."""
    size = rows_a_block(vocabulary_size)
    waiting: list[Waiting] = []
    num_waiting = 0
    for index, ids, _ in texts:
        for start, end, part in whole_parts(llm, ids, size):
            if num_waiting + end - start > size:
                _write_block(writer, waiting)
                waiting, num_waiting = [], 0
            waiting.append((ids[start:end], part, (int(ids[0]), index) if start == 1 else None))
            num_waiting += end - start
    if waiting:
        _write_block(writer, waiting)


def _write_block(writer: BaselineWriter, parts: list[Waiting]) -> None:
    places = np.cumsum([0, *(len(ids) for ids, _, _ in parts)]).tolist()
    starts = [
        (place, *first) for place, (_, _, first) in zip(places, parts, strict=False) if first is not None
    ]
    writer.write(
        np.concatenate([part.rows for _, part, _ in parts]),
        np.concatenate([ids for ids, _, _ in parts]),
        np.concatenate([part.token_logprobs for _, part, _ in parts]),
        starts,
    )


def compare_with_baseline(
    path: str | Path, llm: Scorer, texts: str | Iterable[str] | None = None, *, bos: bool | None = None
) -> Comparison:
    """Compare a baseline (A) with a model (B) on the baseline's tokens.

    Each position's KL divergence is an unbiased estimate with a standard error of at most
    `kl_error_by_position`.

    Args:
        path: the file that `save_baseline` wrote.
        llm: the model.
        texts: the texts that the baseline was saved with, or the first few of them; their tokens must equal
            the baseline's. None compares all rows, using the tokens in the file.
        bos: the value that `save_baseline` was called with.

    Raises:
        InputError: the file cannot be read, or was made with another vocabulary or other texts.
        ParameterError: a text is longer than the context.
        BatchError: a request failed.
    """
    check_scorer(llm, "llm")
    with closing(BaselineReader(path)) as reader:
        if reader.header.vocabulary != vocabulary_digest(llm.text):
            raise InputError(f"{path}: has a different vocabulary; compare models with the same tokenizer")
        width, size = reader.header.vocabulary_size, llm.engine.capabilities().vocab_size
        if width > size:
            raise InputError(
                f"{path}: has {width} tokens per row, but the model has only {size}; "
                "compare models with the same tokenizer"
            )
        if texts is None:  # text lengths in bytes are known only from the tokens
            count = llm.text.vocabulary.bytes_of
            return of_tokens([_part(run, llm, len(count(run.token_ids))) for run in reader.runs()])
        runs = _checked(reader.runs(), sequences([llm], texts, bos), path)
        return of_tokens([_part(run, llm, num_bytes) for run, num_bytes in runs])


def _checked(runs: Iterator[Run], texts: Iterator[TextTokens], path: str | Path) -> Iterator[tuple[Run, int]]:
    """Yield the baseline's runs that belong to `texts`, each with its number of text bytes.

    Raises InputError if the texts' tokens differ from the baseline's.
    """
    ids, sizes, stop = np.empty(0, np.int32), np.empty(0, np.int64), 0
    for run in runs:
        if run.is_first:
            is_whole, following = stop == len(ids), next(texts, None)
            _require_same(is_whole, path)
            if following is None:
                return
            index, ids, sizes = following
            _require_same(index == run.text_index, path)
        start, stop = len(run.context), len(run.context) + len(run.token_ids)
        is_same = np.array_equal(ids[:start], run.context) and np.array_equal(ids[start:stop], run.token_ids)
        _require_same(is_same, path)
        yield run, int(sizes[start:stop].sum())
    _require_same(stop == len(ids) and next(texts, None) is None, path)


def _require_same(is_same: bool, path: str | Path) -> None:
    if not is_same:
        raise InputError(
            f"{path}: has different texts; use the data and bos that it was saved with, or no texts"
        )


def _part(run: Run, llm: Scorer, num_bytes: int) -> TokenPart:
    """Score a run's tokens with a model, and compare the model's rows with the baseline's."""
    others = whole_scores(llm, (run.context, run.token_ids))
    width = run.kept.codes.shape[1]
    found = [run.kept.against(row, other[:width]) for row, other in enumerate(others.rows)]
    kl, kl_error, acceptance, acceptance_error = np.array(found).T
    return TokenPart(
        text_index=run.text_index,
        start=len(run.context),
        token_ids=run.token_ids,
        logprobs_a=run.logprobs.astype(np.float64),
        logprobs_b=others.token_logprobs,
        kl=kl,
        is_same_best=others.rows.argmax(axis=1) == run.best_ids,
        acceptance=acceptance,
        num_bytes=num_bytes,
        kl_error=kl_error,
        acceptance_error=acceptance_error,
    )


def vocabulary_digest(text: TextEdge) -> str:
    """Return a digest of all tokens' bytes and of the token ids of a probe text."""
    digest = sha256()
    vocabulary = text.vocabulary
    for token_id in range(len(vocabulary)):
        data = vocabulary.token_bytes(token_id)
        digest.update(len(data).to_bytes(4, "little") + data)
    digest.update(text.encode(SAME_TOKENS_PROBE).astype("<i4").tobytes())
    return f"sha256:{digest.hexdigest()}"
