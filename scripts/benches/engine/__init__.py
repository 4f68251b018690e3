"""Benchmarks of an engine on one device."""
