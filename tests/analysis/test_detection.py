"""Measures of texts seen in training or written by a machine, against their papers' formulas.

Expected values are computed independently, in float64 from transformers' whole rows.
"""

from __future__ import annotations

import json
import math
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import save_tiny_llama
from logprobe import LLM
from logprobe.analysis import DataSettings, binoculars, measures, score_dataset
from logprobe.analysis.detection import Detector
from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    Rows = NDArray[np.float64]

TEXTS = ["the cat and the dog, 12 é 🌊", "a dog\nin a cat", "the the the the the the", "the end of it"]
TOLERANCE = 1e-5
LONG = "the cat and the dog, 12 é 🌊\n" * 12


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the same vocabulary and other weights."""
    return save_tiny_llama(tmp_path_factory.mktemp("other-llama"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def other_llm(other_folder: Path) -> Iterator[LLM]:
    with LLM(str(other_folder), kv_cache_memory_bytes=1 << 20, max_num_batched_tokens=64) as llm:
        yield llm


def rows_of(folder: Path, text: str) -> tuple[list[int], Rows]:
    """Return the ids of the model's tokenizer, and transformers' log-softmax after each."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder).encode(text)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.inference_mode():
        return ids, torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1).numpy()


def papers(folder: Path, text: str) -> dict[str, float]:
    """Compute the measures as their papers define them."""
    ids, rows = rows_of(folder, text)
    rows, chosen = rows[:-1], np.array(ids[1:])
    logprobs = rows[np.arange(len(chosen)), chosen]
    means = (np.exp(rows) * rows).sum(axis=1)
    variances = (np.exp(rows) * rows**2).sum(axis=1) - means**2
    num = max(int(0.2 * len(chosen)), 1)
    return {
        "min_k": float(np.sort(logprobs)[:num].mean()),
        "min_k_plus": float(np.sort((logprobs - means) / np.sqrt(variances))[:num].mean()),
        "fast_detect_gpt": float((logprobs.sum() - means.sum()) / np.sqrt(variances.sum())),
        "zlib_ratio": float(logprobs.mean() / len(zlib.compress(text.encode()))),
    }


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = [{"text": text, "seen": label} for text, label in zip(TEXTS, (1, 0, True, False), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_data_set_has_the_papers_numbers_and_their_auc(
    tiny_llm: LLM, tiny_model_folder: Path, labelled: Path, tmp_path: Path
) -> None:
    settings = DataSettings(detect=True, label_column="seen")
    summary = score_dataset(tiny_llm, labelled, tmp_path / "out.parquet", settings=settings)
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    for row, text in zip(table, TEXTS, strict=True):
        want = papers(tiny_model_folder, text)
        assert {name: row[name] for name in want} == pytest.approx(want, abs=TOLERANCE)
    assert [row["label"] for row in table] == [True, False, True, False]
    assert summary.auc is not None
    assert set(summary.auc) == {"mean_logprob", *measures.DETECTIONS}
    for name, auc in summary.auc.items():
        seen, others = ([row[name] for row in table if row["label"] is label] for label in (True, False))
        pairs = [(a > b) + (a == b) / 2 for a in seen for b in others]
        assert auc == pytest.approx(sum(pairs) / len(pairs))


def test_a_text_in_windows_has_them_too(tiny_llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(LONG)
    settings = DataSettings(detect=True, truncation="window", window=100, stride=40)
    score_dataset(tiny_llm, tmp_path / "in.txt", tmp_path / "out.jsonl", settings=settings)
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert -60 < row["min_k"] < row["mean_logprob"] < 0
    assert row["zlib_ratio"] == pytest.approx(row["mean_logprob"] / len(zlib.compress(LONG.encode())))


@pytest.mark.parametrize(
    ("settings", "parameter"),
    [
        ({"label_column": "seen"}, "label_column"),
        ({"detect": True, "choices_column": "c"}, "tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ParameterError) as error:
        DataSettings(**settings)
    assert error.value.parameter == parameter


def test_a_label_that_is_none_is_a_bad_row(tiny_llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "the cat", "seen": "perhaps"}\n{"text": "the cat", "seen": "1"}\n')
    settings = DataSettings(detect=True, label_column="seen")
    summary = score_dataset(tiny_llm, path, tmp_path / "out.jsonl", settings=settings)
    assert (summary.num_rows, summary.num_bad) == (1, 1)
    assert summary.auc is not None
    assert set(summary.auc.values()) == {None}


def test_binoculars_are_the_authors_code(
    tiny_llm: LLM, other_llm: LLM, tiny_model_folder: Path, other_folder: Path
) -> None:
    got = binoculars(tiny_llm, other_llm, TEXTS)
    for value, text in zip(got, TEXTS, strict=True):
        ids, observer = rows_of(tiny_model_folder, text)
        _, performer = rows_of(other_folder, text)
        perplexity = -performer[np.arange(len(ids) - 1), ids[1:]].mean()
        crossed = -(np.exp(observer) * performer).sum(axis=1).mean()
        assert value == pytest.approx(perplexity / crossed, abs=TOLERANCE)
    assert binoculars(tiny_llm, other_llm, ["x"], bos=False) == [None]


def test_binoculars_of_other_vocabularies_are_refused(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logprobe.analysis.detection.same_vocabulary", lambda *_: False)
    with pytest.raises(ParameterError) as error:
        binoculars(tiny_llm, tiny_llm, TEXTS)
    assert error.value.parameter == "performer"


def test_a_text_that_comes_in_parts_has_the_numbers_of_the_whole() -> None:
    columns = ([-1.0, -4.0, -2.0], [2.0, 1.0, 1.5], [0.5, 2.0, 1.0])
    whole, parts = Detector(), Detector()
    whole.add_tokens(*columns)
    whole.add_text(LONG)
    for place in range(3):
        parts.add_tokens(*(column[place : place + 1] for column in columns))
    for start in range(0, len(LONG), 7):
        parts.add_text(LONG[start : start + 7])
    assert whole.result() == parts.result()
    assert set(Detector().result().values()) == {None}


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=30))
def test_the_auc_counts_pairs(rows: list[tuple[int, bool]]) -> None:
    values, labels = [value for value, _ in rows], [label for _, label in rows]
    with_it = [value for value, label in rows if label]
    without = [value for value, label in rows if not label]
    got = measures.roc_auc(values, labels)
    if not (with_it and without):
        assert got is None
        return
    pairs = [(a > b) + (a == b) / 2 for a in with_it for b in without]
    assert got == pytest.approx(sum(pairs) / len(pairs))


def test_an_auc_of_what_is_no_number_is_refused() -> None:
    with pytest.raises(ParameterError):
        measures.roc_auc([1.0, math.nan], [True, False])


def test_a_certain_token_is_at_its_mean_and_an_impossible_one_far_below() -> None:
    assert measures.min_k_plus([0.0], [0.0], [0.0]) == 0.0
    assert measures.min_k_plus([-math.inf], [0.0], [0.0]) == -math.inf
    assert measures.fast_detect_gpt([0.0, 0.0], [0.0, 0.0], [0.0, 0.0]) == 0.0
    assert measures.min_k([-1.0, -math.inf], share=0.5) == -math.inf
    with pytest.raises(ParameterError) as error:
        measures.min_k([-1.0], share=0.0)
    assert error.value.parameter == "share"
