from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from logprobe.errors import ParameterError
from logprobe.processors.arguments import (
    GrammarArgs,
    LogitBiasArgs,
    TokenId,
    check_token_ids,
    field_args,
    format_args,
    keys_of,
    plain,
    to_args,
)
from logprobe.sampling import SamplingParams


class Deep(msgspec.Struct):
    one: TokenId | None = None
    many: list[list[TokenId]] = []
    pairs: dict[str, dict[TokenId, float]] = {}
    maybe: list[TokenId] | None = None
    free: list[int] = []


def test_plain_values_are_copies_without_numpy() -> None:
    given = {np.int64(3): np.float32(0.5), "x": (np.array([1, 2]), [4])}
    copy = plain(given)
    assert copy == {3: 0.5, "x": [[1, 2], [4]]}
    assert type(next(iter(copy))) is int
    assert copy["x"][1] is not given["x"][1]


def test_ids_may_be_texts_as_in_json() -> None:
    assert to_args({"logit_bias": {"3": 1, 4: 2.5}}, LogitBiasArgs, "p").logit_bias == {3: 1.0, 4: 2.5}


@pytest.mark.parametrize(
    "bias",
    [
        {"x": 1},
        {3: "1"},
        {-1: 1},
        {3: True},
        {1.5: 1},
        {3: float("inf")},
        {3: float("nan")},
        {3: 1e39},
        [3],
        7,
    ],
)
def test_a_wrong_type_or_a_number_that_is_not_finite_is_refused(bias: Any) -> None:
    with pytest.raises(ParameterError) as raised:
        to_args({"logit_bias": bias}, LogitBiasArgs, "the_name")
    assert raised.value.parameter == "the_name"
    with pytest.raises(ParameterError) as raised:
        SamplingParams(logit_bias=bias)
    assert raised.value.parameter == "logit_bias"


@pytest.mark.parametrize(
    "values",
    [{"one": 10}, {"many": [[1], [2, 10]]}, {"pairs": {"a": {10: 1.0}}}, {"maybe": [10]}],
)
def test_an_id_outside_the_vocabulary_is_found_wherever_it_stands(values: dict[str, Any]) -> None:
    args = to_args(values, Deep, "p")
    check_token_ids(args, 11, "p")
    with pytest.raises(ParameterError, match=r"token id 10 lies outside the vocabulary \[0, 10\)"):
        check_token_ids(args, 10, "p")


def test_a_field_of_the_parameters_own_name_is_named_once() -> None:
    with pytest.raises(ParameterError, match=r"^one: token id 10 lies") as raised:
        check_token_ids(to_args({"one": 10}, Deep, "one"), 10, "one")
    assert raised.value.parameter == "one"


def test_plain_integers_and_missing_ids_are_not_checked() -> None:
    check_token_ids(to_args({"free": [99], "one": None}, Deep, "p"), 10, "p")
    assert keys_of(Deep) == ("one", "many", "pairs", "maybe", "free")


def test_fields_at_their_defaults_ask_nothing() -> None:
    assert field_args(SamplingParams()) == []
    assert field_args(SamplingParams(logit_bias={}, bad_words=[], response_format={"type": "text"})) == []


def test_each_field_asks_its_processor() -> None:
    params = SamplingParams(
        logit_bias={"5": 1},
        allowed_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        bad_words=("no",),
        min_tokens=2,
        presence_penalty=0.5,
        frequency_penalty=-1,
        response_format={"type": "regex", "regex": "a+"},
    )
    asked = {one.processor.removesuffix("LogitsProcessor"): one.args for one in field_args(params)}
    assert list(asked) == ["AllowedTokens", "BannedWords", "MinTokens", "LogitBias", "Penalties", "Grammar"]
    assert asked["AllowedTokens"].allowed_token_ids == [1, 2]  # type: ignore[attr-defined]
    assert asked["Penalties"].frequency_penalty == -1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),  # more than max_tokens
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", [""]),
        ("bad_words", [3]),
        ("response_format", "json"),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("response_format", {"type": "regex"}),
        ("response_format", {"type": "choice", "choice": []}),
        ("logits_processors_args", ["a"]),
        ("logits_processors_args", {1: 2}),
        ("explain", True),  # without logprobs
        ("explain", 1),
    ],
)
def test_a_field_that_cannot_be_served_is_named(field: str, value: Any) -> None:
    with pytest.raises(ParameterError) as raised:
        SamplingParams(**{field: value})
    assert raised.value.parameter == field


def test_later_changes_of_what_was_given_do_not_reach_the_request() -> None:
    bias, args = {1: 1.0}, {"x": [1]}
    params = SamplingParams(logit_bias=bias, logits_processors_args=args)
    bias[2], args["x"] = 2.0, []
    assert params.logit_bias == {1: 1.0}
    assert params.logits_processors_args == {"x": [1]}


def test_openais_response_formats_become_grammars() -> None:
    assert format_args({"type": "json_object"}) == GrammarArgs(json_object=True)
    schema = {"type": "object"}
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert format_args(wrapped) == GrammarArgs(json_schema=schema)
    assert format_args({"type": "choice", "choice": ["a"]}) == GrammarArgs(choice=["a"])
