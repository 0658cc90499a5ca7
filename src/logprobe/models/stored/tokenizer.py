"""A tokenizer as transformers has set it up, kept so that a later start reads it with `tokenizers` alone.

What transformers makes of a model's files is a tokenizer of that library, its backend, and a few facts beside
it. TOKENIZER has the one as the library itself writes it, FACTS the others, with a checksum of both.
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
    """What transformers knows of a tokenizer beside the backend."""

    bos_token_id: int | None
    eos_token_id: int | None
    special_token_ids: frozenset[int]
    splits_special_tokens: bool  # whether a text that spells a special token is cut like any other

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Of a tokenizer of transformers."""
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
    """A backend as JSON; None where the library would read another one from that.

    It reads decimal numbers, as a Unigram model's scores, with an error in the last place. Those that it has
    read before came back as they were in all that was tried; each tokenizer is asked.
    """
    state = backend.to_str()
    return state.encode() if Tokenizer.from_str(state).to_str() == state else None


def write_tokenizer(folder: Path, state: bytes, facts: TokenizerFacts) -> None:
    """Write what `exact_state` gave, and facts.

    Raises:
        OSError: the folder cannot be written.
    """
    (folder / TOKENIZER).write_bytes(state)
    (folder / FACTS).write_bytes(msgspec.json.encode(_Kept(facts, _checksum(state, facts))))


def read_tokenizer(folder: Path) -> tuple[Tokenizer, TokenizerFacts] | None:
    """Backend and facts; None where there are none, or none that are whole."""
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
