"""The simulated world: a real engine on the hashed model, driven by a plan, watched at every step.

`simulate(plan)` raises the first thing that is wrong. What must hold is in `Watched*` (at each step and each
published event), `oracle` (each result) and `World._check_rest` (at the end).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import tempfile
from collections import Counter
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from logprobe import errors
from logprobe.config import EngineConfig
from logprobe.engine import engine as engine_module
from logprobe.engine.backends import start as start_module
from logprobe.engine.backends import thread as thread_module
from logprobe.engine.backends.process import child as child_module
from logprobe.engine.backends.process import engine as process_module
from logprobe.engine.backends.process import replica as replica_module
from logprobe.engine.backends.process.engine import ProcessEngine
from logprobe.engine.backends.start import NativeParts
from logprobe.engine.backends.thread import EngineThread
from logprobe.engine.engine import Engine
from logprobe.engine.front import Front
from logprobe.engine.plan.drafts import MAX_DRAFTS
from logprobe.kernels import threads as kernel_threads
from logprobe.sampling import SamplingParams
from logprobe.transport.messages import Abort, Delta, Failure, LoadLora, Request, Submit, TakeWeights
from simulation.clockwork import Clockwork, Loop, SimThread
from simulation.hashed import CONTEXT_LEN, EOS, HashedForward, capabilities, text_edge
from simulation.oracle import Oracle
from simulation.plan import Ask, Close, Control, Fault, Leave, Lora, Plan, Swap, Visit
from simulation.processes import SimLauncher
from simulation.serving import Served

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logprobe.engine.plan.sample import Sample
    from logprobe.engine.plan.scheduler import Scheduler, StepPlan
    from logprobe.transport.messages import Admitted, Event

PATIENCE_S = 200.0  # of virtual time for everything to end
MAX_LATE_STEPS = 3  # after a full buffer, until the engine has paused the request
WAKE_S = 0.3  # for an idle engine to take a request
SOMETIMES = frozenset(
    {
        *("preempted", "evicted", "resumed", "prefix found", "draft accepted", "draft rejected"),
        *("chunk cut by abort", "reader paused", "caller paused", "reader left", "dead reader"),
        *("swap waited", "request held for swap", "ended by swap", "swap failed", "swapped"),
        *("LoRA used", "LoRA replaced while used", "LoRA load failed", "rotary restart"),
        *("step failed", "rows failed on the way", "processor raised", "row was NaN"),
        *("replica killed", "replica restarted", "replica hung", "message cut", "connection dropped"),
        *("reply", "reply streamed", "client left", "server was full"),
        *("load cancelled", "drained", "closed while busy", "started again"),
    }
)


@dataclass
class Outcome:
    """What one simulation did."""

    digest: int
    num_turns: int
    num_steps: int
    sometimes: Counter[str]


def simulate(plan: Plan) -> Outcome:
    """Run a plan.

    Raises:
        AssertionError: something that must hold does not.
    """
    return World(plan).run()


@dataclass
class Record:
    """A request that was accepted."""

    ask: Ask
    request: Request
    lora_number: int
    least_weights: int  # load number of the weights that were in use when it was submitted
    has_ended: bool = False
    ended: set[int] = field(default_factory=set)  # samples that the core has ended


@dataclass
class Call:
    """An `Ask` or `Visit` that was begun."""

    ask: Ask | Visit
    loop: Loop
    task: asyncio.Task[None] | None = None  # set by the loop

    @property
    def is_done(self) -> bool:
        """True once all its readers have ended."""
        return self.task is not None and self.task.done()

    def cancel(self) -> None:
        """Cancel the readers, on the loop's thread."""
        if self.task is not None:
            self.task.cancel()


class WatchedEngine(Engine):
    """Checks the engine's state after each command and each step."""

    world: World
    faults: Counter[str]
    name: str

    def handle(self, command: Any) -> list[Event]:
        world = self.world
        if isinstance(command, Abort):
            for sample in self._samples_of(command.request_id):
                world.sometimes["chunk cut by abort"] += 0 < sample.num_computed < sample.num_prompt
        if (
            isinstance(command, Submit)
            and not world.had_faults
            and isinstance(world.front.core, EngineThread)
        ):
            waited_s = world.clock.now - min(one.admitted_s for one in command.requests)
            world.require(waited_s <= WAKE_S + world.longest_s, f"an idle engine slept for {waited_s:.3f} s")
        events = super().handle(command)
        if isinstance(command, Abort):
            held = [one for one in self._swap.held if one.request.request_id == command.request_id]
            world.require(not held and not self._samples_of(command.request_id), "an aborted request goes on")
        if isinstance(command, TakeWeights):
            world.sometimes["swap waited"] += self._swap.next is not None
        world.sometimes["request held for swap"] += bool(self._swap.held)
        self._check()
        return events

    def advance(self) -> Any:
        self.world.num_steps += 1
        step = super().advance()
        self._check()
        return step

    def events_of(self, step: Any) -> list[Event]:
        if self.faults["to_host"] and step.deltas:
            self.faults["to_host"] -= 1
            self.world.sometimes["rows failed on the way"] += 1
            raise RuntimeError("on purpose")
        return super().events_of(step)

    def load(self, command: Any) -> Any:
        layout = super().load(command)
        world = self.world
        if isinstance(command, LoadLora):
            world.loras[command.number] = self._loras[command.number].path
        else:
            world.weights[command.number] = self._swap.ready[command.number].weights
        return layout

    def _new_scheduler(self) -> Scheduler:
        scheduler = super()._new_scheduler()
        self._seen: dict[Sample, tuple[Any, int]] = {}  # what it has reached, and for how many steps
        self._started: set[Sample] = set()
        self._arrivals: dict[Sample, int] = {}
        add, schedule = scheduler.add, scheduler.schedule
        evict, preempt = scheduler.tree.evict, scheduler._preempt
        restart = scheduler._restart_outgrown

        def noted_add(sample: Sample) -> None:
            self._arrivals[sample] = len(self._arrivals)
            add(sample)

        def checked_schedule() -> StepPlan:
            waiting = [sample for sample in scheduler.waiting if not sample.is_paused]
            num_preempted = scheduler.num_preempted
            plan = schedule()
            has_preempted = scheduler.num_preempted > num_preempted
            self._check_plan(scheduler, plan, waiting, has_preempted=has_preempted)
            return plan

        def counted_evict(count: int) -> None:
            before = scheduler.pool.num_free
            evict(count)
            self.world.sometimes["evicted"] += scheduler.pool.num_free > before

        def counted_preempt(sample: Sample) -> None:
            self.world.sometimes["preempted"] += 1
            self._started.add(sample)  # perhaps in this same step
            preempt(sample)

        def counted_restart() -> None:
            before = len(scheduler.running)
            restart()
            self.world.sometimes["rotary restart"] += len(scheduler.running) < before

        scheduler.add = noted_add  # type: ignore[method-assign]
        scheduler.schedule, scheduler.tree.evict = checked_schedule, counted_evict  # type: ignore[method-assign]
        scheduler._preempt, scheduler._restart_outgrown = counted_preempt, counted_restart  # type: ignore[method-assign]
        return scheduler

    def _check_plan(
        self, scheduler: Scheduler, plan: StepPlan, waiting: list[Sample], *, has_preempted: bool
    ) -> None:
        """Check a step's size, and that nothing waits while there is capacity, or is overtaken."""
        require, running = self.world.require, scheduler.running
        num_tokens = sum(map(len, plan.tokens))
        require(num_tokens <= scheduler.max_num_batched_tokens, f"a step of {num_tokens} tokens")
        active = [sample for sample in running if not sample.is_paused]
        left = [sample for sample in scheduler.waiting if not sample.is_paused]
        need = max((len(sample.token_ids) + 1 for sample in left), default=0)
        if left and len(active) < scheduler.max_running and not has_preempted:  # else they start next time
            require(scheduler.num_available < need, "a sample waits while there are places and slots")
        new = [sample for sample in waiting if sample not in self._started]
        new.sort(key=self._arrivals.__getitem__)
        began = [sample for sample in new if sample in running]
        for index, sample in enumerate(new):
            is_behind = sample in left and any(
                other in began and (other.caller, other.call) == (sample.caller, sample.call)
                for other in new[index + 1 :]
            )
            shown = [(one.request.request_id, one.index, one.call, one in began) for one in new]
            require(not is_behind, f"a sample overtook an earlier one of its call: {shown}")
        for sample in began:
            self.world.sometimes["prefix found"] += sample.num_cached > 0
        self._started.update(sample for sample in running)
        work = sum(2 * len(sample._token_ids) + sample.num_prompt_rows for sample in active)
        for sample in active:
            reached = (sample.num_tokens, sample.num_scored, sample.num_computed)
            before, age = self._seen.get(sample, (None, 0))
            age = age + 1 if before == reached and scheduler.num_available else 0
            self._seen[sample] = reached, age
            require(age <= 10 + work, f"a running sample has stood still for {age} steps")

    def _check(self) -> None:
        """Check slots, locks, shares and weights."""
        scheduler = self.scheduler
        try:
            scheduler.check_integrity()
            samples = list(scheduler.samples())
            assert len(set(samples)) == len(samples), "a sample is in the scheduler twice"
            assert not any(sample.is_finished for sample in samples), "a sample that has ended is kept"
            counts = Counter(sample.caller for sample in samples)
            assert counts == scheduler.shares._by_caller, "shares count other samples"
            assert all(s.weights_number == self._swap.number for s in samples), "a sample of old weights"
            assert all(s.node is None and not s.num_computed for s in scheduler.waiting), (
                "slots while waiting"
            )
        except AssertionError as error:
            self.world.clock.fail(error)
            raise
        drafts = scheduler.drafts
        self.world.sometimes["draft accepted"] += drafts.num_accepted > 0
        self.world.sometimes["draft rejected"] += drafts.num_drafted > drafts.num_accepted
        self.world.sometimes["reader paused"] += self._num_pauses > 0
        self.world.sometimes["resumed"] += any(
            sample.num_own_slots and sample.num_generated and sample.num_computed < sample.num_tokens - 1
            for sample in scheduler.running
        )


class WatchedFront(Front):
    """Checks each event that the core publishes."""

    def __init__(self, core: Any, world: World) -> None:
        self._world = world
        self._num_late: Counter[str] = Counter()  # rows that came after a pause, by request
        super().__init__(core, text_edge().vocabulary)

    def _publish(self, events: Iterable[Event]) -> None:
        events = list(events)
        for event in events:
            self._world.check_event(event, is_end=self._is_closed)
            has_rows = isinstance(event, Delta) and (event.token_ids or event.prompt or event.row is not None)
            is_old = has_rows and event.weights_number < self._describer.weights_number
            self._world.require(
                not is_old, f"{event.request_id}: old weights after the swap was acknowledged"
            )
        for event in events:
            inbox = self._streams._inboxes.get(event.request_id)
            is_late = inbox is not None and inbox.published and isinstance(event, Delta)
            late = self._num_late[event.request_id] + len(event.token_ids) if is_late else 0
            self._num_late[event.request_id] = late
            most = MAX_LATE_STEPS * self._world.most_rows(event.request_id)
            self._world.require(late <= most, f"{late} rows for {event.request_id} while it was paused")
        super()._publish(events)


class World:
    """One simulation."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.settings = plan, plan.settings
        self.clock = Clockwork(plan.seed, self.settings.eagerness)
        self.rng = self.clock.rng
        self.sometimes: Counter[str] = Counter()
        self.num_steps = 0
        self.longest_s = self.settings.step_s * 2  # of a step
        self.records: dict[str, Record] = {}
        self.loras: dict[int, str] = {}  # by load number
        self.weights: dict[int, int] = {}
        self.engines: dict[str, WatchedEngine] = {}  # by replica
        self.had_faults = False
        self.allowed: set[type[Exception]] = set()
        self._aborted: set[str] = set()  # by the plan
        self._paused: set[str] = set()  # by the plan
        self._calls: dict[str, Call] = {}
        self._operations: list[SimThread] = []
        self.is_changed = any(isinstance(event, Swap | Lora | Close) for event in plan.events)
        self._first_weights = -1 if self.settings.is_poisoned else 0

    def require(self, holds: bool, what: str) -> None:
        """Fail the simulation if something does not hold."""
        if not holds:
            error = AssertionError(what)
            self.clock.fail(error)
            raise error

    def most_rows(self, name: str) -> int:
        """Return how many rows a step may add for a request."""
        record = self.records.get(name)
        is_late = self.settings.num_replicas or record is None  # messages may be under way for long
        return 1000 if is_late else (1 + MAX_DRAFTS) * record.request.params.num_samples  # type: ignore[union-attr]

    def run(self) -> Outcome:
        """Run the plan to its end."""
        settings = self.settings
        self.max_len = min(CONTEXT_LEN, settings.num_slots)
        self.oracle = Oracle(settings.letters, settings.rope_boundary, self.max_len)
        is_collecting = gc.isenabled()
        logging.disable(logging.CRITICAL)
        gc.disable()  # finalizers would run at other points in each run
        try:
            with ExitStack() as stack:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="simulated-"))
                self._folder = Path(folder)
                for target in (thread_module, process_module):
                    stack.enter_context(mock.patch.object(target, "atexit"))
                stack.enter_context(mock.patch.object(engine_module, "give_back_later_memory"))
                stack.enter_context(mock.patch.object(kernel_threads, "_number", 1))  # rows are short
                stack.enter_context(mock.patch.object(start_module, "build_native_engine", self._build))
                stack.enter_context(mock.patch.object(child_module, "_check_model"))
                self._launcher = SimLauncher(self)
                stack.enter_context(
                    mock.patch.object(process_module, "Launcher", return_value=self._launcher)
                )
                times = {"SILENT_S": 5.0, "STUCK_S": 20.0, "LATE_S": 1.0, "FIRST_DELAY_S": 0.1}
                stack.enter_context(mock.patch.multiple(replica_module, **times))
                stack.enter_context(self.clock.in_charge())
                self._play()
        finally:
            logging.disable(logging.NOTSET)
            if is_collecting:
                gc.enable()
        return Outcome(self.clock.digest, self.clock.num_turns, self.num_steps, self.sometimes)

    def config(self) -> EngineConfig:
        """The settings of the engine."""
        own = self.settings
        return EngineConfig(
            model="hashed",
            device="cpu",
            dtype="float32",
            max_model_len=self.max_len,
            logits_processors=("simulation.hashed:Fussy",),
            max_num_batched_tokens=own.max_num_batched_tokens,
            max_num_seqs=own.max_num_seqs,
            async_scheduling=own.overlap,
            speculate=own.speculate,
            data_parallel_size=max(own.num_replicas, 1),
        )

    def _build(self, config: EngineConfig) -> NativeParts:
        """Make an engine of this world, which runs in the current process."""
        name, faults = self.clock.current.process.name, Counter[str]()

        def before_run(where: str) -> None:
            if where == "load":
                self.clock.sleep(self.rng.choice([0, 0.01, 0.3]))
                return
            if where == "run":
                seconds = self.rng.random() * 2 * self.settings.step_s
                if faults["slow"]:
                    seconds, faults["slow"] = faults["slow"], 0
                self.longest_s = max(self.longest_s, seconds)
                self.clock.sleep(seconds)
            if faults[where]:
                faults[where] -= 1
                self.sometimes["step failed"] += 1
                raise RuntimeError("on purpose")

        own = self.settings
        forward = HashedForward(
            own.num_slots, own.letters, self._first_weights, own.rope_boundary, before_run
        )
        engine = WatchedEngine.__new__(WatchedEngine)
        engine.world, engine.faults, engine.name = self, faults, name
        engine.__init__(config, forward, text_edge(), frozenset([EOS]))  # type: ignore[misc]
        self.engines[name] = engine
        return NativeParts(engine, capabilities(engine), text_edge(), frozenset([EOS]), 1 << 20)

    def _start(self) -> None:
        self.records = {name: record for name, record in self.records.items() if not record.has_ended}
        self.loras.clear()
        self.weights = {0: self._first_weights}
        if self.settings.num_replicas:
            core: Any = ProcessEngine(self.config(), text_edge())
        else:
            parts = self._build(self.config())
            core = EngineThread(parts.engine, parts.capabilities, overlap=self.settings.overlap)
        self.front = WatchedFront(core, self)
        has_visits = any(isinstance(event, Visit) for event in self.plan.events)
        self._served = Served(self) if has_visits else None

    def _play(self) -> None:
        clock = self.clock
        self._loops = [Loop(clock) for _ in range(2)]
        runners = [SimThread(clock, loop.run_forever, name=f"loop-{i}") for i, loop in enumerate(self._loops)]
        for runner in runners:
            runner.start()
        self._start()
        began_s = clock.now
        for event in self.plan.events:
            clock.sleep(max(began_s + event.at - clock.now, 0))
            clock.note("event", event)
            self._do(event)
        self._finish()
        self._check_rest()
        self.front.close()
        for loop in self._loops:
            loop.call_soon_threadsafe(loop.stop)
        for runner in runners:
            runner.join()
        for loop in self._loops:
            loop.close()

    def _do(self, event: Any) -> None:
        match event:
            case Ask() | Visit():
                loop = self._loops[event.loop if isinstance(event, Ask) else 0]
                call = self._calls[event.name] = Call(event, loop)
                call.loop.call_soon_threadsafe(self._begin, call)
            case Leave(name=name) if name in self._calls:
                call = self._calls[name]
                self.sometimes["reader left"] += not call.is_done
                call.loop.call_soon_threadsafe(call.cancel)
            case Control(do="forget"):
                self.front.forget_prefixes()
            case Control(do=do, name=name):
                self.sometimes["caller paused"] += do == "pause" and name in self._calls
                if do == "abort":
                    self._aborted.add(f"{name}.0")
                elif do == "pause":
                    self._paused.add(f"{name}.0")
                getattr(self.front, do)(f"{name}.0")
            case Fault():
                self._harm(event)
            case Lora() | Swap() | Close():
                operation = SimThread(self.clock, self._operate, (event,), type(event).__name__)
                self._operations.append(operation)
                operation.start()
                if isinstance(event, Close) or event.at == 0:
                    operation.join()

    def _harm(self, fault: Fault) -> None:
        self.had_faults = True
        alive = [engine for name, engine in self.engines.items() if self._is_alive(name)]
        if not alive:
            return
        faults = alive[fault.replica % len(alive)].faults
        if fault.what in {"run", "head", "to_host"}:
            self.allowed.add(errors.ForwardError)
            faults[fault.what] += 1
        elif fault.what == "slow":
            faults["slow"] = fault.seconds  # type: ignore[assignment]
            if fault.seconds > replica_module.STUCK_S:
                self.allowed.add(errors.EngineError)
        else:
            self.allowed.add(errors.EngineError)
            self._launcher.harm(fault.replica, fault)

    def _is_alive(self, name: str) -> bool:
        return not self.settings.num_replicas or self._launcher.is_alive(name)

    def _operate(self, event: Lora | Swap | Close) -> None:
        front = self.front
        try:
            match event:
                case Lora(own=None):
                    front.remove_lora(event.name)
                case Lora():
                    self.sometimes["LoRA replaced while used"] += bool(front._held)
                    front.add_lora(event.name, lora_folder(self._folder, event.own))
                case Swap():
                    if not event.finishes:
                        self.allowed.add(errors.WeightsReplacedError)
                    number = front._describer.weights_number
                    front.load_weights({"w": np.array([event.weights], np.float32)}, finishes=event.finishes)
                    assert front._describer.weights_number > number, "the weights were not replaced"
                    self.sometimes["swapped"] += 1
                case Close():
                    self._close(event)
        except errors.ParameterError:
            pass  # no LoRA weights of this name
        except errors.UnsupportedModelError:
            self.sometimes["swap failed" if isinstance(event, Swap) else "LoRA load failed"] += 1
        except errors.EngineClosedError:
            self.sometimes["load cancelled"] += 1
            self.require(front._is_closed, "the engine is closed")
        except errors.EngineError as error:
            self.sometimes["load cancelled"] += 1
            self.require(any(isinstance(error, kind) for kind in self.allowed), f"a load failed: {error!r}")

    def _close(self, event: Close) -> None:
        busy = [call for call in self._calls.values() if not call.is_done]
        if event.drains:
            self._finish()
            self.sometimes["drained"] += bool(busy)
        else:
            self.sometimes["closed while busy"] += bool(busy)
            self.allowed.add(errors.EngineClosedError)
        self.front.close()
        self._wait_for_all()
        if event.again:
            self.sometimes["started again"] += 1
        self._start()

    def _begin(self, call: Call) -> None:
        call.task = call.loop.create_task(self._run_call(call))

    async def _run_call(self, call: Call) -> None:
        try:
            if isinstance(call.ask, Ask):
                await self._ask(call.ask, self.front)
            else:
                assert self._served is not None
                await self._served.visit(call.ask)
        except Exception as error:  # noqa: BLE001 - no exception is expected
            self.clock.fail(error)

    async def _ask(self, ask: Ask, front: Front) -> None:
        requests = [
            Request(
                request_id=f"{ask.name}.{index}",
                prompt_token_ids=np.array(prompt, np.int32),
                params=SamplingParams(**ask.params),
                call=ask.name if len(ask.prompts) > 1 else "",
                caller=ask.caller,
                forced_token_ids=None if ask.forced is None else np.array(ask.forced, np.int32),
                wants_row=ask.wants_row,
            )
            for index, prompt in enumerate(ask.prompts)
        ]
        try:
            admitted = [front.admit(request) for request in requests]
            least = front.weights_number
            for one in admitted:  # before `submit`, whose events may come first
                name = one.request.request_id
                self.records[name] = Record(ask, one.request, one.lora_number, least)
            with front.submitted(admitted) as accepted:
                await self._read_all(front, accepted)
        except (errors.ParameterError, errors.EngineClosedError) as error:
            is_expected = error.parameter == "lora" if isinstance(error, errors.ParameterError) else True
            self.require(is_expected, f"a request was refused: {error!r}")
            for request in requests:
                self.records.pop(request.request_id, None)

    async def _read_all(self, front: Front, accepted: Sequence[Admitted]) -> None:
        for one in accepted:
            self.records[one.request.request_id].lora_number = one.lora_number
            self.sometimes["LoRA used"] += one.lora_number > 0
        tasks = [asyncio.ensure_future(self._read(front, one.request.request_id)) for one in accepted]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, front: Front, name: str) -> None:
        record, num_read = self.records[name], 0
        ask = record.ask
        try:
            if not ask.streams:
                output = await front.result(name)
            else:
                async with aclosing(front.stream(name, buffer_rows=ask.buffer_rows)) as outputs:
                    async for output in outputs:  # noqa: B007 - read below
                        num_read += 1
                        if num_read == ask.leave_after or ask.delay_s > 1e5:
                            break
                        await asyncio.sleep(ask.delay_s)
                    if num_read == ask.leave_after:
                        self.sometimes["reader left"] += 1
                    elif ask.delay_s > 1e5 and not output.is_finished:
                        self.sometimes["dead reader"] += 1
                        await asyncio.sleep(ask.delay_s)
        finally:
            record.has_ended = True
        has_left = num_read == ask.leave_after
        try:
            self._check_output(record, output, has_left=has_left)
        except AssertionError as error:
            self.clock.fail(error)

    def _check_output(self, record: Record, output: Any, *, has_left: bool) -> None:
        """Check a result against the one of the request alone, and an error against those that may be."""
        name = record.request.request_id
        assert output.is_finished or has_left, f"{name} has no end"
        is_aborted = any(one.finish_reason == "abort" for one in output.outputs)
        assert not is_aborted or name in self._aborted, f"{name} was aborted by nobody"
        assert output.weights_number >= record.least_weights, f"{name} has rows of old weights"
        expected = self.oracle.expected(
            record.request, self.weights[output.weights_number], self.loras.get(record.lora_number)
        )
        self.oracle.compare(output, expected, name)
        for completion, alone in zip(output.outputs, expected.outputs, strict=True):
            error = completion.error
            if error is None:
                continue
            own = {errors.ProcessorError: "processor raised", errors.NonFiniteLogitsError: "row was NaN"}
            if type(error) in own and type(error) is type(alone.error):
                self.sometimes[own[type(error)]] += 1
                continue
            if isinstance(error, errors.WeightsReplacedError):
                self.sometimes["ended by swap"] += 1
                if record.ask.streams or name in self._paused:
                    continue  # a swap ends paused requests, also those paused by a full buffer
            assert "please report this" not in str(error), repr(error)
            assert any(isinstance(error, kind) for kind in self.allowed), f"{name} ended with {error!r}"

    def check_event(self, event: Event, *, is_end: bool) -> None:
        """Check that each sample ends once, with nothing after it, and nothing of old weights comes late."""
        record = self.records.get(event.request_id)
        if record is None:
            return
        name = event.request_id
        if isinstance(event, Failure):
            all_samples = set(range(record.request.params.num_samples))
            self.require(is_end or record.ended != all_samples, f"{name} failed after its end")
            record.ended = all_samples
            return
        assert isinstance(event, Delta)
        self.require(event.index not in record.ended, f"{name}: an event after its end")
        is_old = event.token_ids and event.weights_number < record.least_weights
        self.require(not is_old, f"{name}: a token of old weights")
        if event.finish is not None:
            record.ended.add(event.index)

    def _finish(self) -> None:
        """Let all readers and operations come to their end."""
        for operation in self._operations:
            if operation is not self.clock.current:
                operation.join(PATIENCE_S)
                self.require(operation.has_ended, f"{operation.name} has not ended")
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        until_s = self.clock.now + PATIENCE_S
        while open_calls := [call for call in self._calls.values() if not call.is_done]:
            for call in open_calls:
                if isinstance(call.ask, Ask) and call.ask.delay_s > 1e5:
                    call.loop.call_soon_threadsafe(call.cancel)
                self.front.resume(f"{call.ask.name}.0")
            names = [call.ask.name for call in open_calls]
            self.require(self.clock.now < until_s, f"{names} have not ended\n{self.clock.stacks()}")
            self.clock.sleep(0.5)

    def _check_rest(self) -> None:
        """Check that nothing is left of the requests."""
        front, until_s = self.front, self.clock.now + 60
        if self._served is not None:
            future = asyncio.run_coroutine_threadsafe(self._served.check_rest(), self._loops[0])
            while not future.done():
                self.clock.sleep(0.1)
            future.result()
        front.forget_prefixes()
        while problems := self._left():
            self.require(self.clock.now < until_s, f"left at the end: {'; '.join(problems)}")
            self.clock.sleep(0.5)

    def _left(self) -> list[str]:
        front, core = self.front, self.front.core
        left = {
            "outputs": front._builders,
            "readers": front._read,
            "inboxes": front._streams._inboxes,
            "LoRA references": front._held,
            "LoRA loads": [n for n, count in front._loras._holds.items() if count != 1],
        }
        engines = []
        if isinstance(core, EngineThread):
            engines = [core.engine]
            left |= {"commands": core._commands, "waiting swaps": core._taking}
        else:
            assert isinstance(core, ProcessEngine)
            for replica in core._replicas:
                left |= {
                    f"backlogs of {replica.name}": replica._backlogs,
                    f"questions to {replica.name}": replica._asked,
                    f"tokens of {replica.name}": replica.num_queued_tokens,
                    f"start of {replica.name}": not replica.is_up,
                }
            engines = [engine for name, engine in self.engines.items() if self._is_alive(name)]
        for engine in engines:
            left[f"samples in {engine.name}"] = list(engine.scheduler.samples())
            num_used = engine.scheduler.pool.num_slots - engine.scheduler.pool.num_free
            left[f"slots in {engine.name}"] = num_used
            kept = set(engine._loras) ^ {front._loras.number(name) for name in front._loras.paths()}
            left[f"LoRA weights in {engine.name}"] = kept
            left[f"ready weights in {engine.name}"] = engine._swap.ready
            left[f"held requests in {engine.name}"] = engine._swap.held
        return [f"{what}: {value}" for what, value in left.items() if value]


def lora_folder(parent: Path, own: int | None) -> str:
    """Make a folder that stands for LoRA weights; those of number 9 cannot be loaded."""
    folder = parent / f"lora-{own}"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("broken" if own == 9 else str(own))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return str(folder)
