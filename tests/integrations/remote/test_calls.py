"""Completions and scores from a server are those of the engine in this process."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import RemoteLLM, SamplingParams
from logprobe.errors import EngineClosedError, ParameterError, PromptTooLongError, ServerError
from logprobe.integrations.remote import calls
from logprobe.integrations.remote.link import TOKEN_BYTES, Link
from logprobe.server import ServerSettings
from logprobe.server.http import replies
from logprobe.transport.http_client import HttpReply
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe import LLM

PROMPTS: list[Any] = ["the cat", [5, 6, 7], {"prompt": "a dog"}, {"prompt_token_ids": [9], "prompt": "x"}]


@pytest.fixture(scope="module")
def far(tiny_llm: LLM, new_serving: Any) -> Iterator[RemoteLLM]:
    with (
        new_serving(tiny_llm, ServerSettings(max_logprobs=-1)) as (url, _),
        RemoteLLM(url, request_timeout=60) as far,
    ):
        yield far


def facts_of(output: Any) -> list[Any]:
    return [output.prompt, output.prompt_token_ids, output.prompt_logprobs] + [
        (one.index, one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs)
        for one in output.outputs
    ]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=6, seed=3, n=2, logprobs=3, prompt_logprobs=2, top_p=0.9),
        SamplingParams(max_tokens=3, temperature=0, logprobs=0, stop=["e"], logit_bias={7: 1.5}),
        SamplingParams(max_tokens=2, temperature=0, logprobs=-1, prompt_logprobs=-1),
        SamplingParams(max_tokens=4, seed=1, n=1, best_of=3, ignore_eos=True, stop_token_ids=[9]),
        SamplingParams(max_tokens=0, prompt_logprobs=1),
    ],
    ids=["sampled", "greedy", "whole", "best", "scored"],
)
def test_completions_are_those_of_the_engine(far: RemoteLLM, tiny_llm: LLM, params: SamplingParams) -> None:
    near = tiny_llm.generate(PROMPTS, params)
    found = asyncio.run(far.generate(PROMPTS, params))
    assert [*map(facts_of, found)] == [*map(facts_of, near)]
    for one, own in zip(found, near, strict=True):
        assert (one.info is None) == (params.logprobs is None and params.prompt_logprobs is None)
        for completion, same in zip(one.outputs, own.outputs, strict=True):
            assert completion.cumulative_logprob == pytest.approx(same.cumulative_logprob)
            if completion.logprobs is not None and same.logprobs is not None:
                assert completion.logprobs.ranks == same.logprobs.ranks
                assert completion.logprobs.decoded_tokens == same.logprobs.decoded_tokens


def test_each_prompt_may_have_its_parameters(far: RemoteLLM, tiny_llm: LLM) -> None:
    params = [SamplingParams(max_tokens=1 + place, temperature=0) for place in range(2)]
    near = tiny_llm.generate(["a", "b"], params)
    found = asyncio.run(far.generate(["a", "b"], params, add_special_tokens=True))
    assert [*map(facts_of, found)] == [*map(facts_of, near)]
    bare = asyncio.run(far.generate("a", params[0], add_special_tokens=False))
    assert [*map(facts_of, bare)] == [
        *map(facts_of, tiny_llm.generate("a", params[0], add_special_tokens=False))
    ]
    with raises(ParameterError, parameter="sampling_params"):
        asyncio.run(far.generate(["a"], params))


@pytest.mark.parametrize(
    "options", [{}, {"unconditional": True}, {"temperature": 0.5}, {"boundary": "token"}]
)
def test_scores_are_those_of_the_engine(far: RemoteLLM, tiny_llm: LLM, options: dict[str, Any]) -> None:
    pairs: list[Any] = [
        ("the", " cat"),
        ("a do", "g"),
        ("the ", "dög"),
        ([5, 6], [7, 8]),
        ("", "the"),
        ([5, 6], [9]),
    ]
    found = asyncio.run(far.score(pairs, **options))
    assert found == tiny_llm.score(pairs, **options)


REPORTS: list[dict[str, Any]] = [
    {"entropy": True, "varentropy": True, "prompt_logprobs": 0},
    {"logprobs_mode": "both", "top_k": 4},
    {"logprobs_mode": "processed_logprobs", "temperature": 0.5},
    {"logprob_token_ids": [5, 9], "prompt_logprobs": 2, "n": 2},
    {"logprob_token_ids": [[5], [], [6, 7]]},
]
DIGEST: dict[str, Any] = {"digest": True, "n": 2}


@pytest.mark.parametrize("asked", [*REPORTS, DIGEST])
def test_other_reports_come_as_arrow(far: RemoteLLM, tiny_llm: LLM, asked: dict[str, Any]) -> None:
    pytest.importorskip("pyarrow")
    params = SamplingParams(**{"logprobs": 2, "max_tokens": 5, "seed": 3} | asked)
    near, found = tiny_llm.generate([PROMPTS[1]], params), asyncio.run(far.generate([PROMPTS[1]], params))
    assert [*map(facts_of, found)] == [*map(facts_of, near)]
    for completion, same in zip(found[0].outputs, near[0].outputs, strict=True):
        assert completion.processed_logprobs == same.processed_logprobs
        assert completion.digests == same.digests
        for record, want in [
            (completion.logprobs, same.logprobs),
            (completion.processed_logprobs, same.processed_logprobs),
            (found[0].prompt_logprobs, near[0].prompt_logprobs),
        ]:
            assert (record is None) == (want is None)
            if record is not None and want is not None:
                assert (record.info, record.given) == (want.info, want.given)
                assert record.extras.keys() == want.extras.keys()
                for name, values in want.extras.items():
                    np.testing.assert_array_equal(record.extras[name], values)


@pytest.mark.parametrize("asked", [{"logprob_token_ids": [*range(8, 48)]}, {"logprobs_mode": "both"}])
def test_the_limit_of_a_reply_covers_the_reports(
    far: RemoteLLM, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    pytest.importorskip("pyarrow")
    limits = []

    async def post(*args: Any) -> HttpReply:
        limits.append(args[3])
        return HttpReply(200, replies.ARROW_TYPE, b"")

    monkeypatch.setattr(Link, "post", post)
    for more in ({}, asked):
        with pytest.raises(ServerError):
            asyncio.run(far.generate([PROMPTS[1]], SamplingParams(logprobs=1, max_tokens=5, **more)))
    num_more = 40 if "logprob_token_ids" in asked else 4
    assert limits[1] - limits[0] >= num_more * 5 * TOKEN_BYTES


@pytest.mark.parametrize("name", ["0/processed", "0/prompt"])
@pytest.mark.parametrize("is_missing", [False, True])
def test_rows_that_are_missing_or_of_other_tokens_are_an_error(
    far: RemoteLLM, monkeypatch: pytest.MonkeyPatch, name: str, is_missing: bool
) -> None:
    pytest.importorskip("pyarrow")
    from logprobe.records import replies as read

    def faulty(data: bytes) -> Any:
        rows = stream(data)
        if is_missing:
            del rows.records[name], rows.token_ids[name]
        else:
            rows.token_ids[name] = rows.token_ids[name] + 1
        return rows

    stream = read.read_stream
    monkeypatch.setattr(read, "read_stream", faulty)
    params = SamplingParams(logprobs=1, prompt_logprobs=1, logprobs_mode="both", max_tokens=3)
    with pytest.raises(ServerError, match=name):
        asyncio.run(far.generate([PROMPTS[1]], params))


@pytest.mark.parametrize(
    "asked", [{"explain": True}, {"kept_ids": True, "logprobs_mode": "both"}, {"return_routed_experts": True}]
)
def test_other_reports_are_refused_by_name(far: RemoteLLM, asked: dict[str, Any]) -> None:
    with raises(ParameterError, parameter=next(iter(asked))):
        asyncio.run(far.generate("a", SamplingParams(logprobs=1, **asked)))


@pytest.mark.parametrize("asked", REPORTS)
def test_without_pyarrow_they_are_refused_too(
    far: RemoteLLM, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    for module in (calls, replies):  # of the client, then of the server alone
        with monkeypatch.context() as patched:
            patched.setattr(module, "find_spec", lambda _: None)
            with raises(ParameterError, parameter=next(iter(asked))):
                asyncio.run(far.generate([PROMPTS[1]], SamplingParams(**{"logprobs": 2} | asked)))


@pytest.mark.parametrize("module", [calls, replies])
def test_without_pyarrow_rows_come_as_json(
    far: RemoteLLM, tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    params = SamplingParams(max_tokens=6, seed=3, n=2, logprobs=3, prompt_logprobs=2, digest=True)
    found, near = asyncio.run(far.generate(PROMPTS, params)), tiny_llm.generate(PROMPTS, params)
    assert [*map(facts_of, found)] == [*map(facts_of, near)]
    for one, own in zip(found, near, strict=True):
        assert [each.digests for each in one.outputs] == [each.digests for each in own.outputs]


def test_what_the_server_refuses_is_an_error_of_the_same_kind(far: RemoteLLM) -> None:
    with raises(ParameterError, parameter="lora"):
        asyncio.run(far.generate("a", SamplingParams(lora="none")))
    with raises(ParameterError, parameter="lora"):
        asyncio.run(far.score([("a", "b")], lora="none"))
    with raises(ParameterError, parameter="continuations"):
        asyncio.run(far.score([("a", " b"), ("a", "")]))
    with pytest.raises(PromptTooLongError):
        asyncio.run(far.generate(["a", [5] * 5000]))


@pytest.mark.parametrize(
    "reply",
    [
        b"{}",
        b"[",
        {"choices": []},
        {"choices": [{"index": 0, "text": "", "token_ids": [5], "finish_reason": "stop"}] * 2},
        {
            "choices": [
                {
                    "index": 0,
                    "text": "",
                    "token_ids": [5],
                    "finish_reason": "stop",
                    "logprobs": {"token_logprobs": [], "top_logprobs": [{"x": 0.0}], "ranks": [1]},
                }
            ]
        },
        {"data": []},
    ],
)
def test_a_reply_that_is_not_valid_is_the_servers_error(
    far: RemoteLLM, monkeypatch: pytest.MonkeyPatch, reply: Any
) -> None:
    async def post(*_: Any) -> HttpReply:
        data = reply if isinstance(reply, bytes) else json.dumps({"id": "x"} | reply).encode()
        return HttpReply(200, "application/json", data)

    monkeypatch.setattr(Link, "post", post)
    with pytest.raises(ServerError):
        asyncio.run(far.generate("a", SamplingParams(logprobs=1)))
    with pytest.raises(ServerError):
        asyncio.run(far.score([("a", "b")]))


def test_a_closed_model_answers_nothing(tiny_llm: LLM, new_serving: Any) -> None:
    with new_serving(tiny_llm, ServerSettings()) as (url, _):
        far = RemoteLLM(url)
        far.close()
        with pytest.raises(EngineClosedError):
            asyncio.run(far.generate("a"))
        with pytest.raises(EngineClosedError):
            asyncio.run(far.score([("a", "b")]))
