"""Who asks: keys, what they allow, and how much."""
