"""Records as shaded text: every token once, shades by whole nats, and all text escaped."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import pytest

from logprobe import SamplingParams
from logprobe.records import FlatLogprobs, Logprob
from logprobe.records.forms.html import MAX_TOKENS, SHADES, shade_of, shaded

if TYPE_CHECKING:
    from logprobe import LLM


def record(*rows: tuple[str, float]) -> FlatLogprobs:
    made = FlatLogprobs()
    for token_id, (text, logprob) in enumerate(rows):
        made.append({token_id: Logprob(logprob, 1, text), 99: Logprob(-9.5, 2, "<i>&")})
    return made


@pytest.mark.parametrize(
    ("logprob", "shade"),
    [
        (0.0, 0),
        (-0.99, 0),
        (-1.0, 1),
        (-7.5, 7),
        (-8.0, 8),
        (-50.0, 8),
        (-math.inf, 8),
        (math.nan, 8),
        (1e-6, 0),
    ],
)
def test_a_shade_is_the_surprisal_in_whole_nats(logprob: float, shade: int) -> None:
    assert shade_of(logprob) == shade


def test_every_token_stands_once_with_its_numbers_and_no_text_is_html() -> None:
    found = shaded([record(("<b>", -0.25), (' "x"', -3.5))])
    spans = re.findall(r'<span title="(.*?)" style="(.*?)">(.*?)</span>', found, re.DOTALL)
    assert [text for _, _, text in spans] == ["&lt;b&gt;", " &quot;x&quot;"]
    assert "logprob -0.2500 nats (77.88 %), rank 1" in spans[0][0]
    assert "&lt;i&gt;&amp;" in spans[0][0]
    assert SHADES[3][0] in spans[1][1]
    assert "<b>" not in found
    assert "2 tokens, logprob -3.750 nats, mean surprisal 1.875 nats, perplexity 6.521" in found


def test_a_long_text_says_how_much_is_not_shown() -> None:
    found = shaded([record(*[("a", -1.0)] * (MAX_TOKENS + 7))])
    assert found.count("<span") == MAX_TOKENS
    assert "7 more tokens" in found
    assert f"{MAX_TOKENS + 7} tokens, logprob" in found


def test_outputs_records_and_scores_show_their_texts_in_a_notebook(tiny_llm: LLM) -> None:
    asked = SamplingParams(max_tokens=3, temperature=0, logprobs=2, prompt_logprobs=1)
    (output,) = tiny_llm.generate(["the cat"], asked)
    whole = output._repr_html_()
    assert whole is not None
    texts = re.findall(r">([^<]*)</span>", whole)
    numbers = output.outputs[0].logprobs
    chosen = [numbers.chosen(index)[1].decoded_token for index in range(3)]
    assert "".join(texts) == "the cat" + "".join(chosen)
    assert whole.count("border-bottom") == 3
    (score,) = tiny_llm.score([("the cat", " and")])
    assert score._repr_html_() == score.record._repr_html_()
    bare = tiny_llm.generate(["the cat"], SamplingParams(max_tokens=1))[0]
    assert bare._repr_html_() is None
    assert bare.outputs[0]._repr_html_() is None
