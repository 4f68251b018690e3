"""The costs of programs follow the times of their batches."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, random_delta, shallow

from jpets.deltas import METHODS
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.batch.row_table import RowTable
from jpets.engine.batch.rows import Row
from jpets.engine.costs.bench import Bench
from jpets.engine.costs.cost_table import SURPRISE, CostTable
from jpets.engine.costs.live_profile import LiveProfile
from jpets.engine.costs.pace import SETTLED, Pace
from jpets.engine.engine import Engine
from jpets.engine.planning.planner import USUAL_TOKENS, Planner
from jpets.engine.programs.mesh import first_device
from jpets.engine.programs.program import Family, Program, ProgramKey
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.types import Query
from pallas_kernels.sparse_matmul.columns import unpack_columns

pytestmark = pytest.mark.usefixtures("learning_costs")

KEY = ProgramKey(Bucket(32, ((4, 8),)), Variant())


@pytest.fixture
def table(tmp_path: Path) -> CostTable:
    return CostTable(tmp_path / "costs.json", Family(EncoderNetwork(shallow().config), "float32", ()))


def program(seconds: float) -> Program:
    compiled: Any = None
    return Program(KEY, compiled, seconds)


def test_a_cost_goes_where_batches_say(table: CostTable) -> None:
    own = program(0.010)
    for _ in range(100):
        table.follow(own, 0.020)
    assert own.seconds == pytest.approx(0.020, rel=0.01)


def test_one_strange_batch_says_little(table: CostTable) -> None:
    own = program(0.010)
    table.follow(own, 60.0)
    assert 0.010 < own.seconds < 0.010 * SURPRISE
    table.follow(own, 0.0)
    assert own.seconds > 0.010 / SURPRISE


def test_what_is_kept_says_nothing_of_other_work_on_the_machine(table: CostTable) -> None:
    """The next start may find less of it, and programs that it compiles are timed beside these."""
    busy = dataclasses.replace(program(0.010), expected=0.005, best=0.010, followed=2 * SETTLED)
    other = dataclasses.replace(busy, key=ProgramKey(Bucket(64, ((2, 32),)), Variant()), seconds=0.024, best=0.024)
    table.pace = Pace(lambda: [busy, other])
    table.pace.look()
    for _ in range(30):
        table.follow(busy, 0.020)
    table.pace.look()
    assert other.seconds == pytest.approx(0.048, rel=0.05)
    table.follow_up([busy, other])
    for own, seconds in ((busy, 0.010), (other, 0.024)):
        assert table.get(own.key) == table.estimate(own.key) == pytest.approx(seconds, rel=0.1)
    table.reload()
    assert table.get(busy.key) == pytest.approx(0.010, rel=0.1), "and not what was expected of it"


def test_times_that_are_none_are_not_read(table: CostTable) -> None:
    path = table._file.path
    names = [table._name(ProgramKey(Bucket(n, ((1, n),)), Variant())) for n in (8, 16, 24, 32)]
    path.write_text(json.dumps(dict(zip(names, (0.0, -1.0, float("nan"), 0.01), strict=True))))
    table.reload()
    assert [table._seconds.get(name) for name in names] == [None, None, None, 0.01]


def test_a_program_learns_what_is_left_beside_heavy_rows(engine: Engine) -> None:
    profile = mock.create_autospec(LiveProfile, instance=True)
    profile.seconds.side_effect = lambda tokens, run: 0.004 * sum(len(own) for own in tokens.values())
    planner = Planner(engine.replica, engine.costs, profile, ENGINE_SETTINGS, engine.menu)
    entry = engine.tasks.entry("default", "mask")
    mask = entry.resident if entry is not None else None
    assert mask is not None
    masks = sum("mask" in str(key) for key in mask.slots)
    own = program(0.010)
    for _ in range(100):
        planner.ran(RowTable([Row({}, mask.slots, 0, 5)]), own, 0.020)
    assert own.seconds == pytest.approx(0.020 - 0.004 * masks, rel=0.01)


def test_a_query_weighs_what_its_delta_adds_to_its_part_of_a_full_batch(engine: Engine) -> None:
    profile = mock.create_autospec(LiveProfile, instance=True)
    profile.seconds.side_effect = lambda tokens, run=None: 0.003 * sum("mask" in str(key) for key in tokens)
    planner = Planner(engine.replica, engine.costs, profile, ENGINE_SETTINGS, engine.menu)
    fastest = max(shape.tokens / shape.seconds for shape in planner.ready.shapes(heavy=False))
    mask, bitfit = (entry.resident for name in ("mask", "bitfit") if (entry := engine.tasks.entry("default", name)))
    assert mask is not None and bitfit is not None
    masks = sum("mask" in str(key) for key in mask.slots)
    assert planner.query_weight(mask.slots) == pytest.approx(1 + masks * 0.003 * fastest / USUAL_TOKENS)
    assert planner.query_weight(bitfit.slots) == 1.0


def test_tasks_weigh_what_arithmetic_says_before_anything_was_measured(engine: Engine) -> None:
    """Noise must not look like work: tasks of one kind weigh the same."""
    assert engine.query_weight("bitfit") == 1.0
    weight = engine.query_weight("mask")
    assert weight is not None and 1.0 < weight < 100.0
    assert engine.query_weight("nobody") is None


@pytest.mark.parametrize("block", [1, 16])
def test_profiles_measure_sparse_differences_that_are_full(block: int) -> None:
    """An empty slot's entries are dropped before the sum, which is cheaper."""
    config = shallow().config
    key = METHODS["diff"].lower(random_delta("diff", config, block=block), config)[0].key
    bench = Bench(Family(EncoderNetwork(config), "float32", ((key, 2),)), first_device(), 64)
    ((short, bank),) = bench.replica.banks.items()
    for site, _ in short.sites:
        rows, *packed = (bank.arrays[f"{site}/{name}"][1:] for name in ("rows", "cols", "ends"))
        cols = np.asarray(unpack_columns(*packed))
        inputs, outputs = (size // block for size in config.dims(site))
        assert rows.max() < inputs and cols.max() < outputs and (np.diff(cols) >= 0).all()
        assert np.asarray(bank.arrays[f"{site}/values"])[1:].all()


def test_the_next_start_knows_what_the_last_one_learnt(tmp_path: Path) -> None:
    def start() -> Engine:
        return Engine(shallow(), [], ENGINE_SETTINGS, cache_dir=tmp_path, buckets=ENGINE_BUCKETS[:1])

    with start().start() as first:
        told = [each.seconds for each in first.replica.programs]
        first.infer([Query(None, input_ids=[7, 8, 9])] * 5)
    learnt = [each.seconds for each in first.replica.programs]
    assert learnt != told and min(told) > 0
    with start().start() as second:
        assert [each.seconds for each in second.replica.programs] == learnt
