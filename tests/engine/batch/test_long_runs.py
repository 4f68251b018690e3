"""Heavy deltas of rows that meet in a batch are applied in long runs, those of scattered rows in short ones."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, logits_of, method_tasks, shallow

from jpets.engine.batch.bucket import HEAVY_RUNS
from jpets.engine.engine import Engine
from jpets.engine.planning.plan import Plan
from jpets.engine.planning.planner import Planner
from jpets.engine.programs.program import ProgramKey
from jpets.engine.queue.pending import Pending
from jpets.types import Query

SHORT, *_, LONG = HEAVY_RUNS


def queries(tasks: Sequence[str | None], tokens: int) -> list[Query]:
    rng = np.random.default_rng(0)
    return [Query(task, input_ids=rng.integers(5, 800, tokens).tolist()) for task in tasks]


def prepared(engine: Engine, batch: Sequence[Query]) -> list[Pending]:
    found = [engine.intake.prepare(query, None, 0, "default") for query in batch]
    engine.intake.give_back(found)
    pendings = [item for item in found if isinstance(item, Pending)]
    assert len(pendings) == len(batch)
    return pendings


def test_rows_that_meet_run_in_a_program_of_their_own(program_cache: Path) -> None:
    together, scattered = queries(["mask"] * 4, 60), queries(["mask", None, "bitfit", "adapter"], 12)
    with Engine(
        shallow(), method_tasks(shallow()), ENGINE_SETTINGS, cache_dir=program_cache, buckets=ENGINE_BUCKETS
    ) as engine:
        engine.start()

        def planned(batch: Sequence[Query]) -> Plan:
            return engine._planner.place(prepared(engine, batch))

        before = [np.asarray(logits_of(result)) for result in engine.infer(together)]
        assert planned(together).program.key.variant.run == SHORT
        chosen = engine.specialise(together)
        assert chosen is not None and chosen.variant.run == LONG
        plan = planned(together)
        assert plan.program.key == chosen and plan.wanted is None
        assert planned(scattered).program.key.variant.run == SHORT
        for old, result in zip(before, engine.infer(together), strict=True):
            np.testing.assert_allclose(np.asarray(logits_of(result)), old, atol=1e-5)


def test_a_program_of_long_runs_is_for_rows_that_gain_by_them(engine: Engine) -> None:
    """Of two programs that take as long without heavy rows."""
    (widest,) = [p for p in engine.replica.programs if p.key.variant.has("heavy") and p.key.bucket.tokens == 256]
    key = ProgramKey(widest.key.bucket, dataclasses.replace(widest.key.variant, run=LONG))
    programs = [*engine.replica.programs, dataclasses.replace(widest, key=key)]
    known = {name: getattr(engine.replica, name) for name in ("family", "classes", "opened", "generations", "mesh")}
    replica: Any = types.SimpleNamespace(
        programs=programs, for_mixtures=programs, has_program=lambda key: True, **known
    )
    planner = Planner(replica, engine.costs, engine.profile, ENGINE_SETTINGS, engine.menu)
    assert all(key not in [p.key for p in own] for own in planner.ready.takers(heavy=True).values())
    for tasks, run in ((["mask", None, "bitfit", "adapter"], SHORT), (["mask"] * 4, LONG)):
        plan = planner.place(prepared(engine, queries(tasks, 60 if run == LONG else 12)))
        assert plan.program.key.variant.run == run
