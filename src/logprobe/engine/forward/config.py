"""Configuration of a decoder as plain data, derived from `families` and from the verification at load."""

from __future__ import annotations

import msgspec


class Rule(msgspec.Struct, frozen=True):
    """Parameters of a layer's attention scores."""

    scale: float  # query · key is multiplied by this
    window: int | None = None  # sliding window in tokens, including the token itself; None: no window
    softcap: float | None = None  # softcap · tanh(score / softcap)


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """Scalar factors and soft caps in a model's configuration."""

    embedding: float = 1.0  # embeddings are multiplied by this
    residual: float = 1.0  # attention and MLP outputs are multiplied by this before they are added
    logits: float = 1.0  # logits are multiplied by this
    softcap: float | None = None  # logits become softcap · tanh(logits / softcap)
    queries: tuple[float, int] | None = None  # (beta, n): queries · (1 + beta · ln(1 + ⌊position / n⌋))


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Structure of a model's decoder, except for matrix shapes, which are known from the weights."""

    family: str  # transformers' `model_type`
    path: str  # module name of the decoder in transformers' module
    head: str  # module name of the output head in transformers' module
    head_dim: int
    epsilon: float
    activation: str
    is_parallel: bool
    factors: Factors
    rules: list[Rule]  # by layer
    rotary: list[str | None]  # by layer: name of the rotary frequencies; None: no rotary embedding
    rotary_scaling: dict[str, float]  # name of frequencies → factor for cosines and sines
    rope_boundary: int | None  # longest text (tokens) with short rotary frequencies; None: no longrope
    experts_per_token: int = 0
    normalises_experts: bool = False  # scale the weights of a token's experts so that they sum to 1


class LoadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the verification at a model's first load; later loads use them instead of transformers."""

    decoder: DecoderSpec
    context_len: int
    eos_token_ids: list[int]
    probe_difference: float  # nats; largest difference from the reference's log-probabilities
    verified_against: str  # see `LogprobsInfo.verified_against`
    num_references: int  # reference texts whose last logits are stored with the tensors
