"""Cost profiles in files."""

from __future__ import annotations

import hashlib
import json
import pathlib

from jpets.scheduling.costs.measured_profile import CostProfile


def digest_of_file(path: pathlib.Path) -> str:
    """What tells a profile from others of its name."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def load_profile(path: pathlib.Path) -> CostProfile:
    """What a benchmark kept, or what ``jpets profile --json`` wrote. Raises ``ValueError``."""
    document = json.loads(path.read_text())
    return CostProfile.from_json(json.dumps(document.get("profile", document)))
