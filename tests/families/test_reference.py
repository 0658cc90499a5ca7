"""The reference decoder gives transformers' float64 logits, and the native decoder those of the reference."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from decoders import loaded, logprobs
from families.exact import exact_logits, exact_model
from families.moves import FAMILIES as MOVED
from families.moves import sample, variants
from families.outcomes import NATIVE
from families.rows import RIGHT, Row
from families.test_variants import IMPOSSIBLE, REFUSALS
from families.tiny import CONTEXT_LEN, config_of, model_of
from families.trials import TOLERANCE, Truth, load, prompts, quick_differences
from logprobe.engine.forward.config import Rule
from logprobe.engine.forward.families import ACTIVATIONS, FAMILIES
from logprobe.engine.forward.reference import logits
from logprobe.engine.forward.reference.layers import attend, softmax
from logprobe.errors import UnsupportedModelError
from logprobe.kernels.arrays import as_array
from logprobe.models import resolve
from logprobe.models.config_files import parse_config, read_config

if TYPE_CHECKING:
    from families.moves import Variant
    from logprobe import LLM
    from logprobe.text.edge import TextEdge

EXACT = 1e-10  # relative to the largest logit
IN_TABLE = {row.kind for row in RIGHT}
ROWS = [row for row in RIGHT if row.layers == "native"]
ROWS += [Row(kind, kind, "native") for kind in NATIVE if kind not in IN_TABLE]


class Reference(Truth):
    """A model as the reference decoder runs it."""

    def __init__(self, model: Any, weights: dict[str, Any]) -> None:
        super().__init__(model)
        self._config, self._weights = parse_config(model.config.to_dict()), weights

    def rows(self, token_ids: Any) -> Any:
        key = tuple(map(int, token_ids))
        if key not in self._rows:
            self._rows[key] = np.log(softmax(logits(self._config, self._weights, key)))
        return self._rows[key]


def arrays_of(state: Any) -> dict[str, Any]:
    """Tensors by name as NumPy arrays."""
    return {name: as_array(tensor) for name, tensor in state.items()}


def largest_difference(kind: str, special: dict[str, Any], texts: Any = None) -> float:
    """From transformers' float64 logits of a long and a short text, relative to the largest."""
    model = model_of(kind, **copy.deepcopy(special))
    config, weights = parse_config(model.config.to_dict()), arrays_of(model.state_dict())
    exact = exact_model(model, kind, copy.deepcopy(special))
    largest = 0.0
    by_length = prompts(weights["lm_head.weight"].shape[0])
    for ids in texts or (by_length["long"], by_length["short"]):
        # A rotary embedding of a dynamic kind keeps what an earlier text made of it.
        expected = exact_logits(copy.deepcopy(exact), ids)
        difference = np.abs(logits(config, weights, ids) - expected).max() / np.abs(expected).max()
        largest = max(largest, float(difference))
    return largest


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_reference_gives_the_logits_of_transformers_in_float64(row: Row) -> None:
    assert largest_difference(row.kind, row.special) <= EXACT


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_native_decoder_gives_the_numbers_of_the_reference(row: Row, text: TextEdge) -> None:
    model = model_of(row.kind, **row.special)
    forward = load(model, "checkpoint")
    reference = Reference(model, arrays_of(forward.decoder.state()))
    for way, difference in quick_differences(reference, forward, text):
        assert difference <= TOLERANCE, f"{way}: {difference:.1e} nats"


@functools.cache
def native_variants() -> list[Variant]:
    """The variants whose configuration the native decoder takes."""
    return [variant for variant in variants() if is_native(variant)]


@functools.cache
def sampled_variants() -> list[Variant]:
    """A fixed sample of these, in which each family and each option occurs."""
    return sample(native_variants())


def is_native(variant: Variant) -> bool:
    if variant.name in REFUSALS or variant.name in IMPOSSIBLE:
        return False
    family, config = FAMILIES[variant.kind], config_of(variant.kind, **copy.deepcopy(variant.special))
    has_activation = getattr(config, family.activation) in ACTIVATIONS
    return has_activation and not family.unread(parse_config(config.to_dict()))


def check_variants(kind: str, chosen: list[Variant]) -> None:
    differences = {
        variant.name: largest_difference(kind, variant.special) for variant in chosen if variant.kind == kind
    }
    assert differences
    assert {name: value for name, value in differences.items() if not value <= EXACT} == {}


@pytest.mark.parametrize("kind", MOVED)
def test_a_sample_of_variants_gives_the_logits_of_transformers_in_float64(kind: str) -> None:
    check_variants(kind, sampled_variants())


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", MOVED)
def test_every_variant_gives_the_logits_of_transformers_in_float64(kind: str) -> None:
    check_variants(kind, native_variants())


def test_dynamic_scaling_grows_with_a_text_beyond_the_context_length() -> None:
    (row,) = [row for row in RIGHT if row.name == "Llama with dynamic NTK"]
    ids = np.random.default_rng(1).integers(3, 100, CONTEXT_LEN + 32).tolist()
    assert largest_difference(row.kind, row.special, [ids]) <= EXACT


def test_sinks_take_part_in_the_softmax_as_in_gpt_oss() -> None:
    rng = np.random.default_rng(2)
    query, key, value = (rng.standard_normal((20, num_heads, 8)) for num_heads in (4, 2, 2))
    sinks = rng.standard_normal(4)
    hidden = np.triu(np.ones((20, 20), bool), 1) | np.tril(np.ones((20, 20), bool), -5)  # a window of 5
    mask = torch.from_numpy(np.where(hidden, -np.inf, 0.0))
    module = SimpleNamespace(num_key_value_groups=2, sinks=torch.from_numpy(sinks), training=False)
    by_head = [torch.from_numpy(array).transpose(0, 1)[None] for array in (query, key, value)]
    expected, _ = eager_attention_forward(module, *by_head, mask, 0.3)
    attended = attend(query, key, value, Rule(0.3, window=5), sinks)
    np.testing.assert_allclose(attended, expected[0].numpy(), rtol=0, atol=1e-14)


def test_weights_of_16_bits_in_a_file_are_read_as_they_are(tmp_path: Path) -> None:
    model = model_of("llama")
    halves = {name: array.astype(np.float16) for name, array in arrays_of(model.state_dict()).items()}
    save_file(halves, tmp_path / "model.safetensors")
    wide = {name: array.astype(np.float64) for name, array in halves.items()}
    config, ids = parse_config(model.config.to_dict()), prompts(160)["long"]
    from_file = logits(config, load_file(tmp_path / "model.safetensors"), ids)
    np.testing.assert_array_equal(from_file, logits(config, wide, ids))


def test_a_head_that_a_file_leaves_out_is_the_embedding() -> None:
    model = model_of("llama", tie_word_embeddings=True)
    config, weights = parse_config(model.config.to_dict()), arrays_of(model.state_dict())
    ids = prompts(160)["short"]
    with_head = logits(config, weights, ids)
    del weights["lm_head.weight"]
    np.testing.assert_array_equal(logits(config, weights, ids), with_head)


def test_a_family_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(UnsupportedModelError):
        logits(parse_config({"model_type": "bloom"}), {}, [1])


def test_a_missing_weight_is_an_error_not_a_default() -> None:
    model = model_of("llama")
    weights = arrays_of(model.state_dict())
    del weights["model.layers.1.input_layernorm.weight"]
    with pytest.raises(KeyError):
        logits(parse_config(model.config.to_dict()), weights, [5, 6])


def test_the_native_decoder_gives_the_numbers_of_the_reference_on_a_real_model(real_llm: LLM) -> None:
    forward = loaded(Path("smollm2"))
    ids = real_llm.text.encode("The capital of France is Paris, and 3 + 4 is 7.", add_special_tokens=False)
    reference = logits(read_config(resolve("smollm2").folder), arrays_of(forward.decoder.state()), ids)
    ours = logprobs(forward, [np.array(ids)], split=len(ids)).numpy()
    assert np.abs(ours - np.log(softmax(reference))).max() <= TOLERANCE
