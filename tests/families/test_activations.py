"""Hidden states and expert routes of every family are transformers', in any chunking and cache state."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from families.rows import RIGHT, Row
from families.tiny import model_of
from families.trials import Driven, load, prompts
from logprobe.errors import ParameterError, UnsupportedModelError
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


# -- expert routes -------------------------------------------------------------------------------------------

MIXTURES = [row for row in RIGHT if row.kind in {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe"}]
ROUTED = [row for row in MIXTURES if row.layers == "native"]


def routes_of(model: Any, ids: Any) -> Any:
    """Return the experts that transformers' routers choose, (num_tokens, layers, k), likeliest first."""
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([list(ids)]), use_cache=False, output_router_logits=True)
    k = model.config.num_experts_per_tok
    return torch.stack([logits.topk(k, dim=-1).indices for logits in out.router_logits], dim=1).numpy()


@pytest.mark.parametrize("row", ROUTED, ids=lambda row: row.name)
def test_routes_of_a_family_are_those_of_transformers(row: Row, text: TextEdge) -> None:
    model = model_of(row.kind, **row.special)
    forward = load(model, "checkpoint")
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, return_routed_experts=True)
    texts = prompts(forward.vocab_size)
    engine = Driven(forward, text, max_num_batched_tokens=23, max_num_seqs=4)
    asked = [(texts["long"], params), (texts["start"], params)]
    for (ids, _), output in zip(asked * 2, engine.run(*asked) + engine.run(*asked), strict=True):
        whole = [*ids, *output.outputs[0].token_ids]
        want = np.sort(routes_of(model, whole)[:-1], axis=-1)
        found = output.replayed_experts()
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(found, axis=-1), want)
        np.testing.assert_array_equal(output.outputs[0].routed_experts, found[len(ids) - 1 :])


@pytest.mark.parametrize("row", ROUTED, ids=lambda row: row.name)
def test_given_routes_are_taken_in_place_of_the_routers(row: Row, text: TextEdge) -> None:
    """The numbers are those of transformers with its routers' choice replaced."""
    model = model_of(row.kind, **row.special)
    forward = load(model, "checkpoint")
    ids = prompts(forward.vocab_size)["long"]
    shape = forward.shape
    rng = np.random.default_rng(2)
    size = (len(ids) - 4, shape.num_expert_layers, shape.num_experts)
    given = rng.random(size).argsort(axis=-1)[..., : shape.experts_per_token]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, routed_experts=given, return_routed_experts=True)
    engine = Driven(forward, text, max_num_batched_tokens=23, max_num_seqs=4)
    plain = SamplingParams(max_tokens=0, prompt_logprobs=0)
    [before] = engine.run((ids, plain))
    [output] = engine.run((ids, params))
    np.testing.assert_array_equal(output.prompt_routed_experts[: len(given)], given)
    want = _replayed_logprobs(model, ids, given)
    found = output.prompt_logprobs[1:].chosen_entries().logprobs
    np.testing.assert_allclose(found, want, atol=2e-4)
    [again] = engine.run((ids, plain))  # nothing of the replay is cached
    np.testing.assert_array_equal(
        again.prompt_logprobs[1:].chosen_entries().logprobs,
        before.prompt_logprobs[1:].chosen_entries().logprobs,
    )
    own = replace(plain, routed_experts=routes_of(model, ids)[:10])
    [same] = engine.run((ids, own))
    np.testing.assert_allclose(
        same.prompt_logprobs[1:].chosen_entries().logprobs,
        before.prompt_logprobs[1:].chosen_entries().logprobs,
        atol=1e-6,
    )


def _replayed_logprobs(model: Any, ids: Any, given: Any) -> Any:
    """Return transformers' logprobs of a text, with the experts of its first tokens replaced."""
    routers = [
        module
        for name, module in model.named_modules()
        if name.endswith(("mlp.gate", "block_sparse_moe.gate"))
    ]
    assert len(routers) == given.shape[1]

    def replaced(place: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> Any:
            logits, scores, chosen = output
            shares = logits.double().softmax(-1)
            chosen = chosen.clone()
            chosen[: len(given)] = torch.from_numpy(given[:, place])
            weights = shares.gather(-1, chosen)
            if abs(float(scores.sum(-1).max()) - 1) < 1e-5 and abs(float(scores.sum(-1).min()) - 1) < 1e-5:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights.to(scores.dtype), chosen

        return hook

    hooks = [router.register_forward_hook(replaced(place)) for place, router in enumerate(routers)]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double()
    for hook in hooks:
        hook.remove()
    rows = logits.log_softmax(-1)[:-1]
    return rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()


@pytest.mark.parametrize("name", ["Llama", "OLMoE with clipped projections", "DeepSeek-V2"])
def test_routes_of_other_models_are_refused_by_name(name: str, text: TextEdge) -> None:
    (row,) = [row for row in RIGHT if row.name == name]
    forward = load(model_of(row.kind, **row.special), "checkpoint")
    engine = Driven(forward, text)
    for asked in ({"return_routed_experts": True}, {"routed_experts": np.zeros((1, 3, 1), int)}):
        with pytest.raises(ParameterError) as caught:
            engine.run(([5, 6], SamplingParams(**asked)))
        assert [caught.value.parameter] == [*asked]


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        (np.zeros((1, 3, 2), int), "repeat an expert"),
        ([[[0, 1]] * 2], "has 2 layers with 2"),
        ([[[0, 1, 2]] * 3], "3 layers with 3"),
        ([[[0, 9]] * 3], "expert 9"),
        ([[[0, -1]] * 3], "0, 65535"),
        ([[[0, 1]] * 3] * 9, "9 positions"),
        ([[0, 1]], "integer array"),
        ("none", "integer array"),
        (np.zeros((0, 3, 2), int), "integer array"),
    ],
)
def test_routes_that_do_not_fit_are_refused(routes: Any, words: str, text: TextEdge) -> None:
    engine = Driven(load(model_of("mixtral"), "checkpoint"), text)
    with pytest.raises(ParameterError, match=words) as caught:
        engine.run(([5, 6], SamplingParams(max_tokens=3, routed_experts=routes)))
    assert caught.value.parameter == "routed_experts"
