"""Queries that wait for their tasks to come to the device."""

from __future__ import annotations

from jpets.engine.queue.backlog import Backlogs
from jpets.engine.queue.pending import Pending
from jpets.engine.tasks.entries import Entry


class ColdBacklogs(Backlogs):
    """Backlogs that also find queries by their absent tasks."""

    def __init__(self) -> None:
        super().__init__()
        self._by_task: dict[Entry, dict[int, Pending]] = {}

    def add(self, pending: Pending) -> None:
        assert pending.absent is not None
        super().add(pending)
        self._by_task.setdefault(pending.absent, {})[pending.number] = pending

    def remove(self, pending: Pending) -> None:
        assert pending.absent is not None
        super().remove(pending)
        own = self._by_task[pending.absent]
        del own[pending.number]
        if not own:
            del self._by_task[pending.absent]

    def absent(self, count: int) -> dict[Entry, float]:
        """Up to ``count`` tasks, the most urgent first, each with the time since which its most urgent query has
        waited."""
        found: dict[Entry, float] = {}
        for pending in self.ordered():
            assert pending.absent is not None
            if pending.absent not in found:
                found[pending.absent] = pending.arrived
                if len(found) == count:
                    break
        return found

    def waiting_for(self, entry: Entry) -> list[Pending]:
        """The waiting queries of a task."""
        return list(self._by_task.get(entry, {}).values())

    def clear(self) -> None:
        super().clear()
        self._by_task.clear()
