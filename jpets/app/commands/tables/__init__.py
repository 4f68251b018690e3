"""``jpets plot``."""
