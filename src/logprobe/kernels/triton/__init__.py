"""Kernels of a decoder on NVIDIA GPUs, written in Triton; `reference` has their twins in PyTorch."""
