"""Models compared with another model's stored baseline."""

from __future__ import annotations

import math
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from logprobe.analysis import compare, compare_with_baseline, save_baseline
from logprobe.analysis.baseline import models
from logprobe.analysis.baseline.file import MAGIC, BaselineReader
from logprobe.errors import InputError, OutputError, ParameterError, WeightsReplacedError

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe import LLM

TEXTS = ["the cat and the dog, é 🌊", "the end of the cat and the dog", "x"]


@pytest.fixture(scope="module")
def baseline(tiny_llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("baseline") / "base.lpkl"
    found = save_baseline(tiny_llm, ["", *TEXTS], path)
    assert found.num_texts == 3
    assert found.num_bytes == path.stat().st_size
    return path


def test_a_baseline_gives_what_both_models_would_within_its_error(
    baseline: Path, tiny_llm: LLM, rough_llm: LLM
) -> None:
    found = compare_with_baseline(baseline, rough_llm)
    live = compare(tiny_llm, rough_llm, ["", *TEXTS])
    assert found.logprobs_a.tolist() == live.logprobs_a.tolist()
    assert found.logprobs_b.tolist() == live.logprobs_b.tolist()
    assert (found.num_positions, found.num_bytes) == (live.num_positions, live.num_bytes)
    assert found.text_indices.tolist() == live.text_indices.tolist()
    assert found.positions.tolist() == live.positions.tolist()
    assert found.agreement == live.agreement
    assert found.kl_error_by_position is not None
    assert found.kl_by_position is not None
    assert live.kl_by_position is not None
    apart = found.kl_by_position - live.kl_by_position
    assert (np.abs(apart) < 5 * found.kl_error_by_position).all()
    assert found.kl_error is not None
    assert abs(apart.mean()) < 4 * found.kl_error
    assert live.kl_error is None
    assert found.acceptance is not None
    assert live.acceptance is not None
    assert abs(found.acceptance.mean - live.acceptance.mean) <= found.acceptance.uncertainty + 1e-6
    assert live.acceptance.uncertainty == 0


def test_a_string_is_one_text(tiny_llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "base.lpkl"
    assert save_baseline(tiny_llm, TEXTS[0], path).num_texts == 1
    found, expected = (compare_with_baseline(path, tiny_llm, texts) for texts in (TEXTS[0], TEXTS[:1]))
    assert found.positions.tolist() == expected.positions.tolist()


def test_the_figures_are_those_of_whole_rows(tiny_llm: LLM, rough_llm: LLM) -> None:
    found = compare(tiny_llm, rough_llm, TEXTS)
    kl, shared, sums = [], [], []
    for text in TEXTS:
        mine, theirs = (llm.score([("", text)], logprobs=-1)[0] for llm in (tiny_llm, rough_llm))
        for p, q in zip(mine.record or (), theirs.record or (), strict=True):
            assert p is not None
            assert q is not None
            kl.append(sum(math.exp(p[i].logprob) * (p[i].logprob - q[i].logprob) for i in p))
            shared.append(sum(min(math.exp(p[i].logprob), math.exp(q[i].logprob)) for i in p))
        sums.append(sum(mine.token_logprobs) - sum(theirs.token_logprobs))
    assert found.acceptance is not None
    assert found.acceptance.by_position.tolist() == pytest.approx(shared, abs=1e-5)
    share = sum(shared) / len(shared)
    assert found.acceptance.mean == pytest.approx(share, abs=1e-6)
    for drafted in range(1, 9):
        expected = (1 - share ** (drafted + 1)) / (1 - share)
        assert found.acceptance.tokens_a_cycle(drafted) == pytest.approx(expected, rel=1e-4)
        assert found.to_dict()["acceptance"]["tokens_a_cycle"][str(drafted)] == pytest.approx(
            expected, rel=1e-4
        )
    assert found.text_ratios is not None
    assert found.text_ratios.tolist() == pytest.approx([math.exp(x) for x in sums], rel=1e-5)
    weights = np.exp(sums)
    assert found.effective_text_share == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / 3)
    assert found.statistics is not None
    mean, error = np.mean(kl), np.std(kl, ddof=1) / math.sqrt(len(kl))
    assert found.statistics["Mean KLD"].value == pytest.approx(mean, abs=1e-5)
    assert found.statistics["Mean KLD"].error == pytest.approx(error, abs=1e-5)


def test_a_model_accepts_all_that_it_drafts_itself(tiny_llm: LLM) -> None:
    found = compare(tiny_llm, tiny_llm, TEXTS)
    assert found.acceptance is not None
    assert found.acceptance.mean == pytest.approx(1, abs=1e-6)
    assert found.acceptance.tokens_a_cycle(8) == pytest.approx(9, abs=1e-4)


def test_texts_beside_a_baseline_are_checked_and_end_it(baseline: Path, tiny_llm: LLM) -> None:
    whole = compare_with_baseline(baseline, tiny_llm, ["", *TEXTS])
    assert whole.num_positions == compare_with_baseline(baseline, tiny_llm).num_positions
    part = compare_with_baseline(baseline, tiny_llm, ["", TEXTS[0]])
    assert part.num_positions == (whole.text_indices == 1).sum()
    for others in (TEXTS, ["", *TEXTS, "one more"], ["", TEXTS[0] + "!"], ["", TEXTS[0][:-2]]):
        with pytest.raises(InputError, match="has different texts"):
            compare_with_baseline(baseline, tiny_llm, others)
    with pytest.raises(InputError, match="has different texts"):
        compare_with_baseline(baseline, tiny_llm, ["", *TEXTS], bos=False)


def test_blocks_end_where_they_are_full_and_texts_go_on(
    tiny_llm: LLM, rough_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (models, __import__("logprobe.analysis.baseline.file", fromlist=["file"])):
        monkeypatch.setattr(module, "rows_a_block", lambda _: 5)
    save_baseline(tiny_llm, TEXTS, tmp_path / "base.lpkl")
    found, live = (
        compare_with_baseline(tmp_path / "base.lpkl", rough_llm),
        compare(tiny_llm, rough_llm, TEXTS),
    )
    assert found.logprobs_b == pytest.approx(live.logprobs_b, abs=1e-5)
    assert found.text_indices.tolist() == live.text_indices.tolist()
    assert found.positions.tolist() == live.positions.tolist()


def test_a_baseline_says_of_which_model_it_is(baseline: Path, tiny_llm: LLM) -> None:
    with closing(BaselineReader(baseline)) as reader:
        header = reader.header
    facts = tiny_llm.engine.capabilities()
    assert (header.model, header.weight_version) == (facts.model, facts.weight_version)
    assert header.vocabulary_size == facts.vocab_size


def test_another_vocabulary_is_refused(
    baseline: Path, tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "vocabulary_digest", lambda _: "sha256:0")
    with pytest.raises(InputError, match="a different vocabulary"):
        compare_with_baseline(baseline, tiny_llm)


def test_nothing_stays_of_a_baseline_that_fails(
    tiny_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ParameterError):
        save_baseline(tiny_llm, ["the cat " * 200], tmp_path / "base.lpkl")
    with pytest.raises(ParameterError, match="no token to score"):
        save_baseline(tiny_llm, [""], tmp_path / "base.lpkl")
    with pytest.raises(OutputError):
        save_baseline(tiny_llm, TEXTS, tmp_path / "none" / "base.lpkl")
    versions = iter(("before", "after"))
    facts = tiny_llm.engine.capabilities()
    monkeypatch.setattr(
        tiny_llm.engine,
        "capabilities",
        lambda: __import__("dataclasses").replace(facts, weight_version=next(versions, "after")),
    )
    with pytest.raises(WeightsReplacedError):
        save_baseline(tiny_llm, TEXTS, tmp_path / "base.lpkl")
    assert list(tmp_path.iterdir()) == []


def test_rows_wider_than_the_models_are_refused_before_they_are_read(
    tiny_llm: LLM, baseline: Path, tmp_path: Path
) -> None:
    with closing(BaselineReader(baseline)) as reader:
        header = reader.header
    wide = msgspec.json.encode(msgspec.structs.replace(header, vocabulary_size=1 << 22))
    path = tmp_path / "wide.lpkl"
    path.write_bytes(MAGIC + len(wide).to_bytes(4, "little") + wide)
    with pytest.raises(InputError, match="has 4194304 tokens per row"):
        compare_with_baseline(path, tiny_llm)
