"""``jpets repository``."""
