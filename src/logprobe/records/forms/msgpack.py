"""A record inside MessagePack: msgspec's hooks, which put its bytes there and read them back.

Before it: `FlatLogprobs`. After it: message queues and files of the caller's own.
"""

from __future__ import annotations

from typing import Any

from logprobe.records.flat import FlatLogprobs


def encode_hook(value: object) -> bytes:
    """`enc_hook` for msgspec: a record becomes its bytes.

    Raises:
        TypeError: no record.
    """
    if isinstance(value, FlatLogprobs):
        return value.to_bytes()
    raise TypeError(f"{type(value).__name__} has no form as bytes")


def decode_hook(kind: type, value: Any) -> FlatLogprobs:
    """`dec_hook` for msgspec: bytes become a record again.

    Raises:
        TypeError: another type is asked for.
    """
    if kind is FlatLogprobs:
        return FlatLogprobs.from_bytes(value)
    raise TypeError(f"{kind.__name__} has no form as bytes")
