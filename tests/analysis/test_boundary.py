"""Words and their ends: `LLM.surprisal(..., boundary="end")`, units, tables of words."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import FlatLogprobs
from logprobe.analysis import ScoredText
from logprobe.analysis.score import Score
from logprobe.analysis.texts import NOT_SCORED, ROW_COLUMNS, begins_word, surprisal
from logprobe.errors import ParameterError
from logprobe.text.spans import byte_spans

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe import LLM

TEXT = "the cat and the dogs,  12 é 🌊 in a\ncat"
TOKENS = [b" a", b" b", b"a", b"b", b"<eos>"]
EOS = 4


class TinyScorer:
    """A fake model of five tokens with one tokenization per text; each context has its own distribution."""

    lora = None
    engine = SimpleNamespace(capabilities=lambda: SimpleNamespace(max_model_len=32))

    def __init__(self) -> None:
        vocabulary = SimpleNamespace(token_bytes=lambda token_id: TOKENS[token_id])
        self.text: Any = SimpleNamespace(encode=self._encode, vocabulary=_Sized(vocabulary), eos_token_id=EOS)
        self.text.encode_with_spans = self._encode_with_spans
        self.text.prefix = lambda: np.array([EOS], np.int32)

    @staticmethod
    def _encode(text: str, **_: Any) -> Any:
        pieces = [" " + piece if has_space else piece for has_space, piece in _letters(text)]
        return np.array([TOKENS.index(piece.encode()) for piece in pieces], np.int32)

    @classmethod
    def _encode_with_spans(cls, text: str) -> Any:
        ids = cls._encode(text)
        return ids, byte_spans(text, [TOKENS[token_id] for token_id in ids], list)

    @staticmethod
    def logprobs(context: tuple[int, ...]) -> Any:
        logits = np.random.default_rng([len(context), *context]).normal(size=len(TOKENS)) * 1.5
        return logits - np.logaddexp.reduce(logits)

    def score(self, pairs: Any, **_: Any) -> list[Score]:
        return [self._score(*(tuple(part.tolist()) for part in pair)) for pair in pairs]

    def _score(self, context: tuple[int, ...], ids: tuple[int, ...]) -> Score:
        rows = np.array([self.logprobs(context + ids[:place]) for place in range(len(ids))])
        chosen = rows[np.arange(len(ids)), list(ids)]
        order = np.argsort(-rows, axis=1)
        record = FlatLogprobs()
        record.append_rows(
            np.column_stack([ids, order]),
            np.column_stack([chosen, np.take_along_axis(rows, order, axis=1)]),
            1 + (rows > chosen[:, None]).sum(axis=1),
            entropy=-(np.exp(rows) * rows).sum(axis=1),
        )
        return Score.of(ids, record, b"".join(TOKENS[token_id] for token_id in ids))


class _Sized:
    def __init__(self, vocabulary: Any) -> None:
        self.token_bytes = vocabulary.token_bytes

    def __len__(self) -> int:
        return len(TOKENS)


def _letters(text: str) -> list[tuple[bool, str]]:
    return [
        (place > 0 and text[place - 1] == " ", letter) for place, letter in enumerate(text) if letter != " "
    ]


def test_the_probabilities_of_all_words_and_their_ends_sum_to_one() -> None:
    tiny: Any = TinyScorer()
    start = " ab a"
    context = (EOS, *tiny.text.encode(start).tolist())
    begin = float(np.exp(tiny.logprobs(context)[[0, 1, EOS]]).sum())
    total = math.exp(tiny.logprobs(context)[EOS]) / begin  # the text ends where a word might begin
    naive = 0.0
    for length in range(1, 5):
        for letters in itertools.product("ab", repeat=length):
            word = " " + "".join(letters)
            unit = surprisal(tiny, start + word, boundary="end", bos=True)[0].words[-1]
            assert (unit.text, unit.num_scored) == (word, length)
            total += math.exp(unit.logprob or 0.0)
            plain = surprisal(tiny, start + word, bos=True)[0]
            naive += math.exp(plain.words[-1].logprob or 0.0)
            if length == 4:  # longer words: continuations within a word
                ids = (*context, *tiny.text.encode(word).tolist())
                goes_on = float(np.exp(tiny.logprobs(ids)[[2, 3]]).sum())
                total += math.exp(plain.words[-1].logprob or 0.0) * goes_on / begin
    assert total == pytest.approx(1, abs=1e-5)
    assert abs(naive - 1) > 0.1


def rows_of(folder: Path, text: str) -> tuple[list[int], Any]:
    """Return the ids after BOS, and transformers' float64 log-softmax before each and after the last."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder).encode(text)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.inference_mode():
        return ids[1:], torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1).numpy()


def test_words_have_the_numbers_of_minicons_formula(tiny_llm: LLM, tiny_model_folder: Path) -> None:
    ids, rows = rows_of(tiny_model_folder, TEXT)
    begins = begins_word(tiny_llm.text)
    mass = np.logaddexp.reduce(rows[:, begins], axis=1)  # before each token, and after the last
    is_begin = [*begins[ids], True]
    corrected = rows[np.arange(len(ids)), ids]
    for token in range(len(ids)):
        corrected[token] += mass[token + 1] if is_begin[token + 1] else 0.0
        corrected[token] -= mass[token] if token > 0 and is_begin[token] else 0.0
    scored, plain = tiny_llm.surprisal(TEXT, boundary="end")[0], tiny_llm.surprisal(TEXT)[0]
    assert [word.text for word in scored.words] == [word.text for word in plain.words]
    for word, other in zip(scored.words, plain.words, strict=True):
        assert word.logprob == pytest.approx(corrected[word.first_token : word.end_token].sum(), abs=1e-4)
        assert word.logprob != other.logprob
    both = scored[1:4, "word"]
    assert both.logprob == pytest.approx(sum(word.logprob or 0.0 for word in scored.words[1:4]), abs=1e-9)
    np.testing.assert_allclose(scored.logprobs, plain.logprobs, atol=1e-5)
    assert [unit.logprob for unit in scored.tokens] == scored.logprobs.tolist()


def test_the_mass_is_exact_whatever_the_windows_and_the_texts_beside(tiny_llm: LLM) -> None:
    alone = tiny_llm.surprisal(TEXT, boundary="end")[0]
    beside, empty, long = tiny_llm.surprisal([TEXT, "", TEXT * 9], boundary="end", window=120, stride=60)
    assert alone.log_begin_mass is not None
    assert beside.log_begin_mass is not None
    assert len(alone.log_begin_mass) == len(alone.token_ids) + 1
    np.testing.assert_allclose(beside.log_begin_mass, alone.log_begin_mass, atol=1e-5)
    assert empty.words == []
    assert list(empty.to_pandas("sentence").columns) == ["sentence", *ROW_COLUMNS]
    assert long.log_begin_mass is not None
    assert not np.isnan(long.log_begin_mass).any()


def test_a_first_word_without_a_number_says_so_and_is_no_zero(tiny_llm: LLM) -> None:
    for boundary in (None, "end"):
        scored: Any = tiny_llm.surprisal("the cat sat", bos=False, boundary=boundary)[0]
        first, *others = scored.rows()
        assert (first["word"], first["surprisal"], first["note"]) == ("the", None, NOT_SCORED)
        assert all(row["surprisal"] > 0 and row["note"] == "" for row in others)
        frame = scored.to_pandas()
        assert frame["surprisal"].isna().tolist() == [True] + [False] * len(others)
    # Only one of its two tokens is scored, so the word is not.
    assert tiny_llm.surprisal("xat", bos=False)[0].rows()[0]["surprisal"] is None


def test_bits_are_nats_by_another_name_and_are_kept_with_the_data(tiny_llm: LLM) -> None:
    nats, bits = (tiny_llm.surprisal(TEXT, unit=unit)[0] for unit in ("nats", "bits"))
    assert nats.words[2].logprob == bits.words[2].logprob
    assert bits.words[2].surprisal == pytest.approx((nats.words[2].surprisal or 0) / math.log(2))
    ours, theirs = nats.to_pandas(), bits.to_pandas()
    for name in ("surprisal", "entropy"):
        np.testing.assert_allclose(theirs[name] * math.log(2), ours[name])
    assert (ours.attrs["unit"], theirs.attrs["unit"]) == ("nats", "bits")
    assert set(theirs["unit"]) == {"bits"}
    assert theirs["tokens"].sum() == len(bits.token_ids)
    assert theirs["entropy"].iloc[1] == pytest.approx(
        bits.entropy[bits.words[1].first_token] / math.log(2), abs=1e-9
    )


@pytest.mark.parametrize(
    ("asked", "parameter"),
    [
        ({"boundary": "start"}, "boundary"),
        ({"unit": "bans"}, "unit"),
        ({"boundary": "end", "window": 50, "stride": 50}, "stride"),
    ],
)
def test_other_words_are_refused_by_name(tiny_llm: LLM, asked: Any, parameter: str) -> None:
    with pytest.raises(ParameterError) as error:
        tiny_llm.surprisal("the cat", **asked)
    assert error.value.parameter == parameter


def test_between_characters_that_no_vocabulary_marks_nothing_is_counted() -> None:
    data = ["你".encode(), "好".encode(), b" a"]
    text = ScoredText(
        text="你好 a",
        token_ids=np.arange(3, dtype=np.int32),
        byte_spans=byte_spans(b"".join(data).decode(), data, list),
        logprobs=np.array([-1.0, -2.0, -3.0]),
        ranks=np.ones(3, np.int64),
        entropy=np.zeros(3),
        begins_word=np.array([False, False, True]),
        log_begin_mass=np.array([-0.1, -0.2, -0.4, -0.8]),
    )
    assert [word.logprob for word in text.words] == pytest.approx([-1.0, -2.0 - 0.4, -3.0 + 0.4 - 0.8])
