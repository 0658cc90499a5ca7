"""API keys of clients and operators, sent as `Authorization: Bearer KEY`."""

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

COMMENT: Final = "#"  # begins a comment line of a key file


class OperatorKeys:
    """Keys for the operator routes; if there are no keys, these routes are disabled."""

    def __init__(self, settings: ServerSettings) -> None:
        self._keys = settings.operator_key

    def check(self, header: str | None) -> int:
        """Return the index of the key in an `Authorization` header.

        Raises:
            ApiError: 401 if the key is missing or invalid, or 403 if the server has no operator keys.
        """
        if not self._keys:
            message = "operator routes are disabled; start the server with --operator-key to enable them"
            raise ApiError(403, message, code="no_operator_key")
        return _number_of(header, self._keys)


class Keys:
    """API keys of clients; thread-safe."""

    def __init__(self, settings: ServerSettings) -> None:
        """Read the keys from the settings and the key file.

        Raises:
            ParameterError: the key file cannot be read, has no keys, or has a key that is too short.
        """
        self._settings = settings
        self._keys = self._read()

    def reload(self) -> int:
        """Read the key file again and return the number of keys; if this fails, the old keys stay valid.

        Raises:
            ParameterError: the key file cannot be read, has no keys, or has a key that is too short.
        """
        self._keys = self._read()
        return len(self._keys)

    def check(self, header: str | None) -> int | None:
        """Return the index of the key in an `Authorization` header, or None if the server has no keys.

        Raises:
            ApiError: 401 if the key is missing or invalid.
        """
        return _number_of(header, self._keys) if self._keys else None

    def owner_of(self, headers: Mapping[str, str]) -> bytes:
        """Return the owner of a request: a digest of its key, or a constant if the server has no keys."""
        key = _key_of(headers.get("authorization")) if self._keys else None
        return hashlib.sha256(key or b"").digest()

    def _read(self) -> tuple[str, ...]:
        settings = self._settings
        if settings.api_key_file is None:
            return settings.api_key
        try:
            lines = Path(settings.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ParameterError("api_key_file", f"cannot read {settings.api_key_file}: {reason}") from error
        words = [line.strip() for line in lines]
        keys = [word for word in words if word and not word.startswith(COMMENT)]
        require(bool(keys), "api_key_file", f"{settings.api_key_file} has no keys; write one per line")
        check_keys(keys, "api_key_file", is_public=settings.is_public)
        return (*settings.api_key, *keys)


def _number_of(header: str | None, keys: tuple[str, ...]) -> int:
    """Return the index in `keys` of the header's key, comparing with all keys in constant time.

    Raises ApiError (401) if the key is missing or invalid.
    """
    brought = _key_of(header)
    matches = [hmac.compare_digest(brought or b"", key.encode("ascii")) for key in keys]
    if brought is None or not any(matches):
        raise ApiError(
            401,
            "the API key is missing or invalid; send a valid one as `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return matches.index(True)


def _key_of(header: str | None) -> bytes | None:
    scheme, _, key = (header or "").partition(" ")
    return key.strip().encode() if scheme.lower() == "bearer" else None
