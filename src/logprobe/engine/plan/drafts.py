"""`PromptLookup`: drafts of a request's next tokens, read off its own text.

The scheduler lets the model verify the drafts beside the next token. (The idea is prompt lookup decoding,
Saxena 2023.) Each new token shows whether the lookup would have been right, drafted or not, so that what a
draft is worth costs nothing to learn.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

KEY_LEN: Final = 2
"""Tokens at the end of a text that are looked up."""
LONGEST: Final = 8
"""Tokens of a repeat that are told apart by their number: one that is longer counts as this long."""
MAX_DRAFTS: Final = 7
"""Of one sample in one step: with its last token 8 rows, above which products are filled up to 16."""
PRIOR: Final = (0.0, 0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""How likely the next token is right after a repeat of so many tokens, before anything was seen."""
STEP: Final = 1 / 16
"""How far one token moves that estimate."""
FREE_ROWS: Final = 2
"""Rows that a step of one row could run besides in the same time again, at least (docs/decisions.md)."""


def least_chance(num_rows: int) -> float:
    """How likely a draft must be right to be worth its row in a step that draws so many tokens without it."""
    return num_rows / (num_rows + FREE_ROWS)


class PromptLookup:
    """Where the end of a text stood before; a token costs the same however long the text is."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = ids = list(token_ids)
        # Key → the position after it; of two places of one key the later counts. The end has none yet.
        keys = zip(*(islice(ids, start, None) for start in range(KEY_LEN)), strict=False)
        self._after = dict(zip(keys, range(KEY_LEN, len(ids)), strict=False))
        self._rates = list(PRIOR)
        self._source = 0  # position of the expected token; 0: none is
        self._num_matched = 0  # tokens before it that say what those at the end say
        self._find()

    def __len__(self) -> int:
        return len(self._ids)

    def observe(self, token_ids: Iterable[int]) -> None:
        """Add tokens to the text."""
        for token_id in token_ids:
            if self._source:
                self._compare(token_id)
            self._after[tuple(self._ids[-KEY_LEN:])] = len(self._ids)
            self._ids.append(token_id)
            if not self._source:
                self._find()

    def draft(self, most: int, least: float) -> list[int]:
        """Up to `most` tokens that may come next, each right with a chance of `least` or more."""
        drafts: list[int] = []
        chance, position = 1.0, self._source
        while position and len(drafts) < min(most, MAX_DRAFTS):
            chance *= self._rates[min(self._num_matched + len(drafts), LONGEST)]
            if chance < least:
                break
            # A repeat that is still going on repeats its own drafts.
            is_known = position < len(self._ids)
            drafts.append(self._ids[position] if is_known else drafts[position - len(self._ids)])
            position += 1
        return drafts

    def _compare(self, token_id: int) -> None:
        """Learn from the token that came in the expected one's place."""
        is_right = self._ids[self._source] == token_id
        num_matched = min(self._num_matched, LONGEST)
        self._rates[num_matched] += STEP * (is_right - self._rates[num_matched])
        if is_right:
            self._source += 1
            self._num_matched += 1
        else:
            self._source = self._num_matched = 0

    def _find(self) -> None:
        """Look the text's end up, and see how far back the two places agree."""
        ids = self._ids
        source = self._after.get(tuple(ids[-KEY_LEN:]), 0)
        matched = KEY_LEN
        while matched < min(LONGEST, source) and ids[source - 1 - matched] == ids[-1 - matched]:
            matched += 1
        self._source, self._num_matched = source, matched
