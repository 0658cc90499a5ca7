"""An engine over a fake model, driven step by step: compare outputs bit for bit."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.config import EngineConfig
from logprobe.engine.backends.thread import SerialLoop
from logprobe.engine.draft_model import DraftModel
from logprobe.engine.engine import Engine
from logprobe.engine.output_builder import Describer, OutputBuilder
from logprobe.engine.protocol import ModelShape
from logprobe.records import LogprobsInfo
from logprobe.sampling import SamplingParams
from logprobe.testing import FakeForward, fake_model
from logprobe.transport.messages import Delta, Request, Resume, Submit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.engine.overlap import OverlappedLoop
    from logprobe.engine.request import RequestOutput
    from logprobe.transport.messages import Command, Event

LETTERS = {97: 9.0, 98: 9.0, 99: 8.0}  # a, b and c are likely
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"n": 3, "seed": 4, "logprobs": 1, "prompt_logprobs": 1, "entropy": True},
    {"logit_bias": LETTERS, "stop": ["ab", "ca"], "seed": 1, "logprobs": 1, "max_tokens": 30},
    {"logit_bias": LETTERS, "stop_token_ids": [98], "seed": 2, "logprobs": 0, "explain": True},
    {"max_tokens": 0, "prompt_logprobs": 3},
    {
        "repetition_penalty": 1.3,
        "logprobs": 2,
        "logprobs_mode": "both",
        "seed": 3,
        "logprob_token_ids": [7, 9],
    },
    # A dead end: after the first token, forced by the bias, no token is possible.
    {
        "allowed_token_ids": [257, 97, 98],
        "bad_words": ["aa", "ab"],
        "logit_bias": {97: 100.0},
        "min_tokens": 3,
        "seed": 5,
    },
    {"max_tokens": 1, "logprobs": -1},
    {"seed": 6, "logprobs": 1, "digest": True, "logprob_token_ids": [7], "max_tokens": 20},
]


class Driven:
    """An engine over a fake model, driven by hand through one of the two loops."""

    def __init__(
        self,
        loop: type[SerialLoop | OverlappedLoop] = SerialLoop,
        num_slots: int = 300,
        forward: FakeForward | None = None,
        draft: FakeForward | None = None,
        **settings: Any,
    ) -> None:
        self.forward = forward or FakeForward(num_slots=num_slots)
        config = EngineConfig(model="fake", **settings)
        drafter = None
        if draft is not None:
            large = ModelShape(hidden_size=100, num_layers=100)  # so that a draft costs next to nothing
            drafter = DraftModel(draft, "fake draft", large, self.forward.vocab_size)
        self.engine = Engine(config, self.forward, _text(), frozenset([257]), drafter)
        self._describer = Describer(LogprobsInfo(engine="fake"), 258, _text().vocabulary)
        self._builders: dict[str, OutputBuilder] = {}
        self.events: list[Event] = []
        self.num_steps = 0
        self.loop = loop(self.engine, self.publish)

    def publish(self, events: Sequence[Event]) -> None:
        self.events += events

    def submit(self, name: str, ids: Sequence[int], **params: Any) -> None:
        asked = {"max_tokens": 8, "ignore_eos": True} | params
        wants_row = asked.pop("wants_row", False)
        request = Request(
            request_id=name,
            prompt_token_ids=np.array(ids, np.int32),
            params=SamplingParams(**asked),
            wants_row=wants_row,
        )
        self._builders[name] = OutputBuilder(request, self._describer)
        self.handle(Submit((self.engine.admit(request),)))

    def handle(self, command: Command) -> None:
        self.loop.settle()
        self.publish(self.engine.handle(command))

    def step(self) -> None:
        self.loop.step()
        self.num_steps += 1
        self.engine.check_integrity()

    def play(self, arrivals: Sequence[Any], orders: Sequence[Any]) -> dict[str, Any]:
        """Submit requests and handle commands before the steps with their numbers; return all outputs.

        An arrival is the number of a step, parameters and token ids; an order is the number of a step, the
        class of a command and the index of a request.
        """
        for number in range(24):
            for index, (start, params, ids) in enumerate(arrivals):
                if start == number:
                    self.submit(str(index), ids, **params)
            for start, command, index in orders:
                if start == number:
                    self.handle(command(str(index)))
            self.step()
        for index in range(len(arrivals)):
            self.handle(Resume(str(index)))
        return {name: told(output) for name, output in self.finish().items()}

    def finish(self) -> dict[str, RequestOutput]:
        """Run to the end and return the outputs, after checking that each sample ended once."""
        while self.engine.has_work:
            self.step()
        self.loop.close()
        self.engine.check_integrity()
        assert not self.engine.scheduler.running
        ended: set[tuple[str, int]] = set()
        for delta in self.events:
            assert isinstance(delta, Delta)
            sample = (delta.request_id, delta.index)
            assert sample not in ended, "something is published of a sample that has ended"
            if delta.finish is not None:
                ended.add(sample)
            self._builders[delta.request_id].add(delta)
        return {name: builder.output for name, builder in self._builders.items()}


def told(output: RequestOutput) -> list[Any]:
    """Return everything in an output, bit for bit."""
    return [
        _rows(output.prompt_logprobs),
        _bits(output.prompt_hidden_states),
        _bits(output.prompt_routed_experts),
        *(
            (
                one.index,
                one.token_ids,
                _rows(one.logprobs),
                _rows(one.processed_logprobs),
                one.cumulative_logprob,
                one.finish_reason,
                one.stop_reason,
                one.num_text_bytes,
                one.explanations,
                one.digests,
                _bits(one.row),
                _bits(one.hidden_states),
                _bits(one.routed_experts),
                repr(one.error),
            )
            for one in output.outputs
        ),
    ]


def _rows(record: Any) -> Any:
    return None if record is None else record.to_bytes()


def _bits(array: Any) -> Any:
    return None if array is None else (array.dtype, array.shape, array.tobytes())


@cache
def _text() -> Any:
    model = fake_model()
    model.engine.close()
    return model.text
