"""``jpets train``."""
