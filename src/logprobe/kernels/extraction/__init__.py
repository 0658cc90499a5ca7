"""Computes log-probabilities, ranks, top-k, entropy and other columns for each row of logits."""
