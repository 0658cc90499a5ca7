"""Adapters for processors from other libraries: one instance per request, applied to a copy of its row.

The caller's factory creates the instance from the request's arguments. Each adapter returns a
`LogitsProcessor` class to register. All adapters except `adapt_matcher` need torch, because their processors
get torch tensors. State of different requests is never shared, and the raw logits are never modified.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, final

import numpy as np

from logprobe.errors import require
from logprobe.kernels.placement import as_rows, as_tensor, copied, inference_mode, like, torch_for
from logprobe.processors.batch import BatchRow, BatchState, RowKey
from logprobe.processors.builtin.matchers import allowed_tokens, as_matcher
from logprobe.processors.interface import LogitsProcessor, ModelFacts, OverruledError
from logprobe.processors.styles import BatchUpdate, StyledParams

if TYPE_CHECKING:
    import msgspec
    from torch import Tensor

    from logprobe.config import EngineConfig

_PURPOSE = "logits processors of vLLM and transformers"
Factory: TypeAlias = Callable[[Any], Any]
"""Function that creates a request's processor from its arguments (the `args` type, or an `ArgsView`)."""


class Rule(Protocol):
    """Common interface for the processor of one request."""

    def observe(self, row: BatchRow) -> None:
        """Process the tokens generated so far; called once per step."""
        ...

    def change(self, row: BatchRow, scores: Any) -> Any:
        """Apply the processor to a private copy of the row's logits, (1, V), and return the result."""
        ...


MakeRule: TypeAlias = Callable[[BatchRow, ModelFacts], Rule]


def adapt_transformers(
    factory: Factory, *, name: str, args: type[msgspec.Struct] | None = None
) -> type[LogitsProcessor]:
    """Adapt transformers' `processor(input_ids (1, T) int64, scores (1, V)) → (1, V)`."""

    def make(row: BatchRow, model: ModelFacts) -> Rule:
        del model
        processor = factory(row.args)

        def call(row: BatchRow, scores: Tensor) -> Tensor:
            ids = [*map(int, row.prompt_token_ids), *row.output_token_ids]
            return processor(like(np.array([ids], np.int64), scores), scores)  # type: ignore[no-any-return]

        return _CallRule(call)

    return _adapted(name, args, make)


def adapt_callable(
    factory: Factory, *, name: str, args: type[msgspec.Struct] | None = None
) -> type[LogitsProcessor]:
    """Adapt `f(output_ids, row (V,)) → (V,)` or `f(prompt_ids, output_ids, row (V,)) → (V,)`."""

    def make(row: BatchRow, model: ModelFacts) -> Rule:
        del model
        function = factory(row.args)
        num_parameters = len(inspect.signature(function).parameters)
        require(
            num_parameters in {2, 3},
            "factory",
            f"{name}: returned a callable with {num_parameters} parameters; it must take 2 or 3",
        )
        prompt = [*map(int, row.prompt_token_ids)]
        first = (prompt,) if num_parameters == 3 else ()

        def call(row: BatchRow, scores: Tensor) -> Tensor:
            changed: Tensor = function(*first, list(row.output_token_ids), scores[0])
            return changed.unsqueeze(0)

        return _CallRule(call)

    return _adapted(name, args, make)


def adapt_matcher(
    factory: Factory, *, name: str, args: type[msgspec.Struct] | None = None
) -> type[LogitsProcessor]:
    """Adapt a bitmask matcher: `llguidance.LLMatcher` or `xgrammar.GrammarMatcher`."""

    def make(row: BatchRow, model: ModelFacts) -> Rule:
        return _MatcherRule(factory(row.args), model)

    return _adapted(name, args, make, needs_torch=False)


def adapt_vllm(
    processor: type[Any], *, name: str | None = None, args: type[msgspec.Struct] | None = None
) -> type[LogitsProcessor]:
    """Adapt a logits processor class with vLLM's batch interface.

    The interface is `update_state(batch_update)`, `is_argmax_invariant()` and `apply(logits)`.

    An instance is created as `processor(facts, device, is_pin_memory)`, where `facts` are `ModelFacts`. The
    instance sees a batch of one request, which has the parameters (with the processor arguments as
    `extra_args`), the prompt, and the live list of output tokens.
    """

    def make(row: BatchRow, model: ModelFacts) -> Rule:
        return _BatchOfOne(processor(model, torch_for(_PURPOSE).device("cpu"), False), row)

    own_check = getattr(processor, "validate_params", lambda _: None)
    return _adapted(name or processor.__name__, args, make, lambda values: own_check(_params(values)))


def _params(args: Any, params: Any = None) -> StyledParams:
    return StyledParams(params, dict(args) if isinstance(args, Mapping) else _as_dict(args))


def _as_dict(args: Any) -> dict[str, Any]:
    return {name: getattr(args, name) for name in args.__struct_fields__}


@final
class _CallRule:
    """A rule that calls a stateless function."""

    def __init__(self, call: Callable[[BatchRow, Tensor], Tensor]) -> None:
        self._call = call

    def observe(self, row: BatchRow) -> None:
        """Do nothing, since each call gets all tokens."""

    def change(self, row: BatchRow, scores: Any) -> Any:
        tensor = as_tensor(scores)
        with inference_mode(tensor):
            return self._call(row, tensor)


@final
class _MatcherRule:
    """A rule that masks tokens with a bitmask matcher."""

    def __init__(self, matcher: Any, model: ModelFacts) -> None:
        self._matcher = as_matcher(matcher, model.vocab_size)
        self._model = model
        self._num_observed = 0

    def observe(self, row: BatchRow) -> None:
        """Advance the matcher by the tokens that were not observed before."""
        for token_id in row.output_token_ids[self._num_observed :]:
            if not self._matcher.accept(token_id) and token_id not in self._model.eos_token_ids:
                raise OverruledError(f"the matcher does not accept token {token_id}")
        self._num_observed = len(row.output_token_ids)

    def change(self, row: BatchRow, scores: Any) -> Any:
        """Mask the tokens that are not allowed next; after the text's end, all except EOS tokens."""
        del row
        mask = self._matcher.mask()
        if mask is None:
            allowed = np.zeros(self._model.vocab_size, np.bool_)
            allowed[sorted(self._model.eos_token_ids)] = True
        else:
            allowed = allowed_tokens(mask, self._model.vocab_size)
        scores[:, like(~allowed, scores)] = -np.inf
        return scores


@final
class _BatchOfOne:
    """A rule that runs a logits processor with vLLM's batch interface on a batch of one request."""

    def __init__(self, processor: Any, row: BatchRow) -> None:
        self._processor = processor
        prompt = [*map(int, row.prompt_token_ids)]
        added = (0, _params(row.args, row.params), prompt, row.output_token_ids)
        self._update: BatchUpdate | None = BatchUpdate(1, (), (added,), ())

    def observe(self, row: BatchRow) -> None:
        """Tell the processor at the first step that the request was added, later that nothing changed."""
        del row
        self._processor.update_state(self._update)
        self._update = None

    def change(self, row: BatchRow, scores: Any) -> Any:
        del row
        tensor = as_tensor(scores)
        with inference_mode(tensor):
            return self._processor.apply(tensor)


class PerRequestProcessor(LogitsProcessor):
    """Creates a rule for each request and applies the rule to a private copy of the request's row."""

    make_rule: ClassVar[MakeRule]
    own_check: ClassVar[Callable[[Any], object]]
    needs_torch: ClassVar[bool]

    def __init__(self, config: EngineConfig) -> None:
        del config
        if self.needs_torch:
            torch_for(_PURPOSE)
        self._model: ModelFacts | None = None
        self._rows: tuple[BatchRow, ...] = ()
        self._rules: dict[RowKey, Rule] = {}

    def bind(self, model: ModelFacts) -> None:
        """Receive the model's properties, which matchers need."""
        self._model = model

    def check_args(self, args: Any) -> None:
        """Call the other library's validation, if it has one."""
        type(self).own_check(args)

    def update_state(self, batch: BatchState) -> None:
        """Create rules for new rows, and pass to every rule its row with the tokens so far."""
        assert self._model is not None, "bind comes first"
        known, self._rules, self._rows = self._rules, {}, batch.rows
        for row in batch.rows:
            self._rules[row.key] = known.get(row.key) or type(self).make_rule(row, self._model)
            self._rules[row.key].observe(row)

    def apply(self, logits: Any) -> Any:
        """Apply each rule to its row."""
        for index, row in enumerate(self._rows):
            scores = copied(logits[index : index + 1])
            changed = self._rules[row.key].change(row, scores)
            if changed.shape != scores.shape:
                raise ValueError(f"returned a row of shape {tuple(changed.shape)}")
            logits[index : index + 1] = as_rows(changed) if isinstance(logits, np.ndarray) else changed
        return logits


def _adapted(
    name: str,
    args: type[msgspec.Struct] | None,
    make: MakeRule,
    check: Callable[[Any], object] = lambda _: None,
    *,
    needs_torch: bool = True,
) -> type[LogitsProcessor]:
    members = {
        "__doc__": f"Runs one instance of {name} per request.",
        "Args": args,
        "make_rule": staticmethod(make),
        "own_check": staticmethod(check),
        "needs_torch": needs_torch,
    }
    return type(name, (PerRequestProcessor,), members)


__all__ = [
    "adapt_callable",
    "adapt_matcher",
    "adapt_transformers",
    "adapt_vllm",
]
