from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe import SamplingParams
from logprobe.analysis.progress import Tally, progress_bar
from logprobe.engine.request import RequestOutput
from logprobe.records import FlatLogprobs
from logprobe.testing import watching_steps
from logprobe.transport.messages import Request

if TYPE_CHECKING:
    from logprobe import LLM
    from logprobe.engine.protocol import StepBatch


def request(name: str, num_prompt: int, **asked: Any) -> tuple[Request, RequestOutput]:
    ids = np.arange(num_prompt, dtype=np.int32)
    made = Request(request_id=name, prompt_token_ids=ids, params=SamplingParams(**asked))
    return made, RequestOutput.for_request(made)


def state(tally: Tally) -> tuple[int, int, int]:
    return tally.done, tally.total, tally.num_ended


def test_scored_positions_and_generated_tokens_count_as_they_come() -> None:
    scored, its = request("a", 100, max_tokens=0, prompt_logprobs=0)
    drawn, other = request("b", 10, max_tokens=5, n=2)
    tally = Tally([scored, drawn])
    assert state(tally) == (0, 120, 0)
    its.prompt_logprobs = FlatLogprobs([None] * 40)
    tally.add(its)
    assert state(tally) == (40, 120, 0)
    other.outputs[0].token_ids += [1, 2]
    tally.add(other)
    assert state(tally) == (52, 120, 0)


def test_what_an_early_end_leaves_out_is_no_longer_waited_for() -> None:
    asked, output = request("a", 10, max_tokens=50)
    tally = Tally([asked])
    output.outputs[0].token_ids += [1, 2, 3]
    output.outputs[0].finish_reason = "stop"
    tally.add(output)
    assert state(tally) == (13, 13, 1)


def test_one_long_text_moves_the_bar_while_it_is_scored(tiny_llm: LLM, monkeypatch: Any) -> None:
    seen = []
    was_seen, num_steps = threading.Event(), itertools.count()

    class Watched(Tally):
        def add(self, output: RequestOutput) -> None:
            super().add(output)
            seen.append(self.done)
            was_seen.set()

    def wait(_: StepBatch) -> None:
        # Steps faster than the reader are reported together.
        assert next(num_steps) == 0 or was_seen.wait(120)

    monkeypatch.setattr("logprobe.analysis.progress.Tally", Watched)
    monkeypatch.setenv("FORCE_COLOR", "1")
    num_tokens = 3 * tiny_llm.config.scheduler_config.max_num_batched_tokens // 2
    asked = SamplingParams(max_tokens=0, prompt_logprobs=0)
    with watching_steps(tiny_llm, wait):
        tiny_llm.generate([5] * num_tokens, asked, progress=True)
    assert seen[-1] == num_tokens
    assert len(seen) > 1
    assert seen == sorted(seen)


def test_only_a_terminal_is_shown_the_bar(monkeypatch: Any, capsys: Any) -> None:
    asked, output = request("a", 10, max_tokens=0, prompt_logprobs=0)
    output.prompt_logprobs, output.outputs[0].finish_reason = FlatLogprobs([None] * 10), "length"
    with progress_bar([asked], shown=True) as advance:
        assert advance is None
    assert not capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich treat any stream as a terminal
    with progress_bar([asked], shown=True) as advance:
        assert advance is not None
        advance(output)
    assert "10/10 tokens" in capsys.readouterr().err


def test_nothing_is_followed_where_nothing_is_shown() -> None:
    with progress_bar([], shown=False) as advance:
        assert advance is None
