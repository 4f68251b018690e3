"""``jpets doctor``."""
