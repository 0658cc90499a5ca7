"""Continuations that do not start at a token boundary, against brute force over all tokenizations."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import LLM, SamplingParams
from logprobe.analysis import covers, healing
from logprobe.analysis.score import whole_rows
from logprobe.errors import ParameterError, WeightsReplacedError
from pairs import encode_pair
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Context, continuation, and the context's tokens that the joined text starts with, without BOS.
SPANNING = [
    ("the ca", "t and", "the"),
    ("a do", "g", "a"),
    ("a dog o", "f the", "a dog"),
    ("in th", "e cat", "in"),
    ("c", "at of", ""),
    ("the cat an", "d é", "the cat"),
]
LONG = ("the ca", "t and the dog of the cat in the dog é🌊 of", "the")


def rows_of(llm: LLM, **asked: Any) -> Any:
    """Return a function from ids to log-probabilities after each list, (V,) float64 nats, cached."""
    known: dict[tuple[int, ...], Any] = {}

    def rows(prefixes: list[list[int]]) -> list[Any]:
        new = [ids for ids in prefixes if tuple(ids) not in known]
        scores = llm.score([(ids, [2]) for ids in new], logprobs=-1, **asked) if new else []
        for ids, score in zip(new, scores, strict=True):
            assert score.record is not None
            known[tuple(ids)] = whole_rows(score.record)[0].astype(np.float64)
        return [known[tuple(ids)] for ids in prefixes]

    return rows


def covered(rows: Any, pieces: list[bytes], given: list[int], data: bytes) -> float:
    """Return the log of the summed probability of all token sequences that cover some bytes."""
    found, waiting = [], [(given, data, 0.0)]
    while waiting:
        following = []
        for (ids, rest, logprob), row in zip(waiting, rows([ids for ids, _, _ in waiting]), strict=True):
            for token_id, piece in enumerate(pieces):
                if piece.startswith(rest) and piece:
                    found.append(logprob + row[token_id])
                elif piece and rest.startswith(piece):
                    following.append(([*ids, token_id], rest[len(piece) :], logprob + row[token_id]))
        waiting = following
    return float(np.logaddexp.reduce(found))


def pieces_of(llm: LLM) -> list[bytes]:
    special = llm.text.special_token_ids
    vocabulary = llm.text.vocabulary
    return [b"" if i in special else vocabulary.token_bytes(i) for i in range(len(vocabulary))]


def conditional(llm: LLM, rows: Any, context: str, continuation: str, given: str) -> float:
    """Return log p(continuation | context) after the tokens of `given`, by brute force."""
    ids, pieces = llm.text.encode(given).tolist(), pieces_of(llm)
    tail = context.rstrip()[len(given) :].encode()
    text = (context + continuation)[len(given) :].encode()
    return covered(rows, pieces, ids, text) - covered(rows, pieces, ids, tail)


@pytest.fixture(scope="module")
def tiny_windowed_llm(tiny_window_folder: Path) -> Iterator[LLM]:
    """A model whose tokenizer adds no BOS."""
    with LLM(str(tiny_window_folder), kv_cache_memory_bytes=1 << 21) as llm:
        yield llm


@pytest.fixture(scope="module")
def rows(tiny_llm: LLM) -> Any:
    return rows_of(tiny_llm)


@pytest.mark.parametrize("spanning", SPANNING)
def test_bytes_are_summed_over_all_tokenizations(tiny_llm: LLM, rows: Any, spanning: tuple[str, ...]) -> None:
    context, continuation, _given = spanning
    (score,) = tiny_llm.score([(context, continuation)])
    assert score.boundary == "bytes"
    assert score.logprob == pytest.approx(conditional(tiny_llm, rows, *spanning), abs=1e-6)  # type: ignore[arg-type]
    assert (score.num_bytes, score.num_chars) == (len(continuation.encode()), len(continuation))


def test_its_tokens_are_those_that_reach_into_the_continuation(tiny_llm: LLM) -> None:
    (score,) = tiny_llm.score([("the ca", "t and")], logprobs=3, entropy=True)
    assert tiny_llm.text.text_of(score.token_ids) == " cat and"
    (whole,) = tiny_llm.score([("the", " cat and")], logprobs=3, entropy=True)
    assert whole.boundary == "token"
    assert (score.token_ids, score.ranks, score.is_greedy) == (whole.token_ids, whole.ranks, whole.is_greedy)
    assert score.token_logprobs == pytest.approx(whole.token_logprobs, abs=1e-5)
    assert score.entropy == pytest.approx(whole.entropy, abs=1e-5)
    assert score.logprob > whole.logprob
    assert score.record is not None
    assert len(score.record) == score.num_tokens == 2


def test_aligned_pairs_have_the_sum_of_their_tokens(tiny_llm: LLM) -> None:
    pairs = [("the cat", " and the"), ("the cat", "s"), ("", "the"), ("the ", "cat"), ([5, 6], [7])]
    plain = tiny_llm.score(pairs)  # type: ignore[arg-type]
    harness = tiny_llm.score(pairs, boundary="token")  # type: ignore[arg-type]
    for score, other in zip(plain, harness, strict=True):
        assert score.boundary == other.boundary == "token"
        assert score.logprob == pytest.approx(math.fsum(score.token_logprobs))
        assert (score.token_ids, score.logprob) == (other.token_ids, pytest.approx(other.logprob, abs=1e-5))


def test_the_harness_rule_stays_by_name(tiny_llm: LLM) -> None:
    (score,) = tiny_llm.score([("the ca", "t and")], boundary="token")
    ids, start = encode_pair(tiny_llm.text, "the ca", "t and")
    (by_ids,) = tiny_llm.score([(ids[:start], ids[start:])])  # type: ignore[list-item]
    assert (score.boundary, score.token_ids) == ("token", ids[start:].tolist())
    assert score.logprob == pytest.approx(by_ids.logprob, abs=1e-5)
    with raises(ParameterError, parameter="boundary"):
        tiny_llm.score([("the ca", "t and")], boundary="end")  # type: ignore[arg-type]


def test_a_context_that_leaves_nothing_before_the_spanning_token_is_refused(
    tiny_windowed_llm: LLM,
) -> None:
    """Without a BOS, the first token of a text has no log-probability."""
    for rule in ("auto", "token"):
        with raises(ParameterError, parameter="context"):
            tiny_windowed_llm.score([("do", "g")], boundary=rule)  # type: ignore[arg-type]
    (score,) = tiny_windowed_llm.score([("<|eos|>th", "e cat")])
    assert (score.boundary, score.logprob < 0) == ("bytes", True)
    with raises(ParameterError, parameter="prompts"):
        tiny_windowed_llm.classify("do", ["g", "or"])
    refused, fine = tiny_windowed_llm.score([("do", "g"), ("a", " dog")], on_error="return")
    assert isinstance(refused.error, ParameterError)
    assert fine.error is None


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.5), SamplingParams(top_k=220)])
def test_the_distribution_that_is_drawn_from_is_summed(tiny_llm: LLM, sampling: SamplingParams) -> None:
    rows = rows_of(tiny_llm, sampling_params=sampling)
    (score,) = tiny_llm.score([("the ca", "t of")], sampling_params=sampling)
    assert score.boundary == "bytes"
    assert score.logprob == pytest.approx(conditional(tiny_llm, rows, "the ca", "t of", "the"), abs=1e-6)


def test_bytes_that_cannot_be_drawn_are_impossible(tiny_llm: LLM) -> None:
    (score,) = tiny_llm.score([("the ca", "t")], sampling_params=SamplingParams(top_k=1))
    assert (score.boundary, score.logprob) == ("bytes", -math.inf)


def test_after_nothing_the_same_bytes_are_summed(tiny_llm: LLM, rows: Any) -> None:
    (score,) = tiny_llm.score([("the ca", "t of")], unconditional=True)
    alone = covered(rows, pieces_of(tiny_llm), tiny_llm.text.prefix().tolist(), b"t of")
    assert score.unconditional_logprob == pytest.approx(alone, abs=1e-6)
    assert score.pmi == pytest.approx(score.logprob - alone, abs=1e-6)


def test_a_long_text_is_followed_by_its_tokens_after_the_spanning_one(
    tiny_llm: LLM, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sum over all covers that end with the spanning token, each followed by the remaining tokens."""
    monkeypatch.setattr(covers, "MAX_ENDS", 100)
    monkeypatch.setattr(covers, "ENDS_TOLERANCE", 1e-300)
    context, continuation, before = LONG
    given, pieces = tiny_llm.text.encode(before).tolist(), pieces_of(tiny_llm)
    ids, _ = encode_pair(tiny_llm.text, context, continuation)
    rest = ids[len(given) + 1 :].tolist()
    spellings = [
        [pieces.index(piece.encode()) for piece in spelling.split("|")]
        for spelling in (" cat", " |cat", " |ca|t", " |c|a|t")
    ]
    whole = [tiny_llm.score([(given, [*one, *rest])])[0].logprob for one in spellings]
    want = np.logaddexp.reduce(whole) - covered(rows, pieces, given, b" ca")
    (score,) = tiny_llm.score([(context, continuation)])
    assert score.logprob == pytest.approx(want, abs=1e-5)
    assert score.num_bytes == len(continuation.encode())


def test_few_covers_of_a_long_text_give_a_lower_bound(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = tiny_llm.score([LONG[:2]])
    monkeypatch.setattr(covers, "MAX_ENDS", 1)
    (bound,) = tiny_llm.score([LONG[:2]])
    assert -50 < bound.logprob - whole.logprob < 0


def test_with_few_rows_a_sum_is_a_lower_bound(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = tiny_llm.score([("the ca", "t and")])
    for steps in (1, 3, 6):
        monkeypatch.setattr(covers, "MAX_STEPS", steps)
        monkeypatch.setattr(covers, "MIN_STEPS", steps)
        (bound,) = tiny_llm.score([("the ca", "t and")])
        assert bound.logprob < whole.logprob


def test_rows_are_asked_in_batches_and_give_the_same_sums(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_llm.score([("the ca", "t and"), ("the ca", "r")])
    sizes: list[int] = []
    run = tiny_llm._client.run

    async def counted(admitted: Any, *more: Any) -> Any:
        sizes.append(len(admitted))
        return await run(admitted, *more)

    monkeypatch.setattr(tiny_llm._client, "run", counted)
    monkeypatch.setattr(healing, "ROWS_AT_ONCE", 2)
    assert tiny_llm.score([("the ca", "t and"), ("the ca", "r")]) == whole
    assert max(sizes) == 2
    assert sum(sizes) > 8


def test_sums_of_other_weights_than_the_tokens_are_an_error(tiny_llm: LLM) -> None:
    client = tiny_llm._client
    splits = [client.split(("the ca", "t and"))]
    before: Any = [SimpleNamespace(weights_number=-1)]
    [error] = asyncio.run(client.heal(splits, before, None, client.requests.of_one_call()))
    assert isinstance(error, WeightsReplacedError)


@pytest.mark.parametrize("truncation", ["left", "window"])
def test_a_pair_that_is_too_long_is_cut(tiny_llm: LLM, truncation: Any) -> None:
    context, continuation = "the cat " * 80 + "of the ca", "t and"
    with raises(ParameterError, parameter="prompt"):
        tiny_llm.score([(context, continuation)])
    (score,) = tiny_llm.score([(context, continuation)], truncation=truncation)
    ids, _ = encode_pair(tiny_llm.text, context, continuation)
    rows, pieces = rows_of(tiny_llm), pieces_of(tiny_llm)
    # As many tokens before it as possible, with room for one token per byte.
    room = tiny_llm.engine.capabilities().max_model_len + 1 - len(b" cat and")
    given = ids[-room - 2 : -2].tolist()
    want = covered(rows, pieces, given, b" cat and") - covered(rows, pieces, given, b" ca")
    assert (score.boundary, score.num_bytes) == ("bytes", len(continuation))
    assert score.logprob == pytest.approx(want, abs=1e-6)


def test_a_long_continuation_is_scored_in_windows(tiny_llm: LLM) -> None:
    continuation = "t and the dog of" * 40
    (score,) = tiny_llm.score([("the ca", continuation)], truncation="window")
    assert (score.boundary, score.num_bytes) == ("bytes", len(continuation))
    assert (score.record, score.num_chars) == (None, len(continuation))
    # In windows tokens are scored one by one; the spanning token adds more than its own log-probability.
    assert math.fsum(score.token_logprobs) < score.logprob < math.fsum(score.token_logprobs[1:]) + 1e-3


def test_pairs_of_one_context_share_what_they_read(tiny_llm: LLM) -> None:
    pairs = [("the ca", "t and"), ("the ca", "t of"), ("the ca", "ts")]
    together = tiny_llm.score(pairs)
    for pair, score in zip(pairs, together, strict=True):
        (alone,) = tiny_llm.score([pair])
        assert score.logprob == pytest.approx(alone.logprob, abs=1e-5)


def test_an_aligned_pair_costs_what_its_ids_cost(tiny_llm: LLM) -> None:
    """One request only: a byte sum would need more rows."""
    front = tiny_llm._client.engine
    submitted: list[int] = []
    plain = front.submit

    def counting(admitted: Any) -> Any:
        submitted.extend(len(one.request.prompt_token_ids) for one in admitted)
        return plain(admitted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front, "submit", counting)
        tiny_llm.score([("the cat", " and the dog"), ("the cat", "s")])
        assert submitted == [len(tiny_llm.text.encode(text)) for text in ("the cat and the dog", "the cats")]
        submitted.clear()
        tiny_llm.score([("the ca", "t and")])
        assert len(submitted) > 5
