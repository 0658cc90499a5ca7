"""Runs the families of `families` on a CPU with the native kernels; arrays are NumPy."""
