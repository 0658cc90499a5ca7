"""What a compact record says of itself before its columns: where each lies, and the scalars of each store."""

from __future__ import annotations

from typing import Literal

import msgspec


class ColumnHeader(msgspec.Struct, frozen=True):
    """Where one column lies: bytes from the end of the header, NumPy type string, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class StoreHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The scalars of one store."""

    form: Literal["top", "ragged"]
    num_rows: int
    num_none: int = 0
    k: int = 0
    repeats_chosen: bool = False
    texts: list[str | None] = []
