"""Replacing weights in engine processes: in all or in none, and also in restarted ones."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from logprobe.errors import EngineError, UnsupportedModelError, WeightsReplacedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe.config import EngineConfig
    from logprobe.engine.front import Front

    Until = Callable[[Callable[[], bool]], None]

LIMIT_S = 300  # generous, also for a process that starts on a busy machine
NEAR = 5e-5  # nats; new weights differ by at least 1e-2
IDS = [4, 9, 17, 60, 31]


@pytest.fixture(scope="module")
def published(config: EngineConfig) -> EngineConfig:
    """A configuration whose weights can be replaced."""
    return dataclasses.replace(config, weights="checkpoint")


@pytest.fixture(scope="module")
def replicas(start: Any) -> Iterator[Front]:
    with start(data_parallel_size=2, weights="checkpoint") as engine:
        yield engine


@pytest.fixture(scope="module")
def state(published: EngineConfig) -> dict[str, torch.Tensor]:
    """The model's weights after some training steps; two of them share memory."""
    model = AutoModelForCausalLM.from_pretrained(published.model)
    generator = torch.Generator().manual_seed(7)
    state = {
        name: weight + 0.03 * torch.randn(weight.shape, generator=generator)
        for name, weight in model.state_dict().items()
    }
    norms = [name for name in state if name.endswith("layernorm.weight")]
    state[norms[1]] = state[norms[0]].view(-1)
    return state


@pytest.fixture(scope="module")
def new_thread(start: Any, state: dict[str, torch.Tensor]) -> Iterator[Front]:
    """An engine in this process with the new weights."""
    with start(process=False, weights="checkpoint") as engine:
        engine.load_weights(state, finishes=True)
        yield engine


@pytest.fixture
def whole_again(replicas: Front, published: EngineConfig, until: Until) -> Iterator[None]:
    """Both processes run, and the model's original weights are restored after the test."""
    until(lambda: all(replica.is_up for replica in replicas.core._replicas))
    yield
    replicas.load_weights(published.model, finishes=False)


@pytest.fixture
def answers(replicas: Front, teller: Any, places: dict[str, int]) -> Callable[..., list[Any]]:
    """Return each process's replies."""

    def ask(**params: Any) -> list[Any]:
        names = [teller.submit(replicas, IDS, logprobs=3, **params) for _ in replicas.core._replicas]
        assert sorted(places[name] for name in names) == list(range(len(names)))

        async def results() -> list[Any]:
            return await asyncio.gather(*(teller.result(replicas, name) for name in names))

        return [output.outputs[0].logprobs for output in asyncio.run(results())]

    return ask


def assert_near(record: Any, expected: Any) -> None:
    """Bits may differ: a replica has fewer threads than an engine in this process."""
    assert len(record) == len(expected)
    for row, expected_row in zip(record, expected, strict=True):
        assert row.keys() == expected_row.keys()
        for token_id, entry in row.items():
            assert entry.logprob == pytest.approx(expected_row[token_id].logprob, abs=NEAR)


@pytest.mark.usefixtures("nothing_left", "whole_again")
def test_new_weights_answer_in_every_process_also_in_one_that_is_started_again(
    replicas: Front,
    *,
    published: EngineConfig,
    state: dict[str, torch.Tensor],
    new_thread: Front,
    adapter_folders: dict[str, Path],
    answers: Callable[..., list[Any]],
    teller: Any,
    until: Until,
) -> None:
    engines: tuple[Any, ...] = (replicas, new_thread)
    for engine in engines:
        engine.add_lora("a", adapter_folders["wide"])
    before = answers()
    number = replicas.weights_number
    assert replicas.load_weights(state, version="new", finishes=True) == "new"
    assert replicas.capabilities().weight_version == "new"
    assert replicas.weights_number > number
    want = [teller.ask(new_thread, IDS, logprobs=3, lora=lora).outputs[0].logprobs for lora in (None, "a")]
    assert want[0] not in before

    def are_new() -> None:
        for lora, expected in zip((None, "a"), want, strict=True):
            for record in answers(lora=lora):
                assert_near(record, expected)
                assert record.info.weight_version == "new"
                assert record.info.probe_difference == replicas.capabilities().layout.probe_difference

    are_new()
    # If one process dies while it reads them, the other and the replacement keep the old weights.
    victim = replicas.core._replicas[1]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGSTOP)
    errors: list[EngineError] = []

    def load() -> None:
        with pytest.raises(EngineError) as caught:
            replicas.load_weights(published.model, finishes=True)
        errors.append(caught.value)

    loading = threading.Thread(target=load)
    loading.start()
    until(lambda: len(victim._asked) == 1)
    os.kill(victim.pid, signal.SIGKILL)
    loading.join(LIMIT_S)
    assert "replica 1 (pid " in str(errors[0])
    until(lambda: victim.is_up)
    are_new()
    replicas.remove_lora("a")


@pytest.mark.usefixtures("nothing_left", "whole_again")
def test_a_process_that_is_started_again_has_lora_weights_as_they_were_read(
    replicas: Front,
    *,
    adapter_folders: dict[str, Path],
    answers: Callable[..., list[Any]],
    tmp_path: Path,
    until: Until,
) -> None:
    """Even if their folder no longer exists."""
    folder = tmp_path / "lora"
    shutil.copytree(adapter_folders["wide"], folder)
    replicas.add_lora("a", folder)
    before, plain = answers(lora="a"), answers()
    shutil.rmtree(folder)
    victim = replicas.core._replicas[1]
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: not victim.is_up)
    until(lambda: victim.is_up)
    for record, expected, other in zip(answers(lora="a"), before, plain, strict=True):
        assert_near(record, expected)
        assert record != other
    [(_, copy)] = replicas.core._loras.values()
    replicas.remove_lora("a")
    assert not Path(copy.name).exists()


@pytest.mark.usefixtures("whole_again")
def test_lora_weights_that_are_removed_while_a_process_starts_are_still_there_for_it(
    replicas: Front,
    adapter_folders: dict[str, Path],
    answers: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    until: Until,
) -> None:
    """Its start message lists them; without them it and all its waiting requests would fail."""
    before = answers()
    replicas.add_lora("a", adapter_folders["wide"])
    victim = replicas.core._replicas[1]
    num_restarts, starting = victim.num_restarts, victim._starting

    def told(replica: Any) -> Any:
        start = starting(replica)
        if replicas.list_loras():
            replicas.remove_lora("a")
        return start

    monkeypatch.setattr(victim, "_starting", told)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: victim.is_up and not replicas.list_loras())
    assert victim.num_restarts == num_restarts + 1
    for record, expected in zip(answers(), before, strict=True):
        assert_near(record, expected)


@pytest.mark.usefixtures("nothing_left")
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_go_on(
    replicas: Front,
    state: dict[str, torch.Tensor],
    answers: Callable[..., list[Any]],
) -> None:
    before = answers()
    name = "model.layers.0.mlp.up_proj.weight"
    part = {key: weight for key, weight in state.items() if key != name}
    with pytest.raises(UnsupportedModelError, match=rf"1 missing \({name}\)"):
        replicas.load_weights(part, finishes=True)
    assert answers() == before


@pytest.mark.usefixtures("whole_again")
@pytest.mark.parametrize("finishes", [True, False])
def test_requests_that_run_finish_on_the_old_weights_or_end_by_name(
    replicas: Front, published: EngineConfig, teller: Any, finishes: bool
) -> None:
    want = teller.ask(replicas, IDS, max_tokens=200).outputs[0].token_ids
    number = replicas.weights_number
    asked = {"max_tokens": 200 if finishes else 4000, "logprobs": 0}
    names = [teller.submit(replicas, IDS, **asked) for _ in range(4)]
    old = replicas.capabilities().weight_version
    for name in names if not finishes else []:
        replicas.pause(name)  # so that they do not finish before the weights are read

    async def run() -> list[Any]:
        waiting = [asyncio.ensure_future(teller.result(replicas, name)) for name in names]
        await asyncio.to_thread(replicas.load_weights, published.model, version="again", finishes=finishes)
        return await asyncio.gather(*waiting)

    for output in asyncio.run(run()):
        assert (output.weights_number, output.info.weight_version) == (number, old)
        if finishes:
            assert output.outputs[0].token_ids == want
        else:
            assert type(output.error) is WeightsReplacedError
    after = teller.ask(replicas, IDS, max_tokens=200, logprobs=0)
    assert after.outputs[0].token_ids == want
    assert (after.weights_number, after.info.weight_version) == (replicas.weights_number, "again")
