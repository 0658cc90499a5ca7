"""Records as HTML for notebooks: token texts shaded by surprisal, with details in tooltips.

There is one shade per nat, from ColorBrewer's YlOrBr palette, whose shades can be told apart by lightness.
`_repr_html_` of records, outputs and scores uses this module.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logprobe.records.values import LogprobsOnePosition

MAX_TOKENS: Final = 4000  # tokens shown; longer output is unreadable
MAX_TOP: Final = 5  # alternatives in a tooltip
# Shade → (background, text color); the last shade also covers all higher surprisals.
SHADES: Final = (
    ("transparent", "inherit"),
    ("#fff7c9", "#1b1d21"),
    ("#fee9a3", "#1b1d21"),
    ("#fed676", "#1b1d21"),
    ("#febb47", "#1b1d21"),
    ("#f79a34", "#1b1d21"),
    ("#e5761d", "#1b1d21"),
    ("#b34b07", "#ffffff"),
    ("#7a2c05", "#ffffff"),
)
_TEXT_STYLE: Final = "white-space:pre-wrap;line-height:1.7;overflow-wrap:anywhere"
_NOTE_STYLE: Final = "font-size:85%;opacity:.75"


def shaded(records: Iterable[Iterable[LogprobsOnePosition | None]], *, num_marked: int = 0) -> str:
    """Return the chosen tokens of records as HTML; the last `num_marked` records are underlined.

    A position's first entry is its chosen token. Positions without entries, such as a prompt's first, are not
    shown.
    """
    parts = list(records)
    first_marked = len(parts) - num_marked
    spans: list[str] = []
    surprisals: list[float] = []
    for place, record in enumerate(parts):
        for position in filter(None, record):
            surprisals.append(-next(iter(position.values())).logprob)
            if len(surprisals) <= MAX_TOKENS:
                spans.append(_span(position, is_marked=place >= first_marked))
    hidden = len(surprisals) - len(spans)
    more = f" … and {hidden} more tokens" if hidden else ""
    return f'<div style="{_TEXT_STYLE}">{"".join(spans)}{more}</div>{_totals(surprisals)}'


def _span(position: LogprobsOnePosition, *, is_marked: bool) -> str:
    token_id, entry = next(iter(position.items()))
    text = entry.decoded_token or f"⟨{token_id}⟩"
    background, color = SHADES[shade_of(entry.logprob)]
    line = ";border-bottom:2px solid #0b5cad" if is_marked else ""
    told = [f"{text!r}, id {token_id}", _numbers(entry.logprob)]
    if entry.rank is not None:
        told[1] += f", rank {entry.rank}"
    ranked = sorted(position.values(), key=lambda each: -each.logprob)[:MAX_TOP]
    if len(position) > 1:
        told += [f"  {each.decoded_token!r} {_percent(each.logprob)}" for each in ranked]
    title = escape("\n".join(told), quote=True)
    return f'<span title="{title}" style="background:{background};color:{color}{line}">{escape(text)}</span>'


def shade_of(logprob: float) -> int:
    """Return the index in `SHADES` for a token: its surprisal in whole nats, capped at the last index.

    NaN also gets the last index.
    """
    return min(int(-min(logprob, 0.0)), len(SHADES) - 1) if logprob > -math.inf else len(SHADES) - 1


def _numbers(logprob: float) -> str:
    return f"logprob {logprob:.4f} nats ({_percent(logprob)})"


def _percent(logprob: float) -> str:
    return f"{100 * math.exp(logprob):.2f} %"


def _totals(surprisals: list[float]) -> str:
    if not surprisals:
        return f'<div style="{_NOTE_STYLE}">no tokens</div>'
    total = math.fsum(surprisals)
    mean = total / len(surprisals)
    perplexity = math.exp(mean) if mean < math.log(1e300) else math.inf
    means = f"mean surprisal {mean:.3f} nats, perplexity {perplexity:.3f}"
    told = f"{len(surprisals)} tokens, logprob {-total:.3f} nats, {means}"
    return f'<div style="{_NOTE_STYLE}">{told}; shade: surprisal, one step per nat</div>'
