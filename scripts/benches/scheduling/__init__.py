"""Benchmarks of plans and of devices that share tasks."""
