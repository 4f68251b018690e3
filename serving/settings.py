"""How the front end bounds its requests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class ServingSettings:
    """Times are seconds, sizes are bytes."""

    request_timeout: float = 60.0
    """Deadline of a request that names none."""
    longest_timeout: float = 3600.0
    max_inputs: int = 1024
    """Most texts, or rows of token ids, in one request."""
    max_body_bytes: int = 2 * MIB
    """Largest JSON body, unpacked."""
    max_task_bytes: int = 512 * MIB
    """Largest task file."""
    max_data_bytes: int = 512 * MIB
    """Largest file of labelled texts to train on."""
    upload_folder: Path | None = None
    """Where uploads lie until they are checked; the system's folder for temporary files by default."""
