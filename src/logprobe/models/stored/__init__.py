"""Files that loading a model stores in the cache for later loads: packed weights, verification records."""
