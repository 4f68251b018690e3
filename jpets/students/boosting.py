"""Students trained one after the other, each to correct the others (Student Parallelism section 3.1, Algorithm 1).

Axes: n texts, d hidden of the students, t hidden of the teacher, m students.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from jpets.deltas.recipe import Tree
from jpets.students.student import Student
from jpets.students.texts import StudentBatch, Texts
from jpets.training.fit import Trained
from jpets.training.objective import fit_batches
from jpets.training.plan import SettledPlan, TrainingPlan, settled
from jpets.training.run import Keeper, UpdateReport

MapToTeacher = Float[np.ndarray, "d t"]
LATER = 0.5
"""Updates of a further student, as a part of the first one's: its texts are fewer, and come more often."""
LEAST_MULTIPLIER = 0.1
"""A further student begins as a copy of the last one, which has given what it can: with a multiplier of one it would
first have to forget all that, and with less than this it would hardly be told what is missing."""


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """How a group is trained. ``training`` holds for each student and for the pruning after them."""

    training: TrainingPlan = dataclasses.field(default_factory=TrainingPlan)
    most: int = 4
    """Most students."""
    stacking: float = 1.0
    """Lambda of equation 4; 0: a student does not imitate those before it."""
    worst: float = 0.1
    """Share of the texts that a further student learns on because the others are furthest from the teacher there."""
    random: float = 0.1
    """Share of the texts that it learns on besides, at random."""
    boosting: bool = True
    """False: every student learns the teacher itself on texts of its own (bagging)."""
    pruning: bool = True
    """False: only the whole group learns to answer (Algorithm 2 without sizes)."""
    copies: int = 1
    """Varied copies of each text to learn from."""


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """Trained students: their parameters and multipliers. ``left`` is how much of the variance of the teacher's
    vectors the first 1, 2, ... of them leave on held-out texts; ``to_teacher`` maps their sum to a teacher of another
    width."""

    trees: tuple[Tree, ...]
    multipliers: tuple[float, ...]
    left: tuple[float, ...]
    to_teacher: MapToTeacher | None


def boost(
    student: Student,
    texts: Texts,
    held_out: Texts,
    plan: GroupPlan,
    *,
    keeper: Callable[[int], Keeper | None] = lambda number: None,
    report: Callable[[int, UpdateReport], None] = lambda number, step: None,
) -> Ensemble:
    """Algorithm 1: the first student learns the teacher's vectors from all texts; each further one begins as a copy of
    the last, and learns what the sum still lacks, on the texts where most is missing and on some others. Its multiplier
    is trained with it from the best one of the copy on, and in the end the best one over all texts is taken. Students
    are added while the held-out error falls, up to ``plan.most``.

    ``keeper`` keeps the progress of the student of a number.
    """
    variance = float(np.square(texts.lessons.vectors - texts.lessons.vectors.mean(0)).sum(1).mean()) or 1.0
    course = _Course(student, plan, variance)
    trees: list[Tree] = []
    multipliers: list[float] = []
    left: list[float] = []
    to_teacher: MapToTeacher | None = None
    sums = [np.zeros((len(own), student.encoder.config.hidden_size), np.float32) for own in (texts, held_out)]
    tree: Tree = student.recipe.start(np.random.default_rng(plan.training.seed))
    for number in range(plan.most):
        chosen = _chosen(texts, sums[0], to_teacher, number, plan)
        if not plan.boosting:
            tree = student.recipe.start(np.random.default_rng(plan.training.seed))
        tree, to_teacher = course.run(
            number, tree, texts, chosen, sums, held_out, to_teacher, keeper(number), partial(report, number)
        )
        given = [student.of_texts([tree], each.tokens)[0] for each in (texts, held_out)]
        multiplier = 1.0 if plan.boosting else 1.0 / plan.most
        if number and plan.boosting:
            multiplier = best_multiplier(texts.lessons.vectors, sums[0], given[0], to_teacher)
        after = [before + np.float32(multiplier) * own for before, own in zip(sums, given, strict=True)]
        error = _error(after[1], held_out.lessons.vectors, to_teacher, variance)
        if plan.boosting and left and not error < left[-1]:
            break  # it overfits: the last student is dropped (line 16)
        trees.append(tree)
        multipliers.append(multiplier)
        left.append(error)
        sums = after
    return Ensemble(tuple(trees), tuple(multipliers), tuple(left), to_teacher)


def _chosen(
    texts: Texts, sums: Float[np.ndarray, "n d"], to_teacher: MapToTeacher | None, number: int, plan: GroupPlan
) -> Integer[np.ndarray, " _"]:
    """The texts that a student learns on: all for the first one."""
    count = len(texts)
    if number == 0 and plan.boosting:
        return np.arange(count)
    rng = np.random.default_rng([plan.training.seed, number])
    if not plan.boosting:
        return np.sort(rng.choice(count, max(1, count // 2), replace=False))
    missing = np.square(texts.lessons.vectors - _mapped(sums, to_teacher)).sum(1)
    worst = np.argsort(-missing, kind="stable")[: max(1, round(plan.worst * count))]
    others = np.setdiff1d(np.arange(count), worst)
    drawn = rng.choice(others, min(len(others), round(plan.random * count)), replace=False)
    return np.sort(np.concatenate([worst, drawn]))


def best_multiplier(
    vectors: Float[np.ndarray, "n t"],
    before: Float[np.ndarray, "n d"],
    student: Float[np.ndarray, "n d"],
    to_teacher: MapToTeacher | None,
) -> float:
    """The multiplier of a student whose sum with those ``before`` is nearest to the teacher: <R, S> / <S, S>."""
    missing, own = vectors - _mapped(before, to_teacher), _mapped(student, to_teacher)
    return float((missing * own).sum() / max(float(np.square(own).sum()), 1e-12))


class _Course:
    """The training of one student after another."""

    def __init__(self, student: Student, plan: GroupPlan, variance: float) -> None:
        self._student, self._plan, self._variance = student, plan, variance

    def run(
        self,
        number: int,
        start: Tree,
        texts: Texts,
        chosen: Integer[np.ndarray, " _"],
        sums: Sequence[Float[np.ndarray, "_ d"]],
        held_out: Texts,
        to_teacher: MapToTeacher | None,
        keeper: Keeper | None,
        report: Callable[[UpdateReport], None],
    ) -> tuple[Tree, MapToTeacher | None]:
        """(the student, the map to the teacher's width)."""
        first = number == 0 or not self._plan.boosting
        before = [np.zeros_like(own) for own in sums] if first else sums
        own = texts.take(chosen).beside(before[0][chosen])
        judged = held_out.beside(before[1])
        plan = settled(self._plan.training, len(own))
        head: dict[str, Any] = {}
        if not first:
            longer = max(1.0, LATER * len(texts) / len(own))
            patience = None if plan.patience is None else round(longer * plan.patience)
            plan = dataclasses.replace(plan, epochs=round(longer * plan.epochs), patience=patience)
            given = self._student.of_texts([start], own.tokens)[0]
            found = best_multiplier(own.lessons.vectors, before[0][chosen], given, to_teacher)
            head["multiplier"] = jnp.float32(max(found, LEAST_MULTIPLIER))
        if first and to_teacher is None and (wide := texts.lessons.vectors.shape[1]) != sums[0].shape[1]:
            head["map"] = jnp.asarray(_start_of_map(sums[0].shape[1], wide, plan.seed))
        frozen = {"base": self._student.served(plan), "map": None if to_teacher is None else jnp.asarray(to_teacher)}

        def objective(frozen: Any, own: Trained, batch: StudentBatch, key: PRNGKeyArray) -> Float[Array, ""]:
            return self._loss(frozen, own, batch, key, plan, stacked=not first)

        measure = jax.jit(lambda frozen, own, batch: self._loss(frozen, own, batch, None, plan, stacked=False))

        def judge(own: Trained) -> float:
            return judged.mean(lambda batch: float(measure(frozen, own, batch)), plan.batch, self._student.text.pad_id)

        trained, _ = fit_batches(
            objective,
            frozen,
            {"own": start, "head": head},
            own.batches(plan, self._student.text.pad_id),
            plan.per_epoch(len(own)),
            plan,
            rate=self._student.recipe.rate,
            judge=judge,
            must_improve=first,  # without it there is no answer; what comes later may add nothing
            keeper=keeper,
            report=report,
        )
        mapped = np.asarray(trained["head"]["map"]) if "map" in trained["head"] else to_teacher
        return jax.tree.map(np.asarray, trained["own"]), mapped

    def _loss(
        self,
        frozen: Any,
        own: Trained,
        batch: StudentBatch,
        key: PRNGKeyArray | None,
        plan: SettledPlan,
        *,
        stacked: bool,
    ) -> Float[Array, ""]:
        """Equations 2 to 4, as a part of the variance of the teacher's vectors."""
        student, head = self._student, own["head"]
        last, middle = student.vectors(frozen["base"], own["own"], batch.rows, key, plan.dtype)
        total = batch.before + head.get("multiplier", jnp.float32(1)) * last
        wide = head.get("map", frozen["map"])
        mapped = total if wide is None else total @ wide
        loss = 0.5 * jnp.square(batch.vectors - mapped).sum(-1)
        if stacked and student.stacks and self._plan.stacking:
            loss += self._plan.stacking * 0.5 * jnp.square(batch.before - middle).sum(-1)
        return (loss * batch.weights).sum() / jnp.maximum(batch.weights.sum(), 1e-9) / jnp.float32(self._variance / 2)


def _start_of_map(narrow: int, wide: int, seed: int) -> MapToTeacher:
    return np.random.default_rng(seed).normal(0, narrow**-0.5, (narrow, wide)).astype(np.float32)


def _mapped(sums: Float[np.ndarray, "n d"], to_teacher: MapToTeacher | None) -> Float[np.ndarray, "n t"]:
    return sums if to_teacher is None else sums @ to_teacher


def _error(
    sums: Float[np.ndarray, "n d"], vectors: Float[np.ndarray, "n t"], to_teacher: MapToTeacher | None, variance: float
) -> float:
    return float(np.square(vectors - _mapped(sums, to_teacher)).sum(1).mean()) / variance
