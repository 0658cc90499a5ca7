"""Processors in the style and with the names of other servers."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import traceback
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from logprobe import LLM, EngineConfig, SamplingParams
from logprobe.errors import BatchError, ParameterError
from logprobe.processors import LogitsProcessor
from logprobe.processors.registry import load_processor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor


class Plain(LogitsProcessor):
    """Do nothing but record the constructor's arguments."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.seen: list[Any] = []

    def update_state(self, batch: Any) -> None:
        self.seen += [row.args for row in batch.rows]

    def apply(self, logits: Tensor) -> Tensor:
        return logits


class Everywhere(Plain):
    """Runs on every request."""

    applies_to_all = True

    class Args(msgspec.Struct):
        """With a default."""

        everywhere_bias: float = 0.5


class Named(Plain):
    """Declares its keys."""

    arg_names = ("named_strength",)


class Untyped(Plain):
    """Accepts arguments without declaring them."""


class Broken(Plain):
    """Always fails."""

    arg_names = ("broken",)

    def apply(self, logits: Tensor) -> Tensor:  # noqa: ARG002 - what it is for
        raise ValueError("the author's own words")


class Demanding(Plain):
    """Has required arguments, so it cannot apply to all requests."""

    applies_to_all = True

    class Args(msgspec.Struct):
        """Without a default."""

        needed: int


@pytest.fixture(scope="module")
def llm(tiny_model_folder: Path) -> Any:
    processors = [Everywhere, Named, Untyped, Broken]
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 20, logits_processors=processors) as llm:
        yield llm


@pytest.fixture
def ask(llm: LLM) -> Callable[..., Any]:
    for processor in llm.processors.registered.values():  # type: ignore[union-attr]
        processor.seen.clear()

    def generate(**args: Any) -> dict[str, list[Any]]:
        params = SamplingParams(max_tokens=1, logits_processors_args=args or None)
        llm.generate("the cat", params)
        assert llm.processors is not None
        return {name: one.seen for name, one in llm.processors.registered.items()}  # type: ignore[attr-defined]

    return generate


def test_one_text_may_hold_several_names() -> None:
    config = EngineConfig(logits_processors=["a:A, b:B", Plain])
    assert config.logits_processors == ("a:A", "b:B", Plain)


def test_names_are_checked_before_the_weights_are_read(tiny_model_folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        "logprobe.engine.backends.start.NativeForward", lambda *_: pytest.fail("weights were read")
    )
    with pytest.raises(ParameterError, match="no processor 'Nobody'"):
        LLM(str(tiny_model_folder), logits_processors=["Nobody"])


def test_the_current_folder_is_searched_and_the_hint_says_so(tmp_path: Path) -> None:
    (tmp_path / "mine_here.py").write_text(
        "from logprobe.processors import LogitsProcessor\n"
        "class Mine(LogitsProcessor):\n"
        "    def __init__(self, config): pass\n"
        "    def apply(self, logits): return logits\n"
    )
    (tmp_path / "program.py").write_text(
        "import sys; sys.path = [one for one in sys.path if one not in ('', sys.argv[1])]\n"
        "from logprobe.processors.registry import load_processor\n"
        "print(load_processor('mine_here:Mine').__name__)\n"
        "try: load_processor('absent_here:Mine')\n"
        "except ValueError as error: print(error)\n"
    )
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=dict(os.environ), timeout=300
    )
    assert ended.stdout.startswith("Mine\n"), ended.stderr
    assert f"current folder {tmp_path}" in ended.stdout


def test_the_constructor_gets_the_resolved_dtype_and_device(llm: LLM) -> None:
    assert llm.processors is not None
    made = llm.processors.registered["Untyped"]
    assert (made.config.dtype, made.config.device) == ("float32", "cpu")  # type: ignore[attr-defined]


def test_a_processor_for_all_runs_without_arguments_and_its_cost_is_counted(llm: LLM, ask: Any) -> None:
    assert llm.processors is not None
    before = llm.processors.counters["Everywhere"].num_rows
    seen = ask()
    assert [args.everywhere_bias for args in seen["Everywhere"]] == [0.5]
    assert seen["Named"] == seen["Untyped"] == []
    assert llm.processors.counters["Everywhere"].num_rows == before + 1
    with pytest.raises(ParameterError, match="needed a default"):
        load_processor(Demanding)


def test_an_untyped_processor_runs_only_for_keys_that_nobody_else_has(ask: Any) -> None:
    seen = ask(named_strength=2)
    assert [dict(args) for args in seen["Named"]] == [{"named_strength": 2}]
    assert seen["Untyped"] == []
    seen = ask(anything=1)
    assert [dict(args) for args in seen["Untyped"]] == [{"anything": 1}]


def test_a_near_miss_of_a_known_key_is_refused_beside_an_untyped_processor(ask: Any) -> None:
    for key in ("named_strengh", "everywhere_bais"):
        with pytest.raises(ParameterError, match="did you mean"):
            ask(**{key: 2})


def test_a_failing_processors_own_line_is_in_the_log_and_in_the_causes(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=1, logits_processors_args={"broken": 1})
    with caplog.at_level(logging.ERROR), pytest.raises(BatchError) as caught:
        llm.generate("the cat", params)
    own = caught.value.errors[0]
    assert caught.value.__cause__ is own
    assert isinstance(own.__cause__, ValueError)
    author = 'raise ValueError("the author\'s own words")'
    assert author in "".join(traceback.format_exception(own.__cause__))
    assert author in "".join(traceback.format_exception(caught.value))
    assert author in caplog.text
    caplog.clear()
    with caplog.at_level(logging.ERROR), pytest.raises(BatchError):
        llm.generate("the cat", params)
    assert author not in caplog.text, "it is told once"


def test_a_batchs_bad_prompt_is_refused_by_its_index(tiny_llm: LLM) -> None:
    with pytest.raises(ParameterError, match=r"number 1 of 2 is empty"):
        tiny_llm.generate(["the cat", []])


@pytest.mark.parametrize(
    ("name", "near"), [("kv_cache_bytes", "kv_cache_memory_bytes"), ("memory_of_the_gpu", None)]
)
def test_an_unknown_setting_names_the_nearest_or_all(name: str, near: str | None) -> None:
    settings: dict[str, Any] = {name: 1}
    with pytest.raises(ParameterError) as caught:
        LLM("smollm2", **settings)
    assert (
        f"did you mean {near!r}"
        if near
        else "known: arithmetic, async_scheduling, batch_invariant, cache_config"
    ) in str(caught.value)
