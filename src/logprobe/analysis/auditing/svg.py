"""Plots as SVG text: axes, points and lines, in the colours of the page that they stand on.

After it: the page of an audit. Nothing is drawn by a script, so a page shows them without one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import starmap
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

WIDTH: Final = 480  # of a plot, in the plot's own units
WIDE: Final = 980  # of one that takes two places
HEIGHT: Final = 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 44  # around the field of a plot
NICE_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
MAX_LOG_TICKS: Final = 6


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range of numbers, or of names with a place each."""

    label: str
    low: float
    high: float
    is_log: bool = False
    names: Sequence[str] = ()  # of the places 0, 1, 2 …; () on an axis of numbers
    zero: str | None = None  # of a log axis: what stands at its low end, where zeros are drawn

    def share(self, value: float) -> float:
        """Where a number lies, 0 at the low end and 1 at the high one; what is outside lies at an end."""
        low, high, at = self.low, self.high, max(self.low, min(value, self.high))
        if self.is_log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return (at - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        """Numbers to mark, and their texts."""
        if self.names:
            return [(float(place), name) for place, name in enumerate(self.names)]
        return self._log_ticks() if self.is_log else self._even_ticks()

    def _even_ticks(self) -> list[tuple[float, str]]:
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = power * next(nice for nice in NICE_STEPS if nice * power >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(place * step, f"{place * step:g}") for place in range(first, last + 1)]

    def _log_ticks(self) -> list[tuple[float, str]]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        step = -(-(last - first + 1) // MAX_LOG_TICKS)
        ticks = [
            (10.0**power, f"1e{power}" if abs(power) > 2 else f"{10.0**power:g}")
            for power in range(last, first - 1, -step)
        ]
        if self.zero is None:
            return ticks
        is_free = ticks[-1][0] > self.low * 3
        return [*(ticks if is_free else ticks[:-1]), (self.low, self.zero)]


@dataclass(frozen=True, kw_only=True)
class Points:
    """Points of one colour, and what the pointer says of some of them."""

    name: str
    kind: str  # the class of CSS that colours it
    at: Sequence[tuple[float, float]]
    notes: Sequence[tuple[float, float, str]] = ()


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Two axes and a title; `limit` is a number of y across which a line goes."""

    title: str
    x: Axis
    y: Axis
    width: int = WIDTH
    limit: float | None = None
    has_diagonal: bool = False  # where x is y

    def figure(self, groups: Iterable[Points]) -> str:
        """The plot with its caption, a legend of the groups that have a name, and their points."""
        drawn = [group for group in groups if group.at]
        marks = [*self._grid(), *self._lines(), *map(self._dots, drawn)]
        keys = [
            f'<span class="key {group.kind}">{escape(group.name)}</span>' for group in drawn if group.name
        ]
        view = f'viewBox="0 0 {self.width} {HEIGHT}" role="img" aria-label="{escape(self.title, quote=True)}"'
        return (
            f'<figure class="{"wide" if self.width > WIDTH else "narrow"}"><figcaption>{escape(self.title)}'
            f"<span>{''.join(keys)}</span></figcaption><svg {view}>{''.join(marks)}</svg></figure>"
        )

    def _place(self, at_x: float, at_y: float) -> tuple[float, float]:
        across = LEFT + self.x.share(at_x) * (self.width - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - self.y.share(at_y) * (HEIGHT - TOP - BOTTOM)

    def _dots(self, group: Points) -> str:
        # A line of no length has round ends: a point in a few bytes.
        path = "".join(f"M{across:.1f} {down:.1f}h0" for across, down in starmap(self._place, group.at))
        circles = [_circle(self._place(at_x, at_y), note) for at_x, at_y, note in group.notes]
        return f'<g class="{group.kind}"><path class="dots" d="{path}"/>{"".join(circles)}</g>'

    def _lines(self) -> Iterator[str]:
        x, y = self.x, self.y
        if self.has_diagonal:
            low, high = max(x.low, y.low), min(x.high, y.high)
            yield _line(self._place(low, low), self._place(high, high), "fit")
        if self.limit is not None:
            yield _line(self._place(x.low, self.limit), self._place(x.high, self.limit), "limit")

    def _grid(self) -> Iterator[str]:
        for value, text in self.y.ticks():
            across, down = self._place(self.x.low, value)
            yield _line((across, down), (self.width - RIGHT, down), "grid")
            yield _text(across - 7, down + 4, text, "end")
        for value, text in self.x.ticks():
            across, down = self._place(value, self.y.low)
            if not self.x.names:
                yield _line((across, down), (across, TOP), "grid")
            yield _text(across, down + 16, text, "middle")
        yield _text(LEFT + (self.width - LEFT - RIGHT) / 2, HEIGHT - 8, self.x.label, "middle")
        turned = f"translate(13 {TOP + (HEIGHT - TOP - BOTTOM) / 2:.0f}) rotate(-90)"
        yield f'<text transform="{turned}" text-anchor="middle">{escape(self.y.label)}</text>'


def _circle(place: tuple[float, float], note: str) -> str:
    across, down = place
    return f'<circle cx="{across:.1f}" cy="{down:.1f}" r="5"><title>{escape(note)}</title></circle>'


def _line(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(across: float, down: float, text: str, anchor: str) -> str:
    return f'<text x="{across:.1f}" y="{down:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
