"""The suite for all engines, second half: requests that are aborted, paused, failed or closed; LoRA."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.errors import ConflictingParametersError, EngineClosedError, ModelError, ParameterError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from logprobe.engine.front import Front
    from logprobe.engine.request import RequestOutput

PROMPT = [4, 9, 17, 60, 31, 8, 77, 42]
LONG = 4000  # more tokens than any test waits for
# Only EOS is left by the mask, but min_tokens forbids it: no token is possible
# after the first one, which the bias forces.
DEAD_END = {
    "allowed_token_ids": [1, 82, 89],  # EOS, q and x
    "bad_words": ["qq", "qx"],
    "logit_bias": {82: 100.0},
    "min_tokens": 3,
}


async def followed(outputs: Any, seen: list[int]) -> None:
    """Read a stream to its end, and record the number of tokens each time."""
    async for output in outputs:
        seen += [len(output.outputs[0].token_ids)]


async def grown(outputs: Any, least: int) -> list[int]:
    """Return a stream's tokens once there are `least`, and more than at the first read."""
    num_times = 0
    async for output in outputs:
        num_times += 1
        token_ids: list[int] = output.outputs[0].token_ids
        if num_times > 1 and len(token_ids) >= least:
            return token_ids[:least]
    raise AssertionError(f"it ended with {output.outputs[0].finish_reason} before")


class TestControl:
    def test_an_abort_midway_keeps_what_there_is(self, backend: Front, asker: Any, limit_s: int) -> None:
        async def run() -> RequestOutput:
            [name] = asker.submit(backend, asker.request(max_tokens=LONG, logprobs=0))
            async with asyncio.timeout(limit_s), aclosing(backend.stream(name)) as outputs:
                async for output in outputs:
                    if len(output.outputs[0].token_ids) >= 3:
                        backend.abort(name)
            return output

        [one] = asyncio.run(run()).outputs
        assert one.finish_reason == "abort"
        assert one.error is None
        assert 3 <= len(one.token_ids) == len(one.logprobs or []) < LONG

    def test_leaving_a_stream_gives_the_request_up(self, backend: Front, asker: Any) -> None:
        async def run() -> None:
            [name] = asker.submit(backend, asker.request(max_tokens=LONG))
            async with aclosing(backend.stream(name)) as outputs:
                await anext(outputs)

        asyncio.run(run())  # the fixture then waits until the engine holds nothing

    # An engine process receives a pause between steps: these requests are too long to end before it.

    def test_a_paused_request_waits_and_goes_on_with_the_same_tokens(
        self, backend: Front, asker: Any, until: Any, limit_s: int
    ) -> None:
        whole = asker.ask(backend, PROMPT, max_tokens=400, logprobs=1).outputs[0].token_ids

        async def run() -> list[int]:
            [name] = asker.submit(backend, asker.request(PROMPT, max_tokens=LONG, logprobs=1))
            backend.pause(name)
            await asyncio.to_thread(until, lambda: backend.stats().paused == 1)
            [other] = await asker.ended(backend, asker.request([90, 91], max_tokens=4))
            assert len(other.outputs[0].token_ids) == 4
            assert backend.stats().paused == 1
            backend.resume(name)
            async with asyncio.timeout(limit_s), aclosing(backend.stream(name)) as outputs:
                return await grown(outputs, len(whole))

        assert asyncio.run(run()) == whole

    def test_a_slow_reader_pauses_its_own_request_alone(
        self, backend: Front, asker: Any, until: Any, limit_s: int
    ) -> None:
        whole = asker.ask(backend, PROMPT, max_tokens=400, logprobs=1).outputs[0].token_ids

        async def run() -> tuple[list[int], list[RequestOutput]]:
            [name] = asker.submit(backend, asker.request(PROMPT, max_tokens=LONG, logprobs=1))
            async with asyncio.timeout(limit_s), aclosing(backend.stream(name, buffer_rows=4)) as outputs:
                await anext(outputs)
                await asyncio.to_thread(until, lambda: backend.stats().paused == 1)
                others = await asker.ended(
                    backend, *(asker.request([20 + i], max_tokens=12) for i in range(6))
                )
                return await grown(outputs, len(whole)), others

        tokens, others = asyncio.run(run())
        assert tokens == whole
        assert {len(output.outputs[0].token_ids) for output in others} == {12}
        assert backend.stats().pauses > 0

    def test_a_reader_that_reads_on_lets_no_request_go_that_its_caller_paused(
        self, backend: Front, asker: Any, until: Any, limit_s: int
    ) -> None:
        async def run() -> list[int]:
            seen: list[int] = []
            [name] = asker.submit(backend, asker.request(PROMPT, max_tokens=LONG, logprobs=1))
            async with asyncio.timeout(limit_s), aclosing(backend.stream(name, buffer_rows=2)) as outputs:
                await anext(outputs)
                await asyncio.to_thread(until, lambda: backend.stats().paused == 1)
                # The reader may have resumed it since: pause again, so that no more rows come until resumed.
                backend.pause(name)
                reading = asyncio.ensure_future(followed(outputs, seen))
                await asker.ended(backend, asker.request([90, 91], max_tokens=30))
                await asyncio.to_thread(until, lambda: backend.stats().paused == 1)
                held = seen[-1:]
                await asker.ended(backend, asker.request([90, 91], max_tokens=30))
                assert seen[-1:] == held
                backend.resume(name)
                await asyncio.to_thread(until, lambda: seen[-1:] > held)
                backend.abort(name)
                await reading
            return seen

        assert asyncio.run(run())[-1] < LONG

    def test_sixty_four_slow_readers_hold_no_more_than_their_bound_and_lose_no_row(
        self, backend: Front, asker: Any, until: Any, assert_same: Any, limit_s: int
    ) -> None:
        """They continue reading only when all their unfinished requests are paused.

        An engine process receives a pause between steps, so a request may have ended by then.
        """
        size, count, length = 4, 64, 24
        num_pauses = backend.stats().pauses

        def requests() -> list[Any]:
            common = {"max_tokens": length, "logprobs": 2, "temperature": 1.0}
            return [asker.request([2 + place], seed=place, **common) for place in range(count)]

        def is_still() -> bool:
            stats = backend.stats()
            return stats.running + stats.waiting == stats.paused

        async def run() -> list[RequestOutput]:
            names = asker.submit(backend, *requests())
            for name in names:
                backend.pause(name)
            streams = [backend.stream(name, buffer_rows=size) for name in names]
            reading = [asyncio.ensure_future(anext(stream)) for stream in streams]
            await asyncio.to_thread(until, is_still)
            for name in names:
                backend.resume(name)
            outputs = await asyncio.gather(*reading)
            num_rows = [len(output.outputs[0].token_ids) for output in outputs]
            while going := [place for place in range(count) if not outputs[place].is_finished]:
                await asyncio.to_thread(until, is_still)
                for place in going:
                    outputs[place] = await anext(streams[place])
                    before, num_rows[place] = num_rows[place], len(outputs[place].outputs[0].token_ids)
                    assert num_rows[place] - before <= size, "more rows came at once than may wait"
            assert [await anext(stream, None) for stream in streams] == [None] * count
            return outputs

        whole = asyncio.run(asker.ended(backend, *requests()))
        for mine, theirs in zip(asyncio.run(asyncio.wait_for(run(), limit_s)), whole, strict=True):
            assert_same(mine, theirs)
        assert backend.stats().pauses > num_pauses + count, "only the test paused requests, and no reader"

    def test_many_aborts_at_random_end_every_request_once(
        self, backend: Front, asker: Any, limit_s: int
    ) -> None:
        chance = np.random.default_rng(4)

        async def follow(name: str, after: int) -> str | None:
            num_ends = 0
            async with aclosing(backend.stream(name, buffer_rows=int(chance.choice([1, 3, 9])))) as outputs:
                async for output in outputs:
                    num_ends += output.is_finished
                    if len(output.outputs[0].token_ids) >= after:
                        backend.abort(name)
            assert num_ends == 1
            return output.outputs[0].finish_reason

        async def run() -> list[str | None]:
            names = asker.submit(
                backend,
                *(asker.request([2 + i, 3], max_tokens=LONG if i % 2 else 6, logprobs=1) for i in range(40)),
            )
            tasks = [
                asyncio.ensure_future(follow(n, int(chance.integers(7)) if i % 2 else LONG))
                for i, n in enumerate(names)
            ]
            return await asyncio.wait_for(asyncio.gather(*tasks), limit_s)

        assert asyncio.run(run()) == ["length", "abort"] * 20


class TestFailures:
    def test_a_dead_end_fails_its_request_by_name_and_no_other(self, backend: Front, asker: Any) -> None:
        requests = [
            asker.request(PROMPT, **(DEAD_END if place == 2 else {}), logprobs=1) for place in range(5)
        ]
        outputs = asyncio.run(asker.ended(backend, *requests))
        failed = outputs.pop(2)
        assert isinstance(failed.error, ConflictingParametersError)
        assert failed.error.parameters == ("allowed_token_ids", "bad_words", "min_tokens")
        assert failed.outputs[0].finish_reason == "error"
        assert all(output.error is None for output in outputs)
        assert {len(output.outputs[0].token_ids) for output in outputs} == {8}

    @pytest.mark.usefixtures("nothing_left")
    def test_close_ends_what_runs_with_one_error_each(
        self, new_engine: Callable[[], AbstractContextManager[Front]], asker: Any, limit_s: int
    ) -> None:
        with new_engine() as engine:

            async def run() -> list[Any]:
                names = asker.submit(engine, *(asker.request([5 + i], max_tokens=LONG) for i in range(10)))
                waiting = asyncio.gather(*map(engine.result, names), return_exceptions=True)
                await asyncio.sleep(0)
                await asyncio.to_thread(engine.close)
                return await asyncio.wait_for(waiting, limit_s)

            late = engine.admit(asker.request())
            for end in asyncio.run(run()):
                error = end if isinstance(end, Exception) else end.error
                assert isinstance(error, EngineClosedError)
            engine.close()
            with pytest.raises(EngineClosedError, match="make a new one"):
                engine.submit([late])


class TestLora:
    needs_lora = True

    def test_lora_weights_are_those_of_the_thread(
        self,
        backend: Front,
        reference: Front,
        asker: Any,
        adapter_folders: dict[str, Path],
        assert_same: Any,
    ) -> None:
        engines = {id(engine): engine for engine in (backend, reference)}.values()
        for engine in engines:
            engine.add_lora("own", adapter_folders["wide"])
        try:
            assert backend.list_loras() == {"own": str(adapter_folders["wide"])}
            requests = [asker.request(PROMPT, lora=lora, logprobs=2) for lora in ("own", None)]
            got = asyncio.run(asker.ended(backend, *requests))
            want = [asker.ask(reference, PROMPT, lora=lora, logprobs=2) for lora in ("own", None)]
            for mine, theirs in zip(got, want, strict=True):
                assert_same(mine, theirs)
            assert got[0].outputs[0].cumulative_logprob != pytest.approx(got[1].outputs[0].cumulative_logprob)
        finally:
            for engine in engines:
                engine.remove_lora("own")

    def test_a_name_loaded_again_stands_for_the_new_weights(
        self, backend: Front, asker: Any, adapter_folders: dict[str, Path]
    ) -> None:
        def chosen() -> float:
            return asker.ask(backend, PROMPT, lora="own", logprobs=0).outputs[0].cumulative_logprob

        backend.add_lora("own", adapter_folders["wide"])
        first, number = chosen(), backend.lora_number("own")
        backend.add_lora("own", adapter_folders["narrow"])
        assert backend.lora_number("own") != number
        assert chosen() != pytest.approx(first)
        backend.add_lora("own", adapter_folders["wide"])
        assert chosen() == pytest.approx(first, abs=1e-3)
        backend.remove_lora("own")

    def test_a_removed_name_is_refused_and_what_runs_on_it_ends(
        self, backend: Front, asker: Any, adapter_folders: dict[str, Path], until: Any, limit_s: int
    ) -> None:
        backend.add_lora("own", adapter_folders["wide"])
        whole = asker.ask(backend, PROMPT, lora="own", max_tokens=100).outputs[0].token_ids
        [name] = asker.submit(backend, asker.request(PROMPT, lora="own", max_tokens=LONG))
        backend.pause(name)
        until(lambda: backend.stats().paused == 1)
        backend.remove_lora("own")
        assert backend.list_loras() == {}
        with pytest.raises(ParameterError, match="'own'"):
            backend.admit(asker.request(lora="own"))
        with pytest.raises(ParameterError, match="'own'"):
            backend.remove_lora("own")
        backend.resume(name)

        async def read() -> list[int]:
            async with asyncio.timeout(limit_s), aclosing(backend.stream(name)) as outputs:
                return await grown(outputs, len(whole))

        assert asyncio.run(read()) == whole

    def test_weights_that_cannot_be_read_are_refused(
        self, backend: Front, asker: Any, tmp_path: Path
    ) -> None:
        with pytest.raises(ModelError, match=str(tmp_path)):
            backend.add_lora("bad", tmp_path)
        assert backend.list_loras() == {}
        assert len(asker.ask(backend).outputs[0].token_ids) == 8
