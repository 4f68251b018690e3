"""Which queries share a batch."""
