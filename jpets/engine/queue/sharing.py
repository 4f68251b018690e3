"""Finds the queries of a submission that ask several tasks about one text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from jpets.deltas.protocol import NO_LEAD
from jpets.engine.queue.pending import Pending, SharedText


def share_texts(pendings: Sequence[Pending], layers: int) -> None:
    """Gives queries of several tasks with the same tokens one ``SharedText``, if all of these tasks act above some
    layer. ``layers``: those of the backbone, which all are shared with the backbone itself."""
    if len({pending.resident for pending in pendings}) < 2:
        return
    groups = defaultdict[Hashable, list[tuple[Pending, int]]](list)
    for pending in pendings:
        first = layers if pending.resident is None else pending.resident.first_layer
        if first and not pending.cold and pending.row.lead is NO_LEAD:
            row = pending.row
            tokens = tuple(row.inputs[name].tobytes() for name in sorted(row.inputs))
            groups[tokens, None if row.places is None else row.places.tobytes()].append((pending, first))
    for own in groups.values():
        if len({pending.resident for pending, _ in own}) > 1:
            text = SharedText(min(first for _, first in own))
            for pending, _ in own:
                pending.text = text
