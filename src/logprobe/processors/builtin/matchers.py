"""Common interface for bitmask matchers (llguidance, xgrammar), and conversion of their masks."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from logprobe.errors import ParameterError, shortened

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger("logprobe")

BITS = 32  # number of bits in a word of a mask
MAX_PROBLEM_CHARS = 500
_DETAILS = re.compile(r"\n<(?:backtrace|state|grammar|non-verbose)\b")  # what llguidance appends to a message


class Matcher(Protocol):
    """Tracks a text token by token and reports which tokens may come next."""

    def accept(self, token_id: int) -> bool:
        """Advance by a token; return False if the matcher does not allow it."""
        ...

    def mask(self) -> NDArray[np.uint8] | None:
        """Return one bit per token id, set if allowed, lowest bit first; None after the end of the text."""
        ...


class LlguidanceMatcher:
    """Wrapper of an `llguidance.LLMatcher`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> LlguidanceMatcher:
        """Return an independent copy in the same state."""
        return LlguidanceMatcher(self._matcher.deep_copy())

    def accept(self, token_id: int) -> bool:
        """Advance by a token; after the end of the text every token is accepted."""
        matcher = self._matcher
        has_ended = matcher.is_stopped() and not matcher.is_error()  # an error also stops the matcher
        return has_ended or bool(matcher.consume_token(token_id))

    def mask(self) -> NDArray[np.uint8] | None:
        """Return the bitmask of allowed tokens; None if the text has ended.

        Raises:
            ParameterError: the grammar exceeds the parser's limits, or the parser failed.
        """
        matcher = self._matcher
        bits = None if matcher.is_stopped() else matcher.compute_bitmask()
        problem = problem_of(matcher)
        if problem is not None:  # llguidance reports the problem as the end of the text
            is_ambiguous = "too many" in problem.lower()
            what = "can be parsed in too many ways" if is_ambiguous else "cannot be parsed further"
            raise ParameterError("grammar", f"{what}: {problem}")
        return None if bits is None else np.frombuffer(bits, dtype=np.uint8)


class XgrammarMatcher:
    """Wrapper of an `xgrammar.GrammarMatcher`."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        import torch  # xgrammar needs it too

        self._matcher = matcher
        self._bits = torch.empty((1, -(-vocab_size // BITS)), dtype=torch.int32)

    def accept(self, token_id: int) -> bool:
        """Advance by a token; after the end of the text every token is accepted."""
        return self._matcher.is_terminated() or bool(self._matcher.accept_token(token_id))

    def mask(self) -> NDArray[np.uint8] | None:
        """Return the bitmask of allowed tokens; None if the text has ended."""
        if self._matcher.is_terminated():
            return None
        self._bits.fill_(-1)  # xgrammar does not write the mask if every token is allowed
        self._matcher.fill_next_token_bitmask(self._bits, 0)
        bits: NDArray[np.uint8] = self._bits[0].numpy().view(np.uint8)
        return bits


def problem_of(matcher: Any) -> str | None:
    """Return, in one line, why an `llguidance.LLMatcher` failed; None if it did not. Details are logged."""
    if not matcher.is_error():
        return None
    text: str = matcher.get_error()
    if text.startswith("panic:"):
        logger.error("llguidance: %s", text)
        return "the grammar engine failed with an internal error; the log has the details"
    logger.debug("llguidance: %s", text)
    if text.startswith("NoExtensionBias"):
        return "no token of the model matches the text that the grammar requires next"
    return shortened(" ".join(_DETAILS.split(text, 1)[0].split()), MAX_PROBLEM_CHARS)


def as_matcher(matcher: Any, vocab_size: int) -> Matcher:
    """Wrap a matcher, whose type is recognized by its methods.

    Raises:
        ParameterError: it is not a matcher from llguidance or xgrammar.
    """
    if hasattr(matcher, "consume_token") and hasattr(matcher, "compute_bitmask"):
        return LlguidanceMatcher(matcher)
    if hasattr(matcher, "accept_token") and hasattr(matcher, "fill_next_token_bitmask"):
        return XgrammarMatcher(matcher, vocab_size)
    raise ParameterError(
        "factory", f"returned {type(matcher).__name__}, which is not a matcher of llguidance or xgrammar"
    )


def allowed_tokens(mask: NDArray[np.uint8], vocab_size: int) -> NDArray[np.bool_]:
    """Convert a bitmask to (vocab_size,) bool; ids beyond the mask are not allowed."""
    bits = np.unpackbits(mask, count=min(vocab_size, 8 * len(mask)), bitorder="little")
    allowed = np.zeros(vocab_size, dtype=np.bool_)
    allowed[: len(bits)] = bits
    return allowed
