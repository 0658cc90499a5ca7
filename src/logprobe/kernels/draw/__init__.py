"""Sample tokens from logits: temperature, truncation (top-k, top-p, min-p) and inverse-CDF sampling."""
