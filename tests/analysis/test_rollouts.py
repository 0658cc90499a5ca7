"""Stored samples against a trainer's numbers: the distribution, the correction, and the distance."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from logprobe import LLM, SamplingParams
from logprobe.analysis import Rollout, compare_rollouts, read_rollouts, rollout_files, write_rollouts
from logprobe.analysis.rollout_files import Alternatives
from logprobe.errors import InputError, ParameterError
from logprobe.records import write_parquet

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = ["the cat", "a dog and"]
DRAWN: dict[str, Any] = {"n": 3, "max_tokens": 12, "seed": 3, "ignore_eos": True}
TRUNCATED: dict[str, Any] = DRAWN | {"temperature": 0.8, "top_p": 0.7}


@pytest.fixture(scope="module")
def trainer(tiny_model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32).eval()


def drawn(llm: LLM, path: Path, *, k: int = 0, mode: str = "processed_logprobs", **asked: Any) -> list[Any]:
    params = SamplingParams(**asked, logprobs=k, logprobs_mode=mode)  # type: ignore[arg-type]
    outputs = llm.generate(PROMPTS, params)
    write_rollouts(path, outputs)
    return outputs


def transformers_rows(trainer: Any, rollout: Rollout, temperature: float) -> torch.Tensor:
    """Return the trainer's log-softmax at every token of a completion, (T, V)."""
    assert rollout.prompt_ids is not None
    ids = np.concatenate([rollout.prompt_ids, rollout.token_ids])
    with torch.no_grad():
        logits = trainer(torch.as_tensor(ids)[None]).logits[0, len(rollout.prompt_ids) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1)


def test_truncated_samples_are_told_with_the_kept_mass_to_add(
    tiny_llm: LLM, trainer: Any, tmp_path: Path
) -> None:
    outputs = drawn(tiny_llm, tmp_path / "r.parquet", **TRUNCATED)
    report = compare_rollouts(tmp_path / "r.parquet", trainer)
    assert (report.num_sequences, report.num_tokens) == (6, 72)
    assert (report.target, report.distribution) == ("temperature", "renormalised")
    assert report.shaping.temperature == pytest.approx(0.8)
    assert report.correction is not None
    assert "add log_kept_mass" in report.correction
    records = [one.processed_logprobs or one.logprobs for output in outputs for one in output.outputs]
    masses = np.concatenate([record.log_kept_mass for record in records])
    assert report.as_stored.worst_nats == pytest.approx(np.abs(masses).max(), abs=1e-4)
    assert report.as_stored.bias == pytest.approx(masses.mean(), abs=1e-4)
    assert report.corrected is not None
    assert report.corrected.worst_nats < 1e-3
    assert report.corrected.effective_share == pytest.approx(1, abs=1e-6)
    assert report.corrected.sequence_ratio.max == pytest.approx(1, abs=1e-2)
    assert not report.is_right(1e-3)


def test_every_figure_is_that_of_a_plain_loop(tiny_llm: LLM, trainer: Any, tmp_path: Path) -> None:
    drawn(tiny_llm, tmp_path / "r.parquet", **TRUNCATED)
    found = compare_rollouts(tmp_path / "r.parquet", trainer).as_stored
    logs, sums = [], []
    for rollout in read_rollouts(tmp_path / "r.parquet"):
        rows = transformers_rows(trainer, rollout, 0.8)
        own = [
            float(row[token_id]) - number
            for row, token_id, number in zip(rows, rollout.token_ids, rollout.logprobs, strict=True)
        ]
        logs += own
        sums.append(sum(own))
    for values, ratio, clipped, share in (
        (logs, found.token_ratio, found.clipped_share, found.effective_share),
        (sums, found.sequence_ratio, found.sequence_clipped_share, found.sequence_effective_share),
    ):
        ratios = [math.exp(value) for value in values]
        assert ratio.mean == pytest.approx(sum(ratios) / len(ratios), rel=1e-3)
        assert ratio.max == pytest.approx(max(ratios), rel=1e-3)
        assert clipped == pytest.approx(sum(abs(one - 1) > 0.2 for one in ratios) / len(ratios))
        kish = sum(ratios) ** 2 / sum(one**2 for one in ratios) / len(ratios)
        assert share == pytest.approx(kish, rel=1e-3)
    assert found.mean_nats == pytest.approx(np.mean(np.abs(logs)), abs=1e-4)
    assert found.k3 == pytest.approx(np.mean([math.exp(one) - 1 - one for one in logs]), abs=1e-4)


@pytest.mark.parametrize(
    ("mode", "asked", "distribution", "words"),
    [
        ("raw_logprobs", {"temperature": 0.6}, "raw", "at its temperature of 0.6"),
        ("processed_logprobs", {"temperature": 0.6}, "temperature", None),
        ("raw_logprobs", {}, "raw", None),
    ],
)
def test_raw_numbers_and_those_of_a_temperature_are_told_apart(
    tiny_llm: LLM, tmp_path: Path, mode: str, asked: dict[str, Any], distribution: str, words: str | None
) -> None:
    drawn(tiny_llm, tmp_path / "r.parquet", mode=mode, **DRAWN | asked)
    report = compare_rollouts(tmp_path / "r.parquet", tiny_llm)
    assert report.shaping.temperature == asked.get("temperature", 1)
    assert report.distribution == distribution
    assert (report.correction is None) == (words is None)
    assert words is None or words in str(report.correction)
    assert report.corrected is not None
    assert report.corrected.worst_nats < 1e-3
    assert report.is_right(1e-3) == (words is None)


def test_a_temperature_that_nobody_told_is_found(tiny_llm: LLM, tmp_path: Path) -> None:
    drawn(tiny_llm, tmp_path / "r.parquet", k=3, **DRAWN | {"temperature": 0.7})
    rollouts = [
        Rollout(**{**vars(rollout), "info": None, "log_kept_mass": None})
        for rollout in read_rollouts(tmp_path / "r.parquet")
    ]
    report = compare_rollouts(rollouts, tiny_llm)
    assert (report.target, report.distribution) == ("raw", "scaled")
    assert report.scale == pytest.approx(0.7, abs=1e-3)
    assert "divide the trainer's logits by 0.7" in str(report.correction)
    assert report.corrected is not None
    assert report.corrected.worst_nats < 1e-2


def test_numbers_of_nothing_have_no_correction(tiny_llm: LLM, tmp_path: Path) -> None:
    drawn(tiny_llm, tmp_path / "r.parquet", k=3, mode="raw_logprobs", **DRAWN)
    rng = np.random.default_rng(0)
    rollouts = [
        Rollout(**{**vars(rollout), "logprobs": -rng.exponential(4, len(rollout)), "alternatives": None})
        for rollout in read_rollouts(tmp_path / "r.parquet")
    ]
    report = compare_rollouts(rollouts, tiny_llm)
    assert (report.distribution, report.correction, report.corrected) == ("none", None, None)
    assert report.errors["raw"] > 0.5


def test_whole_rows_give_the_divergence_of_whole_rows(
    tiny_llm: LLM, rough_llm: LLM, trainer: Any, tmp_path: Path
) -> None:
    drawn(rough_llm, tmp_path / "r.parquet", k=-1, mode="raw_logprobs", **DRAWN)
    kl, apart = [], []
    for rollout in read_rollouts(tmp_path / "r.parquet"):
        rows = transformers_rows(trainer, rollout, 1.0).numpy()
        top = rollout.alternatives
        assert top is not None
        for row, (start, stop) in zip(rows, zip(top.offsets, top.offsets[1:], strict=False), strict=True):
            p, q = row[top.token_ids[start:stop]], top.logprobs[start:stop].astype(np.float64)
            kl.append(sum(math.exp(b) * (b - a) for a, b in zip(p, q, strict=True)))
            apart.append(sum(abs(math.exp(a) - math.exp(b)) for a, b in zip(p, q, strict=True)) / 2)
    for other in (tiny_llm, trainer):
        found = compare_rollouts(tmp_path / "r.parquet", other).as_stored
        assert found.is_whole
        assert (found.kl.mean, found.kl.max) == pytest.approx((np.mean(kl), max(kl)), abs=1e-5)
        assert (found.total_variation.mean, found.total_variation.max) == pytest.approx(
            (np.mean(apart), max(apart)), abs=1e-5
        )
    drawn(rough_llm, tmp_path / "few.parquet", k=3, mode="raw_logprobs", **DRAWN)
    few = compare_rollouts(tmp_path / "few.parquet", tiny_llm).as_stored
    assert not few.is_whole
    assert 0 < few.kl.mean <= np.mean(kl) + 1e-6
    assert 0 < few.total_variation.mean <= np.mean(apart) + 1e-6


def test_truncated_whole_rows_are_the_kept_mass_away_from_the_whole_softmax(
    tiny_llm: LLM, tmp_path: Path
) -> None:
    outputs = drawn(tiny_llm, tmp_path / "r.parquet", k=-1, **TRUNCATED)
    report = compare_rollouts(tmp_path / "r.parquet", tiny_llm)
    masses = np.concatenate(
        [(one.processed_logprobs or one.logprobs).log_kept_mass for out in outputs for one in out.outputs]
    )
    assert report.as_stored.is_whole
    assert report.as_stored.kl.mean == pytest.approx(-masses.mean(), abs=1e-4)
    assert report.as_stored.total_variation.mean == pytest.approx(np.mean(1 - np.exp(masses)), abs=1e-4)
    assert report.corrected is not None
    assert report.corrected.kl.max < 1e-5


def test_two_files_are_compared_and_both_levels_of_ratios_told(
    tiny_llm: LLM, rough_llm: LLM, tmp_path: Path
) -> None:
    drawn(rough_llm, tmp_path / "sampler.parquet", k=4, mode="raw_logprobs", **DRAWN)
    sampler = [*read_rollouts(tmp_path / "sampler.parquet")]
    others = []
    for rollout in sampler:
        assert rollout.prompt_ids is not None
        (score,) = tiny_llm.score([(rollout.prompt_ids.tolist(), rollout.token_ids.tolist())], logprobs=-1)
        assert score.record is not None
        others.append(Rollout.of_record(rollout.name, None, score.record))
    stored = compare_rollouts(tmp_path / "sampler.parquet", others)
    direct = compare_rollouts(sampler, tiny_llm)
    assert stored.distribution == direct.distribution == "raw"
    for name in ("worst_nats", "k3", "effective_share", "sequence_effective_share"):
        assert getattr(stored.as_stored, name) == pytest.approx(getattr(direct.as_stored, name), abs=1e-4)
    assert stored.as_stored.kl.max == pytest.approx(direct.as_stored.kl.max, abs=1e-5)
    itself = compare_rollouts(tmp_path / "sampler.parquet", tmp_path / "sampler.parquet")
    assert (itself.as_stored.worst_nats, itself.as_stored.kl.max) == (0, 0)
    with pytest.raises(InputError, match="tokens differ"):
        compare_rollouts(sampler, others[::-1])
    with pytest.raises(InputError, match="different numbers of completions"):
        compare_rollouts(sampler, others[:-1])


def test_completions_are_gathered_into_groups_of_rows(
    tiny_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = drawn(tiny_llm, tmp_path / "one.parquet", **DRAWN)
    assert pq.ParquetFile(tmp_path / "one.parquet").num_row_groups == 1
    monkeypatch.setattr(rollout_files, "BYTES_A_GROUP", 1)
    write_rollouts(tmp_path / "many.parquet", outputs)
    assert pq.ParquetFile(tmp_path / "many.parquet").num_row_groups == 6
    assert pq.read_table(tmp_path / "many.parquet").equals(pq.read_table(tmp_path / "one.parquet"))


def test_the_columns_of_trainers_are_read(tiny_llm: LLM, tmp_path: Path) -> None:
    drawn(tiny_llm, tmp_path / "own.parquet", mode="raw_logprobs", **DRAWN)
    own = [*read_rollouts(tmp_path / "own.parquet")]
    pad = 7
    trl = {
        "prompt_ids": [[pad, *one.prompt_ids.tolist()] for one in own],  # type: ignore[union-attr]
        "prompt_mask": [[0] + [1] * len(one.prompt_ids) for one in own],  # type: ignore[arg-type]
        "completion_ids": [[*one.token_ids.tolist(), 9999] for one in own],
        "completion_mask": [[0] + [1] * (len(one) - 1) + [0] for one in own],
        "logprobs": [[None, *one.logprobs.tolist()[1:], 0.0] for one in own],
    }
    pq.write_table(pa.table(trl), tmp_path / "trl.parquet")
    report = compare_rollouts(tmp_path / "trl.parquet", tiny_llm)
    assert report.num_tokens == sum(len(one) - 1 for one in own)
    assert report.is_right(1e-3)
    verl = {
        "prompts": [one.prompt_ids.tolist() for one in own],  # type: ignore[union-attr]
        "responses": [one.token_ids.tolist() for one in own],
        "rollout_log_probs": [one.logprobs.tolist() for one in own],
        "old_log_probs": [(one.logprobs - 0.1).tolist() for one in own],
    }
    pq.write_table(pa.table(verl), tmp_path / "verl.parquet")
    assert compare_rollouts(tmp_path / "verl.parquet", tiny_llm).is_right(1e-3)
    others = read_rollouts(tmp_path / "verl.parquet", logprobs="old_log_probs")
    report = compare_rollouts(tmp_path / "verl.parquet", others)
    assert report.as_stored.bias == pytest.approx(-0.1, abs=1e-6)
    assert report.as_stored.sequence_ratio.mean == pytest.approx(math.exp(-1.2), rel=1e-4)


def test_records_need_the_prompts_beside_them(tiny_llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=6, seed=1, logprobs=2, ignore_eos=True)
    outputs = tiny_llm.generate(PROMPTS, params)
    write_parquet(tmp_path / "r.parquet", {str(i): one.outputs[0].logprobs for i, one in enumerate(outputs)})  # type: ignore[misc]
    prompts = {str(i): one.prompt_token_ids for i, one in enumerate(outputs)}
    assert compare_rollouts(tmp_path / "r.parquet", tiny_llm, prompts=prompts).is_right(1e-3)
    with pytest.raises(InputError, match="has no prompt ids"):
        compare_rollouts(tmp_path / "r.parquet", tiny_llm)


def test_a_report_is_json(tiny_llm: LLM, tmp_path: Path) -> None:
    drawn(tiny_llm, tmp_path / "r.parquet", **TRUNCATED)
    report = compare_rollouts(tmp_path / "r.parquet", tiny_llm)
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["distribution"] == "renormalised"
    assert values["top_p"] == pytest.approx(0.7)
    assert set(values["as_stored"]["kl"]) == {"mean", "max", "p50", "p90", "p99", "p99.9"}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"completion_ids": [[1]]}, "has no column logprobs or"),
        ({"logprobs": [[-1.0]]}, "has no column token_ids or"),
        ({"token_ids": [[1, 2]], "logprobs": [[-1.0]]}, "row 0: logprobs must be a list of 2 numbers"),
        ({"token_ids": [[-1]], "logprobs": [[-1.0]]}, "row 0: token_ids contains an invalid token id"),
        ({"token_ids": [None], "logprobs": [[-1.0]]}, "row 0: has no token_ids"),
        ({"token_ids": [["x"]], "logprobs": [[-1.0]]}, "row 0: could not convert"),
        (
            {
                "token_ids": [[1]],
                "logprobs": [[-1.0]],
                "top_ids": [[[1], [2]]],
                "top_logprobs": [[[-1.0], [-2.0]]],
            },
            "row 0: top_ids and top_logprobs",
        ),
    ],
)
def test_what_a_file_lacks_is_named(tmp_path: Path, columns: dict[str, Any], words: str) -> None:
    pq.write_table(pa.table(columns), tmp_path / "r.parquet")
    with pytest.raises(InputError, match=words):
        list(read_rollouts(tmp_path / "r.parquet"))


def test_what_cannot_be_compared_is_refused(tiny_llm: LLM, trainer: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        compare_rollouts(tmp_path / "none.parquet", tiny_llm)
    with pytest.raises(ParameterError, match="have no tokens with logprobs"):
        compare_rollouts([], tiny_llm)
    ids = np.array([3, 99_999])
    wrong = Rollout(name="x", prompt_ids=ids[:1], token_ids=ids[1:], logprobs=np.array([-1.0]))
    with pytest.raises(InputError, match="token id 99999 is outside the model's"):
        compare_rollouts([wrong], trainer)
    fine = Rollout(name="y", prompt_ids=ids[:1], token_ids=ids[:1], logprobs=np.array([-1.0]))
    with pytest.raises(ParameterError, match="top_p"):
        compare_rollouts([fine], tiny_llm, top_p=2.0)
    outputs = tiny_llm.generate(PROMPTS, SamplingParams(max_tokens=2))
    with pytest.raises(ParameterError, match="have no logprobs"):
        write_rollouts(tmp_path / "w.parquet", outputs)
    with pytest.raises(ParameterError, match="have no completions"):
        write_rollouts(tmp_path / "w.parquet", [])
    with pytest.raises(ParameterError, match="outputs: must be a list"):
        write_rollouts(tmp_path / "w.parquet", outputs[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("changed", [{"temperature": 1.5}, {"top_p": 0.5}, {"presence_penalty": 1.0}])
def test_outputs_of_other_sampling_parameters_are_refused(
    tiny_llm: LLM, tmp_path: Path, mode: str, changed: dict[str, float]
) -> None:
    one, other = (
        drawn(tiny_llm, tmp_path / "r.parquet", mode=mode, **DRAWN | {"temperature": 0.5} | params)
        for params in ({}, changed)
    )
    with pytest.raises(ParameterError, match=f"info .{next(iter(changed))}") as caught:
        write_rollouts(tmp_path / "r.parquet", [*one, *other])
    assert caught.value.parameter == "outputs"


def test_a_failed_output_is_refused_by_its_error(tiny_llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(**DRAWN, logprobs=0)
    outputs = tiny_llm.generate([PROMPTS[0], [10**6]], params, on_error="return")
    error = outputs[1].error
    assert error is not None
    with pytest.raises(ParameterError) as caught:
        write_rollouts(tmp_path / "r.parquet", outputs)
    assert caught.value.parameter == "outputs"
    assert f"number 1 failed: {error}" in str(caught.value)


def rollout(logprobs: list[float], mass: list[float] | None = None, **others: Any) -> Rollout:
    ids = np.arange(len(logprobs)) + 5
    kept = None if mass is None else np.array(mass)
    facts: dict[str, Any] = {"name": "x", "prompt_ids": np.array([3]), "token_ids": ids} | others
    return Rollout(logprobs=np.array(logprobs), log_kept_mass=kept, **facts)


def test_positions_without_a_number_are_as_if_they_were_not_there(trainer: Any) -> None:
    gaps = [math.nan] * 40 + [-4.0, -5.0]
    report = compare_rollouts([rollout(gaps)], trainer)
    assert report.num_tokens == 2
    masses = compare_rollouts([rollout([-4.0, -4.0], [-0.1, math.nan])], trainer)
    assert masses.num_tokens == 1
    assert all(math.isfinite(error) for error in masses.errors.values())
    stored = compare_rollouts([rollout([-4.0, -4.0, -4.0])], [rollout([-4.0, math.nan, -4.5])])
    assert stored.num_tokens == 2
    assert stored.errors == {"raw": 0.25}


def test_a_number_that_an_alternative_lacks_is_passed_over() -> None:
    few = Alternatives(
        offsets=np.array([0, 2]), token_ids=np.array([8, 9]), logprobs=np.array([-2.0, math.nan])
    )
    mine = rollout([-1.0], alternatives=few)
    found = compare_rollouts([mine], [mine])
    assert found.errors == {"raw": 0.0}
    assert found.as_stored.kl.max == 0


def test_completions_with_a_kept_mass_are_compared_apart_from_those_without(trainer: Any) -> None:
    mixed = [rollout([-4.0], [-0.1]), rollout([-4.0])]
    with pytest.raises(InputError, match="log_kept_mass"):
        compare_rollouts(mixed, trainer)


def test_the_same_object_twice_is_two_completions() -> None:
    one = rollout([-1.0, -2.0])
    other = rollout([-1.5, -2.0])
    report = compare_rollouts([one, one], [other, other])
    assert report.num_sequences == 2
    assert report.as_stored.sequence_ratio.max == pytest.approx(math.exp(-0.5))


def test_impossible_tokens_are_infinitely_far_from_possible_ones_alone(trainer: Any) -> None:
    never = rollout([-math.inf, -4.0])
    assert compare_rollouts([never], [never]).as_stored.worst_nats == 0
    for report in (compare_rollouts([never], trainer), compare_rollouts([rollout([-4.0, -4.0])], [never])):
        assert report.as_stored.worst_nats == report.as_stored.k3 == math.inf
        json.dumps(report.to_dict(), allow_nan=False)
    assert compare_rollouts([rollout([-math.inf])], trainer).distribution == "none"
