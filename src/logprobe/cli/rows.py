"""Convert a record's positions to plain values, one dict per token, for JSON and tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypedDict

from logprobe import __version__
from logprobe.analysis import measures
from logprobe.records.forms.finite import IMPOSSIBLE, finite, finite_value
from logprobe.records.forms.json import position_rows, token_item

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.llm import LLM
    from logprobe.records import FlatLogprobs, LogprobsInfo, TokenTable


class Alternative(TypedDict):
    """A candidate token at a position."""

    token_id: int
    token: str
    bytes: list[int]
    logprob: float  # nats
    rank: int | None  # 1 + number of strictly more likely tokens, or the index in the list of alternatives


class TokenRow(TypedDict):
    """A token with its log-probability; `logprob`, `rank` and `entropy` are None if it is not scored."""

    token_id: int
    token: str
    bytes: list[int]
    logprob: float | None  # nats
    rank: int | None
    top_logprobs: list[Alternative]
    entropy: float | None  # nats, of the full distribution at this position


class Totals(TypedDict):
    """Totals over the scored tokens; a value is None if it is undefined or infinite."""

    num_tokens: int
    num_scored: int
    num_bytes: int
    num_scored_bytes: int
    logprob: float  # nats
    mean_logprob: float | None  # nats per token
    perplexity: float | None
    bits_per_byte: float | None


def token_rows(token_ids: Sequence[int], logprobs: FlatLogprobs, table: TokenTable) -> list[TokenRow]:
    """Return one row per token; `logprobs` has one position per token, which is None if not scored."""
    entropy = [None] * len(token_ids) if logprobs.entropy is None else finite(logprobs.entropy)
    unknown: dict[str, Any] = {"logprob": None, "rank": None, "top_logprobs": []}
    rows: list[Any] = [
        (row or token_item(token_id, table) | unknown) | {"entropy": nats}
        for token_id, row, nats in zip(token_ids, position_rows(logprobs, table), entropy, strict=True)
    ]
    return rows


def totals(rows: Sequence[TokenRow], num_bytes: int, num_scored_bytes: int) -> Totals:
    """Compute totals over the scored rows; the sum is -inf if a token is impossible."""
    scored = [row["logprob"] for row in rows if row["logprob"] is not None]
    total = -math.inf if IMPOSSIBLE in scored else math.fsum(scored)
    return totals_of(total, len(rows), len(scored), num_bytes, num_scored_bytes)


def totals_of(
    logprob: float, num_tokens: int, num_scored: int, num_bytes: int, num_scored_bytes: int
) -> Totals:
    """Compute totals from a log-probability in nats: -inf becomes -9999, infinite means become None."""
    perplexity = measures.perplexity(logprob, num_scored)
    bits = measures.bits_per_byte(logprob, num_scored_bytes)
    return Totals(
        num_tokens=num_tokens,
        num_scored=num_scored,
        num_bytes=num_bytes,
        num_scored_bytes=num_scored_bytes,
        logprob=IMPOSSIBLE if logprob == -math.inf else logprob,
        mean_logprob=finite_value(measures.per_unit(logprob, num_scored)),
        perplexity=None if perplexity == math.inf else perplexity,
        bits_per_byte=None if bits == math.inf else bits,
    )


def info_dict(llm: LLM, info: LogprobsInfo | None) -> dict[str, Any]:
    """Describe the model and, if `info` is given, the log-probabilities."""
    able = llm.engine.capabilities()
    about = {"engine": able.engine, "model": able.model, "logprobe_version": __version__}
    if info is not None:
        about = info.to_dict() | {"floor": IMPOSSIBLE}
    return about | {"device": able.device}


def visible(text: Sequence[int]) -> str:
    """Return a token's bytes as quoted text; bytes and characters that are not printable are escaped."""
    characters = bytes(text).decode("utf-8", "surrogateescape")
    return f'"{"".join(map(_visible_character, characters))}"'


def _visible_character(character: str) -> str:
    if character in {'"', "\\"}:
        return f"\\{character}"
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not valid UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if character.isprintable():
        return character
    # \x80 to \xff stand for bytes, so the characters U+0080 to U+00FF need another escape.
    return f"\\u{code:04x}" if 0x80 <= code <= 0xFF else repr(character)[1:-1]
