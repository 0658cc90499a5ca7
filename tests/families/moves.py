"""Every key of a family's configuration changed from its default, one at a time.

The keys are those of transformers' configuration classes and those that its modules read in addition,
independent of the engine.
"""

from __future__ import annotations

import functools
import inspect
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from families.rows import BOUNDARY, DYNAMIC, LINEAR, YARN, longrope
from families.tiny import config_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    Moves = Iterator[tuple[str, dict[str, Any]]]

# Here only one rotation of each kind is tried: all families use the same code for frequencies.
SAME_ROTARY = (
    *("cwm", "seed_oss", "arcee", "jais2", "exaone4", "helium", "ernie4_5"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"),
)
# Of classes with several names (internlm3 and iquestcoder are Llama's) one is used.
FAMILIES = (
    *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "smollm3"),
    *("gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "olmo3", "phi3"),
    *("gpt2", "gpt_neox", "stablelm", "granite", "cohere", "cohere2", "starcoder2", "phi", "glm"),
    *SAME_ROTARY,
)


@dataclass(frozen=True)
class Variant:
    """A family with one key changed; `special` is the complete set of configuration arguments."""

    kind: str
    moved: str
    special: dict[str, Any]

    @property
    def name(self) -> str:
        """The name in the tables of outcomes."""
        return f"{self.kind}-{self.moved}"

    @property
    def option(self) -> str:
        """The changed key; for rotations and activations with its value."""
        key, _, value = re.sub(r"\.(full|sliding)_attention", "", self.moved).partition("=")
        return f"{key}={value}" if key == "rope_parameters" or value in ACTIVATIONS else key


QUARTER_ROTATES = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
# The starting point: values of tiny.py, changed so that each kind of layer and rotation has an effect.
BASE: dict[str, dict[str, Any]] = {
    **{kind: {"layer_types": MIXED} for kind in ("ministral", "gemma3_text", "olmo3", "cohere2", "exaone4")},
    **{kind: {"rope_parameters": QUARTER_ROTATES} for kind in ("phi", "glm")},
    **{kind: {"mlp_only_layers": [0]} for kind in ("qwen2_moe", "qwen3_moe")},
    "cwm": {
        "rope_parameters": CONFIG_MAPPING["cwm"]().rope_parameters
        | {"original_max_position_embeddings": BOUNDARY}
    },
    "ministral3": {
        "rope_parameters": CONFIG_MAPPING["ministral3"]().rope_parameters
        | {"factor": 4.0, "original_max_position_embeddings": BOUNDARY}
    },
    "phi3": {"original_max_position_embeddings": BOUNDARY},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "granite": {"attention_multiplier": 0.25},  # sharper attention (1.0) would amplify rounding errors
}

# Keys that only affect training, names or reports: changed together.
BOOKKEEPING: dict[str, Any] = {
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "classifier_dropout", "embedding_dropout"), 0.5),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "residual_dropout"), 0.5),
    **dict.fromkeys(("summary_first_dropout", "summary_last_dropout"), 0.5),
    "summary_activation": "tanh",
    "summary_proj_to_labels": False,
    "summary_type": "mean",
    "summary_use_proj": False,
    "bos_token_id": 4,
    "eos_token_id": 5,
    "pad_token_id": 3,
    "initializer_range": 0.5,
    "use_cache": False,
    "dtype": "float32",
    "output_attentions": True,
    "output_hidden_states": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "router_jitter_noise": 0.5,
    "chunk_size_feed_forward": 8,
    "problem_type": "regression",
    "id2label": {0: "no", 1: "yes", 2: "perhaps"},
    "label2id": {"no": 0, "yes": 1, "perhaps": 2},
    "num_labels": 3,
    "architectures": ["AnotherModel"],
    "transformers_version": "4.0.0",
    "_name_or_path": "another/name",
}
# Never changed: the family itself, and keys that other classes in its module read.
UNMOVED = {"model_type", "text_config", "vision_config", "image_token_id", "mm_tokens_per_image"}

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "quick_gelu", "relu2", "tanh")
LAYER_TYPES = {
    "".join(kind[0] for kind in kinds).upper(): list(kinds)
    for kinds in (
        ("full_attention",) * 3,
        ("sliding_attention",) * 3,
        ("full_attention", "sliding_attention", "full_attention"),
        ("full_attention", "full_attention", "sliding_attention"),
        tuple(MIXED),
    )
}
# Key → its values, where the type of the default is not enough; a dictionary names them.
VALUES: dict[str, Any] = {
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), ACTIVATIONS),
    "layer_types": LAYER_TYPES,
    "no_rope_layers": {"111": [1, 1, 1], "000": [0, 0, 0], "110": [1, 1, 0]},
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (2, 1)),
    **dict.fromkeys(("num_attention_heads", "n_head"), (8, 2)),
    "num_key_value_heads": (4, 1),
    "head_dim": (32, 24),
    "vocab_size": (129, 128),
    **dict.fromkeys(("hidden_size", "n_embd"), (96, 128)),
    **dict.fromkeys(("intermediate_size", "n_inner"), (128, 100)),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (64, 160)),
    "sliding_window": (8, 1, 40, None),
    "use_sliding_window": (False,),
    "max_window_layers": (0, 2, 3),
    "no_rope_layer_interval": (3,),
    "sliding_window_pattern": (3,),
    "mlp_only_layers": {"none": [], "1": [1], "012": [0, 1, 2]},
    "decoder_sparse_step": (2, 4),
    **dict.fromkeys(("num_experts", "num_local_experts"), (6,)),
    "num_experts_per_tok": (1, 4),
    "query_pre_attn_scalar": (64, 16),
    "attn_logit_softcapping": (5.0, None),
    "final_logit_softcapping": (5.0, None),
    "clip_qkv": (0.5,),
    "partial_rotary_factor": (0.5,),
    "rope_theta": (500.0,),
    "beta_fast": (0.5,),
    "pretraining_tp": (2,),
    "use_bidirectional_attention": (True,),
    "is_encoder_decoder": (True,),
}
# Keys without effect unless another key's base is changed.
UNCOVERING: dict[str, dict[str, Any]] = {
    "no_rope_layer_interval": {"no_rope_layers": None},
    "sliding_window_pattern": {"layer_types": None},
}

LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": BOUNDARY,
}
YARNS: dict[str, dict[str, Any]] = {
    "yarn": {},
    "yarn, not truncated": {"truncate": False},
    "yarn, attention_factor": {"attention_factor": 1.5},
    "yarn, mscale": {"mscale": 2.0, "mscale_all_dim": 0.5},
    "yarn, betas": {"beta_fast": 0.5, "beta_slow": 0.125},
}
LONGROPES: dict[str, dict[str, Any]] = {
    "longrope": {},
    "longrope, attention_factor": {"attention_factor": 1.5},
    "longrope without factor": {"factor": None},
}


def variants() -> list[Variant]:
    """Return every variant of every family."""
    return [
        Variant(kind, moved, BASE.get(kind, {}) | special)
        for kind in FAMILIES
        for moved, special in (*_moves(kind), *_old_spellings(kind), *_others(kind))
    ]


def sample(candidates: list[Variant]) -> list[Variant]:
    """Return a fixed selection in which each option and each family of the candidates occurs.

    Each option is taken from a family that was taken least often before, chosen with a fixed seed.
    """
    drawn = random.Random(0).sample(candidates, len(candidates))  # noqa: S311 - no secret
    chosen: list[Variant] = []

    def times(variant: Variant) -> int:
        return sum(other.kind == variant.kind for other in chosen)

    for option in sorted({variant.option for variant in candidates}):
        having = [variant for variant in drawn if variant.option == option]
        chosen.append(min(having, key=times))
    missing = {variant.kind for variant in candidates} - {variant.kind for variant in chosen}
    return [
        *chosen,
        *(next(variant for variant in drawn if variant.kind == kind) for kind in sorted(missing)),
    ]


@functools.cache
def default_of(kind: str) -> dict[str, Any]:
    """Return a family's default configuration."""
    return dict(CONFIG_MAPPING[kind]().to_dict())


@functools.cache
def read_beside(kind: str) -> set[str]:
    """Return the keys that a family's model code reads in addition to those of the default configuration."""
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    source = inspect.getsource(inspect.getmodule(model))  # type: ignore[arg-type]
    names = set(re.findall(r'\bconfig\.([a-z]\w*)\b(?!\()|getattr\((?:self\.)?config, "(\w+)"', source))
    read = {name for pair in names for name in pair if name}
    return read - set(default_of(kind)) - set(CONFIG_MAPPING[kind].attribute_map) - UNMOVED


def _moves(kind: str) -> Moves:
    base = config_of(kind, **BASE.get(kind, {})).to_dict()
    keys = [key for key in (*default_of(kind), *sorted(read_beside(kind))) if key not in UNMOVED]
    yield "bookkeeping", {key: BOOKKEEPING[key] for key in keys if key in BOOKKEEPING}
    for key in keys:
        if key in BOOKKEEPING:
            continue
        if key == "rope_parameters":
            yield from (
                (f"{key}{moved}", {key: value})
                for moved, value in _rotations(base)
                if kind not in SAME_ROTARY or "," not in moved
            )
            continue
        for moved, value in _values(key, base.get(key), default_of(kind).get(key)):
            yield f"{key}={moved}", {key: value} | UNCOVERING.get(key, {}) | _cut(key, value, base)


def _values(key: str, base: Any, default: Any) -> Iterator[tuple[str, Any]]:
    if key in VALUES:
        values = VALUES[key]
    elif isinstance(base, bool):
        values = [not base]
    elif isinstance(base, int):
        values = [base + 32]
    elif isinstance(base, float):
        values = [1e-2] if "eps" in key else [0.5] if base in {0.0, 1.0} else [base * 2]
    else:
        raise KeyError(f"no value is known to move {key} to, which is {base!r}")
    named = values if isinstance(values, dict) else {str(value): value for value in values}
    if default is None:
        named = named | {"None": None}
    yield from ((name, value) for name, value in named.items() if value != base)


def _cut(key: str, value: Any, base: dict[str, Any]) -> dict[str, Any]:
    """Shorten per-layer lists when there are fewer layers."""
    if key != "num_hidden_layers":
        return {}
    return {name: base[name][:value] for name in ("layer_types", "no_rope_layers") if name in base}


def _rotations(base: dict[str, Any]) -> Moves:
    rope = base["rope_parameters"]
    head_dim = base.get("head_dim") or base["hidden_size"] // base["num_attention_heads"]
    if "rope_type" in rope:
        yield from _rotations_of(rope, head_dim)
        return
    for layers in rope:  # one rotation per kind of layer
        for moved, value in _rotations_of(rope[layers], head_dim):
            yield f".{layers}{moved}", rope | {layers: value}


def _rotations_of(rope: dict[str, Any], head_dim: int) -> Moves:
    rope = {name: value for name, value in rope.items() if name != "type"}
    for name in {**rope, "partial_rotary_factor": None}:
        if name != "rope_type":
            for moved, value in _values(name, rope.get(name), rope.get(name, 1.0)):
                yield f".{name}={moved}", rope | {name: value}
    width = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    kinds: dict[str, dict[str, Any]] = {
        "default": {"rope_type": "default"},
        "linear": _kind(LINEAR),
        "dynamic": _kind(DYNAMIC),
        "llama3": LLAMA_3,
        "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
        **{name: _kind(YARN) | special for name, special in YARNS.items()},
        **{name: _kind(longrope(width // 2)) | special for name, special in LONGROPES.items()},
    }
    if "partial_rotary_factor" in rope:
        half = _kind(longrope(head_dim // 4)) | {"partial_rotary_factor": 0.5}
        kinds["longrope, half of each head"] = half
    yield from ((f"={name}", rope | kind) for name, kind in kinds.items() if rope | kind != rope)


def _kind(row: dict[str, Any]) -> dict[str, Any]:
    """Return the kind of a rotation, without its base frequency."""
    return {name: value for name, value in row["rope_parameters"].items() if name != "rope_theta"}


def _old_spellings(kind: str) -> Moves:
    """Yield keys of configurations from before transformers 5, which its classes still accept."""
    if "rope_parameters" not in default_of(kind):
        return
    new = {"rope_parameters": None}
    yield "old rope_theta", new | {"rope_theta": 500.0}
    yield "old rope_scaling=linear", new | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    yield "old rope_scaling=yarn", new | {"rope_scaling": _kind(YARN)}
    yield "old partial_rotary_factor", new | {"partial_rotary_factor": 0.5}
    if kind != "phi3":  # it has its own key
        scaled = {} if kind == "ministral3" else new | {"rope_scaling": _kind(YARN)}
        yield "old original_max_position_embeddings", scaled | {"original_max_position_embeddings": 16}
    if kind == "gpt_neox":
        yield "old rotary_pct", new | {"rotary_pct": 0.5}
        yield "old rotary_emb_base", new | {"rotary_emb_base": 500.0}
    if kind == "gemma3_text":
        yield "old rope_local_base_freq", new | {"rope_local_base_freq": 500.0}
    if kind in {"gemma3_text", "cohere2"}:
        yield "old sliding_window_pattern", {"layer_types": None, "sliding_window_pattern": 3}


def _others(kind: str) -> Moves:
    """Yield keys that other families read and this one ignores."""
    own = {*default_of(kind), *read_beside(kind), *CONFIG_MAPPING[kind].attribute_map}
    own |= {*UNMOVED, *BOOKKEEPING, "rope_parameters"}
    own |= {"partial_rotary_factor", "original_max_position_embeddings"}  # accepted by every class
    foreign: dict[str, Any] = {}
    for other in FAMILIES:
        base = config_of(other).to_dict()
        for key in {**default_of(other), **dict.fromkeys(read_beside(other))}:
            if key not in own:
                _, foreign[key] = next(_values(key, base.get(key), base.get(key)))
    yield "keys of other families", foreign
