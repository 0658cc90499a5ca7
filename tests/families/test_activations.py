"""Hidden states of every family are transformers', in any chunking and cache state."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from families.rows import RIGHT, Row
from families.tiny import model_of
from families.trials import Driven, load, prompts
from logprobe.errors import UnsupportedModelError
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from logprobe.text.edge import TextEdge

TOLERANCE = 2e-4  # relative to the largest number of a state


def states_of(model: Any, ids: Any) -> Any:
    """Return transformers' hidden states, (num_tokens, layers + 1, hidden size)."""
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True)
    return torch.stack(out.hidden_states, dim=2)[0].double().numpy()


def check(got: Any, want: Any) -> None:
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())


# Their layers have several states per token, or states of another width than the last.
WITHOUT_STATES = ("Gemma 3n (text)", "Gemma 3n with sparse activations", "OPT with narrow embeddings")
# Their rotary frequencies depend on the length of the text: prefixes have other states.
BY_LENGTH = [row for row in RIGHT if "longrope" in row.name or "dynamic" in row.name]


USUAL = [row for row in RIGHT if row not in BY_LENGTH and row.name not in WITHOUT_STATES]


@pytest.mark.parametrize("row", USUAL, ids=lambda row: row.name)
def test_hidden_states_of_a_family_are_those_of_transformers(row: Row, text: TextEdge) -> None:
    model = model_of(row.kind, **row.special)
    forward = load(model, "checkpoint")
    layers = range(forward.shape.num_layers + 1)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, return_hidden_states=[*layers])
    last = replace(params, return_hidden_states="last")
    texts = prompts(forward.vocab_size)
    engine = Driven(forward, text, max_num_batched_tokens=23, max_num_seqs=4)
    asked = [(texts["long"], params), (texts["sharing"], last), (texts["start"], params)]
    outputs = engine.run(*asked) + engine.run(*reversed(asked))[::-1]
    for (ids, own), output in zip(asked * 2, outputs, strict=True):
        whole = [*ids, *output.outputs[0].token_ids]
        want = states_of(model, whole)
        want = want[:, -1:] if own is last else want
        check(output.prompt_hidden_states, want[: len(ids)])
        check(output.outputs[0].hidden_states, want[len(ids) - 1 : -1])


@pytest.mark.parametrize("row", BY_LENGTH, ids=lambda row: row.name)
def test_hidden_states_of_a_text_whose_frequencies_depend_on_its_length(row: Row, text: TextEdge) -> None:
    model = model_of(row.kind, **row.special)
    forward = load(model, "checkpoint")
    layers = range(forward.shape.num_layers + 1)
    params = SamplingParams(max_tokens=0, return_hidden_states=[*layers])
    engine = Driven(forward, text, max_num_batched_tokens=128, max_num_seqs=4)
    texts = prompts(forward.vocab_size)
    both = [texts["long"], texts["short"]]
    for ids, output in zip(both, engine.run(*((ids, params) for ids in both)), strict=True):
        check(output.prompt_hidden_states, states_of(model, ids))


@pytest.mark.parametrize("name", WITHOUT_STATES)
def test_a_model_without_a_state_per_layer_fails_the_request_alone(name: str, text: TextEdge) -> None:
    (row,) = [row for row in RIGHT if row.name == name]
    forward = load(model_of(row.kind, **row.special), "checkpoint")
    engine = Driven(forward, text, max_num_batched_tokens=64, max_num_seqs=4)
    ids = prompts(forward.vocab_size)["short"]
    params = SamplingParams(max_tokens=0, return_hidden_states=[1])
    other = SamplingParams(max_tokens=3, temperature=0, return_hidden_states="last")
    with pytest.raises(UnsupportedModelError, match="return_hidden_states"):
        engine.run((ids, params), (ids, other))
    engine.run((ids, other))
