"""Estimate a model's uncertainty about a prompt from several sampled answers.

A `DrawPlan` describes the requests, a client runs them, and the plan computes the result. The probability of
an answer is the product of its tokens' probabilities, including the stop token's. Sums of probabilities count
equal answers once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import accumulate
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from logprobe.analysis import measures
from logprobe.errors import WeightsReplacedError, require
from logprobe.records.forms.finite import finite_fields
from logprobe.sampling.params import REPORTING_FIELDS, SamplingParams, nth_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from logprobe.engine.request import CompletionOutput, RequestOutput
    from logprobe.records import FlatLogprobs
    from logprobe.text.edge import TextEdge

    Floats: TypeAlias = npt.NDArray[np.float64]

Same: TypeAlias = "Callable[[str, str], bool]"
"""Returns True if two texts mean the same; the first argument is the first text of a semantic set."""
NUM_ANSWERS: Final = 10
WINDOW: Final = 2048  # number of tokens in a group and in the tail, as in Fu et al.
K: Final = 20  # number of likeliest tokens that define a token's confidence, as in Fu et al.
# Parameters that `uncertainty` sets itself; callers must leave them at their defaults.
SET_HERE: Final = ("n", "best_of", *REPORTING_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowConfidence:
    """Stops an answer once its group confidence falls below a threshold.

    This is DeepConf online (Fu et al. 2025, https://arxiv.org/abs/2508.15260). The group confidence is the
    mean confidence of the last `window` tokens, so an answer with fewer tokens is not stopped.

    Args:
        threshold: threshold in nats, for example a low percentile of `lowest_group_confidence` over earlier
            answers.
        window: number of tokens in a group.
        k: number of likeliest tokens that define the confidence of a token.

    Raises:
        ParameterError: `threshold` is not finite and positive, or `window` or `k` is below 1.
    """

    threshold: float
    window: int = WINDOW
    k: int = K

    def __post_init__(self) -> None:
        is_number = isinstance(self.threshold, Real) and not isinstance(self.threshold, bool)
        is_reached = is_number and 0 < self.threshold < math.inf
        require(is_reached, "threshold", "must be a finite number of nats above 0", got=self.threshold)
        _check_count("window", self.window)
        _check_count("k", self.k)

    def end(self, sums: Sequence[float], start: int = 0) -> int | None:
        """Return the number of tokens, at least `start`, after which an answer stops, or None to continue.

        `sums` holds the cumulative sums of the token confidences in nats, starting with 0.
        """
        for stop in range(max(start, self.window), len(sums)):
            if (sums[stop] - sums[stop - self.window]) / self.window < self.threshold:
                return stop
        return None


class Growing:
    """Tracks the confidence of an answer while it is generated.

    Call it with the answer's record so far; it returns True if the answer is to be stopped.
    """

    def __init__(self, rule: LowConfidence) -> None:
        self._rule, self._sums = rule, [0.0]

    def __call__(self, record: FlatLogprobs) -> bool:
        """Process the new tokens of the record."""
        known = len(self._sums)
        new = token_confidence(record[known - 1 :], self._rule.k)
        self._sums += [*accumulate(new, initial=self._sums[-1])][1:]
        return self._rule.end(self._sums, known) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """A sampled answer with its log-probabilities, in nats.

    Values refer to the model's raw distribution. Only values with "drawn" in their name refer to the
    distribution that the tokens were sampled from. At temperature 1, without truncation or processors, the
    two distributions are the same.
    """

    text: str
    token_ids: list[int]  # (T,), including the stop token
    token_logprobs: list[float]  # (T,), nats
    drawn_token_logprobs: list[float]  # (T,), nats
    entropy: list[float]  # (T,), nats, of the whole distribution at each token
    confidence: list[float]  # (T,), nats, minus the mean logprob of the k likeliest tokens
    window: int  # number of tokens in a group
    finish_reason: str | None
    stopped_early: bool = False  # True if `stop_when` stopped the answer, which is then incomplete
    self_certainty: float | None = None  # nats, mean over tokens (Kang et al. 2025); None if not requested
    # The record of the answer's tokens, with the k likeliest tokens at each position.
    record: FlatLogprobs | None = field(default=None, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(self.token_ids)

    @property
    def logprob(self) -> float:
        """Sum of the tokens' logprobs, in nats: minus lm-polygraph's `MaximumSequenceProbability`."""
        return measures.total(self.token_logprobs)

    @property
    def drawn_logprob(self) -> float:
        """Sum of the tokens' logprobs under the sampling distribution, in nats."""
        return measures.total(self.drawn_token_logprobs)

    @property
    def mean_logprob(self) -> float:
        """Mean of the tokens' logprobs, in nats.

        The exponential of this value is uqlm's `normalized_probability` (Malinin & Gales).
        """
        return self.logprob / self.num_tokens

    @property
    def perplexity(self) -> float:
        """Exponential of the mean surprisal; lm-polygraph's `Perplexity` is the logarithm of this value."""
        found = measures.perplexity(self.logprob, self.num_tokens)
        assert found is not None, "an answer has at least one token"
        return found

    @property
    def mean_token_entropy(self) -> float:
        """Mean token entropy, in nats (Fomicheva et al. 2020, https://arxiv.org/abs/2005.10608)."""
        return float(np.mean(self.entropy))

    @property
    def max_token_entropy(self) -> float:
        """Maximum token entropy, in nats."""
        return max(self.entropy)

    @property
    def group_confidence(self) -> Floats:
        """Moving averages of the confidence over `window` tokens, (max(T - window, 0) + 1,) nats.

        If T < window, the only average is over all T tokens.
        """
        return measures.group_means(self.confidence, self.window)

    @property
    def lowest_group_confidence(self) -> float:
        """Minimum of `group_confidence`, in nats (Fu et al. 2025)."""
        return float(self.group_confidence.min())

    @property
    def tail_confidence(self) -> float:
        """Mean confidence of the last `window` tokens, in nats (Fu et al. 2025)."""
        return float(self.group_confidence[-1])

    def to_dict(self) -> dict[str, Any]:
        """Return the text, the token ids and all metrics for JSON.

        -inf becomes -9999, inf becomes 9999, and NaN becomes null.
        """
        names = (
            *("text", "token_ids", "num_tokens", "logprob", "drawn_logprob", "mean_logprob"),
            *("perplexity", "mean_token_entropy", "max_token_entropy", "lowest_group_confidence"),
            *("tail_confidence", "self_certainty", "finish_reason", "stopped_early"),
        )
        return finite_fields({name: getattr(self, name) for name in names})

    def __repr__(self) -> str:
        end = ", stopped early" if self.stopped_early else ""
        size = f"{self.logprob:.4f} nats over {self.num_tokens} tokens"
        return f"<SampledAnswer: {self.text!r:.60}, {size}{end}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncertainty:
    """A model's uncertainty about a prompt, computed from sampled answers.

    All metrics use exact probabilities under the sampling distribution and count only complete answers:
    an answer that was stopped early appears in `answers`, but nowhere else. If no answer is complete, the
    metrics are NaN.
    """

    answers: tuple[SampledAnswer, ...]  # (n,), in the order of their seeds
    # Indices into `answers`, grouped by meaning; the most probable set first.
    semantic_sets: tuple[tuple[int, ...], ...]
    k: int  # number of likeliest tokens that define the confidence of a token

    @property
    def num_semantic_sets(self) -> int:
        """Number of distinct meanings (Lin et al. 2023, https://arxiv.org/abs/2305.19187)."""
        return len(self.semantic_sets)

    @property
    def set_logprobs(self) -> Floats:
        """Log of the total probability of each set's distinct answers, (num_semantic_sets,) nats."""
        return np.array([_log_mass([self.answers[place] for place in one]) for one in self.semantic_sets])

    @property
    def shares(self) -> Floats:
        """Probability of each set divided by `mass`, (num_semantic_sets,); the shares sum to one."""
        logprobs = self.set_logprobs
        return np.exp(logprobs - np.logaddexp.reduce(logprobs)) if len(logprobs) else logprobs

    @property
    def mass(self) -> float:
        """Total probability of the distinct answers, that is, the part of the distribution that was seen."""
        # Rounding may put the sum slightly above one.
        return min(float(np.exp(np.logaddexp.reduce(self.set_logprobs))), 1.0) if self.semantic_sets else 0.0

    @property
    def best(self) -> SampledAnswer | None:
        """The most probable answer of the most probable set; None without complete answers."""
        if not self.semantic_sets:
            return None
        likeliest = [self.answers[place] for place in self.semantic_sets[0]]
        return max(likeliest, key=lambda answer: answer.drawn_logprob)

    @property
    def share(self) -> float:
        """Normalized probability of the set that contains `best`."""
        return float(self.shares[0]) if self.semantic_sets else math.nan

    @property
    def semantic_entropy(self) -> float:
        """Entropy of `shares`, in nats (Farquhar et al. 2024, https://doi.org/10.1038/s41586-024-07421-0).

        Equals uqlm's `tokenprob_entropy_values` over the distinct answers without length normalization.
        """
        return _entropy(self.shares)

    @property
    def discrete_semantic_entropy(self) -> float:
        """Entropy, in nats, of the sets' shares of the number of answers (Farquhar et al. 2024).

        Equals lm-polygraph's `SemanticEntropyEmpirical` and uqlm's `discrete_entropy_values`.
        """
        return _entropy(np.array([len(one) for one in self.semantic_sets]) / max(len(self._ended), 1))

    @property
    def monte_carlo_semantic_entropy(self) -> float:
        """Mean, over answers, of the surprisal of the answer's set, in nats (Kuhn et al. 2023).

        See https://arxiv.org/abs/2302.09664. Equals lm-polygraph's `SemanticEntropyUnique`; lm-polygraph's
        `SemanticEntropy` differs in that a set's probability counts equal answers once per sample.
        """
        logprobs = zip(self.set_logprobs.tolist(), self.semantic_sets, strict=True)
        return -_mean([logprob for logprob, one in logprobs for _ in one])

    @property
    def monte_carlo_sequence_entropy(self) -> float:
        """Mean surprisal of the answers, in nats: an estimate of the sequence entropy (Kuhn et al. 2023)."""
        return -_mean([one.drawn_logprob for one in self._ended])

    @property
    def monte_carlo_normalized_sequence_entropy(self) -> float:
        """Mean, over answers, of the surprisal per token, in nats (Malinin & Gales 2021).

        See https://arxiv.org/abs/2002.07650.
        """
        return -_mean([one.drawn_logprob / one.num_tokens for one in self._ended])

    @property
    def _ended(self) -> list[SampledAnswer]:
        return [answer for answer in self.answers if not answer.stopped_early]

    def to_dict(self) -> dict[str, Any]:
        """Return all metrics by name, the sets and the answers, for JSON."""
        names = (
            *("num_semantic_sets", "mass", "share", "semantic_entropy", "discrete_semantic_entropy"),
            *("monte_carlo_semantic_entropy", "monte_carlo_sequence_entropy"),
            *("monte_carlo_normalized_sequence_entropy", "k"),
        )
        best = self.best
        return {
            "best": None if best is None else best.text,
            **finite_fields({name: getattr(self, name) for name in names}),
            "shares": self.shares.tolist(),
            "semantic_sets": [list(one) for one in self.semantic_sets],
            "answers": [answer.to_dict() for answer in self.answers],
        }

    def __repr__(self) -> str:
        best, num_ended = self.best, len(self._ended)
        if best is None:
            return f"<Uncertainty: all {len(self.answers)} answers stopped early>"
        early = len(self.answers) - num_ended
        stopped = f", {early} stopped early" if early else ""
        return (
            f"<Uncertainty: {best.text!r:.60} has a share of {self.share:.3f}; {num_ended} answers in "
            f"{self.num_semantic_sets} sets{stopped}; semantic entropy {self.semantic_entropy:.4f} nats>"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawPlan:
    """Sampling parameters of the answers, and how to compute the result."""

    params: list[SamplingParams]  # one per answer
    window: int
    k: int
    stop_when: LowConfidence | None
    # True if self-certainty was requested: each answer is then scored again with whole-vocabulary rows.
    reads_rows: bool

    def growing(self) -> Growing | None:
        """Return a new early-stopping check for one answer, or None without `stop_when`."""
        return None if self.stop_when is None else Growing(self.stop_when)

    def answers(self, outputs: Sequence[RequestOutput], text: TextEdge) -> list[SampledAnswer]:
        """Convert each output to an answer.

        Raises:
            WeightsReplacedError: the answers were not all sampled from the same weights.
        """
        check_loads({output.weights_number for output in outputs})
        return [self._answer(output.outputs[0], text) for output in outputs]

    def _answer(self, completion: CompletionOutput, text: TextEdge) -> SampledAnswer:
        """Convert a completion to an answer, dropping the tokens after the early-stopping point."""
        record, drawn = completion.logprobs, completion.processed_logprobs
        assert record is not None, "both distributions were requested"
        assert drawn is not None, "both distributions were requested"
        confidence, num_tokens = token_confidence(record, self.k), len(completion.token_ids)
        stop = None if self.stop_when is None else self.stop_when.end([*accumulate(confidence, initial=0.0)])
        # An answer that ends by itself exactly where it would have been stopped is complete.
        is_over = stop is not None and (stop < num_tokens or completion.finish_reason == "abort")
        end = stop if stop is not None and is_over else num_tokens
        record, drawn, ids = record[:end], drawn[:end], completion.token_ids[:end]
        assert record.entropy is not None, "entropy was requested"
        return SampledAnswer(
            text=text.text_of(ids) if is_over else completion.text,
            token_ids=ids,
            token_logprobs=record.chosen_entries().logprobs.tolist(),
            drawn_token_logprobs=drawn.chosen_entries().logprobs.tolist(),
            entropy=record.entropy.tolist(),
            confidence=confidence[:end],
            window=self.window,
            finish_reason="abort" if is_over else completion.finish_reason,
            stopped_early=is_over,
            record=record,
        )

    def sum_up(self, answers: Sequence[SampledAnswer], same: Same | None = None) -> Uncertainty:
        """Group the answers by meaning, as decided by `same`, and compute the uncertainty.

        Without `same`, only equal texts mean the same. Raises the errors of `LLM.uncertainty`.
        """
        ended = [place for place, answer in enumerate(answers) if not answer.stopped_early]
        sets = _by_meaning([(place, answers[place].text) for place in ended], same or _is_same_text)
        sets.sort(key=lambda one: -_log_mass([answers[place] for place in one]))
        return Uncertainty(answers=tuple(answers), semantic_sets=tuple(map(tuple, sets)), k=self.k)


def draw_plan(
    n: int = NUM_ANSWERS,
    params: SamplingParams | None = None,
    *,
    stop_when: LowConfidence | None = None,
    window: int | None = None,
    k: int | None = None,
    self_certainty: bool = False,
) -> DrawPlan:
    """Validate the arguments of `LLM.uncertainty` and plan its requests.

    Raises:
        ParameterError: an argument is invalid, or more than one answer would be sampled greedily.
    """
    _check_count("n", n)
    asked = SamplingParams() if params is None else params
    require(isinstance(asked, SamplingParams), "sampling_params", "must be SamplingParams", got=params)
    usual = SamplingParams()
    for name in SET_HERE:
        remedy = "is set by uncertainty; leave it out of sampling_params (n is a separate argument)"
        require(getattr(asked, name) == getattr(usual, name), name, remedy)
    require(asked.max_tokens > 0, "max_tokens", "must be positive")
    remedy = "0 would sample the same answer each time; use a positive temperature or n=1"
    require(n == 1 or not asked.is_greedy, "temperature", remedy)
    if stop_when is not None:
        _check_rule(stop_when, asked, window, k)
        window, k = stop_when.window, stop_when.k
    window, k = WINDOW if window is None else window, K if k is None else k
    _check_count("window", window)
    _check_count("k", k)
    # One request per answer: a single sample of a request with n > 1 cannot be aborted.
    each = replace(asked, logprobs=k, logprobs_mode="both", entropy=True)
    seeds = [None if asked.seed is None else nth_seed(asked.seed, number) for number in range(n)]
    return DrawPlan(
        params=[replace(each, seed=seed) for seed in seeds],
        window=window,
        k=k,
        stop_when=stop_when,
        reads_rows=self_certainty,
    )


def token_confidence(record: FlatLogprobs, k: int) -> list[float]:
    """Return, per position, minus the mean logprob of the k likeliest tokens, in nats (Fu et al. 2025)."""
    logprobs = record.top_entries().logprobs
    if not len(record):
        return []
    rows = logprobs.reshape(len(record), -1)[:, :k]
    confidence: list[float] = (-rows.mean(axis=1, dtype=np.float64)).tolist()
    return confidence


def self_certainty(record: FlatLogprobs) -> Floats:
    """Return KL(uniform ‖ distribution) for each position's distribution, (T,) nats.

    The record must hold whole-vocabulary rows. See Kang et al. 2025, https://arxiv.org/abs/2502.18581;
    lm-polygraph's `SelfCertainty` is minus the mean of these values.
    """
    return measures.self_certainty(record.top_entries().logprobs.reshape(len(record), -1))


def check_loads(loads: set[int]) -> None:
    """Raise `WeightsReplacedError` if the answers come from more than one load of the weights."""
    if len(loads) > 1:
        raise WeightsReplacedError("the weights were replaced between the answers; sample them again")


def _check_count(name: str, value: Any) -> None:
    is_count = isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 1
    require(is_count, name, "must be an integer >= 1", got=value)


def _check_rule(rule: Any, params: SamplingParams, window: int | None, k: int | None) -> None:
    require(isinstance(rule, LowConfidence), "stop_when", "must be a LowConfidence", got=rule)
    for name, given in (("window", window), ("k", k)):
        own = getattr(rule, name)
        require(given in (None, own), name, f"is {own} in stop_when; set it only there", got=given)
    remedy = f"is {rule.window}, but must be less than max_tokens ({params.max_tokens}) to stop an answer"
    require(rule.window < params.max_tokens, "window", remedy)


def _is_same_text(text: str, other: str) -> bool:
    return text.strip() == other.strip()


def _by_meaning(texts: Sequence[tuple[int, str]], same: Same) -> list[list[int]]:
    """Group the indices of texts by meaning, and return the groups.

    A text joins the first group whose first text means the same (Kuhn et al.).
    """
    sets: list[tuple[str, list[int]]] = []
    known: dict[str, list[int]] = {}  # text → its set, so that equal texts are compared once
    for number, text in texts:
        if text not in known:
            found = next((one for first, one in sets if _asked(same, first, text)), None)
            if found is None:
                found = []
                sets.append((text, found))
            known[text] = found
        known[text].append(number)
    return [one for _, one in sets]


def _asked(same: Same, text: str, other: str) -> bool:
    answer = same(text, other)
    remedy = "must return True or False, not a coroutine or a score"
    require(isinstance(answer, bool | np.bool_), "same", remedy, got=answer)
    return bool(answer)


def _log_mass(answers: Sequence[SampledAnswer]) -> float:
    """Return the log of the total probability of the distinct answers, in nats."""
    different = {tuple(answer.token_ids): answer.drawn_logprob for answer in reversed(answers)}
    return float(np.logaddexp.reduce([*different.values()]))


def _entropy(shares: Floats) -> float:
    """Return the entropy, in nats, of shares that sum to one; NaN if there are no shares."""
    with np.errstate(divide="ignore"):
        # `abs`, because a single share gives -0.0.
        return abs(float(measures.entropy(np.log(shares)))) if len(shares) else math.nan


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan
