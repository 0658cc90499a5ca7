"""`Score`: the log-probability of one continuation and the metrics derived from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.analysis import measures
from logprobe.errors import require
from logprobe.records.forms.html import shaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from logprobe.errors import LogprobeError
    from logprobe.records import FlatLogprobs
    from logprobe.text.boundary import Boundary

COLUMNS = ("entropy", "varentropy", "margin")  # optional columns of a record


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Log-probabilities of a continuation given its context, in nats; -inf for an impossible token.

    If a token spans the end of the context, `boundary` is "bytes": `logprob` and everything derived from it
    refer to the continuation's bytes given the context's bytes. The per-token fields (`token_logprobs`,
    `ranks`, `is_greedy`, `entropy`, `record`) then describe the tokens of the joined text that contain bytes
    of the continuation. The first of these tokens may also contain bytes of the context, and the
    `token_logprobs` do not sum to `logprob`.
    """

    logprob: float  # nats; of the continuation's tokens, or of its bytes if `boundary` is "bytes"
    token_logprobs: list[float]  # (num_tokens,), nats
    token_ids: list[int]  # (num_tokens,)
    ranks: list[int]  # (num_tokens,), 1 + number of strictly more likely tokens
    is_greedy: bool  # True if every token was the most likely one, or tied with it
    num_tokens: int
    num_bytes: int  # UTF-8 bytes of the continuation
    num_chars: int  # Unicode code points of the continuation
    entropy: list[float] | None = None  # (num_tokens,), nats; None if not requested
    varentropy: list[float] | None = None  # (num_tokens,), nats squared; None if not requested
    # (num_tokens,), difference in nats between the two likeliest tokens; None if not requested
    margin: list[float] | None = None
    unconditional_logprob: float | None = None  # nats, without the context; None if not requested
    record: FlatLogprobs | None = field(default=None, repr=False, compare=False)  # includes alternatives
    boundary: Boundary = "token"  # "token": `logprob` is the tokens' sum; "bytes": it is the bytes' logprob
    error: LogprobeError | None = None  # set if scoring failed; `logprob` is NaN then

    @classmethod
    def failed(cls, error: LogprobeError) -> Score:
        """Return the score of a pair that could not be scored: no tokens, `logprob` NaN."""
        return cls(
            logprob=math.nan,
            token_logprobs=[],
            token_ids=[],
            ranks=[],
            is_greedy=False,
            num_tokens=0,
            num_bytes=0,
            num_chars=0,
            error=error,
        )

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        record: FlatLogprobs,
        data: bytes,
        *,
        unconditional_logprob: float | None = None,
    ) -> Score:
        """Build a score from the last `len(token_ids)` positions of `record`.

        `token_ids` and `data` are the continuation's token ids and UTF-8 bytes.
        """
        record = record[len(record) - len(token_ids) :]
        chosen = record.chosen_entries()
        ranks, extras = chosen.ranks.tolist(), record.extras
        return cls(
            logprob=measures.total(chosen.logprobs),
            token_logprobs=chosen.logprobs.tolist(),
            token_ids=list(token_ids),
            ranks=ranks,
            is_greedy=measures.is_greedy(ranks),
            num_tokens=len(token_ids),
            num_bytes=len(data),
            num_chars=len(data.decode("utf-8", "replace")),
            **{name: extras[name].tolist() for name in COLUMNS if name in extras},
            unconditional_logprob=unconditional_logprob,
            record=record,
        )

    def counted_by(self, data: bytes) -> Score:
        """Return a copy whose `num_bytes` and `num_chars` are counted in `data`, which is UTF-8 text."""
        return replace(self, num_bytes=len(data), num_chars=len(data.decode("utf-8", "replace")))

    def __repr__(self) -> str:
        greedy = ", greedy" if self.is_greedy else ""
        return f"<Score: {self.logprob:.4f} nats over {self.num_tokens} tokens{greedy}>"

    def _repr_html_(self) -> str | None:
        return None if self.record is None else shaded([self.record])

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per token, in nats; `logprob` if there are no tokens."""
        return self.logprob / max(self.num_tokens, 1)

    @property
    def logprob_per_byte(self) -> float:
        """Mean log-probability per UTF-8 byte, in nats; `logprob` if there are no bytes."""
        return self.logprob / max(self.num_bytes, 1)

    @property
    def logprob_per_char(self) -> float:
        """Mean log-probability per character, in nats; `logprob` if there are no characters."""
        return self.logprob / max(self.num_chars, 1)

    @property
    def perplexity(self) -> float | None:
        """The exponential of the mean surprisal per token; None without tokens."""
        return measures.perplexity(self.logprob, self.num_tokens)

    @property
    def bits_per_byte(self) -> float | None:
        """Mean surprisal per byte, in bits; None without bytes."""
        return measures.bits_per_byte(self.logprob, self.num_bytes)

    @property
    def pmi(self) -> float | None:
        """Pointwise mutual information with the context, in nats; None without `unconditional_logprob`."""
        if self.unconditional_logprob is None:
            return None
        return measures.pmi(self.logprob, self.unconditional_logprob)


def joined(scores: Sequence[Score], data: bytes, *, unconditional_logprob: float | None = None) -> Score:
    """Join the scores of a continuation's windows into one score, which has no record.

    `data` is the whole continuation as UTF-8 bytes.
    """
    parts = {name: [getattr(score, name) for score in scores] for name in COLUMNS}
    columns: dict[str, Any] = {
        name: list(chain.from_iterable(lists)) for name, lists in parts.items() if None not in lists
    }
    return Score(
        logprob=measures.total([score.logprob for score in scores]),
        token_logprobs=[value for score in scores for value in score.token_logprobs],
        token_ids=[token_id for score in scores for token_id in score.token_ids],
        ranks=[rank for score in scores for rank in score.ranks],
        is_greedy=all(score.is_greedy for score in scores),
        num_tokens=sum(score.num_tokens for score in scores),
        num_bytes=len(data),
        num_chars=len(data.decode("utf-8", "replace")),
        **columns,
        unconditional_logprob=unconditional_logprob,
        boundary=scores[0].boundary,
    )


def whole_rows(record: FlatLogprobs) -> NDArray[np.float32]:
    """Return a record's log-probabilities as a (T, V) float32 array in nats, with one column per token id.

    Raises:
        ParameterError: the record does not hold the whole vocabulary (score with `logprobs=-1`).
    """
    entries = record.top_entries()
    widths = np.diff(entries.offsets)
    is_whole = len(widths) > 0 and bool((widths == widths[0]).all())
    size = int(widths[0]) if is_whole else 0
    is_whole = is_whole and size > 0 and int(entries.token_ids.max()) == size - 1
    require(is_whole, "record", "does not hold the whole vocabulary; score with logprobs=-1")
    rows = np.empty((len(widths), size), np.float32)
    positions = np.repeat(np.arange(len(widths)), size)
    rows[positions, entries.token_ids] = entries.logprobs
    return rows
