"""Uses of the public names, checked by `mypy --strict` (make check) and never run."""

from dataclasses import replace
from typing import Any, assert_type

import torch

from logprobe import (
    LLM,
    AsyncLLM,
    CacheConfig,
    CompletionOutput,
    EngineConfig,
    FlatLogprobs,
    LoadConfig,
    Logprob,
    LogprobeError,
    ParallelConfig,
    RemoteLLM,
    RequestOutput,
    SamplingParams,
    SchedulerConfig,
    Score,
    __version__,
)
from logprobe.analysis import (
    Classification,
    FieldDistribution,
    Judgement,
    LogitLens,
    LowConfidence,
    MaskedLM,
    Members,
    MinimalPairs,
    Perplexity,
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
from logprobe.next_token import AsyncLM, Token
from logprobe.next_token.rows import KnownPrefix, Row, SampledIds, TopTokens

assert_type(__version__, str)


def configure() -> EngineConfig:
    flat = EngineConfig(model="smollm2", device=torch.device("cuda", 1), max_num_seqs=8, process=True)
    grouped = EngineConfig(
        cache_config=CacheConfig(kv_cache_memory_bytes=1 << 30, kv_cache_dtype="bfloat16"),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=256, async_scheduling=True, speculate=True),
        parallel_config=ParallelConfig(data_parallel_size=2),
        load_config=LoadConfig(weights="checkpoint", arithmetic="bf16x3"),
    )
    EngineConfig(max_num_seq=8)  # type: ignore[call-arg]
    EngineConfig(max_num_seqs="8")  # type: ignore[arg-type]
    assert_type(grouped.scheduler_config.max_num_seqs, int)
    assert_type(grouped.cache_config.kv_cache_memory_bytes, int | None)
    assert_type(flat.keywords(), dict[str, Any])
    return replace(flat, load_config=grouped.load_config)


def open_with_settings() -> None:
    with LLM("smollm2", dtype=torch.float32, max_num_seqs=8, kv_cache_dtype="auto", max_logprobs=5) as llm:
        assert_type(llm.config, EngineConfig)
    LLM("smollm2", max_num_seq=8)  # type: ignore[call-arg]
    AsyncLLM("smollm2", scheduler_config=SchedulerConfig(max_num_seqs=8), engine="vllm", engine_options={})


def describe(llm: LLM) -> str:
    assert_type(llm.text.encode("a text").tolist(), Any)
    assert_type(llm.text.text_of([1, 2]), str)
    assert_type(llm.text.bytes_of([1, 2]), bytes)
    assert_type(llm.engine.capabilities().max_num_seqs, int)
    llm.engine.forget_prefixes()
    counters = {} if llm.processors is None else llm.processors.counters
    return f"{llm.engine.stats()} {counters} {llm.tokenizer}"


def change_weights(llm: LLM) -> None:
    llm.add_lora("legal", "folder")
    assert_type(llm.list_loras(), dict[str, str])
    assert_type(llm.with_lora("legal").lora, str | None)
    llm.remove_lora("legal")
    assert_type(llm.load_weights({"weight": torch.zeros(1)}, version="1", on_running="end"), str)
    llm.close()


async def change_weights_without_blocking(llm: AsyncLLM) -> None:
    await llm.add_lora("legal", "folder")
    assert_type(llm.list_loras(), dict[str, str])
    assert_type(llm.with_lora("legal"), AsyncLLM)
    await llm.remove_lora("legal")
    await llm.close()


async def score_whole_texts(llm: LLM, lm: AsyncLLM) -> None:
    assert_type(llm.perplexity("a text", stride=8, window=16), Perplexity)
    assert_type(await lm.perplexity(["a ", "text"]), Perplexity)
    assert_type(await lm.surprisal(["a text"]), list[ScoredText])
    assert_type(await lm.minimal_pairs([("a", "b")]), MinimalPairs)
    assert_type(await lm.chat("hello"), list[RequestOutput])


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


async def use_remote_rows(far: RemoteLLM) -> None:
    assert_type(await far.next_token_logprobs([1, 2]), Row)
    assert_type(far.next_token_logprobs_sync([1, 2]), Row)
    assert_type(far.batch_next_token_logprobs_sync([[1], [2]]), Row)
    assert_type(await far.next_token_logprobs_for([1, 2], [5, 6]), Row)
    assert_type(await far.next_token_topk([1, 2], 3), TopTokens)
    assert_type(await far.trie_logprobs([[1, 2], [1, 3]]), dict[tuple[int, ...], Row])
    assert_type(await far.start([1]), KnownPrefix[Row])
    assert_type(await far.sample([1, 2], 8, [0]), SampledIds)
    assert_type(await far.batch_sample([[1], [2]], 8, [0]), list[SampledIds])
    params = SamplingParams(logprobs=1)
    assert_type(await far.generate(["one", "two"], params), list[RequestOutput])
    assert_type(await far.score([("a", " b")], unconditional=True, lora="legal"), list[Score])
    far.set_lora("legal")
    far.clear_lora()
    far.clear_cache()
    far.reset_async_queries()
    assert_type(far.list_loras(), dict[str, str])
    assert_type((far.vocab_size, far.batch_size, far.timeout), tuple[int, int, float])
    assert_type((far.byte_vocab, far.str_vocab), tuple[list[Token], list[str]])
    far.tokenizer.encode("a text")
    far.close()


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


async def ask_for_activations(llm: LLM, lm: AsyncLLM) -> list[tuple[str, float]]:
    params = SamplingParams(return_hidden_states=[0, -1], return_routed_experts=True)
    (output,) = llm.generate("a text", params)
    SamplingParams(routed_experts=output.replayed_experts())
    assert_type(llm.logit_lens("a text"), LogitLens)
    lens = await lm.logit_lens("a text", [0], logprobs=2)
    return lens.top(0, -1)


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
