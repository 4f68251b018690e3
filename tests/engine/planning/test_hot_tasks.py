"""Whether queries with low-rank deltas leave a batch for their task's merged copy."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import pytest
from support import pendings

from jpets.deltas import class_method
from jpets.engine.batch.bucket import FULL, make_variant
from jpets.engine.engine import Engine
from jpets.engine.planning.hot_tasks import HotTasks
from jpets.engine.planning.menu import Menu
from jpets.engine.planning.placing import WORTHWHILE, Placer
from jpets.engine.planning.plan import Plan
from jpets.engine.planning.predictions import Predictions
from jpets.engine.planning.ready_programs import ReadyPrograms
from jpets.engine.programs.program import Program, ProgramKey
from jpets.engine.queue.pending import Pending
from jpets.engine.tasks.entries import Resident
from jpets.scheduling.costs.ready_lookup import HOST_SECONDS

WIDE, BARE = 0.5, 0.1
"""Seconds of a program for all classes, and of one for heads alone."""
COPY: dict[str, Any] = {"layers": {}}


def programs_of(engine: Engine) -> tuple[Program, Program]:
    wide = max(
        (program for program in engine.replica.programs if not program.key.variant.has("heavy")),
        key=lambda program: (len(program.key.variant.classes()), program.key.bucket.tokens),
    )
    heads = {key: FULL for key in wide.key.variant.classes() if class_method(key.method).kind == "head"}
    bare = Program(dataclasses.replace(wide.key, variant=make_variant(heads)), wide.compiled, seconds=BARE)
    return dataclasses.replace(wide, seconds=WIDE), bare


class Estimates(Predictions):
    """A program takes ``WIDE`` with low-rank deltas, and ``BARE`` without."""

    def estimate(self, key: ProgramKey) -> float:
        return WIDE if any(own.method == "lora" for own in key.variant.classes()) else BARE


def planned(
    engine: Engine,
    batch: Sequence[Pending],
    *,
    merged: Sequence[Resident | None] = (),
    ready: bool = True,
    barred: bool = False,
    copies: Any = None,
) -> tuple[Plan, Program, Program]:
    """The plan for a batch whose first query is the most urgent one; ``merged`` have copies, and programs for them are
    ``ready``, or on their way unless ``barred``. Then the program for all classes and that for heads alone."""
    wide, bare = programs_of(engine)
    replica: Any = types.SimpleNamespace(
        for_mixtures=[wide, bare] if ready else [wide], family=engine.replica.family, has_program=lambda key: ready
    )
    predictions = Estimates(engine.costs, engine.profile)
    compiling: Any = types.SimpleNamespace(missed=lambda: (), barred=lambda key: barred)
    placer = Placer(replica, predictions, Menu([wide.key.bucket], lambda bucket: 1.0, 8, 0), compiling)
    copies = copies or types.SimpleNamespace(copies=dict.fromkeys(merged, COPY), may_have=lambda resident: True)
    hot = HotTasks(copies, ReadyPrograms(engine.replica, engine.costs.pace), predictions, placer)
    return hot.plan(batch, batch[0], rare=False), wide, bare


def saved_by(plan: Plan) -> dict[str, float]:
    return {resident.task.id: seconds for resident, seconds in plan.saved.items()}


def lora(batch: Sequence[Pending]) -> Resident | None:
    return next(pending.resident for pending in batch if pending.task == "lora")


def test_what_a_copy_would_save_is_noted(engine: Engine) -> None:
    plan, wide, _ = planned(engine, pendings(engine, ["lora", "lora"]))
    assert plan.copy is None and plan.program is wide
    assert saved_by(plan) == pytest.approx({"lora": WIDE - BARE / WORTHWHILE})


def test_rows_on_a_copy_need_no_low_rank_class(engine: Engine) -> None:
    batch = pendings(engine, ["lora", "lora"])
    plan, _, bare = planned(engine, batch, merged=[lora(batch)])
    assert plan.copy is COPY and plan.program is bare and len(plan.rows) == 2
    assert {key.method for row in plan.rows for key in row.slots} == {"head"}
    assert saved_by(plan) == pytest.approx({"lora": WIDE - BARE}), "nothing is left behind, and nothing is made"


def test_a_copy_that_comes_while_a_batch_is_planned_is_for_the_next_one(engine: Engine) -> None:
    """The rows were laid out without their deltas to weigh a copy that there could be: they cannot run like that."""
    batch = pendings(engine, ["lora", "lora"])

    class Coming:
        reads = 0

        @property
        def copies(self) -> dict[Any, Any]:
            self.reads += 1
            return {} if self.reads == 1 else {lora(batch): COPY}

        def may_have(self, resident: Resident) -> bool:
            return True

    plan, wide, _ = planned(engine, batch, copies=Coming())
    assert plan.copy is None and plan.program is wide
    assert all(any(key.method == "lora" for key in row.slots) for row in plan.rows)


def test_a_task_stays_in_a_batch_that_costs_as_much_without_it(engine: Engine) -> None:
    batch = pendings(engine, ["lora", "adapter", "adapter"])
    plan, wide, _ = planned(engine, batch, merged=[lora(batch)])
    assert plan.copy is None and plan.program is wide and len(plan.rows) == 3 and not plan.saved


def test_a_task_leaves_a_batch_whose_rest_is_bare(engine: Engine) -> None:
    batch = pendings(engine, ["lora", None, "lora", None])
    plan, _, bare = planned(engine, batch, merged=[lora(batch)])
    assert plan.copy is COPY and plan.program is bare and [pending.task for pending in plan.pendings] == ["lora"] * 2
    assert saved_by(plan) == pytest.approx({"lora": WIDE - BARE - BARE / WORTHWHILE - HOST_SECONDS})
    others, _, bare = planned(engine, batch[1:], merged=[lora(batch)])
    assert (
        others.copy is None and others.program is bare and [pending.task for pending in others.pendings] == [None] * 2
    )


def test_tasks_leave_together_where_one_alone_gains_nothing(engine: Engine) -> None:
    batch = pendings(engine, ["lora"] * 4)
    first = lora(batch)
    assert first is not None
    second = dataclasses.replace(first)
    for pending in batch[2:]:
        pending.resident = second
    plan, wide, _ = planned(engine, batch)
    each = (WIDE - 2 * BARE / WORTHWHILE - HOST_SECONDS) / 2
    assert plan.program is wide and list(plan.saved.values()) == pytest.approx([each, each])
    plan, wide, bare = planned(engine, batch, merged=[first])
    assert plan.copy is None and plan.program is wide and len(plan.saved) == 2, "it waits for the other copy"
    plan, _, bare = planned(engine, batch, merged=[first, second])
    assert plan.copy is COPY and plan.program is bare and list(plan.pendings) == batch[:2]


def test_a_copy_whose_program_is_not_ready_asks_for_it(engine: Engine) -> None:
    batch = pendings(engine, ["lora", "lora"])
    plan, wide, bare = planned(engine, batch, merged=[lora(batch)], ready=False)
    assert plan.copy is None and plan.program is wide and len(plan.rows) == 2
    assert plan.wanted is not None and plan.wanted.bucket == bare.key.bucket
    assert {key.method for key in plan.wanted.variant.classes()} == {"head"}
    assert plan.missed == saved_by(plan)["lora"] == pytest.approx(WIDE - BARE / WORTHWHILE)


def test_a_copy_whose_program_cannot_be_had_saves_nothing(engine: Engine) -> None:
    batch = pendings(engine, ["lora", "lora"])
    plan, wide, _ = planned(engine, batch, merged=[lora(batch)], ready=False, barred=True)
    assert plan.program is wide and plan.wanted is None and not plan.saved


def test_a_small_part_of_a_batch_stays(engine: Engine) -> None:
    batch = pendings(engine, ["lora", *[None] * 9])
    plan, wide, _ = planned(engine, batch, merged=[lora(batch)])
    assert plan.copy is None and plan.program is wide and len(plan.rows) == 10 and not plan.saved


@pytest.mark.parametrize("task", ["adapter", "bitfit"])
def test_tasks_of_which_a_copy_holds_nothing_are_planned_as_ever(engine: Engine, task: str) -> None:
    plan, wide, _ = planned(engine, pendings(engine, [task, task]))
    assert plan.program is wide and not plan.saved


def test_heavy_tasks_leave_with_their_low_rank_deltas(engine: Engine) -> None:
    (resident,) = {pending.resident for pending in pendings(engine, ["masked-lora"])}
    assert resident is not None
    assert {key.method for key in resident.slots} >= {"mask", "lora"}
    assert {key.method for key in resident.copy_slots} == {"head"}
