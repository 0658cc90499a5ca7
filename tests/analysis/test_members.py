"""Probabilities of a field's allowed values, summed over all tokenizations, equal those of brute force."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from async_twin import async_twin
from logprobe import LLM, SamplingParams
from logprobe.config import EngineConfig
from logprobe.engine.client import Client
from logprobe.errors import ParameterError, WeightsReplacedError
from logprobe.next_token import AsyncLM
from logprobe.next_token.fields import FieldSums, SpellingTools, field_distributions
from logprobe.processors import BatchRow, BatchState, GrammarLogitsProcessor, LogitsProcessor, ModelFacts
from logprobe.processors.arguments import GrammarArgs, NoArgs
from logprobe.testing import FakeForward, fake_model
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logprobe import RequestOutput
    from logprobe.analysis.members import FieldDistribution, Members
    from logprobe.engine.backends.start import LoadedModel

# Multi-byte tokens that end inside names, inside values and across both.
TOKENS = [
    b'"a', b"ab", b'b"', b'c"', b'"}', b'",', b'": ', b': "', b' "', b' "a', b': "a', b"10", b" 1", b"1}",
    b"0,", b"00", b": 1", b"tr", b"ue", b"true", b" t", b"e}", b"null", b" nu", b"\xc3\xa9", b"\\n", b'\\"',
    b'\\"q', b"[1", b", ", b", 1", b"1]", b'v"', b'"v', b'{"', b'{"v":', b"-1",
]  # fmt: skip
SPACES = b" \t\n\r"
MANY = 100_000  # more rows than any of these sums needs


def object_of(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def asking(schema: dict[str, Any] | None, **more: Any) -> SamplingParams:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    settings: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "logprobs": 0, "logprobs_mode": "both"}
    return SamplingParams(response_format=form if schema else None, **(settings | more))


@dataclass
class Fake:
    """A fake engine, its forward pass, and clients for it; the engine does not apply the grammar."""

    forward: FakeForward
    model: LoadedModel
    lm: AsyncLM
    pieces: list[bytes]
    client: Client

    def reply(self, params: SamplingParams, prompt: str = "x") -> RequestOutput:
        return asyncio.run(self.client.generate([prompt], params))[0]

    def fields(self, output: RequestOutput, **more: Any) -> dict[str, FieldDistribution]:
        return {field.pointer: field for field in asyncio.run(self.distributions(output, **more))}

    async def distributions(self, output: Any, **more: Any) -> list[FieldDistribution]:
        settings: dict[str, Any] = {"schema": None, "index": 0, "max_rows": MANY} | more
        return await field_distributions(self.lm, lambda: self.tools, output, **settings)

    @cached_property
    def tools(self) -> SpellingTools:
        return SpellingTools(self.model)

    def row(self, token_ids: list[int]) -> Any:
        logits = self.forward.logits_after(token_ids).astype(np.float64)
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


@pytest.fixture(scope="module")
def fake() -> Iterator[Fake]:
    forward = FakeForward(258 + len(TOKENS), num_slots=20_000, seed=5)
    model = fake_model(forward, tokens=TOKENS, max_num_seqs=16)
    pieces = [model.text.vocabulary.token_bytes(i) for i in range(forward.vocab_size)]
    with AsyncLM(model) as lm:
        yield Fake(forward, model, lm, pieces, Client(model.engine, model.text))
    model.engine.close()


class Grammar:
    """Apply the engine's grammar processor to rows."""

    def __init__(self, fake: Fake, schema: dict[str, Any]) -> None:
        text = fake.client.text
        self.args = GrammarArgs(json_schema=schema)
        self.processor = GrammarLogitsProcessor(EngineConfig())
        facts = ModelFacts(
            vocab_size=len(fake.pieces),
            eos_token_ids=frozenset([257]),
            text=text,
        )
        self.processor.bind(facts)

    def __call__(self, row: Any, reply: list[int]) -> Any:
        """Mask a row (V,) after these tokens and renormalise it."""
        own = BatchRow(
            request_id=repr(reply), args=self.args, prompt_token_ids=[0], output_token_ids=list(reply)
        )
        self.processor.update_state(BatchState([own]))
        left = self.processor.apply(torch.from_numpy(row.copy())[None])[0].numpy()
        return left - np.log(np.exp(left[left > -np.inf]).sum())


def counted(
    fake: Fake, grammar: Grammar | None, prompt: list[int], reply: list[int], text: bytes, after: bytes | None
) -> float:
    """Return the probability that a text comes next, by enumerating all tokenizations.

    The byte that follows must be one of `after` (or the end of the text if `after` is only white space); with
    None, the text needs no delimiter.
    """
    row = fake.row(prompt + reply)
    if grammar is not None:
        row = grammar(row, reply)
    whole = 0.0
    for token_id in np.flatnonzero(row > -np.inf).tolist():
        piece, probability = fake.pieces[token_id], math.exp(row[token_id])
        if token_id in {256, 257}:  # BOS and EOS
            whole += probability * (not text and after == SPACES)
        elif piece.startswith(text) and (after is None or piece[len(text) : len(text) + 1] in set_of(after)):
            whole += probability
        elif text.startswith(piece):
            rest = text[len(piece) :]
            whole += probability * counted(fake, grammar, prompt, [*reply, token_id], rest, after)
    return whole


def set_of(data: bytes) -> set[bytes]:
    return {bytes([byte]) for byte in data}


FLOATS = {1.0: "1", 1e-5: "0.00001"}  # floats as grammars write them


def counted_members(
    fake: Fake, grammar: Grammar | None, output: RequestOutput, start: int, values: list[Any], after: bytes
) -> list[float]:
    """Return the probability of each value at byte `start`, after the reply's own tokens before it."""
    reply, place = [], 0
    for token_id in output.outputs[0].token_ids:
        if place + len(fake.pieces[token_id]) > start:
            break
        reply.append(token_id)
        place += len(fake.pieces[token_id])
    before = output.outputs[0].text.encode()[place:start]
    whole = counted(fake, grammar, output.prompt_token_ids, reply, before, None) if before else 1.0
    found = []
    for value in values:
        usual = json.dumps(value, ensure_ascii=False)
        text = (FLOATS.get(value, usual) if isinstance(value, float) else usual).encode()
        ends = None if text[-1:] == b'"' else after
        found.append(counted(fake, grammar, output.prompt_token_ids, reply, before + text, ends) / whole)
    return found


def assert_counted(members: Members | None, values: list[Any], probabilities: list[float]) -> None:
    assert members is not None
    assert json.dumps(members.values) == json.dumps(values)
    found, want = np.exp(members.logprobs), np.array(probabilities)
    # Rows are float32 and a path has several; unexplored paths add up to at most 1e-7.
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-7 * want.sum())
    np.testing.assert_allclose(members.shares, want / want.sum(), rtol=0, atol=2e-6)
    assert members.mass == pytest.approx(want.sum(), abs=2e-6)
    assert members.rest == pytest.approx(1 - want.sum(), abs=2e-6)
    assert members.unresolved <= 1e-7 * (members.mass + 1e-12) * 1.01


SEEDS = [1, 2, 3]
CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "one-begins-another": ({"enum": ["a", "ab", "b"]}, ["a", "ab", "b"]),
    "numbers": ({"enum": [1, 10, 100, -1]}, [1, 10, 100, -1]),
    "booleans": ({"type": "boolean"}, [True, False]),
    "escapes": ({"enum": ["é", 'b"q', "a\nb", "\\"]}, ["é", 'b"q', "a\nb", "\\"]),
    "mixed": ({"enum": [True, None, 1, "a"]}, [True, None, 1, "a"]),
    "const": ({"const": "ab"}, ["ab"]),
    "fractions": ({"enum": [1.0, 0.5, 1e-5]}, [1.0, 0.5, 1e-5]),
    "between-bounds": ({"type": "integer", "minimum": 8, "maximum": 11}, [8, 9, 10, 11]),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_members_are_the_sum_of_all_paths(fake: Fake, case: str, seed: int) -> None:
    schema, values = object_of(v=CASES[case][0]), CASES[case][1]
    output = fake.reply(asking(schema, temperature=1, seed=seed))
    field = fake.fields(output)["/v"]
    start = len('{"v": ')
    want = counted_members(fake, None, output, start, values, SPACES + b",}")
    assert_counted(field.members, values, want)
    grammar = Grammar(fake, schema)
    want = counted_members(fake, grammar, output, start, values, SPACES + b",}")
    assert_counted(field.grammar_members, values, want)
    # The grammar allows nothing else here, except another escape of a newline.
    assert case == "escapes" or sum(want) == pytest.approx(1, abs=1e-6)


def test_values_that_begin_within_a_token_are_among_them(fake: Fake) -> None:
    begins_inside = []
    for case in CASES.values():
        for seed in SEEDS:
            params = asking(object_of(v=case[0]), temperature=1, seed=seed)
            ids = fake.reply(params).outputs[0].token_ids
            ends = np.cumsum([len(fake.pieces[token_id]) for token_id in ids])
            begins_inside.append(len('{"v": ') not in ends)
    assert {True, False} == set(begins_inside)


def test_members_of_an_array_stand_after_those_before_them(fake: Fake) -> None:
    schema = {"type": "array", "items": {"enum": [1, 10, "a"]}, "minItems": 2, "maxItems": 2}
    output = fake.reply(asking(schema))
    fields, text = fake.fields(output), output.outputs[0].text
    first = text.index(", ")
    for pointer, start in (("/0", 1), ("/1", first + 2)):
        for grammar, members in (
            (None, fields[pointer].members),
            (Grammar(fake, schema), fields[pointer].grammar_members),
        ):
            want = counted_members(fake, grammar, output, start, [1, 10, "a"], SPACES + b",]")
            assert_counted(members, [1, 10, "a"], want)


@pytest.mark.parametrize("schema", [{"enum": [1, 10]}, {"type": "boolean"}, {"enum": ["a", "ab"]}])
def test_a_member_that_is_the_whole_reply_may_end_with_it(fake: Fake, schema: dict[str, Any]) -> None:
    values = schema.get("enum", [True, False])
    output = fake.reply(asking(schema))
    field = fake.fields(output)[""]
    assert_counted(field.members, values, counted_members(fake, None, output, 0, values, SPACES))
    want = counted_members(fake, Grammar(fake, schema), output, 0, values, SPACES)
    assert_counted(field.grammar_members, values, want)


REFERRED = {
    "$defs": {
        "small": {"enum": [1, 10]},
        "or/none": {"anyOf": [{"$ref": "#/$defs/small"}, {"type": "null"}]},
    },
    "anyOf": [object_of(v={"$ref": "#/$defs/or~1none"}), object_of(v={"const": "a"})],
}


def test_references_and_alternatives_are_followed(fake: Fake) -> None:
    output = fake.reply(asking(REFERRED))
    field, values = fake.fields(output)["/v"], [1, 10, None, "a"]
    want = counted_members(fake, Grammar(fake, REFERRED), output, 6, values, SPACES + b",}")
    assert_counted(field.grammar_members, values, want)
    assert field.runner_up is not None
    value, share = field.runner_up
    assert value != field.value
    assert share == pytest.approx(
        max(p for v, p in zip(values, want, strict=True) if v != field.value), abs=2e-6
    )


def test_a_schema_of_its_own_needs_no_grammar(fake: Fake) -> None:
    schema = object_of(v={"enum": [1, 10]})
    output = fake.reply(asking(schema))
    raw = fake.reply(asking(None))
    raw.outputs[0] = output.outputs[0]  # as if the model had generated it without a grammar
    raw.outputs[0].processed_logprobs = None
    field = fake.fields(raw, schema=schema)["/v"]
    assert_counted(field.members, [1, 10], counted_members(fake, None, output, 6, [1, 10], SPACES + b",}"))
    assert (field.grammar_members, field.processed, field.log_kept_mass) == (None, None, None)


def test_what_too_few_rows_leave_is_told(fake: Fake) -> None:
    output = fake.reply(asking(object_of(v=CASES["escapes"][0])))
    want = np.array(counted_members(fake, None, output, 6, CASES["escapes"][1], SPACES + b",}"))
    left = []
    for max_rows in (1, 2, 8, 32, MANY):
        members = fake.fields(output, max_rows=max_rows)["/v"].members
        assert members is not None
        found = np.exp(members.logprobs)
        assert np.all(found <= want * (1 + 1e-4) + members.unresolved)
        assert np.all(want <= found + members.unresolved + 1e-9)
        left.append(members.unresolved)
    assert left == sorted(left, reverse=True)
    assert left[0] > 1e-6 > left[-1]


def test_bounds_become_one_number(fake: Fake) -> None:
    """A split token counts as the mass of all tokens that start with the same bytes; the parts add up."""
    schema = object_of(v={"enum": ["a", "ab"]}, c={"enum": [1, 10]}, b={"type": "boolean"})
    grammar, num_split = Grammar(fake, schema), 0
    for prompt in ["x", "y", "zz", "1"]:
        output = fake.reply(asking(schema), prompt)
        completion, fields = output.outputs[0], fake.fields(output)
        data, prompt_ids = completion.text.encode(), output.prompt_token_ids
        for stage in (None, grammar):
            reached, spans = [0.0], []  # cumulative log-probability up to each byte
            for place, token_id in enumerate(completion.token_ids):
                row = fake.row(prompt_ids + completion.token_ids[:place])
                row = row if stage is None else stage(row, completion.token_ids[:place])
                piece = fake.pieces[token_id]
                for size in range(1, len(piece) + 1):
                    like = [i for i, other in enumerate(fake.pieces) if other.startswith(piece[:size])]
                    mass = np.log(np.exp(row[like]).sum()) if size < len(piece) else row[token_id]
                    reached.append(reached[len(reached) - size] + mass)
            bounds = {field.pointer: field for field in completion.fields(processed=stage is not None)}
            for pointer in ("/v", "/c", "/b"):
                text = json.dumps(fields[pointer].value).strip('"')
                start = data.index(text.encode(), data.index(f'"{pointer[1:]}": '.encode()) + 5)
                want = reached[start + len(text)] - reached[start]
                spans.append((start, start + len(text)))
                field = fields[pointer].raw if stage is None else fields[pointer].processed
                assert field is not None
                assert field.logprob == field.upper == pytest.approx(want, abs=1e-5)
                assert bounds[pointer].logprob - 1e-5 <= field.logprob <= bounds[pointer].upper + 1e-5
                num_split += bounds[pointer].logprob != bounds[pointer].upper
            whole = fields[""].raw if stage is None else fields[""].processed
            assert whole is not None
            parts = [fields[pointer] for pointer in ("/v", "/c", "/b")]
            sums = [one.raw if stage is None else one.processed for one in parts]
            assert whole.logprob == pytest.approx(math.fsum(one.logprob for one in sums if one), abs=1e-9)
            record = completion.logprobs if stage is None else completion.processed_logprobs
            assert record is not None
            between = reached[-1] - math.fsum(reached[stop] - reached[start] for start, stop in spans)
            all_tokens = math.fsum(record.chosen_entries().logprobs.tolist())
            assert whole.logprob + between == pytest.approx(all_tokens, abs=2e-5)
    assert num_split > 4


def test_processed_numbers_that_are_not_the_grammars_keep_their_bounds(fake: Fake) -> None:
    schema = object_of(v={"enum": ["a", "ab"]}, c={"enum": [1, 10]})
    output = fake.reply(asking(schema, temperature=0.5, seed=1))
    processed = {field.pointer: field for field in output.outputs[0].fields(processed=True)}
    for pointer, field in fake.fields(output).items():
        assert field.processed == processed[pointer]
        assert field.raw.logprob == field.raw.upper
        record = output.outputs[0].processed_logprobs
        assert record is not None
        assert record.log_kept_mass is not None
        kept = record.log_kept_mass[field.raw.tokens.start : field.raw.tokens.stop]
        assert field.log_kept_mass == pytest.approx(kept.sum(), abs=1e-5)


class Flatter(LogitsProcessor):
    """A processor that acts on every request."""

    Args = NoArgs
    applies_to_all = True

    def __init__(self, config: EngineConfig) -> None: ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / 2


def test_a_processor_of_all_requests_leaves_processed_bounds(tiny_model_folder: Path) -> None:
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21, logits_processors=[Flatter]) as llm:
        output = llm.generate("the cat", asking(object_of(v={"enum": ["cat", "the"]})))[0]
        processed = output.outputs[0].fields(processed=True)
        assert [field.processed for field in llm.field_distributions(output)] == processed


def test_other_weights_give_no_part_of_an_answer(tiny_model_folder: Path) -> None:
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm:
        output = llm.generate("the cat", asking(object_of(v={"enum": ["cat", "the"]})))[0]
        sums = FieldSums(llm._loaded, SpellingTools(llm._loaded), output, None, index=0, max_rows=9)
        asks = sums.next_asks()
        llm.load_weights(tiny_model_folder, version="second")
        with pytest.raises(WeightsReplacedError):
            sums.take(asks, [np.zeros(1, np.float32)] * len(asks))
        with raises(ParameterError, parameter="output"):
            llm.field_distributions(output)


def test_cold_and_cached_alone_and_beside_others(fake: Fake) -> None:
    outputs = [fake.reply(asking(object_of(v=CASES[case][0]))) for case in CASES]

    async def together() -> list[list[FieldDistribution]]:
        return await asyncio.gather(*(fake.distributions(output) for output in outputs))

    def numbers(fields: list[FieldDistribution]) -> list[Any]:
        members = [one for field in fields for one in (field.members, field.grammar_members) if one]
        return [*(field.raw.logprob for field in fields), *(one.logprobs.tolist() for one in members)]

    fake.lm.clear_cache()
    fake.lm.clear_kv_cache()
    cold = list(map(numbers, asyncio.run(together())))
    cached = [numbers(asyncio.run(fake.distributions(output))) for output in outputs]
    assert cached == cold  # rows of the fake engine do not depend on the batch


# -- real weights --------------------------------------------------------------------------------------------

REVIEW = "Review: The food was cold and nobody smiled.\nIts sentiment as JSON: "


def test_a_grammar_gives_all_to_the_members(real_llm: LLM) -> None:
    names = ("sentiment", "stars", "sure")
    moods, stars = (
        {"enum": ["positive", "negative", "neutral"]},
        {"type": "integer", "minimum": 1, "maximum": 5},
    )
    schema = object_of(sentiment=moods, stars=stars, sure={"type": "boolean"})
    output = real_llm.generate(REVIEW, asking(schema))[0]
    fields = {field.pointer: field for field in real_llm.field_distributions(output)}
    said = json.loads(output.outputs[0].text)
    assert {name: fields[f"/{name}"].value for name in names} == said
    for name in names:
        field = fields[f"/{name}"]
        assert field.members is not None
        assert field.grammar_members is not None
        assert field.processed is not None
        assert field.raw.logprob == field.raw.upper
        assert field.grammar_members.mass == pytest.approx(1, abs=1e-5)
        assert field.members.unresolved <= 2e-7 * field.members.mass < 2e-7
        assert field.runner_up is not None
        assert field.runner_up[0] != field.value


def test_all_spellings_are_more_than_the_one_that_was_written(real_llm: LLM) -> None:
    """Under a grammar the likeliest tokens may spell a value in a way that the model alone would not."""
    values = ["positive", "negative", "neutral"]
    params = asking(object_of(sentiment={"enum": values}))
    output = real_llm.chat("Is the weather nice? Say how it feels.", params)[0]
    field = {field.pointer: field for field in real_llm.field_distributions(output)}["/sentiment"]
    members, token_ids = field.members, output.outputs[0].token_ids
    assert members is not None
    assert members.logprob_of(field.value) > field.raw.logprob + 1
    # Each probability is at least that of the usual spelling, here with the space before the quote.
    start = next(
        i for i in range(len(token_ids)) if real_llm.text.text_of(token_ids[: i + 1]) >= '{"sentiment": '
    )
    assert real_llm.text.text_of(token_ids[:start]) == '{"sentiment":'
    before = [*output.prompt_token_ids, *token_ids[:start]]
    usual = [real_llm.text.encode(f' "{value}"', add_special_tokens=False).tolist() for value in values]
    scores = [score.logprob for score in real_llm.score([(before, ids) for ids in usual])]
    assert np.all(members.logprobs >= np.array(scores) - 1e-4)


def test_a_front_door_in_an_event_loop_has_the_same_numbers(tiny_llm: LLM) -> None:
    params = asking(object_of(v={"enum": ["cat", "the", "and"]}, n={"enum": [1, 12]}))
    output = tiny_llm.generate("the cat", params)[0]
    blocking = tiny_llm.field_distributions(output)
    awaited = asyncio.run(async_twin(tiny_llm).field_distributions(output))
    for one, other in zip(blocking, awaited, strict=True):
        assert (one.pointer, one.value) == (other.pointer, other.value)
        assert one.raw.logprob == pytest.approx(other.raw.logprob, abs=1e-5)
        for mine, theirs in ((one.members, other.members), (one.grammar_members, other.grammar_members)):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                # Bits of a row depend on its batch here.
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=1e-4)


def test_the_weights_that_wrote_a_reply_answer(tiny_llm: LLM, adapter_folders: dict[str, Path]) -> None:
    def members(llm: LLM, output: RequestOutput) -> Any:
        [found] = [field.members for field in llm.field_distributions(output) if field.members is not None]
        return found.logprobs

    tiny_llm.add_lora("wide", adapter_folders["wide"])
    try:
        view = tiny_llm.with_lora("wide")
        output = view.generate("the cat", asking(object_of(v={"enum": ["cat", "the", "and"]})))[0]
        assert output.params is not None
        assert output.params.lora == "wide"
        own = members(tiny_llm, output)
        np.testing.assert_allclose(members(view, output), own, rtol=0, atol=1e-4)
        base = members(tiny_llm, replace(output, params=replace(output.params, lora=None)))
        assert np.abs(base - own).max() > 1e-2
        view.close()
        assert len(tiny_llm.field_distributions(output)) == 2
    finally:
        tiny_llm.remove_lora("wide")


# -- too few rows --------------------------------------------------------------------------------------------


def summed(fake: Fake, output: RequestOutput, max_rows_in_all: int) -> tuple[list[FieldDistribution], int]:
    """Compute the fields with a limit on rows shared by all values; return them and the rows used."""
    loaded = fake.model
    sums = FieldSums(loaded, SpellingTools(loaded), output, None, 0, MANY, max_rows_in_all=max_rows_in_all)
    count = 0
    while asks := sums.next_asks():
        count += len(asks)
        sums.take(asks, [fake.row(ask.token_ids.tolist()).astype(np.float32) for ask in asks])
    return sums.answer(), count


def test_values_share_few_rows_fairly(fake: Fake) -> None:
    names = object_of(a={"enum": ["ab", "c"]}, b={"enum": ["true", "v"]}, c={"enum": [10, 1, -1]})
    output = fake.reply(asking(names))
    whole = fake.fields(output)
    for most in (1, 7, 30, MANY):
        found, count = summed(fake, output, most)
        assert count <= most
        exact = most >= 30
        for field in found:
            other = whole[field.pointer]
            assert field.raw.logprob <= field.raw.upper
            if exact:
                assert field.raw.logprob == pytest.approx(other.raw.logprob, abs=1e-4)
            if field.members is None or other.members is None:
                assert other.members is None
                continue
            # At most the unresolved mass may be missing.
            missing = np.exp(other.members.logprobs) - np.exp(field.members.logprobs)
            assert np.all(missing < field.members.unresolved + 1e-6)
    unresolved = [field.members.unresolved for field in summed(fake, output, 30)[0] if field.members]
    assert max(unresolved) < 1, "each had some"


def test_values_that_name_too_many_members_for_their_rows_have_none(fake: Fake) -> None:
    many = {"enum": [f"ab{number}" for number in range(150)] + ["c"]}
    output = fake.reply(asking(object_of(a=many, b=many)))
    members = {field.pointer: field.members for field in summed(fake, output, 2)[0]}
    assert (members["/a"] is None, members["/b"] is None) == (False, True)
    members = {field.pointer: field.members for field in summed(fake, output, 1)[0]}
    assert (members["/a"] is None, members["/b"] is None) == (True, True)


# -- invalid requests ----------------------------------------------------------------------------------------


def test_what_cannot_be_asked_names_the_parameter_and_a_remedy(fake: Fake) -> None:
    enum = object_of(v={"enum": ["a", "ab"]})
    good = fake.reply(asking(enum))
    for parameter, remedy, output, more in [
        ("schema", r"completion\.fields\(\)", good, {"schema": {"type": "object"}}),
        ("schema", "must be a JSON schema", good, {"schema": "enum"}),
        ("schema", "pass a schema", fake.reply(asking(None, max_tokens=1)), {"schema": None}),
        ("schema", "does not exist", good, {"schema": {"enum": [1], "$ref": "#/$defs/none"}}),
        ("text", "response_format|own text", fake.reply(asking(None, max_tokens=3)), {"schema": enum}),
        ("text", "enough max_tokens", fake.reply(asking(enum, max_tokens=2)), {}),
        (
            "logprobs",
            "set logprobs=0",
            fake.reply(asking(enum, logprobs=None, logprobs_mode="raw_logprobs")),
            {},
        ),
        (
            "logprobs",
            "logprobs_mode='both'",
            fake.reply(asking(enum, logprobs_mode="processed_logprobs")),
            {},
        ),
        ("index", "one of 1 completions", good, {"index": 1}),
        ("max_rows", "positive", good, {"max_rows": 0}),
    ]:
        with raises(ParameterError, parameter=parameter, match=remedy):
            fake.fields(output, **more)
    with raises(ParameterError, parameter="output", match="replaced"):
        fake.fields(replace(good, weights_number=7))
    with raises(ParameterError, parameter="output", match="RequestOutput"):
        asyncio.run(fake.distributions(good.outputs[0]))
    members = fake.fields(good)["/v"].members
    assert members is not None
    with raises(ParameterError, parameter="value", match="not a member"):
        members.logprob_of("b")
