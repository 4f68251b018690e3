"""``jpets key`` and ``jpets tenant``."""
