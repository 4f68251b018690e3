"""Measured figures: what a cost profile is made of, kept for each class on its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jpets.deltas import class_method
from jpets.deltas.operators import Operators
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import replaces_weights
from jpets.scheduling.costs.measured_profile import CostProfile, Grid, PackedPoint, Steps

FORMAT = 4


@dataclasses.dataclass(frozen=True)
class ClassFigures:
    """One class. ``beta`` [rows of one task, their longest length] is in seconds. For heavy classes ``loop`` is the
    share by which it makes the shared part slower without any row in it, ``replaced`` the share of the shared part that
    a batch saves when all its rows have this class (0 where its rows need the shared products), and ``steps`` what beta
    is made of. ``operators`` are the candidates that it had of its own (``Operators.exceptions_of``)."""

    beta: Grid
    loop: float = 0.0
    replaced: float = 0.0
    steps: Steps | None = None
    operators: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.loop < np.inf or not 0 <= self.replaced <= 1:
            raise ValueError(f"shares of a class must be finite and not negative, got {self.loop}, {self.replaced}")

    def to_document(self) -> dict[str, Any]:
        steps = dataclasses.asdict(self.steps) if self.steps is not None else None
        return {
            "beta": self.beta.to_document(),
            "loop": self.loop,
            "replaced": self.replaced,
            "steps": steps,
            "operators": self.operators,
        }

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> ClassFigures:
        grid, steps = Grid.of_document(document["beta"]), document["steps"]
        own = Steps(**steps) if steps is not None else None
        operators = str(document["operators"])
        return cls(grid, float(document["loop"]), float(document["replaced"]), own, operators)


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured on one device for one backbone: alpha over padded and packed shapes (None and empty while it
    was not measured), and the figures of classes by their names, whatever other classes there are."""

    alpha: Grid | None = None
    packed: tuple[PackedPoint, ...] = ()
    classes: Mapping[str, ClassFigures] = dataclasses.field(default_factory=dict)

    def with_later(self, later: Figures) -> Figures:
        """These, and ``later`` ones in their place where both have figures."""
        return Figures(later.alpha or self.alpha, later.packed or self.packed, {**self.classes, **later.classes})

    def by(self, operators: Operators) -> Figures:
        """Without the figures of classes that had other candidates of operators when they were measured."""
        own = {name: each for name, each in self.classes.items() if each.operators == operators.exceptions_of(name)}
        return dataclasses.replace(self, classes=own)

    def to_json(self) -> str:
        document = {
            "format": FORMAT,
            "alpha": self.alpha.to_document() if self.alpha is not None else None,
            "packed": [dataclasses.asdict(point) for point in self.packed],
            "classes": {name: own.to_document() for name, own in self.classes.items()},
        }
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Figures:
        """Raises ``ValueError`` for a document that is truncated, of another format, or has negative or infinite
        figures."""
        try:
            document = json.loads(text)
            if document["format"] != FORMAT:
                raise ValueError(f"measured costs of format {document['format']!r}, expected {FORMAT}")
            alpha = document["alpha"]
            return cls(
                Grid.of_document(alpha) if alpha is not None else None,
                tuple(map(PackedPoint.of_document, document["packed"])),
                {str(name): ClassFigures.of_document(own) for name, own in document["classes"].items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not measured costs: {type(error).__name__} {error}") from error


def profile_of(figures: Figures, classes: Iterable[ClassKey], coarse: CostProfile | None = None) -> CostProfile:
    """The profile of ``classes``, with the figures of ``coarse`` where there are no measured ones."""
    keys = {str(key): key for key in classes}
    heavy = {name: key for name, key in keys.items() if class_method(key.method).kind == "heavy"}
    own = {name: figures.classes[name] for name in keys if name in figures.classes}
    other: Mapping[str, Grid] = coarse.beta if coarse is not None else {}
    steps = {name: coarse.steps[name] for name in heavy if name not in own} if coarse is not None else {}
    alpha = figures.alpha or (coarse.alpha if coarse is not None else None)
    if alpha is None:
        raise ValueError("a cost profile needs measured costs of bare shapes, or a coarse profile")
    return CostProfile(
        alpha,
        figures.packed or (coarse.packed if coarse is not None else ()),
        {name: own[name].beta if name in own else other[name] for name in keys},
        frozenset(heavy),
        sum(own[name].loop for name in heavy) if coarse is None or heavy.keys() <= own.keys() else coarse.heavy_loop,
        {name: own[name].replaced if name in own else 0.0 for name, key in heavy.items() if replaces_weights(key)},
        steps | {name: found for name in heavy if name in own and (found := own[name].steps) is not None},
    )
