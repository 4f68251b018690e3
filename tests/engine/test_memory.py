"""What the garbage collector looks at."""

from __future__ import annotations

import gc

from jpets.engine.memory import freeze_heap


def test_a_frozen_heap_is_left_out_of_full_collections() -> None:
    marker = [[number] for number in range(1000)]
    freeze_heap()
    try:
        assert all(entry is not marker for entry in gc.get_objects(generation=2))
        assert gc.get_freeze_count() >= len(marker)
    finally:
        gc.unfreeze()
