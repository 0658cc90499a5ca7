"""`Engine`: many requests → one batch → one step.

`step()` is the architecture: plan, run the model, score prompts, draw tokens, record. It is driven by one
thread; the front ends reach it through an `EngineBackend`, by messages.
"""

from __future__ import annotations

import itertools
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from logprobe.engine.plan.sample import Sample
from logprobe.engine.plan.scheduler import Scheduler
from logprobe.engine.processing import Processing
from logprobe.engine.prompt_rows import PromptScorer
from logprobe.engine.protocol import EngineStats
from logprobe.engine.recorder import Recorder
from logprobe.engine.request import check_request
from logprobe.errors import ForwardError, LogprobeError
from logprobe.kernels import extract
from logprobe.kernels.extraction.head import default_chunk_rows
from logprobe.processors import ModelFacts
from logprobe.records import ModelRunnerOutput, SamplerOutput
from logprobe.records.steps import on_host
from logprobe.sampling import Sampler
from logprobe.transport.messages import (
    Abort,
    AddLora,
    Admitted,
    Finish,
    ForgetPrefixes,
    Pause,
    RemoveLora,
    Resume,
    Submit,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.config import EngineConfig
    from logprobe.engine.plan.scheduler import StepPlan
    from logprobe.engine.protocol import ForwardBackend
    from logprobe.records.store.columns import Array
    from logprobe.text.edge import TextEdge
    from logprobe.transport.messages import Command, Delta, News, Request


class StepClock:
    """Seconds by part of a step, since the start."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("schedule", "forward", "prompt_rows", "sample", "record"), 0.0)
        self.latest_ns = dict.fromkeys(self.seconds, 0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of a block to a part, also where it raises."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.latest_ns[name] = time.perf_counter_ns() - start
            self.seconds[name] += self.latest_ns[name] / 1e9


class Engine:
    """Runs requests step by step; a step that fails ends the requests in it, never the engine."""

    def __init__(
        self,
        config: EngineConfig,
        forward: ForwardBackend,
        text: TextEdge,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.config = config
        self.forward = forward
        self.max_len = min(
            config.max_model_len or forward.context_len, forward.context_len, forward.num_slots
        )
        self.scheduler = Scheduler(
            forward.num_slots,
            max_batch_tokens=config.max_batch_tokens,
            max_batch_rows=config.max_batch_rows,
            rope_boundary=forward.rope_boundary,
        )
        self.clock = StepClock()
        self.scorer = PromptScorer(forward)
        self.sampler = Sampler()
        self.recorder = Recorder(text, eos_token_ids)
        facts = ModelFacts(
            vocab_size=forward.vocab_size,
            eos_token_ids=eos_token_ids,
            tokenizer=text.tokenizer,
            vocabulary=text.vocabulary,
        )
        self.processing = Processing(config, facts)
        self.output: ModelRunnerOutput | None = None  # of the latest step that drew tokens
        self._counter = itertools.count()
        self._num_pauses = 0

    @property
    def has_work(self) -> bool:
        """Whether any request can go on."""
        return self.scheduler.has_work

    def admit(self, request: Request) -> Admitted:
        """Say yes to a request, once and for all; from any thread.

        Raises:
            ParameterError: it can never be served.
        """
        check_request(request, max_len=self.max_len, vocab_size=self.forward.vocab_size)
        lora = self.forward.loras.get(request.lora)
        return Admitted(request, self.processing.admit(request.params), lora)

    def handle(self, command: Command) -> list[News]:
        """Do what a message asks; what it ends is told at once.

        Raises:
            ModelError: LoRA weights that cannot be read, or do not fit the model.
            ParameterError: the name of LoRA weights is taken, or unknown.
        """
        match command:
            case Submit(requests):
                return [news for admitted in requests for news in self._add(admitted)]
            case Abort(request_id):
                return self._abort(request_id)
            case Pause(request_id) | Resume(request_id):
                self._num_pauses += isinstance(command, Pause)
                for sample in self._samples_of(request_id):
                    sample.is_paused = isinstance(command, Pause)
            case AddLora(name, path):
                self.forward.loras.add(name, path)
            case RemoveLora(name):
                self.forward.loras.remove(name)
            case ForgetPrefixes():
                self.scheduler.tree.clear()
        return []

    def step(self) -> list[Delta]:
        """Advance every running request; what is new of each."""
        with self.clock.part("schedule"):
            plan = self.scheduler.schedule()
            batch = plan.batch()
        try:
            self.scorer.forget(batch.slots)
            self.processing.prepare(plan.draws)
            with self.clock.part("forward"):
                self.forward.run(batch)
            with self.clock.part("prompt_rows"):
                scored = self.scorer.score(plan.prompt_rows)
            with self.clock.part("sample"):
                samples, output = self._draw(plan.draws)
            with self.clock.part("record"):
                deltas = self.recorder.record(zip(plan.prompt_rows, scored, strict=True), samples, output)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it ends these requests and not the engine
            return self._fail(plan, error)
        self._retire({span.sample for span in plan.prompt_rows}.union(plan.draws))
        return deltas

    def list_loras(self) -> dict[str, str]:
        """The loaded LoRA weights: name → path; from any thread."""
        return self.forward.loras.paths()

    def lora_number(self, name: str) -> int:
        """Which load of a name answers now; from any thread.

        Raises:
            ParameterError: no such weights.
        """
        lora = self.forward.loras.get(name)
        assert lora is not None, "a name stands for weights, or raises"
        return lora.number

    def check_integrity(self) -> None:
        """Assert that every slot has exactly one owner."""
        self.scheduler.check_integrity()

    def stats(self) -> EngineStats:
        """What the engine is doing and has done; read while it runs, so each figure is of its own moment."""
        scheduler = self.scheduler
        running = list(scheduler.running)
        return EngineStats(
            waiting=len(scheduler.waiting),
            running=len(running),
            paused=sum(sample.is_paused for sample in running),
            free_slots=scheduler.num_available,
            cached_tokens=scheduler.num_cached_tokens,
            preempted=scheduler.num_preempted,
            pauses=self._num_pauses,
            seconds=dict(self.clock.seconds),
            processors=dict(self.processing.pipeline.counters),
        )

    def _add(self, admitted: Admitted) -> list[News]:
        request, number = admitted.request, next(self._counter)
        samples = [
            Sample(request, index, self.max_len, self._generator(request, number, index), admitted.lora)
            for index in range(request.params.num_samples)
        ]
        for sample in samples:
            self.recorder.open(sample)
            self.processing.open(sample, number, admitted.processor_args)
            if not sample.is_finished:
                self.scheduler.add(sample)
        return [*self.recorder.end(sample for sample in samples if sample.is_finished)]

    def _abort(self, request_id: str) -> list[News]:
        samples = self._samples_of(request_id)
        for sample in samples:
            sample.finish(Finish("abort"))
            self.scheduler.remove(sample)
        return [*self.recorder.end(samples)]

    def _samples_of(self, request_id: str) -> list[Sample]:
        return [one for one in self.scheduler.samples() if one.request.request_id == request_id]

    @torch.inference_mode()
    def _draw(self, draws: list[Sample]) -> tuple[list[Sample], SamplerOutput | None]:
        """A row for each sample, in the order of the samples that comes with them."""
        samples: list[Sample] = []
        parts: list[SamplerOutput] = []
        start = time.perf_counter_ns()
        for chunk in self.processing.chunks(draws, default_chunk_rows(self.forward.vocab_size)):
            samples += chunk
            parts.append(self._draw_chunk(chunk))
        if not parts:
            return samples, None
        output = SamplerOutput.joined(parts)
        self.output = ModelRunnerOutput.of_step(
            output,
            [sample.name for sample in samples],
            forward_time_ns=self.clock.latest_ns["forward"],
            sample_time_ns=time.perf_counter_ns() - start,
        )
        return samples, output

    def _draw_chunk(self, chunk: list[Sample]) -> SamplerOutput:
        last_slots = np.array([sample.slots[-1] for sample in chunk], dtype=np.int32)
        logits = self.forward.head(self.forward.hidden_rows(last_slots))
        params = [sample.request.params for sample in chunk]
        uniforms = np.array([sample.next_uniform() for sample in chunk])
        changed = self.processing.apply(chunk, logits)
        output = self.sampler.sample(logits, params, uniforms, None if changed is None else changed.logits)
        self.processing.record(chunk, logits, changed, output)
        output.whole_rows.update(_whole_rows(chunk, logits))
        return output

    def _retire(self, samples: set[Sample]) -> None:
        for sample in samples:
            if sample.is_finished:
                self.scheduler.release(sample)

    def _fail(self, plan: StepPlan, error: BaseException) -> list[Delta]:
        failed = self.scheduler.roll_back(plan)
        for sample in failed:
            reason = (
                error if isinstance(error, LogprobeError) else ForwardError(f"the step failed: {error!r}")
            )
            reason.__cause__ = error if reason is not error else error.__cause__
            sample.fail(reason)
        return self.recorder.end(failed)

    def _generator(self, request: Request, number: int, index: int) -> np.random.Generator:
        """Streams of different (seed, sample) never coincide, nor do those with and without a seed."""
        seed = request.params.seed
        base = self.config.seed if seed is None else seed
        kind = 2 * (seed is None) + (base < 0)
        return np.random.default_rng([index, kind, number if seed is None else 0, abs(base)])


def _whole_rows(samples: list[Sample], logits: torch.Tensor) -> dict[int, Array]:
    """The log-softmax of the rows whose requests want it; each array is its own, not a view of the batch."""
    rows = [row for row, sample in enumerate(samples) if sample.request.wants_row]
    if not rows:
        return {}
    # Our own log-normaliser: torch's float32 log_softmax is off by 1e-5 on wide vocabularies.
    lse = extract(logits[rows], [0] * len(rows), 0).lse
    (table,) = on_host([logits[rows] - lse[:, None]])
    whole = {}
    for row, values in zip(rows, table, strict=True):
        whole[row] = values.copy()
        whole[row].flags.writeable = False
    return whole
