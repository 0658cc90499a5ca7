"""`WorkerDraw`: samples tokens with this library's pipeline from logits that vLLM computed.

vLLM may discard a sampled token if the prompt is only partly computed or the request is preempted. A token
therefore counts only when vLLM requests the sample's next token, or the front end has seen the token; until
then, it may be sampled again with the same random number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
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
    """State of one sample, identified by its tag."""

    sample: Sample
    drawn: Drawn | None = None  # token that was sampled but does not count yet
    deltas: list[Delta] = field(default_factory=list)  # results that the front end has not fetched yet
    is_done: bool = False  # True if the final delta is in `deltas` or was fetched


class WorkerDraw:
    """Samples tokens and stores the results as `Delta`s until they are fetched; not thread-safe."""

    def __init__(self, config: EngineConfig, facts: ModelFacts, text: TextEdge, max_len: int) -> None:
        self._seed, self._max_len = config.seed, max_len
        self._sampling = SamplingStage(config, facts)
        self._recorder = Recorder(text, facts.eos_token_ids)
        self._runs: dict[str, Run] = {}

    def open(self, tag: str, work: bytes) -> Run:
        """Return the state registered under `tag`, creating it from `work` if there is none.

        A sample that resumes after preemption or a pause gets its earlier state back.
        """
        if tag not in self._runs:
            self._runs[tag] = self._new_run(WORKS.decode(work))
        return self._runs[tag]

    def _new_run(self, work: Work) -> Run:
        request = work.admitted.request
        make_generator = partial(new_generator, request, work.number, work.index, self._seed)
        run = Run(Sample(request, work.index, self._max_len, make_generator))
        try:
            args = self._sampling.pipeline.take_in(work.admitted.processor_args)
            self._sampling.open(run.sample, work.number, args)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must end only this request
            self._end(run, _as_ours(error, "cannot start a request"))
        return run

    @torch.inference_mode()
    def draw(self, logits: Tensor, rows: Mapping[int, tuple[Run, int]]) -> None:
        """Sample one token per row, and set the row's other logits to -inf in place.

        Args:
            logits: (R, V) float32; rows that are not in `rows` stay unchanged.
            rows: map from row to (the sample's state, number of the sample's tokens that vLLM has accepted).
        """
        for run, num_taken in rows.values():
            self._settle(run, num_taken)
            has = run.sample.num_generated
            if not run.is_done and has > num_taken:
                self._end(
                    run, EngineError(f"vLLM lost {has - num_taken} tokens of a text that it had accepted")
                )
        live = {row: run for row, (run, _) in rows.items() if not run.is_done}
        if not live:
            return
        try:
            self._draw(logits, live)
        except BaseException as error:  # noqa: BLE001 - it must not end vLLM's engine
            reason = _as_ours(error, "failed")
            for run in live.values():
                self._end(run, reason)

    def take(self, data: bytes) -> bytes:
        """Return the new deltas of the samples in an encoded `Ask`, as an encoded `Answer`."""
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
            # Most steps have only our requests, in order; then no copy is needed.
            is_all = rows == list(range(len(logits)))
            sampled = self._sampling.draw(chunk, logits if is_all else logits[rows]).sent(None)
            for index, (row, run) in enumerate(own):
                run.drawn = Drawn(chunk[index], sampled, index)
                tokens[row] = max(sampled.sampled_token_ids[index], 0)
        rows, ids = list(tokens), list(tokens.values())
        logits[rows] = -torch.inf
        logits[rows, ids] = 0.0

    def _settle(self, run: Run, num_taken: int) -> None:
        """Add the pending token to the sample if vLLM has accepted it."""
        if run.is_done:
            return
        if run.drawn is not None and num_taken > run.sample.num_generated:
            drawn, run.drawn = run.drawn, None
            self._count(run, drawn)
        has = run.sample.num_generated
        if not run.is_done and has < num_taken:
            self._end(
                run, EngineError(f"vLLM accepted {num_taken} tokens of a text, but only {has} were sampled")
            )

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
    reason = ForwardError(f"sampling in vLLM's worker {what}: {error!r}")
    reason.__cause__ = error
    return reason
