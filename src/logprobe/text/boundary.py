"""Split a text into a context and continuations: by tokens if a token ends at the boundary, else by bytes.

The tokens of "The capital of Fra" are not a prefix of the tokens of "The capital of France is": one token
spans the boundary. In that case, the score is conditional on the leading tokens that both texts share, and
the probability of the remaining bytes is summed over all their tokenizations (`Healing`):

    p(continuation | context) = P(tail + continuation | common tokens) / P(tail | common tokens)

`tail` is the rest of the context after the common tokens, and P(bytes) is the sum over all token sequences
that cover these bytes, where the last token may extend beyond them (Phan et al. 2024,
https://arxiv.org/abs/2410.09303; Vieira et al. 2024, https://arxiv.org/abs/2412.03719). `analysis.covers`
computes the sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.values import IntArray
    from logprobe.text.edge import TextEdge

Boundary: TypeAlias = Literal["token", "bytes"]
"""Whether a continuation's log-probability is conditional on the tokens or on the bytes of its context."""
BoundaryRule: TypeAlias = Literal["auto", "token"]
"""`auto` scores by bytes if a token spans the boundary; `token` splits as lm-evaluation-harness does."""
BOUNDARY_RULES: Final = ("auto", "token")
# limit on the bytes to sum over; a longer text is summed only up to the end of the spanning token
MAX_BYTES: Final = 24


@dataclass(frozen=True, slots=True)
class Healing:
    """The bytes to marginalize over if no token ends between a context and its continuation."""

    first: int  # tokens before this index are the context to condition on
    stop: int  # tokens from this index on are scored without summing over tokenizations
    tail: bytes  # bytes of the context after token `first - 1`
    text: bytes  # bytes of the tokens [first, stop); begins with `tail`
    is_open: bool  # True if the last token that covers `text` may extend beyond it
    num_bytes: int  # number of the continuation's bytes in the tokens from `first` on

    def moved(self, num_tokens: int) -> Healing:
        """Return a copy with indices shifted for a sequence whose first `num_tokens` tokens were cut."""
        return replace(self, first=self.first - num_tokens, stop=self.stop - num_tokens)


class Split(NamedTuple):
    """A context and its continuation as one sequence; the continuation starts at index `start`.

    With `healing`, token `start` is the first that contains bytes of the continuation.
    """

    token_ids: IntArray  # (num_tokens,) int32
    start: int
    healing: Healing | None = None
    data: bytes | None = None  # UTF-8 of the continuation's text; None if the continuation was given as ids

    @property
    def context(self) -> IntArray:
        """The tokens before the continuation."""
        return self.token_ids[: self.start]

    @property
    def continuation(self) -> IntArray:
        """The tokens to score."""
        return self.token_ids[self.start :]

    @property
    def pair(self) -> tuple[IntArray, IntArray] | Split:
        """The argument for `LLM.score`: (context, continuation) ids, or this split if it has `healing`."""
        return (self.context, self.continuation) if self.healing is None else self


Pair: TypeAlias = "tuple[IntArray, IntArray] | Split"
"""Token ids of a context and its continuation, or a split with `healing`."""


def given_bytes(split: Split) -> bytes:
    """Return the UTF-8 of the continuation of a split that was made from text."""
    assert split.data is not None, "the split was made from text"
    return split.data


def check_rule(rule: BoundaryRule) -> None:
    """Raise `ParameterError` if the rule is not in `BOUNDARY_RULES`."""
    require(rule in BOUNDARY_RULES, "boundary", f"must be one of {', '.join(BOUNDARY_RULES)}", got=rule)


def split_texts(
    edge: TextEdge,
    context: str,
    continuations: Sequence[str],
    *,
    rule: BoundaryRule = "auto",
    is_laid_out: bool = False,
) -> list[Split]:
    """Tokenize a context joined with each continuation, and split the tokens where the continuation starts.

    Trailing whitespace of the context is moved to the continuation, and an empty context becomes the model's
    BOS, or EOS if it has no BOS (as in lm-evaluation-harness). If a token spans the boundary for any
    continuation, all continuations are scored by bytes, after the leading tokens that all joined texts share.

    Args:
        edge: the model's tokenizer.
        context: the text before the continuations.
        continuations: the texts to score.
        rule: see `BoundaryRule`.
        is_laid_out: True if the context is a rendered chat template: its special tokens are in the text, and
            its trailing whitespace stays in the context.

    Raises:
        ParameterError: a continuation is empty; the context ends within the first token; or the context must
            be scored by bytes, but the token that spans its end is a special token, or the tokenizer rewrites
            text across the boundary.
    """
    require(all(continuations), "continuation", "is empty; there is nothing to score")
    stripped = context.rstrip()
    if not stripped:
        prefix = edge.prefix()
        encoded = [edge.encode(context + text, add_special_tokens=False) for text in continuations]
        splits = [Split(np.concatenate([prefix, ids]), len(prefix)) for ids in encoded]
        return _with_data(edge, splits, context, 0, continuations, add_special_tokens=False)
    add = not is_laid_out
    wholes = [edge.encode(context + text, add_special_tokens=add) for text in continuations]
    if rule == "token":
        before = edge.encode(stripped, add_special_tokens=add)
        splits = [_by_tokens(before, whole) for whole in wholes]
        return _with_data(edge, splits, context, len(stripped), continuations, add_special_tokens=add)
    # A chat template keeps its trailing whitespace unless a token spans the boundary after it.
    for text in [context, stripped] if is_laid_out else [stripped]:
        before = edge.encode(text, add_special_tokens=add)
        shared = [_num_shared(before, whole) for whole in wholes]
        before = _without_end(edge, before, shared)
        if all(num == len(before) < len(whole) for num, whole in zip(shared, wholes, strict=True)):
            splits = [Split(whole, len(before)) for whole in wholes]
            return _with_data(edge, splits, context, len(text), continuations, add_special_tokens=add)
    splits = [_by_bytes(edge, before, whole, min(shared)) for whole in wholes]
    given = [(context[len(stripped) :] + text).encode() for text in continuations]
    return [split._replace(data=data) for split, data in zip(splits, given, strict=True)]


def _with_data(
    edge: TextEdge,
    splits: Sequence[Split],
    context: str,
    start: int,
    continuations: Sequence[str],
    *,
    add_special_tokens: bool,
) -> list[Split]:
    """Set `data` of each split to the bytes of its joined text from character `start` on."""
    return [
        split._replace(
            data=edge.bytes_from(
                context + text,
                split.token_ids,
                split.start,
                expected=context[start:] + text,
                add_special_tokens=add_special_tokens,
            )
        )
        for split, text in zip(splits, continuations, strict=True)
    ]


def _by_tokens(before: IntArray, whole: IntArray) -> Split:
    start = min(len(before), len(whole) - 1)
    remedy = "ends within the first token, so nothing precedes that token; leave out boundary='token'"
    require(start > 0, "context", remedy)
    return Split(whole, start)


def _num_shared(before: IntArray, whole: IntArray) -> int:
    """Return the number of leading tokens that both sequences have in common."""
    num = min(len(before), len(whole))
    is_same = before[:num] == whole[:num]
    return num if is_same.all() else int(is_same.argmin())


def _without_end(edge: TextEdge, before: IntArray, shared: Sequence[int]) -> IntArray:
    """Remove special tokens that the tokenizer appends to every text, such as EOS, from the context's end."""
    end = len(before)
    while end > max(shared) and int(before[end - 1]) in edge.special_token_ids:
        end -= 1
    return before[:end]


def _by_bytes(edge: TextEdge, before: IntArray, whole: IntArray, first: int) -> Split:
    if first == 0:
        bos = edge.vocabulary.token_text(int(edge.prefix()[0]))
        remedy = (
            f"ends within the first token, so nothing precedes that token; begin the context with {bos!r}"
        )
        raise ParameterError("context", remedy)
    tail = edge.vocabulary.bytes_of(before[first:].tolist())
    pieces = [edge.vocabulary.token_bytes(token_id) for token_id in whole[first:].tolist()]
    text = b"".join(pieces)
    remedy = "the tokenizer changes the text around its end; score token ids, or set boundary='token'"
    require(text.startswith(tail) and len(text) > len(tail), "context", remedy)
    ends = np.cumsum([len(piece) for piece in pieces])
    start = int(np.searchsorted(ends, len(tail), side="right"))
    special = edge.special_token_ids
    is_special = [token_id in special for token_id in whole[first:].tolist()]
    remedy = "a special token spans its end; score token ids, or set boundary='token'"
    require(not any(is_special[: start + 1]), "context", remedy)
    # Sum up to the first special token after the boundary, unless that exceeds MAX_BYTES.
    stop = is_special.index(True) if any(is_special) else len(pieces)
    if ends[stop - 1] > MAX_BYTES:
        stop = start + 1
    healing = Healing(
        first=first,
        stop=first + stop,
        tail=tail,
        text=text[: ends[stop - 1]],
        is_open=stop == len(pieces),
        num_bytes=len(text) - len(tail),
    )
    return Split(whole, first + start, healing)
