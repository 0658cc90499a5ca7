"""`Pipeline`: passes the rows of logits in a step through the processors of their requests."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.errors import ParameterError, ProcessorError
from logprobe.kernels.placement import as_rows, copied, is_array
from logprobe.processors.batch import ArgsView, BatchRow, BatchState
from logprobe.processors.effects import RowEffect
from logprobe.processors.interface import OverruledError
from logprobe.processors.stages import Stage, Stages
from logprobe.records.rows import host_array

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from logprobe.config import EngineConfig
    from logprobe.errors import ConflictingParametersError, LogprobeError
    from logprobe.kernels.placement import Rows
    from logprobe.processors.interface import LogitsProcessor, ModelFacts, ProcessorCounter

logger = logging.getLogger("logprobe")
NO_ARGS: Final = ArgsView()
MAX_TOLD: Final = 256  # maximum number of failures to log, one per source line


@dataclass(frozen=True, slots=True, eq=False)
class ActiveSample:
    """A sample with at least one processor, and its `BatchRow` for each of its processors' stages."""

    rows: dict[int, BatchRow]  # by stage index
    is_explained: bool
    skips_invariant: bool  # True if greedy, without processed log-probabilities and `explain`

    def after(self, token_ids: list[int]) -> ActiveSample:
        """Return a copy of the sample with `token_ids` appended to its output."""
        rows = {
            index: replace(row, output_token_ids=[*row.output_token_ids, *token_ids])
            for index, row in self.rows.items()
        }
        return replace(self, rows=rows)


@dataclass(slots=True)
class ProcessedRows:
    """Logits after all processors of a step; a failed row has the raw logits."""

    logits: Any  # (R, V) float32, an array or a tensor
    errors: dict[int, LogprobeError] = field(default_factory=dict)
    effects: dict[int, list[RowEffect]] = field(default_factory=dict)  # by row, for requests with `explain`


class Pipeline:
    """Run every processor on the rows it applies to; a failure is confined to its row.

    The operations are, in this order (the pipeline does 2 to 5, and the sampler does all others):

    1. keep the model's logits as *raw*;
    2. masks: allowed tokens, banned words, minimum length, grammar;
    3. bias on single tokens;
    4. registered processors, in the order of declaration;
    5. penalties on tokens that have already occurred;
    6. temperature;
    7. top-k;
    8. top-p;
    9. min-p;
    10. the renormalized result is *processed*;
    11. one uniform number from the request's own generator picks the token.

    If a batch fails in a processor (an exception, a wrong shape or dtype, NaN, no token left), its rows are
    rerun one by one, and only the requests of failing rows end. Every `BaseException` counts as a failure: on
    the engine thread, `SystemExit` and `KeyboardInterrupt` can only come from a processor.
    """

    def __init__(self, config: EngineConfig, model: ModelFacts) -> None:
        self._stages = Stages.build(config, model)
        # True if a processor also applies to requests that set no arguments for it.
        self.applies_to_all = any(stage.processor.applies_to_all for stage in self._stages.registered)
        self._seeing = [index for index, stage in enumerate(self._stages.ordered) if stage.sees_all]
        self._members: dict[int, list[int]] = {}  # in this step: stage index -> indices of rows
        self._samples: Sequence[ActiveSample] = ()
        self._others: Sequence[BatchRow] = ()  # rows after the samples' rows, without processors
        self._told: set[tuple[type[BaseException], tuple[str, int] | None]] = set()  # logged failures
        self._broken: set[int] = set()  # stages whose update failed in this step

    @property
    def gathers_calls(self) -> bool:
        """True if a processor records rows, so that the prompts of one call should run in one step."""
        return any(stage.is_read and stage.processor.applies_to_all for stage in self._stages.registered)

    @property
    def counters(self) -> Mapping[str, ProcessorCounter]:
        """Totals of each processor since the engine started, by name."""
        return self._stages.counters

    @property
    def registered(self) -> dict[str, LogitsProcessor]:
        """The registered processors by name, in execution order."""
        return {stage.name: stage.processor for stage in self._stages.registered}

    def admit(self, params: Any) -> dict[int, Any]:
        """Validate a request and return its typed arguments by stage index; see `Stages.admit`."""
        return self._stages.admit(params)

    def take_in(self, plain: Mapping[int, Any]) -> dict[int, Any]:
        """Convert plain arguments that another process admitted to typed arguments; see `Stages.take_in`."""
        return self._stages.take_in(plain)

    def open(self, row: BatchRow, args_by_stage: Mapping[int, Any]) -> ActiveSample | None:
        """Create the rows of a new sample, which are copies of `row`; None if no processor applies."""
        params: Any = row.params
        if not args_by_stage:
            return None
        all_args = ArgsView(params.logits_processors_args or {})
        rows = {index: _row_for(row, args, all_args) for index, args in args_by_stage.items()}
        shows_processed = params.logprobs is not None and params.logprobs_mode != "raw_logprobs"
        skips = params.is_greedy and not shows_processed and not params.explain
        return ActiveSample(rows, params.explain, skips)

    def sees_all(self, samples: Sequence[ActiveSample]) -> bool:
        """Return True if a processor that applies to one of the samples must get all rows of the step."""
        stages = [(self._stages.ordered[index], index) for index in self._seeing]
        return any(_concerns(stage, index, sample) for stage, index in stages for sample in samples)

    def prepare(self, samples: Sequence[ActiveSample], others: Sequence[BatchRow] = ()) -> None:
        """Pass every processor its rows of the step, in order; call this before the forward pass.

        `others` are the step's further rows, which no processor changes. They are needed if `sees_all`
        returns True.
        """
        self._samples, self._others, self._members, self._broken = samples, others, {}, set()
        for index, stage in enumerate(self._stages.ordered):
            members = [row for row, sample in enumerate(samples) if _concerns(stage, index, sample)]
            if not members and not stage.previous:
                continue
            if members:
                self._members[index] = members
                stage.counter.num_steps += 1
                stage.counter.num_rows += len(members)
            try:
                self._update(stage, self._shown(index, members))
            except BaseException as error:  # noqa: BLE001 - `apply` finds the rows that cause it
                self._broken.add(index)
                if not members:  # there is no request to fail
                    logger.warning("%s failed to release its rows: %r", stage.name, error)

    def apply(self, raw: Rows) -> ProcessedRows:
        """Run the processors on the logits of the prepared rows, (R, V) float32; `raw` is not modified.

        Processors get NumPy arrays, or tensors if the logits are on another device than the CPU.

        The result has no rows for `others`, which the processors only read.
        """
        raw = as_rows(raw)
        run = ProcessedRows(raw)
        explained = {row for row, sample in enumerate(self._samples) if sample.is_explained}
        for index, members in self._members.items():
            stage = self._stages.ordered[index]
            explained_members = [row for row in members if row in explained]
            before = {row: host_array(run.logits[row]).copy() for row in explained_members}
            with timed(stage.counter), np.errstate(all="ignore"):  # results are checked below
                self._run(index, run, raw)
            for row in explained_members:
                effect = RowEffect(stage.name, before[row], host_array(run.logits[row]).copy())
                run.effects.setdefault(row, []).append(effect)
        for row in run.errors:
            run.logits[row] = raw[row]
        run.logits = run.logits[: len(self._samples)]
        return run

    def keeping_state(self, sample: ActiveSample) -> list[str]:
        """Return the names of the processors of a sample that keep state across steps."""
        stages = ((index, self._stages.ordered[index]) for index in sample.rows)
        return [
            stage.name
            for index, stage in stages
            if stage.processor.keeps_state and _concerns(stage, index, sample)
        ]

    def dead_end(self, row: int) -> ConflictingParametersError:
        """Return the error for a prepared row whose processors together left no token to sample."""
        return self._stages.dead_end(self._samples[row].rows)

    def _shown(self, index: int, members: list[int]) -> list[BatchRow]:
        if members and self._stages.ordered[index].sees_all:
            return [*(_row_of(sample, index) for sample in self._samples), *self._others]
        return [self._samples[row].rows[index] for row in members]

    def _update(self, stage: Stage, rows: list[BatchRow]) -> None:
        batch = BatchState(rows, stage.previous)
        stage.previous = ()  # the state is unknown if the update fails
        with timed(stage.counter):
            stage.show(batch)
        stage.previous = batch.rows

    def _run(self, index: int, run: ProcessedRows, raw: Rows) -> None:
        """Run one stage; the logits change only if it succeeds."""
        stage, members = self._stages.ordered[index], self._members[index]
        if index in self._broken:
            self._run_one_by_one(index, run, raw)
            return
        if stage.is_own:
            if run.logits is raw:
                run.logits = copied(raw)
            _apply_own(stage, run.logits, members)
            return
        try:
            changed = _checked_apply(stage, run.logits, members, shows_all=stage.sees_all)
        except BaseException:  # noqa: BLE001 - the rows that cause it are found one by one
            self._run_one_by_one(index, run, raw)
            return
        _put(run, raw, members, changed)

    def _run_one_by_one(self, index: int, run: ProcessedRows, raw: Rows) -> None:
        stage = self._stages.ordered[index]
        for row in self._members[index]:
            batch_row = self._samples[row].rows[index]
            try:
                self._update(stage, [batch_row])
                changed = _checked_apply(stage, run.logits, [row])
            except BaseException as error:  # noqa: BLE001 - it fails this row's request
                stage.counter.num_failures += 1
                if row not in run.errors:
                    run.errors[row] = failure = self._failure(index, row, error, raw)
                    if isinstance(failure, ProcessorError) and not isinstance(error, ParameterError):
                        self._tell(failure, error)
                continue
            _put(run, raw, [row], changed)

    def _failure(self, index: int, row: int, error: BaseException, raw: Rows) -> LogprobeError:
        """Return the error for a row: a fault of the processor, or parameters that contradict each other."""
        stage, rows = self._stages.ordered[index], self._samples[row].rows
        involved: list[int] = []
        if isinstance(error, OverruledError):
            fault = str(error)
            involved = [other for other in rows if other > index]
        elif isinstance(error, _NoTokenError) and _leaves_some(stage, raw, row):
            fault = f"leaves no token to draw after {len(rows[index].output_token_ids)} tokens"
            involved = [other for other in rows if other < index]
        involved = [other for other in involved if not self._stages.ordered[other].is_neutral]
        if not involved:
            return _processor_error(stage, rows[index], error)
        failure = self._stages.conflict(sorted([*involved, index]), rows[index].params, fault)
        failure.__cause__ = error
        return failure

    def _tell(self, failure: ProcessorError, error: BaseException) -> None:
        """Log an exception in a processor with its traceback, once for each source line that raises."""
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = None if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        if (type(error), place) not in self._told and len(self._told) < MAX_TOLD:
            self._told.add((type(error), place))
            logger.error("%s (logged once)", failure, exc_info=error)


@contextmanager
def timed(counter: ProcessorCounter) -> Iterator[None]:
    """Add the wall time of the `with` block to a processor's counter."""
    start = time.perf_counter()
    try:
        yield
    finally:
        counter.seconds += time.perf_counter() - start


def _row_for(row: BatchRow, args: Any, all_args: ArgsView) -> BatchRow:
    return BatchRow(
        request_id=row.request_id,
        args=args,
        prompt_token_ids=row.prompt_token_ids,
        output_token_ids=row.output_token_ids,
        params=row.params,
        sample=row.sample,
        serial=row.serial,
        arguments=all_args,
    )


def _row_of(sample: ActiveSample, index: int) -> BatchRow:
    """Return a sample's row for stage `index`, without arguments if the stage does not apply to it."""
    row = sample.rows.get(index)
    return replace(next(iter(sample.rows.values())), args=NO_ARGS) if row is None else row


def _concerns(stage: Stage, index: int, sample: ActiveSample) -> bool:
    is_skipped = sample.skips_invariant and stage.is_invariant and not stage.is_read
    return index in sample.rows and not is_skipped


def _processor_error(stage: Stage, row: BatchRow, error: BaseException) -> ProcessorError:
    reason = str(error) if isinstance(error, _UnusableLogitsError) else repr(error)
    failure = ProcessorError(stage.name, f"failed request {row.request_id!r}: {reason}")
    failure.__cause__ = error
    return failure


class _UnusableLogitsError(Exception):
    """A processor returned logits that cannot be used."""


class _NoTokenError(_UnusableLogitsError):
    """A processor left a row without a token to sample."""


def _leaves_some(stage: Stage, raw: Rows, row: int) -> bool:
    """Return True if the stage alone, updated with this row, leaves tokens to sample from the raw logits."""
    try:
        _checked_apply(stage, raw, [row])
    except BaseException:  # noqa: BLE001 - the processor fails on its own
        return False
    return True


def _apply_own(stage: Stage, logits: Any, members: list[int]) -> None:
    """Run a built-in processor in place; rows that are not contiguous are copied out and back."""
    start, end = members[0], members[-1] + 1
    if end - start == len(members):
        stage.processor.apply(logits[start:end])
    else:
        logits[members] = stage.processor.apply(logits[members])


def _checked_apply(stage: Stage, logits: Any, members: list[int], *, shows_all: bool = False) -> Any:
    """Return a stage's logits for some rows, computed on a private copy; raise if they are invalid."""
    before = copied(logits) if shows_all else logits[members]
    changed = stage.apply(before)
    if not is_array(changed):
        wanted = "an array" if isinstance(before, np.ndarray) and not stage.takes_tensors else "a tensor"
        raise _UnusableLogitsError(f"apply returned {type(changed).__name__}, not {wanted}")
    changed = as_rows(changed)
    if changed.shape != before.shape:
        raise _UnusableLogitsError(
            f"apply returned the shape {tuple(changed.shape)} instead of {tuple(before.shape)}"
        )
    if changed.dtype != before.dtype:
        raise _UnusableLogitsError(f"apply returned {changed.dtype} instead of {before.dtype}")
    if shows_all:
        changed = before = changed[members]
    is_valid = np.isfinite(best := _best(changed))
    if not is_valid.all():
        # A row that was already invalid is not this processor's fault.
        is_new = ~is_valid & np.isfinite(_best(logits[members]))
        if is_new.any():
            kind = float(best[is_new][0])
            if kind == -np.inf:
                raise _NoTokenError("apply returned a row with no possible token")
            raise _UnusableLogitsError(f"apply returned {'+inf' if kind == np.inf else 'NaN'}")
    # The processor may keep a reference to the rows, so later stages must not modify them.
    return changed if changed is before else copied(changed)


def _best(logits: Any) -> NDArray[np.float32]:
    """Return the largest logit of each row, (rows,) on the host; NaN if the row contains one."""
    return host_array(logits.max(1) if isinstance(logits, np.ndarray) else logits.amax(1))


def _put(run: ProcessedRows, raw: Rows, members: list[int], changed: Any) -> None:
    if len(members) == len(raw):
        run.logits = changed
        return
    if run.logits is raw:
        run.logits = copied(raw)
    run.logits[members] = changed
