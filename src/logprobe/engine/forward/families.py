"""Structure of each supported model family: module names, and how the modules are combined.

`FAMILIES` has one entry per `model_type` in transformers. Everything else is read when the model is loaded:
sizes and biases from its tensors; windows, scales, soft caps and rotary parameters from its configuration
(`reference.settings`). `reads` lists the configuration keys that an entry takes into account in addition to
those in `NEUTRAL` and `OBSERVED`. If any other key has a non-default value, the model uses the transformers
decoder.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from logprobe.engine.forward.config import Factors

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.models.config_files import ModelConfig

NormKind = Literal["rms", "rms from one", "layer"]
"""RMSNorm, Gemma's RMSNorm (its factor is weight + 1), or LayerNorm."""

# transformers' name of an activation → the kernels'
ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys that do not affect inference: training options, names, token ids.
NEUTRAL: Final = _keys("""
    _name_or_path architectures attention_dropout attn_implementation attn_pdrop auto_map bad_words_ids
    bos_token_id chunk_size_feed_forward classifier_dropout cls_token_id dtype embd_pdrop embedding_dropout
    eos_token_id finetuning_task hidden_dropout id2label initializer_range is_llama_config is_decoder
    is_encoder_decoder label2id mask_token_id model_type num_labels output_attentions output_hidden_states
    pad_token_id prefix pretraining_tp problem_type resid_pdrop residual_dropout return_dict
    rope_interleaved sep_token_id summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj task_specific_params tokenizer_class torch_dtype transformers_version
    unk_token_id unsloth_fixed unsloth_version use_cache
""")
# Keys that all families account for.
OBSERVED: Final = _keys("""
    attention_bias attn_logit_softcapping head_dim hidden_size intermediate_size layer_types
    max_position_embeddings max_window_layers mlp_bias num_attention_heads num_hidden_layers
    num_key_value_heads original_max_position_embeddings query_pre_attn_scalar rope_parameters
    sliding_window tie_word_embeddings use_bias use_bidirectional_attention use_qkv_bias
    use_sliding_window vocab_size _sliding_window_pattern
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFacts:
    """Module names of a layer's experts, relative to the layer."""

    router: str = "mlp.gate"
    gates: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    shared: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str | None = None  # None: no shared expert
    normalises: Callable[[Any], bool] = lambda config: config.norm_topk_prob


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Structure of a model family; module names are relative to the decoder, or to the layer."""

    embedding: str = "embed_tokens"
    positions: str | None = None  # learned position embeddings
    layers: str = "layers"
    last_norm: str = "norm"
    projections: tuple[str, ...] = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
    )  # or one module for all three
    is_by_head: bool = False  # the joint projection interleaves query, key and value of each head
    head_norms: tuple[str, ...] = ()  # norms of queries and keys: per head, or over all heads
    output: str = "self_attn.o_proj"
    gates: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # gates and values, or one module for both
    is_gated: bool = True  # False: the MLP is down(activation(gates))
    down: str = "mlp.down_proj"
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    norm: NormKind = "rms"
    has_norm_weights: bool = True
    epsilon: str | float = "rms_norm_eps"  # configuration key, or the value itself
    activation: str = "hidden_act"  # configuration key
    is_transposed: bool = False  # weights are stored as (inputs, outputs)
    is_paired: bool = False  # rotary embedding pairs adjacent dimensions, not the two halves of a head
    is_parallel: Callable[[Any], bool] = lambda _: False  # attention and MLP read the same hidden states
    shares_norm: bool = False  # with `is_parallel`: attention and MLP use the same norm
    rotates: Callable[[Any, int], bool] = lambda _config, _layer: True  # the layer has a rotary embedding
    factors: Callable[[Any], Factors] = lambda _: Factors()
    experts: ExpertFacts | None = None  # used by layers that have a router
    reads: frozenset[str] = field(default=frozenset())

    def layer_norms(self, *, is_parallel: bool) -> tuple[str | None, str | None, str | None, str | None]:
        """Return the names of a layer's norms: before and after attention, before and after the MLP."""
        before_mlp = None if is_parallel and self.shares_norm else self.before_mlp
        return self.before_attention, self.after_attention, before_mlp, self.after_mlp

    def unread(self, config: ModelConfig) -> list[str]:
        """Return the configuration keys with non-default values that this family does not account for."""
        known = NEUTRAL | OBSERVED | self.reads | {self.epsilon, self.activation}
        return sorted(key for key in config.content if key not in known and not config.is_default(key))


_LLAMA: Final = Family()
_HEAD_NORMS: Final = ("self_attn.q_norm", "self_attn.k_norm")
_LAYER_NORM: Final = Family(norm="layer", epsilon="layer_norm_eps")
_FOUR_NORMS: Final = Family(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
    norm="rms from one",
    activation="hidden_activation",
    factors=lambda config: Factors(embedding=config.hidden_size**0.5, softcap=config.final_logit_softcapping),
    reads=_keys("final_logit_softcapping"),
)
_NORMS_AFTER: Final = Family(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
    head_norms=_HEAD_NORMS,
)
_EXPERTS: Final = Family(
    experts=ExpertFacts(),
    reads=_keys("""
        decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
        num_experts_per_tok num_local_experts output_router_logits qkv_bias router_aux_loss_coef
        router_jitter_noise shared_expert_intermediate_size
    """),
)
_COHERE: Final = Family(
    norm="layer",
    epsilon="layer_norm_eps",
    is_parallel=lambda _: True,
    shares_norm=True,
    is_paired=True,
    factors=lambda config: Factors(logits=config.logit_scale),
    reads=_keys("logit_scale"),
)


def _windowed_layers(config: Any, layer: int) -> bool:
    return config.sliding_window is not None and config.layer_types[layer] == "sliding_attention"


def _granite(config: Any) -> Factors:
    return Factors(
        embedding=config.embedding_multiplier,
        residual=config.residual_multiplier,
        logits=1 / config.logits_scaling,
    )


def _ministral3(config: Any) -> Factors:
    rope = config.rope_parameters
    return Factors(queries=(rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]))


FAMILIES: Final[dict[str, Family]] = {
    "llama": _LLAMA,
    "cwm": _LLAMA,
    "internlm3": _LLAMA,
    "iquestcoder": _LLAMA,
    "seed_oss": replace(_LLAMA, reads=_keys("attention_out_bias")),
    "arcee": replace(_LLAMA, gates=("mlp.up_proj",), is_gated=False),
    "jais2": replace(_LAYER_NORM, gates=("mlp.up_proj",), is_gated=False),
    "exaone4": replace(
        _NORMS_AFTER,
        rotates=lambda config, layer: config.sliding_window is None or _windowed_layers(config, layer),
        reads=_keys("sliding_window_pattern"),
    ),
    "helium": replace(_LLAMA, is_paired=True),
    "ernie4_5": replace(_LLAMA, is_paired=True),
    "glm": replace(_LLAMA, gates=("mlp.gate_up_proj",), is_paired=True),
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "ministral3": replace(_LLAMA, factors=_ministral3),
    "qwen2": _LLAMA,
    "mixtral": replace(_EXPERTS, experts=ExpertFacts(normalises=lambda _: True)),
    "qwen2_moe": replace(_EXPERTS, experts=ExpertFacts(shared_gate="mlp.shared_expert_gate")),
    "qwen3_moe": replace(_EXPERTS, head_norms=_HEAD_NORMS),
    "olmoe": replace(_EXPERTS, head_norms=_HEAD_NORMS),
    "qwen3": replace(_LLAMA, head_norms=_HEAD_NORMS),
    "smollm3": replace(
        _LLAMA,
        rotates=lambda config, layer: bool(config.no_rope_layers[layer]),
        reads=_keys("no_rope_layers no_rope_layer_interval"),
    ),
    "gemma": replace(
        _LLAMA, norm="rms from one", factors=lambda config: Factors(embedding=config.hidden_size**0.5)
    ),
    "gemma2": _FOUR_NORMS,
    "gemma3_text": replace(_FOUR_NORMS, head_norms=_HEAD_NORMS),
    "olmo": replace(_LLAMA, norm="layer", has_norm_weights=False, epsilon=1e-5),
    "olmo2": _NORMS_AFTER,
    "olmo3": _NORMS_AFTER,
    "phi3": replace(_LLAMA, projections=("self_attn.qkv_proj",), gates=("mlp.gate_up_proj",)),
    "granite": replace(
        _LLAMA,
        factors=_granite,
        reads=_keys("embedding_multiplier residual_multiplier logits_scaling attention_multiplier"),
    ),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, rotates=_windowed_layers),
    "stablelm": replace(
        _LAYER_NORM,
        is_parallel=lambda config: config.use_parallel_residual,
        shares_norm=True,
        reads=_keys("use_parallel_residual"),
    ),
    "starcoder2": replace(
        _LAYER_NORM,
        epsilon="norm_epsilon",
        gates=("mlp.c_fc",),
        is_gated=False,
        down="mlp.c_proj",
    ),
    "phi": replace(
        _LAYER_NORM,
        last_norm="final_layernorm",
        output="self_attn.dense",
        gates=("mlp.fc1",),
        is_gated=False,
        down="mlp.fc2",
        is_parallel=lambda _: True,
        shares_norm=True,
    ),
    "gpt2": Family(
        embedding="wte",
        positions="wpe",
        layers="h",
        last_norm="ln_f",
        projections=("attn.c_attn",),
        output="attn.c_proj",
        gates=("mlp.c_fc",),
        is_gated=False,
        down="mlp.c_proj",
        is_transposed=True,
        before_attention="ln_1",
        before_mlp="ln_2",
        norm="layer",
        epsilon="layer_norm_epsilon",
        activation="activation_function",
        rotates=lambda _config, _layer: False,
        reads=_keys("""
            n_positions n_embd n_layer n_head n_inner scale_attn_weights scale_attn_by_inverse_layer_idx
            reorder_and_upcast_attn
        """),
    ),
    "gpt_neox": replace(
        _LAYER_NORM,
        embedding="embed_in",
        last_norm="final_layer_norm",
        projections=("attention.query_key_value",),
        is_by_head=True,
        output="attention.dense",
        gates=("mlp.dense_h_to_4h",),
        is_gated=False,
        down="mlp.dense_4h_to_h",
        is_parallel=lambda config: config.use_parallel_residual,
        reads=_keys("use_parallel_residual"),
    ),
}
