"""Read and decode request bodies; an invalid body is rejected with a 400 that names the field."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect

from logprobe.engine.forward.process_memory import return_freed_of_thread
from logprobe.errors import ParameterError, shortened
from logprobe.server.http.errors import ApiError, ClientGoneError, bad_request, drop_tracebacks
from logprobe.server.http.gate import CALL
from logprobe.server.http.workers import QUICK_BYTES, is_bounded
from logprobe.server.limits import NoRoomError, check_body, check_values
from logprobe.server.openai.bodies import NESTED
from logprobe.server.openai.ignored_fields import (
    fields_without_effect,
    remedy_for,
    unknown_field,
    without_unknown,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.requests import Request as HttpRequest

    from logprobe.server.service import Service
    from logprobe.server.settings import ServerSettings

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")

LARGE_BYTES: Final = 1 << 18
"""Above this body size, the memory that decoding took (a multiple of the size) is returned to the system."""

BODY: Final = "logprobe.body"  # key in the request's scope of a body that was read before the route ran
_UNKNOWN: Final = re.compile(r"unknown field `([^`]*)`")
_MISSING: Final = re.compile(r"missing required field `([^`]*)`")
_ITEM: Final = re.compile(r"\[[^\]]*\]")  # list index in a path
_PATH: Final = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")


async def read(
    request: HttpRequest, service: Service, body_type: type[B], prepare: Callable[[B, Service], T]
) -> T:
    """Decode a request's body, call `prepare(body, service)`, and return the result.

    While the server is full, the request waits with only the body's bytes in memory; after the wait, they are
    decoded again.

    Raises:
        ApiError: 415 (wrong media type, or compressed), 413 (body too large), 408 (body too slow), 400
            (invalid JSON; an unknown, missing or mistyped field; or a limit exceeded), 429 (server full) or
            503 (server or engine stopped while the request waited).
        ClientGoneError: the client disconnected.
    """
    check_media_type(request.headers.get("content-type"))
    check_encoding(request.headers.getlist("content-encoding"))
    data = await read_bytes(request, service.settings)

    def read_large() -> T:
        try:
            return prepare(_decode_checked(data, body_type, service), service)
        except (ApiError, ParameterError) as error:
            drop_tracebacks(error)  # their frames refer to the decoded body, whose memory is returned below
            raise
        finally:
            if len(data) > LARGE_BYTES:
                return_freed_of_thread()

    while True:
        try:
            if len(data) > QUICK_BYTES:
                return await service.workers.read(read_large, len(data), service.caller)
            body = _decode_checked(data, body_type, service)
            num_bytes = len(data) if is_bounded(body) and service.renders_quickly(body) else None
            return await service.workers.read(partial(prepare, body, service), num_bytes, service.caller)
        except NoRoomError as error:
            if service.has_waited or not service.settings.max_waiting:
                raise
            drop_tracebacks(error)
            cost, body = error.cost, None
        await service.wait_for_room(cost, request.receive)


def check_media_type(media_type: str | None) -> None:
    """Reject media types other than JSON, because web pages can send others without a CORS preflight.

    Raises:
        ApiError: 415 if the media type is not application/json.
    """
    if (media_type or "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the Content-Type must be application/json", code="unsupported_media_type")


def check_encoding(values: Sequence[str]) -> None:
    """Reject a compressed body, given the values of its Content-Encoding headers.

    Raises:
        ApiError: 415 if an encoding is not `identity`.
    """
    encodings = {name.strip().lower() for value in values for name in value.split(",")}
    if not encodings <= {"", "identity"}:
        name = shortened(", ".join(values))
        message = f"Content-Encoding: {name!r} is not supported; send the body uncompressed"
        headers = {"Accept-Encoding": "identity"}
        raise ApiError(415, message, code="unsupported_content_encoding", headers=headers)


async def read_bytes(request: HttpRequest, settings: ServerSettings) -> bytes:
    """Return the bytes of a request's body; they may have been read already to choose the model.

    Raises:
        ApiError: 413 if the body is too large, or 408 if it arrives too slowly.
        ClientGoneError: the client disconnected before the end of the body.
    """
    if BODY in request.scope:
        kept: bytes = request.scope.pop(BODY)  # drop the reference: it may be large
        return kept
    data = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                data += chunk
                if len(data) > settings.max_body_bytes:
                    most = settings.max_body_bytes
                    message = f"the body is larger than {most} bytes; shorten it or raise max_body_bytes"
                    raise ApiError(413, message, code="body_too_large")
    except TimeoutError as error:
        message = (
            f"the body did not arrive within {settings.body_timeout_s} s (body_timeout_s); send it "
            "faster or shorten it"
        )
        raise ApiError(408, message, code="body_too_slow", headers={"Connection": "close"}) from error
    except ClientDisconnect as error:
        raise ClientGoneError from error
    finally:
        request.scope[CALL].has_large_body = len(data) > LARGE_BYTES
    return bytes(data)


def _decode_checked(data: bytes, body_type: type[B], service: Service) -> B:
    check_values(service.settings, data)
    body, service.call.ignored_fields = decode_body(data, body_type, is_strict=service.settings.strict_fields)
    check_body(service.settings, body)
    service.call.without_effect = fields_without_effect(body, partial(service.template_variables, body))
    return body


def decode_body(data: bytes, body_type: type[B], *, is_strict: bool = False) -> tuple[B, list[str]]:
    """Decode a body, and return it with the paths of the unknown fields that were ignored.

    Raises:
        ApiError: 400 if the body is invalid, has an unknown field that must not be ignored, or has any
            unknown field and `is_strict` is set.
    """
    try:
        try:
            return msgspec.json.decode(data, type=body_type), []
        except msgspec.ValidationError as error:
            if is_strict or not _UNKNOWN.search(str(error)):
                raise
        known, ignored = without_unknown(data, body_type)
        return msgspec.json.decode(known, type=body_type), ignored
    except msgspec.ValidationError as error:
        raise _as_api_error(str(error), body_type) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(None, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _as_api_error(message: str, body_type: type[msgspec.Struct]) -> ApiError:
    match = _PATH.search(message)
    path = match[1] if match else ""
    message = _PATH.sub("", message)
    if unknown := _UNKNOWN.search(message):
        name = f"{path}.{unknown[1]}".lstrip(".")
        outer = _ITEM.sub("", path)
        known = NESTED[outer].__struct_fields__ if outer in NESTED else body_type.__struct_fields__
        return unknown_field(name, remedy_for(f"{outer}.{unknown[1]}".lstrip("."), unknown[1], known))
    if missing := _MISSING.search(message):
        name = f"{path}.{missing[1]}".lstrip(".")
        return bad_request(name, "is missing", code="missing_required_parameter")
    return bad_request(path or None, _lowered(message))


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]
