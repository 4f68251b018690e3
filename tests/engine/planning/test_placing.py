"""Which program a batch asks for when no ready one is good."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Sequence

import pytest
from support import ENGINE_BUCKETS, FakeCompiling, pendings

from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import FULL, HEAVY_RUNS, Bucket, Variant, make_variant
from jpets.engine.costs.pace import SETTLED
from jpets.engine.engine import Engine
from jpets.engine.planning.menu import Menu
from jpets.engine.planning.needs import Needs
from jpets.engine.planning.placing import Placer
from jpets.engine.planning.predictions import Predictions
from jpets.engine.programs.program import Program, ProgramKey

SMALL = Bucket(96, ((8, 16),))
"""A bucket without programs."""
MIXTURES = (["mask", "bitfit"], ["mask", "adapter"], ["diff"], ["mask", "diff", "adapter"])


class Estimates(Predictions):
    """``seconds`` gives a program's time."""

    def __init__(self, engine: Engine, seconds: Callable[[ProgramKey], float]) -> None:
        super().__init__(engine.costs, engine.profile)
        self._given = seconds

    def estimate(self, key: ProgramKey) -> float:
        return self._given(key)


def asked_for(
    engine: Engine,
    tasks: Sequence[str],
    slow: Sequence[ProgramKey] = (),
    missed: Sequence[ProgramKey] = (),
    barred: Sequence[ProgramKey] = (),
) -> ProgramKey:
    """What a batch asks for where every program takes no time, except for the slow ones."""
    predictions = Estimates(engine, lambda key: 0.5 if key in slow else 1e-9)
    menu = Menu([SMALL], lambda bucket: 1.0, 8, 0)
    plan = Placer(engine.replica, predictions, menu, FakeCompiling(missed, barred)).place(pendings(engine, tasks))
    assert plan.wanted is not None and 0 < plan.missed < plan.seconds
    return plan.wanted


def heavy(key: ProgramKey) -> list[ClassKey]:
    return [each for each in key.variant.classes() if class_method(each.method).kind == "heavy"]


def test_mixtures_ask_for_one_program(engine: Engine) -> None:
    (general,) = {asked_for(engine, tasks) for tasks in MIXTURES}
    assert general.bucket == SMALL
    assert {key.method for key in general.variant.classes()} >= {"mask", "diff", "adapter", "bitfit"}


def test_a_program_with_fewer_classes_is_taken_though_it_was_timed_as_slower(engine: Engine) -> None:
    """Else it would never run, and its time never be corrected."""
    wide = max(engine.replica.programs, key=lambda program: len(program.key.variant.classes()))
    bare = Program(dataclasses.replace(wide.key, variant=Variant()), wide.compiled, seconds=1.0)
    ready = [dataclasses.replace(wide, seconds=0.5), bare]
    replica = types.SimpleNamespace(for_mixtures=ready, family=engine.replica.family, has_program=lambda key: True)
    menu = Menu([wide.key.bucket], lambda bucket: 1.0, 8, 0)
    placer = Placer(replica, Predictions(engine.costs, engine.profile), menu, None)  # type: ignore[arg-type]
    assert placer.place(pendings(engine, [None])).program is bare
    assert placer.place(pendings(engine, ["adapter"])).program is not bare
    bare.followed = SETTLED
    assert placer.place(pendings(engine, [None])).program is not bare, "by now it is known to be slower"


def test_a_program_of_its_own_where_the_general_one_gains_little(engine: Engine) -> None:
    general = asked_for(engine, MIXTURES[0])
    found = [asked_for(engine, tasks, slow=[general]) for tasks in MIXTURES]
    assert len(set(found)) == len(MIXTURES) and general not in found
    most_adapters = asked_for(engine, ["mask", *["adapter"] * 5], slow=[general])
    assert most_adapters == found[1], "beside loops light classes get all room"


def test_masks_alone_ask_for_a_program_without_shared_products(engine: Engine) -> None:
    asked = asked_for(engine, ["mask", "mask"], missed=[asked_for(engine, MIXTURES[0])])
    assert asked.variant.replaced and len(heavy(asked)) == 1


def test_larger_batches_ask_for_their_own(engine: Engine) -> None:
    general = asked_for(engine, MIXTURES[0])
    (own,) = {asked_for(engine, ["diff"] * 8, missed=missed) for missed in ((), [general])}
    assert own != general and len(heavy(own)) == 1


def test_what_other_batches_miss_comes_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    general = asked_for(engine, MIXTURES[0])
    light = next(p.key.variant for p in engine.replica.programs if not p.key.variant.has("heavy"))
    short, bare = ProgramKey(Bucket(64, ((16, 4),)), general.variant), ProgramKey(SMALL, light)
    other, tasks = ProgramKey(Bucket(128, ((8, 16),)), general.variant), ["mask", "diff"]
    assert asked_for(engine, tasks, missed=[short, bare, other]) == other, "rows do not fit the first two"
    assert asked_for(engine, tasks, slow=[other], missed=[other]) == general, "it would gain little"
    assert asked_for(engine, tasks, missed=[other], barred=[other]) == general, "it could not be had"
    assert asked_for(engine, tasks, barred=[general]) not in (general, other)
    monkeypatch.setattr(engine.replica, "has_program", lambda key: key == other)
    assert asked_for(engine, tasks, missed=[other]) == general, "it has come meanwhile"


def test_room_for_runs_that_are_all_computed_is_as_tight_as_can_be(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    general = asked_for(engine, MIXTURES[0])
    monkeypatch.setattr(Placer, "_static_runs", True)  # as on a GPU
    asked = asked_for(engine, ["diff", "bitfit"], missed=[general])
    assert asked != general and len(heavy(asked)) == 1
    assert asked.variant != make_variant(dict.fromkeys(asked.variant.classes(), FULL))


def test_programs_with_long_runs_take_any_rows(engine: Engine) -> None:
    """The plan of a window chooses them by their predicted time: placing must not know better."""
    rows = [pending.row for pending in pendings(engine, ["mask", "bitfit", "mask"])]
    needs = Needs(rows)
    bucket = max(ENGINE_BUCKETS, key=lambda bucket: bucket.tokens)
    for run in HEAVY_RUNS:
        key = ProgramKey(bucket, make_variant(dict.fromkeys(needs.layout(bucket).needs, FULL), run))
        assert needs.met_by(key)


def test_products_that_are_left_out_cost_nothing(engine: Engine) -> None:
    rows = [pending.row for pending in pendings(engine, ["mask", "mask"])]
    bucket = max(ENGINE_BUCKETS, key=lambda bucket: bucket.tokens)
    classes = dict.fromkeys(Needs(rows).layout(bucket).needs, FULL)
    network = engine.family.network
    with_products, without = (network.arithmetic(bucket, make_variant(classes, replaced=own)) for own in (False, True))
    mask = next(key for key in classes if key.method == "mask")
    config = engine.family.config
    saved = sum(math.prod(config.dims(site)) for site, _ in mask.sites) * len(mask.layers) * bucket.tokens
    assert with_products - without == pytest.approx(saved)
    assert without > 0
