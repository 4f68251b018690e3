"""The planner over ready programs: kept plans, policies by name, and what the traffic deserves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import get_args
from unittest import mock

import numpy as np
import pytest
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, FakeCompiling, pendings

from jpets.config import Policy
from jpets.deltas import class_method
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.engine import Engine
from jpets.engine.planning.kept_plan import KeptPlan
from jpets.engine.planning.menu import Menu
from jpets.engine.planning.needs import Needs
from jpets.engine.planning.placing import NoProgram
from jpets.engine.planning.planner import Planner
from jpets.engine.planning.ready_programs import kinds_of, shapes_for
from jpets.engine.planning.window import Pricing, read_window
from jpets.engine.planning.wishes import possible_variants
from jpets.engine.programs.program import Program
from jpets.engine.tasks.sorts import Sort
from jpets.scheduling.costs.ready_lookup import MIXED
from jpets.scheduling.costs.shape import Shape
from jpets.scheduling.policies.auto import POLICIES, auto
from jpets.scheduling.queue import BARE


def asking(engine: Engine) -> tuple[Planner, Menu, FakeCompiling]:
    """A planner that asks for programs, with a menu that learns."""
    compiling = FakeCompiling()
    menu = Menu(ENGINE_BUCKETS, lambda bucket: engine.family.network.arithmetic(bucket, Variant()), 32, 256)
    planner = Planner(engine.replica, engine.costs, engine.profile, ENGINE_SETTINGS, menu, compiling=compiling)
    return planner, menu, compiling


def test_every_policy_has_one_name() -> None:
    assert set(get_args(Policy)) == {*POLICIES, "auto", "steady"}


@pytest.mark.parametrize("policy", [name for name in get_args(Policy) if name != "steady"])
def test_every_policy_serves(engine: Engine, policy: Policy) -> None:
    settings = dataclasses.replace(ENGINE_SETTINGS, policy=policy)
    planner = Planner(engine.replica, engine.costs, engine.profile, settings, engine.menu)
    waiting = pendings(engine, ["mask", "bitfit", None, "diff", "mask", "adapter", "bitfit", "mask"] * 3)
    left, batches = list(waiting), 0
    while left:
        plan = planner.next_batch(left)
        assert left[0] in plan.pendings
        assert plan.program.key.bucket.holds(np.array([p.row.length for p in plan.pendings]))
        left = [pending for pending in left if pending not in plan.pendings]
        batches += 1
    assert batches < len(waiting) or policy == "beta"


def test_a_batch_that_no_program_takes_runs_in_parts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may have too little room for a class that many of its rows have, and one with room is asked for."""
    planner, _, compiling = asking(engine)
    waiting, ready = pendings(engine, [None] * 7), planner._placer._ready

    def for_few(needs: Needs) -> tuple[Program, float]:
        if len(needs.rows) > 3:
            raise NoProgram("too many")
        return ready(needs)

    monkeypatch.setattr(planner._placer, "_ready", for_few)
    monkeypatch.setattr(engine.replica, "has_program", lambda key: False)
    plan = planner.next_batch(waiting)
    assert list(plan.pendings) == waiting[: len(plan.pendings)] and 0 < len(plan.pendings) <= 3
    ((wanted, _), *_) = compiling.wanted
    assert wanted.bucket.holds(np.array([pending.row.length for pending in waiting]))
    monkeypatch.setattr(planner._placer, "_ready", mock.Mock(side_effect=NoProgram("none at all")))
    with pytest.raises(NoProgram):
        planner.next_batch(waiting)


def test_one_query_takes_no_search(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    planner, _, _ = asking(engine)
    monkeypatch.setattr(planner, "_policy", None)
    for task in ("mask", "adapter", None):
        (one,) = pendings(engine, [task])
        assert list(planner.next_batch([one]).pendings) == [one]


def test_a_kept_plan_gives_its_batches_until_much_else_comes(engine: Engine) -> None:
    own, waiting = KeptPlan(), pendings(engine, [None] * 20)
    assert own.batch(waiting) is None
    own.keep(waiting, [range(12), range(12, 20)])
    assert own.batch(waiting) == list(range(12))
    rest = waiting[12:]
    assert own.batch(rest) == list(range(8))
    assert own.batch([*rest, *pendings(engine, [None])]) == list(range(8))
    assert own.batch([*rest, *pendings(engine, [None] * 2)]) is None, "they could fill batches better"
    assert own.batch([*pendings(engine, [None]), *rest]) is None, "the most urgent query is not in it"
    assert own.batch([p for p in rest if p is not rest[3]]) == list(range(7)), "one client left"
    own.forget()
    assert own.batch(rest) is None


@pytest.mark.parametrize("made_fair", [False, True])
def test_a_batch_that_was_made_fair_ends_the_plan(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, *, made_fair: bool
) -> None:
    """What it leaves of two batches would run as parts of them, and be halved again."""
    planner = Planner(engine.replica, engine.costs, engine.profile, ENGINE_SETTINGS, engine.menu)
    waiting = pendings(engine, [None] * 8)
    plan = mock.Mock(side_effect=lambda waiting: [[*range(4)], [*range(4, len(waiting))]])
    monkeypatch.setattr(planner, "_batches", plan)
    if made_fair:
        monkeypatch.setattr(planner, "_fair", lambda chosen, waiting: [0, 1, *[q + 2 for q in chosen[2:]]])
    taken = planner.next_batch(waiting).pendings
    rest = [pending for pending in waiting if pending not in taken]
    monkeypatch.undo()
    monkeypatch.setattr(planner, "_batches", plan)
    assert [*planner.next_batch(rest).pendings] == rest and plan.call_count == 1 + made_fair


def test_a_window_knows_its_sorts(engine: Engine) -> None:
    window = read_window(pendings(engine, ["mask", "bitfit", None, "mask", "diff"]))
    kinds = kinds_of(window.sorts)
    assert kinds[window.queue.kinds[2]] == () and window.queue.tasks[2] == -1
    assert window.queue.kinds[0] == window.queue.kinds[3] and "mask" in kinds[window.queue.kinds[0]][0]
    assert len(window.sorts) == 4 and len({*window.queue.tasks.tolist()}) == 4


def test_programs_are_shapes_for_rows_whose_classes_they_have(engine: Engine) -> None:
    window = read_window(pendings(engine, ["mask", "bitfit", "mask"]))
    programs = [(p.key.bucket, p.key.variant, 1.0) for p in engine.replica.programs]
    shapes = shapes_for(window.sorts, programs)
    assert {(s.tokens, s.groups) for s in shapes.light} == {(b.tokens, b.groups) for b in ENGINE_BUCKETS}
    assert all(shape.run for shape in shapes.heavy) and not any(shape.run for shape in shapes.light)
    kind = int(window.queue.kinds[0])
    variants = possible_variants(window)
    (replaced,) = [variant for variant, sort in variants.items() if sort == kind]
    assert replaced.replaced, "all rows of that kind have a mask"
    more = shapes_for(window.sorts, [*programs, (Bucket(40, ((4, 10),)), replaced, 0.5)])
    assert [s.tokens for s in more.own[kind] if s.tokens == 40] == [40]
    assert len(more.heavy) == len(shapes.heavy) and len(more.light) == len(shapes.light)


def test_light_rows_that_only_programs_with_loops_take(engine: Engine) -> None:
    window = read_window(pendings(engine, ["bitfit"]))
    looped = [(p.key.bucket, p.key.variant, 1.0) for p in engine.replica.programs if p.key.variant.has("heavy")]
    assert looped and len(shapes_for(window.sorts, looped).light) == len({bucket for bucket, _, _ in looped})


def test_programs_with_loops_take_light_rows_that_no_other_bucket_holds(engine: Engine) -> None:
    """As where a class came lately, and its first program without loops is for short texts."""
    window = read_window(pendings(engine, ["bitfit", None], length=20))
    looped = [(p.key.bucket, p.key.variant, 1.0) for p in engine.replica.programs if p.key.variant.has("heavy")]
    light = next(p.key.variant for p in engine.replica.programs if not p.key.variant.has("heavy"))
    small = Bucket(8, ((1, 8),))
    costs = Pricing(lambda: engine.profile.current, 16).costs(
        window.sorts, shapes_for(window.sorts, [(small, light, 0.1), *looped])
    )
    plan = auto(window.queue, costs).plan
    assert sorted(q for batch in plan for q in batch.queries.tolist()) == [0, 1]


def test_possible_programs_of_a_window(engine: Engine) -> None:
    window = read_window(pendings(engine, ["mask", "bitfit", "adapter", None, "diff", "bitfit"]))
    found = possible_variants(window)
    assert sorted(found.values()) == sorted([BARE, MIXED, *{int(window.queue.kinds[q]) for q in (0, 4)}])
    light = next(variant for variant, sort in found.items() if sort == BARE)
    assert not light.has("heavy") and any(key.method == "adapter" for key in light.classes())
    static = possible_variants(window, static_runs=True)
    rooms = [v.level(key) for v, s in static.items() if s >= 0 for key in v.classes() if _heavy(key.method)]
    assert rooms and all(level < 8 for level in rooms)


def _heavy(method: str) -> bool:
    return class_method(method).kind == "heavy"


@pytest.mark.parametrize(("batches", "seconds", "asks"), [(3, 1e-9, True), (3, 60.0, False), (1, 1e-9, False)])
def test_few_queries_that_run_one_by_one_ask_for_a_program_that_takes_them_together(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, *, batches: int, seconds: float, asks: bool
) -> None:
    together, compiling = Bucket(96, ((8, 16),)), FakeCompiling()
    menu = Menu([together], lambda bucket: 1.0, 8, 256)
    planner = Planner(engine.replica, engine.costs, engine.profile, ENGINE_SETTINGS, menu, compiling=compiling)
    assert planner._wishes is not None
    monkeypatch.setattr(planner._predictions, "estimate", lambda key: seconds)
    few = read_window(pendings(engine, [None, "bitfit", None]))
    planner._wishes.planned(few, batches, 1.0)
    compiling.wanted.clear()
    planner._wishes.ran(3.0)
    planner._wishes._next = 0.0
    planner._wishes.planned(few, batches, 1.0)
    assert [key.bucket for key, _ in compiling.wanted] == [together] * asks
    assert sum(lost for _, lost in compiling.wanted) == pytest.approx(3.0 * asks)
    assert not menu.main, "lengths of so few queries are no mixture"


def test_what_large_windows_lose_is_not_forgotten_for_a_single_query(engine: Engine) -> None:
    planner, _, compiling = asking(engine)
    wishes, window = planner._wishes, read_window(pendings(engine, [None, "bitfit"] * 150))
    assert wishes is not None
    wishes.planned(window, 10, 1e-9)
    wishes.ran(5.0)
    wishes._next = 0.0
    wishes.planned(read_window(pendings(engine, [None])), 1, 1.0)
    wishes.ran(0.5)
    wishes._next = 0.0
    wishes.planned(window, 10, 1e9)
    assert sum(lost for _, lost in compiling.wanted) == pytest.approx(5.0)


def test_windows_ask_for_the_programs_of_a_better_plan(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    planner, menu, compiling = asking(engine)
    wanted = compiling.wanted
    waiting = pendings(engine, [None, "bitfit"] * 150)
    planner.serving(planner.next_batch(waiting))
    assert menu.main, "lengths were learnt"
    assert planner._wishes is not None
    for seconds, expected in ((60.0, False), (1e-9, True)):
        monkeypatch.setattr(planner._predictions, "estimate", lambda key, seconds=seconds: seconds)
        wanted.clear()
        planner._wishes._next = 0.0
        planner._kept.forget()
        ran = planner._wishes._unseen[False]
        planner.serving(planner.next_batch(waiting))
        assert bool(wanted) == expected
        assert all(key.bucket in menu.main and not key.variant.has("heavy") for key, _ in wanted)
        assert sum(lost for _, lost in wanted) <= ran


def test_windows_ask_for_no_program_that_cannot_be_had(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    planner, menu, compiling = asking(engine)
    monkeypatch.setattr(planner._predictions, "estimate", lambda key: 1e-9)
    monkeypatch.setattr(compiling, "barred", lambda key: key.bucket == menu.main[0])
    waiting = pendings(engine, [None, "bitfit"] * 150)
    for _ in range(2):
        planner.serving(planner.next_batch(waiting))
        planner._kept.forget()
        assert planner._wishes is not None
        planner._wishes._next = 0.0
    assert compiling.wanted
    assert all(key.bucket != menu.main[0] for key, _ in compiling.wanted), "the second best is asked for"


def test_batches_of_no_window_lose_nothing_for_windows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    planner, _, compiling = asking(engine)
    waiting = pendings(engine, [None, "bitfit"] * 150)
    wishes, window = planner._wishes, read_window(waiting)
    assert wishes is not None

    def runs(seconds: float) -> None:
        planner.serving(dataclasses.replace(planner.next_batch(waiting), seconds=seconds))

    wishes.planned(window, 10, 1e-9)
    with monkeypatch.context() as flood:
        flood.setattr(planner._flood, "batch", lambda waiting, rare: waiting[:1])
        runs(100.0)
    wishes._next = math.inf
    runs(2.0)
    wishes._next = 0.0
    wishes.planned(window, 10, 1e9)
    assert sum(lost for _, lost in compiling.wanted) == pytest.approx(2.0)


def test_batches_of_several_tenants_are_not_cut_for_a_query_that_is_not_in_them(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = Planner(engine.replica, engine.costs, engine.profile, ENGINE_SETTINGS, engine.menu)
    waiting = pendings(engine, [None, "bitfit", None, "bitfit", "mask"])
    for at, pending in enumerate(waiting):
        monkeypatch.setattr(pending, "tenant", f"tenant-{at % 2}")
    asked: list[frozenset[Sort]] = []
    shapes_of = planner.ready.shapes_of

    def noted(sorts: frozenset[Sort]) -> Sequence[Shape]:
        asked.append(sorts)
        return shapes_of(sorts)

    monkeypatch.setattr(planner.ready, "shapes_of", noted)
    assert planner._fair([0, 1, 2, 3], waiting) == [0, 1, 2, 3]
    assert not asked, "nobody lacks a row"
    assert len({waiting[q].party for q in planner._fair([0, 2], waiting)}) == 2
    assert not any(sort.heavy for sorts in asked for sort in sorts)
