"""Pseudo-log-likelihoods of texts under masked models, which score each token given the text on both sides.

Pseudo-log-likelihoods are not log-probabilities of texts: exponentiated, they do not sum to 1. Use them to
rank texts under one model. Models run through transformers, without remote code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from logprobe.errors import UnsupportedModelError, require

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

Metric: TypeAlias = Literal["within_word_l2r", "original"]
METRICS: Final = ("within_word_l2r", "original")
ROWS_A_BATCH = 64
TEXTS_AT_ONCE = 256  # texts whose masked copies are held in memory
# Maximum number of float32 logits in a batch (256 MB); it limits batches of long texts or large vocabularies.
LOGITS_A_BATCH = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedWord:
    """A word as split by the tokenizer, with the sum of its tokens' log-probabilities."""

    text: str
    start: int  # characters [start, end) of the text
    end: int
    logprob: float  # nats

    @property
    def surprisal(self) -> float:
        """Negative log-probability, in nats."""
        return -self.logprob


@dataclass(frozen=True, kw_only=True)
class MaskedScore:
    """Log-probabilities of a text's tokens under a masked model, without CLS and SEP."""

    text: str
    token_ids: NDArray[np.int64] = field(repr=False)  # (T,)
    logprobs: NDArray[np.float64] = field(repr=False)  # (T,) nats, each token scored while it is masked
    spans: NDArray[np.int64] = field(repr=False)  # (T, 2), characters [start, end) of the text
    word_ids: NDArray[np.int64] = field(repr=False)  # (T,), index of the word that the token belongs to

    @property
    def logprob(self) -> float:
        """Pseudo-log-likelihood of the text, in nats."""
        return float(self.logprobs.sum())

    @cached_property
    def words(self) -> list[MaskedWord]:
        """Words of the text, in order."""
        words = []
        for _, group in groupby(range(len(self.token_ids)), key=lambda token: self.word_ids[token]):
            tokens = list(group)
            start, end = int(self.spans[tokens[0], 0]), int(self.spans[tokens[-1], 1])
            logprob = float(self.logprobs[tokens].sum())
            words.append(MaskedWord(text=self.text[start:end], start=start, end=end, logprob=logprob))
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One masked copy of a text."""

    token_ids: NDArray[np.int64]  # tokens of the unmasked text; all copies of the text share this array
    positions: list[int]  # masked positions; the token at the first one is scored


class MaskedLM:
    """A masked model (BERT, RoBERTa and similar) that scores texts.

    Args:
        model: a folder or a Hugging Face id, with safetensors and a `tokenizer.json`.

    Raises:
        ModelNotFoundError: the model does not exist, or a file is missing.
        UnsupportedModelError: the model has no masked-LM head or mask token, or needs remote code.
        MissingPackageError: torch is not installed.
    """

    def __init__(self, model: str) -> None:
        from logprobe.kernels.placement import torch_for
        from logprobe.models import resolve

        torch = torch_for("masked models")
        from transformers import AutoModelForMaskedLM, AutoTokenizer

        files = resolve(model)
        kind = {"local_files_only": True, "trust_remote_code": False}
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(files.folder, use_fast=True, **kind)
            loaded: Any = AutoModelForMaskedLM.from_pretrained(
                files.folder, use_safetensors=True, dtype=torch.float32, **kind
            )
        except (ValueError, KeyError, OSError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise UnsupportedModelError(f"{model}: cannot be loaded as a masked model ({reason})") from error
        if self._tokenizer.mask_token_id is None:
            raise UnsupportedModelError(f"{model}: its tokenizer has no mask token; use a masked model")
        if not self._tokenizer.is_fast:
            raise UnsupportedModelError(f"{model}: has no fast tokenizer (tokenizer.json), which is required")
        self._model = loaded.eval()
        self._limit = int(min(self._tokenizer.model_max_length, _num_positions(loaded)))

    def score(self, texts: str | Sequence[str], *, metric: Metric = "within_word_l2r") -> list[MaskedScore]:
        """Score each token of one or more texts, given the rest of the text, in batches of masked copies.

        Args:
            texts: one text or a sequence of texts.
            metric: "original" masks only the scored token (Salazar et al. 2020,
                https://arxiv.org/abs/1910.14659). "within_word_l2r" also masks the later tokens of the same
                word, so that the rest of a long word does not reveal its beginning (Kauf & Ivanova
                2023, https://arxiv.org/abs/2305.10588). minicons uses the same names.

        Raises:
            ParameterError: the metric is unknown, or a text has no tokens or more than the model accepts.
        """
        require(metric in METRICS, "metric", f"must be one of {', '.join(METRICS)}, got {metric!r}")
        many = [texts] if isinstance(texts, str) else list(texts)
        coded = [self._encoded(number, text) for number, text in enumerate(many)]
        scores: list[MaskedScore] = []
        for start in range(0, len(many), TEXTS_AT_ONCE):
            some = slice(start, start + TEXTS_AT_ONCE)
            scores += self._scores(many[some], coded[some], metric)
        return scores

    def _scores(self, texts: Sequence[str], coded: Sequence[Any], metric: Metric) -> list[MaskedScore]:
        logprobs = self._logprobs([row for one in coded for row in self._rows(one, metric)])
        scores, first = [], 0
        for text, one in zip(texts, coded, strict=True):
            own, words = _own_tokens(one), one.word_ids()
            scores.append(
                MaskedScore(
                    text=text,
                    token_ids=np.array(one["input_ids"])[own],
                    logprobs=logprobs[first : first + len(own)],
                    spans=np.array(one["offset_mapping"])[own],
                    word_ids=np.array([words[token] for token in own]),
                )
            )
            first += len(own)
        return scores

    def _encoded(self, number: int, text: str) -> Any:
        coded = self._tokenizer(text, return_offsets_mapping=True, verbose=False)
        size = len(coded["input_ids"])
        require(_own_tokens(coded), "texts", f"text {number} has no token; there is nothing to score")
        fits = f"text {number} has {size} tokens with special tokens, but at most {self._limit} fit; cut it"
        require(size <= self._limit, "texts", fits)
        return coded

    def _rows(self, coded: Any, metric: Metric) -> Iterator[_Row]:
        ids, words = np.array(coded["input_ids"], np.int64), coded.word_ids()
        for _, group in groupby(_own_tokens(coded), key=lambda position: words[position]):
            word = list(group)
            for number, position in enumerate(word):
                masked = word[number:] if metric == "within_word_l2r" else [position]
                yield _Row(token_ids=ids, positions=masked)

    def _logprobs(self, rows: Sequence[_Row]) -> NDArray[np.float64]:
        """Return each row's logprob of its scored token; rows of similar length share a batch."""
        found = np.empty(len(rows))
        order = sorted(range(len(rows)), key=lambda number: len(rows[number].token_ids))
        start = 0
        while start < len(order):
            size = len(rows[order[min(start + ROWS_A_BATCH, len(order)) - 1]].token_ids)
            most = LOGITS_A_BATCH // (size * self._model.config.vocab_size)
            batch = order[start : start + max(min(most, ROWS_A_BATCH), 1)]
            found[batch] = self._run([rows[number] for number in batch])
            start += len(batch)
        return found

    def _run(self, rows: Sequence[_Row]) -> NDArray[np.float64]:
        import torch

        size = max(len(row.token_ids) for row in rows)
        pad = self._tokenizer.pad_token_id or 0
        ids = np.full((len(rows), size), pad, np.int64)
        mask = np.zeros((len(rows), size), np.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row.token_ids)] = row.token_ids
            ids[place, row.positions] = self._tokenizer.mask_token_id
            mask[place, : len(row.token_ids)] = 1
        with torch.inference_mode():
            logits = self._model(
                input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)
            ).logits
            places = torch.arange(len(rows))
            positions = torch.tensor([row.positions[0] for row in rows])
            logprobs = torch.log_softmax(logits[places, positions].double(), dim=-1)
            chosen = logprobs[places, torch.tensor([row.token_ids[row.positions[0]] for row in rows])]
        return np.asarray(chosen.numpy(), np.float64)


def _num_positions(model: Any) -> float:
    """Return the maximum number of tokens that a model accepts.

    RoBERTa-like models number their positions from padding_idx + 1.
    """
    embeddings = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    padding = getattr(embeddings, "padding_idx", None)
    num = getattr(model.config, "max_position_embeddings", None) or np.inf
    return float(num - (0 if padding is None else padding + 1))


def _own_tokens(coded: Any) -> list[int]:
    """Return the positions of all tokens except special tokens."""
    return [place for place, word in enumerate(coded.word_ids()) if word is not None]
