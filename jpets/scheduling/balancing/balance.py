"""Which tasks move between devices so that all have equal work (multi-GPU PetS section 2.3.2, Algorithm 3).

A *load* is the number of calls to a device's tasks in a window. Callers may weigh calls (by predicted seconds, say):
any finite number that is not negative will do. A task that stands on several devices shares its calls evenly among
them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jpets.scheduling.balancing.room import Room, RoomLeft
from jpets.scheduling.queue import Bools, Floats

T = TypeVar("T", bound=Hashable)
Placement = Sequence[Collection[T]]
"""For each device the tasks that it holds."""
EPSILON = 1e-9
"""Share of all calls below which two loads count as equal."""


class Move(NamedTuple, Generic[T]):
    """One task goes from device ``source`` to ``target``; with ``copy`` it stays on ``source`` as well."""

    task: T
    source: int
    target: int
    copy: bool = False


@dataclasses.dataclass(frozen=True)
class Balanced(Generic[T]):
    """``moves`` in an order in which they may be made, the ``placement`` that they lead to, its ``loads`` [devices].

    ``moved`` is the size of all moves, in the unit of the sizes that were given.
    """

    moves: tuple[Move[T], ...]
    placement: tuple[tuple[T, ...], ...]
    loads: Floats
    moved: float

    @property
    def gap(self) -> float:
        """Most loaded device minus least loaded one, in calls."""
        return gap(self.loads)


def gap(loads: Sequence[float] | Floats) -> float:
    """delta of Algorithm 3: the largest load minus the smallest."""
    return float(np.max(loads) - np.min(loads))


def balance(loads: Sequence[float] | Floats) -> float:
    """phi = Lmin / Lmax of the devices' mean queue lengths, or loads: 1 is balanced, as is an idle system."""
    values = np.asarray(loads, float)
    if values.size == 0 or not np.all(np.isfinite(values)) or np.any(values < 0):
        raise ValueError(f"expected a finite load of at least 0 for each device, got {values.tolist()}")
    most = float(values.max())
    return float(values.min()) / most if most > 0 else 1.0


def device_loads(placement: Placement[T], calls: Mapping[T, float], standing: Sequence[float] | None = None) -> Floats:
    """Load [devices]: what is ``standing`` there, and its part of the calls of each task that it holds."""
    return _loads(placement, _shares(placement, calls), standing)


def greedy(
    placement: Placement[T],
    calls: Mapping[T, float],
    sizes: Mapping[T, float] | None = None,
    *,
    standing: Sequence[float] | None = None,
) -> Balanced[T]:
    """Algorithm 3 as it is printed: while the gap shrinks, the least-called task of the most loaded device goes to the
    least loaded one.

    Of equal devices and tasks the first is taken. As printed, the algorithm stops at a task without calls, and at two
    most loaded devices of equal load; it ignores the targets' memory. The paper has no ``standing`` load (see
    ``improved``) and no replicas: a task that the least loaded device holds as well is passed over.
    """
    _check(placement, calls)
    share = _shares(placement, calls)
    loads = _loads(placement, share, standing).tolist()
    held = [list(tasks) for tasks in placement]
    room, moves = Room(sizes or {}), list[Move[T]]()
    while True:
        source, target = loads.index(max(loads)), loads.index(min(loads))
        apart = set(held[target])
        task = min((task for task in held[source] if task not in apart), key=share.__getitem__, default=None)
        if task is None or source == target:
            break
        after = list(loads)
        after[source] -= share[task]
        after[target] += share[task]
        if gap(after) >= gap(loads) - EPSILON * sum(loads):
            break
        held[source].remove(task)
        held[target].append(task)
        moves.append(Move(task, source, target))
        loads = after
    return Balanced(tuple(moves), _frozen(held), np.array(loads), math.fsum(room.size(move.task) for move in moves))


def improved(
    placement: Placement[T],
    calls: Mapping[T, float],
    room: Room[T] | None = None,
    *,
    standing: Sequence[float] | None = None,
    copies: bool = True,
    slack: float = 0.0,
) -> Balanced[T]:
    """Moves, each the one that leaves the best load vector, until none makes it better.

    Vectors are compared from the most loaded device down, so of two most loaded devices either may be relieved. Tasks
    without calls stay, targets have ``room``, and with ``copies`` a task with more calls than a device's fair share is
    replicated where that makes the vector better. Every step makes the vector better and none makes the gap larger.
    ``standing`` is load of each device that no move takes along, such as queries that wait there; it counts in the
    result's loads. It stops at a gap of at most ``slack`` calls: counts over a short time are not that exact.

    Neither the most loaded device nor the gap is left worse than by ``greedy``, except where greedy's moves have no
    room or ``slack`` stops sooner.
    """
    _check(placement, calls)
    room = Room() if room is None else room
    room.check(len(placement))
    fixed = _standing(placement, standing)
    own = _State(placement, calls, room, fixed)
    own.descend(copies, slack)
    if own.gap <= slack:
        return own.result()
    other = _State(placement, calls, room, fixed)
    moves = greedy(placement, calls, standing=standing).moves
    if not all(other.try_move(move) for move in moves):
        return own.result()
    plain = other.loads
    other.descend(copies, slack)
    as_good = own.loads.max() <= plain.max() + own.least and own.gap <= gap(plain) + own.least
    return own.result() if as_good and not _better(other.loads, own.loads, own.least) else other.result()


class _State(Generic[T]):
    """A placement in the making, as arrays over devices and the tasks that were called."""

    def __init__(self, placement: Placement[T], calls: Mapping[T, float], room: Room[T], standing: Floats) -> None:
        self.tasks = [task for task in dict.fromkeys(itertools.chain(*placement)) if calls.get(task, 0) > 0]
        self.number = {task: at for at, task in enumerate(self.tasks)}
        self.idle = [[task for task in held if task not in self.number] for held in placement]
        self.holds: Bools = np.zeros((len(placement), len(self.tasks)), bool)
        for device, held in enumerate(placement):
            self.holds[device, [self.number[task] for task in held if task in self.number]] = True
        self.calls = np.array([float(calls[task]) for task in self.tasks])
        self.room = RoomLeft(room, len(placement), self.tasks)
        self.standing = standing
        self.moves: list[Move[T]] = []
        self.least = EPSILON * float(self.calls.sum() + standing.sum())
        self._update()

    def _update(self) -> None:
        self.share = self.calls / self.holds.sum(axis=0)
        self.loads: Floats = self.standing + self.holds @ self.share

    @property
    def gap(self) -> float:
        return gap(self.loads)

    def descend(self, copies: bool, slack: float) -> None:
        while self.gap > slack + self.least:
            options = [*self._best_move(), *(self._good_copies() if copies else ())]
            if not options:
                return
            self._make(options[_first_best(np.array([loads for loads, _ in options]))][1])

    def try_move(self, move: Move[T]) -> bool:
        """Makes a move of the least-called; False where there is no room for it."""
        task = self.number.get(move.task)
        if task is None or not self._fits(task)[move.target]:
            return False
        self._make(move)
        return True

    def _make(self, move: Move[T]) -> None:
        task = self.number[move.task]
        self.holds[move.target, task] = True
        self.room.take(task, move.target)
        if not move.copy:
            self.holds[move.source, task] = False
        self.moves.append(move)
        self._update()

    def _fits(self, tasks: int | np.ndarray) -> Bools:
        """Whether each device [devices, ...] has room for a task that it does not hold."""
        return self.room.fits(tasks) & ~self.holds[:, tasks]

    def _best_move(self) -> list[tuple[Floats, Move[T]]]:
        """The best load vector that a move from the most loaded device leads to, and that move. Where no move from
        there makes the vector better, the next device is tried.

        A task of w calls makes the vector better where w is less than the difference of the two loads, most where it is
        nearest to half of it; so one task for each target is enough to compare.
        """
        for load in sorted(set(self.loads.tolist()), reverse=True):
            found: list[tuple[int, int, int]] = []
            for source in np.flatnonzero(self.loads == load).tolist():
                own = np.flatnonzero(self.holds[source])
                if len(own) == 0:
                    continue
                apart = (load - self.loads)[:, None]
                good = self._fits(own) & (self.share[own] < apart - self.least)
                far = np.where(good, np.abs(self.share[own] - apart / 2), np.inf)
                best = far.argmin(axis=1)
                for target in np.flatnonzero(good.any(axis=1)).tolist():
                    found.append((int(own[best[target]]), source, target))
            if found:
                after = np.tile(self.loads, (len(found), 1))
                tasks, sources, targets = np.array(found).T
                after[np.arange(len(found)), sources] -= self.share[tasks]
                after[np.arange(len(found)), targets] += self.share[tasks]
                first = _first_best(after)
                task, source, target = found[first]
                return [(after[first], Move(self.tasks[task], source, target))]
        return []

    def _good_copies(self) -> list[tuple[Floats, Move[T]]]:
        """Of each task with more calls at a place than a device's fair share, a further replica on the least loaded
        device with room, where that makes the vector better."""
        fair = float(self.calls.sum()) / len(self.loads)
        found: list[tuple[Floats, Move[T]]] = []
        for task in np.flatnonzero(self.share > fair + self.least).tolist():
            room = np.flatnonzero(self._fits(task))
            if len(room) == 0:
                continue
            target = int(room[self.loads[room].argmin()])
            holders = self.holds[:, task]
            split = self.calls[task] / (holders.sum() + 1)
            after = self.loads - holders * (self.share[task] - split)
            after[target] += split
            if _better(after, self.loads, self.least) and gap(after) <= self.gap + self.least:
                source = int(np.where(holders, self.loads, -np.inf).argmax())
                found.append((after, Move(self.tasks[task], source, target, copy=True)))
        return found

    def result(self) -> Balanced[T]:
        held = [
            [*idle, *(self.tasks[task] for task in np.flatnonzero(holds))]
            for idle, holds in zip(self.idle, self.holds, strict=True)
        ]
        moved = math.fsum(self.room.sizes[self.number[move.task]] for move in self.moves)
        return Balanced(tuple(self.moves), _frozen(held), self.loads, moved)


def _first_best(vectors: Floats) -> int:
    """The least of load vectors [n, devices], compared from the most loaded device down."""
    descending = -np.sort(-vectors, axis=1)
    return int(np.lexsort(descending.T[::-1])[0])


def _better(loads: Floats, others: Floats, within: float) -> bool:
    """Whether the most loaded device in which two vectors differ has less in ``loads``."""
    differences = np.sort(loads)[::-1] - np.sort(others)[::-1]
    apart = np.flatnonzero(np.abs(differences) > within)
    return bool(len(apart) and differences[apart[0]] < 0)


def _shares(placement: Placement[T], calls: Mapping[T, float]) -> dict[T, float]:
    places = Counter(itertools.chain(*placement))
    return {task: calls.get(task, 0) / count for task, count in places.items()}


def _loads(placement: Placement[T], share: Mapping[T, float], standing: Sequence[float] | None) -> Floats:
    return _standing(placement, standing) + [math.fsum(share[task] for task in held) for held in placement]


def _frozen(held: Iterable[Iterable[T]]) -> tuple[tuple[T, ...], ...]:
    return tuple(tuple(tasks) for tasks in held)


def _standing(placement: Placement[T], standing: Sequence[float] | None) -> Floats:
    fixed = np.zeros(len(placement)) if standing is None else np.asarray(standing, float)
    if len(fixed) != len(placement) or not np.all(np.isfinite(fixed)) or np.any(fixed < 0):
        raise ValueError(f"expected a standing load of at least 0 for each of {len(placement)} devices, got {standing}")
    return fixed


def _check(placement: Placement[T], calls: Mapping[T, float]) -> None:
    if len(placement) == 0:
        raise ValueError("tasks can be balanced between one device or more, got none")
    if any(len(set(tasks)) != len(tasks) for tasks in placement):
        raise ValueError("a device holds a task once: name each task once for each device")
    if any(not 0 <= count < math.inf for count in calls.values()):
        raise ValueError("calls must be finite and not negative")
    placed = set(itertools.chain(*placement))
    homeless = [task for task, count in calls.items() if count > 0 and task not in placed]
    if homeless:
        raise ValueError(f"every task that was called must stand on a device; {len(homeless)} do not: {homeless[:3]}")
