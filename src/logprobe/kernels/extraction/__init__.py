"""Logits → the numbers of each row: log-normaliser, chosen token, rank, top-k, entropy, given ids."""
