"""What a load leaves in the cache for the next one: panels of weights, and what was proven of a model."""
