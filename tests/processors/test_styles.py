"""Processors of each style: the requests they act on, and the state they see."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from logprobe import LLM, SamplingParams
from logprobe.config import EngineConfig
from logprobe.errors import ParameterError, ProcessorError
from logprobe.processors import (
    BatchRow,
    BatchState,
    BatchUpdate,
    GlobalLogprobsCapture,
    LogitsProcessor,
    MoveDirectionality,
    load_processor,
)
from logprobe.processors.registry import make_processor
from logprobe.processors.styles import Updates
from other_styles import Capture, Count, Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOLERANCE = 1e-4  # nats, on the tiny model
GREEDY: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}
ASKED: dict[str, list[dict[str, Any]]] = {
    "untagged": [{"max_tokens": 1}] * 3,
    "greedy": [GREEDY] * 3,
    "sampled": [{"max_tokens": 1, "temperature": 0.7, "top_p": 0.8, "seed": seed} for seed in range(3)],
    "mixed": [GREEDY, {"max_tokens": 1, "seed": 1}, {**GREEDY, "prompt_logprobs": 2, "logprobs": 3}],
}


@pytest.fixture(scope="module")
def wide_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a longer context."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(tiny_model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    return folder


@pytest.fixture(scope="module")
def plain_row(wide_folder: Path) -> Callable[[list[int]], Any]:
    """Return transformers' row after some tokens."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(wide_folder).eval()

    def row(ids: list[int]) -> Any:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)

    return row


@pytest.fixture
def start(wide_folder: Path) -> Iterator[Callable[..., tuple[LLM, Any]]]:
    """Start an engine with one processor; return it with the processor's instance."""
    started: list[LLM] = []

    def start_one(kind: Any, **settings: Any) -> tuple[LLM, Any]:
        settings = {"kv_cache_memory_bytes": 8 << 20, "logits_processors": [kind]} | settings
        started.append(LLM(str(wide_folder), **settings))
        assert started[-1].processors is not None
        return started[-1], next(iter(started[-1].processors.registered.values()))

    yield start_one
    for llm in started:
        llm.close()


def random_prompts(num: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(length)
    return [rng.integers(2, 280, length).tolist() for _ in range(num)]


class OwnBase(Capture, LogitsProcessor):
    """The same, derived from this library's class."""


@pytest.mark.parametrize("kind", [Capture, "other_styles:Capture", OwnBase, "GlobalLogprobsCapture"])
@pytest.mark.parametrize("asked", ASKED)
def test_a_capture_gets_the_models_rows_whatever_is_asked(
    start: Any, plain_row: Any, kind: Any, asked: str
) -> None:
    llm, capture = start(kind)
    prompts = random_prompts(3, 6)
    outputs = llm.generate(prompts, [SamplingParams(**params) for params in ASKED[asked]])
    rows = capture.get_all_logprobs()
    assert len(rows) == 3
    for row, prompt in zip(rows, prompts, strict=True):
        np.testing.assert_allclose(row, plain_row(prompt), atol=TOLERANCE)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 1, 1]


def test_each_step_of_a_text_is_captured(start: Any, plain_row: Any) -> None:
    llm, capture = start(Capture)
    [prompt] = random_prompts(1, 5)
    ids = llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))[0]
    assert len(capture.steps) == 4
    for index, [row] in enumerate(capture.steps):
        np.testing.assert_allclose(
            row, plain_row([*prompt, *ids.outputs[0].token_ids[:index]]), atol=TOLERANCE
        )


@pytest.mark.parametrize("kind", [Capture, GlobalLogprobsCapture])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_prompts_of_one_call_come_in_one_step(
    start: Any, plain_row: Any, kind: Any, overlap: bool
) -> None:
    llm, capture = start(kind, max_num_batched_tokens=512, async_scheduling=overlap)
    prompts = random_prompts(5, 300)
    for _ in range(2):  # the second time they are cached
        llm.generate(prompts, SamplingParams(**GREEDY))
        rows = capture.get_all_logprobs()
        assert len(rows) == 5
        for row, prompt in zip(rows, prompts, strict=True):
            np.testing.assert_allclose(row, plain_row(prompt), atol=TOLERANCE)
        capture.steps = []


def test_texts_and_numbers_are_those_of_an_engine_without_it(start: Any) -> None:
    shown: dict[str, Any] = {"logprobs": 3, "ignore_eos": True}
    asked = [SamplingParams(max_tokens=1 + 3 * index, seed=index, **shown) for index in range(6)]
    prompts = [ids for length in (3, 40, 90) for ids in random_prompts(2, length)]
    kinds = (Capture, "LogitBiasLogitsProcessor")
    with_it, without = (start(kind, max_num_batched_tokens=64)[0].generate(prompts, asked) for kind in kinds)
    for mine, theirs in zip(with_it, without, strict=True):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        numbers, wanted = mine.outputs[0].logprobs.logprobs, theirs.outputs[0].logprobs.logprobs
        np.testing.assert_allclose(numbers, wanted, atol=TOLERANCE)


@pytest.mark.parametrize("settings", [{"max_num_seqs": 3}, {"kv_cache_memory_bytes": 1 << 18}])
def test_a_call_that_does_not_run_at_once_is_told_of_once(
    start: Any, plain_row: Any, caplog: pytest.LogCaptureFixture, settings: dict[str, int]
) -> None:
    llm, capture = start(Capture, max_num_batched_tokens=64, **settings)
    prompts = random_prompts(5, 100)
    with caplog.at_level(logging.WARNING, logger="logprobe"):
        for _ in range(2):
            llm.generate(prompts, SamplingParams(**GREEDY))
    told = [message for message in caplog.messages if "one call do not fit into one step" in message]
    assert len(told) == 1
    rows = torch.cat(capture.steps)
    assert len(rows) == 10
    for row, prompt in zip(rows, prompts * 2, strict=True):
        np.testing.assert_allclose(row, plain_row(prompt), atol=TOLERANCE)


def test_calls_do_not_wait_for_each_other(start: Any, plain_row: Any) -> None:
    llm, capture = start(Capture, max_num_batched_tokens=64)
    prompts = random_prompts(8, 100)
    outputs: dict[int, Any] = {}

    def ask(index: int) -> None:
        outputs[index] = llm.generate(prompts[2 * index : 2 * index + 2], SamplingParams(max_tokens=3))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outputs) == [0, 1, 2, 3]
    rows = torch.cat(capture.steps)
    for prompt in prompts:
        gaps = (rows - plain_row(prompt)).abs().amax(1)
        assert float(gaps.min()) < TOLERANCE, "every prompt's row was seen"


class OnlyAsked(Capture):
    applies_to_all = False


class Unread(Capture):
    keeps_rows = False


class Typed(Count):
    class Args(msgspec.Struct):
        count: int | None = None
        fail_at: int = -1


def test_the_class_itself_comes_before_its_style(start: Any) -> None:
    llm, capture = start(OnlyAsked)
    prompts = random_prompts(2, 4)
    llm.generate(prompts, SamplingParams(**GREEDY))
    assert capture.get_all_logprobs() is None
    tagged = SamplingParams(**GREEDY, logits_processors_args={"x": 1})
    llm.generate(prompts, [SamplingParams(**GREEDY), tagged])
    assert len(capture.get_all_logprobs()) == 1
    llm, capture = start(Unread)
    llm.generate(prompts, [SamplingParams(**GREEDY), SamplingParams(max_tokens=1)])
    assert len(capture.get_all_logprobs()) == 1
    llm, _ = start(Typed)
    with pytest.raises(ParameterError, match="did you mean 'count'"):
        llm.generate(prompts, SamplingParams(logits_processors_args={"cuont": 5}))
    out = llm.generate(prompts[0], SamplingParams(max_tokens=2, logits_processors_args={"count": 5}))[0]
    assert out.outputs[0].token_ids == [5, 6]


@pytest.mark.parametrize("max_num_seqs", [2, 5, 64])
def test_indices_follow_requests_that_come_go_and_are_preempted(start: Any, max_num_seqs: int) -> None:
    llm, _ = start(Count, kv_cache_memory_bytes=1 << 17, max_num_batched_tokens=64, max_num_seqs=max_num_seqs)
    asked = [
        SamplingParams(
            max_tokens=3 + 7 * (index % 4),
            ignore_eos=True,
            n=1 + index % 3,
            seed=index,
            logits_processors_args={"count": 10 * index} if index % 2 else None,
        )
        for index in range(12)
    ]
    outputs = llm.generate(random_prompts(12, 20), asked)
    for index, (output, params) in enumerate(zip(outputs, asked, strict=True)):
        assert len(output.outputs) == 1 + index % 3
        for completion in output.outputs:
            assert len(completion.token_ids) == params.max_tokens
            if index % 2:
                assert completion.token_ids == [10 * index + i for i in range(params.max_tokens)]
    if max_num_seqs == 64:
        assert llm.engine.stats().preempted > 0


@pytest.mark.parametrize("fault", [{"fail": "update"}, {"fail_at": 0}, {"fail_at": 2}])
def test_one_rows_failure_is_its_own(start: Any, fault: dict[str, Any]) -> None:
    llm, _ = start(Count)
    args: list[dict[str, Any] | None] = [{"count": 20}, None, {"count": 30, **fault}, {"count": 40}]
    asked = [SamplingParams(max_tokens=5, ignore_eos=True, logits_processors_args=one) for one in args]
    for _ in range(2):
        outputs = llm.generate(random_prompts(4, 3), asked, on_error="return")
        assert isinstance(outputs[2].error, ProcessorError)
        assert outputs[2].outputs[0].token_ids == [30 + i for i in range(max(fault.get("fail_at", 0), 0))]
        assert [output.error for output in outputs].count(None) == 3
        assert outputs[0].outputs[0].token_ids == [20, 21, 22, 23, 24]
        assert len(outputs[1].outputs[0].token_ids) == 5
        assert outputs[3].outputs[0].token_ids == [40, 41, 42, 43, 44]


def test_its_own_validation_refuses_at_admission(start: Any) -> None:
    llm, _ = start(Count)
    params = SamplingParams(max_tokens=7, logits_processors_args={"count": -1})
    refused = "Count: count must not be negative beside max_tokens 7"
    with pytest.raises(ParameterError, match=refused) as raised:
        llm.generate([[5]], params)
    assert raised.value.parameter == "logits_processors_args"


def test_one_that_changes_rows_has_no_prompt_wait(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    llm, _ = start(Count, max_num_batched_tokens=64, max_num_seqs=2)
    llm.generate(random_prompts(5, 100), SamplingParams(**GREEDY))
    assert not llm.engine.core.engine.scheduler._gathers_calls
    assert not [message for message in caplog.messages if "one call" in message]


def test_drafts_are_not_verified_beside_it(start: Any) -> None:
    llm, _ = start(Count, speculate=True)
    [out] = llm.generate([[5, 6]], SamplingParams(max_tokens=9, logits_processors_args={"count": 3}))
    assert out.outputs[0].token_ids == [*range(3, 12)]
    assert out.outputs[0].drafts is not None
    assert out.outputs[0].drafts.refusal == "Count keeps state"


def test_slots_show_every_request_that_runs(start: Any) -> None:
    llm, slots = start(Slots)
    on = SamplingParams(**GREEDY | {"max_tokens": 3}, logits_processors_args={"favour": 77})
    off = SamplingParams(max_tokens=3, seed=1, logprobs=5, logprobs_mode="both", ignore_eos=True)
    prompts = random_prompts(4, 5)
    alone = llm.generate(prompts, off)
    assert slots.seen == [], "nobody gave its arguments"
    outputs = llm.generate(prompts, [off, on, off, off])
    assert outputs[1].outputs[0].token_ids == [77] * 3
    steps = [step for step in slots.seen if step[0]]
    assert len(steps) == 3
    for names, favoured, num_slots in steps:
        assert num_slots == len(set(names)) == 4
        assert sorted(names) == sorted(output.request_id for output in outputs)
        assert sorted(favoured, key=str) == [77, None, None, None]
        assert favoured[names.index(outputs[1].request_id)] == 77
    for index in (0, 2, 3):
        mine, theirs = outputs[index].outputs[0], alone[index].outputs[0]
        assert mine.token_ids == theirs.token_ids
        for stage in ("logprobs", "processed_logprobs"):
            got, want = getattr(mine, stage), getattr(theirs, stage)
            np.testing.assert_array_equal(got.logprobs, want.logprobs)  # bit for bit


def test_slots_are_shown_beside_other_processors_and_beyond_a_chunk(start: Any, monkeypatch: Any) -> None:
    llm, slots = start(Slots, logits_processors=[Slots, "LogitBiasLogitsProcessor"])
    monkeypatch.setattr(llm.engine.core.engine.sampling, "chunk_rows", 2)
    asked = [
        SamplingParams(**GREEDY, logits_processors_args={"favour": 77}),
        SamplingParams(**GREEDY),
        SamplingParams(**GREEDY, logit_bias={88: 1000.0}),
        SamplingParams(**GREEDY, logits_processors_args={"logit_bias": {99: 1000.0}}),
        SamplingParams(**GREEDY),
    ]
    plain = llm.generate(random_prompts(5, 5), SamplingParams(**GREEDY))
    outputs = llm.generate(random_prompts(5, 5), asked)
    assert [output.outputs[0].token_ids[0] for output in outputs] == [
        77,
        plain[1].outputs[0].token_ids[0],
        88,
        99,
        plain[4].outputs[0].token_ids[0],
    ]
    assert slots.seen[-1][2] == 5


class Picky(Slots):
    def update_state(self, share_inputs: dict[str, Any]) -> None:
        super().update_state(share_inputs)
        if 13 in self.favoured:
            raise RuntimeError("told to fail")


def test_a_slots_failure_is_its_own(start: Any) -> None:
    llm, _ = start(Picky)
    asked = [
        SamplingParams(**GREEDY, logits_processors_args=None if token_id is None else {"favour": token_id})
        for token_id in (77, None, 13, 88)
    ]
    outputs = llm.generate(random_prompts(4, 5), asked, on_error="return")
    assert [isinstance(output.error, ProcessorError) for output in outputs] == [False, False, True, False]
    assert [outputs[index].outputs[0].token_ids for index in (0, 3)] == [[77], [88]]


def test_a_process_of_its_own_finds_them_by_name(wide_folder: Path) -> None:
    processors: list[str | type] = [Count, "other_styles:Slots"]
    with LLM(
        str(wide_folder), kv_cache_memory_bytes=1 << 20, process=True, logits_processors=processors
    ) as llm:
        asked = [{"count": 20}, {"favour": 77}, None]
        params = [SamplingParams(max_tokens=2, logits_processors_args=args) for args in asked]
        outputs = llm.generate(random_prompts(3, 5), params)
        assert [output.outputs[0].token_ids for output in outputs[:2]] == [[20, 21], [77, 77]]
        with pytest.raises(ParameterError, match="count must not be negative"):
            llm.generate([[5]], SamplingParams(logits_processors_args={"count": -1}))


@pytest.mark.parametrize(
    ("init", "wanted"),
    [
        (lambda self: setattr(self, "given", ()), ()),
        (lambda self, device: setattr(self, "given", (device,)), ("device",)),
        (lambda self, config: setattr(self, "given", (config,)), ("config",)),
        (lambda self, _, device, is_pin_memory: setattr(self, "given", (_, device, is_pin_memory)), "all"),
        (lambda self, vllm_config, *rest: setattr(self, "given", (vllm_config, *rest)), "all"),
        (lambda self, size=3: setattr(self, "given", () if size == 3 else size), ()),
        (lambda self, *, size=3: setattr(self, "given", () if size == 3 else size), ()),
        (lambda self, **more: setattr(self, "given", tuple(more)), ()),
    ],
)
def test_an_init_is_given_what_it_asks_for(init: Any, wanted: Any) -> None:
    kind = load_processor(type("Made", (Capture,), {"__init__": init}))
    config = EngineConfig()
    all_given = {"config": config, "device": torch.device("cpu"), "pin": False}
    names = list(all_given) if wanted == "all" else wanted
    made: Any = make_processor(kind, config)
    assert made.given == tuple(all_given[name] for name in names)


def test_an_init_is_given_the_device_that_logits_lie_on(start: Any) -> None:
    _, capture = start(Capture, device="auto")
    config, device, _ = capture.made_with
    assert config.device == device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_an_init_that_calls_its_base_means_its_own() -> None:
    class Base(Capture):
        def __init__(self) -> None:
            super().__init__()

    class NoInit:
        def update_state(self, batch_update: Any) -> None:
            pass

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits

    for kind in (Base, NoInit):
        derived = load_processor(kind)
        made = make_processor(derived, EngineConfig())
        assert isinstance(made, kind)
        assert load_processor(kind) is derived is load_processor(derived)
        assert (derived.__module__, derived.__qualname__) == (kind.__module__, kind.__qualname__)


def test_what_has_no_style_is_refused() -> None:
    with pytest.raises(ParameterError, match="update_state has no argument batch_update or share_inputs"):
        load_processor("other_styles:Looks")
    with pytest.raises(ParameterError, match="does not define apply"):
        load_processor(type("Unfinished", (), {"update_state": Capture.update_state}))


def test_words_of_another_engine_mean_the_same() -> None:
    other = Enum("other", ["UNIDIRECTIONAL", "SWAP"])
    assert MoveDirectionality.SWAP == other.SWAP
    assert other.SWAP == MoveDirectionality.SWAP
    assert MoveDirectionality.SWAP != other.UNIDIRECTIONAL
    assert len({MoveDirectionality.SWAP, MoveDirectionality.UNIDIRECTIONAL}) == 2


class Follower:
    """Track the request at each index from batch updates; assert that updates are valid."""

    def __init__(self) -> None:
        self.at: dict[int, str] = {}
        self.fails = False
        self.updates: list[BatchUpdate | None] = []

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)
        if batch_update is None:
            return
        assert list(batch_update.removed) == sorted(batch_update.removed, reverse=True)
        assert not {index for index, *_ in batch_update.added} & set(batch_update.removed)
        for index in batch_update.removed:
            self.at.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self.at[index] = params.extra_args["name"]
            if self.fails:
                raise RuntimeError("in the middle")
        for source, target, direction in batch_update.moved:
            moved, replaced = self.at.pop(source), self.at.pop(target, None)
            assert (replaced is not None) == (direction == MoveDirectionality.SWAP)
            self.at[target] = moved
            if replaced is not None:
                self.at[source] = replaced


def test_updates_lead_to_the_rows_as_they_are() -> None:
    rng = np.random.default_rng(0)
    follower = Follower()
    updates = Updates(follower.update_state)
    names = [f"r{index}" for index in range(9)]
    rows = {
        name: BatchRow(
            request_id=name,
            args=None,
            prompt_token_ids=[],
            output_token_ids=[],
            params=SamplingParams(logits_processors_args={"name": name}),
        )
        for name in names
    }
    before: list[str] = []
    for step in range(600):
        chosen = [str(name) for name in rng.permutation(names)[: rng.integers(0, 10)]]
        if step % 3:  # most steps keep most of the order
            chosen = [name for name in [*before, *chosen[:1]] if rng.random() < 0.9]
            chosen = list(dict.fromkeys(chosen))
        follower.fails = step % 7 == 6
        try:
            updates.show(BatchState([rows[name] for name in chosen]))
        except RuntimeError:
            follower.fails = False
            updates.show(BatchState([rows[name] for name in chosen]))
        assert follower.at == dict(enumerate(chosen))
        updates.show(BatchState([rows[name] for name in chosen]))
        assert follower.updates[-1] is None
        before = chosen
