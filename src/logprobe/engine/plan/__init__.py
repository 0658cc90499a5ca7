"""Scheduling: which tokens run in the next step, and in which KV cache slots."""
