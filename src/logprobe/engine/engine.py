"""`Engine`: the engine step, from scheduling to recorded tokens.

`_advance()` shows the architecture: schedule, run the model, score prompts, sample tokens, record. A single
thread (`backends.thread`) drives the engine and passes commands to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe import runtime
from logprobe.engine.activations import StepActivations
from logprobe.engine.durations import Durations
from logprobe.engine.forward.process_memory import give_back_later_memory
from logprobe.engine.plan.capture import SampleCapture, check_capture
from logprobe.engine.plan.sample import Sample, new_generator
from logprobe.engine.plan.scheduler import Scheduler
from logprobe.engine.prompt_rows import PromptScorer
from logprobe.engine.protocol import EngineStats
from logprobe.engine.recorder import Drawn, Recorder, StepDeltas
from logprobe.engine.request import check_request
from logprobe.engine.sampling_stage import SamplingStage
from logprobe.errors import EngineError, ForwardError, LogprobeError, WeightsReplacedError
from logprobe.kernels.placement import as_rows, inference_mode
from logprobe.models.loading import copied, read_state
from logprobe.processors import ModelFacts
from logprobe.transport.messages import (
    Abort,
    Admitted,
    Delta,
    Drafts,
    DropLora,
    DropWeights,
    Failure,
    Finish,
    ForgetPrefixes,
    LoadLora,
    LoadWeights,
    Pause,
    Resume,
    Submit,
    TakeWeights,
)

if TYPE_CHECKING:
    from logprobe.config import EngineConfig
    from logprobe.engine.draft_model import DraftModel
    from logprobe.engine.plan.sample import SampleRow
    from logprobe.engine.plan.scheduler import StepPlan
    from logprobe.engine.protocol import ForwardBackend, Layout
    from logprobe.models.lora import LoraWeights
    from logprobe.records.rows import HostRows, Send
    from logprobe.records.values import IntArray
    from logprobe.text.edge import TextEdge
    from logprobe.transport.messages import Command, Event, Request


PARTS = ("schedule", "forward", "prompt_rows", "sample", "record", "to_host", "publish")


class StepClock:
    """Total time in seconds spent in each phase of a step; only one thread at a time may run a phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._parts = {name: _Part(self.seconds, name) for name in PARTS}

    def part(self, name: str) -> _Part:
        """Return a context manager that adds the duration of its block to the phase, even on an error."""
        return self._parts[name]


class _Part:
    __slots__ = ("_name", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name, self._start = seconds, name, 0

    def __enter__(self) -> None:
        self._start = runtime.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] += (runtime.perf_counter_ns() - self._start) / 1e9


class WeightSwap:
    """State of a weight replacement: prepared forward passes, and requests that wait for the new weights."""

    def __init__(self) -> None:
        self.number = 0  # load number of the weights in use
        self.ready: dict[int, ForwardBackend] = {}  # prepared forward passes, by load number
        self.next: int | None = None  # load number of the pending replacement
        self.held: list[Admitted] = []  # requests that start once the replacement is done

    def end(self) -> tuple[ForwardBackend, list[Admitted]]:
        """Complete the pending replacement; return the new forward pass and the held requests."""
        assert self.next is not None
        self.number, held = self.next, self.held
        self.next, self.held = None, []
        return self.ready.pop(self.number), held

    def take(self, request_id: str) -> int | None:
        """Remove a held request; return its number of samples, or None if no such request is held."""
        for admitted in self.held:
            if admitted.request.request_id == request_id:
                self.held.remove(admitted)
                return admitted.request.params.num_samples
        return None


class Engine:
    """Runs requests in steps; an error in a step ends the requests in that step, not the engine."""

    def __init__(
        self,
        config: EngineConfig,
        forward: ForwardBackend,
        text: TextEdge,
        eos_token_ids: frozenset[int],
        drafter: DraftModel | None = None,
    ) -> None:
        self.config = config
        self.drafter = drafter
        self.forward = forward
        self.max_len = min(
            config.max_model_len or forward.context_len, forward.context_len, forward.num_slots
        )
        self.clock = StepClock()
        self.scorer = PromptScorer(forward)
        self.recorder = Recorder(text, eos_token_ids)
        facts = ModelFacts(
            vocab_size=forward.vocab_size,
            eos_token_ids=eos_token_ids,
            text=text,
        )
        self.sampling = SamplingStage(config, facts)
        self._durations = {name: Durations() for name in ("queue", "step")}
        self.scheduler = self._new_scheduler()
        self.send: Send | None = None  # starts copying rows to the host; None: `events_of` copies them
        self._swap = WeightSwap()
        self._loras: dict[int, LoraWeights] = {}  # by load number
        self._counter = itertools.count()
        self._num_pauses = 0

    def close(self) -> None:
        """Release the model; the engine cannot be used afterwards."""
        self.forward.close()
        if self.drafter is not None:
            self.drafter.close()

    @property
    def has_work(self) -> bool:
        """True if any request can make progress."""
        return self.scheduler.has_work

    def admit(self, request: Request) -> Admitted:
        """Validate a request and its processor arguments; thread-safe.

        Raises:
            ParameterError: the request can never be served.
        """
        check_request(request, max_len=self.max_len, vocab_size=self.forward.vocab_size)
        if request.params.captures or request.lens is not None:
            check_capture(request, self.forward.shape, max_len=self.max_len)
        return Admitted(request, self.sampling.admit(request.params))

    def load(self, command: LoadLora | LoadWeights) -> Layout | None:
        """Load LoRA weights, or prepare new model weights for a later `TakeWeights`; thread-safe.

        Returns:
            The layout of the prepared model weights; None for LoRA weights.

        Raises:
            ModelError: the weights cannot be read, or do not fit the model.
        """
        match command:
            case LoadLora(number, name, path):
                self._loras[number] = lora = self.forward.load_lora(name, path, number)
                # Register first: a replacement of the model weights prepares every registered LoRA.
                self.forward.make_room(lora)
                return None
            case LoadWeights(number, weights):
                state = copied(weights) if isinstance(weights, Mapping) else read_state(weights)
                forward = self.forward.with_weights(self.config, state)
                for lora in list(self._loras.values()):
                    forward.make_room(lora)  # now, so that no step waits for it
                self._swap.ready[number] = forward
                return forward.layout

    @property
    def weights_number(self) -> int:
        """Load number of the model weights in use; thread-safe."""
        return self._swap.number

    def has_ready(self, number: int) -> bool:
        """Return True if the weights of load `number` are prepared for `TakeWeights`; thread-safe."""
        return number in self._swap.ready

    def handle(self, command: Command | TakeWeights) -> list[Event]:
        """Execute a command; return the events of the requests that the command ends."""
        match command:
            case Submit(requests):
                return [event for admitted in requests for event in self._add(admitted)]
            case Abort(request_id):
                return self._abort(request_id)
            case Pause(request_id, by):
                self._num_pauses += by == "reader"
                for sample in self._samples_of(request_id):
                    sample.paused_by.add(by)
            case Resume(request_id, by):
                for sample in self._samples_of(request_id):
                    sample.paused_by.discard(by)
            case ForgetPrefixes():
                self.scheduler.tree.clear()
            case DropLora(number):
                self._loras.pop(number, None)
            case DropWeights(number):
                self._swap.ready.pop(number, None)
            case TakeWeights(number, finishes):
                self._swap.next = number
                return [*self._end_all(paused_only=finishes), *self._swap_weights()]
        return []

    def step(self) -> list[Event]:
        """Run one step and return its events."""
        step = self.advance()
        try:
            return self.events_of(step)
        except BaseException as error:  # noqa: BLE001 - as in `advance`
            return self.fail_step(step, error)

    def advance(self) -> StepDeltas:
        """Run the part of a step that the next step depends on; the result must be passed to `events_of`."""
        began_s = runtime.perf_counter()
        step = self._advance()
        self._durations["step"].add(runtime.perf_counter() - began_s)
        return step

    def _advance(self) -> StepDeltas:
        with self.clock.part("schedule"):
            plan = self.scheduler.schedule()
        try:
            plan.sample_rows = self.sampling.prepare(plan.sample_rows)
            batch = plan.batch()
            activations = None
            if plan.captured:
                activations = StepActivations(self.forward, plan, batch)
                batch = activations.batch
            with self.clock.part("forward"):
                self.forward.run(batch)
            scored: list[HostRows] = []
            if plan.prompt_rows:
                with self.clock.part("prompt_rows"):
                    scored = self.scorer.score(plan.prompt_rows)
            with self.clock.part("sample"):
                drawn = self._draw(plan.sample_rows, batch.draw_slots)
            with self.clock.part("record"):
                step = self.recorder.record(zip(plan.prompt_rows, scored, strict=True), drawn)
                if activations is not None:
                    activations.collect(plan, step, self.recorder)
                step.send(self.send)
        except BaseException as error:  # noqa: BLE001 - any error ends these requests, not the engine
            step = self._fail(plan, error)
            step.others = self._swap_weights()
            return step
        self.scheduler.settle(plan)
        self._retire()
        step.others = self._swap_weights()
        return step

    def events_of(self, step: StepDeltas) -> list[Event]:
        """Wait until a step's rows are on the host, and return the step's events.

        Must be called once per step, in order, on any thread.
        """
        with self.clock.part("to_host"):
            return [*step.arrived(), *step.others]

    def fail_step(self, step: StepDeltas, error: BaseException) -> list[Event]:
        """End the samples of a step whose events could not be computed; return the events of their ends."""
        reason = _as_reason(error)
        for sample in step.deltas:
            if not sample.is_finished:
                self.scheduler.remove(sample)
            sample.end = Finish("error", error=reason)
        return [*self.recorder.end(step.deltas), *step.others, *self._swap_weights()]

    def check_integrity(self) -> None:
        """Assert that every KV cache slot has exactly one owner."""
        self.scheduler.check_integrity()
        if self.drafter is not None:
            self.drafter.check_integrity()

    def stats(self) -> EngineStats:
        """Return the current statistics; while the engine runs, they are not an atomic snapshot."""
        scheduler = self.scheduler
        running, waiting = scheduler.running.copy(), scheduler.waiting.copy()
        return EngineStats(
            waiting=len(waiting),
            running=len(running),
            paused=sum(sample.is_paused for sample in [*running, *waiting]),
            free_slots=scheduler.num_available,
            cached_tokens=scheduler.num_cached_tokens,
            preempted=scheduler.num_preempted,
            pauses=self._num_pauses,
            drafted_tokens=scheduler.drafts.num_drafted,
            accepted_tokens=scheduler.drafts.num_accepted,
            drafted_by_position=[*scheduler.drafts.drafted_by_position],
            accepted_by_position=[*scheduler.drafts.accepted_by_position],
            seconds=dict(self.clock.seconds),
            processors=dict(self.sampling.pipeline.counters),
            durations={name: lasted.copy() for name, lasted in self._durations.items()},
        )

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            self.forward.num_slots,
            max_num_batched_tokens=self.config.scheduler_config.max_num_batched_tokens,
            max_num_seqs=self.config.scheduler_config.max_num_seqs,
            rope_boundary=self.forward.rope_boundary,
            gathers_calls=self.sampling.pipeline.gathers_calls,
            waits=self._durations["queue"],
            on_free=self.scorer.forget,
            drafter=self.drafter,
        )

    def _swap_weights(self) -> list[Event]:
        """Switch to the pending weights, if there are any and no sample is left; start the held requests.

        Paused samples are ended. The scheduler and the caches are replaced, so that nothing computed with the
        old weights remains. Returns the resulting events.
        """
        if self._swap.next is None:
            return []
        events: list[Event] = [*self._end_all(paused_only=True)]
        if any(self.scheduler.samples()):
            return events
        self.forward, held = self._swap.end()
        for lora in list(self._loras.values()):
            self.forward.make_room(lora)
        self.scorer = PromptScorer(self.forward)
        self.scheduler = self._new_scheduler()
        give_back_later_memory()  # frees the old weights, which are in reference cycles, before the next load
        return [*events, *(event for admitted in held for event in self._add(admitted))]

    def _end_all(self, *, paused_only: bool) -> list[Delta]:
        samples = [sample for sample in self.scheduler.samples() if sample.is_paused or not paused_only]
        for sample in samples:
            sample.fail(WeightsReplacedError("the model's weights were replaced; send the request again"))
            self.scheduler.remove(sample)
        return self.recorder.end(samples)

    def _add(self, admitted: Admitted) -> list[Event]:
        if self._swap.next is not None:
            self._swap.held.append(admitted)
            return []
        request, number = admitted.request, next(self._counter)
        lora = self._loras.get(admitted.lora_number)
        if admitted.lora_number and lora is None:
            gone = f"LoRA weights {request.params.lora!r} were lost in a process exit; please report this"
            return [Failure(request.request_id, EngineError(gone))]
        samples = [
            Sample(
                request,
                index,
                self.max_len,
                partial(new_generator, request, number, index, self.config.seed),
                lora,
                weights_number=self._swap.number,
                admitted_s=admitted.admitted_s,
            )
            for index in range(request.params.num_samples)
        ]
        for sample in samples:
            if request.params.captures or request.lens is not None:
                sample.capture_as(
                    SampleCapture.of(request, sample.index, self.forward.shape), self.forward.shape
                )
            self.recorder.open(sample)
            if admitted.processor_args:
                self.sampling.open(sample, number, admitted.processor_args)
            if self.config.scheduler_config.speculate:
                sample.drafts = Drafts(refusal=self.sampling.why_no_drafts(sample))
            if not sample.is_finished:
                self.scheduler.add(sample)
        return [*self.recorder.end(sample for sample in samples if sample.is_finished)]

    def _abort(self, request_id: str) -> list[Event]:
        held = self._swap.take(request_id)
        if held is not None:
            return [
                Delta(request_id=request_id, index=index, finish=Finish("abort")) for index in range(held)
            ]
        samples = self._samples_of(request_id)
        for sample in samples:
            sample.finish(Finish("abort"))
            self.scheduler.remove(sample)
        return [*self.recorder.end(samples), *self._swap_weights()]

    def _samples_of(self, request_id: str) -> list[Sample]:
        samples = self.scheduler.samples()
        return [sample for sample in samples if sample.request.request_id == request_id]

    def _draw(self, rows: list[SampleRow], slots: IntArray) -> list[Drawn]:
        """Sample a token for each row; `slots` has, for each row, the KV slot of the token before it."""
        drawn: list[Drawn] = []
        for chunk in self.sampling.chunks(rows):
            logits = as_rows(self._logits(rows[chunk], slots[chunk]))
            with inference_mode(logits):
                sampled = self.sampling.draw(rows[chunk], logits)
            drawn += [Drawn(row, sampled, index) for index, row in enumerate(rows[chunk])]
        return drawn

    def _logits(self, rows: list[SampleRow], slots: IntArray) -> Any:
        """Return (rows, vocabulary) logits after the tokens in `slots`, each row with its sample's LoRA."""
        hidden = self.forward.hidden_rows(slots)
        loras = [row.sample.head_lora for row in rows]
        if not any(loras):
            return self.forward.head(hidden)
        logits: Any = None
        for lora in dict.fromkeys(loras):
            indices = [index for index, own in enumerate(loras) if own is lora]
            part: Any = as_rows(self.forward.head(hidden[indices], lora))
            if logits is None:
                shape = (len(loras), part.shape[1])
                logits = (
                    np.empty(shape, part.dtype) if isinstance(part, np.ndarray) else part.new_empty(shape)
                )
            logits[indices] = part
        return logits

    def _retire(self) -> None:
        """Release the samples that have ended, in an order that depends only on the requests."""
        for sample in [sample for sample in self.scheduler.running if sample.is_finished]:
            self.scheduler.release(sample)

    def _fail(self, plan: StepPlan, error: BaseException) -> StepDeltas:
        failed = self.scheduler.roll_back(plan)
        reason = _as_reason(error)
        for sample in failed:
            sample.fail(reason)
        return StepDeltas(dict(zip(failed, self.recorder.end(failed), strict=True)))


def _as_reason(error: BaseException) -> LogprobeError:
    if isinstance(error, LogprobeError):
        return error
    reason = ForwardError(f"the step failed: {error!r}")
    reason.__cause__ = error
    return reason
