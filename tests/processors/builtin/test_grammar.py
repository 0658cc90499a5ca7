from __future__ import annotations

import json
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest

from logprobe import SamplingParams
from logprobe.config import EngineConfig
from logprobe.errors import ParameterError
from logprobe.processors import GrammarLogitsProcessor, ModelFacts
from logprobe.processors.arguments import GrammarArgs
from logprobe.processors.builtin import grammar
from logprobe.processors.builtin.grammar import MAX_GRAMMAR_PARTS, byte_tokenizer, grammar_of
from logprobe.processors.builtin.matchers import LlguidanceMatcher, allowed_tokens
from logprobe.text.edge import TextEdge
from refusals import raises
from spaced_models import FORMS, train_tokenizer, without_space

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe import LLM

EOS = {"eos_token": "<|eos|>"}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def wanting_person(**more: Any) -> SamplingParams:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    return SamplingParams(response_format=form, temperature=1.0, **more)


def test_only_tokens_that_keep_within_the_regex_are_left(
    make: Callable[..., Any], row: Callable[..., Any], run: Callable[..., Any], logits: Callable[..., Any]
) -> None:
    processor = make(GrammarLogitsProcessor)
    args = GrammarArgs(regex="a(b|c)d?")
    steps: list[tuple[list[int], list[int]]] = [([], [0]), ([0], [1, 2]), ([0, 2], [3, 9]), ([0, 2, 3], [9])]
    for output, allowed in steps:
        for one in (processor, make(GrammarLogitsProcessor)):
            after = run(one, [row("x", args, output=output)])
            assert np.flatnonzero(np.isfinite(after[0])).tolist() == allowed
            assert np.array_equal(after[0, allowed], logits(1)[0, allowed])


def test_requests_on_several_threads_share_one_tokenizer(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, made = make(GrammarLogitsProcessor), []
    start = threading.Barrier(4)

    def slow(model: ModelFacts) -> Any:
        made.append(model)
        time.sleep(0.05)
        return byte_tokenizer(model)

    def check(regex: str) -> None:
        start.wait()
        processor.check_args(GrammarArgs(regex=regex))

    monkeypatch.setattr(grammar, "byte_tokenizer", slow)
    with ThreadPoolExecutor(4) as pool:
        [*pool.map(check, ["a", "b", "c", "d"])]
    assert len(made) == 1


def test_a_token_outside_the_grammar_is_an_error(
    make: Callable[..., Any], row: Callable[..., Any], run: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match="token 5 is not allowed by the grammar"):
        run(make(GrammarLogitsProcessor), [row("x", GrammarArgs(regex="ab"), output=[5])])


@pytest.mark.parametrize(
    "args",
    [
        GrammarArgs(),
        GrammarArgs(regex="a", choice=["b"]),
        GrammarArgs(regex="("),
        GrammarArgs(ebnf="start: nothing"),
        GrammarArgs(json_schema="{"),
        GrammarArgs(json_schema={"type": "nonsense"}),
    ],
)
def test_a_grammar_that_cannot_be_read_is_refused(make: Callable[..., Any], args: GrammarArgs) -> None:
    with pytest.raises(ParameterError):
        make(GrammarLogitsProcessor).check_args(args)


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ParameterError, match=r"pip install 'logprobe\[grammar\]'"):
        grammar_of(GrammarArgs(regex="a"))


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "regex", "regex": "[a-c]{3,5}x"}, "[a-c]{3,5}x"),
        ({"type": "choice", "choice": ['yes "sir"', "no"]}, 'yes "sir"|no'),
        ({"type": "ebnf", "ebnf": 'start: "<" ("a" | "b") ">"'}, "<[ab]>"),
    ],
)
def test_the_tiny_model_says_nothing_but_what_the_form_allows(
    tiny_llm: LLM, form: dict[str, Any], pattern: str
) -> None:
    params = SamplingParams(response_format=form, max_tokens=40, n=4, seed=3)
    for one in tiny_llm.generate([[5, 6]], params)[0].outputs:
        assert re.fullmatch(pattern, one.text)
        assert one.finish_reason == "stop"


def test_json_of_the_tiny_model_is_valid_whatever_it_says(tiny_llm: LLM) -> None:
    outs = tiny_llm.generate([[5, 6]] * 8, [wanting_person(max_tokens=80, seed=seed) for seed in range(8)])
    for out in outs:
        jsonschema.validate(json.loads(out.outputs[0].text), PERSON)
    objects = SamplingParams(response_format={"type": "json_object"}, max_tokens=100, seed=1, logit_bias={})
    text = tiny_llm.generate([[5, 6]], objects)[0].outputs[0].text
    assert text.startswith("{")


@pytest.mark.real_model
def test_each_text_of_a_real_model_fits_the_schema_and_its_numbers_are_right(
    real_llm: LLM,
) -> None:
    prompt = "Describe a pet as JSON.\n"
    counts = [-1 if seed < 2 else 0 for seed in range(12)]
    asked = [
        wanting_person(max_tokens=48, seed=seed, logprobs=count, logprobs_mode="both")
        for seed, count in enumerate(counts)
    ]
    outs = [out.outputs[0] for out in real_llm.generate([prompt] * len(asked), asked)]
    for out in outs:
        jsonschema.validate(json.loads(out.text), PERSON)
        assert out.finish_reason == "stop"
    assert len({out.text for out in outs}) > 6, "the texts differ"
    head = real_llm.text.encode(prompt).tolist()
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
    scores = real_llm.generate([head + out.token_ids for out in outs], scoring)
    for out, score in zip(outs, scores, strict=True):
        assert out.logprobs is not None
        assert out.processed_logprobs is not None
        assert score.prompt_logprobs is not None
        taught = list(score.prompt_logprobs.logprobs)[-len(out.token_ids) :]
        raw = [row[token_id].logprob for row, token_id in zip(out.logprobs, out.token_ids, strict=True)]
        np.testing.assert_allclose(raw, taught, atol=2e-4)
    for row in [row for out in outs[:2] for row in out.processed_logprobs or ()]:
        values = np.array([entry.logprob for entry in row.values()], dtype=np.float64)
        assert np.exp(values).sum() == pytest.approx(1, abs=1e-5)
        assert 1 <= np.isfinite(values).sum() < len(values), "what is not allowed is impossible"


def chain(length: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {"type": "string"}}}


def rules(length: int, name: str) -> str:
    links = "".join(f"{name.format(i)}: {name.format(i + 1)}\n" for i in range(length))
    return f'start: {name.format(0)}\n{links}{name.format(length)}: "a"\n'


@pytest.mark.parametrize(
    "args",
    [
        GrammarArgs(json_schema=chain(MAX_GRAMMAR_PARTS - 3)),
        GrammarArgs(ebnf=rules(MAX_GRAMMAR_PARTS - 2, "r{}")),
        GrammarArgs(ebnf=rules(MAX_GRAMMAR_PARTS - 2, "T{}")),
    ],
    ids=["refs", "rules", "terminals"],
)
def test_the_longest_chain_that_is_let_through_is_compiled(
    make: Callable[..., Any], args: GrammarArgs
) -> None:
    make(GrammarLogitsProcessor).check_args(args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (GrammarArgs(json_schema=chain(MAX_GRAMMAR_PARTS)), "parts"),
        (GrammarArgs(json_schema=json.dumps(chain(MAX_GRAMMAR_PARTS))), "bytes"),
        (GrammarArgs(ebnf=rules(MAX_GRAMMAR_PARTS, "r{}")), "parts"),
        (GrammarArgs(regex="(" * 20_000), "parts"),
        (GrammarArgs(regex="a" * 300_000), "bytes"),
        (GrammarArgs(regex="€" * 100_000), "bytes"),
        (GrammarArgs(json_schema={"const": "€" * 100_000}), "bytes"),
        (GrammarArgs(choice=["a"] * 3000), "choices"),
        (GrammarArgs(json_schema="[" * 50_000), "not JSON"),
        (GrammarArgs(json_schema='{"not":' * 200 + "{}" + "}" * 200), "nested deeper"),
    ],
)
def test_a_grammar_too_large_is_refused_before_it_is_compiled(
    make: Callable[..., Any], args: GrammarArgs, message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        make(GrammarLogitsProcessor).check_args(args)


LONG = "the row é of the model, and " * 100


def matcher_of(tokenizer: Any, args: GrammarArgs) -> LlguidanceMatcher:
    processor = GrammarLogitsProcessor(EngineConfig())
    text = TextEdge.of(tokenizer)
    eos = frozenset({tokenizer.eos_token_id})
    processor.bind(ModelFacts(vocab_size=len(tokenizer), eos_token_ids=eos, text=text))
    return processor.matcher(args)


def written(tokenizer: Any, args: GrammarArgs, seed: int = 0, max_tokens: int = 4000) -> list[int]:
    """Sample allowed tokens until the grammar allows none."""
    matcher, generator = matcher_of(tokenizer, args), np.random.default_rng(seed)
    token_ids: list[int] = []
    while len(token_ids) < max_tokens and (mask := matcher.mask()) is not None:
        allowed = np.flatnonzero(allowed_tokens(mask, len(tokenizer))).tolist()
        token_id = int(generator.choice(allowed))
        if token_id == tokenizer.eos_token_id:
            break
        assert matcher.accept(token_id)
        token_ids.append(token_id)
    return token_ids


def bytes_of(tokenizer: Any, token_ids: list[int]) -> bytes:
    assert not set(token_ids) & set(tokenizer.all_special_ids)
    return TextEdge.of(tokenizer).vocabulary.bytes_of(token_ids)


@pytest.fixture(scope="module", params=FORMS)
def spaced(request: pytest.FixtureRequest) -> Any:
    """A tokenizer that adds a space before a text."""
    return train_tokenizer(request.param)


@pytest.mark.parametrize("text", ["the model", " the model", "{", '{"a": "the row"}', "x\n  y", "é🐈", LONG])
def test_forced_text_has_the_tokens_of_a_text_without_a_prepended_space(spaced: Any, text: str) -> None:
    token_ids = written(spaced, GrammarArgs(choice=[text]))
    assert token_ids == without_space(spaced).encode(text, add_special_tokens=False).ids
    assert bytes_of(spaced, token_ids) == text.encode()


@pytest.mark.parametrize("seed", range(4))
def test_every_form_of_grammar_is_followed_with_a_prepended_space(spaced: Any, seed: int) -> None:
    choices = ["the model", "a row", " the row"]
    for args, pattern in (
        (GrammarArgs(choice=choices), "|".join(choices)),
        (GrammarArgs(regex="the model of [ab]{2} and"), "the model of [ab]{2} and"),
        (GrammarArgs(ebnf='start: "the" " model" ("s" | " of a row")'), "the model(s| of a row)"),
    ):
        assert re.fullmatch(pattern, bytes_of(spaced, written(spaced, args, seed)).decode())
    flags = {"kind": {"enum": ["cat", "dog"]}, "is_old": {"type": "boolean"}}
    schema = {"type": "object", "properties": flags, "required": [*flags], "additionalProperties": False}
    text = bytes_of(spaced, written(spaced, GrammarArgs(json_schema=schema), seed))
    jsonschema.validate(json.loads(text), schema)
    assert bytes_of(spaced, written(spaced, GrammarArgs(json_object=True), seed, 50)).startswith(b"{")


def test_a_model_with_a_prepended_space_writes_what_is_forced_and_its_fields_are_known(
    spaced_llm: LLM,
) -> None:
    numbers: dict[str, Any] = {"logprobs": 0, "logprobs_mode": "both"}
    form = {"type": "choice", "choice": ["the model of the row"]}
    [output] = spaced_llm.generate(["a row"], SamplingParams(response_format=form, max_tokens=30, **numbers))
    [one] = output.outputs
    assert one.text == "the model of the row"
    assert one.finish_reason == "stop"
    assert one.processed_logprobs is not None
    assert one.processed_logprobs.logprobs == [0] * len(one.token_ids), "nothing else was allowed"
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
    [score] = spaced_llm.generate([output.prompt_token_ids + one.token_ids], scoring)
    assert one.logprobs is not None
    assert score.prompt_logprobs is not None
    taught = list(score.prompt_logprobs.logprobs)[-len(one.token_ids) :]
    np.testing.assert_allclose(one.logprobs.logprobs, taught, atol=1e-4)

    [output] = spaced_llm.generate(["a row"], wanting_person(max_tokens=100, seed=1, **numbers))
    jsonschema.validate(json.loads(output.outputs[0].text), PERSON)
    kind = next(field for field in spaced_llm.field_distributions(output) if field.pointer == "/kind")
    assert kind.members is not None
    assert kind.grammar_members is not None
    assert list(kind.members.values) == ["cat", "dog"]
    assert sum(kind.grammar_members.shares) == pytest.approx(1, abs=1e-9)
    assert sum(np.exp(kind.members.logprobs)) + kind.members.rest == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("text", ["</s>", "a </s> b", "<s>the row", "a\u2581b"])
def test_text_that_spells_a_special_token_or_a_mark_is_written_as_text(spaced: Any, text: str) -> None:
    assert bytes_of(spaced, written(spaced, GrammarArgs(choice=[text]))) == text.encode()


@pytest.mark.parametrize("normalizer", ["NFC", "NFKC", "Lowercase", "StripAccents", "Strip"])
def test_text_that_the_tokenizer_would_rewrite_is_written_as_it_is(tiny_llm: LLM, normalizer: str) -> None:
    from tokenizers import Tokenizer, normalizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(tiny_llm.text.backend.to_str())
    backend.normalizer = getattr(normalizers, normalizer)()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **EOS)
    for text in ("E\u0301 and \ufb01", " The the ", "E\u0301 \ufb01 and " * 100):
        assert bytes_of(tokenizer, written(tokenizer, GrammarArgs(choice=[text]))) == text.encode()


def test_text_that_no_tokens_spell_is_refused_in_one_line() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [EOS["eos_token"], "\u2581", *"abc"]
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], None, False))  # raises for others
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **EOS)
    assert bytes_of(tokenizer, written(tokenizer, GrammarArgs(choice=["cab a"]))) == b"cab a"
    for args in (GrammarArgs(choice=["abd"]), GrammarArgs(json_object=True)):
        with raises(ParameterError, parameter="grammar") as refused:
            written(tokenizer, args)
        assert_one_plain_line(refused.value)


class Failed:
    """A failed llguidance matcher."""

    def __init__(self, problem: str) -> None:
        self.get_error = lambda: problem

    def is_error(self) -> bool:
        return True

    def is_stopped(self) -> bool:
        return True


@pytest.mark.parametrize(
    "problem",
    [
        "panic: called `Result::unwrap()` on an `Err` value\n<backtrace>\n   0: <unknown>\n</backtrace>",
        "NoExtensionBias\n<state>\nTokens: \n</state><grammar>\nstart: a\n</grammar>",
        "parser error: Too many items (limit 5000; mask)\n<non-verbose/>",
        "lexer error: " + "a" * 5000,
    ],
)
def test_errors_of_llguidance_are_one_line_and_the_log_has_the_rest(
    problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "logprobe")
    with raises(ParameterError, parameter="grammar") as refused:
        LlguidanceMatcher(Failed(problem)).mask()
    assert_one_plain_line(refused.value)
    assert problem in caplog.text


def assert_one_plain_line(error: Exception) -> None:
    message = str(error)
    assert len(message) < 1000
    assert not [
        mark for mark in ("\n", "panic", "unwrap", "<backtrace", "<state", "<non-v") if mark in message
    ]
