"""One suite for all engines: every `Front` implementation keeps the same contract."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from dataclasses import fields
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.errors import EngineClosedError, ParameterError, PromptTooLongError
from logprobe.next_token.rows import Prefix
from logprobe.records.rows import KERNEL_EXTRAS
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from logprobe.engine.front import Front
    from logprobe.engine.request import RequestOutput

TOLERANCE = 5e-5  # nats, between any two batches
PROMPT = [4, 9, 17, 60, 31, 8, 77, 42]
LONG = 4000  # more tokens than any test waits for
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 3},
    "drawn, several": {"n": 3, "temperature": 1.3, "top_p": 0.9, "seed": 7, "logprobs": 2},
    "the best of several": {"best_of": 3, "temperature": 1.5, "seed": 2, "logprobs": 0},
    "whole vocabulary": {"max_tokens": 3, "logprobs": -1, "prompt_logprobs": -1},
    "named ids, entropy": {
        "logprobs": 1,
        "prompt_logprobs": 1,
        "logprob_token_ids": [3, 200],
        "entropy": True,
    },
    "named ids position by position": {"logprobs": 1, "logprob_token_ids": [[3, 200], [], [7]]},
    "further columns": {"logprobs": 1, "prompt_logprobs": 1} | dict.fromkeys(KERNEL_EXTRAS, True),
    "both stages": {"logprobs": 4, "logprobs_mode": "both", "temperature": 0.7, "top_k": 20, "seed": 3},
    "processed alone": {"logprobs": 2, "logprobs_mode": "processed_logprobs", "temperature": 0.5, "seed": 5},
    "processors": {
        "logprobs": 2,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "logit_bias": {9: 3.0},
        "min_tokens": 5,
        "bad_words": ["cat"],
        "explain": True,
        "temperature": 0.9,
        "seed": 4,
    },
    "no logprobs": {"temperature": 1.0, "seed": 11},
    "scored only": {"max_tokens": 0, "prompt_logprobs": 2},
    "end of text": {
        "ignore_eos": False,
        "logit_bias": {1: 4.0},
        "temperature": 1.0,
        "seed": 6,
        "logprobs": 1,
    },
}


# Field → pairs of an unusual but legal form and its plain form.
ODD: dict[str, list[tuple[Any, Any]]] = {
    "n": [(np.int64(2), 2)],
    "best_of": [(np.uint8(2), 2)],
    "max_tokens": [(np.int32(3), 3)],
    "temperature": [(1, 1.0), (np.float32(0.5), 0.5)],
    "top_k": [(np.int16(5), 5), (-1, 0)],
    "top_p": [(1, 1.0), (np.float32(0.5), 0.5)],
    "min_p": [(1, 1.0), (np.float64(0.25), 0.25)],
    "seed": [(np.uint64(7), 7)],
    "stop": [("zz", ["zz"]), ({np.str_("zz")}, ["zz"]), ((), None)],
    "stop_token_ids": [({9}, [9]), (np.array([9, 3]), (9, 3)), ((), None)],
    "ignore_eos": [(np.True_, True)],
    "include_stop_str_in_output": [(np.True_, True)],
    "logprobs": [(np.int8(2), 2)],
    "prompt_logprobs": [(np.int8(2), 2)],
    "logprob_token_ids": [
        ({9}, [9]),
        (np.array([9, 3]), (9, 3)),
        ((), None),
        ((np.array([9, 3]), {7}), [[9, 3], [7]]),
    ],
    "logprobs_mode": [(np.str_("both"), "both")],
    **{name: [(np.True_, True)] for name in KERNEL_EXTRAS},
    "kept_ids": [(np.True_, True)],
    "min_tokens": [(np.int64(2), 2)],
    "repetition_penalty": [(2, 2.0), (np.float32(1.5), 1.5)],
    "presence_penalty": [(1, 1.0), (np.float32(0.5), 0.5)],
    "frequency_penalty": [(1, 1.0), (np.float32(0.5), 0.5)],
    "logit_bias": [({"9": 50}, {9: 50.0}), ({np.int64(9): np.float32(3)}, {9: 3.0}), ({}, None)],
    "allowed_token_ids": [({9}, [9]), (np.array([9, 17]), [9, 17])],
    "bad_words": [({np.str_("cat")}, ["cat"]), ((), None)],
    "response_format": [
        (
            MappingProxyType({"type": np.str_("choice"), "choice": ("the", "a")}),
            {"type": "choice", "choice": ["the", "a"]},
        )
    ],
    "logits_processors_args": [
        ({"bad_words_token_ids": ((np.int64(9),), {8})}, {"bad_words_token_ids": [[9], [8]]}),
        ({}, None),
    ],
    "explain": [(np.True_, True)],
    "lora": [(np.str_("none of this name"), "none of this name")],
    "digest": [(np.True_, True)],
    "return_routed_experts": [(np.True_, True)],
    "routed_experts": [(np.zeros((1, 1, 1), np.int64), [[[0]]])],
    "return_hidden_states": [(np.str_("last"), "last"), (np.array([1, 0]), (1, 0))],
}
DRAWN = {"temperature": 1.3, "seed": 5}
REPORTED = {"logprobs": 2, "logprobs_mode": "both"}
NEVER_SERVED = pytest.mark.parametrize(
    ("ids", "params", "kind", "parameter"),
    [
        ([5, 10**6], {}, ParameterError, "prompt"),
        ([], {}, ParameterError, "prompt"),
        ([5] * 5000, {}, PromptTooLongError, "prompt"),
        ([5], {"stop_token_ids": [10**6]}, ParameterError, "stop_token_ids"),
    ],
)


def assert_close(got: RequestOutput, want: RequestOutput, assert_same: Callable[..., None]) -> None:
    assert_same(got, want)
    assert got.prompt_token_ids == want.prompt_token_ids
    for mine, theirs in zip(got.outputs, want.outputs, strict=True):
        assert mine.index == theirs.index
        assert (mine.explanations is None) == (theirs.explanations is None)
        for my_effects, their_effects in zip(mine.explanations or [], theirs.explanations or [], strict=True):
            assert [one.processor for one in my_effects] == [one.processor for one in their_effects]


async def growth(
    engine: Front, name: str, buffer_rows: int, limit_s: float
) -> tuple[list[list[int]], RequestOutput]:
    """Return the tokens that each update added to the first completion, and the final output."""
    added: list[list[int]] = []
    before: list[int] = []
    async with asyncio.timeout(limit_s), aclosing(engine.stream(name, buffer_rows=buffer_rows)) as outputs:
        async for output in outputs:
            one = output.outputs[0]
            assert one.token_ids[: len(before)] == before, "what was seen has changed"
            assert one.logprobs is None or len(one.logprobs) == len(one.token_ids)
            added.append(one.token_ids[len(before) :])
            before = list(one.token_ids)
    assert output.is_finished
    return added, output


class TestResults:
    def test_every_kind_of_request_gives_the_numbers_of_the_thread(
        self, backend: Front, reference: Front, asker: Any, assert_same: Any
    ) -> None:
        """All in one batch here, each alone in the reference."""
        requests = [
            asker.request(PROMPT[: 3 + place % 6], **kind) for place, kind in enumerate(KINDS.values())
        ]
        outputs = asyncio.run(asker.ended(backend, *requests))
        for request, output, (title, kind) in zip(requests, outputs, KINDS.items(), strict=True):
            assert output.request_id == request.request_id
            assert output.error is None, title
            want = asker.ask(reference, request.prompt_token_ids.tolist(), **kind)
            assert_close(output, want, assert_same)

    @pytest.mark.parametrize("buffer_rows", [1, 2, 7])
    def test_a_stream_comes_to_the_whole(
        self, backend: Front, asker: Any, assert_same: Any, buffer_rows: int, limit_s: int
    ) -> None:
        kinds = {title: kind for title, kind in KINDS.items() if "best" not in title}
        whole = asyncio.run(asker.ended(backend, *(asker.request(PROMPT, **kind) for kind in kinds.values())))

        async def read() -> list[tuple[list[list[int]], RequestOutput]]:
            names = asker.submit(backend, *(asker.request(PROMPT, **kind) for kind in kinds.values()))
            return await asyncio.gather(*(growth(backend, name, buffer_rows, limit_s) for name in names))

        for (added, output), want in zip(asyncio.run(read()), whole, strict=True):
            assert_close(output, want, assert_same)
            assert list(chain.from_iterable(added)) == want.outputs[0].token_ids

    def test_a_stop_string_ends_a_text_in_the_same_place(
        self, backend: Front, reference: Front, asker: Any
    ) -> None:
        ids = asker.ask(reference, PROMPT, max_tokens=6).outputs[0].token_ids
        asked = {"max_tokens": 6, "stop_token_ids": [ids[3]], "logprobs": 1}
        got, want = asker.ask(backend, PROMPT, **asked), asker.ask(reference, PROMPT, **asked)
        assert got.outputs[0].finish_reason == want.outputs[0].finish_reason == "stop"
        assert got.outputs[0].stop_reason == ids[3]
        assert got.outputs[0].token_ids == want.outputs[0].token_ids == ids[: ids.index(ids[3]) + 1]

    def test_a_long_prompt_is_scored_in_chunks(
        self, backend: Front, reference: Front, asker: Any, assert_same: Any, limit_s: int
    ) -> None:
        ids = np.random.default_rng(5).integers(2, 250, 300).tolist()
        [name] = asker.submit(backend, asker.request(ids, max_tokens=2, prompt_logprobs=1))
        _, output = asyncio.run(growth(backend, name, 1, limit_s))
        assert len(output.prompt_logprobs or []) == len(ids)
        assert_close(output, asker.ask(reference, ids, max_tokens=2, prompt_logprobs=1), assert_same)

    def test_what_is_known_of_a_prompt_is_used_until_it_is_forgotten(
        self, backend: Front, asker: Any, block_size: int
    ) -> None:
        ids = np.random.default_rng(6).integers(2, 250, 40).tolist()

        def num_known() -> int:
            before = backend.stats().cached_tokens
            output = asker.ask(backend, ids, max_tokens=1)
            assert output.num_cached_tokens == backend.stats().cached_tokens - before
            return output.num_cached_tokens

        backend.forget_prefixes()  # a prompt of another test may start with the same token
        assert num_known() == 0
        assert num_known() >= (len(ids) - 1) // block_size * block_size
        backend.forget_prefixes()
        assert num_known() == 0


async def served(engine: Front, asker: Any, forms: list[dict[str, Any]]) -> list[Any]:
    """Run requests concurrently; return each output, or the parameter for which it is refused."""

    async def one(form: dict[str, Any]) -> Any:
        try:
            [output] = await asker.ended(engine, asker.request(PROMPT, **form))
        except ParameterError as error:
            return error.parameter
        return output

    return await asyncio.gather(*map(one, forms))


class TestRowsAndSamples:
    def test_every_field_in_every_legal_form_is_what_its_plain_form_is(
        self, backend: Front, asker: Any, assert_same: Any
    ) -> None:
        """An engine without support for a field refuses it in both forms."""
        assert ODD.keys() == {field.name for field in fields(SamplingParams)}
        beside: dict[str, Any] = DRAWN | REPORTED
        pairs = [(name, *forms) for name, both in ODD.items() for forms in both]
        odd = asyncio.run(served(backend, asker, [beside | {name: form} for name, form, _ in pairs]))
        plain = asyncio.run(served(backend, asker, [beside | {name: form} for name, _, form in pairs]))
        for (name, form, _), got, want in zip(pairs, odd, plain, strict=True):
            if isinstance(want, str):
                assert got == want == name, (name, form, want)
            else:
                assert got.error is None, (name, form)
                assert want.error is None, (name, form)
                assert_close(got, want, assert_same)

    def test_a_whole_row_is_the_threads(self, backend: Front, reference: Front, asker: Any) -> None:
        prompts = [PROMPT[:length] for length in range(1, len(PROMPT))]
        requests = [asker.request(ids, wants_row=True, max_tokens=1) for ids in prompts]
        for ids, output in zip(prompts, asyncio.run(asker.ended(backend, *requests)), strict=True):
            [one] = output.outputs
            want = asker.ask(reference, ids, wants_row=True, max_tokens=1).outputs[0].row
            assert one.row is not None
            assert want is not None
            assert (one.row.dtype, one.row.shape) == (np.float32, want.shape)
            assert not one.row.flags.writeable
            np.testing.assert_allclose(one.row, want, atol=TOLERANCE, rtol=0)

    def test_a_sample_is_the_threads(self, backend: Front, reference: Front, asker: Any) -> None:
        for asked in ({}, {"temperature": 1.2, "seed": 9}, {"temperature": 0.8, "top_k": 5, "seed": 1}):
            got, want = asker.ask(backend, PROMPT, **asked), asker.ask(reference, PROMPT, **asked)
            assert got.outputs[0].token_ids == want.outputs[0].token_ids
            assert got.outputs[0].finish_reason == want.outputs[0].finish_reason

    @NEVER_SERVED
    def test_what_can_never_be_served_is_refused_alike(
        self, backend: Front, asker: Any, ids: list[int], params: Any, kind: Any, parameter: str
    ) -> None:
        with pytest.raises(kind) as raised:
            backend.admit(asker.request(ids, **params))
        assert raised.value.parameter == parameter

    def test_an_id_that_stands_twice_or_is_in_use_is_refused(self, backend: Front, asker: Any) -> None:
        first = backend.admit(asker.request(max_tokens=2))
        other = backend.admit(asker.request(max_tokens=2))
        with pytest.raises(ParameterError, match="not unique"):
            backend.submit([first, first])
        backend.submit([first])
        name = first.request.request_id
        with pytest.raises(ParameterError, match=f"'{name}' is in use"):
            backend.submit([other, first])
        with pytest.raises(ParameterError, match="unknown"):  # so the other was not accepted either
            asyncio.run(backend.result(other.request.request_id))
        assert len(asyncio.run(backend.result(name)).outputs[0].token_ids) == 2
        with pytest.raises(ParameterError, match="unknown"):
            asyncio.run(backend.result(name))
        backend.submit([first])  # an id may be reused once its output was taken
        assert len(asyncio.run(backend.result(name)).outputs[0].token_ids) == 2

    def test_an_abort_ends_a_request_and_leaves_the_others(
        self, backend: Front, asker: Any, limit_s: int
    ) -> None:
        async def run() -> list[RequestOutput]:
            names = asker.submit(
                backend,
                *(asker.request([5, 6 + place], max_tokens=LONG) for place in range(3)),
                asker.request(),
            )
            waiting = [asyncio.ensure_future(backend.result(name)) for name in names]
            await asyncio.sleep(0)
            for name in names[:3]:
                backend.abort(name)
            backend.abort("nobody")
            return await asyncio.wait_for(asyncio.gather(*waiting), limit_s)

        *aborted, whole = asyncio.run(run())
        assert [output.outputs[0].finish_reason for output in aborted] == ["abort"] * 3
        assert all(output.error is None for output in aborted)
        assert len(whole.outputs[0].token_ids) == 8

    def test_giving_up_the_wait_gives_the_request_up(self, backend: Front, asker: Any, limit_s: int) -> None:
        async def run() -> None:
            [name] = asker.submit(backend, asker.request(max_tokens=LONG))
            task = asyncio.ensure_future(backend.result(name))
            await asyncio.sleep(0.01)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, limit_s)
            assert task.cancelled()
            with pytest.raises(ParameterError, match=f"'{name}' is unknown"):
                await backend.result(name)

        asyncio.run(run())
        assert len(asker.ask(backend).outputs[0].token_ids) == 8

    def test_capabilities_tell_the_model_and_the_limits(self, backend: Front, reference: Front) -> None:
        told, want = backend.capabilities(), reference.capabilities()
        for name in ("model", "device", "dtype", "vocab_size", "stages"):
            assert getattr(told, name) == getattr(want, name), name
        is_vllm = told.engine == "vllm"  # vLLM reserves a position for the last token
        assert told.max_model_len == want.max_model_len - is_vllm
        assert told.weights == ("vllm" if is_vllm else want.weights)


async def drawn(far: Any, *asked: dict[str, Any], ids: Sequence[int] = PROMPT) -> list[Any]:
    """Sample concurrently at the server; return ids, or the error of a refused request."""
    plain = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}

    async def one(params: dict[str, Any]) -> Any:
        return await far.source.sample(np.array(ids, dtype=np.int32), SamplingParams(**(plain | params)))

    return await asyncio.gather(*map(one, asked), return_exceptions=True)


def prefix(ids: Sequence[int]) -> Prefix:
    return Prefix(None, 0, 0, np.array(ids, dtype=np.int32).tobytes())


class TestRemote:
    """The cases of rows and samples where a remote server computes them."""

    def test_every_field_in_every_legal_form_is_what_its_plain_form_is(self, far: Any) -> None:
        """Fields that remote samples do not support are refused in both forms."""
        pairs = [(name, *forms) for name, both in ODD.items() for forms in both]
        odd = asyncio.run(drawn(far, *(DRAWN | {name: form} for name, form, _ in pairs)))
        plain = asyncio.run(drawn(far, *(DRAWN | {name: form} for name, _, form in pairs)))
        for (name, form, _), got, want in zip(pairs, odd, plain, strict=True):
            if isinstance(want, ParameterError):
                assert isinstance(got, ParameterError), (name, form)
                assert got.parameter == want.parameter == name, (name, form)
            else:
                assert isinstance(want, list), (name, form, want)
                assert got == want, (name, form)

    def test_a_whole_row_is_the_threads(self, far: Any, reference: Front, asker: Any) -> None:
        prompts = [PROMPT[:length] for length in range(1, len(PROMPT))]

        async def run() -> list[Any]:
            return await asyncio.gather(*far.source.begin([prefix(ids) for ids in prompts]))

        for ids, (answered, row) in zip(prompts, far.bridge.run(run()), strict=True):
            want = asker.ask(reference, ids, wants_row=True, max_tokens=1).outputs[0].row
            assert (row.dtype, row.shape, answered) == (np.float32, want.shape, prefix(ids))
            assert not row.flags.writeable
            np.testing.assert_allclose(row, want, atol=TOLERANCE, rtol=0)

    def test_a_sample_is_the_threads(self, far: Any, reference: Front, asker: Any) -> None:
        for asked in ({}, {"temperature": 1.2, "seed": 9}, {"temperature": 0.8, "top_k": 5, "seed": 1}):
            want = asker.ask(reference, PROMPT, **asked).outputs[0].token_ids
            assert asyncio.run(drawn(far, asked)) == [want]
            stopped = asked | {"stop_token_ids": [want[3]]}
            assert asyncio.run(drawn(far, stopped)) == [want[: want.index(want[3])]]

    @NEVER_SERVED
    def test_what_can_never_be_served_is_refused_alike(
        self, far: Any, ids: list[int], params: Any, kind: Any, parameter: str
    ) -> None:
        [error] = asyncio.run(drawn(far, params, ids=ids))
        assert isinstance(error, kind)
        assert error.parameter == parameter

    def test_what_is_given_up_ends_alone(self, far: Any, limit_s: int) -> None:
        async def rows() -> list[Any]:
            begun = far.source.begin([prefix([5, 6 + place]) for place in range(4)])
            for one in begun[:3]:
                one.cancel()
            return await asyncio.wait_for(asyncio.gather(*begun, return_exceptions=True), limit_s)

        async def samples() -> list[Any]:
            asked = [asyncio.ensure_future(drawn(far, {"max_tokens": LONG})) for _ in range(3)]
            whole = asyncio.ensure_future(drawn(far, {}))
            await asyncio.sleep(0.01)
            for one in asked:
                one.cancel()
            return await asyncio.wait_for(asyncio.gather(*asked, whole, return_exceptions=True), limit_s)

        for *aborted, whole in (far.bridge.run(rows()), asyncio.run(samples())):
            assert {type(end) for end in aborted} == {asyncio.CancelledError}
            assert not isinstance(whole, BaseException)
        assert len(whole[0]) == 8
        assert len(asyncio.run(drawn(far, {}))[0]) == 8

    def test_capabilities_tell_the_model_and_the_limits(self, far: Any, reference: Front) -> None:
        told, want = far.source.capabilities(), reference.capabilities()
        for name in ("model", "device", "dtype", "vocab_size", "stages", "max_model_len", "weights"):
            assert getattr(told, name) == getattr(want, name), name

    def test_what_does_not_come_with_a_remote_sample_is_refused_by_name(self, far: Any) -> None:
        kinds = [kind for title, kind in KINDS.items() if title not in {"greedy", "no logprobs"}]
        for kind, error in zip(kinds, asyncio.run(drawn(far, *kinds)), strict=True):
            assert isinstance(error, ParameterError)
            assert error.parameter in kind

    @pytest.mark.usefixtures("nothing_left")
    def test_close_ends_what_runs_with_one_error_each(
        self, new_far: Callable[[], AbstractContextManager[Any]], limit_s: int
    ) -> None:
        async def rows(far: Any) -> list[Any]:
            begun = far.source.begin([prefix([5 + place] * 100) for place in range(10)])
            closing = asyncio.get_running_loop().run_in_executor(None, far.source.close)
            ends = await asyncio.wait_for(asyncio.gather(*begun, return_exceptions=True), limit_s)
            await closing
            return ends

        async def samples(far: Any) -> list[Any]:
            waiting = asyncio.ensure_future(drawn(far, *[{"max_tokens": LONG}] * 10))
            await asyncio.sleep(0)
            await asyncio.to_thread(far.source.close)
            return await asyncio.wait_for(waiting, limit_s)

        with new_far() as far:
            assert {type(end) for end in asyncio.run(samples(far))} == {EngineClosedError}
            far.source.close()
            with pytest.raises(EngineClosedError, match="make a new one"):
                far.bridge.run(rows(far))
            [late] = asyncio.run(drawn(far, {}))
            assert isinstance(late, EngineClosedError)
        with new_far() as far:
            assert {type(end) for end in far.bridge.run(rows(far))} == {EngineClosedError}
