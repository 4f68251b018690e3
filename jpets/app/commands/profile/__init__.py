"""``jpets profile``."""
