"""The policy ``steady``: a query's program follows from its length and its task alone."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, method_tasks, shallow

from jpets.engine.batch.bucket import steady_menu
from jpets.engine.engine import Engine
from jpets.engine.planning.planner import Planner
from jpets.engine.queue.pending import Pending
from jpets.errors import EngineFailure
from jpets.types import Query


@pytest.fixture
def planner(engine: Engine) -> Planner:
    settings = dataclasses.replace(ENGINE_SETTINGS, policy="steady")
    return Planner(engine.replica, engine.costs, engine.profile, settings, engine.menu)


def pending(engine: Engine, task: str | None, length: int) -> Pending:
    item = engine.intake.prepare(Query(task, input_ids=[7] * length), None, 0, "default")
    assert isinstance(item, Pending)
    engine.intake.give_back([item])
    return item


def test_light_and_heavy_rows_have_programs_of_their_own(engine: Engine, planner: Planner) -> None:
    mask, bitfit, bare, diff = (pending(engine, task, 9) for task in ("mask", "bitfit", None, "diff"))
    for waiting, heavy in (
        ([mask], True),
        ([bitfit], False),
        ([bare, mask], False),
        ([diff, bitfit, mask], True),
        ([bitfit, diff, bare, mask], False),
    ):
        plan = planner.next_batch(waiting)
        assert plan.program.key.bucket == ENGINE_BUCKETS[0]
        assert plan.program.key.variant.has("heavy") == heavy
        assert list(plan.pendings) == [waiting[0]]  # the bucket has one row
        assert plan.wanted is None


def test_what_is_left_of_a_batch_runs_in_the_same_program(engine: Engine, planner: Planner) -> None:
    """Clients leave, and batches are split that found no memory."""
    for task in ("mask", "bitfit"):
        waiting = [pending(engine, task, 9)]
        plan = planner.next_batch(waiting)
        assert planner.place(waiting).program is plan.program
        assert planner.narrowed(plan, waiting).program is plan.program


def test_a_server_has_a_program_for_every_length_and_kind(program_cache: pathlib.Path) -> None:
    """From its start, and they stay what they are: a program made one function later would give other bits."""
    settings = dataclasses.replace(
        ENGINE_SETTINGS, policy="steady", max_length=16, max_batch_tokens=32, background_compile=True
    )
    tasks = {task.id: task for task in method_tasks(shallow())}
    chosen = [tasks["bitfit"], tasks["mask"]]
    with Engine(shallow(), chosen, settings, cache_dir=program_cache).start() as own:
        programs = own.replica.programs
        assert all(program.key.bucket.rectangular and not program.chained for program in programs)
        queries = [Query(task, input_ids=[7] * length) for task in ("mask", None, "bitfit") for length in (1, 7, 16)]
        assert [result.error for result in own.infer(queries)] == [None] * len(queries)
        assert own.replica.programs == programs and not own.compiler.waiting


def test_a_length_that_no_rectangular_bucket_takes(engine: Engine, planner: Planner) -> None:
    with pytest.raises(EngineFailure, match="40 tokens"):
        planner.next_batch([pending(engine, "bitfit", 40)])


@pytest.mark.parametrize(("longest", "tokens"), [(512, 1024), (128, 64), (500, 4096), (16, 64)])
def test_the_menu_holds_every_length_once(longest: int, tokens: int) -> None:
    menu = steady_menu(longest, tokens)
    assert all(bucket.rectangular and bucket.tokens <= max(tokens, bucket.longest) for bucket in menu)
    lengths = [bucket.longest for bucket in menu]
    assert lengths == sorted(set(lengths))
    assert all(bucket.rows <= 3 for bucket in steady_menu(longest, tokens, 3))
    assert lengths[-1] == longest
    assert all(any(bucket.holds(np.array([n])) for bucket in menu) for n in range(1, longest + 1))
