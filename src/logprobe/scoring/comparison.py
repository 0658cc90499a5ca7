"""The same tokens through two models: how far apart their distributions and their logprobs are.

A is what should be (the reference, a trainer, a model before a change), B what is used in its place (fewer
bits, a sampler, a model after it). With the same vocabulary every position is compared; models of different
tokenizers are compared by what they give whole words and bytes. A run of `score_dataset` that kept its tokens
is compared by logprobs alone: its file holds no whole distributions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice, pairwise, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.errors import InputError, ParameterError, require
from logprobe.scoring import measures
from logprobe.scoring.score import whole_rows
from logprobe.scoring.scorer import prefix_of
from logprobe.scoring.texts import surprisal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from logprobe.records.values import IntArray
    from logprobe.scoring.scorer import Scorer
    from logprobe.scoring.texts import ScoredText

POSITIONS_A_CALL = 256  # whole rows of both models: some 200 KB each at a vocabulary of 49,152
CLIP = 0.2  # PPO's usual band
QUANTILES = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How some numbers lie."""

    mean: float
    max: float
    quantiles: dict[float, float]

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Spread:
        """The spread of at least one number."""
        values_at = np.quantile(values, QUANTILES)
        return cls(
            mean=float(values.mean()),
            max=float(values.max()),
            quantiles=dict(zip(QUANTILES, values_at.tolist(), strict=True)),
        )

    def to_dict(self) -> dict[str, float]:
        """Every figure by name, quantiles as percentiles."""
        percentiles = {f"p{100 * share:g}": value for share, value in self.quantiles.items()}
        return {"mean": self.mean, "max": self.max, **percentiles}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two models gave the same tokens; nats.

    Where their vocabularies differ, positions are words, and `kl`, `agreement` and the ratios are None.
    """

    unit: str  # what a position is: "token" or "word"
    num_positions: int
    num_bytes: int
    logprobs_a: NDArray[np.float64] = field(repr=False)  # (num_positions,)
    logprobs_b: NDArray[np.float64] = field(repr=False)
    text_indices: NDArray[np.int64] = field(repr=False)  # which text each position is of, from 0
    positions: NDArray[np.int64] = field(repr=False)  # in its text's tokens, the first being 0; or its words
    token_ids: NDArray[np.int64] | None = field(default=None, repr=False)  # None where positions are words
    words: Sequence[str] | None = field(default=None, repr=False)  # None where they are tokens
    kl_by_position: NDArray[np.float64] | None = field(default=None, repr=False)
    is_same_best: NDArray[np.bool_] | None = field(default=None, repr=False)

    @property
    def delta(self) -> Spread:
        """|logprob A - logprob B| over positions."""
        return Spread.of(np.abs(self.logprobs_a - self.logprobs_b))

    @property
    def bias(self) -> float:
        """Mean of logprob B - logprob A: below zero where B finds the texts less likely."""
        return float(np.mean(self.logprobs_b - self.logprobs_a))

    @property
    def kl(self) -> Spread | None:
        """KL divergence from B to A over positions, whole distributions."""
        return None if self.kl_by_position is None else Spread.of(self.kl_by_position)

    @property
    def agreement(self) -> float | None:
        """Share of positions where both find the same token most likely."""
        return None if self.is_same_best is None else float(np.mean(self.is_same_best))

    @property
    def ratios(self) -> NDArray[np.float64] | None:
        """Importance ratios p_A / p_B of each token: trainer A, sampler B."""
        if self.unit != "token":
            return None
        return measures.importance_ratios(self.logprobs_a, self.logprobs_b)

    @property
    def effective_sample_share(self) -> float | None:
        """Kish's effective sample size of the token ratios, as a share of the positions."""
        ratios = self.ratios
        return None if ratios is None else measures.effective_sample_size(ratios) / len(ratios)

    @property
    def clipped_share(self) -> float | None:
        """Share of ratios outside [0.8, 1.2], the usual clip band of PPO."""
        ratios = self.ratios
        return None if ratios is None else float(np.mean(np.abs(ratios - 1) > CLIP))

    def bits_per_byte(self) -> tuple[float | None, float | None]:
        """Of A and of B over the scored bytes."""
        sums = (float(self.logprobs_a.sum()), float(self.logprobs_b.sum()))
        a, b = (measures.bits_per_byte(logprob, self.num_bytes) for logprob in sums)
        return a, b

    def to_dict(self) -> dict[str, Any]:
        """Every figure by name, nested as JSON is; None where it has no meaning."""
        kl, ratios = self.kl, self.ratios
        bits_a, bits_b = self.bits_per_byte()
        return {
            "unit": self.unit,
            "num_positions": self.num_positions,
            "num_bytes": self.num_bytes,
            "kl": None if kl is None else kl.to_dict(),
            "agreement": self.agreement,
            "delta": self.delta.to_dict(),
            "bias": self.bias,
            "ratio": None if ratios is None else Spread.of(ratios).to_dict(),
            "clipped_share": self.clipped_share,
            "effective_sample_share": self.effective_sample_share,
            "bits_per_byte_a": bits_a,
            "bits_per_byte_b": bits_b,
        }

    def to_parquet(self, path: str | Path) -> None:
        """Write one row a position: its place, both logprobs, for tokens the KL and whether the best agree.

        `text_index` counts the texts (of stored runs it is their `row`), `position` the words of a text, or
        its tokens: 0 is BOS or, where none stands before it, the text's first token, and has no row; those
        after a stored context begin with 1.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns: dict[str, Any] = {"text_index": self.text_indices, "position": self.positions}
        columns |= {"token_id": self.token_ids} if self.words is None else {"word": self.words}
        columns |= {"logprob_a": self.logprobs_a, "logprob_b": self.logprobs_b}
        if self.kl_by_position is not None:
            columns |= {"kl": self.kl_by_position, "is_same_best": self.is_same_best}
        pq.write_table(pa.table(columns), path, compression="zstd")

    def plot(self, path: str | Path) -> None:
        """Draw both models' logprobs against each other, and how their differences lie (extra `plot`).

        Raises:
            ParameterError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ParameterError("plot", "needs matplotlib: pip install 'logprobe[plot]'") from error

        figure = Figure(figsize=(9, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot(self.logprobs_a, self.logprobs_b, ".", markersize=2)
        low = float(min(self.logprobs_a.min(), self.logprobs_b.min()))
        left.plot([low, 0], [low, 0], linewidth=0.8)
        left.set(
            xlabel="logprob A (nats)", ylabel="logprob B (nats)", title=f"{self.num_positions} {self.unit}s"
        )
        right.hist(self.logprobs_b - self.logprobs_a, bins=80, log=True)
        right.set(xlabel="logprob B - logprob A (nats)", ylabel=f"{self.unit}s")
        figure.savefig(path)


def compare(a: Scorer, b: Scorer, texts: Iterable[str], *, bos: bool | None = None) -> Comparison:
    """Score the same texts with two models and compare what they give.

    Args:
        a: the reference.
        b: what is used in its place; may be `a` itself, or `a.with_lora(name)`.
        texts: each no longer than both contexts.
        bos: put BOS (EOS where there is none) before each text, or do not; None: as the tokenizer does.

    Raises:
        ParameterError: no text that has a token to score, or one that is longer than a context.
        BatchError: a request failed.
    """
    if same_vocabulary(a, b):
        sequences = _sequences(a, texts, bos)
        return _of_tokens(a, [part for index, ids in sequences for part in _token_parts(a, b, index, ids)])
    return _of_words([(surprisal(a, text, bos=bos), surprisal(b, text, bos=bos)) for text in texts])


def same_vocabulary(a: Scorer, b: Scorer) -> bool:
    """Whether ids mean the same tokens to both, and texts become the same ids."""
    if a.text is b.text:
        return True
    mine, theirs = a.text, b.text
    same_pieces = len(mine.vocabulary) == len(theirs.vocabulary) and all(
        mine.vocabulary.token_bytes(i) == theirs.vocabulary.token_bytes(i)
        for i in range(len(mine.vocabulary))
    )
    probe = "The 12 cats\n\tdidn't é 🌊 你好"
    return same_pieces and mine.encode(probe).tolist() == theirs.encode(probe).tolist()


def _sequences(a: Scorer, texts: Iterable[str], bos: bool | None) -> Iterator[tuple[int, IntArray]]:
    prefix = prefix_of(a.text, bos)
    for index, text in enumerate(texts):
        ids = np.concatenate([prefix, a.text.encode(text, add_special_tokens=False)])
        if len(ids) > 1:
            yield index, ids


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPart:
    """Some positions of one text."""

    text_index: int
    start: int  # position of the first of them
    token_ids: IntArray  # (n,)
    logprobs_a: NDArray[np.float64]  # (n,) nats
    logprobs_b: NDArray[np.float64]
    kl: NDArray[np.float64]  # (n,) nats
    is_same_best: NDArray[np.bool_]  # (n,)


def _token_parts(a: Scorer, b: Scorer, index: int, ids: IntArray) -> Iterator[TokenPart]:
    """Positions by the hundreds: both models' whole rows of that many are held, never those of a text."""
    for start in range(1, len(ids), POSITIONS_A_CALL):
        end = min(start + POSITIONS_A_CALL, len(ids))
        pair = (ids[:start], ids[start:end])
        (mine,) = a.score([pair], logprobs=-1)
        (theirs,) = b.score([pair], logprobs=-1)
        assert mine.record is not None
        assert theirs.record is not None
        rows, others = whole_rows(mine.record), whole_rows(theirs.record)
        width = min(rows.shape[1], others.shape[1])  # a head may be padded
        rows, others = rows[:, :width], others[:, :width]
        yield TokenPart(
            text_index=index,
            start=start,
            token_ids=ids[start:end],
            logprobs_a=np.array(mine.token_logprobs),
            logprobs_b=np.array(theirs.token_logprobs),
            kl=measures.kl_divergence(rows, others),
            is_same_best=rows.argmax(axis=1) == others.argmax(axis=1),
        )


def _of_tokens(a: Scorer, parts: Sequence[TokenPart]) -> Comparison:
    require(parts, "texts", "hold no token to score; give longer ones, or bos=True")
    ids, logprobs_a, logprobs_b, kl, same = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("token_ids", "logprobs_a", "logprobs_b", "kl", "is_same_best")
    )
    text_indices, positions = _places((part.text_index, part.start, len(part.token_ids)) for part in parts)
    return Comparison(
        unit="token",
        num_positions=len(ids),
        num_bytes=len(a.text.vocabulary.bytes_of(ids.tolist())),
        logprobs_a=logprobs_a,
        logprobs_b=logprobs_b,
        text_indices=text_indices,
        positions=positions,
        token_ids=ids.astype(np.int64),
        kl_by_position=np.maximum(kl, 0.0),
        is_same_best=same,
    )


def _places(runs: Iterable[tuple[int, int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Text and position of each of some runs of positions, which come as (text, first position, length)."""
    indices, starts, lengths = np.array(list(runs), np.int64).T
    firsts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(indices, lengths), np.repeat(starts, lengths) + np.arange(lengths.sum()) - firsts


def _of_words(pairs: Sequence[tuple[ScoredText, ScoredText]]) -> Comparison:
    mine, theirs, num_bytes = [], [], 0
    words: list[str] = []
    runs = []
    for index, (a, b) in enumerate(pairs):
        if a.text != b.text:
            raise ParameterError(
                "texts", "one is spelled in two ways by the two tokenizers; normalise it (NFC)"
            )
        num_before = len(words)
        for text, logprob_a, logprob_b in common_units(a, b):
            words.append(text)
            mine.append(logprob_a)
            theirs.append(logprob_b)
            num_bytes += len(text.encode())
        runs.append((index, 0, len(words) - num_before))
    require(mine, "texts", "hold no word that both models score; give longer ones, or bos=True")
    text_indices, positions = _places(runs)
    return Comparison(
        unit="word",
        num_positions=len(mine),
        num_bytes=num_bytes,
        logprobs_a=np.array(mine),
        logprobs_b=np.array(theirs),
        text_indices=text_indices,
        positions=positions,
        words=words,
    )


def common_units(a: ScoredText, b: ScoredText) -> Iterator[tuple[str, float, float]]:
    """The smallest runs of words that are whole in both texts' tokens, where both score all of them."""
    ends_b = {unit.end for unit in b.words}
    bounds = [0] + [unit.end for unit in a.words if unit.end in ends_b]
    sums_a, sums_b = _sums(a, bounds), _sums(b, bounds)
    for (start, end), logprob_a, logprob_b in zip(pairwise(bounds), sums_a, sums_b, strict=True):
        if not (math.isnan(logprob_a) or math.isnan(logprob_b)):
            yield a.text[start:end], logprob_a, logprob_b


def _sums(text: ScoredText, bounds: Sequence[int]) -> list[float]:
    """The logprob between neighbouring bounds, NaN where a token is not scored."""
    words = text.words
    last_words = np.searchsorted([unit.end for unit in words], bounds[1:]).tolist()
    sums, first = [], 0
    for last in last_words:
        token_range = slice(words[first].first_token, words[last].end_token)
        sums.append(float(text.logprobs[token_range].sum()))
        first = last + 1
    return sums


# -- stored runs ---------------------------------------------------------------------------------------------

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
        parts.append((mine, theirs["token_logprobs"]))
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
        parts += [(row, score.token_logprobs) for row, score in zip(rows, scores, strict=True)]
        num_bytes += sum(row["num_bytes"] for row in rows)
    return _of_rows(parts, num_bytes)


def _of_rows(parts: Sequence[tuple[dict[str, Any], Sequence[float]]], num_bytes: int) -> Comparison:
    """Of stored rows, each with what the other model gives its tokens."""
    require(parts, "files", "hold no row")
    logprobs_a = np.concatenate([row["token_logprobs"] for row, _ in parts]).astype(np.float64)
    logprobs_b = np.concatenate([logprobs for _, logprobs in parts]).astype(np.float64)
    text_indices, positions = _places((row["row"], 1, len(row["token_ids"])) for row, _ in parts)
    return Comparison(
        unit="token",
        num_positions=len(logprobs_a),
        num_bytes=num_bytes,
        logprobs_a=logprobs_a,
        logprobs_b=logprobs_b,
        text_indices=text_indices,
        positions=positions,
        token_ids=np.concatenate([row["token_ids"] for row, _ in parts]).astype(np.int64),
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
