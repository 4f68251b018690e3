"""The commands of ``jpets``. This package is wiring: it may import ``checkpoints``, and never ``serving``."""
