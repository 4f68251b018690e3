"""Which program a batch asks for when no ready one is good."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from support import pendings

from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.engine.planning.menu import Menu
from jpets.engine.planning.placing import Placer
from jpets.engine.planning.predictions import Predictions
from jpets.engine.programs.program import ProgramKey

SMALL = Bucket(64, ((6, 16),))
"""A bucket without programs."""
MIXTURES = (["mask", "bitfit"], ["mask", "adapter"], ["diff"], ["mask", "diff", "adapter"])


class Estimates(Predictions):
    """``seconds`` gives a program's time."""

    def __init__(self, engine: Engine, seconds: Callable[[ProgramKey], float]) -> None:
        super().__init__(engine.costs, engine.profile)
        self._given = seconds

    def estimate(self, key: ProgramKey) -> float:
        return self._given(key)


def placer(engine: Engine, seconds: Callable[[ProgramKey], float], missed: Sequence[ProgramKey] = ()) -> Placer:
    return Placer(engine.replica, Estimates(engine, seconds), Menu([SMALL], lambda bucket: 1.0, 8, 0), lambda: missed)


def asked_for(own: Placer, engine: Engine, tasks: Sequence[str]) -> ProgramKey | None:
    return own.place(pendings(engine, tasks)).wanted


def test_mixtures_ask_for_one_program(engine: Engine) -> None:
    own = placer(engine, lambda key: 1e-9)
    found = {asked_for(own, engine, tasks) for tasks in MIXTURES}
    (general,) = found
    assert general is not None and general.bucket == SMALL
    assert {key.method for key in general.variant.classes()} >= {"mask", "diff", "adapter", "bitfit"}


def test_a_program_of_its_own_where_the_general_one_gains_little(engine: Engine) -> None:
    general = asked_for(placer(engine, lambda key: 1e-9), engine, ["mask"])
    own = placer(engine, lambda key: 0.5 if key == general else 1e-9)
    found = [asked_for(own, engine, tasks) for tasks in MIXTURES]
    assert len(set(found)) == len(MIXTURES) and general not in found
    most_adapters = asked_for(own, engine, ["mask", *["adapter"] * 5])
    assert most_adapters == asked_for(own, engine, ["mask", "adapter"]), "beside loops light classes get all room"


def test_what_other_batches_miss_comes_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    own = placer(engine, lambda key: 1e-9)
    general = asked_for(own, engine, ["mask"])
    assert general is not None
    other = ProgramKey(Bucket(96, ((8, 16),)), general.variant)
    light = next(p.key.variant for p in engine.replica.programs if not p.key.variant.has("heavy"))
    bare = ProgramKey(SMALL, light)
    long = ProgramKey(Bucket(64, ((16, 4),)), general.variant)
    own = placer(engine, lambda key: 1e-9, [long, bare, other])
    assert asked_for(own, engine, ["mask", "diff"]) == other, "rows do not fit the first two"
    own = placer(engine, lambda key: 0.5 if key == other else 1e-9, [other])
    assert asked_for(own, engine, ["mask", "diff"]) == general, "it would gain little there"
    monkeypatch.setattr(engine.replica, "has_program", lambda key: key == other)
    own = placer(engine, lambda key: 1e-9, [other])
    assert asked_for(own, engine, ["mask", "diff"]) == general, "it has come meanwhile"
