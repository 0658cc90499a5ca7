"""Logits → the token that is drawn: temperature, truncation and the inverse of the distribution."""
