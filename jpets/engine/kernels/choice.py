"""The choice of candidates: what was found of each at each shape, and the one that computes a class's calls.

It is a JSON file beside the cost table. Its name has all that figures depend on; the file itself says it in words.
"""

from __future__ import annotations

import json
import logging
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jpets.engine.kernels.calls import Call, Table
from jpets.engine.kernels.trial import Outcome
from jpets.errors import OutOfSpace
from jpets.files import write_atomic
from pallas_kernels.gates import Device

log = logging.getLogger(__name__)

SUFFIX = ".kernels.json"
BETTER = 1.02
"""A candidate must be this much faster than the usual one."""


Outcomes = dict[str, Outcome]
"""By candidate."""


@dataclass
class Choice:
    """Outcomes by operator and shape. ``about`` says in words what they hold for."""

    about: dict[str, str]
    found: dict[tuple[str, str], Outcomes] = field(default_factory=dict)

    def missing(self, calls: Iterable[Call], table: Table, device: Device) -> list[tuple[Call, list[str]]]:
        """The candidates that were not tried yet, of the calls for which there is something to choose.

        Candidates that are out without a trial get their reason here. A call that only the reference takes is decided.
        """
        left = []
        for call in calls:
            operator, own = table[call.operator], self.found.setdefault(call.name, {})
            refused = {name: operator.refusal(name, device, call) for name in operator.candidates}
            own.update({name: Outcome(out=reason) for name, reason in refused.items() if reason})
            taken = [name for name in operator.open(device) if not refused[name]]
            taken.sort(key=lambda name: name != operator.default(device))  # the others are timed beside the usual one
            untried = [name for name in taken if name not in own]
            if untried and taken != [operator.reference]:
                left.append((call, untried))
        return left

    def best(self, calls: Sequence[Call], table: Table, device: Device) -> str:
        """The candidate with which these calls of one operator together are fastest.

        Where it does not take a call's operands it leaves them to the usual one. A candidate that is out at one of the
        calls is out; before the usual one is measured, and where none is faster, it computes them. The reference does
        where every other one is out.
        """
        operator = table[calls[0].operator]
        usual = operator.default(device)
        seconds = {
            name: found
            for name in operator.open(device)
            if (found := self._seconds(name, usual, calls, table, device)) is not None
        }
        tried = [self.found.get(call.name, {}).get(usual) for call in calls]
        if usual not in seconds and not any(outcome is not None and outcome.out for outcome in tried):
            return usual
        if not seconds:  # the usual one is out, and with the reference left there was nothing to measure
            return operator.reference
        best = min(seconds, key=lambda name: seconds[name])
        return best if BETTER * seconds[best] < seconds.get(usual, math.inf) else usual

    def _seconds(self, name: str, usual: str, calls: Sequence[Call], table: Table, device: Device) -> float | None:
        """Of all the calls with a candidate; None if it is out, or not measured. Where the usual one was timed beside
        it, their ratio counts: a device may have another speed at another time."""
        total, any_own = 0.0, False
        for call in calls:
            refused = bool(table[call.operator].refusal(name, device, call))
            known = self.found.get(call.name, {})
            outcome, base = known.get(usual if refused else name), known.get(usual)
            if outcome is None or outcome.out:
                return None
            any_own |= not refused
            beside = base is not None and not base.out and outcome.ratio
            total += base.seconds / outcome.ratio if base is not None and beside else outcome.seconds
        return total if any_own else None

    def save(self, path: pathlib.Path) -> None:
        """Writes the file. A full or read-only disk only makes the next start try again."""
        shapes: dict[str, dict[str, Any]] = {}
        for (operator, shape), outcomes in sorted(self.found.items()):
            shapes.setdefault(operator, {})[shape] = {name: each._asdict() for name, each in outcomes.items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps({"about": self.about, "operators": shapes}, indent=1).encode())
        except (OSError, OutOfSpace) as error:
            log.warning("the choice of kernels could not be kept: %s", error)


def read_choice(path: pathlib.Path) -> Choice | None:
    """The choice in a file; None where there is none. A damaged file counts as none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = {
            (str(operator), str(shape)): {str(name): _outcome(each) for name, each in outcomes.items()}
            for operator, shapes in data["operators"].items()
            for shape, outcomes in shapes.items()
        }
        return Choice({str(name): str(value) for name, value in data["about"].items()}, found)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        log.warning("the choice of kernels cannot be used and is made anew: %s", error)
        return None


def _outcome(stored: Mapping[str, Any]) -> Outcome:
    return Outcome(float(stored["seconds"]), float(stored["ratio"]), str(stored["out"]))


def kept_choices(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, Choice]]:
    """All choices of a folder of costs."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if (choice := read_choice(path)) is not None:
            yield path, choice
