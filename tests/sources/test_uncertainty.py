"""Compare our answers with the published code of lm-polygraph, uqlm and DeepConf (make test-uncertainty).

Only the modules with the formulas are loaded, as the packages' other dependencies are not needed.
"""

from __future__ import annotations

import importlib
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import LLM, SamplingParams
from logprobe.analysis.score import whole_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.analysis import SampledAnswer, Uncertainty

PROMPT = "the cat and"
WINDOW, K = 4, 20


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Load modules of an installed package without running its packages' `__init__`."""

    def load(package: str, *modules: str) -> list[Any]:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"{package} is not installed: `make test-uncertainty` brings it")
        root = Path(spec.submodule_search_locations[0])
        parents = {module.rpartition(".")[0] for module in modules} | {"", "utils"}
        for parent in sorted(parents):
            folder = ModuleType(f"{package}.{parent}".rstrip("."))
            folder.__path__ = [str(root / parent)]
            monkeypatch.setitem(sys.modules, folder.__name__, folder)
        names = [f"{package}.{module}" for module in modules]
        for name in names:
            monkeypatch.delitem(sys.modules, name, raising=False)
        return [importlib.import_module(name) for name in names]

    return load


@pytest.fixture(scope="module")
def found(tiny_llm: LLM) -> Uncertainty:
    """Answers of two words each; some occur twice, each with a single tokenization."""
    words = tiny_llm.text.tokenizer.convert_tokens_to_ids(["Ġthe", "Ġa", "Ġof", "Ġcat", "Ġand"])
    params = SamplingParams(max_tokens=2, seed=4, allowed_token_ids=words)
    found = tiny_llm.uncertainty(PROMPT, 24, params, same=same, window=WINDOW, k=K, self_certainty=True)
    texts = [answer.text for answer in found.answers]
    assert 2 < found.num_semantic_sets < len(set(texts)) < 24
    assert len({tuple(answer.token_ids) for answer in found.answers}) == len(set(texts))
    return found


@pytest.fixture(scope="module")
def long_answer(tiny_llm: LLM) -> SampledAnswer:
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    (answer,) = tiny_llm.uncertainty(PROMPT, 1, params, window=WINDOW, k=K, self_certainty=True).answers
    return answer


def same(text: str, other: str) -> bool:
    return text.split(maxsplit=1)[0] == other.split(maxsplit=1)[0]


def classes_of(found: Uncertainty) -> dict[str, Any]:
    of_answer = {place: number for number, one in enumerate(found.semantic_sets) for place in one}
    sets = [list(one) for one in found.semantic_sets]
    return {"class_to_sample": {0: sets}, "sample_to_class": {0: of_answer}}


def test_lm_polygraphs_figures_of_many_answers(
    published: Callable[..., list[Any]], found: Uncertainty
) -> None:
    plain, normalised, semantic, sets = published(
        "lm_polygraph",
        "estimators.monte_carlo_sequence_entropy",
        "estimators.monte_carlo_normalized_sequence_entropy",
        "estimators.semantic_entropy",
        "estimators.num_sem_sets",
    )
    texts = [answer.text for answer in found.answers]
    entails = np.array([[[same(text, other) for other in texts] for text in texts]], np.float64)
    stats = {
        "sample_log_probs": [[answer.drawn_logprob for answer in found.answers]],
        "sample_tokens": [[answer.token_ids for answer in found.answers]],
        "sample_texts": [texts],
        "semantic_classes_entail": classes_of(found),
        "semantic_matrix_entail": entails,
        "semantic_matrix_contra": 1 - entails,
    }
    estimators = {
        "monte_carlo_sequence_entropy": plain.MonteCarloSequenceEntropy(),
        "monte_carlo_normalized_sequence_entropy": normalised.MonteCarloNormalizedSequenceEntropy(),
        "monte_carlo_semantic_entropy": semantic.SemanticEntropy(use_unique_responses=True),
        "discrete_semantic_entropy": semantic.SemanticEntropy(class_probability_estimation="frequency"),
        "num_semantic_sets": sets.NumSemSets(),
    }
    for name, estimator in estimators.items():
        assert getattr(found, name) == pytest.approx(float(estimator(stats)[0]), rel=1e-12), name


def test_lm_polygraphs_figures_of_one_answer(
    published: Callable[..., list[Any]], tiny_llm: LLM, long_answer: SampledAnswer
) -> None:
    perplexity, entropy, certainty, probability = published(
        "lm_polygraph",
        "estimators.perplexity",
        "estimators.token_entropy",
        "estimators.self_certainty",
        "estimators.max_probability",
    )
    before = tiny_llm.text.encode(PROMPT)
    (score,) = tiny_llm.score([(before, long_answer.token_ids)], logprobs=-1)
    assert score.record is not None
    rows = whole_rows(score.record).astype(np.float64)
    stats = {
        "greedy_log_likelihoods": [long_answer.token_logprobs],
        "greedy_log_probs": [list(rows)],
        "entropy": [-(np.exp(rows) * rows).sum(axis=-1)],  # as lm-polygraph's EntropyCalculator does
    }
    wants = [estimator(stats)[0] for estimator in (
        perplexity.Perplexity(), probability.MaximumSequenceProbability(),
        entropy.MeanTokenEntropy(), certainty.SelfCertainty(),
    )]  # fmt: skip
    assert math.log(long_answer.perplexity) == pytest.approx(wants[0], rel=1e-12)
    assert -long_answer.logprob == pytest.approx(wants[1], rel=1e-12)
    # Our entropies come from the float32 kernel; rows scored in one batch differ in their last bits.
    assert long_answer.mean_token_entropy == pytest.approx(wants[2], abs=1e-5)
    assert long_answer.self_certainty == pytest.approx(-wants[3], abs=1e-5)


@pytest.mark.parametrize("is_normalised", [False, True])
def test_uqlms_figures(
    published: Callable[..., list[Any]], found: Uncertainty, *, is_normalised: bool
) -> None:
    (utils,) = published("uqlm", "nli.entropy_utils")
    numbered = [*enumerate(found.answers)]
    firsts = {tuple(answer.token_ids): place for place, answer in reversed(numbered)}
    places = sorted(firsts.values())
    tokens = [[{"logprob": value} for value in found.answers[place].drawn_token_logprobs] for place in places]
    probabilities, _ = utils.compute_response_probabilities(
        tokens, len(places), length_normalize=is_normalised
    )
    sets = [[places.index(place) for place in one if place in places] for one in found.semantic_sets]
    shares = utils.compute_cluster_probabilities(probabilities, sets)
    if is_normalised:  # uqlm's default: means per token, which are not probabilities of answers
        assert abs(utils.compute_semantic_entropy(shares) - found.semantic_entropy) > 1e-3
        return
    np.testing.assert_allclose(found.shares, shares, rtol=1e-9)
    assert found.semantic_entropy == pytest.approx(utils.compute_semantic_entropy(shares), rel=1e-9)
    uniform = [1 / len(found.answers)] * len(found.answers)
    counts = utils.compute_cluster_probabilities(uniform, [list(one) for one in found.semantic_sets])
    assert found.discrete_semantic_entropy == pytest.approx(utils.compute_semantic_entropy(counts), rel=1e-9)


def test_deepconfs_figures(published: Callable[..., list[Any]], long_answer: SampledAnswer) -> None:
    (utils,) = published("deepconf", "utils")
    record = long_answer.record
    assert record is not None
    entries = record.top_entries().logprobs.reshape(len(record), -1)
    rows = [{place: SimpleNamespace(logprob=value) for place, value in enumerate(row)} for row in entries]
    # DeepConf rounds to three decimals.
    np.testing.assert_allclose(long_answer.confidence, utils.compute_confidence(rows), rtol=0, atol=6e-4)
    trace = {"confs": long_answer.confidence}
    tail = utils.calculate_tail_confidence(trace, tail_tokens=WINDOW)
    lowest = utils.calculate_bottom_window_confidence(trace, window_size=WINDOW, bottom_percent=-1)
    assert long_answer.tail_confidence == pytest.approx(tail, rel=1e-9)
    assert long_answer.lowest_group_confidence == pytest.approx(lowest, rel=1e-9)
    groups = utils.compute_least_grouped(long_answer.confidence, WINDOW)
    np.testing.assert_allclose(long_answer.group_confidence, groups, rtol=0, atol=6e-4)
