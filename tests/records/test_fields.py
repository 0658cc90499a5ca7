"""Log-probabilities of each value in a JSON text, token by token."""

from __future__ import annotations

import json
import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logprobe import FlatLogprobs, SamplingParams
from logprobe.errors import ParameterError
from logprobe.records.fields import MAX_DEPTH, fields_of

if TYPE_CHECKING:
    from logprobe import LLM


class Pieces:
    """A vocabulary in which each token is a piece of one text."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def token_text(self, token_id: int) -> str:
        return self._pieces[token_id].decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


def record_of(pieces: list[bytes]) -> FlatLogprobs:
    """Make a record in which token i has the log-probability -(i + 1)."""
    record = FlatLogprobs()
    count = len(pieces)
    logprobs = -np.arange(1, count + 1, dtype=np.float32)[:, None]
    record.append_rows(np.arange(count)[:, None], logprobs, np.ones(count, dtype=np.int32))
    return record.with_table(Pieces(pieces))


def found(pieces: list[str]) -> dict[str, Any]:
    fields = fields_of(record_of([piece.encode() for piece in pieces]), "".join(pieces))
    return {field.pointer: field for field in fields}


def test_a_value_has_the_sum_of_its_tokens() -> None:
    fields = found(['{"', "mood", '": "', "hap", "py", '", "n', '":', " ", "1", "2", "}"])
    assert list(fields) == ["", "/mood", "/n"]
    mood, number, whole = fields["/mood"], fields["/n"], fields[""]
    assert (mood.value, mood.logprob, mood.upper, mood.tokens) == ("happy", -9.0, -9.0, range(3, 5))
    assert (number.value, number.logprob, number.tokens, number.least_sure) == (12, -19.0, range(8, 10), 9)
    assert (whole.value, whole.logprob, whole.tokens) == ({"mood": "happy", "n": 12}, -28.0, range(3, 10))
    assert mood.probability == pytest.approx(math.exp(-9))


def test_a_token_that_is_shared_bounds_its_value() -> None:
    mood = found(['{"mood": ', '"hap', "py", '"}'])["/mood"]
    assert (mood.logprob, mood.upper, mood.tokens) == (-5.0, -3.0, range(1, 3))
    ended = found(["[1", "2]"])["/0"]
    assert (ended.value, ended.logprob, ended.upper) == (12, -3.0, 0.0)


def test_a_token_of_two_values_counts_once_in_their_whole() -> None:
    fields = found(["[1,2", ",3]"])
    assert [fields[f"/{place}"].logprob for place in range(3)] == [-1.0, -1.0, -2.0]
    assert (fields[""].logprob, fields[""].upper) == (-3.0, 0.0)


def test_an_empty_text_is_its_closing_quote() -> None:
    for pieces, logprob, upper in ((['{"a":"', '"', "}"], -2.0, -2.0), (['{"a":', '""', "}"], -2.0, 0.0)):
        empty = found(pieces)["/a"]
        assert (empty.value, empty.logprob, empty.upper, empty.tokens) == ("", logprob, upper, range(1, 2))


def test_what_has_no_values_has_no_tokens() -> None:
    for text, value in (("{ }", {}), ("[]", [])):
        empty = found([text])[""]
        assert (empty.value, empty.logprob, empty.tokens, empty.least_sure) == (value, 0.0, range(0), None)


def test_pointers_are_escaped_and_bytes_are_counted() -> None:
    fields = found([' {"a/b~ü": [tr', "ue, nu", 'll], "": {"é": "', "😀", '"}} \n'])
    assert list(fields) == ["", "/a~1b~0ü", "/a~1b~0ü/0", "/a~1b~0ü/1", "/", "//é"]
    assert (fields["//é"].value, fields["//é"].tokens) == ("😀", range(3, 4))
    assert fields["/a~1b~0ü/1"].tokens == range(1, 3)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES, st.integers(1, 7), st.sampled_from([None, 1]), st.booleans())
def test_every_value_is_found_wherever_tokens_end(
    value: Any, width: int, indent: int | None, is_ascii: bool
) -> None:
    data = json.dumps(value, indent=indent, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    try:
        text = data.decode()
    except UnicodeDecodeError:  # a lone surrogate half, which no str can encode
        return
    pieces = [data[begin : begin + width] for begin in range(0, len(data), width)]
    fields = {field.pointer: field for field in fields_of(record_of(pieces), text)}
    ends = list(accumulate(map(len, pieces)))
    for pointer, field in fields.items():
        seen = value
        for key in pointer.split("/")[1:]:
            name = key.replace("~1", "/").replace("~0", "~")
            seen = seen[int(name) if isinstance(seen, list) else name]
        assert field.value == seen
        assert field.logprob <= field.upper <= 0
        if isinstance(seen, str) and seen and is_ascii is False:
            begin = ends[field.tokens[0]] - len(pieces[field.tokens[0]])
            spelt = data[begin : ends[field.tokens[-1]]]
            assert json.dumps(seen, ensure_ascii=False)[1:-1].encode() in spelt


def test_long_names_in_many_fields_are_told() -> None:
    text = json.dumps({"x" * 3000: [1] * 400})
    with pytest.raises(ParameterError, match="pointers of more than"):
        fields_of(record_of([text.encode()]), text)


@pytest.mark.parametrize(
    "text", ["", " ", "9" * 5000, "{", '{"a": 1', "[1,]", "yes", '{"a": 1} and so on', "[" * 5000]
)
def test_what_is_no_json_is_told(text: str) -> None:
    with pytest.raises(ParameterError) as raised:
        fields_of(record_of([text.encode()]), text)
    assert raised.value.parameter == "text"


def test_what_is_nested_too_deeply_is_told() -> None:
    text = "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2)
    with pytest.raises(ParameterError, match="deeper than 100"):
        fields_of(record_of([text.encode()]), text)


def test_another_text_than_the_tokens_is_told() -> None:
    with pytest.raises(ParameterError, match="own text"):
        fields_of(record_of([b"[1]"]), "[2]")


SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["happy", "sad"]}, "stars": {"type": "integer", "maximum": 9}},
    "required": ["mood", "stars"],
    "additionalProperties": False,
}


def test_fields_and_what_stands_between_them_make_up_the_reply(real_llm: LLM) -> None:
    asked = "The food was wonderful and the waiters smiled. As JSON: "
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    params = SamplingParams(
        max_tokens=60, temperature=0, logprobs=0, logprobs_mode="both", response_format=schema
    )
    output = real_llm.generate(asked, params)[0].outputs[0]
    value = json.loads(output.text)
    for processed in (False, True):
        record = output.processed_logprobs if processed else output.logprobs
        assert record is not None
        logprobs = record.chosen_entries().logprobs.tolist()
        fields = {field.pointer: field for field in output.fields(processed=processed)}
        assert {name: fields[f"/{name}"].value for name in value} == value
        inside = {place for name in value for place in fields[f"/{name}"].tokens}
        between = math.fsum(logprob for place, logprob in enumerate(logprobs) if place not in inside)
        assert fields[""].logprob + between == pytest.approx(math.fsum(logprobs), abs=1e-4)
    with pytest.raises(ParameterError, match="not requested"):
        real_llm.generate(asked, SamplingParams(max_tokens=2))[0].outputs[0].fields()
