"""Stop strings in the bytes of a growing text, against a search of the whole."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from logprobe.text.pieces import StopMatcher

TEXTS = st.text(alphabet="abé😀", max_size=12)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    text=TEXTS, cuts=st.lists(st.integers(0, 40), max_size=8), stops=st.lists(TEXTS.filter(bool), min_size=1)
)
def test_the_first_stop_is_found_however_the_bytes_are_cut(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    data = text.encode()
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[start:end] for start, end in pairwise(places)]
    matcher = StopMatcher(stops)
    for piece, whole in zip(pieces, accumulate(pieces), strict=True):
        hits = [(whole.find(stop.encode()), stop) for stop in stops if stop.encode() in whole]
        got = matcher.feed(piece)
        assert got == ((min(hits)[1], min(hits)[0]) if hits else None)
        if hits:
            break
