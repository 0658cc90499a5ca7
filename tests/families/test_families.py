"""Every family and variant gives transformers' numbers in any batch, chunking and cache state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from families.rows import RIGHT, Row
from families.tiny import model_of
from families.trials import (
    TOLERANCE,
    Truth,
    differences,
    how_layers_run,
    load,
    prompts,
    quick_differences,
)

if TYPE_CHECKING:
    from logprobe.text.edge import TextEdge


@pytest.mark.parametrize("row", RIGHT, ids=lambda row: row.name)
def test_a_family_gives_the_numbers_of_transformers(row: Row, text: TextEdge) -> None:
    model = model_of(row.kind, **row.special)
    truth = Truth(model)
    for weights in ("checkpoint", "plain"):
        forward = load(model, weights)
        assert how_layers_run(forward) == ("transformers" if weights == "plain" else row.layers)
        for way, difference in quick_differences(truth, forward, text):
            assert difference <= TOLERANCE, f"{weights}, {way}: {difference:.1e} nats"


# One for each kind of attention; the others differ in their layers, for which two cases are enough.
SAMPLE = (
    "Llama",
    "Mistral",
    "Gemma 2",
    "Gemma 3 (text)",
    "Phi-3 with longrope",
    "GPT-2",
    "Mixtral",
    "gpt-oss",
)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=() if row.name in SAMPLE else pytest.mark.exhaustive)
        for row in RIGHT
    ],
)
def test_a_family_gives_the_numbers_of_transformers_in_every_layout(row: Row, text: TextEdge) -> None:
    model = model_of(row.kind, **row.special)
    for way, difference in differences(Truth(model), load(model, "checkpoint"), text):
        assert difference <= TOLERANCE, f"{way}: {difference:.1e} nats"


def test_the_sample_is_of_the_table() -> None:
    assert {*SAMPLE} <= {row.name for row in RIGHT}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Gemma 2", "Mixtral", "gpt-oss", "Phi-3 with longrope"])
def test_16_bits_are_as_near_to_float32_as_transformers_own(name: str, dtype: str, text: TextEdge) -> None:
    (row,) = [row for row in RIGHT if row.name == name]
    model = model_of(row.kind, **row.special)
    truth, rounded = Truth(model), Truth(model_of(row.kind, **row.special).to(getattr(torch, dtype)))
    texts = prompts(model.config.vocab_size).values()
    own = max(np.abs(truth.rows(ids) - rounded.rows(ids)).max() for ids in texts)
    forward = load(model, "auto", dtype=dtype)
    assert "needs float32 on a CPU" in (forward.layout.why_transformers or "")
    ways = dict(differences(truth, forward, text))
    # Greedy generation leaves the texts of the `own` measurement; rounding may then change the expert.
    assert max(difference for way, difference in ways.items() if "grown" not in way) <= 1.5 * own
