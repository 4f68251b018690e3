"""Names of fields that changed stay readable for one release."""

from __future__ import annotations

from jpets.types import Timing


def test_a_timing_names_its_program_by_the_former_name_too() -> None:
    timing = Timing(queued=0.0, computed=0.0, bucket="8x32", program="8x32 full", fallback=False)
    assert timing.executable == timing.program == "8x32 full"
