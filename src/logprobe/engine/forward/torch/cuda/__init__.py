"""The decoder for NVIDIA GPUs: PyTorch, and the Triton kernels of `logprobe.kernels.triton`."""
