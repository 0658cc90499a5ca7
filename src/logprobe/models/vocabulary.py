"""Map token ids to the exact bytes of their tokens.

Two kinds of vocabulary are supported: byte-level (each character of a piece is one byte), and SentencePiece
with byte fallback (`▁` is a space, `<0x0A>` is a byte).
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from logprobe.errors import ParameterError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

MAX_TOKENS: Final = 1 << 22  # sixteen times the largest published vocabulary
NO_BYTE: Final = 0xFFFF  # in `_ALPHABET`: the character represents no byte
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@final
class Vocabulary:
    """The exact bytes of every token id, stored in one `bytes` object.

    The concatenated bytes of `encode(text, add_special_tokens=False)` equal `text.encode()`, unless the
    tokenizer changes the text. A normalizer (NFC in Qwen's tokenizers) changes characters. A byte that a
    byte-level vocabulary lacks is dropped (`missing_bytes`). A SentencePiece tokenizer encodes `▁` (U+2581)
    as a space, and it may add a space before the text, which is then in the bytes too.
    """

    def __init__(self, pieces: Iterable[bytes | None]) -> None:
        """Store the pieces; `pieces[i]` has the bytes of id `i`, or is None if there is no such id."""
        known = list(pieces)
        filled = [piece or b"" for piece in known]
        lengths = np.fromiter(map(len, filled), np.int64, len(filled))
        self._blob = b"".join(filled)
        # (num_ids + 1,) int64: id i is blob[offsets[i] : offsets[i + 1]].
        self._offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        # (num_ids,) bool: False where the tokenizer has no such id.
        self._is_known = np.array([piece is not None for piece in known], np.bool_)

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerFast | Tokenizer) -> Vocabulary:
        """Decode each piece in a fast tokenizer's vocabulary to bytes, as the tokenizer's decoder does.

        Raises:
            UnsupportedModelError: tokens do not have exact bytes (as in WordPiece), or an id is not below
                `MAX_TOKENS`.
        """
        backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
        decode = _piece_decoder(backend)
        own = backend.get_vocab(with_added_tokens=False)
        added = {
            token_id: token.content.encode() for token_id, token in backend.get_added_tokens_decoder().items()
        }
        largest = max(*own.values(), *added, -1, -1)
        if largest >= MAX_TOKENS:
            raise UnsupportedModelError(
                f"tokenizer.json: has the token id {largest}, but ids must be below {MAX_TOKENS}; "
                "fetch the model again"
            )
        pieces: list[bytes | None] = [None] * (largest + 1)
        plain = {piece: token_id for piece, token_id in own.items() if token_id not in added}
        for token_id, content in zip(plain.values(), decode([*plain]), strict=True):
            pieces[token_id] = content
        for token_id, content in added.items():
            pieces[token_id] = content
        return cls(pieces)

    def __len__(self) -> int:
        """Return the number of ids, which is the tokenizer's largest id plus one."""
        return len(self._is_known)

    @cached_property
    def missing_bytes(self) -> bytes:
        """Byte values without a single-byte token, ascending; a byte-level tokenizer drops them from text.

        A vocabulary may contain only the bytes of its training text: SmolLM2's lacks six control characters
        and the lead bytes of unassigned planes.
        """
        lengths = np.diff(self._offsets)
        single = np.frombuffer(self._blob, np.uint8)[self._offsets[:-1][lengths == 1]]
        return bytes(np.flatnonzero(np.bincount(single, minlength=256) == 0).astype(np.uint8))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token; b"" for ids without a token, as in a padded output head.

        Raises:
            ParameterError: the id is negative.
        """
        if token_id < 0:
            raise ParameterError("token_id", f"must be >= 0, got {token_id}")
        if token_id >= len(self):
            return b""
        return self._blob[self._offsets[token_id] : self._offsets[token_id + 1]]

    def token_text(self, token_id: int) -> str:
        r"""Return one token as text; bytes that are not valid UTF-8 become `\xNN`, unknown ids `<id>`.

        Raises:
            ParameterError: the id is negative.
        """
        piece = self.token_bytes(token_id)
        if token_id >= len(self) or not self._is_known[token_id]:
            return f"<{token_id}>"
        return piece.decode("utf-8", "backslashreplace")

    def bytes_of(self, token_ids: Iterable[int]) -> bytes:
        """Return the concatenated bytes of tokens.

        Raises:
            ParameterError: an id is negative.
        """
        return b"".join(self.token_bytes(int(token_id)) for token_id in token_ids)


def _piece_decoder(backend: Tokenizer) -> Callable[[list[str]], list[bytes]]:
    steps = list(_steps(_state(backend.decoder)))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _from_byte_level
    if kinds and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        return _from_marked_spaces(steps)
    raise UnsupportedModelError(
        f"tokenizer.json: with decoder {' + '.join(sorted(kinds)) or 'none'}, tokens have no exact bytes; "
        "use a model with a byte-level or SentencePiece tokenizer"
    )


def _state(part: Any) -> dict[str, Any]:
    state: dict[str, Any] = (
        json.loads(part.__getstate__()) if part is not None else {"type": "Sequence", "decoders": []}
    )
    return state


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for part in decoder["decoders"]:
        yield from _steps(part)


def _alphabet() -> NDArray[np.uint16]:
    """Return a table from the code points of byte-level pieces to bytes: the inverse of GPT-2's table.

    It has `NO_BYTE` for other code points. Its last entry, also `NO_BYTE`, stands for all larger code points.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in set(plain)]
    table = np.full(256 + len(shifted) + 1, NO_BYTE, np.uint16)
    table[plain] = plain
    table[256:-1] = shifted
    return table


_ALPHABET: Final = _alphabet()


def _from_byte_level(pieces: list[str]) -> list[bytes]:
    joined = _in_alphabet("".join(pieces))
    if joined is None:
        # A piece with other characters is taken literally, as the tokenizer's decoder does.
        return [_in_alphabet(piece) or piece.encode() for piece in pieces]
    ends = [0, *accumulate(map(len, pieces))]
    return [joined[start:end] for start, end in pairwise(ends)]


def _in_alphabet(text: str) -> bytes | None:
    """Return one byte per character, or None if a character represents no byte."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    values = _ALPHABET.take(codes, mode="clip")
    return None if (values == NO_BYTE).any() else values.astype(np.uint8).tobytes()


def _from_marked_spaces(steps: list[dict[str, Any]]) -> Callable[[list[str]], list[bytes]]:
    marks = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    marks += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)

    def decode(piece: str) -> bytes:
        if has_bytes and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes.fromhex(match[1])
        for mark, content in marks:
            piece = piece.replace(mark, content)
        return piece.encode()

    return lambda pieces: [*map(decode, pieces)]
