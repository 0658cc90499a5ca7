"""CPU attention over the KV cache, read in place: single query rows, and prompt chunks."""
