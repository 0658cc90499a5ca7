"""Two models on the same texts."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import save_tiny_llama
from logprobe import LLM
from logprobe.analysis import (
    DataSettings,
    compare,
    compare_stored,
    compare_with_stored,
    score_dataset,
)
from logprobe.analysis.comparison import Comparison, common_units
from logprobe.analysis.detection import binoculars
from logprobe.analysis.score import whole_rows
from logprobe.errors import InputError, MissingPackageError, OutputError, ParameterError, PromptTooLongError
from refusals import raises

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["the cat and the dog, é 🌊", "the end of the cat and the dog", "x"]


def test_a_model_compared_with_itself_is_zero_everywhere(tiny_llm: LLM) -> None:
    found = compare(tiny_llm, tiny_llm, TEXTS)
    figures = found.to_dict()
    assert figures["unit"] == "token"
    assert set(figures["kl"].values()) == set(figures["delta"].values()) == {0.0}
    assert set(figures["ratio"].values()) == {1.0}
    assert (found.agreement, found.bias, found.clipped_share) == (1.0, 0.0, 0.0)
    assert found.effective_sample_share == pytest.approx(1)
    assert found.num_bytes == sum(len(text.encode()) for text in TEXTS)
    assert figures["bits_per_byte_a"] == figures["bits_per_byte_b"]


def test_a_string_is_one_text(tiny_llm: LLM, rough_llm: LLM) -> None:
    found, expected = (compare(tiny_llm, rough_llm, texts) for texts in (TEXTS[0], TEXTS[:1]))
    assert found.positions.tolist() == expected.positions.tolist()
    assert found.logprobs_b.tolist() == expected.logprobs_b.tolist()


def test_a_text_that_is_too_long_is_named(tiny_llm: LLM, rough_llm: LLM) -> None:
    limit = tiny_llm.engine.capabilities().max_model_len + 1
    ids = tiny_llm.text.encode("the cat and the dog " * limit, add_special_tokens=False)
    fits, longer = (tiny_llm.text.bytes_of(ids[:count]).decode() for count in (limit, limit + 1))
    assert compare(tiny_llm, rough_llm, fits, bos=False).num_positions == limit - 1
    with raises(PromptTooLongError, parameter="texts", match="text 1"):
        compare(tiny_llm, rough_llm, ["x", longer], bos=False)


def test_bfloat16_is_compared_as_a_plain_loop_over_rows_would(tiny_llm: LLM, rough_llm: LLM) -> None:
    found = compare(tiny_llm, rough_llm, TEXTS)
    kl, delta, same = [], [], []
    for text in TEXTS:
        mine, theirs = (llm.score([("", text)], logprobs=-1)[0] for llm in (tiny_llm, rough_llm))
        for p, q in zip(mine.record or (), theirs.record or (), strict=True):
            assert p is not None
            assert q is not None
            kl.append(sum(math.exp(p[i].logprob) * (p[i].logprob - q[i].logprob) for i in p))
            same.append(max(p, key=lambda i: p[i].logprob) == max(q, key=lambda i: q[i].logprob))
        delta += [abs(x - y) for x, y in zip(mine.token_logprobs, theirs.token_logprobs, strict=True)]
    assert found.kl is not None
    assert found.kl.mean == pytest.approx(np.mean(kl), abs=1e-5)
    assert found.kl.max == pytest.approx(max(kl), abs=1e-5)
    assert found.kl.mean > 0
    assert found.delta.max == pytest.approx(max(delta), abs=1e-4)
    assert found.agreement == pytest.approx(np.mean(same))
    assert found.effective_sample_share is not None
    assert 0 < found.effective_sample_share < 1


@pytest.fixture(scope="module")
def uneven_heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tiny Llama with 16 more outputs than its tokenizer has tokens, and without them."""
    import torch
    from transformers import LlamaForCausalLM

    folders = {name: save_tiny_llama(tmp_path_factory.mktemp(name)) for name in ("padded", "narrow")}
    model = LlamaForCausalLM.from_pretrained(folders["narrow"])
    head = torch.nn.Parameter(torch.cat([model.lm_head.weight, model.lm_head.weight[:16] * 0.9]))
    rows = torch.nn.Parameter(torch.cat([model.model.embed_tokens.weight, torch.zeros(16, 64)]))
    padded = LlamaForCausalLM(type(model.config)(**model.config.to_dict() | {"vocab_size": len(head)}))
    state = {"lm_head.weight": head, "model.embed_tokens.weight": rows}
    padded.load_state_dict(model.state_dict() | state)
    padded.save_pretrained(folders["padded"])
    return {"folders": folders, "models": {"padded": padded, "narrow": model}}


def test_mass_outside_the_other_head_is_infinitely_far(uneven_heads: dict[str, Any]) -> None:
    import torch

    text, rows = "the cat and the dog, é 🌊", {}
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM(str(folder), kv_cache_memory_bytes=1 << 20))
            for name, folder in uneven_heads["folders"].items()
        }
        ids = llms["narrow"].text.encode(text)
        for name, model in uneven_heads["models"].items():
            with torch.no_grad():
                logits = model.eval()(torch.tensor(ids[None], dtype=torch.long)).logits[0, :-1]
            rows[name] = logits.double().log_softmax(-1).numpy()
        width = rows["narrow"].shape[1]
        found = compare(llms["padded"], llms["narrow"], [text])
        assert np.isinf(found.kl_by_position).all()
        missing = np.exp(rows["padded"][:, width:]).sum(axis=1)
        assert (missing > 0.0005).all()
        np.testing.assert_allclose(found.missing_mass_by_position, missing, rtol=1e-4)
        assert found.missing_mass == pytest.approx(missing.mean(), rel=1e-4)
        assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["kl"]["mean"] == 9999

        # In the other direction nothing is missing: tokens that only B can sample lower its others.
        back = compare(llms["narrow"], llms["padded"], [text])
        mine, theirs = rows["narrow"], rows["padded"][:, :width]
        kl = (np.exp(mine) * (mine - theirs)).sum(axis=1)
        np.testing.assert_allclose(back.kl_by_position, kl, atol=1e-5)
        assert back.missing_mass == 0.0
        same = rows["narrow"].argmax(axis=1) == rows["padded"].argmax(axis=1)
        assert back.is_same_best.tolist() == found.is_same_best.tolist() == same.tolist()

        with raises(ParameterError, parameter="performer"):
            binoculars(llms["padded"], llms["narrow"], [text])


def test_adapters_of_one_model_are_compared(
    tiny_model_folder: Path, adapter_folders: dict[str, Path]
) -> None:
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm:
        llm.add_lora("wide", adapter_folders["wide"])
        found = compare(llm, llm.with_lora("wide"), TEXTS)
        (base,) = llm.score([("", TEXTS[0])])
        (tuned,) = llm.with_lora("wide").score([("", TEXTS[0])])
    count = base.num_tokens
    assert found.logprobs_a[:count].tolist() == pytest.approx(base.token_logprobs, abs=1e-4)
    assert found.logprobs_b[:count].tolist() == pytest.approx(tuned.token_logprobs, abs=1e-4)
    assert found.kl is not None
    assert found.kl.mean > 1e-3


def test_models_of_different_tokenizers_are_compared_by_word(
    tiny_llm: LLM, tiny_window_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(tiny_window_folder), kv_cache_memory_bytes=1 << 21) as other:
        monkeypatch.setattr("logprobe.analysis.comparison.same_vocabulary", lambda *_: False)
        found = compare(tiny_llm, other, TEXTS, bos=False)
        a, b = tiny_llm.surprisal(TEXTS[0], bos=False)[0], other.surprisal(TEXTS[0], bos=False)[0]
    assert found.unit == "word"
    assert (found.kl, found.agreement, found.ratios, found.effective_sample_share) == (None,) * 4
    units = list(common_units(a, b))
    assert "".join(text for text, _, _ in units) == TEXTS[0][len(a.words[0].text) :]
    assert [one for _, one, _ in units] == [unit.logprob for unit in a.words[1:]]
    assert found.logprobs_a[: len(units)].tolist() == [one for _, one, _ in units]
    found.to_parquet(tmp_path / "w.parquet")
    rows = pq.read_table(tmp_path / "w.parquet").slice(0, len(units) + 1).to_pylist()
    assert [row["word"] for row in rows[:-1]] == [text for text, _, _ in units]
    assert [(row["text_index"], row["position"]) for row in rows] == [
        *((0, place) for place in range(len(units))),
        (1, 0),
    ]
    assert json.loads(json.dumps(found.to_dict()))["kl"] is None


def test_positions_go_to_parquet_and_the_plot_needs_its_extra(tiny_llm: LLM, tmp_path: Path) -> None:
    found = compare(tiny_llm, tiny_llm, TEXTS)
    found.to_parquet(tmp_path / "c.parquet")
    with pytest.raises(OutputError, match="missing"):
        found.to_parquet(tmp_path / "missing" / "c.parquet")
    table = pq.read_table(tmp_path / "c.parquet")
    names = ["text_index", "position", "token_id", "logprob_a", "logprob_b", "kl", "is_same_best"]
    assert table.column_names == names
    assert table.num_rows == found.num_positions
    places = [table[name].to_pylist() for name in names[:3]]
    sequences = [tiny_llm.text.encode(text).tolist() for text in TEXTS]
    assert list(zip(*places, strict=True)) == [
        (text, position, token_id)
        for text, ids in enumerate(sequences)
        for position, token_id in enumerate(ids)
        if position
    ]


def test_a_text_without_a_token_to_score_keeps_its_number(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logprobe.analysis.comparison.POSITIONS_A_CALL", 3)
    found = compare(tiny_llm, tiny_llm, ["x", TEXTS[0], "", TEXTS[1]], bos=False)
    lengths = [len(tiny_llm.text.encode(text, add_special_tokens=False)) for text in TEXTS[:2]]
    assert found.text_indices.tolist() == [1] * (lengths[0] - 1) + [3] * (lengths[1] - 1)
    assert found.positions.tolist() == [*range(1, lengths[0]), *range(1, lengths[1])]


def test_a_plot_is_a_picture_or_names_what_is_missing(
    tiny_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compare(tiny_llm, tiny_llm, TEXTS)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'logprobe\[plot\]'"):
        found.plot(tmp_path / "c.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    found.plot(tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_stored_runs_are_compared_token_by_token(tiny_llm: LLM, rough_llm: LLM, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    settings = DataSettings(tokens=True)
    score_dataset(tiny_llm, str(source), tmp_path / "a.parquet", settings=settings)
    score_dataset(rough_llm, str(source), tmp_path / "b.parquet", settings=settings)
    found = compare_stored(tmp_path / "a.parquet", tmp_path / "b.parquet")
    direct = compare(tiny_llm, rough_llm, TEXTS)
    for name in ("text_indices", "positions", "token_ids"):
        assert getattr(found, name).tolist() == getattr(direct, name).tolist()
    assert found.delta.mean == pytest.approx(direct.delta.mean, abs=1e-4)
    assert found.kl is None
    source.write_text('{"text": "another"}\n')
    score_dataset(tiny_llm, str(source), tmp_path / "c.parquet", settings=settings)
    with pytest.raises(InputError, match="rows or tokens differ"):
        compare_stored(tmp_path / "a.parquet", tmp_path / "c.parquet")
    score_dataset(tiny_llm, str(source), tmp_path / "d.parquet")
    with pytest.raises(InputError, match="logprobe dataset --tokens"):
        compare_stored(tmp_path / "a.parquet", tmp_path / "d.parquet")


def test_a_stored_run_is_compared_with_a_model_on_its_data(
    tiny_llm: LLM, rough_llm: LLM, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", *TEXTS]))
    score_dataset(tiny_llm, str(source), tmp_path / "a.parquet", settings=DataSettings(tokens=True))
    found = compare_with_stored(tmp_path / "a.parquet", rough_llm, ["", *TEXTS])
    direct = compare(tiny_llm, rough_llm, TEXTS)
    assert found.delta.mean == pytest.approx(direct.delta.mean, abs=1e-4)
    assert (found.num_positions, found.num_bytes) == (direct.num_positions, direct.num_bytes)
    itself = compare_with_stored(tmp_path / "a.parquet", tiny_llm, ["", *TEXTS])
    assert itself.delta.max < 1e-5
    for texts in (["", *reversed(TEXTS)], TEXTS[:2]):
        with pytest.raises(InputError, match="use the data, tokenizer and bos of the run"):
            compare_with_stored(tmp_path / "a.parquet", tiny_llm, texts)


STORED: dict[str, Any] = {
    "row": [0, 1],
    "token_ids": [[1, 2], []],
    "token_logprobs": [[-1.0, -2.0], []],
    "num_bytes": [5, 1],
}


def test_a_stored_text_without_a_scored_token_has_no_position(tmp_path: Path) -> None:
    pq.write_table(pa.table(STORED), tmp_path / "a.parquet")
    found = compare_stored(tmp_path / "a.parquet", tmp_path / "a.parquet")
    assert (found.num_positions, found.num_bytes) == (2, 6)
    assert found.text_ratios is not None
    assert found.text_ratios.tolist() == [1.0]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *[
            (name, values)
            for name in STORED
            for values in (["a", "b"], [None, None], [{"a": 1}] * 2, [[["a"]], []])
        ],
        ("row", [0, -1]),
        ("row", pa.array([0, 2**64 - 1], pa.uint64())),
        ("num_bytes", [5, -1]),
        ("token_ids", [[1, -2], []]),
        ("token_ids", [[1, 2**31], []]),
        ("token_ids", [[1, None], []]),
        ("token_ids", [[1], []]),
        ("token_logprobs", [[-1.0, float("nan")], []]),
        ("token_logprobs", [[-1.0, 1.0], []]),
        ("token_logprobs", [[-1.0, float("inf")], []]),
        ("token_logprobs", [[-1.0, None], []]),
    ],
)
def test_a_stored_run_of_other_values_is_refused_by_the_files_name(
    tmp_path: Path, name: str, values: Any
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(STORED | {name: values}), path)
    with pytest.raises(InputError) as caught:
        compare_stored(path, path)
    assert str(path) in str(caught.value)


def test_a_record_without_whole_rows_is_refused(tiny_llm: LLM) -> None:
    (score,) = tiny_llm.score([("the", " cat")], logprobs=3)
    assert score.record is not None
    with pytest.raises(ParameterError, match="logprobs=-1"):
        whole_rows(score.record)


def test_ratios_of_long_texts_that_are_too_large_for_a_float_have_a_share() -> None:
    logprobs_b = np.full(2000, -2.0)
    logprobs_b[1000:] = -2.5
    found = Comparison(
        unit="token",
        num_positions=2000,
        num_bytes=2000,
        logprobs_a=np.full(2000, -1.0),
        logprobs_b=logprobs_b,
        text_indices=np.repeat([0, 1], 1000),
        positions=np.tile(np.arange(1000), 2),
    )
    assert found.effective_text_share == pytest.approx(0.5)
    ratios = [math.exp(1.0)] * 1000 + [math.exp(1.5)] * 1000
    share = sum(ratios) ** 2 / sum(ratio**2 for ratio in ratios) / len(ratios)
    assert found.effective_sample_share == pytest.approx(share)
    json.dumps(found.to_dict(), allow_nan=False)


def test_figures_of_impossible_tokens_are_json() -> None:
    apart = np.array([-math.inf, -1.0])
    found = Comparison(
        unit="token",
        num_positions=2,
        num_bytes=2,
        logprobs_a=np.array([-1.0, -1.0]),
        logprobs_b=apart,
        text_indices=np.zeros(2, np.int64),
        positions=np.arange(2),
        kl_by_position=np.array([math.inf, 0.0]),
        is_same_best=np.array([True, True]),
    )
    figures = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert figures["bias"] == -9999
    assert figures["kl"]["max"] == figures["statistics"]["Maximum KLD"]["value"] == 9999


def test_no_text_to_compare_is_refused(tiny_llm: LLM) -> None:
    with pytest.raises(ParameterError, match="no token to score"):
        compare(tiny_llm, tiny_llm, [])
