"""Several processors together: order, affected rows, and failures that stay within their row."""

# ruff: noqa: ARG002 - an interface's arguments, used or not
from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import pytest

from logprobe.config import EngineConfig
from logprobe.errors import ParameterError, ProcessorError
from logprobe.processors import BatchRow, BatchState, LogitsProcessor, Pipeline
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.processors import ModelFacts
    from logprobe.processors.pipeline import ActiveSample


class AddArgs(msgspec.Struct, kw_only=True):
    add: float = 0.0
    fault: str = ""


class Add(LogitsProcessor):
    """Add a number to a row, and fail in the configured way."""

    Args = AddArgs

    def __init__(self, config: EngineConfig) -> None:
        assert isinstance(config, EngineConfig)
        self.rows: tuple[BatchRow, ...] = ()
        self.num_rows: list[int] = []

    def update_state(self, batch: BatchState) -> None:
        self.rows = batch.rows
        self.num_rows.append(len(batch.rows))
        if any(row.args.fault == "update" for row in batch.rows):
            raise RuntimeError("told to fail")

    def apply(self, logits: Any) -> Any:
        assert len(logits) == len(self.rows)
        for place, row in enumerate(self.rows):
            logits[place] += row.args.add
            match row.args.fault:
                case "raise":
                    raise RuntimeError("told to fail")
                case "nan":
                    logits[place, 3] = np.nan
                case "inf":
                    logits[place, 3] = np.inf
                case "none left":
                    logits[place] = -np.inf
                case "shape":
                    return logits[:, :-1]
                case "dtype":
                    return logits.astype(np.float64)
                case "nothing":
                    return None
        return logits


class Double(LogitsProcessor):
    """Double every row that requests it, out of place."""

    class Args(msgspec.Struct):  # type: ignore[misc]
        double: bool = False

    def __init__(self, config: EngineConfig) -> None:
        self.kept = np.zeros(0)

    def apply(self, logits: Any) -> Any:
        self.kept = logits * 2
        return self.kept


class Invariant(LogitsProcessor):
    Args = type("InvariantArgs", (msgspec.Struct,), {"__annotations__": {"flat": bool}})  # type: ignore[assignment]
    num_rows: ClassVar[int] = 0

    def __init__(self, config: EngineConfig) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Any) -> Any:
        type(self).num_rows += len(logits)
        return logits / 2


@pytest.fixture
def start(facts: ModelFacts) -> Callable[..., Pipeline]:
    return lambda *processors: Pipeline(EngineConfig(logits_processors=list(processors)), facts)


def opened(pipeline: Pipeline, name: str, **params: Any) -> ActiveSample | None:
    asked = SamplingParams(**params)
    args = pipeline.admit(asked)
    row = BatchRow(request_id=name, args=None, prompt_token_ids=[1], output_token_ids=[2], params=asked)
    return pipeline.open(row, args)


def samples_of(pipeline: Pipeline, asked: list[dict[str, Any]]) -> list[ActiveSample]:
    samples = [
        opened(pipeline, f"r{index}", **one)
        if one.keys() & {"logit_bias", "explain", "presence_penalty", "allowed_token_ids"}
        else opened(pipeline, f"r{index}", logits_processors_args=one)
        for index, one in enumerate(asked)
    ]
    return [sample for sample in samples if sample is not None]


def test_a_request_that_asks_nothing_has_no_sample(start: Callable[..., Pipeline]) -> None:
    pipeline = start(Add)
    assert opened(pipeline, "a") is None
    assert opened(pipeline, "a", logits_processors_args={}) is None
    assert opened(pipeline, "a", logits_processors_args={"add": None}) is None


def test_registered_processors_run_in_order_and_each_on_its_rows_alone(
    start: Callable[..., Pipeline], logits: Callable[..., Any]
) -> None:
    asked: list[dict[str, Any]] = [
        {"add": 1.0, "double": True},
        {"double": True},
        {"add": 2.0},
        {"add": 1.0, "double": True},
    ]
    raw = logits(4)
    adds, doubles = np.float32([[1], [0], [2], [1]]), np.float32([[2], [2], [1], [2]])
    for order, expected in (
        ([Add, Double], (raw + adds) * doubles),
        ([Double, Add], raw * doubles + adds),
    ):
        pipeline = start(*order)
        pipeline.prepare(samples_of(pipeline, asked))
        kept = raw.copy()
        done = pipeline.apply(raw)
        assert np.array_equal(done.logits, expected)
        assert np.array_equal(raw, kept), "raw stays raw"
        assert not done.errors


def test_masks_come_before_biases_and_penalties_after_the_registered(
    start: Callable[..., Pipeline], logits: Callable[..., Any]
) -> None:
    pipeline = start(Double)
    sample = opened(
        pipeline,
        "a",
        allowed_token_ids=[2, 4, 6],
        logit_bias={2: 1.0, 5: 50.0},
        logits_processors_args={"double": True},
        presence_penalty=1.5,  # for token 2, the only generated one
    )
    assert sample is not None
    raw = logits(1)
    pipeline.prepare([sample])
    after = pipeline.apply(raw).logits[0]
    expected = np.full(10, -np.inf, np.float32)
    expected[[2, 4, 6]] = raw[0, [2, 4, 6]]
    expected[2] += 1.0
    expected = expected * 2
    expected[2] -= 1.5
    assert np.array_equal(after, expected)


def test_what_a_processor_keeps_for_itself_is_not_changed_by_later_ones(
    start: Callable[..., Pipeline], logits: Callable[..., Any]
) -> None:
    pipeline = start(Double)
    sample = opened(pipeline, "a", logits_processors_args={"double": True}, presence_penalty=2.0)
    assert sample is not None
    raw = logits(1)
    pipeline.prepare([sample])
    pipeline.apply(raw)
    kept: Any = pipeline.registered["Double"]
    assert np.array_equal(kept.kept, raw * 2)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "RuntimeError('told to fail')"),
        ("update", "RuntimeError('told to fail')"),
        ("nan", "apply returned NaN"),
        ("inf", "apply returned +inf"),
        ("none left", "apply returned a row with no possible token"),
        ("shape", "apply returned the shape (1, 9) instead of (1, 10)"),
        ("dtype", "apply returned float64 instead of float32"),
        ("nothing", "apply returned NoneType, not an array"),
    ],
)
def test_a_processor_that_fails_on_one_row_of_eight_fails_that_row_alone(
    start: Callable[..., Pipeline], logits: Callable[..., Any], fault: str, said: str
) -> None:
    pipeline = start(Double, Add)
    asked: list[dict[str, Any]] = [{"add": float(index), "double": True} for index in range(8)]
    asked[5]["fault"] = fault
    samples = samples_of(pipeline, asked)
    raw = logits(8)
    pipeline.prepare(samples)
    done = pipeline.apply(raw)
    assert list(done.errors) == [5]
    error = done.errors[5]
    assert isinstance(error, ProcessorError)
    assert error.processor == "Add"
    assert str(error) == f"Add failed request 'r5': {said}"
    for index in range(8):
        expected = raw[index] if index == 5 else raw[index] * 2 + index
        assert np.array_equal(done.logits[index], expected)
    assert pipeline.counters["Add"].num_failures == 1
    assert pipeline.counters["Double"].num_failures == 0
    # In the next step the failed request is gone, and the rest continues as a batch.
    rest = samples[:5] + samples[6:]
    pipeline.prepare(rest)
    assert np.array_equal(pipeline.apply(raw[:7]).logits[6], raw[6] * 2 + 7)
    kept: Any = pipeline.registered["Add"]
    assert kept.num_rows[-1] == 7


def test_a_row_that_comes_in_with_nan_is_not_the_processors_fault(
    start: Callable[..., Pipeline], logits: Callable[..., Any]
) -> None:
    pipeline = start(Add)
    raw = logits(2)
    raw[0, 0] = np.nan
    pipeline.prepare(samples_of(pipeline, [{"add": 1.0}, {"add": 2.0}]))
    done = pipeline.apply(raw)
    assert not done.errors
    assert np.array_equal(done.logits[1], raw[1] + 2)


def test_greedy_rows_skip_what_leaves_the_best_token_unless_their_numbers_are_shown(
    start: Callable[..., Pipeline], logits: Callable[..., Any]
) -> None:
    pipeline = start(Invariant)
    args = {"logits_processors_args": {"flat": True}}
    shown = {"logprobs": 0, "logprobs_mode": "both"}
    variants: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0} | shown,
        {"temperature": 0, "logprobs": 0, "explain": True},
        {"temperature": 1.0},
    ]
    samples = [opened(pipeline, str(at), **one, **args) for at, one in enumerate(variants)]
    raw = logits(5)
    pipeline.prepare([sample for sample in samples if sample is not None])
    done = pipeline.apply(raw)
    is_skipped = [np.array_equal(done.logits[at], raw[at]) for at in range(5)]
    assert is_skipped == [True, True, False, False, False]


def test_an_explanation_names_each_change_and_the_mass_it_moved(
    start: Callable[..., Pipeline], logits: Callable[..., Any]
) -> None:
    pipeline = start(Add)
    params = {"logprobs": 1, "explain": True, "logit_bias": {4: -2.0}, "allowed_token_ids": [4, 5]}
    sample = opened(pipeline, "a", **params, logits_processors_args={"add": 1.0})
    assert sample is not None
    raw = logits(1)
    pipeline.prepare([sample])
    done = pipeline.apply(raw)
    allowed, bias, add = [effect.among([0, 4, 5]) for effect in done.effects[0]]
    p = np.exp(raw[0].astype(np.float64)) / np.exp(raw[0].astype(np.float64)).sum()
    assert allowed.processor == "AllowedTokensLogitsProcessor"
    assert allowed.changes == {0: -np.inf}
    assert allowed.mass_moved == pytest.approx(float(1 - p[4] - p[5]))
    assert bias.changes == pytest.approx({4: -2.0}, abs=1e-6)
    q = p[4] / (p[4] + p[5])
    after = q * np.exp(-2.0) / (q * np.exp(-2.0) + 1 - q)
    assert bias.mass_moved == pytest.approx(float(q - after), abs=1e-6)
    assert add.changes == pytest.approx({4: 1.0, 5: 1.0}, abs=1e-6)
    assert add.mass_moved == pytest.approx(0, abs=1e-6)


def test_time_steps_and_rows_are_counted_by_processor(
    start: Callable[..., Pipeline], logits: Callable[..., Any]
) -> None:
    pipeline = start(Add)
    samples = samples_of(pipeline, [{"add": 1.0}, {"add": 2.0}])
    for _ in range(3):
        pipeline.prepare(samples)
        pipeline.apply(logits(2))
    counter = pipeline.counters["Add"]
    assert (counter.num_steps, counter.num_rows, counter.num_failures) == (3, 6, 0)
    assert counter.seconds > 0
    assert pipeline.counters["GrammarLogitsProcessor"].seconds == 0
    pipeline.prepare([])
    pipeline.prepare([])
    kept: Any = pipeline.registered["Add"]
    assert kept.num_rows == [2, 2, 2, 0], "it lets the rows go once"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"ad": 1}, "has the argument 'ad'; did you mean 'add'?; registered: Add (add, fault)"),
        ({"thinking_budget": 1}, "ThinkingBudgetLogitsProcessor has it but is not registered; start with"),
        ({"zzz": 1}, "register the processor that has it"),
        ({"add": "x"}, "Expected `float`, got `str` - at `$.add`"),
    ],
)
def test_arguments_that_nobody_takes_are_refused(
    start: Callable[..., Pipeline], args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError) as raised:
        start(Add).admit(SamplingParams(logits_processors_args=args))
    assert message in str(raised.value)
    assert raised.value.parameter == "logits_processors_args"


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        ({"logit_bias": {10: 1}}, "logit_bias"),
        ({"allowed_token_ids": [3, 10]}, "allowed_token_ids"),
        ({"logits_processors_args": {"logit_bias": {"10": 1}}}, "logits_processors_args"),
        ({"bad_words": ["!"]}, "bad_words"),
        ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
    ],
)
def test_what_the_model_cannot_serve_is_refused(
    start: Callable[..., Pipeline], params: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(ParameterError) as raised:
        start("LogitBiasLogitsProcessor").admit(SamplingParams(**params))
    assert raised.value.parameter == parameter


def test_a_processor_that_cannot_be_made_stops_the_start(start: Callable[..., Pipeline]) -> None:
    class Broken(LogitsProcessor):
        def __init__(self, config: EngineConfig) -> None:
            raise OSError("no such file")

        def apply(self, logits: Any) -> Any:
            return logits

    with pytest.raises(ParameterError, match="cannot create Broken: OSError\\('no such file'\\)"):
        start(Broken)


def test_a_check_of_arguments_that_breaks_is_the_processors_failure(start: Callable[..., Pipeline]) -> None:
    class Broken(Double):
        def check_args(self, args: Any) -> None:
            raise KeyError(args)

    with pytest.raises(ProcessorError, match="Broken could not check its arguments: KeyError"):
        start(Broken).admit(SamplingParams(logits_processors_args={"double": True}))


def test_logits_processors_must_be_a_list() -> None:
    with pytest.raises(ParameterError, match="logits_processors: must be a list"):
        EngineConfig(logits_processors="LogitBiasLogitsProcessor")  # type: ignore[arg-type]
