"""The limits of the front end on requests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class ServingSettings:
    """Times are seconds, sizes are bytes."""

    request_timeout: float = 60.0
    """Deadline of a request that gives none."""
    longest_timeout: float = 3600.0
    max_inputs: int = 1024
    """Most texts, or rows of token ids, in one request."""
    max_body_bytes: int = 2 * MIB
    """Largest JSON body, unpacked."""
    max_bodies_bytes: int = 64 * MIB
    """Most bytes of JSON bodies in memory at a time; a single one may be larger."""
    max_task_bytes: int = 512 * MIB
    """Largest task file."""
    max_data_bytes: int = 512 * MIB
    """Largest file of labelled texts to train on."""
    local: bool = False
    """Only this machine reaches the server, and it was not told that others may come."""
    default_task: str | None = None
    """The task of ``POST /classify`` where none is named."""
    upload_folder: Path | None = None
    """Where uploads lie until they are checked; the system's folder for temporary files by default."""


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """What a client may take of the server merely by its connections."""

    most: int = 1024
    """Open connections."""
    keep_alive: int = 75
    """How long a connection may be idle before it is closed; balancers commonly keep theirs for 60 seconds."""
    header_bytes: int = 64 << 10
    """Most bytes of a request's headers, its first line included."""
    header_seconds: float = 20.0
    """Longest time from the first byte of a request, or the opening of a connection, to the end of the headers."""
    least_rate: float = 1000.0
    """Least bytes a second of a body that comes, or of an answer that goes, in any ``rate_seconds``."""
    rate_seconds: float = 20.0
    linger_seconds: float = 10.0
    """How long a client may go on sending a request that was answered already."""
    look_seconds: float = 1.0
    """Time between two checks of all connections."""
