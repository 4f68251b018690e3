"""What batches, operators and memory cost."""
