"""What an import found, before it is a task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from checkpoints.backbone import Backbone
from jpets.types import Delta, Head, Preprocessing

PLAIN = Preprocessing()


@dataclasses.dataclass(frozen=True)
class Imported:
    """``notes`` are for the user: what the checkpoint says that could not be checked, or does not say."""

    deltas: tuple[Delta, ...]
    head: Head
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    preprocessing: Preprocessing = PLAIN


def revision_of(settings: Mapping[str, Any]) -> str | None:
    """The revision of the base model that PEFT was given; None for the newest."""
    found = settings.get("revision")
    return found if isinstance(found, str) and found not in ("", "main") else None


def notes_on_base(base: object, backbone: Backbone, revision: str | None = None) -> tuple[str, ...]:
    """A checkpoint names its base model, and no more: whether the backbone holds the same weights cannot be checked."""
    if not isinstance(base, str) or not base or (PurePath(base).name == backbone.name and revision is None):
        return ()
    which = repr(PurePath(base).name) if revision is None else f"revision {revision!r} of {PurePath(base).name!r}"
    return (f"it was trained on {which}; {backbone.name!r} must hold the same weights",)
