"""The headlines as a picture: a bar a task on a scale of ratios.

Plain SVG: the same figures give the same file everywhere, and a reader's browser chooses light or dark.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape

from harness import number
from headlines import Row

WIDTH, LEFT, RIGHT = 780, 372, 690  # the scale stands between the texts and the ratios
TOP, STEP, MARGIN = 66, 46, 16
LINE, CAP = 16, 7

STYLE = """
text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 }
.small { font-size: 11px; fill: #59636e }
.ratio { font-weight: 600 }
.paper { fill: #ffffff }
.grid { stroke: #d1d9e0 }
.even { stroke: #59636e; stroke-width: 1.5 }
.better { fill: #0969da; stroke: #0969da }
.worse { fill: #bc4c00; stroke: #bc4c00 }
.bar { stroke-width: 9 }
.spread { stroke-width: 2 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc }
.small { fill: #9198a1 }
.paper { fill: #0d1117 }
.grid { stroke: #3d444d }
.even { stroke: #9198a1 }
.better { fill: #4493f8; stroke: #4493f8 }
.worse { fill: #f0883e; stroke: #f0883e }
}
"""


class Scale:
    """Powers of two that hold all rounds of all rows, as places from left to right."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.first = min([-1, *(math.floor(math.log2(row.ratio["minimum"])) for row in rows)])
        self.last = max([1, *(math.ceil(math.log2(row.ratio["maximum"])) for row in rows)])

    def x(self, ratio: float) -> float:
        """Where a ratio stands."""
        share = (math.log2(ratio) - self.first) / (self.last - self.first)
        return LEFT + share * (RIGHT - LEFT)

    def ticks(self) -> list[float]:
        """The powers of two."""
        return [2.0**power for power in range(self.first, self.last + 1)]


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _grid(scale: Scale, bottom: float) -> Iterator[str]:
    for tick in scale.ticks():
        yield _line(scale.x(tick), TOP, scale.x(tick), bottom, "even" if tick == 1 else "grid")
        yield _text(scale.x(tick), TOP - 6, f"{tick:g} x", "small", "middle")


def _row(row: Row, scale: Scale, y: float) -> Iterator[str]:
    kind = "better" if row.ratio["median"] >= 1 else "worse"
    median, low, high = (scale.x(row.ratio[key]) for key in ("median", "minimum", "maximum"))
    yield _text(MARGIN, y - 2, row.task)
    sides = f"{number(row.ours)} {row.unit}; {row.rival}: {number(row.theirs)}"
    yield _text(MARGIN, y + 13, sides, "small")
    yield _line(scale.x(1), y, median, y, f"bar {kind}")
    yield _line(low, y, high, y, f"spread {kind}")
    yield from (_line(end, y - CAP, end, y + CAP, f"spread {kind}") for end in (low, high))
    yield f'<circle cx="{median:.1f}" cy="{y:.1f}" r="6" class="{kind}"/>'
    yield _text(WIDTH - MARGIN, y + 5, f"{row.ratio['median']:.2f} x", "ratio", "end")


def chart(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The rows as a whole SVG file, with notes at its foot."""
    scale, bottom = Scale(rows), TOP + STEP * len(rows)
    height = bottom + LINE * (len(notes) + 1)
    heading = "logprobe: how many times as good as the best other library"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{heading}</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" class="paper"/>',
        _text(MARGIN, 28, heading, "title"),
        *_grid(scale, bottom),
        *(line for index, row in enumerate(rows) for line in _row(row, scale, TOP + STEP * (index + 0.5))),
        *(_text(MARGIN, bottom + LINE * (index + 1), note, "small") for index, note in enumerate(notes)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
