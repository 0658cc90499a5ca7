"""Log-probability of each value that a JSON schema allows for a field of a reply."""

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

SHOWN_MEMBERS: Final = 6  # maximum number of members in `repr`, likeliest first
SPACES: Final = b" \t\n\r"


@dataclass(frozen=True, slots=True)
class Members:
    """Log-probability of each member of an enum at one place in a JSON reply, summed over all tokenizations.

    A member is scored as the complete JSON text that `json.dumps(ensure_ascii=False)` writes, with numbers as
    in grammars (`1` for 1.0). The text of a string ends with the closing quote; a number or a word (`12`,
    `true`) must be followed by a character that JSON allows there. The context is everything up to the value:
    the tokens before the token in which the value starts, and the bytes of that token before the value. The
    sum includes token sequences whose last token extends past the end of the member.
    """

    values: tuple[Any, ...]  # M members, in the schema's order
    logprobs: Floats  # (M,), nats
    unresolved: float  # total probability of the paths not followed: bounds the error of each probability

    @property
    def shares(self) -> Floats:
        """Probability of each member, normalized to sum to one, (M,); NaN if no member is possible."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.exp(self.logprobs - logsumexp(self.logprobs)))

    @property
    def mass(self) -> float:
        """Total probability of all members."""
        return min(float(np.exp(logsumexp(self.logprobs))), 1.0)

    @property
    def rest(self) -> float:
        """Probability that the reply continues with none of the members, including `unresolved`."""
        return 1.0 - self.mass

    def logprob_of(self, value: Any) -> float:
        """Return the log-probability of a member, nats.

        Raises:
            ParameterError: `value` is not a member.
        """
        text, texts = json_text(value), self.texts
        require(text in texts, "value", f"{text:.60} is not a member; known: {', '.join(texts):.200}")
        return float(self.logprobs[texts.index(text)])

    @property
    def texts(self) -> list[str]:
        """The members as JSON texts, which distinguish 1 from true."""
        return list(map(json_text, self.values))

    def __repr__(self) -> str:
        shares, texts = self.shares, self.texts
        best = np.argsort(-shares, kind="stable")[:SHOWN_MEMBERS]
        shown = ", ".join(f"{texts[place]}: {shares[place]:.3f}" for place in best.tolist())
        more = f", and {len(texts) - len(best)} more" if len(texts) > len(best) else ""
        return f"<Members: {{{shown}}}{more}, mass {self.mass:.3f}>"


@dataclass(frozen=True, slots=True)
class FieldDistribution:
    """One value in a JSON reply, with its log-probability and the other values that the schema allows.

    The lower and upper bound in `raw` and `processed` are normally equal. If the value shares a token with
    the text around it, the token's log-probability is divided at the boundary, using the total probability of
    all tokens with the same bytes up to the boundary. The bounds differ if the limit on rows was too small
    for this division, or if something other than a grammar changed the distribution of `processed`.
    """

    pointer: str  # RFC 6901
    value: Any
    raw: Field  # under the model's own distribution
    processed: Field | None  # under the distribution sampled from; None if not requested
    # Log of the probability that masks and truncation kept, nats, summed over the value's tokens. None if not
    # requested.
    log_kept_mass: float | None
    members: Members | None  # under the model's own distribution; None: the schema does not enumerate values
    grammar_members: Members | None  # under the grammar alone; None: no grammar, or `members` is None

    @property
    def runner_up(self) -> tuple[Any, float] | None:
        """The likeliest member other than the value, with its share; None if there is no such member.

        If a grammar was used, the shares are those under the grammar.
        """
        members = self.members if self.grammar_members is None else self.grammar_members
        if members is None:
            return None
        own = json_text(self.value)
        shares = zip(members.values, members.texts, members.shares.tolist(), strict=True)
        others = [(value, share) for value, text, share in shares if text != own]
        return max(others, key=lambda other: other[1], default=None)


class MemberSum:
    """Sums the probability of each member of one value over all tokenizations."""

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
        self.token, begin = spelt.token_at(node.begin)  # the tokens before this one are the context
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
        """Return the members' log-probabilities under the model and under the grammar, if there is one.

        They are sums over the paths (tokenizations) followed so far.
        """
        return self._at(0), self._at(1) if self._has_grammar else None

    def _at(self, stage: int) -> Members:
        return Members(self._members, self.paths.logprobs(stage), self.paths.unresolved(stage))


def _followers(spelt: Spelt, node: Node) -> bytes:
    """Return the bytes that may follow a number or a word here: whitespace and delimiters."""
    if not node.pointer:
        return SPACES
    holder = node.pointer.rpartition("/")[0]
    return SPACES + (b",}" if holder in spelt.objects else b",]")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError("schema", f"has a member that is not valid Unicode ({error.reason})") from error
