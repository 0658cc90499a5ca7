"""`Oracle`: the result that a request has when nothing else runs, and the comparison with it, bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.config import EngineConfig
from logprobe.engine.engine import Engine
from logprobe.engine.output_builder import Describer, OutputBuilder
from logprobe.transport.messages import Admitted, ForgetPrefixes, Submit
from simulation.hashed import EOS, VOCAB_SIZE, HashedForward, LoraWeights, LowRank, capabilities, text_edge

if TYPE_CHECKING:
    from logprobe.engine.request import CompletionOutput, RequestOutput
    from logprobe.records import FlatLogprobs
    from logprobe.transport.messages import Request


class Oracle:
    """Runs each request alone, on an engine with room for all of it, without overlap and drafts."""

    def __init__(self, letters: int, rope_boundary: int | None, max_len: int) -> None:
        self._letters, self._rope_boundary, self._max_len = letters, rope_boundary, max_len
        self._engines: dict[int, Engine] = {}  # by weights

    def expected(self, request: Request, weights: int, lora: str | None) -> RequestOutput:
        """Return the result of a request alone; `lora` is which LoRA weights it uses."""
        engine = self._engine(weights)
        engine.handle(ForgetPrefixes())
        number = 0
        if lora is not None:
            number = int(lora.rpartition("-")[2])
            parts: Any = {"head": LowRank} if number % 2 else {}
            engine._loras[number] = own = LoraWeights("", lora, number, parts, head="head")
            engine.forward.make_room(own)
        args = engine.admit(request).processor_args
        describer = Describer(capabilities(engine).source(), VOCAB_SIZE, text_edge().vocabulary)
        builder = OutputBuilder(request, describer)
        events = engine.handle(Submit((Admitted(request, args, lora_number=number),)))
        for event in events:
            builder.add(event)
        while not builder.output.is_finished:
            assert engine.has_work, "a request alone does not end"
            for event in engine.step():
                builder.add(event)
        return builder.output

    def _engine(self, weights: int) -> Engine:
        if weights not in self._engines:
            forward = HashedForward(1024, self._letters, weights, self._rope_boundary)
            config = EngineConfig(
                model="hashed",
                device="cpu",
                dtype="float32",
                max_model_len=self._max_len,
                logits_processors=("simulation.hashed:Fussy",),
            )
            self._engines[weights] = Engine(config, forward, text_edge(), frozenset([EOS]))
        return self._engines[weights]

    @staticmethod
    def compare(output: RequestOutput, expected: RequestOutput, name: str) -> None:
        """Assert that a result equals the expected one, or begins it if it has ended early."""
        if output.prompt_logprobs is not None:
            is_whole = all(one.finish_reason in {"stop", "length"} for one in output.outputs)
            own, alone = output.prompt_logprobs, expected.prompt_logprobs
            has_failed = expected.error is not None
            _compare_rows(own, alone, f"{name} prompt", is_whole=is_whole, has_failed=has_failed)
        assert len(output.outputs) == len(expected.outputs), name
        for completion, other in zip(output.outputs, expected.outputs, strict=True):
            _compare_completion(completion, other, f"{name}[{completion.index}]")


def _compare_completion(completion: CompletionOutput, alone: CompletionOutput, name: str) -> None:
    is_whole = completion.finish_reason in {"stop", "length"}
    num_tokens = len(completion.token_ids)
    assert completion.token_ids == alone.token_ids[:num_tokens], f"{name}: other tokens than alone"
    for record, own in (
        (completion.logprobs, alone.logprobs),
        (completion.processed_logprobs, alone.processed_logprobs),
    ):
        if record is not None:
            assert len(record) == num_tokens, f"{name}: {len(record)} rows for {num_tokens} tokens"
            _compare_rows(record, own, name, is_whole=is_whole)
    if not is_whole:
        return
    for field in ("finish_reason", "stop_reason", "num_text_bytes", "cumulative_logprob", "raw_logprob"):
        mine, other = getattr(completion, field), getattr(alone, field)
        assert mine == other, f"{name}: {field} is {mine!r}, alone {other!r}"
    assert num_tokens == len(alone.token_ids), f"{name}: ended early"
    if alone.row is not None:
        assert completion.row is not None, f"{name}: no row"
        assert np.array_equal(completion.row, alone.row), f"{name}: another row than alone"


def _compare_rows(
    record: FlatLogprobs, alone: Any, name: str, *, is_whole: bool, has_failed: bool = False
) -> None:
    mine, other = record.arrays, alone.arrays
    num_rows, num_alone = len(mine.offsets) - 1, len(other.offsets) - 1
    assert not is_whole or num_rows == num_alone, f"{name}: rows are missing"
    if has_failed:  # at a prompt row; alone, the rows before it are of the same chunk and not delivered
        num_rows = min(num_rows, num_alone)
    assert np.array_equal(mine.offsets[: num_rows + 1], other.offsets[: num_rows + 1]), (
        f"{name}: rows of other widths"
    )
    count = int(mine.offsets[num_rows])
    for column in ("token_ids", "logprobs", "ranks"):
        left, right = getattr(mine, column)[:count], getattr(other, column)[:count]
        assert np.array_equal(left, right), f"{name}: other {column} than alone"
