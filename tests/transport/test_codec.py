"""Encoding of messages: supported values, their form, and errors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from logprobe import errors
from logprobe.errors import (
    ConflictingParametersError,
    EngineError,
    LogprobeError,
    ParameterError,
    ProcessorError,
)
from logprobe.processors.effects import ProcessorEffect
from logprobe.sampling import SamplingParams
from logprobe.transport import codec as codecs
from logprobe.transport.codec import Codec
from logprobe.transport.messages import (
    Abort,
    Admitted,
    Delta,
    Drafts,
    Event,
    Failure,
    Finish,
    Request,
    Submit,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

commands: Codec[Any] = Codec(Submit | Abort)  # type: ignore[arg-type]
events: Codec[Any] = Codec(list[Event])  # type: ignore[misc]  # a union as an argument


DELTA = {"type": "Delta", "request_id": "r", "index": 0}


def message(told: Any, *blocks: Any) -> bytes:
    """Encode a hand-written message."""
    return msgspec.msgpack.encode([blocks, [told]])


def request(**params: Any) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=np.array([3, 1, 2], np.int32),
        params=SamplingParams(**params),
        first_scored=2,
        wants_row=True,
    )


def test_a_request_crosses_whole() -> None:
    params = {
        "n": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [4],
        "logprobs": -1,
        "prompt_logprobs": 3,
        "logprob_token_ids": [9, 8],
        "logit_bias": {5: -1.5},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "logits_processors_args": {"own": [1, {"two": 2.5}]},
        "seed": -(2**40),
        "lora": "x",
    }
    sent = Admitted(request(**params), {4: {"own": [1]}}, 3)
    got = commands.decode(commands.encode(Submit((sent,))))
    assert isinstance(got, Submit)
    [admitted] = got.requests
    assert admitted.request.params == sent.request.params
    assert admitted.request.prompt_token_ids.tolist() == [3, 1, 2]
    assert admitted.request.prompt_token_ids.dtype == np.int32
    assert (admitted.request.request_id, admitted.request.first_scored) == ("r", 2)
    assert admitted.request.wants_row
    assert admitted.processor_args == {4: {"own": [1]}}
    assert admitted.lora_number == 3


def test_ids_position_by_position_cross_whole() -> None:
    sent = Admitted(request(prompt_logprobs=0, logprob_token_ids=[[], [9, 8], [7]]), {})
    [got] = commands.decode(commands.encode(Submit((sent,)))).requests  # type: ignore[union-attr]
    assert got.request.params == sent.request.params
    assert [ids.tolist() for ids in got.request.params.logprob_token_ids] == [[], [9, 8], [7]]  # type: ignore[union-attr]
    other = Admitted(request(prompt_logprobs=0, logprob_token_ids=[[], [9, 8], [6]]), {})
    assert got.request.params != other.request.params


def test_what_is_new_crosses_whole() -> None:
    effect = ProcessorEffect("P", {3: float("-inf"), 4: 1.5}, 0.25)
    finish, drafts = Finish("stop", "the", 12), Drafts(num_drafted=5, num_accepted=3)
    more = {"effects": [[effect]], "finish": finish, "drafts": drafts, "weights_number": 3}
    delta = Delta(request_id="r", index=1, token_ids=[5], **more)
    [got] = events.decode(events.encode([delta]))
    assert (got.effects, got.token_ids, got.raw, got.row) == ([[effect]], [5], None, None)
    assert (got.drafts, got.weights_number) == (drafts, 3)
    assert (got.finish.reason, got.finish.stop_reason, got.finish.num_text_bytes) == ("stop", "the", 12)


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, LogprobeError) and kind is not errors.BatchError
    ],
)
def test_an_error_crosses_as_its_class_its_message_and_its_fields(kind: type[LogprobeError]) -> None:
    made = errors.remade(kind, ("top_k: is wrong",), {"parameter": "top_k"})
    [got] = events.decode(events.encode([Failure("r", made)]))
    assert type(got.error) is kind
    assert str(got.error) == str(made)
    assert vars(got.error) == {"parameter": "top_k"}


def test_an_error_of_a_processor_keeps_its_name() -> None:
    [got] = events.decode(events.encode([Failure("r", ProcessorError("P", "failed"))]))
    assert (got.error.processor, str(got.error)) == ("P", "P failed")


def test_an_error_of_several_parameters_keeps_their_names() -> None:
    sent = ConflictingParametersError(
        ["min_tokens", "response_format"], ["P", "Q"], "leaves no token to draw"
    )
    [got] = events.decode(events.encode([Failure("r", sent)]))
    assert (str(got.error), vars(got.error)) == (str(sent), vars(sent))


@pytest.mark.parametrize("name", ["SystemExit", "require", "threading", "TYPE_CHECKING", "__builtins__"])
def test_a_class_that_is_none_of_ours_is_not_made(name: str) -> None:
    told = {"type": "Failure", "request_id": "r", "error": [name, ["x"], {}, None]}
    [got] = events.decode(message(told))
    assert type(got.error) is EngineError


def test_an_error_crosses_with_what_caused_it() -> None:
    sent = ProcessorError("P", "failed")
    sent.__cause__ = ParameterError("response_format", "asks for too much")
    sent.__cause__.__cause__ = ValueError("foreign")
    [got] = events.decode(events.encode([Failure("r", sent)]))
    cause = got.error.__cause__
    assert (type(cause), cause.parameter) == (ParameterError, "response_format")
    assert str(cause) == "response_format: asks for too much"
    assert (type(cause.__cause__), str(cause.__cause__)) == (EngineError, "ValueError: foreign")
    assert cause.__cause__.__cause__ is None


def test_an_error_that_is_its_own_cause_crosses() -> None:
    sent = EngineError("x")
    sent.__cause__ = sent
    [got] = events.decode(events.encode([Failure("r", sent)]))
    assert str(got.error.__cause__) == "x"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80",
        msgspec.msgpack.encode([[], 5]),
        msgspec.msgpack.encode([[5], []]),
        message({"type": "Delta"}),
        message({"type": "Nothing", "request_id": "r"}),
        message({"type": "Failure", "request_id": "r", "error": 5}),
        *(
            message(DELTA | {"raw": place}, b"123")
            for place in (b"123", 0, [0, 1], [0, 0, "x"], [0, 0, 1], [1, 0, 1], [-1, 0, 1])
        ),
        *(message(DELTA | {"row": place}, b"123") for place in (b"123", [0], 0, 1, -1)),
        message(DELTA | {"raw": [0, 0, 1]}, [0, 1, 2]),
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(EngineError):
        events.decode(data)


class Strange:
    """Not serialisable."""


@pytest.mark.parametrize("value", [Strange(), {"a": [Strange()]}, 2**70])
def test_what_is_no_plain_value_is_refused(value: Any) -> None:
    with pytest.raises(ParameterError):
        commands.encode(Submit((Admitted(request(logits_processors_args={"x": value}), {}),)))


def test_a_mapping_of_whatever_class_crosses() -> None:
    class View(Mapping[str, int]):
        def __getitem__(self, key: str) -> int:
            return 1

        def __iter__(self) -> Iterator[str]:
            return iter(["a"])

        def __len__(self) -> int:
            return 1

    got = commands.decode(commands.encode(Submit((Admitted(request(), {0: View()}),))))
    assert got.requests[0].processor_args == {0: {"a": 1}}


def test_a_message_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(ParameterError, match="at most 1,000"):
        commands.encode(Abort("r" * 1001))
