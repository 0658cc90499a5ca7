"""Texts → surprisals of their tokens, summed over words, sentences, characters or what a pattern finds.

The units tile the tokens: each token counts in exactly one word, so that the sums over words and over tokens
are the same. Spaces before a word are the word's, as in the tokens; a token that reaches into two words makes
them one unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

import numpy as np
import regex

from logprobe.errors import ParameterError, require
from logprobe.scoring.scorer import prefix_of
from logprobe.scoring.windows import Window, WindowSettings, windows

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from logprobe.records.values import IntArray
    from logprobe.scoring.score import Score
    from logprobe.scoring.scorer import Scorer
    from logprobe.text.edge import TextEdge

By: TypeAlias = Literal["token", "word", "sentence", "char"]
Span: TypeAlias = tuple[int, int]
"""Characters [start, end) of a text."""

_OPEN, _SCRIPT = r"[\p{Ps}\p{Pi}]", r"[\p{Han}\p{Hiragana}\p{Katakana}]"
# A run without spaces with its punctuation; of scripts that write none between words, one character.
WORD = regex.compile(
    rf"{_OPEN}*+{_SCRIPT}\p{{M}}*+[^\P{{P}}\p{{Ps}}\p{{Pi}}]*+|(?:(?!{_SCRIPT})\S)+", regex.VERSION1
)
# Up to the marks that end it with what closes quotes, to a blank line, or to the end.
SENTENCE = regex.compile(
    r"\S.*?(?:[.!?…]++[\p{Pe}\p{Pf}\"']*+(?=\s|\Z)|[。！？]++[\p{Pe}\p{Pf}]*+|(?=\s*\n\s*\n)|(?=\s*\Z))",
    regex.VERSION1 | regex.DOTALL,
)
_PATTERNS = {"word": WORD, "sentence": SENTENCE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Some tokens that stand together, and what the model gives them."""

    text: str
    start: int  # characters [start, end) of the whole text
    end: int
    first_token: int  # tokens [first_token, end_token)
    end_token: int
    num_scored: int  # tokens that something predicts: all but the first of a text without BOS
    logprob: float | None  # sum over them, nats; None where there is none

    @property
    def surprisal(self) -> float | None:
        """Minus the logprob, nats."""
        return None if self.logprob is None else -self.logprob


@dataclass(frozen=True, kw_only=True)
class ScoredText:
    """A text whose tokens have been scored; a slice by characters, words, sentences or tokens is a `Unit`.

    `scored[3:6, "word"]` sums words 3 to 5; `scored[10:20]` the tokens that reach into these characters.
    """

    text: str
    token_ids: NDArray[np.int32]  # (T,)
    byte_bounds: NDArray[np.int64]  # (T + 1,): token t is bytes [b[t], b[t + 1]) of the text's UTF-8
    logprobs: NDArray[np.float64]  # (T,) nats; NaN where nothing predicts the token
    ranks: NDArray[np.int64]  # (T,); 0 where nothing predicts the token
    entropy: NDArray[np.float64]  # (T,) nats; NaN where nothing predicts the token
    bos_token_id: int | None = None  # what stood before the text; None: nothing

    @property
    def logprob(self) -> float:
        """Sum over all scored tokens, nats."""
        return float(np.nansum(self.logprobs))

    @property
    def tokens(self) -> list[Unit]:
        """Each token as a unit; one that holds part of a character covers the whole of it."""
        return [self._unit(token, token + 1) for token in range(len(self.token_ids))]

    @property
    def words(self) -> list[Unit]:
        """Runs between spaces with their punctuation; Han and kana character by character."""
        return self._tiled(_PATTERNS["word"].finditer(self.text))

    @property
    def sentences(self) -> list[Unit]:
        """Sentences with the marks that end them; a blank line ends one too."""
        return self._tiled(_PATTERNS["sentence"].finditer(self.text))

    def units(self, by: By) -> list[Unit]:
        """The tokens, words, sentences or characters of the text.

        Raises:
            ParameterError: another unit.
        """
        if by == "char":
            return self.spans((start, start + 1) for start in range(len(self.text)))
        known = {"token": "tokens", "word": "words", "sentence": "sentences"}
        require(by in known, "by", f"must be one of {', '.join([*known, 'char'])}, got {by!r}")
        units: list[Unit] = getattr(self, known[by])
        return units

    def spans(self, spans: Iterable[Span]) -> list[Unit]:
        """What the model gives some spans of characters; each covers every token that reaches into it.

        Raises:
            ParameterError: a span outside the text, or one that ends before it starts.
        """
        return [self._cover(start, end) for start, end in spans]

    def matching(self, pattern: str | re.Pattern[str]) -> list[Unit]:
        """The spans that a regular expression finds; see `spans`."""
        find: Callable[[str], Iterator[re.Match[str]]] = (
            regex.compile(pattern).finditer if isinstance(pattern, str) else pattern.finditer
        )
        return self.spans(match.span() for match in find(self.text))

    def __getitem__(self, key: slice | int | tuple[slice | int, By]) -> Unit:
        which, by = key if isinstance(key, tuple) else (key, "char")
        if by == "char":
            chars = range(len(self.text))[_as_slice(which)]
            return self._cover(chars.start, max(chars.stop, chars.start))
        units = self.units(by)[_as_slice(which)]
        if not units:
            raise ParameterError("index", f"{which} holds no {by} of the text")
        return self._unit(units[0].first_token, units[-1].end_token)

    @cached_property
    def _chars_before(self) -> NDArray[np.int64]:
        """Characters that begin before byte b, (num_bytes + 1,)."""
        data = np.frombuffer(self.text.encode(), np.uint8)
        return np.concatenate([[0], np.cumsum((data & 0xC0) != 0x80)]).astype(np.int64)

    @cached_property
    def _byte_of_char(self) -> NDArray[np.int64]:
        """Where each character begins, (num_chars + 1,)."""
        data = np.frombuffer(self.text.encode(), np.uint8)
        return np.append(np.flatnonzero((data & 0xC0) != 0x80), len(data))

    def _cover(self, start: int, end: int) -> Unit:
        fits = 0 <= start <= end <= len(self.text)
        require(fits, "span", f"[{start}, {end}) lies outside the text's {len(self.text)} characters")
        first_byte, end_byte = self._byte_of_char[start], self._byte_of_char[end]
        first = int(np.searchsorted(self.byte_bounds[1:], first_byte, side="right"))
        stop = int(np.searchsorted(self.byte_bounds[:-1], end_byte, side="left"))
        return self._unit(first, max(stop, first) if start < end else first)

    def _tiled(self, matches: Iterable[re.Match[str]]) -> list[Unit]:
        cores = np.array([match.span() for match in matches], np.int64).reshape(-1, 2)
        if not len(cores):
            return [self._unit(0, len(self.token_ids))] if len(self.token_ids) else []
        bounds = _tile(self.byte_bounds, self._byte_of_char[cores])
        return [self._unit(first, end) for first, end in pairwise(bounds)]

    def _unit(self, first: int, end: int) -> Unit:
        num_bytes = self.byte_bounds[-1]
        start_byte = self.byte_bounds[first]
        start = int(self._chars_before[start_byte])
        if start_byte < num_bytes and self._byte_of_char[start] != start_byte:
            start -= 1  # within a character
        stop = max(int(self._chars_before[self.byte_bounds[end]]), start)
        scored = self.logprobs[first:end][~np.isnan(self.logprobs[first:end])]
        return Unit(
            text=self.text[start:stop],
            start=start,
            end=stop,
            first_token=first,
            end_token=end,
            num_scored=len(scored),
            logprob=float(scored.sum()) if len(scored) else None,
        )


def _tile(byte_bounds: NDArray[np.int64], cores: NDArray[np.int64]) -> list[int]:
    """Where the units that hold these cores (n, 2) begin in the tokens, and their end: (n' + 1,), n' ≤ n.

    A token of spaces alone goes to the core after it, one that reaches into two cores joins them.
    """
    num_tokens = len(byte_bounds) - 1
    first = np.searchsorted(cores[:, 1], byte_bounds[:-1], side="right")
    last = np.searchsorted(cores[:, 0], byte_bounds[1:], side="left") - 1
    # The core that a token is of: the first that it touches, or for one of spaces alone the next.
    core_of = np.minimum(first, len(cores) - 1)
    is_new = np.append(True, core_of[1:] > np.maximum.accumulate(np.maximum(last, core_of))[:-1])
    return [*np.flatnonzero(is_new).tolist(), num_tokens]


def _as_slice(which: slice | int) -> slice:
    if isinstance(which, slice):
        require(which.step in {None, 1}, "index", "a slice of a text takes no step")
        return which
    return slice(which, which + 1 if which != -1 else None)


def byte_bounds(pieces: Sequence[bytes]) -> NDArray[np.int64]:
    """Where tokens of these bytes begin and end, (T + 1,)."""
    return np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)


@overload
def surprisal(  # type: ignore[overload-overlap]  # one text comes first, though a str is a sequence of them
    llm: Scorer,
    texts: str,
    *,
    bos: bool | None = ...,
    window: int | None = ...,
    stride: int | None = ...,
) -> ScoredText: ...
@overload
def surprisal(
    llm: Scorer,
    texts: Sequence[str],
    *,
    bos: bool | None = ...,
    window: int | None = ...,
    stride: int | None = ...,
) -> list[ScoredText]: ...
def surprisal(
    llm: Scorer,
    texts: str | Sequence[str],
    *,
    bos: bool | None = None,
    window: int | None = None,
    stride: int | None = None,
) -> ScoredText | list[ScoredText]:
    """Score every token of a text, or of many texts at once, with ranks and entropies; nats.

    Args:
        llm: the model, such as `llm.with_lora(name)`.
        texts: one or many, of any length: what the context cannot hold is scored in sliding windows.
        bos: put BOS (EOS where the model has none) before each text, so that its first token is scored too,
            or do not; None: as its tokenizer does.
        window: tokens a window; the default is the model's context.
        stride: tokens from one window to the next; the default is half a window, and a whole one makes them
            disjoint, the first token of each without a number.

    Raises:
        ParameterError: a text that cannot be encoded, a window or stride that cannot be used.
        BatchError: some texts failed.
    """
    settings = WindowSettings.of(llm, window=window, stride=stride, bos=bos)
    many = [texts] if isinstance(texts, str) else texts
    prefix = prefix_of(llm.text, bos)
    ids = [np.concatenate([prefix, _encoded(llm.text, text, number)]) for number, text in enumerate(many)]
    cuts = [
        [window for window in windows([sequence], settings.window, settings.stride) if window.num_scored]
        for sequence in ids
    ]
    scores = iter(llm.score([window.pair for cut in cuts for window in cut], entropy=True))
    scored = [
        _scored(llm.text, text, sequence, len(prefix), [(window, next(scores)) for window in cut])
        for text, sequence, cut in zip(many, ids, cuts, strict=True)
    ]
    return scored[0] if isinstance(texts, str) else scored


def _encoded(edge: TextEdge, text: str, number: int) -> IntArray:
    try:
        return edge.encode(text, add_special_tokens=False)
    except ParameterError as error:
        raise ParameterError("texts", f"number {number} {str(error).removeprefix('prompt: ')}") from error


def _scored(
    edge: TextEdge, text: str, ids: IntArray, num_prefix: int, scores: list[tuple[Window, Score]]
) -> ScoredText:
    own = ids[num_prefix:]
    pieces = [edge.vocabulary.token_bytes(token_id) for token_id in own.tolist()]
    data = b"".join(pieces)
    if data != text.encode():  # a normaliser's changes: the text is then the one that the tokens spell
        text = data.decode("utf-8", "surrogateescape")
        if "\udc80" <= max(text, default="") <= "\udcff":
            raise ParameterError(
                "texts", "the model's tokenizer makes of one what is no text; score it by tokens"
            )
    logprobs, ranks, entropy = (
        np.full(len(ids), np.nan),
        np.zeros(len(ids), np.int64),
        np.full(len(ids), np.nan),
    )
    for window, score in scores:
        place = slice(window.start + window.first_scored, window.start + len(window.token_ids))
        logprobs[place], ranks[place], entropy[place] = score.token_logprobs, score.ranks, score.entropy
    return ScoredText(
        text=text,
        token_ids=own,
        byte_bounds=byte_bounds(pieces),
        logprobs=logprobs[num_prefix:],
        ranks=ranks[num_prefix:],
        entropy=entropy[num_prefix:],
        bos_token_id=int(ids[0]) if num_prefix else None,
    )
