"""Files that say by their last bytes whether they are whole: what a killed run left is looked at before it is used."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jpets.files import write_atomic

DIGEST_BYTES = hashlib.sha256().digest_size


def write_sealed(path: Path, arrays: Sequence[np.ndarray]) -> None:
    """Writes the bytes of arrays, one after the other, and their SHA-256. Raises ``OutOfSpace``; then ``path`` is as it
    was."""
    parts, digest = [array.tobytes() for array in arrays], hashlib.sha256()
    for part in parts:
        digest.update(part)
    write_atomic(path, b"".join([*parts, digest.digest()]))


def read_sealed(path: Path) -> memoryview | None:
    """The bytes of the arrays that ``write_sealed`` wrote; None where the file is missing or damaged."""
    try:
        content = memoryview(path.read_bytes())
    except FileNotFoundError:
        return None
    whole, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return whole if hashlib.sha256(whole).digest() == digest else None
