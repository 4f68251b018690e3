"""A task as an engine's backbone sees it: what it puts into banks, whatever classes there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jpets.deltas.protocol import ClassKey, Contribution, Lead
from jpets.types import Task


@dataclass(frozen=True)
class LoweredTask:
    """Made once for an upload, by ``Serves.lower_task``, then checked, stored and added."""

    task: Task
    """As it was given."""
    folded: Task
    """As its queries have to know it."""
    parts: Sequence[Contribution]
    lead: Lead

    @property
    def classes(self) -> tuple[ClassKey, ...]:
        """Each as small as it can be."""
        return tuple(part.key for part in self.parts)
