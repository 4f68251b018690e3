"""The set-up of a process that trains."""

from __future__ import annotations

import logging

from jpets.free_memory import keep_freed_memory
from jpets.xla_flags import set_xla_flags


def set_up_training() -> None:
    """The same settings of XLA as in a server, and an allocator that keeps an update's memory for the next one.

    Entry points call it before they touch JAX.
    """
    set_xla_flags()
    keep_freed_memory()
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax logs what it raises, with tracebacks
