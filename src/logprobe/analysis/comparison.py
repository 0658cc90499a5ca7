"""Compare two models on the same texts: KL divergence, differences in logprobs, importance ratios.

A is the reference (or the trainer, or the model before a change). B is the model that is compared with A
(such as a quantized model, the sampler, or the model after the change). Models with the same vocabulary are
compared token by token; models with different tokenizers are compared by whole words and in bits per byte.
Outputs of `score_dataset` with tokens can be compared too, but only by logprobs, because they hold no whole
distributions; `analysis.baseline` stores whole distributions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from logprobe.analysis import measures
from logprobe.analysis.score import whole_rows
from logprobe.analysis.scorer import check_scorer, prefix_of
from logprobe.analysis.statistics import Figure, Spread, effective_share, figures
from logprobe.analysis.texts import surprisal
from logprobe.errors import InputError, PromptTooLongError, require
from logprobe.records.forms.finite import finite_fields
from logprobe.sampling import SamplingParams
from logprobe.text.edge import same_tokens
from logprobe.text.prompts import each_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from logprobe.analysis.scorer import Scorer
    from logprobe.analysis.texts import ScoredText
    from logprobe.records.info import LogprobsInfo
    from logprobe.records.values import IntArray

    Floats = NDArray[np.float64]

# Positions per call: each needs a whole-vocabulary row of each model, about 200 KB at a vocabulary of 49,152.
POSITIONS_A_CALL = 256
CLIP = 0.2  # the usual clip range of PPO
MAX_DRAFTED: Final = 8
ROUNDING: Final = 2.0**-24  # rounding error of float32 probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Acceptance rate of speculative decoding if one model drafts for the other.

    It is Σ min(p, q), where p and q are the two models' distributions (Leviathan et al. 2023).
    """

    mean: float  # expected share of draft tokens that are accepted
    error: float | None  # standard error of `mean`; None with one position
    uncertainty: float  # upper bound on the error of `mean` due to a baseline file; 0 if both models ran
    by_position: Floats = field(repr=False)  # (num_positions,)

    def tokens_a_cycle(self, num_drafted: int) -> float:
        """Return the expected number of tokens per forward pass of the target model.

        With g = `num_drafted` draft tokens, each accepted independently with probability a = `mean`, this is
        (1 - a^(g + 1)) / (1 - a).
        """
        return math.fsum(self.mean**power for power in range(num_drafted + 1))

    def to_dict(self) -> dict[str, Any]:
        """Return all metrics by name."""
        cycles = {str(count): self.tokens_a_cycle(count) for count in range(1, MAX_DRAFTED + 1)}
        return {
            "mean": self.mean,
            "error": self.error,
            "uncertainty": self.uncertainty,
            "tokens_a_cycle": cycles,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of the logprobs, in nats, that two models give the same texts.

    A position is a token or, if the vocabularies differ, a word. In the latter case only `delta`, `bias` and
    `bits_per_byte` are available; the other measures are None.
    """

    unit: str  # what a position is: "token" or "word"
    num_positions: int
    num_bytes: int
    logprobs_a: NDArray[np.float64] = field(repr=False)  # (num_positions,)
    logprobs_b: NDArray[np.float64] = field(repr=False)
    text_indices: NDArray[np.int64] = field(repr=False)  # (num_positions,), index of the text, from 0
    positions: NDArray[np.int64] = field(repr=False)  # (num_positions,), index of the token or word
    token_ids: NDArray[np.int64] | None = field(default=None, repr=False)  # None if positions are words
    words: Sequence[str] | None = field(default=None, repr=False)  # None if positions are tokens
    kl_by_position: NDArray[np.float64] | None = field(default=None, repr=False)
    is_same_best: NDArray[np.bool_] | None = field(default=None, repr=False)
    acceptance_by_position: NDArray[np.float64] | None = field(default=None, repr=False)
    # Total probability that A gives to token ids that B's head does not have. If it exceeds float32 rounding,
    # the position's KL is infinite. None if no whole rows were compared, or if A is a baseline file.
    missing_mass_by_position: NDArray[np.float64] | None = field(default=None, repr=False)
    # If A is a baseline file: upper bounds on the standard error of each KL (nats) and on the error of each
    # acceptance rate. None if both models ran.
    kl_error_by_position: NDArray[np.float64] | None = field(default=None, repr=False)
    acceptance_error_by_position: NDArray[np.float64] | None = field(default=None, repr=False)
    # (num_positions, layers with experts): True if the token before the position has other experts in B than
    # in A. None unless both models are native MoE models with equal numbers of experts, experts per token and
    # layers.
    route_changes: NDArray[np.bool_] | None = field(default=None, repr=False)

    @property
    def changed_route_share(self) -> float | None:
        """Share of positions that are predicted with other experts in B than in A, in any layer.

        The experts are those of the token before the position, from which the position's token is predicted.
        """
        return None if self.route_changes is None else float(self.route_changes.any(axis=1).mean())

    @property
    def delta(self) -> Spread:
        """Summary of |logprob A - logprob B| over positions, in nats."""
        return Spread.of(np.abs(self.logprobs_a - self.logprobs_b))

    @property
    def bias(self) -> float:
        """Mean of logprob B - logprob A, in nats; negative if B finds the texts less likely than A."""
        return float(np.mean(self.logprobs_b - self.logprobs_a))

    @property
    def kl(self) -> Spread | None:
        """Summary of KL(A ‖ B) over positions, in nats; None if whole distributions are not available."""
        return None if self.kl_by_position is None else Spread.of(self.kl_by_position)

    @property
    def kl_error(self) -> float | None:
        """Upper bound on the standard error of the mean KL due to a baseline file's quantization, in nats."""
        if self.kl_error_by_position is None:
            return None
        return float(np.sqrt(np.sum(self.kl_error_by_position**2))) / self.num_positions

    @property
    def missing_mass(self) -> float | None:
        """Mean, over positions, of the total probability that A gives to token ids that B's head lacks."""
        missing = self.missing_mass_by_position
        return None if missing is None else float(missing.mean())

    @property
    def acceptance(self) -> Acceptance | None:
        """Acceptance rate of speculative decoding between the two models at temperature 1."""
        shares, errors = self.acceptance_by_position, self.acceptance_error_by_position
        if shares is None:
            return None
        mean, error = measures.mean_and_error(shares)
        uncertainty = 0.0 if errors is None else float(errors.mean())
        return Acceptance(mean=mean, error=error, uncertainty=uncertainty, by_position=shares)

    @property
    def statistics(self) -> dict[str, Figure] | None:
        """llama.cpp's metrics, with standard errors, under llama.cpp's names and in its units."""
        if self.kl_by_position is None or self.is_same_best is None:
            return None
        return figures(self.logprobs_a, self.logprobs_b, self.kl_by_position, self.is_same_best)

    @property
    def agreement(self) -> float | None:
        """Share of positions where both models have the same most likely token."""
        return None if self.is_same_best is None else float(np.mean(self.is_same_best))

    @property
    def ratios(self) -> NDArray[np.float64] | None:
        """Importance ratio p_A / p_B of each token, if A is the trainer and B the sampler."""
        if self.unit != "token":
            return None
        return measures.importance_ratios(self.logprobs_a, self.logprobs_b)

    @property
    def text_ratios(self) -> NDArray[np.float64] | None:
        """Importance ratio of each text: the product over the text's tokens."""
        return None if self.unit != "token" else measures.importance_ratios(*self._text_logprobs())

    def _text_logprobs(self) -> tuple[Floats, Floats]:
        """Return each text's logprob under A and under B, as two arrays (num_texts,) in nats."""
        starts = np.flatnonzero(np.diff(self.text_indices, prepend=-1))
        return np.add.reduceat(self.logprobs_a, starts), np.add.reduceat(self.logprobs_b, starts)

    @property
    def effective_sample_share(self) -> float | None:
        """Kish's effective sample size of the token ratios, divided by the number of tokens."""
        return None if self.unit != "token" else effective_share(self.logprobs_a - self.logprobs_b)

    @property
    def effective_text_share(self) -> float | None:
        """Kish's effective sample size of the text ratios, divided by the number of texts."""
        return None if self.unit != "token" else effective_share(np.subtract(*self._text_logprobs()))

    @property
    def clipped_share(self) -> float | None:
        """Share of token ratios outside [0.8, 1.2], the usual clip range of PPO."""
        ratios = self.ratios
        return None if ratios is None else float(np.mean(np.abs(ratios - 1) > CLIP))

    def bits_per_byte(self) -> tuple[float | None, float | None]:
        """Return the bits per byte of A and of B over all scored bytes, or None without scored bytes."""
        sums = (float(self.logprobs_a.sum()), float(self.logprobs_b.sum()))
        a, b = (measures.bits_per_byte(logprob, self.num_bytes) for logprob in sums)
        return a, b

    def to_dict(self) -> dict[str, Any]:
        """Return all metrics by name for JSON, with None if not defined and ±9999 for infinity."""
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
            "changed_route_share": self.changed_route_share,
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
        """Write a Parquet file with one row per position, with both logprobs and, if known, the KL.

        `text_index` is the index of the text; for outputs of `score_dataset` it is the value of the `row`
        column. `position` is the index of the word or token in its text. Token 0 has no row: it is BOS or,
        without BOS, the text's first token. For continuations in an output of `score_dataset`, position 1 is
        the first token after the context.

        Raises:
            OutputError: the file cannot be written.
        """
        from logprobe._arrow import pa, pq
        from logprobe.analysis.io.files import writing

        columns: dict[str, Any] = {"text_index": self.text_indices, "position": self.positions}
        columns |= {"token_id": self.token_ids} if self.words is None else {"word": self.words}
        columns |= {"logprob_a": self.logprobs_a, "logprob_b": self.logprobs_b}
        if self.kl_by_position is not None:
            columns |= {"kl": self.kl_by_position, "is_same_best": self.is_same_best}
        with writing(path):
            pq.write_table(pa.table(columns), path, compression="zstd")

    def plot(self, path: str | Path) -> None:
        """Plot both models' logprobs against each other, and a histogram of their differences.

        Requires the extra `plot`.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        from logprobe.records.forms.picture import new_figure

        figure = new_figure(figsize=(9, 4), layout="constrained")
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


def compare(a: Scorer, b: Scorer, texts: str | Iterable[str], *, bos: bool | None = None) -> Comparison:
    """Score the same texts with two models and compare the results.

    Args:
        a: the reference.
        b: the model to compare with `a`; may be `a` itself, or `a.with_lora(name)`.
        texts: one or more texts that fit the contexts of both models.
        bos: True puts BOS (EOS if the model has no BOS) before each text, False does not, and None does what
            the tokenizer does.

    Raises:
        ParameterError: no text has a token to score, or a text is longer than a model's context.
        BatchError: a request failed.
    """
    for name, model in {"a": a, "b": b}.items():
        check_scorer(model, name)
    if same_vocabulary(a, b):
        has_routes = _have_alike_routes(a, b)
        parts: list[TokenPart] = []
        changes = []
        for tokens in sequences([a, b], texts, bos):
            parts += _token_parts(a, b, tokens)
            if has_routes:
                changes.append(_route_changes(a, b, tokens.token_ids[:-1]))
        comparison = of_tokens(parts)
        return replace(comparison, route_changes=np.concatenate(changes)) if changes else comparison
    texts = list(each_text(texts))
    return _of_words([*zip(surprisal(a, texts, bos=bos), surprisal(b, texts, bos=bos), strict=True)])


def _have_alike_routes(a: Scorer, b: Scorer) -> bool:
    """Return True if both models report expert routes of the same shape."""
    shapes = [model.engine.capabilities().shape for model in (a, b)]
    sizes = [
        None if shape is None else (shape.num_experts, shape.num_expert_layers, shape.experts_per_token)
        for shape in shapes
    ]
    return sizes[0] == sizes[1] and all(shape is not None and shape.why_no_routes is None for shape in shapes)


def _route_changes(a: Scorer, b: Scorer, token_ids: IntArray) -> NDArray[np.bool_]:
    """Return whether the models use different experts for each token, (num_tokens, layers)."""
    params = SamplingParams(max_tokens=0, return_routed_experts=True)
    routes = []
    for model in (a, b):
        [output] = model.generate([token_ids.tolist()], params)
        assert output.prompt_routed_experts is not None, "the model reports routes"
        routes.append(np.sort(output.prompt_routed_experts, axis=-1))
    differs: NDArray[np.bool_] = (routes[0] != routes[1]).any(axis=-1)
    return differs


def same_vocabulary(a: Scorer, b: Scorer) -> bool:
    """Return True if both models have the same tokens and tokenize a probe text to the same ids."""
    return same_tokens(a.text, b.text)


class TextTokens(NamedTuple):
    """Tokens of one text, including BOS if it is used."""

    text_index: int
    token_ids: IntArray  # (T,)
    sizes: NDArray[np.int64]  # (T,): bytes of the text that each token comes from; 0 for BOS


def sequences(models: Sequence[Scorer], texts: str | Iterable[str], bos: bool | None) -> Iterator[TextTokens]:
    """Yield the tokens of each text; texts without a token to score are left out.

    Args:
        models: models with the same tokenizer; each scores the tokens.
        texts: one or more texts.
        bos: see `compare`.

    Raises:
        ParameterError: a text is longer than the context of a model, or is not a text.
    """
    edge = models[0].text
    prefix = prefix_of(edge, bos)
    # The last token is never run.
    limit = min(model.engine.capabilities().max_model_len for model in models) + 1
    for index, text in enumerate(each_text(texts)):
        own, spans = edge.encode_with_spans(text)
        ids = np.concatenate([prefix, own])
        if len(ids) > limit:
            message = f"text {index} has {len(ids)} tokens, but at most {limit} fit; shorten or split it"
            raise PromptTooLongError("texts", f"{message}, or raise max_model_len")
        if len(ids) > 1:
            sizes = np.diff(spans[:, 1], prepend=0)
            yield TextTokens(index, ids, np.concatenate([np.zeros(len(prefix), np.int64), sizes]))


class WholeRows(NamedTuple):
    """Whole-vocabulary rows at M positions, and the logprobs of the text's tokens there."""

    rows: NDArray[np.float32]  # (M, V) nats
    token_logprobs: Floats  # (M,) nats
    info: LogprobsInfo | None  # what computed the rows


class TokenPart(NamedTuple):
    """Comparison of M consecutive positions in one text; arrays are (M,), logprobs and KL in nats."""

    text_index: int
    start: int  # first position
    token_ids: IntArray
    logprobs_a: Floats
    logprobs_b: Floats
    kl: Floats
    is_same_best: NDArray[np.bool_]
    acceptance: Floats
    num_bytes: int  # bytes of text in this range
    missing_mass: Floats | None = None
    kl_error: Floats | None = None
    acceptance_error: Floats | None = None


def whole_scores(llm: Scorer, pair: tuple[IntArray, IntArray]) -> WholeRows:
    """Score a (context, continuation) pair; return the whole-vocabulary rows at the continuation's tokens."""
    (score,) = llm.score([pair], logprobs=-1)
    assert score.record is not None
    return WholeRows(whole_rows(score.record), np.array(score.token_logprobs), score.record.info)


def whole_parts(
    llm: Scorer, ids: IntArray, size: int, first: int = 1
) -> Iterator[tuple[int, int, WholeRows]]:
    """Yield (start, end, rows) for consecutive ranges of up to `size` positions, from `first` on."""
    for start in range(first, len(ids), size):
        end = min(start + size, len(ids))
        yield start, end, whole_scores(llm, (ids[:start], ids[start:end]))


def _token_parts(a: Scorer, b: Scorer, text: TextTokens) -> Iterator[TokenPart]:
    """Compare two models on a text, one range of positions at a time to bound the memory for whole rows."""
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
    """Cut rows of log-probabilities, (M, V) and (M, W) in nats, to the ids that both have.

    Returns:
        Both arrays, cut to (M, min(V, W)), and the total probability that each row in `rows` gave to the ids
        that were cut off, (M,).
    """
    width = min(rows.shape[1], others.shape[1])  # one head may be padded
    missing_mass = np.exp(rows[:, width:].astype(np.float64)).sum(axis=1)
    return rows[:, :width], others[:, :width], missing_mass


def of_tokens(parts: Sequence[TokenPart]) -> Comparison:
    """Join the ranges of all texts into one comparison.

    Raises:
        ParameterError: `parts` is empty.
    """
    require(parts, "texts", "have no token to score; use longer texts or bos=True")
    text_indices, positions = _places((part.text_index, part.start, len(part.token_ids)) for part in parts)

    def whole(name: str) -> Any:
        """Concatenate a column of all parts; return None if the parts do not have the column."""
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
    """Expand runs of positions, each given as (text index, first position, length).

    Returns:
        The text index and the position of every single position, as two arrays.
    """
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
    require(mine, "texts", "have no word that both models score; use longer texts or bos=True")
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
    """Yield (text, logprob A, logprob B) for the shortest stretches that are whole words for both models.

    Stretches with an unscored token are skipped.
    """
    ends_b = {unit.end for unit in b.words}
    bounds = [0] + [unit.end for unit in a.words if unit.end in ends_b]
    sums_a, sums_b = _sums(a, bounds), _sums(b, bounds)
    for (start, end), logprob_a, logprob_b in zip(pairwise(bounds), sums_a, sums_b, strict=True):
        if not (math.isnan(logprob_a) or math.isnan(logprob_b)):
            yield a.text[start:end], logprob_a, logprob_b


def _sums(text: ScoredText, bounds: Sequence[int]) -> list[float]:
    """Return the logprob of the text between each two neighboring bounds; NaN if a token is not scored."""
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
MAX_LOGPROB = 1e-3  # nats; float32 rounding may put the log of a probability of 1 slightly above 0


def compare_stored(path_a: str | Path, path_b: str | Path) -> Comparison:
    """Compare two outputs of `score_dataset`, written with `tokens=True`, by their logprobs.

    Raises:
        InputError: a file has no tokens, or the files' rows or tokens differ.
    """
    parts, num_bytes = [], 0
    for mine, theirs in zip_longest(_stored(path_a), _stored(path_b)):
        same = mine is not None and theirs is not None
        if not (same and all(mine[name] == theirs[name] for name in ("row", "token_ids"))):
            raise InputError(
                f"{path_a}, {path_b}: rows or tokens differ; score the same data with the same tokenizer"
            )
        parts.append((mine, theirs["token_logprobs"]))
        num_bytes += mine["num_bytes"]
    return _of_rows(parts, num_bytes)


def compare_with_stored(
    path: str | Path, llm: Scorer, texts: Sequence[str], *, bos: bool | None = None
) -> Comparison:
    """Compare an output of `score_dataset` with a model's scores of the same texts.

    The output (A) must have been written with `tokens=True`; the model is B.

    Args:
        path: the Parquet file that `score_dataset` wrote.
        llm: the model.
        texts: the texts that `score_dataset` scored, starting with the first row.
        bos: the setting that `score_dataset` was called with.

    Raises:
        InputError: the file has no tokens, or its tokens differ from the tokens of the texts.
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
                    f"{path}: the tokens of row {row['row']} differ from the model's tokens of the data; "
                    "use the data, tokenizer and bos of the run"
                )
            pairs.append((ids[:1], ids[1:]))
        scores = llm.score(pairs)
        parts += [(row, score.token_logprobs) for row, score in zip(rows, scores, strict=True)]
        num_bytes += sum(row["num_bytes"] for row in rows)
    return _of_rows(parts, num_bytes)


def _of_rows(parts: Sequence[tuple[dict[str, Any], Sequence[float]]], num_bytes: int) -> Comparison:
    """Build a comparison from stored rows, each paired with the other model's token logprobs."""
    parts = [(row, logprobs) for row, logprobs in parts if row["token_ids"]]  # skip rows without tokens
    require(parts, "files", "have no rows with tokens; score them with tokens=True (--tokens)")
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
    """Yield the validated rows of an output of `score_dataset` that has tokens.

    Raises:
        InputError: the file does not exist, or lacks the tokens or another column.
    """
    from logprobe._arrow import pa, pq
    from logprobe.analysis.io.files import reading
    from logprobe.records.forms.arrow_validity import python_rows
    from logprobe.records.forms.versions import check_parquet

    schema = pa.schema(
        {
            "row": pa.int64(),
            "token_ids": pa.list_(pa.int32()),
            "token_logprobs": pa.list_(pa.float32()),
            "num_bytes": pa.int64(),
        }
    )
    with reading(path), pq.ParquetFile(path) as file:
        check_parquet(file.schema_arrow.metadata, path)
        if missing := [name for name in schema.names if name not in file.schema_arrow.names]:
            columns = ", ".join(missing)
            raise InputError(f"{path}: has no column {columns}; write it with `logprobe dataset --tokens`")
        for batch in file.iter_batches(columns=schema.names):
            for row in python_rows(batch.select(schema.names).cast(schema)):
                _check_stored(path, row)
                yield row


def _check_stored(path: str | Path, row: Mapping[str, Any]) -> None:
    if None in row.values() or row["row"] < 0 or row["num_bytes"] < 0:
        raise InputError(f"{path}: a row has a missing value or a negative count; score the data again")
    ids, logprobs = (np.array(row[name], np.float64) for name in ("token_ids", "token_logprobs"))
    if len(ids) != len(logprobs) or not ((ids >= 0).all() and (logprobs <= MAX_LOGPROB).all()):
        raise InputError(
            f"{path}: row {row['row']} has an invalid token id or log-probability; score the data again"
        )
