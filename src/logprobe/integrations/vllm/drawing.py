"""`WorkerDraw`: this library's draw on rows of logits that vLLM computed.

vLLM may throw a draw away (the rows of a prompt that is only partly computed, a request that it puts off): a
draw counts once the next token of its sample is asked for, or the front has seen it; until then the same
token may be drawn again, from the same random number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from logprobe.engine.plan.sample import Sample, SampleRow, new_generator
from logprobe.engine.recorder import Drawn, Recorder
from logprobe.engine.sampling_stage import SamplingStage
from logprobe.errors import EngineError, ForwardError, LogprobeError
from logprobe.integrations.vllm.orders import ANSWERS, ASKS, WORKS, Answer
from logprobe.transport.messages import Delta, Finish

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from logprobe.config import EngineConfig
    from logprobe.integrations.vllm.orders import Work
    from logprobe.processors import ModelFacts
    from logprobe.text.edge import TextEdge


@dataclass(slots=True, eq=False)
class Run:
    """One sample while it is drawn."""

    sample: Sample
    drawn: Drawn | None = None  # does not count yet
    deltas: list[Delta] = field(default_factory=list)  # not fetched yet
    is_done: bool = False  # its end is among them, or was fetched


class WorkerDraw:
    """Draws the tokens of samples, and keeps their deltas; one thread calls."""

    def __init__(self, config: EngineConfig, facts: ModelFacts, text: TextEdge, max_len: int) -> None:
        self._seed, self._max_len = config.seed, max_len
        self._sampling = SamplingStage(config, facts)
        self._recorder = Recorder(text, facts.eos_token_ids)
        self._runs: dict[str, Run] = {}

    def open(self, tag: str, work: bytes) -> Run:
        """The sample of a tag, which is known again when vLLM, or the front, had put it off."""
        if tag not in self._runs:
            self._runs[tag] = self._new_run(WORKS.decode(work))
        return self._runs[tag]

    def _new_run(self, work: Work) -> Run:
        request = work.admitted.request
        generator = new_generator(request, work.number, work.index, self._seed)
        run = Run(Sample(request, work.index, self._max_len, generator))
        try:
            args = self._sampling.pipeline.take_in(work.admitted.processor_args)
            self._sampling.open(run.sample, work.number, args)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this request and no other
            self._end(run, _as_ours(error, "cannot take a request in"))
        return run

    @torch.inference_mode()
    def draw(self, logits: Tensor, rows: Mapping[int, tuple[Run, int]]) -> None:
        """Leave each of these rows of (R, V) float32 logits one token; all else stays.

        `rows`: row → its sample, and how many tokens of that vLLM has taken.
        """
        for run, num_taken in rows.values():
            self._settle(run, num_taken)
            has = run.sample.num_generated
            if not run.is_done and has > num_taken:
                self._end(
                    run, EngineError(f"vLLM forgot {has - num_taken} tokens of a text that it has taken")
                )
        live = {row: run for row, (run, _) in rows.items() if not run.is_done}
        if not live:
            return
        try:
            self._draw(logits, live)
        except BaseException as error:  # noqa: BLE001 - vLLM's engine must outlive it
            reason = _as_ours(error, "failed to draw")
            for run in live.values():
                self._end(run, reason)

    def take(self, data: bytes) -> bytes:
        """What is new of the samples of an `Ask`."""
        ask = ASKS.decode(data)
        answer = Answer({}, {})
        for tag, num_seen in ask.num_seen.items():
            run = self._runs.get(tag)
            if run is not None:
                self._settle(run, num_seen)
                answer.deltas[tag], run.deltas = run.deltas, []
        for tag in ask.forget:
            self._runs.pop(tag, None)
        counters = self._sampling.pipeline.counters
        answer.processors.update({name: counter for name, counter in counters.items() if counter.num_steps})
        return ANSWERS.encode(answer)

    def _draw(self, logits: Tensor, live: Mapping[int, Run]) -> None:
        for run in live.values():
            run.drawn = None
        live_of = {SampleRow(run.sample): (index, run) for index, run in live.items()}
        sample_rows = self._sampling.prepare(list(live_of))
        tokens: dict[int, int] = {}
        for rows_of_chunk in self._sampling.chunks(sample_rows):
            chunk = sample_rows[rows_of_chunk]
            own = [live_of[row] for row in chunk]
            rows = [row for row, _ in own]
            # Most steps hold our requests alone, in their order: no copy then.
            is_all = rows == list(range(len(logits)))
            sampled = self._sampling.draw(chunk, logits if is_all else logits[rows]).sent(None)
            for index, (row, run) in enumerate(own):
                run.drawn = Drawn(chunk[index], sampled, index)
                tokens[row] = max(sampled.sampled_token_ids[index], 0)
        rows, ids = list(tokens), list(tokens.values())
        logits[rows] = -torch.inf
        logits[rows, ids] = 0.0

    def _settle(self, run: Run, num_taken: int) -> None:
        """Let a draw count that vLLM has taken."""
        if run.is_done:
            return
        if run.drawn is not None and num_taken > run.sample.num_generated:
            drawn, run.drawn = run.drawn, None
            self._count(run, drawn)
        has = run.sample.num_generated
        if not run.is_done and has < num_taken:
            self._end(run, EngineError(f"vLLM took {num_taken} tokens of a text of which {has} were drawn"))

    def _count(self, run: Run, drawn: Drawn) -> None:
        run.deltas += self._recorder.record((), [drawn]).arrived()
        run.is_done = run.sample.is_finished

    @staticmethod
    def _end(run: Run, error: LogprobeError) -> None:
        run.drawn, run.is_done = None, True
        finish = Finish("error", error=error)
        sample = run.sample
        run.deltas.append(Delta(request_id=sample.request.request_id, index=sample.index, finish=finish))


def _as_ours(error: BaseException, what: str) -> LogprobeError:
    if isinstance(error, LogprobeError):
        return error
    reason = ForwardError(f"the draw in vLLM's worker {what}: {error!r}")
    reason.__cause__ = error
    return reason
