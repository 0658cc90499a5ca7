"""Runs models of transformers, and the families of `families` on an NVIDIA GPU, with torch tensors."""
