"""The keys that requests bring as `Authorization: Bearer KEY`: clients' and operators'."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logprobe.errors import ParameterError, require
from logprobe.server.http.errors import ApiError
from logprobe.server.settings import check_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logprobe.server.settings import ServerSettings

COMMENT: Final = "#"  # begins a line of a file of keys that is none


class OperatorKeys:
    """The keys that do what clients may not; without any nobody does."""

    def __init__(self, settings: ServerSettings) -> None:
        self._keys = settings.operator_key

    def check(self, header: str | None) -> int:
        """The number of the key that is brought.

        Raises:
            ApiError: 401; 403 where the server has none.
        """
        if not self._keys:
            message = "this is for operators alone; start the server with --operator-key to do it over HTTP"
            raise ApiError(403, message, code="no_operator_key")
        return _number_of(header, self._keys)


class Keys:
    """The keys that are let in, from any thread."""

    def __init__(self, settings: ServerSettings) -> None:
        """Read them.

        Raises:
            ParameterError: the file cannot be read, holds no key, or one that is too short.
        """
        self._settings = settings
        self._keys = self._read()

    def reload(self) -> int:
        """Read the file again, and give the number of keys; where that fails the old ones stay.

        Raises:
            ParameterError: as at first.
        """
        self._keys = self._read()
        return len(self._keys)

    def check(self, header: str | None) -> int | None:
        """The number of the key that is brought, None without keys.

        Raises:
            ApiError: 401.
        """
        return _number_of(header, self._keys) if self._keys else None

    def owner_of(self, headers: Mapping[str, str]) -> bytes:
        """Whose a request is: a digest of its key, and the same for all where the server has no keys."""
        key = _key_of(headers.get("authorization")) if self._keys else None
        return hashlib.sha256(key or b"").digest()

    def _read(self) -> tuple[str, ...]:
        settings = self._settings
        if settings.api_key_file is None:
            return settings.api_key
        try:
            lines = Path(settings.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ParameterError(
                "api_key_file", f"{settings.api_key_file} cannot be read: {reason}"
            ) from error
        words = [line.strip() for line in lines]
        keys = [word for word in words if word and not word.startswith(COMMENT)]
        require(bool(keys), "api_key_file", f"{settings.api_key_file} holds no key; write one a line")
        check_keys(keys, "api_key_file", is_public=settings.is_public)
        return (*settings.api_key, *keys)


def _number_of(header: str | None, keys: tuple[str, ...]) -> int:
    """Which of the keys is brought; each is compared, in constant time."""
    brought = _key_of(header)
    matches = [hmac.compare_digest(brought or b"", key.encode()) for key in keys]
    if brought is None or not any(matches):
        raise ApiError(
            401,
            "bring a valid key as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return matches.index(True)


def _key_of(header: str | None) -> bytes | None:
    scheme, _, key = (header or "").partition(" ")
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else None  # as it came
