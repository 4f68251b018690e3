"""What a batch looks like: its shape, and its rows as arrays (pure numpy)."""
