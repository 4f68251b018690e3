"""One head for every number of students (Student Parallelism section 3.2, Algorithm 2).

Axes: n texts, d hidden, m students, c outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jaxtyping import Array, Float, PRNGKeyArray

from jpets.deltas.recipe import Tree
from jpets.students.boosting import Ensemble, GroupPlan
from jpets.students.student import Student, prefix_sums
from jpets.students.texts import StudentBatch, Texts
from jpets.training.fit import Trained
from jpets.training.heads import new_head
from jpets.training.objective import fit_batches
from jpets.training.plan import settled
from jpets.training.run import Keeper, UpdateReport
from jpets.types import Head


@dataclasses.dataclass(frozen=True)
class Pruned:
    """Students and their multipliers after training together, with the head that reads the sum of the first of
    them."""

    trees: tuple[Tree, ...]
    multipliers: tuple[float, ...]
    head: Head


def prune(
    student: Student,
    ensemble: Ensemble,
    teacher: Head,
    texts: Texts,
    held_out: Texts,
    plan: GroupPlan,
    *,
    keeper: Keeper | None = None,
    report: Callable[[UpdateReport], None] = lambda step: None,
) -> Pruned:
    """Algorithm 2: all students and one head learn the teacher's answers by the first 1, 2, ... m students at once;
    the gradients of all sizes are added up. Without ``plan.pruning`` only by all of them.

    The head begins as the teacher's own where that reads the same kind of vector.
    """
    own = settled(plan.training, len(texts))
    head = _start_of_head(teacher, ensemble, student.encoder.config.hidden_size, own.seed)
    base = student.served(own)
    multipliers = jnp.asarray(ensemble.multipliers, jnp.float32)
    trained = {
        "own": list(ensemble.trees),
        "head": {**{name: jnp.asarray(each) for name, each in head.tensors.items()}, "multipliers": multipliers},
    }
    first = jnp.float32(ensemble.multipliers[0])

    def loss(base: Any, own_now: Trained, batch: StudentBatch, key: PRNGKeyArray | None) -> Float[Array, ""]:
        keys = [None] * len(ensemble.trees) if key is None else list(jax.random.split(key, len(ensemble.trees)))
        vectors = jnp.stack(
            [
                student.vectors(base, tree, batch.rows, one, own.dtype)[0]
                for tree, one in zip(own_now["own"], keys, strict=True)
            ]
        )
        tensors = own_now["head"]
        sums = prefix_sums(vectors, tensors["multipliers"].at[0].set(first))  # the first one's stays as it is
        logits = (sums if plan.pruning else sums[-1:]) @ tensors["kernel"] + tensors["bias"]
        each = answer_losses(head, logits, batch.logits) * batch.weights
        return each.sum(-1).mean() / jnp.maximum(batch.weights.sum(), 1e-9)

    measure = jax.jit(lambda base, now, batch: loss(base, now, batch, None))

    def judge(now: Trained) -> float:
        return held_out.mean(lambda batch: float(measure(base, now, batch)), own.batch, student.text.pad_id)

    found, _ = fit_batches(
        loss,
        base,
        trained,
        texts.batches(own, student.text.pad_id),
        own.per_epoch(len(texts)),
        own,
        rate=student.recipe.rate,
        judge=judge,
        good_start=True,  # the teacher's head reads what the students have learnt to be
        keeper=keeper,
        report=report,
    )
    tensors = jax.tree.map(np.asarray, found["head"])
    _, *others = tensors.pop("multipliers").tolist()
    trees = tuple(jax.tree.map(np.asarray, tree) for tree in found["own"])
    return Pruned(trees, (ensemble.multipliers[0], *others), dataclasses.replace(head, tensors=tensors))


def answer_losses(head: Head, logits: Float[Array, "m n c"], teacher: Float[Array, "n c"]) -> Float[Array, "m n"]:
    """How far answers are from the teacher's: cross-entropy with its probabilities, of other values the squared
    error."""
    if head.problem == "regression" and not head.is_score:
        return jnp.square(logits - teacher).mean(-1)
    if head.is_score or head.problem == "multi-label":
        return optax.sigmoid_binary_cross_entropy(logits, jax.nn.sigmoid(teacher)[None]).mean(-1)
    return -(jax.nn.softmax(teacher) * jax.nn.log_softmax(logits)).sum(-1)


def _start_of_head(teacher: Head, ensemble: Ensemble, width: int, seed: int) -> Head:
    outputs = teacher.outputs
    head = new_head("sequence-classification", teacher.problem, outputs, width, seed=seed)
    head = dataclasses.replace(head, relevance=teacher.relevance)
    if teacher.dense:  # it reads the vector through another layer
        return head
    kernel = np.asarray(teacher.tensors["kernel"], np.float32)
    if ensemble.to_teacher is not None:
        kernel = ensemble.to_teacher @ kernel
    return dataclasses.replace(head, tensors={"kernel": kernel, "bias": np.asarray(teacher.tensors["bias"])})
