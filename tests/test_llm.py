"""`LLM`: outputs and scores."""

from __future__ import annotations

import copy
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import LLM, SamplingParams, __version__
from logprobe.errors import PromptTooLongError
from logprobe.testing import watching_steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONTEXT_LEN = 128
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def reference(tiny_model_folder: Path) -> Callable[[list[int]], Any]:
    """Return teacher-forced log-probabilities by transformers: (num_tokens, vocabulary) after each token."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, attn_implementation="eager").eval()

    @torch.no_grad()
    def logprobs(ids: list[int]) -> Any:
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy()

    return logprobs


def completion(llm: LLM, prompt: Any, **params: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**params))[0].outputs[0]


# -- generate ----------------------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts(tiny_llm: LLM) -> None:
    prompts = ["the cat", [5, 6, 7], "a dog and the cat", [9]]
    outputs = tiny_llm.generate(prompts, SamplingParams(max_tokens=3))
    assert [output.prompt for output in outputs] == ["the cat", None, "a dog and the cat", None]
    assert outputs[1].prompt_token_ids == [5, 6, 7]
    assert len({output.request_id for output in outputs}) == 4


def test_each_prompt_may_have_its_own_parameters(tiny_llm: LLM) -> None:
    asked = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 4)]
    outputs = tiny_llm.generate(["a", "b"], asked)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 4]


def test_results_are_compared_by_their_numbers(tiny_llm: LLM) -> None:
    def results() -> list[Any]:
        params = SamplingParams(max_tokens=2, logprobs=1, seed=1, return_hidden_states=[-1])
        labelled = tiny_llm.classify(["the cat", "a dog"], [" and", " of"])
        return [
            *labelled,
            *tiny_llm.surprisal(["the cat", "a dog"]),
            tiny_llm.minimal_pairs([("the cat", "cat the"), ("a dog", "dog a")]),
            tiny_llm.generate("the cat", params)[0].outputs[0],
        ]

    one, other = results(), results()
    assert one == other
    assert one[0] != one[1]
    assert one[2] not in (other[3], other[5])


def test_a_copied_output_keeps_the_texts_of_its_tokens(tiny_llm: LLM) -> None:
    output = tiny_llm.generate("the cat", SamplingParams(max_tokens=2, logprobs=1))[0].outputs[0]
    assert output.logprobs is not None
    text = output.logprobs.chosen(0)[1].decoded_token
    assert text is not None
    for record in (copy.copy(output.logprobs), copy.deepcopy(output).logprobs):
        assert record == output.logprobs
        assert record.chosen(0)[1].decoded_token == text
        assert record.info == output.logprobs.info


def test_no_prompts_give_no_outputs(tiny_llm: LLM) -> None:
    assert tiny_llm.generate([]) == []
    assert tiny_llm.score([]) == []


def test_prompt_logprobs_equal_transformers(tiny_llm: LLM, reference: Callable[..., Any]) -> None:
    ids = [5, 6, 7, 100, 200, 30, 31]
    output = tiny_llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=-1))[0]
    want = reference(ids)
    assert output.prompt_logprobs[0] is None
    for position in range(1, len(ids)):
        row = output.prompt_logprobs[position]
        got = np.array([row[token_id].logprob for token_id in range(len(row))])
        np.testing.assert_allclose(got, want[position - 1], atol=TOLERANCE)
        assert next(iter(row)) == ids[position]
        assert row[ids[position]].rank == 1 + (got > got[ids[position]]).sum()


def test_greedy_tokens_are_the_most_likely_and_their_sum_is_cumulative(
    tiny_llm: LLM, reference: Callable[..., Any]
) -> None:
    ids = [5, 6, 7]
    got = completion(tiny_llm, [ids], max_tokens=6, temperature=0, logprobs=2, ignore_eos=True)
    want = reference(ids + got.token_ids)[len(ids) - 1 : -1]
    assert got.token_ids == want.argmax(-1).tolist()
    assert got.cumulative_logprob == pytest.approx(want.max(-1).sum(), abs=10 * TOLERANCE)


def test_progress_is_shown_on_stderr_and_changes_nothing(
    tiny_llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = SamplingParams(max_tokens=2, seed=1)
    shown = tiny_llm.generate(["a", "b"], asked, progress=True)
    silent = tiny_llm.generate(["a", "b"], asked)
    assert [one.outputs[0].token_ids for one in shown] == [one.outputs[0].token_ids for one in silent]
    assert not capsys.readouterr().out


# -- seeds and best_of -------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others(tiny_llm: LLM) -> None:
    def draw(seed: int | None) -> list[list[int]]:
        asked = SamplingParams(n=2, seed=seed, max_tokens=12, temperature=1.5, ignore_eos=True)
        return [one.token_ids for one in tiny_llm.generate("the", asked)[0].outputs]

    seeds = (0, 1, -1, 2**70, None)
    draws = [tokens for seed in seeds for tokens in draw(seed)]
    assert draw(-1) == draw(-1)
    assert draw(2**70) == draw(2**70)
    assert len({tuple(tokens) for tokens in draws}) == 10, "streams coincide"
    assert draw(None) != draw(None)


@pytest.mark.parametrize("logprobs", [None, 3])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "both"])
def test_best_of_returns_the_best_by_mean_raw_logprob(
    tiny_llm: LLM, reference: Callable[..., Any], logprobs: int | None, mode: Any
) -> None:
    ids = [5, 6, 7]
    params: dict[str, Any] = {"seed": 4, "max_tokens": 8, "temperature": 1.5, "top_k": 20}
    params |= {"logprobs": logprobs, "logprobs_mode": mode}
    drawn = tiny_llm.generate([ids], SamplingParams(n=5, **params))[0].outputs

    def mean(tokens: list[int]) -> float:
        rows = reference(ids + tokens)[len(ids) - 1 : -1]
        return float(np.mean([row[token] for row, token in zip(rows, tokens, strict=True)]))

    want = sorted((one.token_ids for one in drawn), key=mean, reverse=True)[:2]
    kept = tiny_llm.generate([ids], SamplingParams(n=2, best_of=5, **params))[0].outputs
    assert [one.token_ids for one in kept] == want
    assert [one.index for one in kept] == [0, 1]
    for one in kept:
        assert (one.logprobs is None) == (logprobs is None)
        assert (one.cumulative_logprob is None) == (logprobs is None)
        assert (one.processed_logprobs is not None) == (logprobs is not None and mode == "both")


# -- stops -------------------------------------------------------------------------------------------------


def greedy_text(llm: LLM, **params: Any) -> Any:
    return completion(llm, [[5, 6, 7]], max_tokens=12, temperature=0, ignore_eos=True, **params)


def bytes_of(llm: LLM, token_ids: list[int]) -> bytes:
    return bytes(llm.text.bytes_of(token_ids))


@pytest.fixture
def spelling_llm(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make the tiny model generate given tokens."""
    sampler = tiny_llm.engine.core.engine.sampling._sampler
    plain = sampler.draw

    def say(text: str, **params: Any) -> Any:
        script = iter(tiny_llm.text.encode(text, add_special_tokens=False).tolist() + [1] * 20)

        def draw(logits: Any, asked: Any, uniforms: Any, changed: Any = None, forced: Any = ()) -> Any:
            logits = np.full_like(logits, -1.0)
            logits[:, next(script)] = 10.0
            return plain(logits, asked, uniforms, changed, forced)

        monkeypatch.setattr(sampler, "draw", draw)
        return completion(tiny_llm, [[5]], max_tokens=20, temperature=0, **params)

    return say


@pytest.mark.parametrize(
    ("said", "stop", "text", "reason"),
    [
        ("the cat and", "at", "the c", "at"),  # within a token
        ("the cat and", "cat and", "the ", "cat and"),  # across several tokens
        ("the cat and", ["and", "e c"], "th", "e c"),  # the first of several
        ("the cat and", ["cat", "ca"], "the ", "ca"),  # two that begin at the same place
        ("the cat", "t", "", "t"),  # at once
        ("dög é 😀!", "é 😀", "dög ", "é 😀"),  # multi-byte characters
        ("dög é 😀!", "😀", "dög é ", "😀"),
        ("the cat", "dog", "the cat", None),  # never: EOS ends it
    ],
)
def test_a_stop_string_ends_the_text_before_itself(
    spelling_llm: Callable[..., Any], said: str, stop: Any, text: str, reason: str | None
) -> None:
    got = spelling_llm(said, stop=stop)
    assert (got.text, got.finish_reason, got.stop_reason) == (text, "stop", reason)
    included = spelling_llm(said, stop=stop, include_stop_str_in_output=True)
    assert (included.text, included.token_ids) == (text + (reason or ""), got.token_ids)


def test_a_character_cut_by_the_token_limit_shows_as_a_replacement(
    spelling_llm: Callable[..., Any], tiny_llm: LLM
) -> None:
    ids = tiny_llm.text.encode("a😀", add_special_tokens=False)
    assert len(ids) > 3
    got = spelling_llm("a😀", stop_token_ids=[int(ids[-1])])
    assert got.text == "a😀"
    assert tiny_llm.text.bytes_of(ids[:-1]).decode("utf-8", "replace") == "a\ufffd"


def test_eos_ends_the_text_and_is_not_part_of_it(spelling_llm: Callable[..., Any]) -> None:
    got = spelling_llm("the cat")
    assert (got.text, got.finish_reason, got.stop_reason) == ("the cat", "stop", None)
    assert got.token_ids[-1] == 1


def test_ignore_eos_goes_on_to_the_token_limit(spelling_llm: Callable[..., Any]) -> None:
    got = spelling_llm("the", ignore_eos=True)
    assert (got.finish_reason, len(got.token_ids)) == ("length", 20)


def test_a_stop_token_is_named_as_the_reason(tiny_llm: LLM) -> None:
    whole = greedy_text(tiny_llm)
    third = whole.token_ids[2]
    got = greedy_text(tiny_llm, stop_token_ids=[third, 250])
    cut = whole.token_ids[: whole.token_ids.index(third) + 1]
    assert (got.token_ids, got.finish_reason, got.stop_reason) == (cut, "stop", third)


# -- lengths -----------------------------------------------------------------------------------------------


def test_no_tokens_asked_ends_at_once(tiny_llm: LLM) -> None:
    got = completion(tiny_llm, "the cat", max_tokens=0)
    assert (got.token_ids, got.text, got.finish_reason) == ([], "", "length")


def test_a_prompt_of_one_token_has_one_position_without_numbers(tiny_llm: LLM) -> None:
    output = tiny_llm.generate([[7]], SamplingParams(max_tokens=0, prompt_logprobs=3))[0]
    assert list(output.prompt_logprobs) == [None]
    output = tiny_llm.generate([[7]], SamplingParams(max_tokens=2, prompt_logprobs=3, ignore_eos=True))[0]
    assert list(output.prompt_logprobs) == [None]
    assert len(output.outputs[0].token_ids) == 2


def test_a_prompt_that_fills_the_context_still_gets_one_token(tiny_llm: LLM) -> None:
    got = completion(tiny_llm, [[5] * CONTEXT_LEN], max_tokens=9, ignore_eos=True)
    assert (len(got.token_ids), got.finish_reason) == (1, "length")


def test_a_scored_prompt_may_be_one_token_longer_than_the_context(
    tiny_llm: LLM, reference: Callable[..., Any]
) -> None:
    ids = ([5, 6, 7, 8, 9] * 30)[: CONTEXT_LEN + 1]
    output = tiny_llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
    want = [row[token_id] for row, token_id in zip(reference(ids[:-1]), ids[1:], strict=True)]
    got = [next(iter(row.values())).logprob for row in list(output.prompt_logprobs)[1:]]
    np.testing.assert_allclose(got, want, atol=TOLERANCE)
    with pytest.raises(PromptTooLongError, match="130 tokens, but at most 129"):
        tiny_llm.generate([[*ids, 5]], SamplingParams(max_tokens=0, prompt_logprobs=0))
    with pytest.raises(PromptTooLongError, match="129 tokens, but at most 128"):
        tiny_llm.generate([ids], SamplingParams(max_tokens=1))


# -- score -------------------------------------------------------------------------------------------------


def harness_split(llm: LLM, context: str, continuation: str) -> tuple[list[int], int]:
    """Encode like lm-evaluation-harness: return the joined text's ids, and where they are split."""

    def encode(text: str) -> list[int]:
        return llm.text.encode(text).tolist()

    if context == "":
        return encode(continuation), 1  # BOS is the context
    num_spaces = len(context) - len(context.rstrip())
    if num_spaces:
        continuation = context[-num_spaces:] + continuation
        context = context[:-num_spaces]
    return encode(context + continuation), len(encode(context))


MERGES_AT_BOUNDARY = ("th", "e cat")
PAIRS = [
    ("the cat", " and the dog"),
    ("the cat ", "and the dog"),
    ("the cat \n ", "and"),
    ("", "the cat"),
    MERGES_AT_BOUNDARY,
    ("the cat and ", " the dog"),
    ("né", "é 😀"),
]


def test_a_continuation_that_merges_into_its_context_is_scored_as_the_token_they_make(tiny_llm: LLM) -> None:
    merged = tiny_llm.score([("th", "e")])[0]
    assert merged.token_ids == tiny_llm.text.encode("the").tolist()[-1:]


@pytest.mark.parametrize(("context", "continuation"), PAIRS)
def test_a_score_is_the_teacher_forced_sum_split_as_the_harness_does(
    tiny_llm: LLM, reference: Callable[..., Any], context: str, continuation: str
) -> None:
    ids, cut = harness_split(tiny_llm, context, continuation)
    score = tiny_llm.score([(context, continuation)], boundary="token")[0]
    usual = tiny_llm.score([(context, continuation)])[0]
    assert usual.boundary == ("bytes" if (context, continuation) == MERGES_AT_BOUNDARY else "token")
    if usual.boundary == "token":
        assert (usual.token_ids, usual.num_bytes) == (score.token_ids, score.num_bytes)
        assert usual.logprob == pytest.approx(score.logprob, abs=10 * TOLERANCE)
    after = ids[cut:]
    rows = reference(ids)[cut - 1 : -1]
    want = [row[token_id] for row, token_id in zip(rows, after, strict=True)]
    assert score.token_ids == after
    np.testing.assert_allclose(score.token_logprobs, want, atol=TOLERANCE)
    assert score.logprob == pytest.approx(sum(want), abs=10 * TOLERANCE)
    assert score.is_greedy == all(row.argmax() == token for row, token in zip(rows, after, strict=True))
    assert score.num_tokens == len(after)


def test_scores_of_ids_equal_scores_of_the_same_text(tiny_llm: LLM) -> None:
    before = tiny_llm.text.encode("the cat").tolist()
    after = tiny_llm.text.encode(" and the dog", add_special_tokens=False).tolist()
    by_text, by_ids = tiny_llm.score([("the cat", " and the dog"), (before, after)])
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.logprob == pytest.approx(by_ids.logprob, abs=TOLERANCE)
    assert by_ids.num_bytes == len(" and the dog")


def test_an_empty_context_of_ids_becomes_bos(tiny_llm: LLM) -> None:
    by_text, by_ids = tiny_llm.score([("", "the"), ([], [259])])
    assert by_text.token_ids == by_ids.token_ids == [259]
    assert by_text.logprob == pytest.approx(by_ids.logprob, abs=TOLERANCE)


def test_a_greedy_continuation_is_said_to_be_greedy(tiny_llm: LLM) -> None:
    ids = greedy_text(tiny_llm).token_ids
    greedy, other = tiny_llm.score([([5, 6, 7], ids), ([5, 6, 7], [ids[0], (ids[1] + 1) % 250])])
    assert (greedy.is_greedy, other.is_greedy) == (True, False)


def test_contexts_that_pairs_share_are_computed_once(tiny_model_folder: Path) -> None:
    counts: list[int] = []
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 20) as llm:
        context = list(range(2, 102))
        with watching_steps(llm, lambda batch: counts.append(len(batch.token_ids))):
            scores = llm.score([(context, [answer, 3]) for answer in (10, 20, 30, 40)])
    assert sum(counts) == 100 + 4  # the context once, the first token of each answer
    assert len({score.logprob for score in scores}) == 4


# -- metadata of records -----------------------------------------------------------------------------------


def test_containers_say_what_they_hold(tiny_llm: LLM, tiny_model_folder: Path) -> None:
    asked = SamplingParams(
        max_tokens=2, temperature=0.7, top_k=9, top_p=0.9, min_p=0.01,
        logprobs=5, prompt_logprobs=-1, logprobs_mode="both",
    )  # fmt: skip
    output = tiny_llm.generate("the cat", asked)[0]
    able = tiny_llm.engine.capabilities()
    source = {"engine": "native", "model": str(tiny_model_folder), "logits_dtype": "float32", "unit": "nats"}
    source |= {"weights": able.weights, "layers": "2 by the native decoder"}
    source |= {"arithmetic": "fma", "logprobe_version": __version__}
    source |= {"verified_against": f"transformers {version('transformers')}"}
    source |= {"probe_difference": able.layout.probe_difference, "weight_version": able.weight_version}
    vocab_size = able.vocab_size
    settings = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01}
    raw, processed = output.outputs[0].logprobs.info, output.outputs[0].processed_logprobs.info

    def facts(info: Any) -> dict[str, Any]:
        return {name: value for name, value in info.to_dict().items() if value is not None}

    five = {"num_logprobs_asked": 5, "num_logprobs": 5, "generator": "philox4x64-10", **source}
    whole = {"num_logprobs_asked": -1, "num_logprobs": vocab_size, **source}
    assert facts(output.prompt_logprobs.info) == {"stages": ("raw",), **whole}
    assert facts(raw) == {"stages": ("raw",), **five}
    assert facts(processed) == {"stages": ("processed",), **five, **settings}
    assert facts(output.info) == {"stages": ("raw", "processed"), **five, **settings}


def test_only_sampled_tokens_have_a_generator(tiny_llm: LLM) -> None:
    def generators(**params: Any) -> list[str | None]:
        output = tiny_llm.generate("the cat", SamplingParams(max_tokens=2, logprobs=0, **params))[0]
        return [output.info.generator, output.outputs[0].logprobs.info.generator]

    assert generators(temperature=1.0) == ["philox4x64-10"] * 2
    assert generators(temperature=1.0, logprobs_mode="processed_logprobs") == ["philox4x64-10"] * 2
    assert generators(temperature=0) == [None, None]
    [score] = tiny_llm.score([("the cat", " and")])
    assert score.record is not None
    assert score.record.info.generator is None


def test_processed_only_is_said_on_the_one_container(tiny_llm: LLM) -> None:
    asked = SamplingParams(max_tokens=2, logprobs=0, logprobs_mode="processed_logprobs")
    output = tiny_llm.generate("the cat", asked)[0]
    assert output.outputs[0].logprobs.info.stages == ("processed",)
    assert output.outputs[0].processed_logprobs is None


def test_nothing_asked_is_nothing_described(tiny_llm: LLM) -> None:
    output = tiny_llm.generate("the cat", SamplingParams(max_tokens=1))[0]
    assert output.info is None
    only_prompt = tiny_llm.generate("the cat", SamplingParams(max_tokens=1, prompt_logprobs=1))[0]
    assert only_prompt.info == only_prompt.prompt_logprobs.info
