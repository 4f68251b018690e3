"""The policy ``steady``: a query's length and kind alone choose its program."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jpets.engine.batch.layout import Layout
from jpets.engine.batch.row_table import RowTable
from jpets.engine.planning.plan import Plan
from jpets.engine.planning.ready_programs import Takers
from jpets.engine.programs.program import Program
from jpets.engine.queue.pending import Pending
from jpets.errors import EngineFailure


def steady_plan(
    waiting: Sequence[Pending], takers: Callable[[bool], Takers], predicted: Callable[[RowTable, Program], float]
) -> Plan:
    """The most urgent query's own program, filled with other queries of the same own program. ``takers`` are the ready
    programs, with or without heavy classes; ``predicted`` is the time of rows in a program."""
    kinds = [(pending.row.length, pending.row.heavy) for pending in waiting]
    own = {(length, heavy): own_program(length, takers(heavy)) for length, heavy in dict.fromkeys(kinds)}
    program = own[kinds[0]]
    same = [pending for pending, kind in zip(waiting, kinds, strict=True) if own[kind] is program]
    taken = same[: program.key.bucket.rows]
    layout = Layout([pending.row for pending in taken], program.key.bucket)
    return Plan(taken, layout, program, predicted(layout.table, program))


def steady_part(
    pendings: Sequence[Pending], takers: Callable[[bool], Takers], predicted: Callable[[RowTable, Program], float]
) -> Plan:
    """The plan of queries that were together in a steady plan, some of which are gone: in the same program."""
    rows = [pending.row for pending in pendings]
    program = own_program(max(row.length for row in rows), takers(any(row.heavy for row in rows)))
    layout = Layout(rows, program.key.bucket)
    return Plan(pendings, layout, program, predicted(layout.table, program))


def own_program(length: int, takers: Takers) -> Program:
    """Of the programs for any mixture the one with the shortest rows that fit, without heavy classes if possible. Costs
    play no part: every start measures them anew."""
    fitting = [
        program for bucket, own in takers.items() if bucket.rectangular and bucket.longest >= length for program in own
    ]
    if not fitting:
        raise EngineFailure(f"no ready program has rows of {length} tokens; the policy needs rectangular buckets")
    return min(fitting, key=lambda each: (each.key.bucket.longest, each.key.variant.has("heavy"), str(each.key)))
