"""Engine processes that die, fail to start or hang, parents that are killed, and readers that never read."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import safetensors.torch

from logprobe.engine.backends.process import launcher
from logprobe.engine.backends.process import replica as replicas
from logprobe.engine.backends.process.orders import Pulse
from logprobe.engine.forward.system_limits import MAX_DEFAULT_BYTES, MIN_DEFAULT_BYTES
from logprobe.errors import (
    EngineError,
    EngineUnavailableError,
    ModelNotFoundError,
    ParameterError,
    UnsupportedModelError,
)
from logprobe.testing import open_requests, process_ids
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.engine.front import Front

    Until = Callable[[Callable[[], bool]], None]

LIMIT_S = 300  # generous, also for a process that starts on a busy machine
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps what has a name
FRONT = """
import sys, time
from logprobe import LLM, SamplingParams
from logprobe.engine.backends.process import launcher
from logprobe.testing import process_ids

if __name__ == "__main__":
    launcher.MAIN = sys.argv[3]
    llm = LLM(sys.argv[1], kv_cache_memory_bytes=1 << 23, process=True, weights=sys.argv[2])
    for output in llm.stream("the", SamplingParams(max_tokens=4000, ignore_eos=True, prompt_logprobs=-1)):
        print(*process_ids(llm), flush=True)
        time.sleep(1000)
"""


FORK = """
import os, sys
from logprobe import LLM, SamplingParams
from logprobe.errors import EngineClosedError

if __name__ == "__main__":
    params = SamplingParams(max_tokens=2, temperature=0)
    llm = LLM(sys.argv[1], kv_cache_memory_bytes=1 << 23, process=sys.argv[2] == "process")
    before = llm.generate([[5, 6]], params)[0].outputs[0].token_ids
    child = os.fork()
    if child == 0:
        try:
            llm.generate([[5, 6]], params)
        except EngineClosedError as error:
            print("child:", error, flush=True)
        llm.close()
        sys.exit(7)  # and runs what is registered for the end of a process
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert llm.generate([[5, 6]], params)[0].outputs[0].token_ids == before
    llm.close()
    print("parent: goes on", flush=True)
"""


def has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def kill(engine: Front) -> int:
    [pid] = process_ids(engine)
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.usefixtures("nothing_left")
def test_a_killed_process_fails_its_requests_by_name_and_is_started_again(
    engine: Front,
    teller: Any,
    adapter_folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if it cannot be restarted for a while, which fails waiting requests."""
    engine.add_lora("a", adapter_folders["wide"])
    plain = teller.ask(engine, lora="a", logprobs=2)
    num_restarts = engine.stats().restarts
    streamed, waiting = teller.submit(engine, max_tokens=4000), teller.submit(engine, max_tokens=4000)

    async def kill_in_the_stream() -> tuple[int, Any, Any]:
        whole = asyncio.create_task(teller.result(engine, waiting))
        pid = 0
        async with asyncio.timeout(LIMIT_S), aclosing(engine.stream(streamed)) as outputs:
            async for output in outputs:
                if not pid and len(output.outputs[0].token_ids) >= 3:
                    pid = kill(engine)
        return pid, output, await whole

    with monkeypatch.context() as broken:
        broken.setattr(launcher, "MAIN", "raise SystemExit(3)")
        pid, *outputs = asyncio.run(kill_in_the_stream())
        for output in outputs:
            assert type(output.error) is EngineError
            assert f"the engine process (pid {pid}) was killed by SIGKILL" in str(output.error)
        assert 3 <= len(outputs[0].outputs[0].token_ids) < 4000, "what was seen is kept"
        error = teller.ask(engine).error
        assert isinstance(error, EngineError)
        assert "ended with exit code 3" in str(error)
        assert 0 < engine.stalled_s() < LIMIT_S
    while (again := teller.ask(engine, lora="a", logprobs=2)).error is not None:
        assert "exit code 3" in str(again.error)
    assert again.outputs[0].logprobs == plain.outputs[0].logprobs, "the new process has the weights"
    assert process_ids(engine) != [pid]
    assert engine.stats().restarts >= num_restarts + 2
    engine.remove_lora("a")


def test_a_killed_front_leaves_no_process_and_no_file(
    settings: dict[str, Any], tmp_path: Path, until: Until
) -> None:
    script = tmp_path / "front.py"
    script.write_text(FRONT)
    own = tmp_path / "tmp"
    own.mkdir()
    environment = os.environ | {"TMPDIR": str(own), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    front = subprocess.Popen(
        [sys.executable, str(script), settings["model"], settings["weights"], launcher.MAIN],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        assert psutil.pid_exists(pid)
        assert not list(own.glob("logprobe-*")), "no name is needed once it runs"
    finally:
        front.kill()
        front.communicate()
    until(lambda: has_ended(pid))
    until(lambda: not list(own.glob("logprobe-*")))
    assert not list(SHARED_MEMORY.glob("*logprobe*"))


def test_a_reader_that_never_reads_holds_up_nobody(engine: Front, teller: Any, until: Until) -> None:
    lazy = teller.submit(engine, max_tokens=4000, logprobs=2)

    def num_waiting() -> int:
        return engine._streams.num_waiting(lazy)

    async def others_go_on() -> None:
        stream = engine.stream(lazy, buffer_rows=4)
        await asyncio.wait_for(anext(stream), LIMIT_S)  # reads once and never again
        await asyncio.to_thread(until, lambda: engine.stats().paused == 1)
        # Messages in flight at the pause come before the stats; no further ones do.
        waiting = num_waiting()
        for _ in range(3):
            output = await teller.result(engine, teller.submit(engine, max_tokens=200))
            assert len(output.outputs[0].token_ids) == 200
        assert 4 <= num_waiting() == waiting < 4000
        await stream.aclose()

    asyncio.run(others_go_on())
    until(lambda: engine.stats().free_slots == engine.capabilities().num_slots)


def test_200_aborts_at_random_leave_nothing(engine: Front, teller: Any, until: Until) -> None:
    draw = random.Random(0)  # noqa: S311 - a test's own
    assert len(teller.ask(engine).outputs[0].token_ids) == 8
    pids = process_ids(engine)

    async def ask_and_give_up() -> None:
        name = teller.submit(engine, [draw.randrange(2, 200) for _ in range(20)], max_tokens=1000, logprobs=1)
        count = draw.randrange(12)
        async with aclosing(engine.stream(name, buffer_rows=8)) as outputs:
            async for output in outputs:
                if len(output.outputs[0].token_ids) >= count:
                    if draw.random() < 0.5:
                        return
                    engine.abort(name)

    async def many() -> None:
        async with asyncio.timeout(2 * LIMIT_S), asyncio.TaskGroup() as group:
            for _ in range(200):
                group.create_task(ask_and_give_up())

    asyncio.run(many())
    until(lambda: engine.stats().free_slots == engine.capabilities().num_slots)
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.paused) == (0, 0, 0)
    assert process_ids(engine) == pids, "it was not started again"
    assert not engine.is_busy
    assert open_requests(engine) == []
    assert len(teller.ask(engine).outputs[0].token_ids) == 8


@pytest.mark.usefixtures("nothing_left")
def test_a_process_that_cannot_use_its_settings_says_why(start: Any) -> None:
    with raises(ParameterError, parameter="kv_cache_memory_bytes"), start(kv_cache_memory_bytes=100):
        pass


@pytest.mark.usefixtures("nothing_left")
def test_a_process_that_starts_again_has_the_pool_that_requests_were_admitted_by(start: Any) -> None:
    with start(kv_cache_memory_bytes=None) as engine:
        core: Any = engine.core
        given = core._starting(core._replicas[0]).settings["kv_cache_memory_bytes"]
        assert MIN_DEFAULT_BYTES <= given <= MAX_DEFAULT_BYTES


@pytest.mark.usefixtures("nothing_left")
def test_a_model_that_cannot_be_loaded_is_told_by_its_fault(
    start: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    for file in Path(settings["model"]).iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with (
        pytest.raises(UnsupportedModelError, match=r"model\.safetensors.*header"),
        start(model=str(tmp_path)),
    ):
        pass


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL (out of memory?)"),
        ("raise SystemExit(3)", "ended with exit code 3"),
    ],
)
@pytest.mark.usefixtures("nothing_left")
def test_a_process_that_dies_before_it_serves_is_one_clear_error(
    start: Any, monkeypatch: pytest.MonkeyPatch, code: str, told: str
) -> None:
    monkeypatch.setattr(launcher, "MAIN", code)
    with pytest.raises(EngineError) as caught, start():
        pass
    assert str(caught.value).startswith("the engine process (pid ")
    assert told in str(caught.value)


@pytest.mark.usefixtures("nothing_left")
def test_a_process_that_hangs_is_seen_goes_on_when_it_can_and_is_killed_where_it_does_not(
    engine: Front, teller: Any, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    [pid], num_restarts = process_ids(engine), engine.stats().restarts
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: engine.stalled_s() > replicas.LATE_S)
        name = teller.submit(engine)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(asyncio.run(teller.result(engine, name)).outputs[0].token_ids) == 8
    until(lambda: engine.stalled_s() == 0)
    expected = teller.ask(engine, max_tokens=4000, logprobs=2).outputs[0]
    streamed = teller.submit(engine, max_tokens=4000, logprobs=2)

    async def stop_in_the_stream() -> Any:
        async with asyncio.timeout(LIMIT_S), aclosing(engine.stream(streamed)) as outputs:
            await anext(outputs)
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.to_thread(until, lambda: "not answered" in engine.stats().why_down)
            finally:
                os.kill(pid, signal.SIGCONT)
            *_, last = [output async for output in outputs]
        return last.outputs[0]

    resumed = asyncio.run(stop_in_the_stream())
    assert resumed.token_ids == expected.token_ids
    assert resumed.logprobs == expected.logprobs
    assert (process_ids(engine), engine.stats().restarts) == ([pid], num_restarts)
    name = teller.submit(engine, max_tokens=4000)
    with monkeypatch.context() as impatient:
        os.kill(pid, signal.SIGSTOP)
        # Long enough for the other child processes, which may have to wait for a core.
        impatient.setattr(replicas, "SILENT_S", 5 * replicas.LOOK_S)
        error = asyncio.run(teller.result(engine, name)).error
    assert type(error) is EngineError
    assert str(error) == f"the engine process (pid {pid}) has not answered for 5 s and was killed"
    assert len(teller.ask(engine).outputs[0].token_ids) == 8
    assert engine.stats().restarts == num_restarts + 1
    assert process_ids(engine) != [pid]


def test_a_step_that_does_not_end_is_a_hang(engine: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = engine.core._replicas[0]
    monkeypatch.setattr(replica, "_kill", EngineError)
    channel: Any = None
    assert replica._take(channel, [Pulse(engine.stats(), replicas.STUCK_S - 1)]) is None
    error = replica._take(channel, [Pulse(engine.stats(), replicas.STUCK_S + 1)])
    assert str(error) == "has not ended a step for 601 s"


@pytest.fixture
def copied(settings: dict[str, Any], tmp_path: Path) -> tuple[Path, bytes, bytes]:
    """A copy of the model, its weights file, and one with other numbers."""
    folder = tmp_path / "copied"
    shutil.copytree(settings["model"], folder)
    weights = (folder / "model.safetensors").read_bytes()
    others = {name: weight * 0.9 for name, weight in safetensors.torch.load(weights).items()}
    return folder, weights, safetensors.torch.save(others, {"format": "pt"})


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically, as programs that save models do."""
    path.with_suffix(".new").write_bytes(data)
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("data_parallel_size", [1, 2])
def test_a_process_that_starts_again_never_serves_other_weights(
    start: Any, teller: Any, until: Until, copied: tuple[Path, bytes, bytes], data_parallel_size: int
) -> None:
    folder, weights, others = copied
    with start(model=str(folder), data_parallel_size=data_parallel_size) as engine:
        before = teller.ask(engine, logprobs=2).outputs[0].logprobs
        replace_file(folder / "model.safetensors", others)
        pids = process_ids(engine)
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: "model: the weights of" in engine.stats().why_down)
        for _ in range(4):  # once per process, where there are several
            output = teller.ask(engine, logprobs=2)
            if data_parallel_size == 1:
                assert isinstance(output.error, EngineUnavailableError)
            else:
                assert output.error is None
                assert output.outputs[0].logprobs == before
        replace_file(folder / "model.safetensors", weights)
        until(lambda: not engine.stats().why_down)
        for _ in range(4):
            assert teller.ask(engine, logprobs=2).outputs[0].logprobs == before


def test_a_process_that_starts_again_never_serves_other_replaced_weights(
    start: Any, teller: Any, until: Until, copied: tuple[Path, bytes, bytes], settings: dict[str, Any]
) -> None:
    folder, weights, others = copied
    with start(model=settings["model"]) as engine:
        replace_file(folder / "model.safetensors", others)
        engine.load_weights(folder, version="step 1", finishes=True)
        before = teller.ask(engine, logprobs=2).outputs[0].logprobs
        replace_file(folder / "model.safetensors", weights)
        kill(engine)
        until(lambda: f"{folder / 'model.safetensors'} has changed" in engine.stats().why_down)
        assert isinstance(teller.ask(engine).error, EngineUnavailableError)
        assert before is not None


def test_a_start_that_fails_of_the_system_is_tried_again(
    start: Any, teller: Any, until: Until, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "tmp"
    own.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(own))
    with start() as engine:
        before = teller.ask(engine).outputs[0].token_ids
        own.rmdir()
        kill(engine)
        until(lambda: str(own) in engine.stats().why_down)
        error = teller.ask(engine).error
        assert isinstance(error, EngineUnavailableError)
        assert str(own) in str(error)
        own.mkdir()
        until(lambda: engine.stats().is_up)
        assert teller.ask(engine).outputs[0].token_ids == before


def test_weights_that_cannot_be_copied_for_the_processes_are_one_error(
    engine: Front,
    teller: Any,
    adapter_folders: dict[str, Path],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = teller.ask(engine).outputs[0].token_ids
    state = safetensors.torch.load_file(Path(settings["model"]) / "model.safetensors")
    with monkeypatch.context() as gone:
        gone.setattr("tempfile.tempdir", str(tmp_path / "gone"))
        for load in (
            lambda: engine.add_lora("b", adapter_folders["wide"]),
            lambda: engine.load_weights(state, version="same", finishes=True),
        ):
            with pytest.raises(EngineError, match="TMPDIR") as caught:
                load()
            assert str(tmp_path / "gone") in str(caught.value)
    # From Python 3.13 on, a path that is too long does not exist.
    with pytest.raises((OSError, ModelNotFoundError), match=r"too long|aaaa"):
        engine.load_weights("a" * 10_000, version="same", finishes=True)
    assert teller.ask(engine).outputs[0].token_ids == before
    engine.add_lora("b", adapter_folders["wide"])
    engine.remove_lora("b")


@pytest.mark.parametrize("layout", ["thread", "process"])
def test_a_fork_is_refused_at_once_and_leaves_the_engine_to_its_parent(
    settings: dict[str, Any], tmp_path: Path, layout: str
) -> None:
    script = tmp_path / "fork.py"
    script.write_text(FORK)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "ignore", str(script), settings["model"], layout]
    told = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=LIMIT_S, check=False
    )
    assert told.returncode == 0, told.stderr
    child, parent = told.stdout.splitlines()
    assert "cannot be used in a forked process" in child
    assert parent == "parent: goes on"
