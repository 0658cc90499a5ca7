"""Configuration of a decoder, in plain data: what `families` and the proof at load find out about a model."""

from __future__ import annotations

import msgspec


class Rule(msgspec.Struct, frozen=True):
    """How a layer computes its attention scores."""

    scale: float  # of query times key
    window: int | None = None  # tokens that a token sees, itself included; None: all
    softcap: float | None = None  # softcap · tanh(score / softcap)


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """Factors and soft caps of a model that no tensor holds."""

    embedding: float = 1.0  # that embeddings are multiplied by
    residual: float = 1.0  # that attention and feed-forward part are multiplied by before they are added
    logits: float = 1.0  # that logits are multiplied by
    softcap: float | None = None  # of the logits: softcap · tanh(logits / softcap)
    queries: tuple[float, int] | None = None  # (beta, n): queries · (1 + beta · ln(1 + ⌊position / n⌋))


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The decoder of one model; the shapes of its matrices are those of its weights."""

    family: str  # transformers' `model_type`
    path: str  # of the decoder in transformers' module
    head: str  # the output head's name there
    head_dim: int
    epsilon: float
    activation: str
    is_parallel: bool
    factors: Factors
    rules: list[Rule]  # by layer
    rotary: list[str | None]  # by layer: the name of its frequencies; None: it does not rotate
    rotary_scaling: dict[str, float]  # by the name of frequencies: a factor of cosines and sines
    rope_boundary: int | None  # tokens above which a text has other rotary frequencies
    experts_per_token: int = 0
    normalises_experts: bool = False  # the weights of a token's experts add up to 1


class LoadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the first load of a model has proven, for later loads to build on."""

    decoder: DecoderSpec
    context_len: int
    eos_token_ids: list[int]
    probe_difference: float  # nats
    num_references: int  # texts of the proof whose last logits are among the tensors
