"""Uses of the public names, checked by `mypy --strict` (make check) and never run."""

from typing import assert_type

from logprobe import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    EngineConfig,
    FlatLogprobs,
    Logprob,
    LogprobeError,
    RemoteLLM,
    RequestOutput,
    SamplingParams,
    Score,
    __version__,
)
from logprobe.analysis import (
    Classification,
    FieldDistribution,
    Judgement,
    LowConfidence,
    MaskedLM,
    Members,
    RolloutReport,
    ScoredText,
    Uncertainty,
    binoculars,
    compare_rollouts,
    read_rollouts,
    write_rollouts,
)
from logprobe.compat.logprobs_processor import (
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplerOutput,
    TokenLogprob,
    TopLogprobs,
)
from logprobe.compat.vllm_logprobs import (
    LogprobsOnePosition,
    PromptLogprobs,
    append_logprobs_for_next_position,
    create_prompt_logprobs,
    create_sample_logprobs,
)
from logprobe.errors import BatchError, ParameterError
from logprobe.next_token import AsyncLM

assert_type(__version__, str)


def generate_one_and_many(llm: LLM) -> list[str]:
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3, stop=["\n"])
    outputs = llm.generate("a text", params)
    outputs += llm.generate(["one", "two"], [params, params], progress=True, on_error="return")
    outputs += llm.generate([1, 2, 3])
    outputs += llm.chat([{"role": "user", "content": "hello"}], params)
    outputs += llm.chat("hello", sampling_params=params)
    outputs += list(llm.stream("a text", params))
    outputs += llm.generate([{"prompt": "one"}], sampling_params=params)
    outputs += llm.generate({"prompt_token_ids": [1, 2]})
    assert_type(llm.with_lora("legal"), LLM)
    return [completion.text for output in outputs for completion in output.outputs]


async def generate_without_blocking(llm: AsyncLLM) -> list[str]:
    params = SamplingParams(max_tokens=4)
    outputs = await llm.generate(["one", "two"], params, on_error="return")
    assert_type(outputs, list[RequestOutput])
    assert_type(await llm.score([("a", " b")]), list[Score])
    assert_type(await llm.load_weights("folder"), str)
    async for output in llm.stream("a text", params):
        assert_type(output, RequestOutput)
    return [completion.text for output in outputs for completion in output.outputs]


def read_logprobs(llm: LLM) -> float:
    (output,) = llm.generate("a text", SamplingParams(max_tokens=1, logprobs=3, prompt_logprobs=0))
    flat = output.outputs[0].logprobs
    assert_type(flat, FlatLogprobs | None)
    assert flat is not None
    assert_type(flat[0:1], FlatLogprobs)
    position = flat[0]
    assert_type(position, LogprobsOnePosition | None)
    chosen = flat.chosen(0)
    assert_type(chosen, tuple[int, Logprob] | None)
    assert position is not None
    return sum(entry.logprob for entry in position.values())


async def ask_rows(near: AsyncLM, url: str) -> float:
    async with RemoteLLM(url, "key", timeout=0.01, request_timeout=30.0) as far:
        lm: AsyncLM | RemoteLLM
        for lm in (near, far):
            rows = await lm.batch_next_token_logprobs([[1, 2], [1, 3]], lora="legal")
            known = await lm.extend(await lm.start([1, 2]), 3)
            drawn: list[int] = await lm.sample([1, 2], 8, [0], seed=1, top_p=0.9, logprobs=3)
            assert drawn
        return float(rows[0, 5] + known.logprobs[5])


def score_pairs(llm: LLM) -> list[bool]:
    scores = llm.score([("The sky is", " blue"), ("The sky is", " green")])
    total: float = sum(score.logprob / score.num_bytes for score in scores)
    assert_type(scores[0].token_logprobs, list[float])
    return [score.is_greedy and total < 0 for score in scores]


def grow_a_record() -> PromptLogprobs:
    record = create_prompt_logprobs(flat_logprobs=True)
    append_logprobs_for_next_position(record, [7, 8], [-0.1, -2.5], [" a", " b"], 1, 1)
    sample = create_sample_logprobs(flat_logprobs=False)
    append_logprobs_for_next_position(sample, [7, 8], [-0.1, -2.5], [" a", " b"], 1, 1)
    return record


def small_values(step: LogprobsTensors) -> tuple[list[TokenLogprob], int]:
    top = TopLogprobs.from_array(0, [-0.1, -2.5], [7, 8], [" a", " b"], 0, k=2)
    return sorted(top.top_k), step.ranks.shape[0]


def a_step(output: ModelRunnerOutput) -> tuple[SamplerOutput, LogprobsLists | LogprobsTensors | None]:
    return output.sampler_output, output.sampler_output.logprobs


def read_outputs(llm: LLM) -> tuple[list[Score], list[CompletionOutput]]:
    assert_type(llm.config, EngineConfig)
    outputs: list[RequestOutput] = llm.generate(["a text"])
    scores: list[Score] = llm.score([("a", " text")])
    return scores, [completion for output in outputs for completion in output.outputs]


def columns_of(record: FlatLogprobs) -> FlatLogprobs:
    ids: list[int] = record.token_ids + record.token_ids
    return FlatLogprobs.from_columns([0], [1], ids, record.logprobs, record.ranks)


def with_errors() -> str:
    try:
        with LLM("smollm2", max_model_len=512, seed=1) as llm:
            llm.generate("a text", SamplingParams(temperature=-1.0))
    except ParameterError as error:
        return error.parameter
    except BatchError as error:
        return str(sorted(error.errors))
    except LogprobeError as error:
        return str(error)
    return ""


async def ask_for_fields(llm: LLM, lm: AsyncLLM) -> list[float]:
    (output,) = llm.generate("a text", SamplingParams(logprobs=0))
    fields = llm.field_distributions(output, {"enum": ["a", "b"]})
    fields += await lm.field_distributions(output, max_rows=9)
    assert_type(fields, list[FieldDistribution])
    assert_type(fields[0].members, Members | None)
    return [field.members.rest for field in fields if field.members is not None]


async def ask_for_labels(llm: LLM, lm: AsyncLLM) -> list[float]:
    found = llm.classify("the cat", [" sat", " ran"], correction="length")
    assert_type(found, list[Classification])
    assert_type(await lm.classify(["a", "b"], {"c": ["d", "e"]}), list[Classification])
    assert_type(await lm.judge([{"role": "user", "content": "Grade it."}]), list[Judgement])
    return await lm.with_lora("legal").rerank("a", ["b"]) + llm.rerank("a", ["b"], task="c")


def ask_as_a_linguist(llm: LLM, bert: MaskedLM) -> list[float]:
    [text] = llm.surprisal("the cat", boundary="end", unit="bits", bos=True)
    assert_type(text, ScoredText)
    found = llm.minimal_pairs([("a", "b")], ["kind"])
    assert_type(found.by_category["kind"].error, float | None)
    masked = bert.score(["the cat"], metric="original")
    known = [value for value in binoculars(llm, llm, ["the cat"]) if value is not None]
    return [found.accuracy.mean, masked[0].logprob, *(word.surprisal or 0.0 for word in text.words), *known]


async def ask_how_sure(llm: LLM, lm: AsyncLLM) -> list[float]:
    params, rule = SamplingParams(max_tokens=64, seed=1), LowConfidence(threshold=2.0, window=16, k=5)
    found = llm.uncertainty("the cat", 5, params, same=lambda a, b: a.lower() == b.lower(), stop_when=rule)
    assert_type(found, Uncertainty)
    talk = [{"role": "user", "content": "Is it a cat?"}]
    assert_type(await lm.uncertainty(talk, n=5, self_certainty=True), Uncertainty)
    return [found.semantic_entropy, *(answer.lowest_group_confidence for answer in found.answers)]


def compare_stored_samples(llm: LLM) -> float:
    outputs = llm.generate("a text", SamplingParams(max_tokens=1, logprobs=0))
    write_rollouts("rollout.parquet", outputs)
    report = compare_rollouts("rollout.parquet", llm, temperature=0.7)
    assert_type(report, RolloutReport)
    others = compare_rollouts(read_rollouts("rollout.parquet"), "trainer.parquet")
    return report.as_stored.kl.mean if report.corrected is None else others.as_stored.worst_nats
