"""Score texts of any length: tokenize them in pieces and score them in windows, each token once.

How `encode_pieces` works: consecutive pieces of text overlap, and both pieces usually have the same sequence
of tokens in the overlap. The earlier piece's tokens before that sequence, followed by the later piece's
tokens from the sequence on, equal the tokens of the whole text. The reason is that text can change a token
before it only if the token ends at most a few characters before the text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from logprobe.analysis import measures
from logprobe.analysis.score import Score
from logprobe.analysis.scorer import in_flight, prefix_of
from logprobe.errors import WeightsReplacedError, require
from logprobe.records import FlatLogprobs
from logprobe.text.prompts import each_text
from logprobe.text.windows import Window, windows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from logprobe.analysis.scorer import Scorer
    from logprobe.records.values import IntArray
    from logprobe.text.edge import TextEdge

TOKENS_A_CALL = 1 << 12
SHORT_TOKENS = 1024  # a shorter text is scored in one call
FIRST_TOKENS = 256  # report this many tokens of a long text first instead of waiting for a whole window


@dataclass(frozen=True, kw_only=True)
class WindowSettings:
    """Window length and stride in tokens, and whether BOS precedes the text."""

    window: int
    stride: int
    bos: bool | None = None  # None: as the tokenizer does

    @classmethod
    def of(
        cls, llm: Scorer, *, window: int | None = None, stride: int | None = None, bos: bool | None = None
    ) -> WindowSettings:
        """Return settings with defaults: the window is the model's context, the stride half a window.

        Raises:
            ParameterError: the window is not an integer in [2, context + 1], or the stride is not an integer
                in [1, window].
        """
        for name, number in {"window": window, "stride": stride}.items():
            is_number = number is None or isinstance(number, int | np.integer)
            require(is_number, name, "must be a whole number of tokens", got=number)
        limit: int = llm.engine.capabilities().max_model_len
        window = limit if window is None else window
        require(2 <= window <= limit + 1, "window", f"must be in [2, {limit + 1}] tokens, got {window}")
        stride = max(window // 2, 1) if stride is None else stride
        fits = 1 <= stride <= window
        require(fits, "stride", f"must be in [1, {window}] (the window), got {stride}")
        return cls(window=window, stride=stride, bos=bos)


def score_windows(
    llm: Scorer,
    pieces: Iterable[IntArray],
    settings: WindowSettings,
    *,
    entropy: bool = False,
    varentropy: bool = False,
    logprobs: int = 0,
) -> Iterator[tuple[Window, Score]]:
    """Yield each window with the score of its newly scored tokens, in order and in bounded memory.

    Raises:
        WeightsReplacedError: the model's weights were replaced between two windows.
        LogprobeError: any error of `LLM.score`.
    """
    empty = Score.of([], FlatLogprobs(), b"")

    def score(batch: list[Window]) -> list[tuple[Window, Score]]:
        pairs = [part.pair for part in batch if part.num_scored]
        scores = iter(llm.score(pairs, entropy=entropy, varentropy=varentropy, logprobs=logprobs))
        return [(part, next(scores) if part.num_scored else empty) for part in batch]

    all_windows = windows(pieces, settings.window, settings.stride)
    first = next(all_windows, None)
    if first is None:
        return
    is_short = len(first.token_ids) < min(settings.window, SHORT_TOKENS)
    early = [[first]] if is_short else ([part] for part in growing(first))
    versions: set[str | None] = set()
    for scored in in_flight(score, chain(early, _batches(all_windows))):
        versions |= {
            part.record.info.weight_version for _, part in scored if part.record and part.record.info
        }
        if len(versions) > 1:
            raise WeightsReplacedError("the weights were replaced while a text was scored; score it again")
        yield from scored


def growing(window: Window) -> Iterator[Window]:
    """Split a window into parts whose ends double, so that the first results come early."""
    first, end = window.first_scored, FIRST_TOKENS
    while first < len(window.token_ids):
        if end > first:
            num_unscored = window.num_unscored if first == window.first_scored else 0
            yield Window(window.token_ids[:end], window.start, first, num_unscored)
            first = min(end, len(window.token_ids))
        end *= 2


def _batches(all_windows: Iterable[Window]) -> Iterator[list[Window]]:
    batch: list[Window] = []
    for window in all_windows:
        batch.append(window)
        if sum(len(part.token_ids) for part in batch) >= TOKENS_A_CALL:
            yield batch
            batch = []
    if batch:
        yield batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """Log-probability of a whole text, its numbers of tokens, bytes and words, and the settings used."""

    logprob: float  # nats
    num_tokens: int
    num_scored: int  # scored tokens; a token is not scored if no token precedes it in its window
    num_bytes: int
    num_scored_bytes: int
    num_words: int  # words are separated by whitespace
    window: int
    stride: int
    bos_token_id: int | None  # token put before the text, if any

    @property
    def perplexity(self) -> float | None:
        """Perplexity per token; None if no token is scored."""
        return measures.perplexity(self.logprob, self.num_scored)

    @property
    def word_perplexity(self) -> float | None:
        """Perplexity per word; comparable across tokenizers.

        None if no token is scored, or if a token other than the first one of a text without BOS is not
        scored: the log-probabilities of some words are then incomplete.
        """
        num_unscored = self.num_tokens - self.num_scored
        if not self.num_scored or num_unscored > (self.bos_token_id is None):
            return None
        return measures.perplexity(self.logprob, self.num_words)

    @property
    def byte_perplexity(self) -> float | None:
        """Perplexity per byte; comparable across tokenizers."""
        return measures.perplexity(self.logprob, self.num_scored_bytes)

    @property
    def bits_per_byte(self) -> float | None:
        """Mean surprisal per byte, in bits; None without scored bytes."""
        return measures.bits_per_byte(self.logprob, self.num_scored_bytes)


class TextTally:
    """Counts tokens, bytes and words of a text as it is streamed, and sums the scores of its windows."""

    def __init__(self, llm: Scorer, settings: WindowSettings) -> None:
        self._edge = llm.text
        self._settings = settings
        self._prefix = prefix_of(llm.text, settings.bos)
        self.num_tokens = self.num_bytes = self.num_words = self.num_scored = 0
        self._unscored_bytes = 0
        self._in_word = False
        self._logprobs: list[float] = []

    def pieces(self, texts: Iterable[str]) -> Iterator[IntArray]:
        """Yield the token ids of a text piece by piece; if BOS is used, it is the first piece."""
        if len(self._prefix):
            yield self._prefix
        is_disjoint = self._settings.stride == self._settings.window
        for piece in encode_pieces(map(self._read, texts), self._edge):
            places = np.arange(len(piece.token_ids)) + len(self._prefix) + self.num_tokens
            is_unscored = places % self._settings.stride == 0 if is_disjoint else places == 0
            self._unscored_bytes += int(piece.sizes[is_unscored].sum())
            self.num_tokens += len(piece.token_ids)
            yield piece.token_ids

    def add(self, score: Score) -> None:
        """Add the score of one window."""
        self._logprobs.append(score.logprob)
        self.num_scored += score.num_tokens

    def result(self) -> Perplexity:
        """Return the totals so far."""
        return Perplexity(
            logprob=math.fsum(self._logprobs) if all(map(math.isfinite, self._logprobs)) else -math.inf,
            num_tokens=self.num_tokens,
            num_scored=self.num_scored,
            num_bytes=self.num_bytes,
            num_scored_bytes=self.num_bytes - self._unscored_bytes,
            num_words=self.num_words,
            window=self._settings.window,
            stride=self._settings.stride,
            bos_token_id=int(self._prefix[0]) if len(self._prefix) else None,
        )

    def _read(self, text: str) -> str:
        if text:
            continues = self._in_word and not text[0].isspace()
            self.num_words += len(text.split()) - continues
            self._in_word = not text[-1].isspace()
            self.num_bytes += len(text.encode("utf-8", "surrogatepass"))
        return text


def perplexity(
    llm: Scorer,
    text: str | Iterable[str],
    *,
    stride: int | None = None,
    window: int | None = None,
    bos: bool | None = None,
    advance: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Compute the perplexity of a text of any length, each token scored once; see `LLM.perplexity`.

    `advance` is called after each window with the numbers of bytes and tokens that it scored.
    """
    settings = WindowSettings.of(llm, window=window, stride=stride, bos=bos)
    tally = TextTally(llm, settings)
    pieces = tally.pieces(each_text(text, "text"))
    for _, score in score_windows(llm, pieces, settings):
        tally.add(score)
        if advance is not None:
            advance(score.num_bytes, score.num_tokens)
    return tally.result()


# -- tokenize in bounded memory ------------------------------------------------------------------------------

PIECE_CHARS = 1 << 16
OVERLAP_CHARS = 4096
GUARD_CHARS = 512  # characters at the end of a piece whose tokens may change with the text that follows
SHORTEST_RUN = 16  # tokens on which two pieces must agree


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text with its tokens."""

    text: str
    token_ids: IntArray  # (T,)
    starts: IntArray  # (T,): index of the character at which each token starts
    sizes: NDArray[
        np.int64
    ]  # (T,): bytes of text per token; if tokens share a span, the first token counts all of its bytes

    def cut(self, first: int | None, stop: int | None) -> Piece:
        """Return tokens [first, stop), with the piece's text from the start of token `first` on."""
        start = int(self.starts[first]) if first and first < len(self.starts) else 0
        own = slice(first, stop)
        return Piece(self.text[start:], self.token_ids[own], self.starts[own] - start, self.sizes[own])


def encode_pieces(
    texts: Iterable[str],
    edge: TextEdge,
    *,
    piece_chars: int = PIECE_CHARS,
    overlap_chars: int = OVERLAP_CHARS,
) -> Iterator[Piece]:
    """Tokenize the joined texts in bounded memory and yield the tokens in pieces.

    Together the pieces have the tokens that `TextEdge.encode` returns for the whole text. No special tokens
    are added.

    Raises:
        ParameterError: the text is not valid Unicode, or the tokenizer would drop part of it.
    """
    blocks = _blocks(texts, piece_chars)
    known = _encode(next(blocks, ""), edge)
    for block in blocks:
        overlap = overlap_chars
        while True:
            cut = _cut(known.text, overlap)
            later = _encode(known.text[cut:] + block, edge)
            seam = _seam(known, later, cut)
            if seam is not None or cut == 0:
                break
            overlap *= 4  # in the end both pieces are encoded as one
        mine, theirs = seam or (0, 0)
        yield known.cut(None, mine)
        known = later.cut(theirs, None)
    yield known


def _blocks(texts: Iterable[str], size: int) -> Iterator[str]:
    waiting: list[str] = []
    num_waiting = 0
    for text in texts:
        for start in range(0, len(text), size):
            part = text[start : start + size]
            waiting.append(part)
            num_waiting += len(part)
            if num_waiting >= size:
                yield "".join(waiting)
                waiting, num_waiting = [], 0
    if num_waiting:
        yield "".join(waiting)


def _encode(text: str, edge: TextEdge) -> Piece:
    ids, spans = edge.encode_with_spans(text)
    is_first_byte = (np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80
    char_of = np.append(np.cumsum(is_first_byte) - 1, len(text))
    return Piece(text, ids, char_of[spans[:, 0]], np.diff(spans[:, 1], prepend=0))


def _cut(text: str, overlap: int) -> int:
    """Return where the overlap starts; prefer a space, where most tokenizers start a token."""
    at = len(text) - overlap
    if at <= 0:
        return 0
    for start in range(at, at + overlap // 4):
        if text[start].isspace() and not text[start - 1].isspace():
            return start
    return at


def _seam(known: Piece, later: Piece, cut: int) -> tuple[int, int] | None:
    """Return the token from which both pieces agree, as (index in `known`, index in `later`), or None."""
    limit = len(known.text) - GUARD_CHARS
    end = int(np.searchsorted(known.starts, limit))
    at = {int(start): token for token, start in enumerate(later.starts) if cut + start < limit}
    first = int(np.searchsorted(known.starts, cut))
    for mine in range(first, end - SHORTEST_RUN):
        theirs = at.get(int(known.starts[mine]) - cut)
        if theirs is None:
            continue
        run = end - mine
        if np.array_equal(known.token_ids[mine:end], later.token_ids[theirs : theirs + run]):
            return mine, theirs
    return None
