"""Masked language models against a loop over transformers, one masked copy at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.analysis import MaskedLM, masked
from logprobe.errors import ModelNotFoundError, ParameterError, UnsupportedModelError

if TYPE_CHECKING:
    from pathlib import Path

PIECES = ["the", "cat", "sat", "on", "mat", "##ron", "##s", "##a", "m", "a", ",", "."]
TEXTS = ["The matrons sat on a mat.", "the cat", "cats, cats, catsas sat on the mat, the mats.", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer BERT with a WordPiece tokenizer."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *PIECES]
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=40)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=40, initializer_range=0.4, **shape)
    BertForMaskedLM(config).eval().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bert(folder: Path) -> MaskedLM:
    return MaskedLM(str(folder))


def loop(folder: Path, text: str, *, within_word: bool) -> list[float]:
    """Return each token's log-probability, by a separate masked copy in float64."""
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval()
    ids = tokenizer(text).input_ids
    pieces = tokenizer.convert_ids_to_tokens(ids)
    found = []
    for place in range(1, len(ids) - 1):
        copy = list(ids)
        copy[place] = tokenizer.mask_token_id
        if within_word:
            after = place + 1
            while pieces[after].startswith("##"):
                copy[after] = tokenizer.mask_token_id
                after += 1
        with torch.inference_mode():
            logits = model(torch.tensor([copy])).logits[0, place]
        found.append(float(torch.log_softmax(logits, dim=-1)[ids[place]]))
    return found


@pytest.mark.parametrize("metric", masked.METRICS)
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_scores_are_those_of_a_loop_whatever_the_batch(
    bert: MaskedLM, folder: Path, metric: Any, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked, "ROWS_A_BATCH", batch)
    monkeypatch.setattr(masked, "TEXTS_AT_ONCE", 3)
    scores = bert.score(TEXTS, metric=metric)
    for score, text in zip(scores, TEXTS, strict=True):
        want = loop(folder, text, within_word=metric == "within_word_l2r")
        np.testing.assert_allclose(score.logprobs, want, atol=1e-5)
        assert score.logprob == pytest.approx(sum(want), abs=1e-4)
        assert bert.score(text, metric=metric)[0].logprobs == pytest.approx(score.logprobs, abs=1e-5)


def test_few_rows_run_at_once_where_they_are_wide(bert: MaskedLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bert.score(TEXTS[0])[0]
    sizes = []
    run = MaskedLM._run
    monkeypatch.setattr(masked, "LOGITS_A_BATCH", 400)
    monkeypatch.setattr(MaskedLM, "_run", lambda self, rows: sizes.append(len(rows)) or run(self, rows))
    np.testing.assert_allclose(bert.score(TEXTS[0])[0].logprobs, whole.logprobs, atol=1e-5)
    assert max(sizes) * 10 * 17 <= 400 or max(sizes) == 1


def test_words_hold_their_tokens_and_their_place_in_the_text(bert: MaskedLM) -> None:
    score = bert.score(TEXTS[0])[0]
    assert [word.text for word in score.words] == ["The", "matrons", "sat", "on", "a", "mat", "."]
    assert [TEXTS[0][word.start : word.end] for word in score.words] == [word.text for word in score.words]
    assert sum(word.logprob for word in score.words) == pytest.approx(score.logprob)
    assert score.words[1].surprisal == pytest.approx(-score.logprobs[1:4].sum())


def test_the_rest_of_a_word_does_not_give_its_beginning_away(bert: MaskedLM) -> None:
    ours, original = (bert.score(TEXTS[0], metric=metric)[0] for metric in masked.METRICS)
    alone = [0, 3, 4, 5, 6, 7, 8]  # the only token of a word, or its last one
    np.testing.assert_allclose(ours.logprobs[alone], original.logprobs[alone], atol=1e-5)
    assert not np.allclose(ours.logprobs[1:3], original.logprobs[1:3], atol=1e-3)


@pytest.mark.parametrize(
    ("texts", "asked", "parameter"),
    [("", {}, "texts"), ("the cat " * 30, {}, "texts"), ("the", {"metric": "best"}, "metric")],
)
def test_what_cannot_be_scored_is_refused(bert: MaskedLM, texts: str, asked: Any, parameter: str) -> None:
    with pytest.raises(ParameterError) as error:
        bert.score(texts, **asked)
    assert error.value.parameter == parameter


def test_positions_that_begin_behind_paddings_hold_fewer_tokens(folder: Path, tmp_path: Path) -> None:
    from shutil import copy

    from transformers import RobertaConfig, RobertaForMaskedLM

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    sizes: Any = {"vocab_size": 17, "max_position_embeddings": 20, **shape}
    config = RobertaConfig(pad_token_id=0, **sizes)
    RobertaForMaskedLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy(folder / name, tmp_path)
    roberta = MaskedLM(str(tmp_path))
    assert len(roberta.score("the " * 17)[0].logprobs) == 17  # 19 with CLS and SEP
    with pytest.raises(ParameterError) as error:
        roberta.score("the " * 18)
    assert error.value.parameter == "texts"


def test_a_model_that_is_none_is_refused(tiny_model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        MaskedLM(str(tiny_model_folder))
    with pytest.raises(ModelNotFoundError):
        MaskedLM(str(tmp_path / "nothing"))
