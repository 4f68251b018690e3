"""The batches of several tasks that run side by side, and their shapes.

Texts stand one after the other without padding between them, so a group computes little more than its tokens. The
schedule of a whole run is known before it starts, and so are the few shapes that pad it least.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Int

from jpets.training.batches import Rows, batch_order, gather_packed, packed_texts
from jpets.training.forward import PackedRows
from jpets.training.losses import Labels
from jpets.training.plan import SettledPlan, TrainingPlan, settled

CPU_GROUP = 4
"""Tasks side by side on a CPU: with more, the results of one operation do not stay in its caches for the next."""
PROGRAMS = 8
"""Most shapes of a run: each is a program to compile."""
STEP = 8
"""A shape's sizes are multiples of this."""


class Group(NamedTuple):
    """One batch of each of a few tasks."""

    tasks: Int[np.ndarray, " group"]
    """The tasks' numbers, [group]; the number after the last task's stands for no task."""
    rows: PackedRows
    """[group, tokens], [group, batch]"""
    labels: Labels


class Shape(NamedTuple):
    """Places for the tokens of each task of a group, and for those of its longest text."""

    tokens: int
    longest: int


class _Batches(NamedTuple):
    """Row numbers of one batch of each task of a group."""

    chosen: dict[int, npt.NDArray[np.intp]]
    needs: Shape


def each_step(data: Sequence[Rows], plan: TrainingPlan, pad_id: int) -> Iterator[list[Group]]:
    """One batch of each task that still has one, with batches of similar size side by side, step by step.

    The plan must give all tasks batches of one size."""
    size = min(CPU_GROUP, len(data)) if jax.default_backend() == "cpu" else len(data)
    plans = [settled(plan, len(rows.tokens)) for rows in data]
    batch = plans[0].batch
    steps = [_side_by_side(data, chosen, batch, size) for chosen in _batches_by_step(data, plans)]
    shapes = best_shapes([part.needs for parts in steps for part in parts], PROGRAMS)
    for parts in steps:
        yield [_group(data, part, shapes, batch, size, pad_id) for part in parts]


def best_shapes(needs: Iterable[Shape], most: int) -> list[Shape]:
    """At most this many shapes, smallest first, that together have the fewest places for tokens if each of ``needs``
    takes the first shape with enough places."""
    longest: dict[int, int] = {}
    counts: Counter[int] = Counter()
    for tokens, length in needs:
        size = _rounded(tokens)
        counts[size] += 1
        longest[size] = max(longest.get(size, 0), _rounded(length))
    sizes = sorted(counts)
    before = np.append(0, np.cumsum([counts[size] for size in sizes]))
    # places[n]: the fewest for the n smallest sizes, with one more shape a round; begins: where the last shape begins.
    places, begins = np.where(before == 0, 0.0, np.inf), []
    for _ in range(min(most, len(sizes))):
        costs = [(before[n] - before[:n]) * sizes[n - 1] + places[:n] for n in range(1, len(sizes) + 1)]
        begins.append([0, *(int(np.argmin(own)) for own in costs)])
        places = np.array([0.0, *(float(own.min()) for own in costs)])
    found, end = [], len(sizes)
    for begin in reversed(begins):
        if begin[end] < end:
            found.append(Shape(sizes[end - 1], max(longest[size] for size in sizes[begin[end] : end])))
        end = begin[end]
    return found[::-1]


def _batches_by_step(data: Sequence[Rows], plans: Sequence[SettledPlan]) -> Iterator[dict[int, npt.NDArray[np.intp]]]:
    """Row numbers of the next batch of each task that still has one."""
    orders = [_own_batches(rows, plan) for rows, plan in zip(data, plans, strict=True)]
    for batches in itertools.zip_longest(*orders):
        yield {at: batch for at, batch in enumerate(batches) if batch is not None}


def _own_batches(rows: Rows, plan: SettledPlan) -> Iterator[npt.NDArray[np.intp]]:
    """Row numbers of each batch of all epochs."""
    lengths = [len(own.ids) for own in rows.tokens]
    for epoch in range(plan.epochs):
        yield from batch_order(lengths, plan, epoch)


def _side_by_side(
    data: Sequence[Rows], chosen: dict[int, npt.NDArray[np.intp]], batch: int, size: int
) -> list[_Batches]:
    """The batches in groups of ``size`` tasks."""
    tokens = {at: [len(text.ids) for text in packed_texts(data[at], own, batch)] for at, own in chosen.items()}
    order = sorted(chosen, key=lambda at: sum(tokens[at]))
    found = []
    for start in range(0, len(order), size):
        own = order[start : start + size]
        needs = Shape(max(sum(tokens[at]) for at in own), max(max(tokens[at]) for at in own))
        found.append(_Batches({at: chosen[at] for at in own}, needs))
    return found


def _group(data: Sequence[Rows], part: _Batches, shapes: Sequence[Shape], batch: int, size: int, pad_id: int) -> Group:
    shape = next(each for each in shapes if each.tokens >= part.needs.tokens)
    own, missing = list(part.chosen.items()), size - len(part.chosen)
    parts = [gather_packed(data[at], chosen, batch, pad_id, *shape) for at, chosen in own + own[-1:] * missing]
    rows, labels = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    return Group(np.array([*part.chosen, *[len(data)] * missing], np.int32), rows, labels)


def _rounded(size: int) -> int:
    return STEP * -(-size // STEP)
