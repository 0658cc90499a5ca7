"""Sizes in bytes that memory layouts depend on."""

FLOAT = 4  # bytes
LINE = 64  # bytes of a cache line
