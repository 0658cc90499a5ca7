"""Attention over the slots of the key/value pool: rows that read it in place, and chunks of prompts."""
