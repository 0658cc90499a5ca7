"""Extract log-normaliser, chosen token, rank, top-k, entropy and given ids from each row of logits."""
