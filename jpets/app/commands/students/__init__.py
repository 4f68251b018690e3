"""``jpets students``."""
