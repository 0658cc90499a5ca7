"""Every family in transformers' mapping of causal language models is correct, or refused with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from families.outcomes import NATIVE, REFUSED, TRANSFORMERS, UNBUILT
from families.rows import RIGHT
from families.tiny import model_of
from families.trials import TOLERANCE, Truth, how_layers_run, load, quick_differences
from logprobe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from logprobe.text.edge import TextEdge

REASONS = {kind: reason for reason, kinds in REFUSED.items() for kind in kinds}
IN_TABLE = {row.kind for row in RIGHT if not row.special}


def test_the_outcomes_name_every_family_of_the_mapping_once() -> None:
    """Fails for families that are new in a transformers release, so that they are reviewed."""
    assert sorted([*NATIVE, *TRANSFORMERS, *REASONS, *UNBUILT]) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("kind", [kind for kind in [*NATIVE, *TRANSFORMERS] if kind not in IN_TABLE])
def test_a_family_that_is_taken_gives_the_numbers_of_transformers(kind: str, text: TextEdge) -> None:
    model = model_of(kind)
    forward = load(model, "checkpoint")
    assert how_layers_run(forward) == ("native" if kind in NATIVE else "transformers")
    for way, difference in quick_differences(Truth(model), forward, text):
        assert difference <= TOLERANCE, f"{way}: {difference:.1e} nats"


@pytest.mark.parametrize("kind", REASONS)
def test_a_family_that_is_refused_says_why_and_what_to_do(kind: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        load(model_of(kind), "auto")
    assert REASONS[kind] in str(error.value)
    assert "engine='vllm'" in str(error.value)
