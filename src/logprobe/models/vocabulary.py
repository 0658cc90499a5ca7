"""Token ids → the exact bytes that each one stands for, from the tokenizer's own files.

Made once from what `loading` gives; the text of tokens is looked up here wherever records reach a person or
the wire. Two alphabets are known: byte-level (each character of a piece is one byte) and marked spaces with
byte fallback (`▁` is a space, `<0x0A>` is a byte), which SentencePiece models use.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from logprobe.errors import ParameterError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

MAX_TOKENS: Final = 1 << 22  # sixteen times the largest published vocabulary
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@final
class Vocabulary:
    """The bytes of every token id, in one blob.

    Concatenating the bytes of `encode(text, add_special_tokens=False)` gives `text.encode()`, with these
    exceptions, all of them the tokenizer's: a normaliser's changes (Qwen's NFC) show; a byte that a
    byte-level vocabulary lacks is dropped (`missing_bytes`); a marked-space tokenizer writes a space and the
    character `▁` (U+2581) the same way, so `▁` comes back as a space; and one that puts a space before the
    text gives that space back.
    """

    def __init__(self, pieces: Iterable[bytes | None]) -> None:
        """Store the pieces: `pieces[i]` is the bytes of id `i`, or None where there is no such id."""
        known = list(pieces)
        lengths = np.fromiter((len(piece or b"") for piece in known), np.int64, len(known))
        self._blob = b"".join(piece for piece in known if piece)
        # (num_ids + 1,) int64: id i is blob[offsets[i] : offsets[i + 1]].
        self._offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        # (num_ids,) bool: False where the tokenizer has no such id.
        self._is_known = np.fromiter((piece is not None for piece in known), np.bool_, len(known))

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerFast | Tokenizer) -> Vocabulary:
        """Read a fast tokenizer's pieces and decode each by the rule of the tokenizer's own decoder.

        Raises:
            UnsupportedModelError: the decoder's pieces have no exact bytes (WordPiece, for instance), or an
                id is not below `MAX_TOKENS`.
        """
        backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
        to_bytes = _piece_decoder(backend)
        own = backend.get_vocab(with_added_tokens=False)
        added = {
            token_id: token.content.encode() for token_id, token in backend.get_added_tokens_decoder().items()
        }
        largest = max(*own.values(), *added, -1, -1)
        if largest >= MAX_TOKENS:
            raise UnsupportedModelError(
                f"tokenizer.json: has the token id {largest}, and ids must be below {MAX_TOKENS}; "
                "fetch the model again"
            )
        pieces: list[bytes | None] = [None] * (largest + 1)
        for piece, token_id in own.items():
            if token_id not in added:
                pieces[token_id] = to_bytes(piece)
        for token_id, content in added.items():
            pieces[token_id] = content
        return cls(pieces)

    def __len__(self) -> int:
        """Count the ids: one more than the tokenizer's largest."""
        return len(self._is_known)

    @cached_property
    def missing_bytes(self) -> bytes:
        """The byte values that no token holds alone, ascending: a byte-level tokenizer drops them from text.

        A vocabulary may hold only the bytes of its training text: SmolLM2's lacks six control characters and
        the bytes that begin code points of unassigned planes.
        """
        lengths = np.diff(self._offsets)
        single = np.frombuffer(self._blob, np.uint8)[self._offsets[:-1][lengths == 1]]
        return bytes(np.setdiff1d(np.arange(256, dtype=np.uint8), single))

    def token_bytes(self, token_id: int) -> bytes:
        """Give the exact bytes of one token; none for an id that only the model has (a padded head).

        Raises:
            ParameterError: the id is negative.
        """
        if token_id < 0:
            raise ParameterError("token_id", f"is {token_id}; ids count from 0")
        if token_id >= len(self):
            return b""
        return self._blob[self._offsets[token_id] : self._offsets[token_id + 1]]

    def token_text(self, token_id: int) -> str:
        r"""Give one token as valid text: bytes that are no whole UTF-8 show as `\xNN`, unknown ids as `<id>`.

        Raises:
            ParameterError: the id is negative.
        """
        piece = self.token_bytes(token_id)
        if token_id >= len(self) or not self._is_known[token_id]:
            return f"<{token_id}>"
        return piece.decode("utf-8", "backslashreplace")

    def bytes_of(self, token_ids: Iterable[int]) -> bytes:
        """Concatenate the bytes of some tokens.

        Raises:
            ParameterError: an id is negative.
        """
        return b"".join(self.token_bytes(int(token_id)) for token_id in token_ids)


def _piece_decoder(backend: Tokenizer) -> Callable[[str], bytes]:
    steps = list(_steps(_state(backend.decoder)))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _from_byte_level
    if kinds and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        return _from_marked_spaces(steps)
    raise UnsupportedModelError(
        f"tokenizer decoder {' + '.join(sorted(kinds)) or 'none'}: its tokens have no exact bytes; "
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


def _alphabet() -> dict[int, int]:
    """Map the 256 characters of byte-level pieces to their bytes (GPT-2's table, turned round)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in set(plain)]
    return {byte: byte for byte in plain} | {256 + place: byte for place, byte in enumerate(shifted)}


_BYTE_OF_CHARACTER: Final = _alphabet()


def _from_byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[ord(character)] for character in piece])
    except KeyError:
        # Not of the alphabet: the tokenizer's decoder, too, takes such a piece as it is written.
        return piece.encode()


def _from_marked_spaces(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    marks = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    marks += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)

    def decode(piece: str) -> bytes:
        if has_bytes and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes.fromhex(match[1])
        for mark, content in marks:
            piece = piece.replace(mark, content)
        return piece.encode()

    return decode
