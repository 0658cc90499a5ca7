"""Split a text into a context and continuations: by tokens if a token ends between the two, else by bytes.

The tokens of "The capital of Fra" are not the first tokens of "The capital of France is": one token covers
bytes of both. The tokens that both share are then given, and the bytes after them are summed (`Healing`):

    p(continuation | context) = P(tail + continuation | given tokens) / P(tail | given tokens)

`tail` is what the context holds after the given tokens, and P(bytes) is the sum over all token sequences
that cover these bytes, of which the last token may reach beyond them (Phan et al. 2024,
https://arxiv.org/abs/2410.09303; Vieira et al. 2024, https://arxiv.org/abs/2412.03719). `analysis.covers` has
the sums.
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
"""How a continuation was measured: after the tokens of its context, or after its bytes."""
BoundaryRule: TypeAlias = Literal["auto", "token"]
"""`auto`: by bytes where a token spans the boundary; `token`: as lm-evaluation-harness splits, always."""
BOUNDARY_RULES: Final = ("auto", "token")
MAX_BYTES: Final = 24  # after the given tokens; of more, those up to the end of the spanning token are summed


@dataclass(frozen=True, slots=True)
class Healing:
    """The bytes to sum over where no token ends between a context and its continuation."""

    first: int  # tokens before this one are given
    stop: int  # tokens from this one on are scored as they are
    tail: bytes  # of the context, after the given tokens
    text: bytes  # the tail and what follows it, up to token `stop`
    is_open: bool  # whether the last token that covers `text` may reach beyond it
    num_bytes: int  # of the continuation that these tokens hold, up to the end of the sequence

    def moved(self, num_tokens: int) -> Healing:
        """The same in a sequence whose first `num_tokens` tokens were cut."""
        return replace(self, first=self.first - num_tokens, stop=self.stop - num_tokens)


class Split(NamedTuple):
    """A context and its continuation as one sequence; the continuation begins at `start`.

    With `healing`, token `start` is the first that reaches into the continuation.
    """

    token_ids: IntArray  # (num_tokens,) int32
    start: int
    healing: Healing | None = None
    data: bytes | None = None  # UTF-8 of the text that the continuation comes from; None: it is ids

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
        """What `LLM.score` takes: two lists of ids, or the split itself where its bytes are summed."""
        return (self.context, self.continuation) if self.healing is None else self


Pair: TypeAlias = "tuple[IntArray, IntArray] | Split"
"""Ids of a context and of its continuation, or a split whose bytes are summed."""


def given_bytes(split: Split) -> bytes:
    """Return the UTF-8 of the text that the continuation of a split of texts comes from."""
    assert split.data is not None, "texts were split"
    return split.data


def check_rule(rule: BoundaryRule) -> None:
    """Raise `ParameterError` for a rule other than `BOUNDARY_RULES`."""
    require(rule in BOUNDARY_RULES, "boundary", f"must be one of {', '.join(BOUNDARY_RULES)}", got=rule)


def split_texts(
    edge: TextEdge,
    context: str,
    continuations: Sequence[str],
    *,
    rule: BoundaryRule = "auto",
    is_laid_out: bool = False,
) -> list[Split]:
    """Split the joined text of a context and each continuation; all are measured in the same way.

    White space that ends the context counts to the continuation, and an empty context becomes the model's
    BOS, or its EOS where it has none (lm-evaluation-harness's rule). If a token spans the boundary of any
    continuation, all of them are measured by bytes after the tokens that all share with the context.

    Args:
        edge: the model's tokenizer.
        context: the text before the continuations.
        continuations: texts.
        rule: `token` splits as lm-evaluation-harness does, whatever spans the boundary.
        is_laid_out: whether the context is a rendered chat template, which has its special tokens and the
            white space that ends it.

    Raises:
        ParameterError: an empty continuation, or a context that cannot be measured by bytes: nothing predicts
            the token that spans its end, a special token does, or the tokenizer rewrites text across it.
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
    # White space that ends a template is its own, unless a token spans that, too.
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
    """Add the bytes that each continuation comes from: those of the given text, from character `start` on."""
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
    remedy = "is one token with its continuation, which nothing predicts; leave boundary='token' out"
    require(start > 0, "context", remedy)
    return Split(whole, start)


def _num_shared(before: IntArray, whole: IntArray) -> int:
    """The number of tokens that both begin with."""
    num = min(len(before), len(whole))
    is_same = before[:num] == whole[:num]
    return num if is_same.all() else int(is_same.argmin())


def _without_end(edge: TextEdge, before: IntArray, shared: Sequence[int]) -> IntArray:
    """The context without special tokens that the tokenizer puts behind every text, such as EOS."""
    end = len(before)
    while end > max(shared) and int(before[end - 1]) in edge.special_token_ids:
        end -= 1
    return before[:end]


def _by_bytes(edge: TextEdge, before: IntArray, whole: IntArray, first: int) -> Split:
    if first == 0:
        bos = edge.vocabulary.token_text(int(edge.prefix()[0]))
        remedy = f"nothing predicts the token that spans its end; begin it with {bos!r}"
        raise ParameterError("context", remedy)
    tail = edge.vocabulary.bytes_of(before[first:].tolist())
    pieces = [edge.vocabulary.token_bytes(token_id) for token_id in whole[first:].tolist()]
    text = b"".join(pieces)
    remedy = "the tokenizer rewrites text across its end; score token ids, or give boundary='token'"
    require(text.startswith(tail) and len(text) > len(tail), "context", remedy)
    ends = np.cumsum([len(piece) for piece in pieces])
    start = int(np.searchsorted(ends, len(tail), side="right"))
    special = edge.special_token_ids
    is_special = [token_id in special for token_id in whole[first:].tolist()]
    remedy = "a special token spans its end; score token ids, or give boundary='token'"
    require(not any(is_special[: start + 1]), "context", remedy)
    # Up to the first special token after the boundary, if that is not too far away.
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
