"""`Engine`: many requests → one batch → one step.

`step()` is the architecture: plan, run the model, score prompts, draw tokens, record. It is driven by one
thread; the front ends reach it through an `EngineBackend`.
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
from logprobe.engine.recorder import Describer, Recorder
from logprobe.engine.request import check_request, keep_best
from logprobe.errors import ForwardError, LogprobeError
from logprobe.kernels import extract
from logprobe.kernels.extraction.head import default_chunk_rows
from logprobe.processors import ModelFacts
from logprobe.records import LogprobsInfo
from logprobe.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logprobe.config import EngineConfig
    from logprobe.engine.plan.scheduler import StepPlan
    from logprobe.engine.protocol import ForwardBackend
    from logprobe.engine.recorder import WholeRows
    from logprobe.engine.request import Request, RequestOutput
    from logprobe.sampling.sampler import SampledRows
    from logprobe.text.edge import TextEdge


class StepClock:
    """Seconds by part of a step, since the start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"schedule": 0.0, "forward": 0.0, "prompt_rows": 0.0, "sample": 0.0}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of a block to a part, also where it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


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
        )
        self.clock = StepClock()
        self.scorer = PromptScorer(forward)
        self.sampler = Sampler()
        source = LogprobsInfo(
            engine="native", model=config.model, logits_dtype=str(forward.dtype).removeprefix("torch.")
        )
        self.recorder = Recorder(text, eos_token_ids, Describer(source, forward.vocab_size))
        facts = ModelFacts(
            vocab_size=forward.vocab_size,
            eos_token_ids=eos_token_ids,
            tokenizer=text.tokenizer,
            vocabulary=text.vocabulary,
        )
        self.processing = Processing(config, facts)
        self.outputs: dict[str, RequestOutput] = {}
        self._counter = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return self.scheduler.has_work

    def check(self, request: Request) -> None:
        """Raise `ParameterError` where a request can never be served; may be called from any thread."""
        check_request(request, self.outputs, max_len=self.max_len, vocab_size=self.forward.vocab_size)
        self.forward.loras.check(request.lora)
        self.processing.check(request.params)

    def add(self, request: Request, output: RequestOutput) -> RequestOutput | None:
        """Accept a checked request; `output` grows with every step, and is returned where it has ended."""
        number = next(self._counter)
        self.outputs[request.request_id] = output
        samples = [
            Sample(request, completion, self.max_len, self._generator(request, number, completion.index))
            for completion in output.outputs
        ]
        for sample in samples:
            self.recorder.open(sample, output)
            self.processing.open(sample, number)
            if not sample.is_finished:
                self.scheduler.add(sample)
        return self.outputs.pop(request.request_id) if output.is_finished else None

    def abort(self, request_id: str) -> RequestOutput | None:
        """Give a request up; its output keeps what there is. None where it has ended already."""
        for sample in list(self.scheduler.samples()):
            if sample.request.request_id == request_id:
                sample.finish("abort")
                self.scheduler.remove(sample)
        return self.outputs.pop(request_id, None)

    def pause(self, request_id: str, *, is_paused: bool) -> None:
        """Let a request take no step, or go on; one that has ended is left alone."""
        for sample in self.scheduler.samples():
            if sample.request.request_id == request_id:
                sample.is_paused = is_paused

    def step(self) -> list[RequestOutput]:
        """Advance every running request; the outputs that changed."""
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
                sampled = list(self._sample(plan.draws))
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends these requests and not the engine
            return self._fail(plan, error)
        for span, rows in zip(plan.prompt_rows, scored, strict=True):
            self.recorder.add_prompt_rows(span, rows)
        for samples, drawn, whole in sampled:
            self.recorder.add_tokens(samples, drawn, whole)
        return self._retire(plan)

    @torch.inference_mode()
    def _sample(self, samples: list[Sample]) -> Iterator[tuple[list[Sample], SampledRows, WholeRows]]:
        size = default_chunk_rows(self.forward.vocab_size)
        for chunk in self.processing.chunks(samples, size):
            last_slots = np.array([sample.slots[-1] for sample in chunk], dtype=np.int32)
            logits = self.forward.head(self.forward.hidden_rows(last_slots))
            params = [sample.request.params for sample in chunk]
            uniforms = np.array([sample.next_uniform() for sample in chunk])
            changed = self.processing.apply(chunk, logits)
            rows = self.sampler.sample(logits, params, uniforms, None if changed is None else changed.logits)
            self.processing.record(chunk, logits, changed, rows)
            yield chunk, rows, _whole_rows(chunk, logits)

    def _retire(self, plan: StepPlan) -> list[RequestOutput]:
        changed = {span.sample for span in plan.prompt_rows}.union(plan.draws)
        for sample in changed:
            if sample.is_finished:
                self.scheduler.release(sample)
        return self._outputs_of(changed)

    def _fail(self, plan: StepPlan, error: Exception) -> list[RequestOutput]:
        failed = self.scheduler.roll_back(plan)
        for sample in failed:
            reason = (
                error if isinstance(error, LogprobeError) else ForwardError(f"the step failed: {error!r}")
            )
            reason.__cause__ = error if reason is not error else error.__cause__
            sample.output.error = reason
            sample.finish("error")
        return self._outputs_of(failed)

    def _outputs_of(self, samples: Sequence[Sample] | set[Sample]) -> list[RequestOutput]:
        """The outputs of these samples, each once; those that have ended leave the engine."""
        changed = {sample.request.request_id: sample.request for sample in samples}
        outputs = [self.outputs[request_id] for request_id in changed]
        for output in outputs:
            if output.is_finished:
                keep_best(output, changed[output.request_id].params)
                del self.outputs[output.request_id]
        return outputs

    def _generator(self, request: Request, number: int, index: int) -> np.random.Generator:
        """Streams of different (seed, sample) never coincide, nor do those with and without a seed."""
        seed = request.params.seed
        base = self.config.seed if seed is None else seed
        kind = 2 * (seed is None) + (base < 0)
        return np.random.default_rng([index, kind, number if seed is None else 0, abs(base)])


def _whole_rows(samples: list[Sample], logits: torch.Tensor) -> WholeRows:
    """The log-softmax of the rows whose requests want it; each array is its own, not a view of the batch."""
    places = [place for place, sample in enumerate(samples) if sample.request.wants_row]
    if not places:
        return {}
    # Our own log-normaliser: torch's float32 log_softmax is off by 1e-5 on wide vocabularies.
    lse = extract(logits[places], [0] * len(places), 0).lse
    return {
        place: (logits[place] - normaliser).numpy(force=True)
        for place, normaliser in zip(places, lse, strict=True)
    }
