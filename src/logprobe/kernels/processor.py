"""Sizes of a processor's memory that layouts go by."""

FLOAT = 4  # bytes
LINE = 64  # bytes of a cache line
