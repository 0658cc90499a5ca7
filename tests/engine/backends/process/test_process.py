"""The engine in its own process: admission in the parent, LoRA weights and processors in the child."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from transformers import AutoTokenizer

from logprobe import LLM, SamplingParams
from logprobe.engine.backends.process import replica as replicas
from logprobe.engine.backends.process.child import Child
from logprobe.errors import ModelError, ParameterError, ProcessorError, require
from logprobe.kernels import threads
from logprobe.next_token import AsyncLM
from logprobe.processors import LogitsProcessor
from logprobe.testing import process_ids
from logprobe.transport.messages import Admitted
from logprobe.transport.shm import FILE_BYTES, _Lease
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from logprobe.engine.front import Front
    from logprobe.engine.request import RequestOutput
    from logprobe.processors import BatchState

    Until = Callable[[Callable[[], bool]], None]

LIMIT_S = 300  # generous, also for a process that starts on a busy machine
SOON_S = 0.2  # how long to check that something does not happen
WHOLE = {"max_tokens": 2, "logprobs": -1, "prompt_logprobs": -1}


class RaiseOneArgs(msgspec.Struct):
    """The token and the amount that is added to its logit."""

    raised: int
    by: float = 50.0


class RaiseOneLogitsProcessor(LogitsProcessor):
    """Raise one token's logit; fail for token 3 at admission, and for amounts from 100 on in a step."""

    Args = RaiseOneArgs

    def __init__(self, config: Any) -> None:
        self.device = config.device
        self.rows: Any = ()

    def check_args(self, args: Any) -> None:
        if args.raised == 3:
            raise ValueError(f"token 3 on {self.device}")

    def update_state(self, batch: BatchState) -> None:
        self.rows = batch.rows

    def apply(self, logits: Tensor) -> Tensor:
        for place, row in enumerate(self.rows):
            others = [thread.name for thread in threading.enumerate() if "publish" in thread.name]
            found = f"{' '.join(others)} with {threads.num_threads()} threads"
            require(row.args.by < 100, "by", f"is too much, beside {found}")
            logits[place, row.args.raised] += row.args.by
        return logits

    def is_argmax_invariant(self) -> bool:
        return False


def shared_bytes() -> set[int]:
    """Return the sizes of the shared-memory files for rows that this process has open."""
    sizes = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed by another thread in the meantime
            if "logprobe-rows" in str(link.readlink()):
                sizes.add(link.stat().st_size)
    return sizes


def test_it_says_where_it_runs_and_what_it_does(engine: Front, teller: Any, until: Until) -> None:
    facts = engine.capabilities()
    assert (facts.engine, facts.num_processes, facts.max_num_seqs, facts.device) == ("native", 1, 16, "cpu")
    assert facts.layout is not None
    before = engine.stats()
    assert before.free_slots == facts.num_slots
    assert before.replicas == {}
    teller.ask(engine)
    until(lambda: engine.stats().seconds["forward"] > before.seconds["forward"])
    until(lambda: engine.stats().free_slots == facts.num_slots)
    until(lambda: engine.stalled_s() == 0)
    assert not engine.is_busy


def test_a_front_counts_an_end_before_it_sees_figures_of_it_and_tells_it_then(
    engine: Front, teller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, order = engine.core._replicas[0], []

    def noted(what: str, does: Callable[[Any], None]) -> Callable[[Any], None]:
        def do(events: Any) -> None:
            if any(getattr(report, "finish", None) for report in events):
                order.append((what, one._pulse))
            does(events)

        return do

    monkeypatch.setattr(one, "_account", noted("counted", one._account))
    monkeypatch.setattr(one, "_publish", noted("told", one._publish))
    teller.ask(engine)
    [(first, before), (last, after)] = order
    assert (first, last) == ("counted", "told")
    assert before is not after


def test_no_figures_are_overtaken_by_older_ones() -> None:
    sent: list[int] = []
    numbers, is_reading, go = itertools.count(), threading.Event(), threading.Event()

    def stats() -> int:
        number = next(numbers)
        if number == 0:
            is_reading.set()
            assert go.wait(LIMIT_S)
        return number

    channel: Any = SimpleNamespace(send=lambda reports: sent.append(reports[0].stats))
    child, parts = Child(channel, set()), SimpleNamespace(engine=SimpleNamespace(stats=stats))
    child._parts, child._thread = parts, SimpleNamespace(stalled_s=lambda: 0.0)  # type: ignore[assignment]
    tellers = [threading.Thread(target=child._send_pulse) for _ in range(2)]
    tellers[0].start()
    assert is_reading.wait(LIMIT_S)
    tellers[1].start()
    tellers[1].join(SOON_S)  # without the lock it would have sent newer stats
    go.set()
    for one in tellers:
        one.join(LIMIT_S)
    assert sent == [0, 1]


@pytest.fixture(scope="module")
def other(start: Any) -> Iterator[Front]:
    """An engine with a registered processor and overlapped steps whose shared memory is full."""
    resource = pytest.importorskip("resource")  # only POSIX has process limits
    limit = 1 << 20  # bytes per file, less than the pages need
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MKL_NUM_THREADS", "1" if threads.num_threads() > 1 else "2")
        with start(async_scheduling=True, logits_processors=[RaiseOneLogitsProcessor]) as one:
            resource.prlimit(*process_ids(one), resource.RLIMIT_FSIZE, (limit, limit))
            yield one


def test_steps_overlap_over_there_with_the_same_numbers(engine: Front, other: Front, teller: Any) -> None:
    asked = [{"logprobs": 3}, {"n": 2, "temperature": 1.1, "seed": 5, "logprobs": 2, "prompt_logprobs": 1}]
    for one in (engine, other):
        one.forget_prefixes()  # cached by other tests in one engine only
    for params in asked:
        mine, theirs = (teller.ask(one, range(4, 40), max_tokens=12, **params) for one in (other, engine))
        assert mine.prompt_logprobs == theirs.prompt_logprobs
        for one, want in zip(mine.outputs, theirs.outputs, strict=True):
            assert (one.token_ids, one.logprobs) == (want.token_ids, want.logprobs)
    told = teller.ask(other, logits_processors_args={"raised": 65, "by": 100.0}).error
    assert "beside logprobe-publish" in str(told.__cause__)
    assert f"with {threads.num_threads()} threads" in str(told.__cause__), "its share, whatever MKL is told"


def test_wide_rows_share_memory_and_where_that_is_full_they_come_in_messages(
    engine: Front, other: Front, teller: Any
) -> None:
    ids = list(range(2, 66))
    for one in (engine, other):
        one.forget_prefixes()
    shared = teller.ask(engine, ids, **WHOLE)
    assert FILE_BYTES in shared_bytes()
    narrow = teller.ask(other, ids, logprobs=5, prompt_logprobs=5)
    by_message = teller.ask(other, ids, **WHOLE)
    assert shared_bytes() >= {0, FILE_BYTES}
    assert by_message.prompt_logprobs == shared.prompt_logprobs
    assert by_message.outputs[0].logprobs == shared.outputs[0].logprobs
    assert len(narrow.prompt_logprobs) == 64
    for few, all_of_them in zip(narrow.prompt_logprobs[1:], shared.prompt_logprobs[1:], strict=True):
        assert few.items() <= all_of_them.items()


def num_leases() -> int:
    gc.collect()
    return sum(type(one) is _Lease for one in gc.get_objects())


def test_rows_that_are_kept_keep_no_pages(engine: Front, teller: Any, until: Until) -> None:
    ids = list(range(2, 66))
    outputs = [teller.ask(engine, ids, max_tokens=0, prompt_logprobs=-1) for _ in range(12)]
    assert all(output.prompt_logprobs == outputs[0].prompt_logprobs for output in outputs)
    until(lambda: num_leases() == 0)  # the child's watcher keeps its last message until the next pulse


def test_what_can_never_be_served_is_refused_on_this_side(
    engine: Front, teller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was sent")

    monkeypatch.setattr(engine.core._replicas[0], "submit", never)
    for ids, params, parameter in (
        ([], {}, "prompt"),
        ([10**6], {}, "prompt"),
        ([5] * 5000, {}, "prompt"),
        ([5], {"lora": "x"}, "lora"),
        ([5], {"logits_processors_args": {"raised": 1}}, "logits_processors_args"),
        ([5], {"response_format": {"type": "regex", "regex": "("}}, "response_format"),
        ([5], {"seed": 2**70}, "seed"),
        ([5], {"max_tokens": 2**70}, "max_tokens"),
        ([5], {"response_format": {"type": "text", "of": "\ud800"}}, "response_format"),
    ):
        with raises(ParameterError, parameter=parameter):
            teller.submit(engine, ids, **params)


def spoilt(teller: Any) -> Any:
    """Make an invalid request by changing its parameters after they were checked."""
    request = teller.request(max_tokens=4)
    object.__setattr__(request.params, "logit_bias", {"a": 1.0})
    return request


def test_what_that_process_could_not_read_is_refused_on_this_side(engine: Front, teller: Any) -> None:
    with raises(ParameterError, parameter="logit_bias"):
        engine.admit(spoilt(teller))


def test_requests_that_cannot_be_read_over_there_fail_and_no_others(engine: Front, teller: Any) -> None:
    pids = process_ids(engine)
    running = teller.submit(engine, max_tokens=500)
    bad = [Admitted(spoilt(teller), {}) for _ in range(2)]
    engine.submit(bad)

    async def ended() -> list[RequestOutput]:
        names = [running, *(one.request.request_id for one in bad)]
        return await asyncio.gather(*(teller.result(engine, name) for name in names))

    whole, *failed = asyncio.run(ended())
    assert whole.error is None
    assert len(whole.outputs[0].token_ids) == 500
    for output in failed:
        assert "cannot be read" in str(output.error)
        assert "logit_bias" in str(output.error)
    assert process_ids(engine) == pids
    assert not engine.is_busy


def test_a_grammar_binds_what_is_drawn_over_there(
    engine: Front, teller: Any, settings: dict[str, Any]
) -> None:
    asked = {"type": "choice", "choice": ["the cat", "the dog"]}
    output = teller.ask(engine, response_format=asked, ignore_eos=False, temperature=1, seed=1)
    text = AutoTokenizer.from_pretrained(settings["model"]).decode(
        output.outputs[0].token_ids, skip_special_tokens=True
    )
    assert text in {"the cat", "the dog"}


def test_registered_processors_run_over_there_and_check_here(other: Front, teller: Any) -> None:
    output = teller.ask(other, logits_processors_args={"raised": 65})
    assert output.outputs[0].token_ids == [65] * 8
    with pytest.raises(ParameterError, match="token 3 on cpu"):
        teller.submit(other, logits_processors_args={"raised": 3})
    with raises(ParameterError, parameter="logits_processors_args"):
        teller.submit(other, logits_processors_args={"raised": "x"})


def test_what_a_processor_fails_of_comes_with_the_failure(other: Front, teller: Any) -> None:
    """A server replies 400 if the caller's arguments caused the failure."""
    error = teller.ask(other, logits_processors_args={"raised": 65, "by": 100.0}).error
    assert (type(error), error.processor) == (ProcessorError, "RaiseOneLogitsProcessor")
    assert (type(error.__cause__), error.__cause__.parameter) == (ParameterError, "by")
    assert "by: is too much" in str(error.__cause__)


def test_processors_that_another_process_cannot_find_or_give_back_are_refused(start: Any) -> None:
    class Local(RaiseOneLogitsProcessor):
        """Local to this function, so it cannot be imported elsewhere."""

    for given, match in (
        ([Local], "module.path:ClassName"),
        (["CaptureLogitsProcessor"], "keeps rows in the engine's process"),
        (["GlobalLogprobsCapture"], "keeps rows in the engine's process"),
        (["no.such:Thing"], "cannot import"),
    ):
        with pytest.raises(ParameterError, match=match), start(logits_processors=given):
            pass


def test_lora_weights_are_loaded_there_and_known_here(
    engine: Front, teller: Any, adapter_folders: dict[str, Path]
) -> None:
    ids = [5, 9, 17, 60, 31]
    plain = teller.ask(engine, ids, logprobs=2)
    engine.add_lora("a", adapter_folders["wide"])
    assert engine.list_loras() == {"a": str(adapter_folders["wide"])}
    number = engine.lora_number("a")
    wide = teller.ask(engine, ids, lora="a", logprobs=2)
    assert wide.outputs[0].logprobs != plain.outputs[0].logprobs
    engine.add_lora("a", adapter_folders["narrow"])
    assert engine.lora_number("a") > number
    narrow = teller.ask(engine, ids, lora="a", logprobs=2)
    assert narrow.outputs[0].logprobs not in (wide.outputs[0].logprobs, plain.outputs[0].logprobs)
    held = teller.submit(engine, ids, lora="a", max_tokens=500, logprobs=2)
    engine.remove_lora("a")
    with raises(ParameterError, parameter="lora"):
        teller.submit(engine, ids, lora="a")
    output = asyncio.run(teller.result(engine, held))
    assert output.outputs[0].logprobs[:8] == narrow.outputs[0].logprobs
    assert teller.ask(engine, ids, logprobs=2).outputs[0].logprobs == plain.outputs[0].logprobs
    with pytest.raises(ModelError, match="nowhere"):
        engine.add_lora("b", "nowhere")
    assert engine.list_loras() == {}


@pytest.mark.usefixtures("nothing_left")
def test_front_doors_take_it_for_any_engine_and_close_does_not_wait_where_it_hangs(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = SamplingParams(max_tokens=6, temperature=0, logprobs=2)
    with LLM(**settings) as llm:
        want = AsyncLM(llm).batch_next_token_logprobs_sync([[5, 6], [5, 6, 7]])
        [text] = llm.generate("the cat", asked)
    with LLM(**settings, process=True) as llm:
        assert llm.engine.stats().free_slots == llm.engine.capabilities().num_slots
        lm = AsyncLM(llm)
        np.testing.assert_allclose(lm.batch_next_token_logprobs_sync([[5, 6], [5, 6, 7]]), want, atol=5e-5)
        assert (lm.underlying_model, llm.processors) == (None, None)
        [output] = llm.generate("the cat", asked)
        assert (output.outputs[0].text, output.outputs[0].logprobs) == (
            text.outputs[0].text,
            text.outputs[0].logprobs,
        )
        monkeypatch.setattr(replicas, "CLOSE_S", 0.2)
        os.kill(*process_ids(llm), signal.SIGSTOP)
        closing = threading.Thread(target=llm.close)
        closing.start()
        closing.join(LIMIT_S)
        assert not closing.is_alive()


def test_signals_of_the_terminal_are_for_the_front(engine: Front, teller: Any) -> None:
    assert len(teller.ask(engine).outputs[0].token_ids) == 8
    [pid] = process_ids(engine)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert len(teller.ask(engine).outputs[0].token_ids) == 8
    assert process_ids(engine) == [pid]
