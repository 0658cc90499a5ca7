"""Decoder configuration as plain data, derived from `families` and the verification at load."""

from __future__ import annotations

import msgspec


class Rule(msgspec.Struct, frozen=True):
    """Attention score parameters of a layer."""

    scale: float  # factor of query · key
    window: int | None = None  # sliding window in tokens, including the token itself; None: no window
    softcap: float | None = None  # softcap · tanh(score / softcap)


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """Scalar factors and soft caps from the model's configuration."""

    embedding: float = 1.0  # factor of the embeddings
    residual: float = 1.0  # factor of attention and MLP outputs before the residual addition
    logits: float = 1.0  # factor of the logits
    softcap: float | None = None  # soft cap of the logits: softcap · tanh(logits / softcap)
    queries: tuple[float, int] | None = None  # (beta, n): queries · (1 + beta · ln(1 + ⌊position / n⌋))


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Structure of one model's decoder, except matrix shapes, which are those of its weights."""

    family: str  # transformers' `model_type`
    path: str  # module name of the decoder in transformers' module
    head: str  # module name of the output head there
    head_dim: int
    epsilon: float
    activation: str
    is_parallel: bool
    factors: Factors
    rules: list[Rule]  # by layer
    rotary: list[str | None]  # by layer: name of its frequencies; None: no rotary embedding
    rotary_scaling: dict[str, float]  # name of frequencies → factor of cosines and sines
    rope_boundary: int | None  # maximum tokens of a text with short rotary frequencies; None: no longrope
    experts_per_token: int = 0
    normalises_experts: bool = False  # scale the weights of a token's experts to sum to 1


class LoadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the verification at a model's first load, reused by later loads."""

    decoder: DecoderSpec
    context_len: int
    eos_token_ids: list[int]
    probe_difference: float  # nats; largest difference from transformers' log-probabilities
    num_references: int  # reference texts whose last logits are stored with the tensors
