"""``jpets run``."""
