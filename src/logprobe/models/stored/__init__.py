"""Files that a load stores in the cache for later loads: packed weights, verification records, tokenizers."""
