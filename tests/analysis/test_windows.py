"""Sliding windows: every token is scored once, as in a plain loop with transformers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.analysis.windows import WindowSettings, perplexity, score_windows
from logprobe.errors import ParameterError
from logprobe.text.windows import windows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logprobe import LLM

TEXT = "the cat and the dog, 12 é 🌊\nThe end of the cat? " * 12


def plain_windows(num_tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Iterate like Hugging Face's guide: (begin, end, begin of the scored tokens)."""
    previous_end = 0
    for begin in range(0, num_tokens, stride):
        end = min(begin + window, num_tokens)
        yield begin, end, previous_end
        previous_end = end
        if end == num_tokens:
            break


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 8, 9, 10, 31, 32, 33])
@pytest.mark.parametrize(("window", "stride"), [(8, 4), (8, 7), (8, 1), (5, 3), (2, 1), (8, 8), (2, 2)])
@pytest.mark.parametrize("piece", [1, 3, 100])
def test_windows_are_those_of_the_plain_loop(num_tokens: int, window: int, stride: int, piece: int) -> None:
    ids = np.arange(num_tokens, dtype=np.int32)
    cut = list(windows((ids[i : i + piece] for i in range(0, num_tokens, piece)), window, stride))
    want = [
        (ids[begin:end].tolist(), begin, max(scored - begin, 1))
        for begin, end, scored in plain_windows(num_tokens, window, stride)
        if end > max(scored, 1)
    ]
    assert [(one.token_ids.tolist(), one.start, one.first_scored) for one in cut] == want
    scored = [token for one in cut for token in one.pair[1].tolist()]
    assert scored == [token for token in range(1, num_tokens) if stride < window or token % window]
    unscored = [token for one in cut for token in one.token_ids[: one.num_unscored].tolist()]
    assert sorted(unscored + scored) == list(range(num_tokens if num_tokens != 1 else 0))


@pytest.fixture(scope="module")
def reference(tiny_model_folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder).eval()

    @torch.no_grad()
    def token_logprobs(ids: list[int], window: int, stride: int) -> list[float]:
        found: list[float] = []
        for begin, end, scored in plain_windows(len(ids), window, stride):
            rows = model(torch.tensor([ids[begin:end]])).logits[0].log_softmax(-1)
            places = range(max(scored, begin + 1), end)
            found += [float(rows[place - begin - 1, ids[place]]) for place in places]
        return found

    return token_logprobs


@pytest.mark.parametrize(("window", "stride"), [(128, 64), (100, 30), (40, 39), (40, 40)])
def test_each_token_is_what_a_plain_loop_over_transformers_gives(
    tiny_llm: LLM, reference: Any, window: int, stride: int
) -> None:
    ids = tiny_llm.text.encode(TEXT)
    settings = WindowSettings.of(tiny_llm, window=window, stride=stride)
    scored = [score for _, score in score_windows(tiny_llm, [ids], settings, entropy=True)]
    got = [value for score in scored for value in score.token_logprobs]
    np.testing.assert_allclose(got, reference(ids.tolist(), window, stride), atol=2e-4)
    found = tiny_llm.perplexity(TEXT, window=window, stride=stride)
    assert found.logprob == pytest.approx(sum(got), abs=1e-3)
    num_first = 1 if stride < window else -(-len(ids) // window)
    assert found.num_scored == len(got) == len(ids) - num_first
    assert found.perplexity == pytest.approx(math.exp(-sum(got) / len(got)))


def test_a_text_that_fits_is_scored_in_one_window(tiny_llm: LLM) -> None:
    text = "the cat and the dog"
    (score,) = tiny_llm.score([("", text)])
    found = tiny_llm.perplexity(text)
    assert found.logprob == pytest.approx(score.logprob, abs=1e-4)
    assert found.num_scored == found.num_tokens == score.num_tokens
    assert (found.window, found.stride, found.bos_token_id) == (128, 64, 0)


def test_the_counts_are_those_of_the_text_however_it_is_cut(tiny_llm: LLM) -> None:
    whole = tiny_llm.perplexity(TEXT)
    for step in (1, 7, 100):
        parts = (TEXT[start : start + step] for start in range(0, len(TEXT), step))
        assert tiny_llm.perplexity(parts) == whole
    assert whole.num_bytes == whole.num_scored_bytes == len(TEXT.encode())
    assert whole.num_words == len(TEXT.split())
    assert whole.bits_per_byte == pytest.approx(-whole.logprob / math.log(2) / whole.num_bytes)
    assert whole.word_perplexity == pytest.approx(math.exp(-whole.logprob / whole.num_words))


@pytest.mark.parametrize("num_left", [0, 1, 2])
@pytest.mark.parametrize("bos", [True, False])
def test_the_first_token_of_a_disjoint_window_and_its_bytes_are_not_scored(
    tiny_llm: LLM, num_left: int, bos: bool
) -> None:
    ids = tiny_llm.text.encode(TEXT, add_special_tokens=False)[: 60 + num_left - bos]
    text = tiny_llm.text.bytes_of(ids).decode()
    assert tiny_llm.text.encode(text, add_special_tokens=False).tolist() == ids.tolist()
    found = tiny_llm.perplexity(text, window=20, stride=20, bos=bos)
    firsts = [place - bos for place in range(0, len(ids) + bos, 20) if place >= bos]
    assert found.num_scored == len(ids) - len(firsts)
    assert found.num_tokens == len(ids)
    assert found.num_scored_bytes == len(text.encode()) - len(tiny_llm.text.bytes_of(ids[firsts]))
    scored = tiny_llm.surprisal(text, window=20, stride=20, bos=bos)[0]
    assert np.flatnonzero(np.isnan(scored.logprobs)).tolist() == firsts
    assert scored.logprob == pytest.approx(found.logprob, abs=1e-3)


@pytest.mark.parametrize("bos", [True, False])
def test_there_is_no_perplexity_per_word_if_tokens_inside_the_text_are_not_scored(
    tiny_llm: LLM, bos: bool
) -> None:
    apart = tiny_llm.perplexity(TEXT, window=20, stride=20, bos=bos)
    assert apart.word_perplexity is None
    assert apart.byte_perplexity is not None
    for found in (
        tiny_llm.perplexity(TEXT, window=20, stride=19, bos=bos),
        tiny_llm.perplexity("the cat", window=20, stride=20, bos=bos),
    ):
        assert found.word_perplexity == pytest.approx(math.exp(-found.logprob / found.num_words))


def test_a_text_without_scored_tokens_has_no_perplexity(tiny_llm: LLM) -> None:
    found = tiny_llm.perplexity("x", bos=False)
    assert (found.num_tokens, found.num_scored, found.num_words) == (1, 0, 1)
    assert (found.perplexity, found.word_perplexity, found.byte_perplexity) == (None, None, None)


def test_without_bos_the_first_token_and_its_bytes_are_not_scored(tiny_llm: LLM) -> None:
    found = tiny_llm.perplexity("the cat", bos=False)
    ids = tiny_llm.text.encode("the cat", add_special_tokens=False)
    assert found.bos_token_id is None
    assert found.num_scored == len(ids) - 1
    assert found.num_scored_bytes == 7 - len(tiny_llm.text.bytes_of([ids[0]]))
    (score,) = tiny_llm.score([(ids[:1], ids[1:])])
    assert found.logprob == pytest.approx(score.logprob, abs=1e-4)


@pytest.mark.parametrize("text", ["", "x"])
def test_nothing_to_score_has_no_perplexity(tiny_llm: LLM, text: str) -> None:
    found = tiny_llm.perplexity(text, bos=False)
    assert (found.num_tokens, found.num_scored, found.logprob) == (len(text), 0, 0)
    assert (found.perplexity, found.bits_per_byte) == (None, None)


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"window": 130}, "window"),
        ({"window": 1}, "window"),
        ({"stride": 0}, "stride"),
        ({"window": 10, "stride": 11}, "stride"),
    ],
)
def test_a_bad_option_is_refused_by_name(tiny_llm: LLM, options: Any, parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        tiny_llm.perplexity("the cat", **options)
    assert caught.value.parameter == parameter


def test_progress_counts_every_byte_and_token(tiny_llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    found = perplexity(tiny_llm, TEXT, advance=lambda *more: seen.append(more))
    assert sum(num_bytes for num_bytes, _ in seen) == found.num_scored_bytes
    assert sum(num_tokens for _, num_tokens in seen) == found.num_scored


def test_the_first_numbers_of_a_long_text_come_before_it_is_read(
    tiny_llm: LLM, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first window is yielded in parts; its numbers equal those of the plain loop."""
    monkeypatch.setattr("logprobe.analysis.windows.FIRST_TOKENS", 16)
    ids = tiny_llm.text.encode(TEXT)
    num_read = 0

    def pieces() -> Iterator[Any]:
        nonlocal num_read
        for start in range(0, len(ids), 64):
            num_read += 64
            yield ids[start : start + 64]

    settings = WindowSettings.of(tiny_llm, window=100, stride=30)
    results = score_windows(tiny_llm, pieces(), settings)
    first_window, first = next(results)
    assert (first_window.first_scored, len(first_window.token_ids), first.num_tokens) == (1, 16, 15)
    assert num_read <= 128 < len(ids)
    rest = list(results)
    assert [score.num_tokens for _, score in rest[:3]] == [16, 32, 36]
    got = [value for score in [first, *(score for _, score in rest)] for value in score.token_logprobs]
    np.testing.assert_allclose(got, reference(ids.tolist(), 100, 30), atol=2e-4)


def test_parts_of_a_window_are_computed_once(tiny_llm: LLM) -> None:
    """Each part extends the prefix of the one before in the radix tree."""
    ids = np.arange(120, dtype=np.int32) + 40
    before = tiny_llm.engine.stats().cached_tokens
    settings = WindowSettings.of(tiny_llm, window=120, stride=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logprobe.analysis.windows.FIRST_TOKENS", 16)
        for _ in score_windows(tiny_llm, [ids], settings):
            pass
    assert tiny_llm.engine.stats().cached_tokens - before >= 15 + 31 + 63
