"""This measures the loop that tells a step beside the next one, against the one that tells it first.

One model, one process, 32 requests with 20 logprobs a token: tokens a second once the prompts are computed,
where 32 streams are read at every step, and where the results are read whole. The engine's clock
says what part of a step's time there is to hide.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from harness import OURS, Arena, Figure, Options, Target, alternate, parse_options, publish
from prompts import prompts

from logprobe.config import EngineConfig
from logprobe.engine.backends.start import start_native_engine
from logprobe.engine.backends.thread import EngineThread
from logprobe.engine.client import Requests
from logprobe.engine.front import Front
from logprobe.sampling import SamplingParams

TOP, BATCH, PROMPT_LEN = 20, 32, 32
LOOPS = {OURS: False, "overlapped": True}  # ours: what an engine does unasked


class Race:
    """One loaded model under both loops in turn."""

    def __init__(self, arena: Arena) -> None:
        options = arena.options
        self._folder = arena.model_folder
        self._num_tokens = 8 if options.is_smoke else 33
        self._batch = 4 if options.is_smoke else BATCH
        loaded = start_native_engine(EngineConfig(model=options.model))
        assert isinstance(loaded.engine.core, EngineThread)
        loaded.engine.close()  # its parts are driven by engines of our own
        self._engine = loaded.engine.core.engine  # no front door tells which loop runs
        self._capabilities = loaded.engine.capabilities()
        self._table = loaded.text.vocabulary
        self.hidden: dict[str, list[float]] = {}

    def measure(self, overlap: bool, is_streamed: bool, number: int) -> float:
        """Tokens a second of a batch, from the step after the first tokens on."""
        core = EngineThread(self._engine, self._capabilities, overlap=overlap)
        engine = Front(core, self._table)
        ids = prompts(self._folder, self._batch, PROMPT_LEN, number)
        with closing(engine):
            first_s, _ = asyncio.run(self._time(engine, ids, 1, is_streamed))
            all_s, seconds = asyncio.run(self._time(engine, ids, self._num_tokens, is_streamed))
        hidden = (seconds["to_host"] + seconds["publish"]) / sum(seconds.values())
        self.hidden.setdefault("overlapped" if overlap else OURS, []).append(100 * hidden)
        return self._batch * (self._num_tokens - 1) / (all_s - first_s)

    async def _time(
        self, engine: Front, ids: Sequence[Sequence[int]], num_tokens: int, is_streamed: bool
    ) -> tuple[float, dict[str, float]]:
        params = SamplingParams(max_tokens=num_tokens, temperature=0, logprobs=TOP, ignore_eos=True)
        make = Requests(engine)
        engine.forget_prefixes()
        before, start = engine.stats().seconds, time.perf_counter()
        admitted = [make.admit(np.array(one, np.int32), params) for one in ids]
        engine.submit(admitted)
        read = self._read if is_streamed else self._wait
        await asyncio.gather(*(read(engine, one.request.request_id) for one in admitted))
        seconds = {name: spent - before[name] for name, spent in engine.stats().seconds.items()}
        return time.perf_counter() - start, seconds

    @staticmethod
    async def _read(engine: Front, name: str) -> None:
        async for output in engine.stream(name):
            assert output.outputs[0].logprobs is not None

    @staticmethod
    async def _wait(engine: Front, name: str) -> None:
        await engine.result(name)


def figures(race: Race, options: Options) -> list[Figure]:
    """Both ways to read, and the share of a step that there is to hide."""
    found = []
    for is_streamed in (True, False):
        contestants = {name: partial(race.measure, overlap, is_streamed) for name, overlap in LOOPS.items()}
        samples, notes = alternate(contestants, options.rounds)
        how = "32 streams read at each step" if is_streamed else "results read whole"
        found.append(
            Figure(
                name=f"decode, batch {BATCH}, logprobs {TOP}, {how}",
                unit="tokens/s",
                better="higher",
                samples=samples,
                targets=[Target(against="overlapped", at_least=1.0)],
                notes=notes,
            )
        )
    name = "share of a step that can be told beside the next one"
    return [*found, Figure(name=name, unit="%", better="lower", samples=race.hidden)]


def main() -> None:
    """Race both loops."""
    options = parse_options(__doc__ or "")
    with Arena(options) as arena:
        measured = figures(Race(arena), options)
    publish(Path(__file__).stem, measured, options)


if __name__ == "__main__":
    main()
