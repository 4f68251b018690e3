"""The cost profile: seconds measured on one device at a few hundred points, and what lies between them.

alpha is the cost of the shared part of a batch, beta that of one method's delta work for some rows of one task (PetS
section 4.1). Interpolation is bilinear over a grid that was made monotone, so it is monotone as well.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jpets.scheduling.queue import Floats, Groups, Ints

FORMAT = 1
MOST_GROWTH = 16.0
"""Factor by which a cost that was not measured may exceed its neighbour."""
MOST_BESIDE = 64
"""Texts, or sets of them, up to which it is asked what a device computes at a time."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """``seconds`` [R, C] over ascending ``rows`` [R] and ``lengths`` [C]; NaN where nothing was measured."""

    rows: Ints
    lengths: Ints
    seconds: Floats

    def __post_init__(self) -> None:
        for name, axis in (("rows", self.rows), ("lengths", self.lengths)):
            if len(axis) == 0 or axis[0] < 1 or np.any(np.diff(axis) <= 0):
                raise ValueError(f"{name} of a cost grid must be ascending and positive, got {axis.tolist()}")
        if self.seconds.shape != (len(self.rows), len(self.lengths)):
            raise ValueError(f"a cost grid of {len(self.rows)} x {len(self.lengths)} has {self.seconds.shape} seconds")
        known = self.seconds[~np.isnan(self.seconds)]
        if np.isnan(self.seconds[0, 0]) or not np.all(np.isfinite(known)) or np.any(known < 0):
            raise ValueError("seconds of a cost grid must be finite and not negative, with the first one measured")

    @functools.cached_property
    def filled(self) -> Floats:
        """Without gaps, and ascending along both axes. A gap is what its three neighbours say: b c / a. On an edge it
        is what stands before it: a heavy delta costs a pass over its weights, however many the rows are."""
        full = self.seconds.copy()
        for r in range(full.shape[0]):
            for c in range(full.shape[1]):
                if np.isnan(full[r, c]):
                    before = float(full[r - 1, c] if r else full[r, c - 1])
                    beside = float(full[r, c - 1] if c else full[r - 1, c])
                    corner = float(full[r - 1, c - 1]) if r and c else min(before, beside)
                    full[r, c] = before * min(beside / corner, MOST_GROWTH) if corner > 0 else max(before, beside)
        return np.maximum.accumulate(np.maximum.accumulate(full, axis=0), axis=1)

    def at(self, rows: Sequence[int] | Ints, lengths: Sequence[int] | Ints) -> Floats:
        """Seconds [len(rows), len(lengths)]: bilinear between the points, held below, proportional beyond them."""
        along = np.stack([_interpolate(np.asarray(lengths), self.lengths, line) for line in self.filled])
        return _interpolate_lines(np.asarray(rows), self.rows, along)

    def times(self, factor: float) -> Grid:
        return dataclasses.replace(self, seconds=self.seconds * factor)

    def to_document(self) -> dict[str, Any]:
        seconds = [[None if np.isnan(cell) else cell for cell in line] for line in self.seconds.tolist()]
        return {"rows": self.rows.tolist(), "lengths": self.lengths.tolist(), "seconds": seconds}

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Grid:
        """The inverse of ``to_document``. Raises ``ValueError``, ``KeyError``, ``TypeError``."""
        seconds = [[np.nan if cell is None else float(cell) for cell in line] for line in document["seconds"]]
        return cls(
            np.array(document["rows"], np.int_), np.array(document["lengths"], np.int_), np.array(seconds, float)
        )


def _interpolate(at: Ints, points: Ints, values: Floats) -> Floats:
    """Linear between points, held below the first, proportional beyond the last."""
    return np.interp(at, points, values) * np.maximum(1.0, at / points[-1])


@dataclasses.dataclass(frozen=True)
class Steps:
    """Seconds of a class's loop over runs of tokens: for each task, for each step over its weights, and for each token
    that a step covers."""

    task: float
    step: float
    token: float

    def __post_init__(self) -> None:
        if not all(0 <= part < np.inf for part in (self.task, self.step, self.token)):
            raise ValueError(f"seconds of steps must be finite and not negative, got {self}")

    def seconds(self, tokens: Ints, run: int) -> Floats:
        """The time of tasks with so many ``tokens``, each in steps of ``run`` tokens; 0 where there are none."""
        own = self.task + -(-tokens // run) * (self.step + self.token * run)
        return np.where(tokens > 0, own, 0.0)

    def times(self, factor: float) -> Steps:
        return Steps(self.task * factor, self.step * factor, self.token * factor)


def _interpolate_lines(at: Ints, points: Ints, lines: Floats) -> Floats:
    """``_interpolate`` of each column of ``lines`` [points, C]: [at, C]. At once, as there are thousands of columns."""
    inside = np.clip(at, points[0], points[-1])
    after = np.searchsorted(points, inside).clip(min(1, len(points) - 1))
    before = np.maximum(after - 1, 0)
    part = (inside - points[before]) / np.maximum(points[after] - points[before], 1)
    found = np.where((part < 1)[:, None], lines[before] + part[:, None] * (lines[after] - lines[before]), lines[after])
    return found * np.maximum(1.0, at / points[-1])[:, None]


@dataclasses.dataclass(frozen=True)
class PackedPoint:
    """Measured seconds of a packed shape."""

    tokens: int
    groups: Groups
    seconds: float

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 <= self.seconds < np.inf:
            raise ValueError(f"a packed shape has tokens and takes a time, found {self.tokens} and {self.seconds}")

    @property
    def cells(self) -> int:
        """Attention positions: the sum of N L^2."""
        return attention_cells(self.groups)

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> PackedPoint:
        """The inverse of ``dataclasses.asdict``, after JSON made lists of its tuples."""
        groups = tuple((int(n), int(length)) for n, length in document["groups"])
        return cls(int(document["tokens"]), groups, float(document["seconds"]))


def attention_cells(groups: Groups) -> int:
    return sum(n * length**2 for n, length in groups)


@dataclasses.dataclass(frozen=True)
class CostProfile:
    """What was measured for one device, backbone, number format and set of delta classes.

    ``alpha`` is over padded shapes of N rows by L tokens, ``packed`` over packed ones. ``beta`` holds a grid for each
    delta kind, over rows of one task and their longest length. ``heavy`` names the kinds that programs loop over; such
    a loop in a program, even an empty one, makes the shared part slower by the share ``heavy_loop``. ``replaced`` has,
    for kinds with weights of their own, the share of the shared part that a batch saves when all its rows have that
    kind. ``steps`` says what heavy kinds cost in steps of a given length; ``beta`` has the best length for each number
    of tokens, but all tasks of a batch share one.
    """

    alpha: Grid
    packed: tuple[PackedPoint, ...]
    beta: Mapping[str, Grid]
    heavy: frozenset[str] = frozenset()
    heavy_loop: float = 0.0
    replaced: Mapping[str, float] = dataclasses.field(default_factory=dict)
    steps: Mapping[str, Steps] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.heavy_loop < np.inf or not self.heavy <= set(self.beta):
            raise ValueError("heavy kinds must have costs, and a finite share of their loops")
        if not set(self.replaced) <= self.heavy or any(not 0 <= share <= 1 for share in self.replaced.values()):
            raise ValueError("what replaced products save must be shares from 0 to 1, of heavy kinds")

    def beside(self, rows: int, length: int) -> int:
        """How many times ``rows`` texts of ``length`` tokens a device computes in at most twice the time of one: what
        waits longer than one execution would rather have been in the one before."""
        times = self.alpha.at(rows * np.arange(1, MOST_BESIDE + 1), [length])[:, 0]
        return int((times <= 2 * times[0]).sum())

    @functools.cached_property
    def attention_rate(self) -> float:
        """Seconds for one attention position (a query token by a key token, all heads and layers).

        Shapes of equal N L do equal work in every linear site: within such a set the cost rises with attention alone.
        """
        by_tokens: dict[int, list[tuple[int, float]]] = {}
        for r, n in enumerate(self.alpha.rows):
            for c, length in enumerate(self.alpha.lengths):
                if not np.isnan(seconds := self.alpha.seconds[r, c]):
                    by_tokens.setdefault(int(n * length), []).append((int(n * length**2), float(seconds)))
        above = below = 0.0
        for points in by_tokens.values():
            cells, seconds = np.array(points, float).T
            above += float(((cells - cells.mean()) * (seconds - seconds.mean())).sum())
            below += float(((cells - cells.mean()) ** 2).sum())
        return max(0.0, above / below) if below else 0.0

    @functools.cached_property
    def _packed_base(self) -> tuple[Ints, Floats]:
        """Tokens and seconds without attention, ascending; from the padded shapes where no packed one was measured."""
        points = self.packed or [
            PackedPoint(int(n * length), ((int(n), int(length)),), float(self.alpha.seconds[r, c]))
            for r, n in enumerate(self.alpha.rows)
            for c, length in enumerate(self.alpha.lengths)
            if not np.isnan(self.alpha.seconds[r, c])
        ]
        base: dict[int, list[float]] = {}
        for point in points:
            base.setdefault(point.tokens, []).append(max(0.0, point.seconds - self.attention_rate * point.cells))
        tokens = np.array(sorted(base))
        return tokens, np.maximum.accumulate([np.median(base[t]) for t in tokens.tolist()])

    def packed_seconds(self, tokens: int | Ints, cells: int | Ints) -> Floats:
        """Cost of the shared part for ``tokens`` packed tokens with ``cells`` attention positions."""
        points, base = self._packed_base
        return _interpolate(np.asarray(tokens), points, base) + self.attention_rate * np.asarray(cells, float)

    def packed_delta_seconds(self, kind: str, most: int) -> Floats:
        """Delta cost [most + 1] of 0 to ``most`` packed tokens of one task."""
        return np.append(0.0, self.beta[kind].at([1], np.arange(1, most + 1))[0])

    def to_json(self) -> str:
        document = {
            "format": FORMAT,
            "alpha": self.alpha.to_document(),
            "packed": [dataclasses.asdict(point) for point in self.packed],
            "beta": {name: each.to_document() for name, each in self.beta.items()},
            "heavy": sorted(self.heavy),
            "heavy_loop": self.heavy_loop,
            "replaced": dict(self.replaced),
            "steps": {name: dataclasses.asdict(own) for name, own in self.steps.items()},
        }
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> CostProfile:
        """Raises ``ValueError`` for a document that is truncated, of another format, or has negative or infinite
        figures."""
        try:
            document = json.loads(text)
            if document["format"] != FORMAT:
                raise ValueError(f"cost profile of format {document['format']!r}, expected {FORMAT}")
            packed = map(PackedPoint.of_document, document["packed"])
            return cls(
                Grid.of_document(document["alpha"]),
                tuple(packed),
                {str(name): Grid.of_document(each) for name, each in document["beta"].items()},
                frozenset(document["heavy"]),
                float(document["heavy_loop"]),
                {str(name): float(share) for name, share in document["replaced"].items()},
                {str(name): Steps(**own) for name, own in document.get("steps", {}).items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a cost profile: {type(error).__name__} {error}") from error


def ceil_to(steps: Sequence[int] | Ints, values: Ints) -> Ints:
    """Each value rounded up to the next of ``steps`` (ascending); 0 where none is large enough."""
    ladder = np.append(np.asarray(steps), 0)
    return ladder[np.searchsorted(ladder[:-1], values)]
