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
    max_bodies_bytes: int = 64 * MIB
    """Of JSON bodies in memory at a time; one alone may be larger."""
    max_task_bytes: int = 512 * MIB
    """Largest task file."""
    max_data_bytes: int = 512 * MIB
    """Largest file of labelled texts to train on."""
    upload_folder: Path | None = None
    """Where uploads lie until they are checked; the system's folder for temporary files by default."""


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """What a client may take of the server by connections alone."""

    most: int = 1024
    """Open connections."""
    keep_alive: int = 75
    """An idle one is closed then; balancers commonly keep theirs for 60 seconds."""
    header_bytes: int = 64 << 10
    """Of a request, its first line included."""
    header_seconds: float = 20.0
    """From the first byte of a request, or the opening of a connection, to the end of the headers."""
    least_rate: float = 1000.0
    """Bytes a second of a body that comes, or of an answer that goes, in any ``rate_seconds``."""
    rate_seconds: float = 20.0
    linger_seconds: float = 10.0
    """How long a client may go on sending what was answered already."""
    look_seconds: float = 1.0
    """Between two looks at all of them."""
