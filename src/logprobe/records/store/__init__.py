"""In-memory storage of a record: blocks of rows, texts, and optional per-position columns."""
