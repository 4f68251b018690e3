"""Which programs the traffic deserves: those of the plan that a window would have if it could choose among programs of
the shapes that were learnt from the traffic, or, for a few queries that run one by one, of one that takes them all."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import FULL, HEAVY_RUNS, Bucket, Variant, make_variant, replaces_weights, windowed
from jpets.engine.device.replica import Replica
from jpets.engine.planning.menu import Menu
from jpets.engine.planning.placing import COARSE_LEVELS, FEW_QUERIES, WORTHWHILE, Compiling
from jpets.engine.planning.predictions import Predictions
from jpets.engine.planning.ready_programs import kinds_of, shapes_for
from jpets.engine.planning.window import Pricing, Window
from jpets.engine.programs.program import ProgramKey
from jpets.engine.tasks.sorts import Sort
from jpets.scheduling.costs.ready_lookup import MIXED
from jpets.scheduling.policies.auto import Policy
from jpets.scheduling.queue import BARE, Batch

SHARE = 0.01
"""Share of the time of batches that looking for better programs may take."""
SLACK = 1.3
"""Times its share of the light rows for which a class gets room, as batches differ."""
LONG_TASK = 96
"""Tokens of a task in a window from which on its heavy deltas are worth long runs."""
STATIC_LEVEL = 4
"""Eighths of the most runs of a bucket for which programs have room that compute all of them."""


class Wishes:
    """``policy`` plans windows. ``compiling`` is told of programs and of the seconds that windows lost without them."""

    def __init__(
        self,
        replica: Replica,
        menu: Menu,
        predictions: Predictions,
        pricing: Pricing,
        policy: Policy,
        compiling: Compiling,
    ) -> None:
        self._replica = replica
        self._menu = menu
        self._predictions = predictions
        self._pricing = pricing
        self._policy = policy
        self._compiling = compiling
        self._next = 0.0
        """When another window may be looked at (``time.monotonic``)."""
        self._few: bool | None = False
        """Whether the last window that was planned had few queries; None where one batch takes them."""
        self._unseen = {True: 0.0, False: 0.0}
        """Predicted seconds of batches since a window was looked at: of windows of few queries, and of others. A single
        query that comes between large windows must not take from what these lose."""

    def ran(self, seconds: float) -> None:
        """Is told of the predicted time of a batch of a window's plan that runs."""
        if self._few is not None:
            self._unseen[self._few] += seconds

    def alone(self) -> None:
        """Is told of a window of one query, whose batch asks for its program itself."""
        self._few = None

    def planned(self, window: Window, batches: int, seconds: float) -> None:
        """Is told of a window, and of the number of batches and the device's predicted time of its plan in the programs
        that are ready. One batch of few queries asks for its program itself, when it is placed."""
        now = time.monotonic()
        few = len(window.queue) < FEW_QUERIES
        self._few = None if few and batches == 1 else few
        if now < self._next or self._few is None:
            return
        if few:
            together = next((bucket for bucket in self._menu.buckets if bucket.holds(window.queue.lengths)), None)
            buckets: Sequence[Bucket] = [] if together is None else [together]
        else:
            self._menu.saw(window.queue.lengths)
            buckets = self._menu.main
        self._compare(window, seconds, buckets, self._unseen[few])
        self._unseen[few] = 0.0
        self._next = now + (time.monotonic() - now) / SHARE

    def _compare(self, window: Window, seconds: float, buckets: Sequence[Bucket], unseen: float) -> None:
        """Asks for the programs of ``buckets`` with which a window's plan would take clearly less than ``seconds``, for
        what was lost of the ``unseen`` seconds."""
        ready = [(p.key.bucket, p.key.variant, p.seconds) for p in self._replica.for_mixtures]
        variants = possible_variants(window, static_runs=self._replica.family.operators.static_runs)
        possible = {ProgramKey(bucket, own): sort for own, sort in variants.items() for bucket in buckets}
        new = {
            key: sort
            for key, sort in possible.items()
            if not (self._replica.has_program(key) or self._compiling.barred(key))
        }
        if not new:
            return
        priced = [(key.bucket, key.variant, self._predictions.estimate(key)) for key in new]
        costs = self._pricing.made(window.sorts, shapes_for(window.sorts, [*ready, *priced]))
        plan = self._policy(window.queue, costs)
        best = costs.device_seconds(window.queue, plan)
        if best >= WORTHWHILE * seconds:
            return
        missing: dict[ProgramKey, float] = {}
        for batch in plan:
            sort = costs.sort_of(window.queue, batch.queries)
            key = next((k for k, own in new.items() if own == sort and _is_shape(batch, k.bucket)), None)
            if key is not None:
                missing[key] = missing.get(key, 0.0) + batch.seconds
        lost = unseen * (1 - best / seconds)
        for key, share in missing.items():
            self._compiling.want(key, lost * share / sum(missing.values()))


def _is_shape(batch: Batch, bucket: Bucket) -> bool:
    return (batch.tokens, batch.groups) == (bucket.tokens, bucket.groups)


def possible_variants(window: Window, *, static_runs: bool = False) -> dict[Variant, int]:
    """The variants that a window's batches may use, each with its sort (``ReadyCosts.sort_of``).

    With ``static_runs`` batches of one heavy kind have room for half of the most runs that there may be: all of it is
    computed.
    """
    queue, sorts = window.queue, window.sorts
    kinds = kinds_of(sorts)
    rows = np.bincount(queue.kinds, minlength=len(kinds))
    light = [sort for sort in sorts if not sort.heavy]
    found: dict[Variant, int] = {}
    if light:
        count = {key: sum(int(rows[kinds.index(s.kind)]) for s in light if key in s.classes) for key in _classes(light)}
        total = max(1, sum(int(rows[kinds.index(kind)]) for kind in {s.kind for s in light}))
        if len(window.queue) < FEW_QUERIES:  # shares of so few rows say little of the room that their tokens take
            room = dict.fromkeys(count, FULL)
        else:
            room = {key: _level(key, count[key] / total) for key in count}
        found[make_variant(room)] = BARE
    for at, kind in enumerate(kinds):
        own = [sort for sort in sorts if sort.kind == kind]
        if any(sort.heavy for sort in own):
            shared = frozenset.intersection(*(sort.classes for sort in own))
            replaced = any(replaces_weights(key) for key in shared)
            tokens = int(queue.lengths[queue.kinds == at].sum()) / max(1, len(set(queue.tasks[queue.kinds == at])))
            run = HEAVY_RUNS[-1] if tokens >= LONG_TASK else HEAVY_RUNS[0]
            room = {
                key: STATIC_LEVEL if static_runs and class_method(key.method).kind == "heavy" else FULL
                for key in _classes(own)
            }
            found.setdefault(make_variant(room, run, replaced=replaced), at)
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
