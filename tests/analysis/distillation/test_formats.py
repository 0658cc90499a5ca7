"""The columns that each trainer reads, checked with its own reading code."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from logprobe.analysis.distillation.formats import MASKED, compression_config, schema_of, table_of
from logprobe.analysis.distillation.rows import TeacherRow
from logprobe.analysis.distillation.settings import FORMATS, TrainingFormat

SIZE, TOP = 1000, 5


def teacher_row(num_tokens: int, *, turn: int | None = None, start: int = 1, seed: int = 0) -> TeacherRow:
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 3, (num_tokens, SIZE))
    rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    best = np.argsort(-rows, axis=1)[:, :TOP]
    places = np.arange(num_tokens)
    return TeacherRow(
        row=7 + seed,
        turn=turn,
        token_ids=draw.integers(0, SIZE, num_tokens).astype(np.int32),
        is_learnt=places >= (0 if turn is None else start),
        is_target=places >= start - 1 if turn is None else (places >= start - 1) & (places < num_tokens - 1),
        top_ids=best.astype(np.int32),
        top_logprobs=np.take_along_axis(rows, best, axis=1).astype(np.float32),
    )


TEXTS = [teacher_row(4), teacher_row(1, seed=1), teacher_row(9, seed=2)]
TURNS = [teacher_row(6, turn=1, start=3), teacher_row(11, turn=3, start=9)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [TEXTS, TURNS], ids=["texts", "turns"])
def test_a_row_tells_where_it_is_from_and_what_its_truncation_lost(
    kind: TrainingFormat, rows: list[TeacherRow]
) -> None:
    table = table_of(rows, kind, SIZE)
    assert table.schema == schema_of(kind, SIZE, has_turns=rows is TURNS)
    assert table.column("row").to_pylist() == [row.row for row in rows]
    for written, row in zip(table.to_pylist(), rows, strict=True):
        assert written["input_ids"] == row.token_ids.tolist()
        lost = [
            1 - sum(math.exp(value) for value in values)
            for values, counts in zip(row.top_logprobs.tolist(), row.is_target, strict=True)
            if counts
        ]
        assert written["num_positions"] == len(lost)
        assert written["lost_mass"] == pytest.approx(sum(lost) / len(lost), rel=1e-6)
        assert written["max_lost_mass"] == pytest.approx(max(lost), rel=1e-6)
        assert written.get("turn") == row.turn


def test_plain_columns_hold_the_positions_that_count() -> None:
    for written, row in zip(table_of(TURNS, "parquet", SIZE).to_pylist(), TURNS, strict=True):
        places = np.flatnonzero(row.is_target).tolist()
        assert written["positions"] == places
        assert written["target_token_ids"] == row.top_ids[places].tolist()
        assert written["target_logprobs"] == row.top_logprobs[places].tolist()
        assert written["lost_masses"] == pytest.approx(row.lost_masses.tolist(), rel=1e-6)


# -- DistillKit 1.0.0 (a61c2e7): distillkit/compression ------------------------------------------------------


def unpacked(data: list[int], num_bits: int, count: int) -> list[int]:
    """Unpack like `bitpack.unpack_from_bytes`: a bit stream, the highest bit of each element first."""
    bits = [byte >> place & 1 for byte in data for place in range(7, -1, -1)]
    values = []
    for number in range(count):
        own = bits[number * num_bits : (number + 1) * num_bits]
        values.append(sum(bit << (num_bits - 1 - place) for place, bit in enumerate(own)))
    return values


def decompressed(row: dict[str, Any], config: dict[str, Any]) -> tuple[list[list[int]], list[list[float]]]:
    """Decode like `LogprobCompressor.decompress_to_sparse`, with all k exact and no deltas."""
    assert config["exact_k"] == config["k"]
    assert config["exact_dtype"] == "float32"
    assert not config["delta_encoding"]
    num_bits = int(np.ceil(np.log2(np.float32(config["d"]))))
    ids = [unpacked(data, num_bits, config["k"]) for data in row["bytepacked_indices"]]
    values = [np.frombuffer(bytes(data), "<f4").tolist() for data in row["compressed_logprobs"]]
    return ids, values


@pytest.mark.parametrize("rows", [TEXTS, TURNS], ids=["texts", "turns"])
def test_distillkit_reads_the_rows_exactly(rows: list[TeacherRow]) -> None:
    config = json.loads(compression_config(SIZE, TOP))
    for written, row in zip(table_of(rows, "distillkit", SIZE).to_pylist(), rows, strict=True):
        ids, values = decompressed(written, config)
        assert len(ids) == len(values) == len(written["input_ids"])
        for place, (own_ids, own_values) in enumerate(zip(ids, values, strict=True)):
            if row.is_target[place] or row.is_learnt[place]:
                assert own_ids == row.top_ids[place].tolist()
                assert own_values == row.top_logprobs[place].tolist()
            else:  # no loss counts it, but it must be a distribution
                assert len(set(own_ids)) == TOP
                assert sum(math.exp(value) for value in own_values) == pytest.approx(0.5)
            assert own_values == sorted(own_values, reverse=True)
        expected = np.where(row.is_learnt, row.token_ids, -100).tolist()
        assert written["labels"] == expected


@pytest.mark.parametrize("size", [5, 256, 257, 49_152, 151_936])
def test_ids_take_as_many_bits_as_distillkit_reads(size: int) -> None:
    row = teacher_row(3)
    ids = np.minimum(row.top_ids, size - 1)
    ids[0, 0] = size - 1
    own = TeacherRow(
        row=0,
        turn=None,
        token_ids=row.token_ids,
        is_learnt=row.is_learnt,
        is_target=row.is_target,
        top_ids=ids,
        top_logprobs=row.top_logprobs,
    )
    (written,) = table_of([own], "distillkit", size).to_pylist()
    found, _ = decompressed(written, json.loads(compression_config(size, TOP)))
    assert found == ids.tolist()


# -- axolotl 0.18.0: integrations/kd/topk_logprob/forward_kl.py ----------------------------------------------


def axolotl_loss(student: np.ndarray, row: dict[str, Any]) -> float:
    """Compute its `loss` at temperature 1, over log-softmax rows of a student, (T, V)."""
    mask = np.array(row["target_mask"]).astype(bool)
    ids, targets = np.array(row["target_token_ids"]), np.array(row["target_logprobs"])
    own = np.take_along_axis(student, ids, axis=1)[mask]
    targets = targets[mask]
    return float(np.sum(np.exp(targets) * (targets - own)))


@pytest.mark.parametrize("rows", [TEXTS, TURNS], ids=["texts", "turns"])
def test_axolotls_loss_is_the_divergence_over_the_rows_that_count(rows: list[TeacherRow]) -> None:
    for written, row in zip(table_of(rows, "axolotl", SIZE).to_pylist(), rows, strict=True):
        length = len(row.token_ids)
        student = np.random.default_rng(5).normal(0, 1, (length, SIZE))
        student -= np.log(np.exp(student).sum(axis=1, keepdims=True))
        expected = 0.0
        for place in np.flatnonzero(row.is_target):
            p = np.exp(row.top_logprobs[place].astype(np.float64))
            p /= p.sum()
            expected += float(np.sum(p * (np.log(p) - student[place, row.top_ids[place]])))
        assert axolotl_loss(student, written) == pytest.approx(expected, rel=1e-5)
        assert written["attention_mask"] == [1] * length
        assert written["labels"] == np.where(row.is_learnt, row.token_ids, -100).tolist()
        for place in np.flatnonzero(~row.is_target):
            assert written["target_mask"][place] == [0] * TOP
            assert written["target_logprobs"][place] == [MASKED] * TOP
            assert written["target_token_ids"][place] == [0] * TOP
