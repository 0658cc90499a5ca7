"""Texts → surprisals of their tokens, summed over words, sentences, characters or what a pattern finds.

The units tile the tokens: each token counts in exactly one word, so that the sums over words and over tokens
are the same. Spaces before a word are the word's, as in the tokens; a token that reaches into two words makes
them one unit.

Where the vocabulary marks the beginning of a word (" cat"), the tokens of a word do not say that it ends with
them: "mat" is the beginning of "matron", too. `boundary="end"` counts the end to the word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, overload

import numpy as np
import regex

from logprobe.analysis import measures
from logprobe.analysis.score import whole_rows
from logprobe.analysis.scorer import prefix_of
from logprobe.analysis.windows import WindowSettings
from logprobe.errors import ParameterError, require
from logprobe.text.windows import Window, windows

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from logprobe.analysis.score import Score
    from logprobe.analysis.scorer import Scorer
    from logprobe.records.values import IntArray
    from logprobe.text.edge import TextEdge
    from logprobe.text.spans import Spans

By: TypeAlias = Literal["token", "word", "sentence", "char"]
Boundary: TypeAlias = Literal["end"]
NatsOrBits: TypeAlias = Literal["nats", "bits"]
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
NATS: Final = {"nats": 1.0, "bits": float(np.log(2))}
ROWS_A_CALL = 64  # whole rows that are held at once: some 400 KB each at a vocabulary of 49,152
ROW_COLUMNS: Final = ("surprisal", "entropy", "unit", "tokens", "start", "end", "note")
"""Of `ScoredText.rows`, after the unit's text."""
NOT_SCORED = "nothing predicts its first token"


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
    entropy: float | None = None  # nats, of the distribution of its first token
    unit: NatsOrBits = "nats"  # of `surprisal`

    @property
    def surprisal(self) -> float | None:
        """Minus the logprob, in the unit."""
        return None if self.logprob is None else -self.logprob / NATS[self.unit]

    @property
    def is_whole(self) -> bool:
        """Whether all of its tokens are scored, and there are any."""
        return 0 < self.num_scored == self.end_token - self.first_token


@dataclass(frozen=True, kw_only=True)
class ScoredText:
    """A text whose tokens have been scored; a slice by characters, words, sentences or tokens is a `Unit`.

    All places are of the text that was given, also where the tokenizer rewrites it (NFC, lower case, spaces
    that an added token swallows). Tokens of a character that was rewritten cover the whole of it.

    `scored[3:6, "word"]` sums words 3 to 5; `scored[10:20]` the tokens that reach into these characters.
    """

    text: str
    token_ids: NDArray[np.int32]  # (T,)
    # (T, 2): bytes [start, end) of the text's UTF-8 that each token comes from; both columns ascend. Tokens
    # of a piece of text that the tokenizer rewrote share one span.
    byte_spans: Spans
    logprobs: NDArray[np.float64]  # (T,) nats; NaN where nothing predicts the token
    ranks: NDArray[np.int64]  # (T,); 0 where nothing predicts the token
    entropy: NDArray[np.float64]  # (T,) nats; NaN where nothing predicts the token
    bos_token_id: int | None = None  # what stood before the text; None: nothing
    unit: NatsOrBits = "nats"  # of surprisals, and of tables
    # Of `boundary="end"`; None: words are their tokens alone.
    begins_word: NDArray[np.bool_] | None = None  # (T,) tokens marked as a beginning
    log_begin_mass: NDArray[np.float64] | None = None  # (T + 1,) nats: of all such tokens before token t

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

    def rows(self, by: By = "word") -> list[dict[str, Any]]:
        """A row a unit: its text without the spaces around it, `surprisal`, `entropy`, `tokens`, its place.

        Both numbers are in `unit`. The entropy is that of the distribution of the unit's first token;
        `tokens` is how many it has, [start, end) its characters with the spaces. A unit whose first token
        nothing predicts has None for numbers, and a `note` that says so.

        Raises:
            ParameterError: another unit.
        """
        return [self._row(by, unit) for unit in self.units(by)]

    def to_pandas(self, by: By = "word") -> Any:
        """`rows` as a pandas data frame (extra `frames`), NaN where there is no number.

        Raises:
            ParameterError: another unit, or pandas is not installed.
        """
        from logprobe.records.forms.frames import frame_of

        frame = frame_of(self.rows(by), (by, *ROW_COLUMNS), floats=("surprisal", "entropy"))
        frame.attrs["unit"] = self.unit
        return frame

    def _row(self, by: By, unit: Unit) -> dict[str, Any]:
        has_number = unit.is_whole
        return {
            by: unit.text.strip() or unit.text,
            "surprisal": unit.surprisal if has_number else None,
            "entropy": None if unit.entropy is None or not has_number else unit.entropy / NATS[self.unit],
            "unit": self.unit,
            "tokens": unit.end_token - unit.first_token,
            "start": unit.start,
            "end": unit.end,
            "note": "" if has_number else NOT_SCORED,
        }

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
        is_tiled = by in _PATTERNS
        return self._unit(units[0].first_token, units[-1].end_token, is_tiled=is_tiled)

    @cached_property
    def _boundary_logprobs(self) -> NDArray[np.float64] | None:
        """What is counted to a word that ends before token t, and taken from one that begins there, (T + 1,).

        Nats; 0 where the vocabulary does not mark token t, such as between Han characters.
        """
        if self.begins_word is None or self.log_begin_mass is None:
            return None
        return np.where(np.append(self.begins_word, True), self.log_begin_mass, 0.0)

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
        starts, ends = self.byte_spans.T
        first = int(np.searchsorted(ends, first_byte, side="right"))
        stop = int(np.searchsorted(starts, end_byte, side="left"))
        return self._unit(first, max(stop, first) if start < end else first)

    def _tiled(self, matches: Iterable[re.Match[str]]) -> list[Unit]:
        cores = np.array([match.span() for match in matches], np.int64).reshape(-1, 2)
        if not len(cores):
            return [self._unit(0, len(self.token_ids), is_tiled=True)] if len(self.token_ids) else []
        bounds = _tile(self.byte_spans, self._byte_of_char[cores])
        return [self._unit(first, end, is_tiled=True) for first, end in pairwise(bounds)]

    def _unit(self, first: int, end: int, *, is_tiled: bool = False) -> Unit:
        num_bytes = self._byte_of_char[-1]
        start_byte = self.byte_spans[first, 0] if first < len(self.byte_spans) else num_bytes
        end_byte = self.byte_spans[end - 1, 1] if first < end else start_byte
        start = int(self._chars_before[start_byte])
        if start_byte < num_bytes and self._byte_of_char[start] != start_byte:
            start -= 1  # within a character
        stop = max(int(self._chars_before[end_byte]), start)
        scored = self.logprobs[first:end][~np.isnan(self.logprobs[first:end])]
        logprob = float(scored.sum()) if len(scored) else None
        bounds = self._boundary_logprobs if is_tiled else None
        if bounds is not None and logprob is not None and len(scored) == end - first:
            logprob += float(bounds[end] - bounds[first])
        entropy = float(self.entropy[first]) if first < end else np.nan
        return Unit(
            text=self.text[start:stop],
            start=start,
            end=stop,
            first_token=first,
            end_token=end,
            num_scored=len(scored),
            logprob=logprob,
            entropy=None if np.isnan(entropy) else entropy,
            unit=self.unit,
        )


def _tile(byte_spans: Spans, cores: NDArray[np.int64]) -> list[int]:
    """Where the units that hold these cores (n, 2) begin in the tokens, and their end: (n' + 1,), n' ≤ n.

    A token of spaces alone goes to the core after it, one that reaches into two cores joins them.
    """
    starts, ends = byte_spans.T
    first = np.searchsorted(cores[:, 1], starts, side="right")
    last = np.searchsorted(cores[:, 0], ends, side="left") - 1
    # The core that a token is of: the first that it touches, or for one of spaces alone the next.
    core_of = np.minimum(first, len(cores) - 1)
    is_new = np.append(True, core_of[1:] > np.maximum.accumulate(np.maximum(last, core_of))[:-1])
    return [*np.flatnonzero(is_new).tolist(), len(byte_spans)]


def _as_slice(which: slice | int) -> slice:
    if isinstance(which, slice):
        require(which.step in {None, 1}, "index", "a slice of a text takes no step")
        return which
    return slice(which, which + 1 if which != -1 else None)


@overload
def surprisal(  # type: ignore[overload-overlap]  # one text comes first, though a str is a sequence of them
    llm: Scorer,
    texts: str,
    *,
    boundary: Boundary | None = ...,
    unit: NatsOrBits = ...,
    bos: bool | None = ...,
    window: int | None = ...,
    stride: int | None = ...,
) -> ScoredText: ...
@overload
def surprisal(
    llm: Scorer,
    texts: Sequence[str],
    *,
    boundary: Boundary | None = ...,
    unit: NatsOrBits = ...,
    bos: bool | None = ...,
    window: int | None = ...,
    stride: int | None = ...,
) -> list[ScoredText]: ...
def surprisal(
    llm: Scorer,
    texts: str | Sequence[str],
    *,
    boundary: Boundary | None = None,
    unit: NatsOrBits = "nats",
    bos: bool | None = None,
    window: int | None = None,
    stride: int | None = None,
) -> ScoredText | list[ScoredText]:
    """Score every token of a text, or of many texts at once, with ranks and entropies.

    With `boundary="end"` a word or sentence is as likely as its tokens and its end together, given that a
    word begins: P(tokens) · P(the next token begins a word, or ends the text) / P(the first token begins a
    word), so that the probabilities of all words sum to 1 (Pimentel & Meister 2024,
    https://arxiv.org/abs/2406.14561; Oh & Schuler 2024, https://arxiv.org/abs/2406.10851). A token begins a
    word if its text begins with white space, or the text ends with it (EOS). Where the vocabulary does not
    mark the first token, as at the beginning of a text for most, nothing is divided, as in minicons'
    `bow_correction`. The masses are sums over whole rows, of which 64 are held at a time; tokens and spans
    keep their own numbers.

    Args:
        llm: the model, such as `llm.with_lora(name)`.
        texts: one or many, of any length: what the context cannot hold is scored in sliding windows.
        boundary: "end" counts the end of a word to the word; None: its tokens alone.
        unit: of surprisals and of tables, "nats" or "bits"; logprobs stay in nats.
        bos: put BOS (EOS where the model has none) before each text, so that its first token is scored too,
            or do not; None: as its tokenizer does.
        window: tokens a window; the default is the model's context.
        stride: tokens from one window to the next; the default is half a window, and a whole one makes them
            disjoint, the first token of each without a number.

    Raises:
        ParameterError: a text that cannot be encoded, a window or stride that cannot be used.
        BatchError: some texts failed.
    """
    require(boundary in {None, "end"}, "boundary", f"must be 'end' or None, got {boundary!r}")
    require(unit in NATS, "unit", f"must be one of {', '.join(NATS)}, got {unit!r}")
    settings = WindowSettings.of(llm, window=window, stride=stride, bos=bos)
    is_joined = boundary is None or settings.stride < settings.window
    require(is_joined, "stride", "must be less than a window with a boundary, whose mass each window needs")
    many = [texts] if isinstance(texts, str) else texts
    prefix = prefix_of(llm.text, bos)
    encoded = [_encoded(llm.text, text, number) for number, text in enumerate(many)]
    ids = [np.concatenate([prefix, own]) for own, _ in encoded]
    read = _read_tokens if boundary is None else _read_tokens_and_masses
    scored = [
        _scored(text, own, spans, prefix, columns, unit)
        for text, (own, spans), columns in zip(many, encoded, read(llm, ids, settings), strict=True)
    ]
    return scored[0] if isinstance(texts, str) else scored


def _encoded(edge: TextEdge, text: str, number: int) -> tuple[IntArray, Spans]:
    try:
        return edge.encode_with_spans(text)
    except ParameterError as error:
        raise ParameterError("texts", f"number {number} {str(error).removeprefix('prompt: ')}") from error


def _windows(sequence: IntArray, settings: WindowSettings) -> list[Window]:
    return [part for part in windows([sequence], settings.window, settings.stride) if part.num_scored]


Columns: TypeAlias = "dict[str, NDArray[Any]]"
"""Numbers of the tokens of a sequence, by their fields of `ScoredText`."""


def _read_tokens(llm: Scorer, ids: Sequence[IntArray], settings: WindowSettings) -> list[Columns]:
    cuts = [_windows(sequence, settings) for sequence in ids]
    scores = iter(llm.score([window.pair for cut in cuts for window in cut], entropy=True))
    return [
        _columns(len(sequence), [(window, next(scores)) for window in cut])
        for sequence, cut in zip(ids, cuts, strict=True)
    ]


def _columns(size: int, scores: Sequence[tuple[Window, Score]]) -> Columns:
    """What some windows were given, each in its place among `size` tokens."""
    logprobs, ranks, entropy = np.full(size, np.nan), np.zeros(size, np.int64), np.full(size, np.nan)
    for window, score in scores:
        place = _place(window)
        logprobs[place], ranks[place], entropy[place] = score.token_logprobs, score.ranks, score.entropy
    return {"logprobs": logprobs, "ranks": ranks, "entropy": entropy}


def _place(window: Window) -> slice:
    return slice(window.start + window.first_scored, window.start + len(window.token_ids))


def _read_tokens_and_masses(llm: Scorer, ids: Sequence[IntArray], settings: WindowSettings) -> list[Columns]:
    """The same, and the mass of the tokens that begin a word before each token and after the last.

    A token that stands after the last, for its row alone, is left out again.
    """
    begins = begins_word(llm.text)
    cuts = [
        [part for window in _windows(np.append(sequence, sequence[-1:]), settings) for part in _few(window)]
        for sequence in ids
    ]
    rows = iter(_scores_and_masses(llm, [window.pair for cut in cuts for window in cut], begins))
    found = []
    for sequence, cut in zip(ids, cuts, strict=True):
        read = [(window, *next(rows)) for window in cut]
        columns = _columns(len(sequence) + 1, [(window, score) for window, score, _ in read])
        masses = np.full(len(sequence) + 1, np.nan)
        for window, _, mass in read:
            masses[_place(window)] = mass
        own = {name: values[:-1] for name, values in columns.items()}
        found.append(own | {"begins_word": begins[sequence], "log_begin_mass": masses})
    return found


def _few(window: Window) -> list[Window]:
    """What is scored of a window, `ROWS_A_CALL` tokens at a time."""
    firsts = range(window.first_scored, len(window.token_ids), ROWS_A_CALL)
    return [Window(window.token_ids[: first + ROWS_A_CALL], window.start, first) for first in firsts]


def _scores_and_masses(
    llm: Scorer, pairs: Sequence[tuple[IntArray, IntArray]], begins: NDArray[np.bool_]
) -> Iterator[tuple[Score, NDArray[np.float64]]]:
    """What each pair is given, and the log mass of the tokens that begin a word in each of its rows."""
    sizes = np.cumsum([len(scored) for _, scored in pairs])
    first = 0
    while first < len(pairs):
        held = sizes[first - 1] if first else 0
        stop = max(int(np.searchsorted(sizes, held + ROWS_A_CALL, side="right")), first + 1)
        for score in llm.score(pairs[first:stop], entropy=True, logprobs=-1):
            assert score.record is not None, "a pair that fits has one"
            rows = whole_rows(score.record)
            is_in = np.zeros(rows.shape[1], np.bool_)  # a head may be padded
            is_in[: len(begins)] = begins[: rows.shape[1]]
            yield replace(score, record=None), measures.log_mass(rows, is_in)
        first = stop


def begins_word(edge: TextEdge) -> NDArray[np.bool_]:
    """Which tokens begin a word, (V,): those whose text begins with white space, and EOS."""
    vocabulary = edge.vocabulary
    begins = [
        vocabulary.token_bytes(token_id).decode("utf-8", "replace")[:1].isspace()
        for token_id in range(len(vocabulary))
    ]
    if edge.eos_token_id is not None:
        begins[edge.eos_token_id] = True
    return np.array(begins, np.bool_)


def _scored(
    text: str, ids: IntArray, spans: Spans, prefix: IntArray, columns: Columns, unit: NatsOrBits
) -> ScoredText:
    own = {name: values[len(prefix) :] for name, values in columns.items()}
    bos = int(prefix[0]) if len(prefix) else None
    return ScoredText(text=text, token_ids=ids, byte_spans=spans, bos_token_id=bos, unit=unit, **own)
