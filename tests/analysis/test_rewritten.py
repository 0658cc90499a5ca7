"""Counts and offsets refer to the given text, whatever the tokenizer normalises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from logprobe import LLM
from logprobe.analysis import DataSettings, compare, score_dataset
from rewriting import save_rewriting_llama, save_sentencepiece_llama

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SENTENCEPIECE = "sentencepiece"
TEXTS = {
    "nfc": "the cafe\u0301 and the cat",
    "nfkc": "the ﬃ ﷺ and the cat",
    "lower case": "THE CAT and İ dogs",
    "one space": "the    cat  and   the dog",
    "swallowed spaces": "the  dog  and  dog",
    SENTENCEPIECE: "the é cat",
}


@pytest.fixture(scope="module", params=TEXTS)
def rewriter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A model whose tokenizer rewrites texts, and a text that it rewrites."""
    name, folder = request.param, tmp_path_factory.mktemp("rewriting")
    if name == SENTENCEPIECE:
        save_sentencepiece_llama(folder)
    else:
        save_rewriting_llama(folder, name)
    with LLM(str(folder), kv_cache_memory_bytes=1 << 21) as llm:
        ids = llm.text.encode(TEXTS[name], add_special_tokens=False)
        assert llm.text.vocabulary.bytes_of(ids) != TEXTS[name].encode()
        yield llm, TEXTS[name]


def test_units_are_of_the_text_that_was_given(rewriter: Any) -> None:
    llm, text = rewriter
    found = llm.surprisal(text)[0]
    assert found.text == text
    assert "".join(word.text for word in found.words) == text
    for unit in (*found.words, *found.tokens):
        assert text[unit.start : unit.end] == unit.text
    for match in (*found.matching(r"\S+"), *found.units("char")):
        assert match.text == text[match.start : match.end]
        assert match.num_scored
    (score,) = llm.score([("", text)])
    assert found.logprob == pytest.approx(score.logprob, abs=1e-4)
    assert sum(word.logprob for word in found.words) == pytest.approx(score.logprob, abs=1e-4)


def test_a_score_counts_the_text_that_was_given(rewriter: Any) -> None:
    llm, text = rewriter
    context, continuation = "the", text.removeprefix("the").removeprefix("THE")
    (score,) = llm.score([(context, continuation)])
    assert (score.num_bytes, score.num_chars) == (len(continuation.encode()), len(continuation))
    assert score.logprob_per_char == score.logprob / len(continuation)
    (whole,) = llm.score([("", text)])
    assert (whole.num_bytes, whole.num_chars) == (len(text.encode()), len(text))
    for truncation, num_times in (("left", 2), ("window", 2), ("window", 40)):
        long = f" {text}" * num_times
        (cut,) = llm.score([("the cat " * 100, long)], truncation=truncation)
        assert cut.num_bytes == len(f" {long}".encode())  # with the space that ends the context


def test_perplexity_and_data_sets_agree_on_the_bytes(rewriter: Any, tmp_path: Path) -> None:
    llm, text = rewriter
    found = llm.surprisal(text, bos=False)[0]
    first = len(text[: found.tokens[0].end].encode()) if found.byte_spans[0, 1] else 0
    total = llm.perplexity(text, bos=False)
    assert total.num_bytes == len(text.encode())
    assert total.num_scored_bytes == total.num_bytes - first
    assert llm.perplexity(text, bos=True).num_scored_bytes == total.num_bytes
    compared = compare(llm, llm, [text], bos=True)
    assert compared.num_bytes == total.num_bytes
    assert compared.bits_per_byte()[0] == pytest.approx(llm.perplexity(text, bos=True).bits_per_byte)
    (tmp_path / "texts.txt").write_text(text)
    for bos, num_bytes in ((False, total.num_scored_bytes), (True, total.num_bytes)):
        output = tmp_path / f"{bos}.parquet"
        score_dataset(llm, tmp_path / "texts.txt", output, settings=DataSettings(bos=bos), by_line=True)
        assert pq.read_table(output).to_pylist()[0]["num_bytes"] == num_bytes


def test_disjoint_windows_leave_out_the_bytes_of_their_first_tokens(rewriter: Any, tmp_path: Path) -> None:
    llm, text = rewriter
    long = " ".join([text] * 4)
    sizes = np.diff(llm.text.encode_with_spans(long)[1][:, 1], prepend=0)
    unscored = int(sizes[::5].sum())
    found = llm.perplexity(long, window=5, stride=5, bos=False)
    assert (found.num_bytes, found.num_scored_bytes) == (len(long.encode()), len(long.encode()) - unscored)
    settings = DataSettings(bos=False, truncation="window", window=5, stride=5)
    (tmp_path / "texts.txt").write_text(long)
    score_dataset(llm, tmp_path / "texts.txt", tmp_path / "x.parquet", settings=settings, by_line=True)
    assert pq.read_table(tmp_path / "x.parquet").to_pylist()[0]["num_bytes"] == found.num_scored_bytes
