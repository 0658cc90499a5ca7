"""The stages of the pipeline in execution order, and the selection of stages for a request."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logprobe.errors import (
    ConflictingParametersError,
    MissingPackageError,
    ParameterError,
    ProcessorError,
    closest,
    shortened,
)
from logprobe.kernels.placement import as_tensor, inference_mode
from logprobe.processors import conflicts, registry
from logprobe.processors.arguments import check_token_ids, field_args, keys_of, to_args
from logprobe.processors.batch import ArgsView, BatchRow
from logprobe.processors.interface import MaskLogitsProcessor, ProcessorCounter
from logprobe.processors.styles import SlotStyle, StyledParams, Updates, UpdateStyle, needs_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from logprobe.config import EngineConfig
    from logprobe.processors.batch import BatchState
    from logprobe.processors.interface import LogitsProcessor, ModelFacts

BEFORE_CUSTOM: Final = (
    "AllowedTokensLogitsProcessor",
    "BannedWordsLogitsProcessor",
    "MinTokensLogitsProcessor",
    "GrammarLogitsProcessor",
    "LogitBiasLogitsProcessor",
)
AFTER_CUSTOM: Final = ("PenaltiesLogitsProcessor",)
# Built-ins that neither mask nor unmask tokens.
NEUTRAL: Final = frozenset(
    {"LogitBiasLogitsProcessor", *AFTER_CUSTOM, "CaptureLogitsProcessor", "GlobalLogprobsCapture"}
)
CUSTOM_PARAMETER: Final = "logits_processors_args"
NEAR: Final = 0.8  # similarity above which an unknown key counts as misspelled


@dataclass(slots=True, eq=False)
class Stage:
    """One processor at its position in the execution order."""

    name: str
    processor: LogitsProcessor
    args_type: type[msgspec.Struct] | None
    is_registered: bool  # True if the operator registered it; False if request fields use it
    is_own: bool  # True for built-ins, whose output is not checked
    is_invariant: bool  # result of the processor's `is_argmax_invariant`
    is_read: bool  # True if argmax-invariant and `keeps_rows`
    takes_tensors: bool  # True if the processor gets torch tensors on the CPU too
    counter: ProcessorCounter
    show: Callable[[BatchState], object]  # calls `update_state` in the style that the processor uses
    previous: tuple[BatchRow, ...] = ()  # rows of the latest update

    def apply(self, logits: Any) -> Any:
        """Return the result of the processor's `apply`, which may be `logits` itself, changed in place."""
        if not self.takes_tensors:
            return self.processor.apply(logits)
        tensor = as_tensor(logits)
        with inference_mode(tensor):
            changed = self.processor.apply(tensor)
        return logits if changed is tensor else changed

    @property
    def sees_all(self) -> bool:
        """True if the processor gets every row of a step, including rows that it does not apply to."""
        return isinstance(self.processor, SlotStyle)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the processor's arguments; empty if it does not declare any."""
        return self.processor.arg_names if self.args_type is None else keys_of(self.args_type)

    @property
    def is_neutral(self) -> bool:
        """True for a built-in processor that neither masks nor unmasks tokens."""
        return self.is_own and self.name in NEUTRAL

    @property
    def takes_any(self) -> bool:
        """True if the processor accepts all keys that no other processor has."""
        return self.args_type is None and not self.processor.arg_names


@dataclass(slots=True)
class Stages:
    """All stages in execution order, which is the same for every request."""

    ordered: list[Stage]
    model: ModelFacts
    counters: dict[str, ProcessorCounter] = field(default_factory=dict)
    _consistent: Any = None  # latest parameters whose masks passed the conflict check

    @classmethod
    def build(cls, config: EngineConfig, model: ModelFacts) -> Stages:
        """Create the only instance of each processor.

        Raises:
            ParameterError: a registered processor cannot be loaded or created.
            MissingPackageError: a processor needs torch, which is not installed.
        """
        stages = cls([], model)
        for name in BEFORE_CUSTOM:
            stages._append(registry.load_processor(name), config, is_registered=False)
        for processor_type in registry.load_processors(config.logits_processors).values():
            stages._append(processor_type, config, is_registered=True)
        for name in AFTER_CUSTOM:
            stages._append(registry.load_processor(name), config, is_registered=False)
        return stages

    @property
    def registered(self) -> list[Stage]:
        """The stages that the operator registered."""
        return [stage for stage in self.ordered if stage.is_registered]

    def admit(self, params: Any) -> dict[int, Any]:
        """Return the typed arguments of each stage that applies to a request, by stage index; thread-safe.

        Raises:
            ParameterError: no processor takes one of the arguments, or a processor rejects its arguments.
            ConflictingParametersError: several masks together leave no possible text.
            ProcessorError: a processor's check raised an exception other than `ValueError`.
        """
        asked = {}
        for index, args, parameter in self._asked(params):
            self._check(self.ordered[index], args, parameter, params)
            asked[index] = args
        if len(asked) > 1 and params is not self._consistent:
            self._check_masks(asked, params)
            self._consistent = params
        return asked

    def conflict(self, indices: Iterable[int], params: Any, fault: str) -> ConflictingParametersError:
        """Return the error for a request in which the stages with these indices contradict each other."""
        fields = {asked.processor: asked.parameter for asked in field_args(params)}
        stages = [self.ordered[index] for index in indices]
        names = [CUSTOM_PARAMETER if stage.is_registered else fields[stage.name] for stage in stages]
        return ConflictingParametersError(names, [stage.name for stage in stages], fault)

    def dead_end(self, rows: Mapping[int, BatchRow]) -> ConflictingParametersError:
        """Return the error for a sample whose stages (the keys of `rows`) leave no token to sample."""

        def is_conflict(masks: conflicts.Masks) -> bool:
            return not len(conflicts.possible_tokens(masks, self.model.vocab_size))

        first = next(iter(rows.values()))
        masks = self._masks(rows)
        indices = [index for index in rows if not self.ordered[index].is_neutral] or [*rows]
        if masks and is_conflict(masks):
            indices = self._smallest(masks, is_conflict)
        fault = f"leaves no token to draw after {len(first.output_token_ids)} tokens"
        return self.conflict(indices, first.params, fault)

    def take_in(self, plain: Mapping[int, Any]) -> dict[int, Any]:
        """Convert the plain arguments of a request that another process admitted to typed arguments.

        Each processor checks the arguments again in this process, since checks may prepare state. Raises the
        same errors as `admit`.
        """
        taken: dict[int, Any] = {}
        for index, values in plain.items():
            stage = self.ordered[index]
            kind = stage.args_type
            args: Any = ArgsView(values) if kind is None else msgspec.convert(values, kind, str_keys=True)
            self._check(stage, args, CUSTOM_PARAMETER)
            taken[index] = args
        return taken

    def _asked(self, params: Any) -> Iterator[tuple[int, Any, str]]:
        """Yield (stage index, arguments, name of the request parameter that set them)."""
        if fields := field_args(params):
            own = {stage.name: index for index, stage in enumerate(self.ordered) if not stage.is_registered}
            for asked in fields:
                yield own[asked.processor], asked.args, asked.parameter
        for index, args in self._custom_args(params.logits_processors_args or {}).items():
            yield index, args, CUSTOM_PARAMETER

    def _check_masks(self, asked: Mapping[int, Any], params: Any) -> None:
        """Raise `ConflictingParametersError` if a request's masks allow no text that can end."""
        stages = [self.ordered[index] for index in asked]
        if not all(stage.is_neutral or isinstance(stage.processor, MaskLogitsProcessor) for stage in stages):
            return  # another processor may unmask tokens

        def is_conflict(masks: conflicts.Masks) -> bool:
            return not conflicts.can_end(masks, params, self.model.eos_token_ids, self.model.vocab_size)

        rows = {
            index: BatchRow(request_id="", args=args, prompt_token_ids=(), output_token_ids=(), params=params)
            for index, args in asked.items()
        }
        masks = self._masks(rows)
        if len(masks) > 1 and is_conflict(masks):
            has_first = len(conflicts.possible_tokens(masks, self.model.vocab_size))
            fault = "leaves no text that can end" if has_first else "leaves no token to draw"
            raise self.conflict(self._smallest(masks, is_conflict), params, fault)

    def _masks(self, rows: Mapping[int, BatchRow]) -> list[tuple[MaskLogitsProcessor, BatchRow]]:
        processors = ((self.ordered[index].processor, row) for index, row in rows.items())
        return [(item, row) for item, row in processors if isinstance(item, MaskLogitsProcessor)]

    def _smallest(self, masks: conflicts.Masks, is_conflict: Callable[[conflicts.Masks], bool]) -> list[int]:
        """Return the stage indices of a minimal set of conflicting masks."""
        needed = [processor for processor, _ in conflicts.smallest_conflict(masks, is_conflict)]
        return [index for index, stage in enumerate(self.ordered) if stage.processor in needed]

    def _append(
        self, processor_type: type[LogitsProcessor], config: EngineConfig, *, is_registered: bool
    ) -> None:
        name = processor_type.__name__
        try:
            processor = registry.make_processor(processor_type, config)
            processor.bind(self.model)
            is_invariant = bool(processor.is_argmax_invariant())
            takes_tensors = needs_tensors(processor)
        except MissingPackageError:
            raise
        except Exception as error:
            raise ParameterError("logits_processors", f"cannot create {name}: {error!r}") from error
        # A built-in processor that is both registered and used by request fields has one counter.
        counter = self.counters.setdefault(name, ProcessorCounter())
        is_own = name in registry.BUILT_INS and registry.load_processor(name) is processor_type
        update_state: Any = processor.update_state
        show = Updates(update_state).show if isinstance(processor, UpdateStyle) else update_state
        stage = Stage(
            name,
            processor,
            processor_type.Args,
            is_registered,
            is_own,
            is_invariant,
            is_invariant and processor.keeps_rows,
            takes_tensors,
            counter,
            show,
        )
        self.ordered.append(stage)

    def _custom_args(self, arguments: dict[str, Any]) -> dict[int, Any]:
        registered = self.registered
        if not arguments and not any(stage.processor.applies_to_all for stage in registered):
            return {}
        values = {key: value for key, value in arguments.items() if value is not None}
        named = {key for stage in registered for key in stage.keys}
        free = values.keys() - named
        is_taken = any(stage.takes_any for stage in registered)
        for key in sorted(free):
            if not is_taken or closest(key, named, NEAR):
                raise ParameterError(CUSTOM_PARAMETER, self._unknown(key))
        args_by_stage: dict[int, Any] = {}
        for index, stage in enumerate(self.ordered):
            if not stage.is_registered:
                continue
            own = {key: values[key] for key in stage.keys if key in values}
            if not (own or stage.processor.applies_to_all or (stage.takes_any and free)):
                continue
            if stage.args_type is not None:
                args_by_stage[index] = to_args(own, stage.args_type, CUSTOM_PARAMETER)
            else:
                args_by_stage[index] = ArgsView(values if stage.takes_any else own)
        return args_by_stage

    def _check(self, stage: Stage, args: Any, parameter: str, params: Any = None) -> None:
        if stage.args_type is not None:
            check_token_ids(args, self.model.vocab_size, parameter)
        try:
            stage.processor.check_args(args)
            if params is not None and isinstance(stage.processor, UpdateStyle):
                stage.processor.validate_params(StyledParams.of(params))
        except ParameterError as error:
            said = str(error).removeprefix(f"{parameter}: ")
            raise ParameterError(parameter, said) from error
        except ValueError as error:
            raise ParameterError(parameter, f"{stage.name}: {error}") from error
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C
            raise ProcessorError(stage.name, f"could not check its arguments: {error!r}") from error

    def _unknown(self, key: str) -> str:
        registered = ", ".join(f"{stage.name} ({', '.join(stage.keys)})" for stage in self.registered)
        owner = registry.built_in_with(key)
        known = sorted(name for stage in self.registered for name in stage.keys)
        near = closest(key, known, 0.6)
        if owner is not None:
            remedy = f"{owner} has it but is not registered; start with logits_processors=[{owner!r}]"
        elif near:
            remedy = f"did you mean {near!r}?"
        else:
            remedy = "register the processor that has it with logits_processors=[...]"
        refused = f"no registered processor has the argument {shortened(key)!r}"
        return f"{refused}; {remedy}; registered: {registered or 'none'}"
