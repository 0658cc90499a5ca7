"""A request's bytes → its typed body, or a 400 that names the field at fault.

Before it: the socket. After it: the routes.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from logprobe.server.http.errors import ApiError, bad_request

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

B = TypeVar("B", bound=msgspec.Struct)

_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")
_PLACE: Final = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")


async def read_body(request: HttpRequest, body_type: type[B], max_bytes: int) -> B:
    """Read and check one body.

    Raises:
        ApiError: 413 too large; 400 not JSON, an unknown field, a missing one, or a wrong type.
    """
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            message = f"the body is larger than {max_bytes} bytes; send less, or raise max_body_bytes"
            raise ApiError(413, message, code="body_too_large")
    return decode_body(bytes(data), body_type)


def decode_body(data: bytes, body_type: type[B]) -> B:
    """Check one body."""
    try:
        return msgspec.json.decode(data, type=body_type)
    except msgspec.ValidationError as error:
        raise _explained(str(error), body_type) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(None, f"the body is not JSON: {error}", code="invalid_json") from error


def _explained(message: str, body_type: type[msgspec.Struct]) -> ApiError:
    place = _PLACE.search(message)
    path = place[1] if place else ""
    message = _PLACE.sub("", message)
    if unknown := _UNKNOWN.search(message):
        name = f"{path}.{unknown[1]}".lstrip(".")
        near = get_close_matches(unknown[1], body_type.__struct_fields__, n=1, cutoff=0.6)
        remedy = f"; did you mean {near[0]!r}?" if near and not path else ""
        return bad_request(name, f"is no field of this route{remedy}", code="unknown_parameter")
    if missing := _MISSING.search(message):
        name = f"{path}.{missing[1]}".lstrip(".")
        return bad_request(name, "is missing", code="missing_required_parameter")
    return bad_request(path or None, _lowered(message))


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]
