"""Corrects figures by what batches took: how fast the machine is now, and by which factor each class was misjudged.

A batch gives one time for all that is in it. A Kalman filter on logarithms shares its error out: each part gets as much
as it is uncertain and as it takes of the batch. What was seen often is certain and changes slowly, so that a machine
that becomes slow as a whole changes its speed and not what classes cost beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from jpets.engine.costs.cost_table import SURPRISE

COARSE, MEASURED = 0.5, 0.15
"""Standard deviations of the logarithm of a class's figure: by arithmetic, and measured."""
CERTAIN = 0.03
"""The least that it becomes: classes may always change a little."""
PROGRAM = 0.1
"""That of a program's time without heavy rows."""
NOISE = 0.1
"""That of a batch's time."""
SPEED_HABIT = 0.05
"""Weight of the latest batch in the machine's speed."""
MOST = math.log(4.0)
"""Factors stay between a quarter and four."""


class Correction:
    """``scales`` holds the logarithm of each heavy class's factor, ``speed`` that of the machine's: above 0 if it is
    slower than when it was measured."""

    def __init__(self) -> None:
        self.speed = 0.0
        self.scales: dict[str, float] = {}
        self._variances: dict[str, float] = {}

    def known(self, classes: Iterable[str]) -> None:
        """The figures of these classes were measured anew."""
        for name in classes:
            self.scales[name] = 0.0
            self._variances[name] = MEASURED**2

    def light(self, expected: float, seconds: float) -> None:
        """A batch without heavy rows took ``seconds``; the program's own time was ``expected`` when it was measured."""
        self.speed += SPEED_HABIT * (_surprise(seconds, expected * math.exp(self.speed)))
        self.speed = min(MOST, max(-MOST, self.speed))

    def heavy(self, program: float, parts: Mapping[str, float], seconds: float) -> None:
        """A batch took ``seconds``, of which ``program`` were expected for the program and ``parts`` for the rows of
        each heavy class, with the factors so far."""
        expected = program + sum(parts.values())
        if expected <= 0:
            return
        error = _surprise(seconds, expected)
        shares = {name: part / expected for name, part in parts.items()}
        variances = {name: self._variances.setdefault(name, COARSE**2) for name in shares}
        total = (PROGRAM * program / expected) ** 2 + NOISE**2
        total += sum(variances[name] * share**2 for name, share in shares.items())
        for name, share in shares.items():
            gain = variances[name] * share / total
            moved = self.scales.get(name, 0.0) + gain * error
            self.scales[name] = min(MOST, max(-MOST, moved))
            self._variances[name] = max(CERTAIN**2, variances[name] * (1 - gain * share))

    def factor(self, name: str) -> float:
        """By which to multiply a class's figure."""
        return math.exp(self.speed + self.scales.get(name, 0.0))

    def moved(self, other: Correction) -> float:
        """The largest difference of a factor's logarithm."""
        names = self.scales.keys() | other.scales.keys()
        scales = (abs(self.scales.get(name, 0.0) - other.scales.get(name, 0.0)) for name in names)
        return max(abs(self.speed - other.speed), *scales, 0.0)

    def copy(self) -> Correction:
        made = Correction()
        made.speed, made.scales, made._variances = self.speed, dict(self.scales), dict(self._variances)
        return made


def _surprise(seconds: float, expected: float) -> float:
    """The logarithm of how much longer it took; what is beyond ``SURPRISE`` has other reasons."""
    return math.log(min(SURPRISE, max(1 / SURPRISE, seconds / max(expected, 1e-9))))
