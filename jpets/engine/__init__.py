"""Batch assembly, buckets, programs, the host loop and the engine."""
