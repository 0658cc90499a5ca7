"""Decoders that use torch: transformers models, and the families of `families` on an NVIDIA GPU."""
