"""``jpets task``."""
