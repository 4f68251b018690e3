"""Batch assembly, buckets, executables, the host loop and the engine."""
