"""Format versions of files, and the error for a version that is not supported (docs/versioning.md).

A Parquet file states its format in the schema's metadata: `logprobe.format` is `records/1`. The other formats
have a `version` in a JSON object. A Parquet file without `logprobe.format` was written by another program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

from logprobe.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

ParquetFormat: TypeAlias = Literal["records", "rollouts", "dataset", "distillation", "activations"]

FORMAT_KEY: Final = b"logprobe.format"
PARQUET_VERSION: Final[dict[ParquetFormat, int]] = {
    "records": 1,
    "rollouts": 1,
    "dataset": 1,
    "distillation": 1,
    "activations": 1,
}


class Versioned(msgspec.Struct, frozen=True):
    """The one field that every version of a format with a JSON header has."""

    version: int


def check_version(version: object, supported: int, source: object) -> None:
    """Check the format version that a file states.

    Raises:
        InputError: it is not `supported`; the message names `source` and both versions.
    """
    if version == supported:
        return
    is_newer = isinstance(version, int) and version > supported
    remedy = "upgrade logprobe" if is_newer else "write the file again"
    raise InputError(
        f"{source}: has format version {version!r:.60}, but only version {supported} is supported; {remedy}"
    )


def parquet_metadata(kind: ParquetFormat) -> dict[bytes, bytes]:
    """Return the schema metadata that states the format of a Parquet file."""
    return {FORMAT_KEY: f"{kind}/{PARQUET_VERSION[kind]}".encode()}


def check_parquet(metadata: Mapping[bytes, bytes] | None, source: object) -> None:
    """Check the format that the schema metadata of a Parquet file or Arrow batch states, if any.

    Raises:
        InputError: the format is not known, or its version is not supported.
    """
    stated: Any = (metadata or {}).get(FORMAT_KEY)
    if stated is None:
        return
    kind, _, number = stated.decode(errors="replace").partition("/")
    if kind not in PARQUET_VERSION:
        raise InputError(f"{source}: unknown format {kind!r:.60}; upgrade logprobe")
    version = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else number
    check_version(version, PARQUET_VERSION[kind], source)
