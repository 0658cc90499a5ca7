"""The same tokens through two models: how far apart their distributions and their logprobs are.

A is what should be (the reference, a trainer, a model before a change), B what is used in its place (fewer
bits, a sampler, a model after it). With the same vocabulary every position is compared; models of different
tokenizers are compared by what they give whole words and bytes. A run of `score_dataset` that kept its tokens
is compared by logprobs alone: its file holds no whole distributions; that of `analysis.baseline` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from logprobe.analysis import measures
from logprobe.analysis.score import whole_rows
from logprobe.analysis.scorer import prefix_of
from logprobe.analysis.statistics import Figure, Spread, effective_share, figures
from logprobe.analysis.texts import surprisal
from logprobe.errors import InputError, ParameterError, require
from logprobe.records.forms.finite import finite_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from logprobe.analysis.scorer import Scorer
    from logprobe.analysis.texts import ScoredText
    from logprobe.records.values import IntArray

    Floats = NDArray[np.float64]

POSITIONS_A_CALL = 256  # whole rows of both models: some 200 KB each at a vocabulary of 49,152
CLIP = 0.2  # PPO's usual band
MAX_DRAFTED: Final = 8
ROUNDING: Final = 2.0**-24  # of probabilities in float32
SAME_TOKENS_PROBE: Final = "The 12 cats\n\tdidn't é 🌊 你好"
"""A text that tokenizers of the same tokens split alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """How often A would accept what B drafts, or B what A drafts: Σ min(p, q) (Leviathan et al. 2023)."""

    mean: float  # the expected share a of drafted tokens that are accepted
    error: float | None  # its standard error; None of one position
    uncertainty: float  # what a baseline's file leaves open of it at most; 0 of two models
    by_position: Floats = field(repr=False)  # (num_positions,)

    def tokens_a_cycle(self, num_drafted: int) -> float:
        """Expected tokens of one run of the large model after g drafted ones: (1 - a^(g + 1)) / (1 - a).

        As if each were accepted with the mean probability a, whatever came before it.
        """
        return math.fsum(self.mean**power for power in range(num_drafted + 1))

    def to_dict(self) -> dict[str, Any]:
        """Every figure by name."""
        cycles = {str(count): self.tokens_a_cycle(count) for count in range(1, MAX_DRAFTED + 1)}
        return {
            "mean": self.mean,
            "error": self.error,
            "uncertainty": self.uncertainty,
            "tokens_a_cycle": cycles,
        }


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
    acceptance_by_position: NDArray[np.float64] | None = field(default=None, repr=False)
    # Probability that A gives to token ids for which B has no output. Where it is more than the rounding of
    # float32, the KL of the position is infinite. None where no whole rows were compared, or of a baseline.
    missing_mass_by_position: NDArray[np.float64] | None = field(default=None, repr=False)
    # Of a baseline's file: the most that the standard error of each KL can be, nats, and that an acceptance
    # can be off. None where both models ran.
    kl_error_by_position: NDArray[np.float64] | None = field(default=None, repr=False)
    acceptance_error_by_position: NDArray[np.float64] | None = field(default=None, repr=False)

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
    def kl_error(self) -> float | None:
        """The standard error of the mean KL that comes from a baseline's file, at most; nats."""
        if self.kl_error_by_position is None:
            return None
        return float(np.sqrt(np.sum(self.kl_error_by_position**2))) / self.num_positions

    @property
    def missing_mass(self) -> float | None:
        """Mean probability that A gives to token ids for which B has no output (a narrower head)."""
        missing = self.missing_mass_by_position
        return None if missing is None else float(missing.mean())

    @property
    def acceptance(self) -> Acceptance | None:
        """How often one of the two would accept what the other drafts, at temperature 1."""
        shares, errors = self.acceptance_by_position, self.acceptance_error_by_position
        if shares is None:
            return None
        mean, error = measures.mean_and_error(shares)
        uncertainty = 0.0 if errors is None else float(errors.mean())
        return Acceptance(mean=mean, error=error, uncertainty=uncertainty, by_position=shares)

    @property
    def statistics(self) -> dict[str, Figure] | None:
        """Figures by llama.cpp's names, in its units (percent where it prints them), with standard errors."""
        if self.kl_by_position is None or self.is_same_best is None:
            return None
        return figures(self.logprobs_a, self.logprobs_b, self.kl_by_position, self.is_same_best)

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
    def text_ratios(self) -> NDArray[np.float64] | None:
        """Importance ratios of whole texts: the product of their tokens'."""
        return None if self.unit != "token" else measures.importance_ratios(*self._text_logprobs())

    def _text_logprobs(self) -> tuple[Floats, Floats]:
        """Of A and of B, (num_texts,) nats."""
        starts = np.flatnonzero(np.diff(self.text_indices, prepend=-1))
        return np.add.reduceat(self.logprobs_a, starts), np.add.reduceat(self.logprobs_b, starts)

    @property
    def effective_sample_share(self) -> float | None:
        """Kish's effective sample size of the token ratios, as a share of the positions."""
        return None if self.unit != "token" else effective_share(self.logprobs_a - self.logprobs_b)

    @property
    def effective_text_share(self) -> float | None:
        """The same of the texts' ratios, as a share of the texts."""
        return None if self.unit != "token" else effective_share(np.subtract(*self._text_logprobs()))

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
        """Every figure by name, as JSON has it; None where it has no meaning, ±9999 where it is infinite."""
        kl, ratios, text_ratios = self.kl, self.ratios, self.text_ratios
        acceptance, statistics = self.acceptance, self.statistics
        bits_a, bits_b = self.bits_per_byte()
        figures = {
            "unit": self.unit,
            "num_positions": self.num_positions,
            "num_bytes": self.num_bytes,
            "kl": None if kl is None else kl.to_dict(),
            "kl_error": self.kl_error,
            "missing_mass": self.missing_mass,
            "agreement": self.agreement,
            "delta": self.delta.to_dict(),
            "bias": self.bias,
            "ratio": None if ratios is None else Spread.of(ratios).to_dict(),
            "clipped_share": self.clipped_share,
            "effective_sample_share": self.effective_sample_share,
            "text_ratio": None if text_ratios is None else Spread.of(text_ratios).to_dict(),
            "effective_text_share": self.effective_text_share,
            "bits_per_byte_a": bits_a,
            "bits_per_byte_b": bits_b,
            "acceptance": None if acceptance is None else acceptance.to_dict(),
            "statistics": None
            if statistics is None
            else {name: finite_fields(figure._asdict()) for name, figure in statistics.items()},
        }
        return finite_fields(figures)

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
        return of_tokens([part for one in sequences(a, texts, bos) for part in _token_parts(a, b, one)])
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
    probe = SAME_TOKENS_PROBE
    return same_pieces and mine.encode(probe).tolist() == theirs.encode(probe).tolist()


class TextTokens(NamedTuple):
    """The tokens of one text after its prefix (BOS)."""

    text_index: int
    token_ids: IntArray  # (T,)
    sizes: NDArray[np.int64]  # (T,): bytes of the text that each token comes from; 0 for the prefix


def sequences(a: Scorer, texts: Iterable[str], bos: bool | None) -> Iterator[TextTokens]:
    """Yield the tokens of each text that has something to score."""
    prefix = prefix_of(a.text, bos)
    for index, text in enumerate(texts):
        own, spans = a.text.encode_with_spans(text)
        ids = np.concatenate([prefix, own])
        if len(ids) > 1:
            sizes = np.diff(spans[:, 1], prepend=0)
            yield TextTokens(index, ids, np.concatenate([np.zeros(len(prefix), np.int64), sizes]))


class WholeRows(NamedTuple):
    """Whole rows at some positions, and what they give the tokens there."""

    rows: NDArray[np.float32]  # (M, V) nats
    token_logprobs: Floats  # (M,) nats


class TokenPart(NamedTuple):
    """Some positions of one text through two models, (M,) each."""

    text_index: int
    start: int  # position of the first of them
    token_ids: IntArray
    logprobs_a: Floats
    logprobs_b: Floats
    kl: Floats
    is_same_best: NDArray[np.bool_]
    acceptance: Floats
    num_bytes: int  # of the text
    missing_mass: Floats | None = None
    kl_error: Floats | None = None
    acceptance_error: Floats | None = None


def whole_scores(llm: Scorer, pair: tuple[IntArray, IntArray]) -> WholeRows:
    """A model's whole rows at the tokens of a continuation."""
    (score,) = llm.score([pair], logprobs=-1)
    assert score.record is not None
    return WholeRows(whole_rows(score.record), np.array(score.token_logprobs))


def whole_parts(
    llm: Scorer, ids: IntArray, size: int, first: int = 1
) -> Iterator[tuple[int, int, WholeRows]]:
    """Ranges of positions of a text from `first` on, each with its whole rows: only those of one are held."""
    for start in range(first, len(ids), size):
        end = min(start + size, len(ids))
        yield start, end, whole_scores(llm, (ids[:start], ids[start:end]))


def _token_parts(a: Scorer, b: Scorer, text: TextTokens) -> Iterator[TokenPart]:
    """Compare some hundred positions at a time, to hold the whole rows of no more than these."""
    for start, end, mine in whole_parts(a, text.token_ids, POSITIONS_A_CALL):
        theirs = whole_scores(b, (text.token_ids[:start], text.token_ids[start:end]))
        rows, others, missing_mass = common_columns(mine.rows, theirs.rows)
        kl = np.maximum(measures.kl_divergence(rows, others), 0.0)
        yield TokenPart(
            text_index=text.text_index,
            start=start,
            token_ids=text.token_ids[start:end],
            logprobs_a=mine.token_logprobs,
            logprobs_b=theirs.token_logprobs,
            kl=np.where(missing_mass > ROUNDING, np.inf, kl),
            is_same_best=mine.rows.argmax(axis=1) == theirs.rows.argmax(axis=1),
            acceptance=measures.acceptance(rows, others),
            num_bytes=int(text.sizes[start:end].sum()),
            missing_mass=missing_mass,
        )


def common_columns(
    rows: NDArray[np.float32], others: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32], Floats]:
    """Cut rows of log-probabilities, (M, V) and (M, W), to the ids that both have.

    Returns:
        Both, (M, min(V, W)), and the probability that each of `rows` gives to the ids that only it has, (M,).
    """
    width = min(rows.shape[1], others.shape[1])  # a head may be padded
    missing_mass = np.exp(rows[:, width:].astype(np.float64)).sum(axis=1)
    return rows[:, :width], others[:, :width], missing_mass


def of_tokens(parts: Sequence[TokenPart]) -> Comparison:
    """Join the positions of all texts.

    Raises:
        ParameterError: there is none.
    """
    require(parts, "texts", "hold no token to score; give longer ones, or bos=True")
    text_indices, positions = _places((part.text_index, part.start, len(part.token_ids)) for part in parts)

    def whole(name: str) -> Any:
        """Join a column of all parts; None where they have none."""
        columns = [getattr(part, name) for part in parts]
        return None if columns[0] is None else np.concatenate(columns)

    return Comparison(
        unit="token",
        num_positions=len(positions),
        num_bytes=sum(part.num_bytes for part in parts),
        logprobs_a=whole("logprobs_a"),
        logprobs_b=whole("logprobs_b"),
        kl_by_position=whole("kl"),
        is_same_best=whole("is_same_best"),
        acceptance_by_position=whole("acceptance"),
        text_indices=text_indices,
        positions=positions,
        token_ids=whole("token_ids").astype(np.int64),
        missing_mass_by_position=whole("missing_mass"),
        kl_error_by_position=whole("kl_error"),
        acceptance_error_by_position=whole("acceptance_error"),
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
MAX_LOGPROB = 1e-3  # nats: float32 may round a probability of 1 above 0


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
    parts = [(row, logprobs) for row, logprobs in parts if row["token_ids"]]  # of one token without BOS
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
    """The rows of a run that kept its tokens, checked.

    Raises:
        InputError: no such file, no tokens, or columns that are not of such a run.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from logprobe.analysis.io.tables import reading
    from logprobe.records.forms.arrow_validity import python_rows

    schema = pa.schema(
        {
            "row": pa.int64(),
            "token_ids": pa.list_(pa.int32()),
            "token_logprobs": pa.list_(pa.float32()),
            "num_bytes": pa.int64(),
        }
    )
    with reading(path), pq.ParquetFile(path) as file:
        if missing := [name for name in schema.names if name not in file.schema_arrow.names]:
            raise InputError(f"{path}: has no column {', '.join(missing)}; score it with tokens")
        for batch in file.iter_batches(columns=schema.names):
            for row in python_rows(batch.select(schema.names).cast(schema)):
                _check_stored(path, row)
                yield row


def _check_stored(path: str | Path, row: Mapping[str, Any]) -> None:
    if None in row.values() or row["row"] < 0 or row["num_bytes"] < 0:
        raise InputError(f"{path}: a row lacks a value or counts below zero; score the data anew")
    ids, logprobs = (np.array(row[name], np.float64) for name in ("token_ids", "token_logprobs"))
    if len(ids) != len(logprobs) or not ((ids >= 0).all() and (logprobs <= MAX_LOGPROB).all()):
        raise InputError(
            f"{path}: row {row['row']} holds an invalid token id or log-probability; score the data again"
        )
