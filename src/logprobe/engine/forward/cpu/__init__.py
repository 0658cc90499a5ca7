"""Runs the model families of `families` on a CPU, with the native kernels and NumPy arrays."""
