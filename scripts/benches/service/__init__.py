"""Benchmarks of a server."""
