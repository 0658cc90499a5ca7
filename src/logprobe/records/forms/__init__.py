"""Serialized and display forms of a record: bytes, Arrow, JSON, HTML, plots."""
