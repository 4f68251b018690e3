"""The cost profile of a running engine: coarse when it is ready, better with every figure that is measured."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import threading

from jpets.engine.costs.coarse_profile import coarse_profile, priced
from jpets.engine.costs.correction import Correction
from jpets.engine.costs.cost_table import CostTable
from jpets.engine.costs.delta_costs import DeltaCosts, HeavyTokens
from jpets.engine.costs.figures import Figures, profile_of
from jpets.engine.device.replica import Replica
from jpets.engine.programs.program import Family, Program
from jpets.engine.programs.shared_file import SharedFile
from jpets.scheduling.costs.measured_profile import CostProfile

CERTAIN = 0.5
"""Part of a coarse figure that rows cost at least."""
WORTH_TELLING = 0.05
"""Relative change of a figure from which on there is a new profile."""


@dataclasses.dataclass(frozen=True)
class _State:
    """A profile and what it was made of: ``raw`` has no correction. ``classes`` are the measured ones."""

    family: Family
    version: int
    raw: CostProfile
    correction: Correction
    profile: CostProfile
    deltas: DeltaCosts
    classes: frozenset[str]


class LiveProfile:
    """Of one replica, with the classes that came after the start. Any thread may ask and add.

    ``path`` is the file of measured figures; its name holds the device, the backbone's shape, the number format and the
    versions, so a stale file has another name.
    """

    def __init__(self, replica: Replica, costs: CostTable, path: pathlib.Path) -> None:
        self._replica = replica
        self._costs = costs
        self._file = figures_file(path)
        self._figures = self._file.read() or Figures()
        self._correction = Correction()
        self._correction.known(self._figures.by(replica.family.operators).classes)
        self._lock = threading.Lock()
        self._state = self._composed()

    @property
    def current(self) -> CostProfile:
        """The profile of all classes that the replica has. It never changes; a new one takes its place."""
        return self._now().profile

    @property
    def measured(self) -> frozenset[str]:
        """The classes whose beta was measured; that of the others is coarse."""
        return self._now().classes

    @property
    def coarse(self) -> frozenset[str]:
        state = self._now()
        return frozenset(state.profile.beta) - state.classes

    @property
    def sized(self) -> bool:
        """Whether packed shapes of several sizes were measured, from which batches get their limits at a start."""
        return bool(self._figures.packed)

    def seconds(self, tokens: HeavyTokens, run: int | None = None) -> float:
        """The time that the heavy deltas of some rows add to a program with steps of ``run`` tokens, or of the best
        length."""
        return self._now().deltas.seconds(tokens, run)

    def certain_seconds(self, tokens: HeavyTokens) -> float:
        """``seconds``, of which coarse figures count by half: for what does not pay if they are too high."""
        state = self._now()
        parts = state.deltas.parts(tokens).items()
        return sum(seconds * (1.0 if str(key) in state.classes else CERTAIN) for key, seconds in parts)

    def ran(self, tokens: HeavyTokens, program: Program, seconds: float) -> None:
        """Learns from the time of a batch. One thread at a time."""
        run = program.key.bucket.run(program.key.variant.run)
        with self._lock:  # figures that are measured meanwhile must not be lost
            state = self._current()
            parts = {str(key): part for key, part in state.deltas.parts(tokens, run).items()}
            if parts:
                self._correction.heavy(program.seconds, parts, seconds)
            elif (measured := self._costs.timed(program.key)) is not None:
                self._correction.light(measured, seconds)
            if self._correction.moved(state.correction) > WORTH_TELLING:
                self._state = self._corrected(state.family, state.version, state.raw)

    def add(self, figures: Figures) -> None:
        """Measured figures take the place of others, here and in the file."""
        with self._lock:
            self._figures = self._figures.with_later(figures)
            self._correction.known(figures.classes)
            self._state = self._composed()
        self._file.update(lambda stored: (stored or Figures()).with_later(figures))

    def reload(self) -> None:
        """Takes over what another process, or another engine of this one, has measured."""
        stored, operators = self._file.read() or Figures(), self._replica.family.operators
        with self._lock:
            own = self._figures.by(operators)
            self._correction.known(stored.by(operators).classes.keys() - own.classes.keys())
            self._figures = stored.with_later(own)
            self._state = self._composed()

    def _now(self) -> _State:
        state = self._state
        if self._holds(state):
            return state
        with self._lock:
            return self._current()

    def _current(self) -> _State:
        """For holders of the lock."""
        if not self._holds(self._state):
            self._state = self._composed()
        return self._state

    def _holds(self, state: _State) -> bool:
        return state.family is self._replica.family and state.version == self._costs.version

    def _composed(self) -> _State:
        family, version = self._replica.family, self._costs.version
        classes, figures = priced(key for key, _ in family.slots), self._figures.by(family.operators)
        return self._corrected(family, version, profile_of(figures, classes, coarse_profile(family, self._costs)))

    def _corrected(self, family: Family, version: int, raw: CostProfile) -> _State:
        correction = self._correction.copy()
        speed = math.exp(correction.speed)
        profile = dataclasses.replace(
            raw,
            alpha=raw.alpha.times(speed),
            packed=tuple(dataclasses.replace(point, seconds=point.seconds * speed) for point in raw.packed),
            beta={name: grid.times(correction.factor(name)) for name, grid in raw.beta.items()},
            steps={name: own.times(correction.factor(name)) for name, own in raw.steps.items()},
        )
        deltas = DeltaCosts(profile, (key for key, _ in family.slots))
        measured = frozenset(self._figures.by(family.operators).classes.keys() & raw.beta.keys())
        return _State(family, version, raw, correction, profile, deltas, measured)


def figures_file(path: pathlib.Path) -> SharedFile[Figures]:
    return SharedFile(path, "measured costs", Figures.from_json, Figures.to_json)
