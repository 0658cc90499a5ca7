"""Memory of a record: blocks of rows, texts, and what stands beside the rows."""
