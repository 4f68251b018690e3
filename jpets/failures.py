"""Failures of JAX and of memory that a user can do something about, in one line."""

from __future__ import annotations

import os
import traceback

from jpets.errors import EngineFailure, JpetsError, OutOfSpace, one_line

TELLING = (RuntimeError, MemoryError, AssertionError)
"""What JAX and the host raise of these."""
NO_ROOM = "RESOURCE_EXHAUSTED"
"""What XLA's errors say where a device has no memory left."""
ROOM = "ask for less (--slots, --max-batch-tokens, --device-memory-gb, --batch), or end what else takes it"
UNKNOWN = ("is not in the list of known backends", "Unknown backend")
BACKENDS = "xla_bridge.py"
"""JAX's module that looks for devices. Where it finds none it may fail by an assertion without words."""


def as_told(error: Exception) -> JpetsError | None:
    """What a command says of an error that is none of ours; None where it is a fault of the program."""
    if isinstance(error, JpetsError):
        return error
    if isinstance(error, MemoryError):
        return OutOfSpace(f"the host has no memory left for this; {ROOM}")
    if isinstance(error, RuntimeError) and NO_ROOM in str(error):
        return OutOfSpace(f"the device has no memory left for this; {ROOM}")
    if _of_backends(error):
        asked = os.environ.get("JAX_PLATFORMS", "")
        why = one_line(error) if str(error) else f"none of {asked}"
        return EngineFailure(
            f"JAX finds no device ({why.rstrip('.')}); JAX_PLATFORMS, or --job-platform of a job, says where it looks"
        )
    return None


def problem_of(error: Exception) -> Exception | None:
    """What a command ends with in one line; None where it is a fault of the program."""
    return error if isinstance(error, OSError) else as_told(error)


def no_such_platform(error: Exception) -> bool:
    """Whether JAX was told to look for devices of a kind that it knows nothing of: that will never be otherwise."""
    unknown = isinstance(error, AssertionError) or any(part in str(error) for part in UNKNOWN)
    return _of_backends(error) and unknown


def _of_backends(error: Exception) -> bool:
    """Whether JAX found no device."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, TELLING) and bool(frames) and frames[-1].filename.endswith(BACKENDS)
