"""With any configuration key changed, a family gives transformers' numbers or is refused with a reason."""

from __future__ import annotations

import copy
import functools
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from families.moves import BASE, FAMILIES, Variant, sample, variants
from families.tiny import VOCAB_SIZE, model_of
from families.trials import TOLERANCE, Truth, how_layers_run, load, prompts, quick_differences
from logprobe.errors import UnsupportedModelError

if TYPE_CHECKING:
    from logprobe.text.edge import TextEdge

# transformers' error → the variants that it cannot build or run itself.
NOT_IN_TRANSFORMERS = {
    "Could not find a `sliding_window` argument": [
        f"{kind}-sliding_window=None"
        for kind in ("ministral", "gemma2", "gemma3_text", "olmo3", "cohere2", "exaone4", "qwen2_moe")
    ],
    "Field 'sliding_window' expected int": ["cwm-sliding_window=None"],
    "mat1 and mat2 shapes cannot be multiplied": [  # its output has the size of the hidden states
        *("helium-hidden_size=96", "helium-hidden_size=128", "helium-head_dim=32", "helium-head_dim=24"),
        *("helium-num_attention_heads=8", "helium-num_attention_heads=2"),
    ],
    "type field must be one of ['longrope']": [
        *(f"phi3-rope_parameters={name}" for name in ("linear", "dynamic", "llama3", "proportional")),
        "phi3-old rope_scaling=linear",
    ],
    "Missing required keys in `rope_parameters` for 'rope_type'='longrope'": [
        *(
            f"phi3-rope_parameters={name}"
            for name in (
                "yarn",
                "yarn, not truncated",
                "yarn, attention_factor",
                "yarn, mscale",
                "yarn, betas",
            )
        ),
        "phi3-old rope_scaling=yarn",
    ],
    "The size of tensor a": [
        "ministral3-rope_parameters.partial_rotary_factor=0.5",
        "ministral3-old partial_rotary_factor",
        *("cwm-rope_parameters.partial_rotary_factor=0.5", "cwm-old partial_rotary_factor"),
        *("stablelm-rope_parameters=proportional", "phi-rope_parameters=proportional"),
        *("olmoe-head_dim=32", "olmoe-head_dim=24"),
        "stablelm-head_dim=32",
        "stablelm-head_dim=24",
    ],
    "NoneType": [
        "ministral-head_dim=None",
        "ministral3-old rope_scaling=linear",
        "ministral3-old rope_scaling=yarn",
    ],
}
# Reason for refusal → the variants it applies to.
REFUSED = {
    "its tokens attend to later ones": ["gemma3_text-use_bidirectional_attention=True"],
    "its code raised an error": [f"{kind}-return_dict=False" for kind in FAMILIES],
}
PART_ROTARY = {"phi", "phi3", "glm", "stablelm", "gpt_neox", "gpt2"}
WHOLE_ROTARY = [kind for kind in FAMILIES if kind not in {*PART_ROTARY, "cwm"}]
# Patterns of variants with the same numbers as the unchanged family.
SILENT = [
    "*-bookkeeping",
    "*-keys of other families",
    "*-is_encoder_decoder=True",
    "*-max_position_embeddings=*",
    # No effect within the context length.
    *(
        f"{kind}-rope_parameters*=dynamic"
        for kind in FAMILIES
        if kind not in {"ministral3", "phi3", "gpt2", "cwm"}
    ),
    *(f"{kind}-rope_parameters*.partial_rotary_factor=0.5" for kind in WHOLE_ROTARY),
    *(f"{kind}-old partial_rotary_factor" for kind in (*WHOLE_ROTARY, "gpt_neox")),
    *(f"{kind}-pretraining_tp=2" for kind in ("llama", "cwm", "seed_oss")),
    *("gpt_neox-is_decoder=True", "gpt2-reorder_and_upcast_attn=True"),
    "gpt_neox-old rope_theta",  # it uses rotary_emb_base
    *("gemma3_text-old rope_scaling=linear", "olmo3-old rope_scaling=linear"),  # they use rope_type
    "gemma3_text-_sliding_window_pattern=38",
    "gemma3_text-attn_logit_softcapping=5.0",
    *("gemma-use_bidirectional_attention=True", "gemma2-use_bidirectional_attention=True"),
    *("gemma-hidden_act=gelu", "gemma*=gelu_new", "starcoder2*=gelu_new", "gpt2*=gelu_pytorch_tanh"),
    *("phi-hidden_act=gelu_pytorch_tanh", "phi-partial_rotary_factor=0.5"),
    *("mixtral-head_dim=None", "qwen2_moe-max_window_layers=2"),
    "olmoe-sliding_window=*",
    "phi3-original_max_position_embeddings=64",
    "ministral3-rope_parameters.max_position_embeddings=*",
    "ministral3-rope_parameters=yarn, not truncated",
]


def by_name(table: dict[str, list[str]]) -> dict[str, str]:
    return {name: reason for reason, names in table.items() for name in names}


VARIANTS = {variant.name: variant for variant in variants()}
IMPOSSIBLE, REFUSALS = by_name(NOT_IN_TRANSFORMERS), by_name(REFUSED)
POSSIBLE = [variant for name, variant in VARIANTS.items() if name not in IMPOSSIBLE]


def in_sample(names: list[str], chosen: set[str]) -> list[Any]:
    """Return parameters; those not in the sample are marked `exhaustive`."""
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.exhaustive) for name in names]


SAMPLE = {variant.name for variant in sample(POSSIBLE)}


def built(variant: Variant) -> Any:
    return model_of(variant.kind, **copy.deepcopy(variant.special))


@functools.cache
def unmoved(kind: str) -> Truth:
    return Truth(model_of(kind, **copy.deepcopy(BASE.get(kind, {}))))


def shows(variant: Variant, truth: Truth, vocab_size: int) -> bool:
    """Return True if results that ignore the changed key would be visibly wrong."""
    if vocab_size != VOCAB_SIZE:
        return True
    texts, other = prompts(vocab_size).values(), unmoved(variant.kind)
    return any(np.abs(truth.rows(ids) - other.rows(ids)).max() > TOLERANCE for ids in texts)


def test_every_variant_has_one_name_and_the_tables_know_no_others() -> None:
    assert len(VARIANTS) == len(variants())
    assert {*IMPOSSIBLE, *REFUSALS} <= set(VARIANTS)
    assert len(IMPOSSIBLE) < len(VARIANTS) / 40
    assert [pattern for pattern in SILENT if not any(fnmatchcase(name, pattern) for name in VARIANTS)] == []


def test_the_sample_has_every_family_and_every_option() -> None:
    chosen = [VARIANTS[name] for name in SAMPLE]
    assert {variant.kind for variant in chosen} == set(FAMILIES)
    assert {variant.option for variant in chosen} == {variant.option for variant in POSSIBLE}
    assert not SAMPLE.isdisjoint(REFUSALS)


@pytest.mark.parametrize("name", in_sample([variant.name for variant in POSSIBLE], SAMPLE))
def test_a_variant_gives_the_numbers_of_transformers_or_is_refused(name: str, text: TextEdge) -> None:
    variant = VARIANTS[name]
    model = built(variant)
    if variant.name in REFUSALS:
        with pytest.raises(UnsupportedModelError) as error:
            load(model, "checkpoint")
        assert REFUSALS[variant.name] in str(error.value)
        return
    forward, truth = load(model, "checkpoint"), Truth(model)
    for way, difference in quick_differences(truth, forward, text):
        assert difference <= TOLERANCE, f"{way}: {difference:.1e} nats"
    is_silent = any(fnmatchcase(variant.name, pattern) for pattern in SILENT)
    assert shows(variant, truth, model.config.vocab_size) is not is_silent


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_that_nothing_is_moved_of_runs_by_the_native_decoder(kind: str) -> None:
    forward = load(model_of(kind, **copy.deepcopy(BASE.get(kind, {}))), "checkpoint")
    assert how_layers_run(forward) == "native"


@pytest.mark.parametrize(
    "name", in_sample(list(IMPOSSIBLE), {names[0] for names in NOT_IN_TRANSFORMERS.values()})
)
def test_transformers_itself_cannot_run(name: str) -> None:
    with pytest.raises(Exception) as error:  # noqa: PT011 - of whatever class
        Truth(built(VARIANTS[name])).rows(range(3, 30))
    assert IMPOSSIBLE[name] in str(error.value)
