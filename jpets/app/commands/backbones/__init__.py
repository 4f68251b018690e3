"""``jpets backbone``."""
