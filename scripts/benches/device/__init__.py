"""Benchmarks of kernels, and everything that waits for a GPU."""
