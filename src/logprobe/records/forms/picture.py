"""Plots of records: shaded tokens, surprisal and entropy by position, and calibration.

Needs matplotlib (extra `plot`).
"""

from __future__ import annotations

import functools
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.errors import MissingPackageError, ParameterError
from logprobe.records.forms.html import SHADES, shade_of
from logprobe.records.store.entries import texts_of

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe.records.store.columns import Array
    from logprobe.records.store.entries import Entries
    from logprobe.records.store.rows import Rows
    from logprobe.records.values import TokenTable

TOKENS_A_LINE: Final = 12
MAX_LINES: Final = 16  # lines of shaded tokens; a note tells how many tokens are left out
NUM_BINS: Final = 10
MAX_COLUMNS: Final = 40  # tokens of a logit lens that are shown
DARK_SHARE: Final = 0.6  # probability from which the shade is so dark that its text is white
FONT: Final = "DejaVu Sans"
IMPOSSIBLE_NATS: Final = 30.0  # the plot shows larger surprisals, including infinite ones, as this


@dataclass(frozen=True)
class Picture:
    """A figure that notebooks display; `figure` is the matplotlib object."""

    figure: Any

    def save(self, path: str | Path) -> None:
        """Save the figure; the file extension sets the format (png, svg, pdf)."""
        self.figure.savefig(path)

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.figure.savefig(data, format="png", dpi=100)
        return data.getvalue()


def draw_record(rows: Rows, table: TokenTable | None) -> Picture:
    """Plot shaded tokens, surprisal by position and, if all positions have alternatives, calibration.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ParameterError: no position has a token.
    """
    chosen = rows.chosen_entries(0, rows.num_rows)
    if not len(chosen.token_ids):
        raise ParameterError("record", "has no tokens to plot; request logprobs=0 or more")
    positions = np.flatnonzero(np.diff(chosen.offsets) > 0)
    sure = _confidence(rows, positions, chosen.token_ids)
    num_lines = min(-(-len(positions) // TOKENS_A_LINE), MAX_LINES)
    heights = [0.4 * num_lines + 0.4, 2.6]
    figure = new_figure(figsize=(10, sum(heights)), layout="constrained")
    strip, below = figure.subfigures(2, 1, height_ratios=heights)
    labels = _labels(rows, positions[: TOKENS_A_LINE * MAX_LINES], table)
    _draw_strip(strip.subplots(), labels, chosen.logprobs)
    axes = np.atleast_1d(
        below.subplots(1, 1 if sure is None else 2, width_ratios=None if sure is None else (2, 1))
    )
    _draw_lines(axes[0], positions, chosen.logprobs, rows.extras(0, rows.num_rows).get("entropy"))
    if sure is not None:
        _draw_calibration(axes[1], *sure)
    return Picture(figure)


def _draw_strip(axes: Any, labels: list[str], logprobs: Array) -> None:
    """Draw the labels in lines of `TOKENS_A_LINE` tokens, shaded by surprisal."""
    for place, label in enumerate(labels):
        line, column = divmod(place, TOKENS_A_LINE)
        background, color = SHADES[shade_of(float(logprobs[place]))]
        is_plain = background == "transparent"
        axes.fill_between(
            [column, column + 0.96], line, line + 0.9, color="#f4f4f4" if is_plain else background
        )
        axes.text(
            column + 0.48,
            line + 0.45,
            label,
            ha="center",
            va="center",
            fontsize=8,
            family=FONT,
            color="black" if color == "inherit" else color,
            parse_math=False,
        )
    left_out = len(logprobs) - len(labels)
    note = f", first {len(labels)} tokens, {left_out} more not shown" if left_out else ""
    axes.set(xlim=(0, TOKENS_A_LINE), ylim=(-(-len(labels) // TOKENS_A_LINE), 0))
    axes.set_title(f"surprisal, one shade per nat{note}", fontsize=9, loc="left")
    axes.axis("off")


def _labels(rows: Rows, positions: Array, table: TokenTable | None) -> list[str]:
    """Return the label of the chosen token of each position."""
    lists = [row for position in positions.tolist() if (row := rows.row(position)) is not None]
    return [_label(row.token_ids[0], *texts_of(row.token_ids[:1], row.texts, table)) for row in lists]


def _label(token_id: int, text: str | None) -> str:
    text = f"<{token_id}>" if text is None else text
    text = text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "→")
    return "".join(_drawable(text if len(text) <= 12 else f"{text[:11]}…"))


def _drawable(text: str) -> list[str]:
    """Return the characters of a text, with characters that the font lacks shown as `U+` code points."""
    glyphs = _glyphs()
    return [mark if ord(mark) in glyphs else f"U+{ord(mark):X}" for mark in text]


@functools.cache
def _glyphs() -> frozenset[int]:
    """Return the code points of matplotlib's bundled font."""
    from matplotlib import font_manager
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(font_manager.findfont(FONT)).get_charmap())


def _draw_lines(axes: Any, positions: Array, logprobs: Array, entropy: Array | None) -> None:
    surprisals = np.minimum(-logprobs.astype(float), IMPOSSIBLE_NATS)
    axes.plot(positions, surprisals, ".-", linewidth=0.8, label="surprisal")
    if entropy is not None:
        axes.plot(positions, entropy[positions], linewidth=1.2, label="entropy")
        axes.legend(fontsize=8)
    axes.set(xlabel="position", ylabel="nats", ylim=(0, None))


def _confidence(rows: Rows, positions: Array, token_ids: Array) -> tuple[Array, Array] | None:
    """Return the most likely token's probability at each position, and whether that token was chosen.

    Return None if a position does not list its most likely token.
    """
    top = rows.top_entries(0, rows.num_rows)
    widths = np.diff(top.offsets)[positions]
    if not widths.all():
        return None
    first = top.offsets[:-1][positions]
    return np.exp(top.logprobs[first].astype(float)), top.token_ids[first] == token_ids


def _draw_calibration(axes: Any, confidence: Array, is_hit: Array) -> None:
    """Plot how often the most likely token was chosen, against its probability."""
    bins = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    counts = np.bincount(bins, minlength=NUM_BINS)
    used = counts > 0
    sure = np.bincount(bins, confidence, NUM_BINS)[used] / counts[used]
    hits = np.bincount(bins, is_hit.astype(float), NUM_BINS)[used] / counts[used]
    _draw_bins(axes, counts[used], sure, hits)
    axes.set(xlabel="probability of the best token", ylabel="frequency chosen")


def drawn_bins(counts: Array, confidence: Array, accuracy: Array) -> Picture:
    """Plot accuracy against confidence, arrays of shape (num_bins,); empty bins are left out.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    figure, used = new_figure(figsize=(4, 4), layout="constrained"), counts > 0
    axes = figure.subplots()
    _draw_bins(axes, counts[used], confidence[used], accuracy[used])
    axes.set(xlabel="confidence", ylabel="accuracy")
    return Picture(figure)


def draw_lens(
    layers: list[int], token_ids: list[int], tops: list[Entries], table: TokenTable | None
) -> Picture:
    """Plot the most likely token of each layer (up) after each token (right), shaded by its probability.

    Args:
        layers: L layer numbers.
        token_ids: T tokens of the text, of which the first `MAX_COLUMNS` are shown.
        tops: for each layer, the most likely tokens at T positions.
        table: texts of tokens.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ParameterError: a position has no most likely token.
    """
    num_columns = min(len(token_ids), MAX_COLUMNS)
    if any((np.diff(top.offsets) == 0).any() for top in tops):
        raise ParameterError("logprobs", "must be 1 or more for a plot")
    shares = np.array([np.exp(top.logprobs[top.offsets[:-1]][:num_columns].astype(float)) for top in tops])
    figure = new_figure(figsize=(1.6 + 0.8 * num_columns, 1.2 + 0.32 * len(layers)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="Blues", aspect="auto", origin="lower")
    for row, top in enumerate(tops):
        for column, token_id in enumerate(top.token_ids[top.offsets[:-1]][:num_columns].tolist()):
            text = None if table is None else table.token_text(token_id)
            color = "white" if shares[row, column] > DARK_SHARE else "black"
            label = _label(token_id, text)
            axes.text(
                column,
                row,
                label,
                ha="center",
                va="center",
                fontsize=7,
                family=FONT,
                color=color,
                parse_math=False,
            )
    names = [None if table is None else table.token_text(token_id) for token_id in token_ids[:num_columns]]
    axes.set_xticks(
        range(num_columns),
        [_label(*pair) for pair in zip(token_ids, names, strict=False)],
        rotation=45,
        fontsize=7,
        parse_math=False,
    )
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers], fontsize=7)
    left_out = len(token_ids) - num_columns
    note = f" (first {num_columns} tokens, {left_out} more not shown)" if left_out else ""
    axes.set(xlabel=f"after the token{note}", ylabel="hidden state")
    figure.colorbar(image, ax=axes, label="probability of the most likely token")
    return Picture(figure)


def _draw_bins(axes: Any, counts: Array, sure: Array, hits: Array) -> None:
    """Plot one point per bin, whose area grows with the bin's count, and the line of perfect calibration."""
    axes.plot([0, 1], [0, 1], linewidth=0.8, color="gray")
    axes.scatter(sure, hits, s=20 + 180 * counts / math.sqrt(counts.sum() * counts.max()))
    axes.set(xlim=(0, 1), ylim=(-0.05, 1.05))


def new_figure(**layout: Any) -> Any:
    """Return a new matplotlib figure.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError("plots need matplotlib; pip install 'logprobe[plot]'") from error
    return Figure(**layout)
