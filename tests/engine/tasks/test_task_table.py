"""The table of tasks against a model: slots are never lost or given out twice, as tasks come and go."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpets.deltas.protocol import ClassKey
from jpets.engine.tasks.entries import Entry, Resident
from jpets.engine.tasks.table import TaskTable
from jpets.errors import NotFound, OutOfSpace
from jpets.types import BackboneRef, Head, Task

A, B = ClassKey("adapter", (("after_ffn_out", 8),), (0,)), ClassKey("lora", (("query", 4),), (0,))
SLOTS = {A: 4, B: 3}
"""Slot 0 of each is never given out."""
REF = BackboneRef("b", "sha256:0", "bert", 8, 1)


def task(name: str) -> Task:
    return Task(name, REF, (), Head("embedding"))


def bring(table: TaskTable, entry: Entry, keys: tuple[ClassKey, ...], turn: int | None = None) -> Resident | None:
    """The steps of residency for a loaded task; None if there was no slot or the task was replaced meanwhile."""
    try:
        slots = table.slots.reserve(keys, entry.tenant)
    except OutOfSpace:
        return None
    resident = Resident(entry.tenant, task(entry.task), slots, "cls", 8, entry=entry)
    return resident if table.bring(resident, entry.turn if turn is None else turn) else None


def check(table: TaskTable, held: Counter[Resident]) -> None:
    every = {*table.all(), *(resident for resident, count in held.items() if count)}
    for key, slots in SLOTS.items():
        given = [resident.slots[key] for resident in every if key in resident.slots]
        assert len(given) == len(set(given)), "two tasks share a slot"
        assert sorted([*given, *table.slots.pools[key].free]) == list(range(1, slots))
        present = table.all()
        assert table.slots.pools[key].fixed == sum(key in r.slots and not r.pageable for r in present)
        assert table.slots.pools[key].leaving == sum(key in r.slots for r in every.difference(present))
        assert table.occupancy()[key] == (len(given), slots - 1)
        idle = {resident for _, resident in table.slots.pools[key].idle}
        assert idle == {r for r in table.all() if key in r.slots and not held[r] and r.pageable}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_slots_are_kept_whatever_comes_and_goes(data: st.DataObject) -> None:
    table, held = TaskTable(SLOTS, reserved={"t": 1}), Counter[Resident]()
    wanted = {f"task-{n}": keys for n, keys in enumerate(itertools.islice(itertools.cycle([(A,), (B,), (A, B)]), 8))}
    for _ in range(data.draw(st.integers(1, 40))):
        name = data.draw(st.sampled_from(sorted(wanted)))
        tenant = "t" if name in ("task-1", "task-4") else "u"
        step = data.draw(
            st.sampled_from(["register", "ask", "ask", "ask", "done", "done", "remove", "publish", "late"])
        )
        if step == "register":
            table.register(tenant, name, functools.partial(task, name), pinned=data.draw(st.booleans()))
        elif step in ("ask", "late"):
            try:
                found = table.acquire(tenant, name)
            except NotFound:
                continue
            if isinstance(found, Resident):
                held[found] += 1
            elif step == "late":
                assert bring(table, found, wanted[name], found.turn - 1) is None
            elif bring(table, found, wanted[name]) is not None:
                again = table.acquire(tenant, name)
                assert isinstance(again, Resident)
                held[again] += 1
        elif step == "done" and +held:
            resident = data.draw(st.sampled_from(list(+held)))
            table.done(resident)
            held[resident] -= 1
        elif step == "remove":
            try:
                table.remove(tenant, name)
            except NotFound:
                continue
        elif step == "publish":
            try:
                slots = table.slots.reserve(wanted[name], tenant)
            except OutOfSpace:
                continue
            table.publish(Resident(tenant, task(name), slots, "cls", 8))
        check(table, held)
    for resident, count in held.items():
        table.done(resident, count) if count else None
    check(table, Counter())


def test_a_task_that_costs_more_to_bring_stays_longer() -> None:
    table = TaskTable({A: 3})
    entries = [table.register("t", f"task-{n}", functools.partial(task, f"task-{n}")) for n in range(3)]
    for entry, cost in zip(entries, (20.0, 1.0, 1.0), strict=True):
        entry.cost = cost
    dear, cheap = (bring(table, entry, (A,)) for entry in entries[:2])
    assert dear is not None and cheap is not None
    for _ in range(3):
        assert bring(table, entries[2], (A,)) is not None
        assert dear in table.all() and cheap.removed
        cheap = bring(table, entries[1], (A,))
        assert cheap is not None and dear in table.all()
    for _ in range(12):  # a task without further queries leaves all the same, later
        bring(table, entries[2], (A,))
        bring(table, entries[1], (A,))
    assert dear.removed


def test_a_reservation_holds_against_others_alone() -> None:
    table = TaskTable({A: 3}, reserved={"small": 1})
    own, other = (table.register("small", name, lambda: task("x")) for name in ("one", "two"))
    first, second = bring(table, own, (A,)), bring(table, other, (A,))
    assert first is not None and second is not None
    big = [table.register("big", f"big-{n}", lambda: task("x")) for n in range(2)]
    assert bring(table, big[0], (A,)) is not None and first.removed and not second.removed
    assert bring(table, big[1], (A,)) is not None and not second.removed


def test_what_others_have_reserved_will_not_be_free_for_a_tenant() -> None:
    table = TaskTable({A: 4}, reserved={"small": 2})
    kept = table.register("big", "kept", lambda: task("x"), pinned=True)
    for entry in (kept, *(table.register("small", name, lambda: task("x")) for name in ("one", "two"))):
        assert not table.slots.hopeless([A], "big")
        assert bring(table, entry, (A,)) is not None
    assert table.slots.hopeless([A], "big") and not table.slots.hopeless([A], "small")
    assert not table.slots.hopeless([A]), "some of them may leave for another task of their tenant"
    coming = TaskTable({A: 4}, reserved={"small": 2})
    for name in ("one", "two"):
        bring(coming, coming.register("small", name, lambda: task("x")), (A,))
    coming.slots.reserve((A,), "big")
    assert not coming.slots.hopeless([A], "big"), "one is on its way, and may leave"


def test_everything_in_use() -> None:
    table = TaskTable({A: 2})
    entry, other = (table.register("t", name, lambda: task("x")) for name in ("one", "two"))
    resident = bring(table, entry, (A,))
    assert resident is not None and table.hold(entry, 2) is resident
    with pytest.raises(OutOfSpace, match="no free slot"):
        table.slots.reserve((A,), "t")
    idle = []
    table.slots.on_idle = lambda: idle.append(True)
    table.done(resident)
    assert not idle
    table.done(resident)
    assert idle and bring(table, other, (A,)) is not None


def test_only_the_class_that_is_full_is_lacking() -> None:
    """A task of another one, which shares the class of its head with these, may come."""
    table = TaskTable(SLOTS)
    slots = table.slots
    assert slots.lacking([A, B], "default") == set()
    taken = [slots.reserve([B]) for _ in range(2)]
    assert slots.lacking([A, B], "default") == {B}
    slots.release(taken.pop())
    entry = table.register("default", "own", lambda: task("own"), keys=(B,))
    resident = bring(table, entry, (B,))
    assert resident is not None
    assert slots.lacking([B], "default") == set(), "a task without queries leaves"
    assert slots.lacking([A, B], "default", evict=False) == {B}
