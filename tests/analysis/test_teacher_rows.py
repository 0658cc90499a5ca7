"""Named ids at each position, as for distillation from a teacher: scored, generated, with a temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import LLM, FlatLogprobs, SamplingParams
from logprobe.errors import ParameterError
from logprobe.records import read_parquet, write_parquet
from logprobe.records.values import IdLists

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Table = NDArray[np.float64]

CONTEXT, CONTINUATION = [5, 60, 61, 70, 12], [70, 71, 5, 60, 9, 33]
NAMED: list[list[int]] = [[3, 200, 70], [], [7], list(range(20, 60)), [9, 9], [250]]
LONG = [5 + place * 7 % 200 for place in range(110)]
PAIR = (CONTEXT, CONTINUATION)
ATOL = 1e-5
LONG_ATOL = 1e-4  # after a hundred tokens, where transformers' float32 is 4e-5 off its float64


@pytest.fixture(scope="module")
def whole_rows(tiny_model_folder: Path) -> Any:
    """Whole rows by transformers after each token but the last, (T - 1, V) float64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float64)

    @torch.no_grad()
    def rows(ids: list[int], temperature: float = 1.0) -> Table:
        logits = model(torch.tensor([ids])).logits[0, :-1]
        table: Table = (logits / temperature).log_softmax(-1).numpy()
        return table

    return rows


def lists_of(record: FlatLogprobs | None) -> list[dict[int, tuple[float, int]] | None]:
    """Return the named ids of each position: id → logprob and rank."""
    assert record is not None
    assert record.given is not None
    assert len(record.given) == len(record)
    return [
        None if row is None else {key: (one.logprob, one.rank or 0) for key, one in row.items()}
        for row in record.given
    ]


def assert_rows(record: FlatLogprobs | None, named: Any, table: Table, atol: float = ATOL) -> None:
    """Assert that numbers and ranks of named ids agree with whole rows."""
    told = lists_of(record)
    assert [None if row is None else [*row] for row in told] == [[*dict.fromkeys(ids)] for ids in named]
    for row, logprobs in zip(told, table, strict=True):
        for token_id, (logprob, rank) in (row or {}).items():
            assert logprob == pytest.approx(logprobs[token_id], abs=atol)
            # Two logits within the tolerance may swap ranks.
            assert 1 + (logprobs > logprobs[token_id] + atol).sum() <= rank
            assert rank <= 1 + (logprobs > logprobs[token_id] - atol).sum()


def assert_alike(one: FlatLogprobs | None, other: FlatLogprobs | None, atol: float = ATOL) -> None:
    for mine, theirs in zip(lists_of(one), lists_of(other), strict=True):
        assert (mine or {}).keys() == (theirs or {}).keys()
        for token_id, (logprob, rank) in (mine or {}).items():
            assert logprob == pytest.approx((theirs or {})[token_id][0], abs=atol)
            assert abs(rank - (theirs or {})[token_id][1]) <= 1


@pytest.mark.parametrize("temperature", [None, 0.7, 4.0])
def test_named_ids_of_a_continuation_are_transformers_rows(
    tiny_llm: LLM, whole_rows: Any, temperature: float | None
) -> None:
    (score,) = tiny_llm.score([PAIR], logprob_token_ids=[NAMED], temperature=temperature, logprobs=2)
    table = whole_rows(CONTEXT + CONTINUATION, temperature or 1.0)[len(CONTEXT) - 1 :]
    atol = ATOL / min(temperature or 1.0, 1.0)  # logit differences, divided by the temperature
    assert_rows(score.record, NAMED, table, atol)
    chosen = [row[token_id] for row, token_id in zip(table, CONTINUATION, strict=True)]
    assert score.token_logprobs == pytest.approx(chosen, abs=atol)
    assert score.record is not None
    assert score.record.info is not None
    assert score.record.info.temperature == temperature
    assert score.record.info.stages == (("raw",) if temperature is None else ("processed",))


def test_ids_for_all_positions_are_the_same_list_at_each(tiny_llm: LLM) -> None:
    for temperature in (None, 1.5):
        flat, ragged = tiny_llm.score(
            [PAIR, PAIR],
            logprob_token_ids=[[7, 200], [[7, 200]] * len(CONTINUATION)],
            temperature=temperature,
        )
        assert lists_of(flat.record) == lists_of(ragged.record)


def test_one_after_another_is_all_at_once(tiny_llm: LLM) -> None:
    """An all-zero bias is a processor, which forces one position per step (the slow twin)."""
    (fast,) = tiny_llm.score([PAIR], logprob_token_ids=[NAMED], temperature=0.7)
    slow_way = SamplingParams(temperature=0.7, logit_bias={3: 0.0})
    (slow,) = tiny_llm.score([PAIR], logprob_token_ids=[NAMED], sampling_params=slow_way)
    assert_alike(fast.record, slow.record)


def test_a_pair_beside_others_is_that_pair_alone(tiny_llm: LLM) -> None:
    pairs: list[Any] = [PAIR, (LONG[:50], LONG[50:]), ("the cat", " and"), ([], [7, 8])]
    named: list[Any] = [NAMED, [[place % 250] for place in range(60)], [5, 6], None]
    together = tiny_llm.score(pairs, logprob_token_ids=named, unconditional=True)
    for pair, ids, score in zip(pairs, named, together, strict=True):
        (alone,) = tiny_llm.score([pair], logprob_token_ids=[ids], unconditional=True)
        assert score.pmi == pytest.approx(alone.pmi, abs=1e-4)
        if ids is None:
            assert score.record is not None
            assert score.record.given is None
        else:
            assert_alike(score.record, alone.record)


def test_cached_rows_are_those_of_a_cold_engine(tiny_llm: LLM) -> None:
    tiny_llm.engine.forget_prefixes()
    (cold,) = tiny_llm.score([PAIR], logprob_token_ids=[NAMED])
    (bare,) = tiny_llm.score([PAIR])  # caches rows without named ids
    (cached,) = tiny_llm.score([PAIR], logprob_token_ids=[NAMED])
    assert_alike(cached.record, cold.record)
    other = [[*ids[::-1], 11] for ids in NAMED]
    (asked_anew,) = tiny_llm.score([PAIR], logprob_token_ids=[other])
    assert [[*(row or {})] for row in lists_of(asked_anew.record)] == [[*dict.fromkeys(ids)] for ids in other]
    assert bare.token_logprobs == pytest.approx(cached.token_logprobs, abs=2e-6)


def test_chunks_of_a_prompt_are_the_whole(tiny_llm: LLM, tiny_model_folder: Path, whole_rows: Any) -> None:
    named = [[], *([place % 250, 7] for place in range(1, len(LONG)))]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, logprob_token_ids=named)
    (chunked,) = tiny_llm.generate([LONG], params)  # in steps of 64 tokens
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21, max_num_batched_tokens=256) as llm:
        (whole,) = llm.generate([LONG], params)
    assert_alike(chunked.prompt_logprobs, whole.prompt_logprobs, LONG_ATOL)
    assert lists_of(chunked.prompt_logprobs)[0] is None
    assert chunked.prompt_logprobs is not None
    assert_rows(chunked.prompt_logprobs[1:], named[1:], whole_rows(LONG), LONG_ATOL)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "both"])
def test_named_ids_of_generated_tokens_are_those_of_whole_rows(tiny_llm: LLM, mode: Any) -> None:
    shape: dict[str, Any] = {"n": 2, "max_tokens": 5, "seed": 3, "temperature": 0.8, "ignore_eos": True}
    asked = SamplingParams(logprobs=0, logprob_token_ids=NAMED[:3], logprobs_mode=mode, **shape)
    whole = SamplingParams(logprobs=-1, logprobs_mode=mode, **shape)
    (got,), (want,) = tiny_llm.generate([CONTEXT], asked), tiny_llm.generate([CONTEXT], whole)
    for mine, theirs in zip(got.outputs, want.outputs, strict=True):
        assert mine.token_ids == theirs.token_ids
        records = [(mine.logprobs, theirs.logprobs), (mine.processed_logprobs, theirs.processed_logprobs)]
        for record, table in records[: 2 if mode == "both" else 1]:
            assert table is not None
            told = lists_of(record)
            assert [[*(row or {})] for row in told] == [*NAMED[:3], [], []]
            for position, row in enumerate(told):
                for token_id, (logprob, rank) in (row or {}).items():
                    one = (table[position] or {})[token_id]
                    assert (logprob, rank) == (pytest.approx(one.logprob, abs=2e-6), one.rank)


def test_lists_beside_a_neighbour_without_any(tiny_llm: LLM) -> None:
    naming = SamplingParams(max_tokens=4, logprobs=0, logprob_token_ids=[[7], [], [8, 9]], temperature=0)
    flat = SamplingParams(max_tokens=4, logprobs=0, logprob_token_ids=[30], temperature=0)
    plain = SamplingParams(max_tokens=4, logprobs=0, temperature=0)
    together = tiny_llm.generate([CONTEXT, LONG, CONTEXT[:3]], [naming, flat, plain])
    (alone,) = tiny_llm.generate([CONTEXT], naming)
    assert_alike(together[0].outputs[0].logprobs, alone.outputs[0].logprobs)
    assert [[*(row or {})] for row in lists_of(alone.outputs[0].logprobs)] == [[7], [], [8, 9], []]
    assert [[*(row or {})] for row in lists_of(together[1].outputs[0].logprobs)] == [[30]] * 4
    assert together[2].outputs[0].logprobs.given is None  # type: ignore[union-attr]


def test_a_prompts_lists_are_no_generated_tokens(tiny_llm: LLM) -> None:
    named = [[], [7], [], [8], [9]]
    params = SamplingParams(max_tokens=3, best_of=2, prompt_logprobs=0, logprob_token_ids=named, seed=1)
    (output,) = tiny_llm.generate([CONTEXT], params)
    assert [[*(row or {})] for row in lists_of(output.prompt_logprobs)] == named
    assert output.outputs[0].logprobs is None


def test_drafted_tokens_report_the_ids_of_their_own_positions(tiny_model_folder: Path) -> None:
    prompt = [5, 6, 7, 8] * 8
    named = [[place, place + 1] for place in range(24)]
    params = SamplingParams(
        max_tokens=24, temperature=0, ignore_eos=True, logprobs=0, logprob_token_ids=named
    )
    records = []
    for speculate in (False, True):
        with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21, speculate=speculate) as llm:
            (output,) = llm.generate([prompt], params)
        records.append(output.outputs[0].logprobs)
    assert_alike(*records)
    assert [[*(row or {})] for row in lists_of(records[0])] == named


def test_arrays_and_tensors_name_ids_as_lists_do(tiny_llm: LLM) -> None:
    import torch

    table = np.array([[3, 4]] * len(CONTINUATION), np.uint16)
    (want,) = tiny_llm.score([PAIR], logprob_token_ids=[table.tolist()])
    for odd in (table, torch.tensor(table.astype(np.int64)), [*table], IdLists.of([*table.astype(np.int64)])):
        (got,) = tiny_llm.score([PAIR], logprob_token_ids=[odd])
        assert_alike(got.record, want.record)


def test_named_ids_come_back_from_parquet(tiny_llm: LLM, tmp_path: Path) -> None:
    (score,) = tiny_llm.score([PAIR], logprob_token_ids=[NAMED], temperature=2.0)
    assert score.record is not None
    write_parquet(tmp_path / "rows.parquet", {"a": score.record})
    back = read_parquet(tmp_path / "rows.parquet")["a"]
    assert lists_of(back) == lists_of(score.record)
    assert back.info == score.record.info
    again = FlatLogprobs.from_bytes(score.record.to_bytes())
    assert lists_of(again) == lists_of(score.record)


def test_a_pair_whose_left_end_is_cut_keeps_its_lists(tiny_llm: LLM, whole_rows: Any) -> None:
    context = [5 + place % 200 for place in range(180)]
    (score,) = tiny_llm.score([(context, CONTINUATION)], logprob_token_ids=[NAMED], truncation="left")
    kept = (context + CONTINUATION)[-129:]
    assert_rows(score.record, NAMED, whole_rows(kept)[-len(CONTINUATION) :], LONG_ATOL)


PROMPT_ONLY: dict[str, Any] = {"max_tokens": 0, "prompt_logprobs": 0}


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (PROMPT_ONLY | {"logprob_token_ids": [[]] * 4}, "4 lists for 5 prompt tokens"),
        (PROMPT_ONLY | {"logprob_token_ids": [[1], [], [], [], []]}, "first prompt token"),
        (PROMPT_ONLY | {"logprob_token_ids": [[], [1], [10**6], [], []]}, "id 1000000 lies outside"),
        (PROMPT_ONLY | {"logprob_token_ids": [[], [-1], [], [], []]}, "id -1 lies outside"),
        ({"logprobs": 0, "max_tokens": 2, "logprob_token_ids": [[1]] * 3}, "3 lists, but at most 2"),
        ({"logprobs": 0, "prompt_logprobs": 0, "logprob_token_ids": [[1]]}, "set only one of them"),
        ({"logprobs": 0, "logprob_token_ids": [[1], 2]}, "item 1 is 2"),
        ({"logprobs": 0, "logprob_token_ids": [[1], "ab"]}, "item 1 is 'ab'"),
        ({"logprobs": 0, "logprob_token_ids": [[1], ""]}, "item 1 is ''"),
        ({"logprobs": 0, "logprob_token_ids": [[1], b"ab"]}, "item 1 is b'ab'"),
        ({"logprobs": 0, "logprob_token_ids": [[1], {}]}, "item 1 is {}"),
        ({"logprobs": 0, "logprob_token_ids": [[1], [1.5]]}, "item 1 is"),
        ({"logprobs": 0, "logprob_token_ids": [[1], [True]]}, "item 1 is"),
        ({"logprobs": 0, "logprob_token_ids": [[1], [[2], [3, 4]]]}, "item 1 is"),
        ({"logprobs": 0, "logprob_token_ids": [1, [2]]}, "must be an integer"),
        ({"logprob_token_ids": [[1]]}, "needs logprobs"),
    ],
)
def test_lists_that_cannot_be_are_refused_by_name(tiny_llm: LLM, params: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said) as raised:
        tiny_llm.generate([CONTEXT], SamplingParams(**params))
    assert raised.value.parameter == "logprob_token_ids"


@pytest.mark.parametrize(
    ("asked", "parameter", "said"),
    [
        ({"logprob_token_ids": [NAMED[:-1]]}, "logprob_token_ids", "5 lists for a continuation of 6 tokens"),
        ({"logprob_token_ids": [NAMED, NAMED]}, "logprob_token_ids", "one entry per pair, got 2 for 1"),
        ({"logprob_token_ids": [[[10**6]] * 6]}, "logprob_token_ids", "lies outside"),
        ({"logprob_token_ids": [[10**6]]}, "logprob_token_ids", "lies outside"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids", "must be a list"),
        ({"logprob_token_ids": [NAMED], "truncation": "window"}, "logprob_token_ids", "truncation='window'"),
        ({"temperature": 0.0}, "temperature", "must be positive"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"temperature": 1.0, "sampling_params": SamplingParams()}, "temperature", "sampling_params"),
    ],
)
def test_scores_that_cannot_be_are_refused_by_name(
    tiny_llm: LLM, asked: dict[str, Any], parameter: str, said: str
) -> None:
    with pytest.raises(ParameterError, match=said) as raised:
        tiny_llm.score([PAIR], **asked)
    assert raised.value.parameter == parameter


def test_a_prompt_that_is_cut_has_no_lists(tiny_llm: LLM) -> None:
    long = LONG + LONG
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, logprob_token_ids=[[]] * len(long))
    with pytest.raises(ParameterError, match="one list per position") as raised:
        tiny_llm.generate([long], params, truncation="window")
    assert raised.value.parameter == "logprob_token_ids"
