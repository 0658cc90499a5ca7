"""Sampling parameters: accepted values and errors."""

from __future__ import annotations

from dataclasses import fields
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import SamplingParams
from logprobe.errors import ParameterError, UnknownParameterError
from logprobe.sampling.params import REPORTING_FIELDS
from refusals import raises

if TYPE_CHECKING:
    from logprobe import LLM


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", 1.5), ("n", "2"), ("n", None), ("n", True),
        ("best_of", 0), ("best_of", 1.0), ("best_of", -1),
        ("max_tokens", -1), ("max_tokens", None), ("max_tokens", 3.0),
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")),
        ("temperature", 1e39), ("temperature", 10**400), ("temperature", "hot"), ("temperature", None),
        ("temperature", True),
        ("top_k", -2), ("top_k", 1.5), ("top_k", None),
        ("top_p", 0), ("top_p", 1.01), ("top_p", -1), ("top_p", "all"), ("top_p", float("nan")),
        ("min_p", -0.01), ("min_p", 1.01), ("min_p", None),
        ("seed", 1.5), ("seed", "lucky"), ("seed", True),
        ("stop", ""), ("stop", ["a", ""]), ("stop", [5]), ("stop", 5), ("stop", "\ud800"), ("stop", [b"a"]),
        ("stop_token_ids", 5), ("stop_token_ids", ["a"]), ("stop_token_ids", [1.5]),
        ("stop_token_ids", [True]),
        ("ignore_eos", "no"), ("ignore_eos", 1), ("ignore_eos", None),
        ("include_stop_str_in_output", 1),
        ("logprobs", -2), ("logprobs", 1.5), ("logprobs", "all"), ("logprobs", True),
        ("prompt_logprobs", -2), ("prompt_logprobs", [5]),
        ("logprob_token_ids", 5), ("logprob_token_ids", [1.5]), ("logprob_token_ids", "ab"),
        ("logprobs_mode", "raw"), ("logprobs_mode", None), ("logprobs_mode", ["both"]),
        ("entropy", 1), ("entropy", "yes"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_the_name_of_its_parameter(name: str, value: Any) -> None:
    with raises(ParameterError, parameter=name) as caught:
        SamplingParams(**{"logprobs": 0, name: value})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "max_tokens": 0}, "best_of"),
        ({"entropy": True}, "entropy"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
    ],
)
def test_wishes_that_contradict_each_other_are_refused(options: dict[str, Any], parameter: str) -> None:
    with raises(ParameterError, parameter=parameter):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("max_token", "max_tokens"), ("temprature", "temperature"), ("logprob", "logprobs"), ("topk", "top_k")],
)
def test_a_misspelt_keyword_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownParameterError, match=f"did you mean '{nearest}'") as caught:
        SamplingParams(**{name: 1})
    assert isinstance(caught.value, TypeError)


def test_a_keyword_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(UnknownParameterError, match=r"known: .*temperature"):
        SamplingParams(zzzzzz=1)


def test_lists_and_numpy_numbers_become_plain_values() -> None:
    params = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        seed=np.uint64(7),
        stop="end",
        stop_token_ids=np.array([3, 4]),
        logprobs=np.int32(5),
        logprob_token_ids=[np.int64(9)],
    )
    values = (params.n, params.temperature, params.seed, params.logprobs)
    assert values == (2, 0.5, 7, 5)
    assert [type(value) for value in values] == [int, float, int, int]
    assert (params.stop, params.stop_token_ids, params.logprob_token_ids) == (("end",), (3, 4), (9,))
    assert params == SamplingParams(
        n=2, temperature=0.5, seed=7, stop=["end"], stop_token_ids=[3, 4], logprobs=5, logprob_token_ids=(9,)
    )
    assert hash(params) == hash(params)


class Word(StrEnum):
    """Strings of a str subclass."""

    BOTH = "both"
    END = "end"
    GRAMMAR = "choice"


def kinds_of(value: Any) -> Any:
    """Return the types of a value and of everything nested in it."""
    if isinstance(value, dict):
        return dict, [(kinds_of(key), kinds_of(item)) for key, item in value.items()]
    return (
        (type(value), [kinds_of(item) for item in value]) if isinstance(value, list | tuple) else type(value)
    )


@pytest.mark.parametrize(
    ("name", "given", "want"),
    [
        ("logit_bias", {"100": 50}, {100: 50.0}),
        ("logit_bias", {np.int64(7): np.float32(0.5)}, {7: 0.5}),
        ("logit_bias", MappingProxyType({3: True + 1}), {3: 2.0}),
        ("logit_bias", {}, None),
        ("logits_processors_args", {}, None),
        ("logprob_token_ids", set(), None),
        ("temperature", 1, 1.0),
        ("frequency_penalty", np.float64(1), 1.0),
        ("ignore_eos", np.True_, True),
        ("stop", {Word.END}, ("end",)),
        ("stop", np.str_("end"), ("end",)),
        ("stop_token_ids", {np.uint8(3)}, (3,)),
        ("allowed_token_ids", np.array([[4]])[0], (4,)),
        ("bad_words", {np.str_("cat")}, ("cat",)),
        ("bad_words", "cat", ("cat",)),
        ("logprobs_mode", Word.BOTH, "both"),
        ("lora", np.str_("a"), "a"),
        (
            "response_format",
            {np.str_("type"): Word.GRAMMAR, "choice": ("a",)},
            {"type": "choice", "choice": ["a"]},
        ),
        ("logits_processors_args", {"a": ({np.float32(0.5)}, {2: np.array(1)})}, {"a": [[0.5], {2: 1}]}),
    ],
)  # fmt: skip
def test_a_legal_form_becomes_the_plain_one(name: str, given: Any, want: Any) -> None:
    held = getattr(SamplingParams(**{name: given}), name)
    assert held == want
    assert kinds_of(held) == kinds_of(want)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {"a": 1}), ("logit_bias", {1.5: 1}), ("logit_bias", {"5": 1, 5: 2}),
        ("logit_bias", {(1, 2): 1}), ("logit_bias", [5]), ("bad_words", [5]), ("bad_words", ["\ud800"]),
        ("response_format", {"type": "text", 5: 1}), ("logits_processors_args", {"a": {(1, 2): 3}}),
        ("logits_processors_args", []), ("logits_processors_args", 0), ("logit_bias", 0),
    ],
)  # fmt: skip
def test_what_no_process_could_read_is_refused_by_its_name(name: str, value: Any) -> None:
    with raises(ParameterError, parameter=name):
        SamplingParams(**{name: value})


def test_none_means_no_stops() -> None:
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


@pytest.mark.parametrize("seed", [0, -5, 2**63, 2**200])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert SamplingParams(seed=seed).seed == seed


def test_parameters_never_change() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


def test_what_is_drawn_follows_from_n_and_best_of() -> None:
    facts = [
        (one.num_samples, one.picks_best)
        for one in (SamplingParams(n=3), SamplingParams(n=2, best_of=5), SamplingParams(n=2, best_of=2))
    ]
    assert facts == [(3, False), (5, True), (2, False)]
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0.1).is_greedy


@pytest.mark.parametrize("ids", [[[1, 2], [], [3]], [[]], [[2**40]]])
def test_lists_of_ids_are_read_at_once_as_one_by_one(ids: list[list[int]]) -> None:
    def read(some: Any) -> Any:
        return SamplingParams(logprobs=0, logprob_token_ids=some).logprob_token_ids

    assert (
        read(ids) == read([np.array(some, np.int64) for some in ids]) == read([tuple(some) for some in ids])
    )


@pytest.mark.parametrize("ids", [[[1], [True]], [[1], [1.5]], [[1], ["2"]], [[1], [[2]]], [[1], [None]]])
def test_one_wrong_id_among_lists_is_refused_with_its_place(ids: list[list[Any]]) -> None:
    with pytest.raises(ParameterError, match="item 1 is"):
        SamplingParams(logprobs=0, logprob_token_ids=ids)


def test_reports_are_the_last_fields_and_change_no_token(tiny_llm: LLM) -> None:
    names = [field.name for field in fields(SamplingParams)]
    assert {*names[-len(REPORTING_FIELDS) :]} == {*REPORTING_FIELDS}
    sampling: dict[str, Any] = {"max_tokens": 8, "seed": 5, "top_k": 20, "repetition_penalty": 1.3, "n": 2}
    reporting = {
        "logprobs": 3,
        "prompt_logprobs": 2,
        "logprob_token_ids": [5],
        "logprobs_mode": "both",
        "entropy": True,
        "varentropy": True,
        "margin": True,
        "kept_ids": True,
        "explain": True,
        "digest": True,
        "return_hidden_states": [0, -1],
    }
    assert {*reporting, "return_routed_experts"} == {*REPORTING_FIELDS}  # the tiny Llama has no experts
    plain, reported = (
        tiny_llm.generate("the cat", SamplingParams(**sampling, **more)) for more in ({}, reporting)
    )
    assert [one.token_ids for one in plain[0].outputs] == [one.token_ids for one in reported[0].outputs]
