"""Surprisals of the tokens of texts, summed over words, sentences, characters or regex matches.

Each token belongs to exactly one word and one sentence, so the words' log-probabilities add up to the text's.
Spaces before a word belong to that word, as they usually do in tokens. Two words that share a token are
merged into one unit.

In a vocabulary whose tokens mark where a word begins (" cat"), the tokens of a word do not say where it ends:
"mat" also begins "matron". `boundary="end"` includes the end of a word in the word's probability.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
import regex

from logprobe.analysis import measures
from logprobe.analysis.score import whole_rows
from logprobe.analysis.scorer import prefix_of
from logprobe.analysis.windows import WindowSettings
from logprobe.errors import ParameterError, require
from logprobe.records.values import EqualByValue
from logprobe.text.prompts import each_text
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
# A run of non-space characters with its punctuation; in scripts without spaces, a single character.
WORD = regex.compile(
    rf"{_OPEN}*+{_SCRIPT}\p{{M}}*+[^\P{{P}}\p{{Ps}}\p{{Pi}}]*+|(?:(?!{_SCRIPT})\S)+", regex.VERSION1
)
# Ends at terminal punctuation with any closing quotes, before a blank line, or at the end of the text.
SENTENCE = regex.compile(
    r"\S.*?(?:[.!?…]++[\p{Pe}\p{Pf}\"']*+(?=\s|\Z)|[。！？]++[\p{Pe}\p{Pf}]*+|(?=\s*\n\s*\n)|(?=\s*\Z))",
    regex.VERSION1 | regex.DOTALL,
)
_PATTERNS = {"word": WORD, "sentence": SENTENCE}
NATS: Final = {"nats": 1.0, "bits": float(np.log(2))}
# Whole-vocabulary rows held at once: about 400 KB per row (ids and logprobs) for a vocabulary of 49,152
# tokens.
ROWS_A_CALL = 64
ROW_COLUMNS: Final = ("surprisal", "entropy", "unit", "tokens", "start", "end", "note")
"""Columns of `ScoredText.rows` that follow the unit's text."""
NOT_SCORED = "its first token is not scored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One or more consecutive tokens (a token, word, sentence or span) with their log-probability."""

    text: str
    start: int  # characters [start, end) of the text
    end: int
    first_token: int  # tokens [first_token, end_token)
    end_token: int
    num_scored: int  # tokens with a log-probability; the first token of a text without BOS has none
    logprob: float | None  # nats, sum over the scored tokens; None if no token is scored
    entropy: float | None = None  # nats, of the distribution of the first token
    unit: NatsOrBits = "nats"  # unit of `surprisal`

    @property
    def surprisal(self) -> float | None:
        """Negative log-probability, in `unit`."""
        return None if self.logprob is None else -self.logprob / NATS[self.unit]

    @property
    def is_whole(self) -> bool:
        """True if the unit has tokens and all of them are scored."""
        return 0 < self.num_scored == self.end_token - self.first_token


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredText(EqualByValue):
    """A text with its scored tokens; indexing by characters, words, sentences or tokens gives a `Unit`.

    All positions refer to the text as given, even if the tokenizer rewrites it (NFC, lower case, spaces
    absorbed by an added token). Each token of a rewritten character covers the whole character.

    `scored[3:6, "word"]` sums words 3 to 5; `scored[10:20]` sums the tokens that overlap characters 10 to 19.
    """

    text: str
    token_ids: NDArray[np.int32]  # (T,)
    # (T, 2): bytes [start, end) of the UTF-8 text that each token comes from; both columns ascend. If the
    # tokenizer rewrote a stretch of text, all tokens of that stretch have the stretch as their span.
    byte_spans: Spans
    logprobs: NDArray[np.float64]  # (T,) nats; NaN for a token that is not scored
    ranks: NDArray[np.int64]  # (T,); 0 for a token that is not scored
    entropy: NDArray[np.float64]  # (T,) nats; NaN for a token that is not scored
    bos_token_id: int | None = None  # token put before the text, if any
    unit: NatsOrBits = "nats"  # unit of surprisals and tables
    # Set with `boundary="end"`. Without these two, a word's probability does not include the end of the word.
    begins_word: NDArray[np.bool_] | None = None  # (T,) True if the token begins a word
    # (T + 1,) nats: log of the total probability, at position t, of the tokens that begin a word.
    log_begin_mass: NDArray[np.float64] | None = None

    @property
    def logprob(self) -> float:
        """Sum of the log-probabilities of all scored tokens, in nats."""
        return float(np.nansum(self.logprobs))

    @property
    def tokens(self) -> list[Unit]:
        """Each token as a unit; a token with only some bytes of a character covers the whole character."""
        return [self._unit(token, token + 1) for token in range(len(self.token_ids))]

    @property
    def words(self) -> list[Unit]:
        """Words with their punctuation, split at whitespace; each Han or kana character is a word."""
        return self._tiled(_PATTERNS["word"].finditer(self.text))

    @property
    def sentences(self) -> list[Unit]:
        """Sentences with their closing punctuation; a blank line also ends a sentence."""
        return self._tiled(_PATTERNS["sentence"].finditer(self.text))

    def units(self, by: By) -> list[Unit]:
        """Return the tokens, words, sentences or characters of the text.

        Raises:
            ParameterError: `by` is not "token", "word", "sentence" or "char".
        """
        if by == "char":
            return self.spans((start, start + 1) for start in range(len(self.text)))
        known = {"token": "tokens", "word": "words", "sentence": "sentences"}
        require(by in known, "by", f"must be one of {', '.join([*known, 'char'])}, got {by!r}")
        units: list[Unit] = getattr(self, known[by])
        return units

    def rows(self, by: By = "word") -> list[dict[str, Any]]:
        """Return one row per unit, with the unit's text (stripped) and the columns `ROW_COLUMNS`.

        `surprisal` and `entropy` (of the first token's distribution) are in nats or bits, as the column
        `unit` says; for a unit with an unscored token both are None, and `note` says why. `tokens` is the
        number of tokens, and [start, end) are the unit's characters including spaces.

        Raises:
            ParameterError: `by` is not a known unit.
        """
        return [self._row(by, unit) for unit in self.units(by)]

    def to_pandas(self, by: By = "word") -> Any:
        """Return `rows` as a pandas data frame with NaN for missing numbers; requires the extra `frames`.

        Raises:
            MissingPackageError: pandas is not installed.
            ParameterError: `by` is not a known unit.
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
        """Return a unit for each span of characters, with every token that overlaps the span.

        Raises:
            ParameterError: a span is outside the text or ends before it starts.
        """
        return [self._cover(start, end) for start, end in spans]

    def matching(self, pattern: str | re.Pattern[str]) -> list[Unit]:
        """Return a unit (see `spans`) for each match of a regular expression in the text."""
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
            raise ParameterError("index", f"{which} selects no {by} of the text")
        is_tiled = by in _PATTERNS
        return self._unit(units[0].first_token, units[-1].end_token, is_tiled=is_tiled)

    @cached_property
    def _boundary_logprobs(self) -> NDArray[np.float64] | None:
        """Log-probability of a word boundary before token t, (T + 1,) nats; None without `boundary="end"`.

        The value is added to a word that ends before token t and subtracted from a word that starts at token
        t. It is 0 where token t is not marked as the beginning of a word, as between Han characters.
        """
        if self.begins_word is None or self.log_begin_mass is None:
            return None
        return np.where(np.append(self.begins_word, True), self.log_begin_mass, 0.0)

    @cached_property
    def _chars_before(self) -> NDArray[np.int64]:
        """Number of characters that start before byte b, (num_bytes + 1,)."""
        data = np.frombuffer(self.text.encode(), np.uint8)
        return np.concatenate([[0], np.cumsum((data & 0xC0) != 0x80)]).astype(np.int64)

    @cached_property
    def _byte_of_char(self) -> NDArray[np.int64]:
        """Byte offset of each character and of the end, (num_chars + 1,)."""
        data = np.frombuffer(self.text.encode(), np.uint8)
        return np.append(np.flatnonzero((data & 0xC0) != 0x80), len(data))

    def _cover(self, start: int, end: int) -> Unit:
        fits = 0 <= start <= end <= len(self.text)
        require(fits, "span", f"[{start}, {end}) is outside the text of {len(self.text)} characters")
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
            start -= 1  # the token starts inside a character
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
    """Divide the tokens into one unit per core, and return the units' first tokens, followed by T.

    A core is a word or sentence without the spaces around it. A token that is only spaces belongs to the next
    core; a token that overlaps two cores merges them into one unit.

    Args:
        byte_spans: (T, 2) bytes [start, end) of each token.
        cores: (n, 2) bytes [start, end) of each core.
    """
    starts, ends = byte_spans.T
    first = np.searchsorted(cores[:, 1], starts, side="right")
    last = np.searchsorted(cores[:, 0], ends, side="left") - 1
    # The core of each token: the first core that the token overlaps, or the next core if it is only spaces.
    core_of = np.minimum(first, len(cores) - 1)
    is_new = np.append(True, core_of[1:] > np.maximum.accumulate(np.maximum(last, core_of))[:-1])
    return [*np.flatnonzero(is_new).tolist(), len(byte_spans)]


def _as_slice(which: slice | int) -> slice:
    if isinstance(which, slice):
        require(which.step in {None, 1}, "index", "must be a slice without a step")
        return which
    return slice(which, which + 1 if which != -1 else None)


def surprisal(
    llm: Scorer,
    texts: str | Iterable[str],
    *,
    boundary: Boundary | None = None,
    unit: NatsOrBits = "nats",
    bos: bool | None = None,
    window: int | None = None,
    stride: int | None = None,
) -> list[ScoredText]:
    """Score every token of one or more texts, with ranks and entropies; see `LLM.surprisal`."""
    require(boundary in {None, "end"}, "boundary", f"must be 'end' or None, got {boundary!r}")
    require(unit in NATS, "unit", f"must be one of {', '.join(NATS)}, got {unit!r}")
    settings = WindowSettings.of(llm, window=window, stride=stride, bos=bos)
    is_joined = boundary is None or settings.stride < settings.window
    require(is_joined, "stride", "must be less than the window if boundary is 'end'")
    many = list(each_text(texts))
    prefix = prefix_of(llm.text, bos)
    encoded = [_encoded(llm.text, text, number) for number, text in enumerate(many)]
    ids = [np.concatenate([prefix, own]) for own, _ in encoded]
    read = _read_tokens if boundary is None else _read_tokens_and_masses
    return [
        _scored(text, own, spans, prefix, columns, unit)
        for text, (own, spans), columns in zip(many, encoded, read(llm, ids, settings), strict=True)
    ]


def _encoded(edge: TextEdge, text: str, number: int) -> tuple[IntArray, Spans]:
    try:
        return edge.encode_with_spans(text)
    except ParameterError as error:
        raise ParameterError("texts", f"text {number} {str(error).removeprefix('prompt: ')}") from error


def _windows(sequence: IntArray, settings: WindowSettings) -> list[Window]:
    return [part for part in windows([sequence], settings.window, settings.stride) if part.num_scored]


Columns: TypeAlias = "dict[str, NDArray[Any]]"
"""Per-token values of a sequence, by field name of `ScoredText`."""


def _read_tokens(llm: Scorer, ids: Sequence[IntArray], settings: WindowSettings) -> list[Columns]:
    cuts = [_windows(sequence, settings) for sequence in ids]
    scores = iter(llm.score([window.pair for cut in cuts for window in cut], entropy=True))
    return [
        _columns(len(sequence), [(window, next(scores)) for window in cut])
        for sequence, cut in zip(ids, cuts, strict=True)
    ]


def _columns(size: int, scores: Sequence[tuple[Window, Score]]) -> Columns:
    """Collect the windows' scores in arrays over the `size` tokens of the text."""
    logprobs, ranks, entropy = np.full(size, np.nan), np.zeros(size, np.int64), np.full(size, np.nan)
    for window, score in scores:
        place = _place(window)
        logprobs[place], ranks[place], entropy[place] = score.token_logprobs, score.ranks, score.entropy
    return {"logprobs": logprobs, "ranks": ranks, "entropy": entropy}


def _place(window: Window) -> slice:
    return slice(window.start + window.first_scored, window.start + len(window.token_ids))


def _read_tokens_and_masses(llm: Scorer, ids: Sequence[IntArray], settings: WindowSettings) -> list[Columns]:
    """Read the tokens as `_read_tokens` does, with the total probability of the tokens that begin a word.

    The total probability is computed before each token and after the last one. For the latter, a dummy token
    is appended to the sequence, and dropped from the result.
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
    """Split the scored part of a window into parts of at most `ROWS_A_CALL` scored tokens."""
    firsts = range(window.first_scored, len(window.token_ids), ROWS_A_CALL)
    return [Window(window.token_ids[: first + ROWS_A_CALL], window.start, first) for first in firsts]


def _scores_and_masses(
    llm: Scorer, pairs: Sequence[tuple[IntArray, IntArray]], begins: NDArray[np.bool_]
) -> Iterator[tuple[Score, NDArray[np.float64]]]:
    """Yield each pair's score and, per scored token, the log of the total probability of `begins` tokens."""
    sizes = np.cumsum([len(scored) for _, scored in pairs])
    first = 0
    while first < len(pairs):
        held = sizes[first - 1] if first else 0
        stop = max(int(np.searchsorted(sizes, held + ROWS_A_CALL, side="right")), first + 1)
        for score in llm.score(pairs[first:stop], entropy=True, logprobs=-1):
            assert score.record is not None, "a pair that fits into the context has a record"
            rows = whole_rows(score.record)
            is_in = np.zeros(rows.shape[1], np.bool_)  # the head may be wider than the vocabulary
            is_in[: len(begins)] = begins[: rows.shape[1]]
            yield replace(score, record=None), measures.log_mass(rows, is_in)
        first = stop


def begins_word(edge: TextEdge) -> NDArray[np.bool_]:
    """Return a mask, (V,) bool, of the tokens whose text starts with whitespace, and of EOS."""
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
