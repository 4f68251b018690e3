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
    students: Sequence[LoweredTask] = ()
    """Those of a group, which has no contributions of its own."""

    @property
    def classes(self) -> tuple[ClassKey, ...]:
        """The classes that it needs, each as small as it can be, and as often as it needs a slot of it."""
        return (*(part.key for part in self.parts), *(key for one in self.students for key in one.classes))
