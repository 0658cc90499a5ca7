"""The page of an audit: whole in itself, hostile texts escaped, and each point where its numbers are."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from audit_samples import FAILING, HOSTILE, NONCONFORMING, PASSING
from logprobe.analysis.auditing.html import EQUAL_NATS, MAX_POINTS, page
from logprobe.analysis.auditing.report import AuditReport, Steadiness, StoredPrompt, StoredRow

VOID = {"meta", "line", "path"}


class Outline(HTMLParser):
    """Its elements, with their attributes, and its text; fails where an element is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.points: dict[str, list[tuple[float, float]]] = {}  # title of the plot + group → places
        self._open: list[str] = []
        self._where = ["", ""]
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.elements.append((tag, values))
        if tag == "svg":
            self._where[0] = values["aria-label"] or ""
        elif tag == "g":
            self._where[1] = values["class"] or ""
        elif tag == "path":
            places = re.findall(r"M([\d.]+) ([\d.]+)h0", values["d"] or "")
            self.points[" ".join(self._where)] = [(float(x), float(y)) for x, y in places]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("report", [PASSING, FAILING], ids=["passing", "failing"])
def test_the_page_fetches_and_runs_nothing(report: AuditReport) -> None:
    outline = Outline(page(report))
    assert {tag for tag, _ in outline.elements}.isdisjoint(
        {"script", "link", "img", "iframe", "object", "a", "form"}
    )
    names = {name for _, attributes in outline.elements for name in attributes}
    assert names.isdisjoint({"src", "href", "srcset", "onload", "style"})
    (style,) = re.findall(r"<style>(.*?)</style>", page(report), re.DOTALL)
    assert not re.search(r"url\(|@import", style)


def test_what_an_endpoint_says_is_text_on_the_page() -> None:
    html = page(FAILING)
    assert HOSTILE not in html
    assert Outline(html).text.count('<script>alert("1")</script>') >= 7  # model, server, 5 prompts or notes


def test_the_page_tells_the_verdict_and_each_finding_with_its_evidence() -> None:
    text = Outline(page(FAILING)).text
    assert "Numbers: FAIL" in text
    assert "worst 2.3100 nats (at most 0.01), temperature-unasked" in text
    assert "138 of 140" in text
    assert text.count("-0.4321") == text.count("0.3087") == 5
    assert "To correct: multiply by 0.7, and normalise" in text
    assert "Numbers: PASS" in Outline(page(PASSING)).text
    text = Outline(page(NONCONFORMING)).text
    assert "Numbers: PASS" in text
    assert "API conformance: text-wrong, ignored, 1 note" in text


def test_points_stand_where_their_numbers_are() -> None:
    outline = Outline(page(PASSING))
    # On the diagonal, at distances that are those of the numbers.
    scatter = outline.points["Each number beside the exact one one"]
    assert len(scatter) == 2  # a row without a number is none
    (x1, y1), (x2, y2) = scatter  # (-1, -1) and (-2.000001, -2)
    (at,) = outline.points["Each number beside the exact one two"]  # (-0.5, -0.50001)
    assert (at[0] - x1) / (x1 - x2) == pytest.approx(0.5, abs=0.01)
    assert (at[1] - y1) / (y1 - y2) == pytest.approx(0.5, abs=0.01)
    # Errors: a zero at the lower end of the logarithms, 1e-6 and 1e-5 a decade apart.
    (_, low), (_, middle) = outline.points["Errors by position one"]
    ((_, high),) = outline.points["Errors by position two"]
    decades = -math.log10(EQUAL_NATS) - 6
    assert (low - middle) / decades == pytest.approx(middle - high, rel=0.01)
    # Lengths: one equal, one 2e-6 off.
    (_, equal), (_, off) = outline.points["Errors by length of the prompt one"]
    assert (equal, off) == (
        low,
        pytest.approx(low - (low - middle) / decades * math.log10(2e-6 / EQUAL_NATS), abs=0.2),
    )


def test_of_many_points_the_worst_are_drawn() -> None:
    rows = [StoredRow(position=place, token_id=1, theirs=-1.0, ours=-1.0) for place in range(3 * MAX_POINTS)]
    rows[1234] = replace(rows[1234], theirs=-3.0)
    many = StoredPrompt(ask="echo", where="prompt", prompt="x", token_ids=(), rows=tuple(rows))
    outline = Outline(page(replace(PASSING, stored=(many,))))
    heights = [y for _, y in outline.points["Errors by position one"]]
    assert MAX_POINTS // 2 < len(heights) <= MAX_POINTS
    assert heights.count(min(heights)) == 1
    assert "row 1234: theirs -3, ours -1" in outline.text


def test_a_report_without_numbers_has_a_page_without_plots() -> None:
    bare = replace(PASSING, stored=(), steadiness=(), errors=(), fields=(), precision=(), findings=())
    outline = Outline(page(bare))
    assert "svg" not in {tag for tag, _ in outline.elements}
    assert "Findings" in outline.text


def test_a_bound_below_what_is_drawn_as_equal_has_a_page() -> None:
    row = StoredRow(position=0, token_id=1, theirs=-1.0, ours=-1.0)
    same = StoredPrompt(ask="echo", where="prompt", prompt="x", token_ids=(), rows=(row,))
    outline = Outline(page(replace(PASSING, stored=(same,), max_nats=1e-9)))
    assert len(outline.points["Errors by position one"]) == 1


def test_a_length_without_a_number_is_no_point() -> None:
    differs = Steadiness(circumstance="prompt of 64 tokens", requests=1, is_equal=False)
    assert (
        "Errors by length of the prompt one"
        not in Outline(page(replace(PASSING, steadiness=(differs,)))).points
    )


def test_numbers_that_are_no_logprobs_are_drawn_all_the_same() -> None:
    rows = (
        StoredRow(position=0, token_id=1, theirs=-9999.0, ours=-1.0),
        StoredRow(position=1, token_id=1, theirs=0.7, ours=-0.3),
    )
    odd = StoredPrompt(ask="echo", where="prompt", prompt="x", token_ids=(), rows=rows)
    places = Outline(page(replace(PASSING, stored=(odd,)))).points["Each number beside the exact one one"]
    assert all(0 < x < 480 and 0 < y < 300 for x, y in places)
