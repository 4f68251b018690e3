"""What an import found, before it is a task."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath

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


def notes_on_base(base: object, backbone: Backbone) -> tuple[str, ...]:
    """A checkpoint names its base model, and no more: whether the backbone holds the same weights cannot be checked."""
    if not isinstance(base, str) or not base or PurePath(base).name == backbone.name:
        return ()
    return (f"it was trained on {PurePath(base).name!r}; {backbone.name!r} must hold the same weights",)
