"""Which candidate computes each operator: tried out on the user's device at the first start, and kept."""
