"""`Token`: a vocabulary entry's bytes that know their id."""

from __future__ import annotations

from typing import Any, Self, final


@final
class Token(bytes):
    """The exact bytes of a token, with `.token_id`; two tokens are equal where their ids are.

    Vocabularies hold different tokens of the same bytes, so equality, order and hash go by id; compared with
    plain bytes a token is unequal, and `.byte_string` gives them.
    """

    token_id: int

    def __new__(cls, token_id: int, byte_string: bytes) -> Self:
        """Make the token of an id and its bytes."""
        token = super().__new__(cls, byte_string)
        token.token_id = token_id
        return token

    @property
    def byte_string(self) -> bytes:
        """The bytes alone."""
        return bytes(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Token) and self.token_id == other.token_id

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.token_id)

    def __lt__(self, other: bytes) -> bool:
        return self.token_id < other.token_id if isinstance(other, Token) else NotImplemented

    def __le__(self, other: bytes) -> bool:
        return self.token_id <= other.token_id if isinstance(other, Token) else NotImplemented

    def __gt__(self, other: bytes) -> bool:
        return self.token_id > other.token_id if isinstance(other, Token) else NotImplemented

    def __ge__(self, other: bytes) -> bool:
        return self.token_id >= other.token_id if isinstance(other, Token) else NotImplemented

    def __repr__(self) -> str:
        return f"Token({self.token_id}, {bytes(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Token, (self.token_id, bytes(self))
