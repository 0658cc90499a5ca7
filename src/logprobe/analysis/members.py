"""Log-probability of each value that a JSON schema allows in a field of a reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.analysis.measures import logsumexp
from logprobe.analysis.schemas import json_text
from logprobe.analysis.spellings import PathSum, Texts
from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from logprobe.analysis.spellings import Floats, TokenIndex
    from logprobe.records.fields import Field, Node, Spelt

SHOWN_MEMBERS: Final = 6  # in a `repr`, the likeliest first
SPACES: Final = b" \t\n\r"


@dataclass(frozen=True, slots=True)
class Members:
    """What one distribution gives each member of an enum at a place of a reply, in every spelling; nats.

    A member is its JSON text, from the first byte to the last, as `json.dumps(ensure_ascii=False)` writes it,
    with numbers as grammars do (`1` of 1.0): a string ends with its quote; after a number or a word (`12`,
    `true`) there must come what JSON lets follow. All token paths that spell it are summed, after the reply's
    own tokens before the place and the bytes between these and the place, and also where their last token
    goes on behind the member.
    """

    values: tuple[Any, ...]  # M, in the schema's order
    logprobs: Floats  # (M,)
    unresolved: float  # probability of the paths that were not followed; by so much any member may be off

    @property
    def shares(self) -> Floats:
        """Of each member in all of them, (M,); they sum to one. NaN where none is possible."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.exp(self.logprobs - logsumexp(self.logprobs)))

    @property
    def mass(self) -> float:
        """The probability of any of them."""
        return min(float(np.exp(logsumexp(self.logprobs))), 1.0)

    @property
    def rest(self) -> float:
        """The probability of anything else at this place, `unresolved` included."""
        return 1.0 - self.mass

    def logprob_of(self, value: Any) -> float:
        """Of one member.

        Raises:
            ParameterError: it is none.
        """
        text, texts = json_text(value), self.texts
        require(text in texts, "value", f"{text:.60} is no member; there are {', '.join(texts):.200}")
        return float(self.logprobs[texts.index(text)])

    @property
    def texts(self) -> list[str]:
        """The members as JSON, which tells 1 from true."""
        return list(map(json_text, self.values))

    def __repr__(self) -> str:
        shares, texts = self.shares, self.texts
        best = np.argsort(-shares, kind="stable")[:SHOWN_MEMBERS]
        shown = ", ".join(f"{texts[place]}: {shares[place]:.3f}" for place in best.tolist())
        more = f", and {len(texts) - len(best)} more" if len(texts) > len(best) else ""
        return f"<Members: {{{shown}}}{more}, mass {self.mass:.3f}>"


@dataclass(frozen=True, slots=True)
class FieldDistribution:
    """One value of a JSON reply: what it was given, and what else might stand in its place.

    The two bounds of `Field` are one here, unless rows were too few for that: of a token that a value shares
    with the text around it, `logprob` counts what all tokens that begin as it does up to there leave to the
    value.
    """

    pointer: str  # RFC 6901
    value: Any
    raw: Field  # under the model's own distribution
    processed: Field | None  # under the one that was drawn from; None: its numbers were not asked for
    log_kept_mass: float | None  # of masks and truncation over all of `tokens`, nats; None as `processed`
    members: Members | None  # raw; None: the schema does not name what may stand there
    grammar_members: Members | None  # under the request's grammar alone; None: it had none, or as above

    @property
    def runner_up(self) -> tuple[Any, float] | None:
        """The likeliest member but the value, with its share; under the grammar where there is one."""
        members = self.members if self.grammar_members is None else self.grammar_members
        if members is None:
            return None
        own = json_text(self.value)
        shares = zip(members.values, members.texts, members.shares.tolist(), strict=True)
        others = [(value, share) for value, text, share in shares if text != own]
        return max(others, key=lambda other: other[1], default=None)


class MemberSum:
    """The sum over all spellings of the members of one value."""

    def __init__(
        self,
        spelt: Spelt,
        node: Node,
        members: list[Any],
        index: TokenIndex,
        *,
        max_rows: int,
        has_grammar: bool,
    ) -> None:
        self._members = tuple(members)
        self.token, begin = spelt.token_at(node.begin)  # the tokens before this one come first
        self._has_grammar = has_grammar
        texts = Texts(
            spelt.data[begin : node.begin],
            [_utf8(json_text(member)) for member in members],
            _followers(spelt, node),
            index,
            may_end=not node.pointer,
        )
        self.paths = PathSum(texts, max_rows, has_grammar=has_grammar)

    def members(self) -> tuple[Members, Members | None]:
        """Raw and under the grammar, as far as the paths were followed."""
        return self._at(0), self._at(1) if self._has_grammar else None

    def _at(self, stage: int) -> Members:
        return Members(self._members, self.paths.logprobs(stage), self.paths.unresolved(stage))


def _followers(spelt: Spelt, node: Node) -> bytes:
    """What may follow a number or a word at this place: white space, and the marks of what holds it."""
    if not node.pointer:
        return SPACES
    holder = node.pointer.rpartition("/")[0]
    return SPACES + (b",}" if holder in spelt.objects else b",]")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError("schema", f"has a member that is not valid Unicode ({error.reason})") from error
