"""The typed arguments of the built-in processors: what a request may ask of them, with defaults and bounds.

They become JSON Schema, and the fields of `SamplingParams` are checked by the same types. Every default
means 'nothing asked'.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, extra={"is_token_id": True})]
"""An id that admission checks against the model's vocabulary; usable in any processor's `Args`."""

Penalty: TypeAlias = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class _Args(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all of them share."""


class LogitBiasArgs(_Args, frozen=True):
    """Added to the logits of single tokens."""

    logit_bias: dict[TokenId, float] = {}  # nats


class AllowedTokensArgs(_Args, frozen=True):
    """The only tokens that may be drawn."""

    allowed_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)] | None = None


class BannedWordsArgs(_Args, frozen=True):
    """What must not be generated: texts, or sequences of ids."""

    bad_words: list[Annotated[str, msgspec.Meta(min_length=1)]] = []
    bad_words_token_ids: list[Annotated[list[TokenId], msgspec.Meta(min_length=1)]] = []


class MinTokensArgs(_Args, frozen=True):
    """The least number of tokens to generate before one that ends the text."""

    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


class PenaltiesArgs(_Args, frozen=True):
    """Penalties on tokens that were seen already."""

    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0


class ThinkingBudgetArgs(_Args, frozen=True):
    """The most tokens between the marker that starts thinking and the one that ends it."""

    thinking_budget: Annotated[int, msgspec.Meta(ge=0)] | None = None
    think_stop_sentence: str | None = None  # written before the end marker, inside the budget
    think_start: Annotated[str, msgspec.Meta(min_length=1)] = "<think>"
    think_end: Annotated[str, msgspec.Meta(min_length=1)] = "</think>"
    think_start_token_ids: list[TokenId] = []  # in place of `think_start`, as are the next two of theirs
    think_end_token_ids: list[TokenId] = []
    think_stop_sentence_token_ids: list[TokenId] = []


class GrammarArgs(_Args, frozen=True):
    """One of these: the form that the text must have."""

    json_schema: dict[str, Any] | str | None = None  # a schema, or its JSON text
    json_object: bool = False  # any JSON object
    regex: str | None = None
    choice: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    ebnf: str | None = None  # in Lark's notation, as llguidance reads it


class CaptureArgs(_Args, frozen=True):
    """True keeps the request's rows under its id, a text keeps them under that name."""

    capture: bool | str = False
