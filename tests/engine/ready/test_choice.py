"""`auto` takes the form of weights that was measured to be the faster one, and stays with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from logprobe import LLM
from logprobe.engine.ready import choice as choice_module
from logprobe.engine.ready import follow
from logprobe.engine.ready.choice import FEW_ROWS, LEAST, MANY_ROWS, measure_choice
from logprobe.kernels.layers.forms import pack_floats
from logprobe.models.stored.record import Choice

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="module")
def llama(small_model: Callable[..., Path]) -> Path:
    return small_model("Llama", {"tie_word_embeddings": False})


def chosen(folder: Path, **settings: Any) -> str:
    with LLM(str(folder), kv_bytes=1 << 21, **settings) as llm:
        return llm.engine.capabilities().weights


@pytest.mark.parametrize("weights", ["published", "packed"])
def test_it_is_measured_once(weights: Any, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(_model: Any, panels: Any) -> Choice:
        measured.append(len(panels))
        return Choice(weights, {"1": 1.0})

    monkeypatch.setattr(follow, "measure_choice", measure)
    assert [chosen(llama) for _ in range(3)] == [weights] * 3
    assert len(measured) == 1
    assert measured[0] > 0
    other = "packed" if weights == "published" else "published"
    assert chosen(llama, weights=other) == other


def test_a_choice_that_cannot_be_read_is_measured_again(
    llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "measure_choice", lambda *_: Choice("published", {}))
    assert chosen(llama) == "published"
    [file] = home.glob("panels/*.json")
    file.write_text('{"weights": "none"}')
    monkeypatch.setattr(follow, "measure_choice", lambda *_: Choice("packed", {}))
    assert chosen(llama) == "packed"


def test_a_model_with_layers_of_another_form_is_not_measured(
    small_model: Callable[..., Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "measure_choice", lambda *_: pytest.fail("it was measured"))
    assert chosen(small_model("Granite", {})) == "packed"
    assert not home.exists()


def test_generation_as_a_whole_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    panels = {str(place): pack_floats(layer.weight) for place, layer in enumerate(model)}
    measured = measure_choice(model, panels)
    assert [int(rows) for rows in measured.speedups] == [*FEW_ROWS, MANY_ROWS]
    assert all(speedup > 0 for speedup in measured.speedups.values())
    for said, want in (
        ({1: 1.5, 8: 1.0, 32: 0.9}, "published"),
        ({1: 1.0, 8: 1.0, 32: 0.9}, "packed"),  # slower on the whole
        ({1: 3.0, 8: 2.0, 32: LEAST - 0.01}, "packed"),
        ({1: 3.0, 8: 2.0, 32: 1.0, MANY_ROWS: LEAST}, "published"),
        ({1: 3.0, 8: 2.0, 32: 1.0, MANY_ROWS: LEAST - 0.01}, "packed"),
    ):
        monkeypatch.setattr(choice_module, "_speedup", lambda *args, said=said: said.get(args[2], 1.0))
        assert measure_choice(model, panels).weights == want


def test_nothing_to_measure_stays_packed() -> None:
    assert measure_choice(nn.Sequential(nn.ReLU()), {}).weights == "packed"
