"""`PromptLookup`: drafts a request's next tokens from repetitions in its own text.

The scheduler has the model verify the drafts together with the next token (prompt lookup decoding, Saxena
2023). Every new token shows whether the lookup would have been right, drafted or not, so acceptance rates are
estimated at no extra cost.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

KEY_LEN: Final = 2
"""Length of the n-gram at the end of the text that is looked up, tokens."""
LONGEST: Final = 8
"""Match lengths, tokens, above this share one estimate."""
MAX_DRAFTS: Final = 7
"""Per sample and step. With the last token that makes 8 rows; more rows would be padded to 16."""
PRIOR: Final = (0.0, 0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""Initial estimate of the acceptance probability, by match length."""
STEP: Final = 1 / 16
"""Step size of the moving average of acceptance."""
FREE_ROWS: Final = 2
"""Minimum number of extra rows that double the time of a step with one row (docs/dev/decisions.md)."""


def least_chance(num_rows: int) -> float:
    """Return the minimum acceptance probability for which a draft pays in a step with `num_rows` rows."""
    return num_rows / (num_rows + FREE_ROWS)


class PromptLookup:
    """Finds earlier occurrences of the end of a text, in constant time per token."""

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
        """Append tokens to the text and update the estimates."""
        for token_id in token_ids:
            if self._source:
                self._compare(token_id)
            self._after[tuple(self._ids[-KEY_LEN:])] = len(self._ids)
            self._ids.append(token_id)
            if not self._source:
                self._find()

    def draft(self, most: int, least: float) -> list[int]:
        """Draft up to `most` tokens, each with an estimated probability of at least `least`."""
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
        """Update the acceptance estimate: compare the generated token with the predicted one."""
        is_right = self._ids[self._source] == token_id
        num_matched = min(self._num_matched, LONGEST)
        self._rates[num_matched] += STEP * (is_right - self._rates[num_matched])
        if is_right:
            self._source += 1
            self._num_matched += 1
        else:
            self._source = self._num_matched = 0

    def _find(self) -> None:
        """Look up the end of the text and measure the length of the match."""
        ids = self._ids
        source = self._after.get(tuple(ids[-KEY_LEN:]), 0)
        matched = KEY_LEN
        while matched < min(LONGEST, source) and ids[source - 1 - matched] == ids[-1 - matched]:
            matched += 1
        self._source, self._num_matched = source, matched
