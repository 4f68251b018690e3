"""Which part of a batch runs on a hot task's merged copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jpets.engine.batch.rows import Row
from jpets.engine.programs.network import Params
from jpets.engine.queue.pending import Pending
from jpets.engine.tasks.entries import Resident
from jpets.scheduling.costs.shape import Shape
from jpets.scheduling.policies.hot import worth_taking_out


class Part(NamedTuple):
    """Queries of a batch that run together, on the weights of ``copy`` if there is one.

    ``saves``: seconds that copies of these tasks would save, or do save.
    """

    pendings: Sequence[Pending]
    copy: Params | None
    saves: Mapping[Resident, float]


def part_to_run(
    batch: Sequence[Pending],
    first: Pending,
    copies: Mapping[Resident, Params],
    added: Callable[[Sequence[Row]], float],
    light: Sequence[Shape],
    shapes: Sequence[Shape],
) -> Part:
    """``batch``, or, if hot tasks run faster on merged copies, the part of it that has ``first``.

    ``added`` predicts the cost of heavy rows. ``light`` shapes take queries without heavy deltas, ``shapes`` take all.
    """
    owners = [pending.resident if pending.row.heavy else None for pending in batch]
    rows: dict[Resident, list[Row]] = {}
    for pending, owner in zip(batch, owners, strict=True):
        if owner is not None:
            rows.setdefault(owner, []).append(pending.row)
    seconds = {owner: added(own) for owner, own in rows.items()}
    lengths = [pending.row.length for pending in batch]
    would_save = worth_taking_out(owners, lengths, seconds, light, shapes)
    held = {owner: cost for owner, cost in seconds.items() if owner in copies}
    apart = worth_taking_out(owners, lengths, held, light, shapes)
    mine = first.resident if first.resident in apart else None
    if mine is not None:
        part, copy = [p for p in batch if p.resident is mine], copies[mine]
    else:
        part, copy = [p for p in batch if p.resident not in apart], None
    running = {pending.resident for pending in part}
    return Part(part, copy, {owner: saved for owner, saved in would_save.items() if owner in running})
