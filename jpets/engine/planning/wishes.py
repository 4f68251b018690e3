"""Which programs the traffic deserves: those of the plan that a window would have if every program of the menu were
there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import FULL, HEAVY_RUNS, Variant, make_variant, replaces_weights, windowed
from jpets.engine.planning.menu import Menu
from jpets.engine.planning.placing import COARSE_LEVELS, WORTHWHILE
from jpets.engine.planning.predictions import Predictions
from jpets.engine.planning.ready_programs import kinds_of, shapes_for
from jpets.engine.planning.window import Pricing, Window
from jpets.engine.programs.program import ProgramKey
from jpets.engine.tasks.sorts import Sort
from jpets.scheduling.policies.packed import packed
from jpets.scheduling.queue import Batch

LEAST_QUERIES = 8
"""A window with fewer is one batch: what it misses is seen when that is placed."""
SHARE = 0.01
"""Share of the time of batches that looking for better programs may take."""
SLACK = 1.3
"""Times its share of the light rows for which a class gets room, as batches differ."""
LIGHT, MIXED = -1, -2
"""Sorts of programs beside those of one heavy kind."""


class Wishes:
    """``want`` is told of a program and of the seconds that windows lost without it."""

    def __init__(
        self, menu: Menu, predictions: Predictions, pricing: Pricing, want: Callable[[ProgramKey, float], None]
    ) -> None:
        self._menu = menu
        self._predictions = predictions
        self._pricing = pricing
        self._want = want
        self._next = 0.0
        """When another window may be looked at (``time.monotonic``)."""
        self._unseen = 0.0
        """Predicted seconds of windows since one was looked at."""

    def planned(self, window: Window, seconds: float, has: Callable[[ProgramKey], bool]) -> None:
        """Is told of a window and of the predicted time of its plan in the programs that are ready."""
        self._unseen += seconds
        now = time.monotonic()
        if len(window.queue) < LEAST_QUERIES or now < self._next:
            return
        self._menu.saw(window.queue.lengths)
        self._compare(window, seconds, has)
        self._unseen = 0.0
        self._next = now + (time.monotonic() - now) / SHARE

    def _compare(self, window: Window, seconds: float, has: Callable[[ProgramKey], bool]) -> None:
        variants = possible_variants(window)
        keys = [ProgramKey(bucket, variant) for variant in variants for bucket in self._menu.buckets]
        priced = [(key.bucket, key.variant, self._predictions.estimate(key)) for key in keys]
        costs = self._pricing.costs(window.sorts, shapes_for(window.sorts, priced))
        plan = packed(window.queue, costs)
        best = costs.total(window.queue, plan)
        if best >= WORTHWHILE * seconds:
            return
        by_shape = {(key.bucket.tokens, key.bucket.groups, key.variant): key for key in keys}
        missing: dict[ProgramKey, float] = {}
        for batch in plan:
            variant = self._variant(window, batch, variants)
            key = by_shape[batch.tokens, batch.groups, variant]
            if not has(key):
                missing[key] = missing.get(key, 0.0) + batch.seconds
        lost = self._unseen * (1 - best / seconds)
        for key, share in missing.items():
            self._want(key, lost * share / sum(missing.values()))

    def _variant(self, window: Window, batch: Batch, variants: Mapping[Variant, int]) -> Variant:
        """The variant for a batch: without heavy classes, of its one heavy kind, or for all."""
        heavy = {at for at, kind in enumerate(kinds_of(window.sorts)) if _is_heavy(window.sorts, kind)}
        kinds = set(window.queue.kinds[batch.queries].tolist())
        sort = LIGHT if not kinds & heavy else kinds.pop() if len(kinds) == 1 else MIXED
        return next(variant for variant, own in variants.items() if own == sort)


def _is_heavy(sorts: Iterable[Sort], kind: tuple[str, ...]) -> bool:
    return any(sort.heavy for sort in sorts if sort.kind == kind)


def possible_variants(window: Window) -> dict[Variant, int]:
    """The variants that a window's batches may use, each with its sort: LIGHT, MIXED, or a heavy kind."""
    queue, sorts = window.queue, window.sorts
    kinds = kinds_of(sorts)
    rows = np.bincount(queue.kinds, minlength=len(kinds))
    light = [sort for sort in sorts if not sort.heavy]
    found: dict[Variant, int] = {}
    if light:
        count = {key: sum(int(rows[kinds.index(s.kind)]) for s in light if key in s.classes) for key in _classes(light)}
        total = max(1, sum(int(rows[kinds.index(kind)]) for kind in {s.kind for s in light}))
        found[make_variant({key: _level(key, count[key] / total) for key in count})] = LIGHT
    for at, kind in enumerate(kinds):
        own = [sort for sort in sorts if sort.kind == kind]
        if any(sort.heavy for sort in own):
            shared = frozenset.intersection(*(sort.classes for sort in own))
            replaced = any(replaces_weights(key) for key in shared)
            tokens = int(queue.lengths[queue.kinds == at].sum()) / max(1, len(set(queue.tasks[queue.kinds == at])))
            run = next((run for run in HEAVY_RUNS if run >= tokens), HEAVY_RUNS[-1])
            found.setdefault(make_variant(dict.fromkeys(_classes(own), FULL), run, replaced=replaced), at)
    if len(light) < len(sorts):
        found.setdefault(make_variant(dict.fromkeys(_classes(sorts), FULL)), MIXED)
    return found


def _classes(sorts: Iterable[Sort]) -> frozenset[ClassKey]:
    return frozenset[ClassKey]().union(*(sort.classes for sort in sorts))


def _level(key: ClassKey, share: float) -> int:
    """Room for a class that this share of the light rows uses."""
    if not windowed(key):
        return FULL
    return next((level for level in COARSE_LEVELS if level >= share * SLACK * FULL), FULL)
