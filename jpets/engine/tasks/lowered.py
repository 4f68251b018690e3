"""A task in the form of an engine's backbone: its contributions to banks, independent of the engine's classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jpets.deltas.protocol import ClassKey, Contribution, Lead
from jpets.types import Task


@dataclass(frozen=True)
class LoweredTask:
    """Made once for an upload, by ``Serves.lower_task``, then checked, stored and added."""

    task: Task
    """The task as it was given."""
    folded: Task
    """The task in the form that its queries need."""
    parts: Sequence[Contribution]
    lead: Lead

    @property
    def classes(self) -> tuple[ClassKey, ...]:
        """The classes that it needs, each as small as it can be."""
        return tuple(part.key for part in self.parts)
