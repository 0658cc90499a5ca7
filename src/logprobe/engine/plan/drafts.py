"""`PromptLookup`: drafts a request's next tokens from repetitions in its own text.

The model verifies the drafts in the step that computes the next token (prompt lookup decoding, Saxena 2023).
The lookup makes a prediction even when it is not used as a draft, and each new token shows whether that
prediction was right; so acceptance rates are estimated at no extra cost.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

KEY_LEN: Final = 2
"""Number of tokens at the end of the text for which an earlier occurrence is searched."""
LONGEST: Final = 8
"""Matches of at least this many tokens share one estimate of the acceptance probability."""
MAX_DRAFTS: Final = 7
"""Maximum per sample and step. With the last token they make 8 rows; more would be padded to 16."""
PRIOR: Final = (0.0, 0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""Initial estimates of the acceptance probability, by match length in tokens."""
STEP: Final = 1 / 16
"""Weight of the latest token in the moving average of acceptance."""
FREE_ROWS: Final = 2
"""Reading the weights takes about as long as computing this many rows (docs/dev/decisions.md)."""


def least_chance(num_rows: int) -> float:
    """Return the minimum acceptance probability at which a draft saves time in a step of `num_rows` rows."""
    return num_rows / (num_rows + FREE_ROWS)


class PromptLookup:
    """Predicts the next tokens of a text from an earlier occurrence of its last tokens.

    Takes constant time per token.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = ids = list(token_ids)
        # n-gram → position after its latest occurrence; the final n-gram has none yet.
        keys = zip(*(islice(ids, start, None) for start in range(KEY_LEN)), strict=False)
        self._after = dict(zip(keys, range(KEY_LEN, len(ids)), strict=False))
        self._rates = list(PRIOR)
        self._source = 0  # position of the predicted token; 0: no prediction
        self._num_matched = 0  # length of the match before it
        self._find()

    def __len__(self) -> int:
        return len(self._ids)

    def observe(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text and update the estimated acceptance probabilities."""
        for token_id in token_ids:
            if self._source:
                self._compare(token_id)
            self._after[tuple(self._ids[-KEY_LEN:])] = len(self._ids)
            self._ids.append(token_id)
            if not self._source:
                self._find()

    def draft(self, most: int, least: float) -> list[int]:
        """Return up to `most` drafts, each with an estimated acceptance probability of at least `least`."""
        drafts: list[int] = []
        chance, position = 1.0, self._source
        while position and len(drafts) < min(most, MAX_DRAFTS):
            chance *= self._rates[min(self._num_matched + len(drafts), LONGEST)]
            if chance < least:
                break
            # A match that reaches the end of the text continues with its own drafts.
            is_known = position < len(self._ids)
            drafts.append(self._ids[position] if is_known else drafts[position - len(self._ids)])
            position += 1
        return drafts

    def _compare(self, token_id: int) -> None:
        """Compare a new token with the predicted one, and update the estimate for the match length."""
        is_right = self._ids[self._source] == token_id
        num_matched = min(self._num_matched, LONGEST)
        self._rates[num_matched] += STEP * (is_right - self._rates[num_matched])
        if is_right:
            self._source += 1
            self._num_matched += 1
        else:
            self._source = self._num_matched = 0

    def _find(self) -> None:
        """Find the latest earlier occurrence of the text's last tokens and measure how long the match is."""
        ids = self._ids
        source = self._after.get(tuple(ids[-KEY_LEN:]), 0)
        matched = KEY_LEN
        while matched < min(LONGEST, source) and ids[source - 1 - matched] == ids[-1 - matched]:
            matched += 1
        self._source, self._num_matched = source, matched
