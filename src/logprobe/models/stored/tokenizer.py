"""Store a tokenizer as transformers has set it up, so that later loads need only the `tokenizers` library.

TOKENIZER has the backend of transformers' tokenizer as `tokenizers` serialises it; FACTS has the remaining
settings, and a checksum of both.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER: Final = "tokenizer.json"
FACTS: Final = "facts.json"


class TokenizerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a transformers tokenizer that its backend does not have."""

    bos_token_id: int | None
    eos_token_id: int | None
    special_token_ids: frozenset[int]
    splits_special_tokens: bool  # a special token's text is split like other text

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Read the settings of a transformers tokenizer."""
        return cls(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            special_token_ids=frozenset(tokenizer.all_special_ids),
            splits_special_tokens=tokenizer.split_special_tokens,
        )


class _Kept(msgspec.Struct, frozen=True):
    facts: TokenizerFacts
    crc32: int  # of the facts and the backend


def exact_state(backend: Tokenizer) -> bytes | None:
    """Serialise a backend as JSON; return None if `tokenizers` would not restore it exactly.

    `tokenizers` parses decimal numbers, such as the scores of a Unigram model, with errors in the last digit,
    so each tokenizer is parsed and serialised again to compare.
    """
    state = backend.to_str()
    return state.encode() if Tokenizer.from_str(state).to_str() == state else None


def write_tokenizer(folder: Path, state: bytes, facts: TokenizerFacts) -> None:
    """Write the result of `exact_state`, and the facts.

    Raises:
        OSError: the folder cannot be written.
    """
    (folder / TOKENIZER).write_bytes(state)
    (folder / FACTS).write_bytes(msgspec.json.encode(_Kept(facts, _checksum(state, facts))))


def read_tokenizer(folder: Path) -> tuple[Tokenizer, TokenizerFacts] | None:
    """Return the backend and facts; None if there are none or they are damaged."""
    try:
        kept = msgspec.json.decode((folder / FACTS).read_bytes(), type=_Kept)
        state = (folder / TOKENIZER).read_bytes()
    except (OSError, msgspec.MsgspecError):
        return None
    if kept.crc32 != _checksum(state, kept.facts):
        return None
    return Tokenizer.from_buffer(state), kept.facts


def _checksum(state: bytes, facts: TokenizerFacts) -> int:
    return zlib.crc32(state, zlib.crc32(msgspec.json.encode(facts, order="deterministic")))
