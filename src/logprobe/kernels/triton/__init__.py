"""Triton kernels of the decoder for NVIDIA GPUs; `reference` has PyTorch versions for comparison."""
