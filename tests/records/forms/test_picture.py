"""Records as pictures: every token drawn once, whatever its text, and a panel for each available column."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from logprobe import SamplingParams
from logprobe.errors import MissingPackageError, ParameterError
from logprobe.records import FlatLogprobs, Logprob
from logprobe.records.forms.picture import MAX_LINES, TOKENS_A_LINE, Picture

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe import LLM


def axes_of(picture: Picture) -> list[Any]:
    return list(picture.figure.axes)


def texts_of(picture: Picture) -> list[str]:
    return [text.get_text() for text in axes_of(picture)[0].texts]


def plain(num_tokens: int) -> FlatLogprobs:
    return FlatLogprobs([{1: Logprob(-1.0, 1, "a")}] * num_tokens)


def test_surprisal_entropy_and_calibration_are_drawn(tiny_llm: LLM, tmp_path: Path) -> None:
    asked = SamplingParams(max_tokens=0, prompt_logprobs=2, entropy=True)
    (output,) = tiny_llm.generate(["the cat\tand 🌊 $x$ 你"], asked)
    assert output.prompt_logprobs is not None
    picture = output.prompt_logprobs.plot()
    strip, lines, calibration = axes_of(picture)
    assert len(strip.texts) == len(output.prompt_logprobs) - 1
    assert [line.get_label() for line in lines.lines] == ["surprisal", "entropy"]
    assert calibration.get_xlabel() == "probability of the best token"
    assert picture._repr_png_().startswith(b"\x89PNG")
    picture.save(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size > 1000


def test_a_record_without_alternatives_has_no_calibration(tiny_llm: LLM) -> None:
    (score,) = tiny_llm.score([("the cat", " and the dog")])
    assert score.record is not None
    assert len(axes_of(score.record.plot())) == 2


def test_texts_show_their_spaces_and_what_the_font_lacks() -> None:
    texts = [" a", "\n", "🌊", "$x$", "a very long token", None]
    record = FlatLogprobs([{7: Logprob(-float("inf") if text is None else -1.0, 1, text)} for text in texts])
    assert texts_of(record.plot()) == ["␣a", "⏎", "U+1F30A", "$x$", "a␣very␣long…", "<7>"]
    assert record.plot()._repr_png_()


def test_a_long_record_says_how_much_is_not_shown() -> None:
    picture = plain(TOKENS_A_LINE * MAX_LINES + 5).plot()
    assert len(texts_of(picture)) == TOKENS_A_LINE * MAX_LINES
    assert "5 more" in axes_of(picture)[0].get_title(loc="left")


def test_nothing_to_draw_and_no_library_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParameterError, match="record: has no tokens"):
        FlatLogprobs([None]).plot()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"plots need matplotlib; pip install 'logprobe\[plot\]'"):
        plain(1).plot()
