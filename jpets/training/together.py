"""Many small tasks trained at once: one program over one backbone, which all of them share.

Every step runs one batch of each task. The shared products see the tokens of several tasks together, on an accelerator
of all tasks; each task's own parts are batched next to them (``jax.vmap`` over the tasks' parameters only).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpets.deltas.recipe import Direct
from jpets.errors import InvalidInput
from jpets.model.encoder import Params, SplitEncoder
from jpets.training.batches import Rows
from jpets.training.fit import Pace, TaskFunctions, Trained, as_served
from jpets.training.forward import IMPOSSIBLE, TextRows
from jpets.training.groups import each_step
from jpets.training.losses import IGNORED, Labels
from jpets.training.plan import SettledPlan, TrainingPlan, settled
from jpets.training.run import Outcome, UpdateReport, check_batches, mean_held_out
from jpets.types import Head


@dataclasses.dataclass(frozen=True)
class Member:
    """One of the tasks: the start of its delta and head, its texts, and maybe other texts to judge it by."""

    recipe: Direct
    head: Head
    rows: Rows
    judged: Rows | None = None


def train_together(
    encoder: SplitEncoder,
    base: Params,
    members: Sequence[Member],
    plan: TrainingPlan,
    *,
    pad_id: int = 0,
    report: Callable[[UpdateReport], None] = lambda step: None,
) -> list[Outcome]:
    """Each task's outcome, as of ``run.train``. Tasks with fewer batches rest when theirs are done, and tasks that have
    run out of patience rest too.

    Their deltas must be of one method and shape, their heads of one kind (``head_kind``). Raises ``InvalidInput``.
    """
    if not members:
        return []
    _check(members)
    width = max(member.head.outputs for member in members)
    members = [_with_width(member, width) for member in members]
    head = dataclasses.replace(members[0].head, tensors=_widened(members[0].head, width))
    task = TaskFunctions(encoder, members[0].recipe, head, plan)
    trained, state = stacked_start(task, members)
    plans = [settled(plan, len(member.rows.tokens)) for member in members]
    _check_batch(plans)
    per_epoch = [own.per_epoch(len(member.rows.tokens)) for own, member in zip(plans, members, strict=True)]
    totals = np.array([own.epochs * batches for own, batches in zip(plans, per_epoch, strict=True)], np.int32)
    check_batches(int(totals.min()), plans[0])
    base = as_served(base, members[0].recipe, plan)
    update = jax.jit(stacked_update(task), donate_argnums=(1, 2))
    losses: list[list[float]] = [[] for _ in members]
    best = _Best(task, base, members, plans, trained, pad_id)
    for step, groups in enumerate(each_step([member.rows for member in members], plan, pad_id)):
        found = []
        for group in groups:
            if best.stopped.issuperset(group.tasks.tolist()):
                continue
            trained, state, values = update(base, trained, state, np.int32(step), totals, task.pace, *group)
            found.append((group.tasks, values))
        for tasks, values in found:
            for at, value in zip(tasks.tolist(), np.asarray(values).tolist(), strict=True):
                if at not in best.stopped:
                    losses[at].append(value)
        report(UpdateReport(step + 1, int(totals.max()), float(np.mean([own[-1] for own in losses]))))
        ended = [at for at, batches in enumerate(per_epoch) if (step + 1) % batches == 0 and step < totals[at]]
        best.judge(trained, [at for at in ended if at not in best.stopped])
        if len(best.stopped) > len(members):
            break
    return [_outcome(member, best, at, losses[at], plan.rate) for at, member in enumerate(members)]


class _Best:
    """``trained``: each task's best parameters on the held-out texts, or the last ones if there are no such texts."""

    def __init__(
        self,
        task: TaskFunctions,
        base: Params,
        members: Sequence[Member],
        plans: Sequence[SettledPlan],
        first: Trained,
        pad_id: int,
    ) -> None:
        self._members, self._plans, self._base, self._pad_id = members, plans, base, pad_id
        self._losses = np.full(len(members), np.inf)
        self._waited = np.zeros(len(members), np.int32)
        self.stopped: set[int] = {len(members)}
        """Tasks that have run out of patience; the number after the last task's stands for no task."""
        self.trained: Trained = jax.tree.map(jnp.copy, first)

        def measure(base: Params, trained: Trained, at: Any, rows: TextRows, labels: Labels) -> Any:
            return task.losses(base, jax.tree.map(lambda leaf: leaf[at], trained), rows, labels)

        def keep(best: Trained, trained: Trained, chosen: Any) -> Trained:
            def choose(old: Any, new: Any) -> Any:
                return jnp.where(chosen.reshape(-1, *[1] * (old.ndim - 1)), new, old)

            kept: Trained = jax.tree.map(choose, best, trained)
            return kept

        self._measure, self._keep = jax.jit(measure), jax.jit(keep, donate_argnums=0)

    def judge(self, trained: Trained, tasks: Sequence[int]) -> None:
        """Judges the parameters of these tasks after an epoch."""
        better = np.zeros(len(self._members), bool)
        for at in tasks:
            if (rows := self._members[at].judged) is None:
                better[at] = True
                continue
            losses = partial(self._measure, self._base, trained, np.int32(at))
            found = mean_held_out(losses, rows, self._plans[at].batch, self._pad_id)
            better[at] = found < self._losses[at]
            if better[at]:
                self._losses[at], self._waited[at] = found, 0
                continue
            self._waited[at] += 1
            patience = self._plans[at].patience
            if patience is not None and self._waited[at] > patience:
                self.stopped.add(at)
        if better.any():
            self.trained = self._keep(self.trained, trained, better)

    def loss(self, at: int) -> float | None:
        """Mean loss of the best on the held-out texts; None without any."""
        return float(self._losses[at]) if self._members[at].judged is not None else None


def stacked_start(task: TaskFunctions, members: Sequence[Member]) -> tuple[Trained, Any]:
    """(parameters, optimiser's state) before the first update, with a leading axis of tasks."""
    width = max(member.head.outputs for member in members)
    rng = np.random.default_rng(0)
    starts = [{"own": member.recipe.start(rng), "head": _widened(member.head, width)} for member in members]
    trained: Trained = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *starts)
    return trained, jax.vmap(task.optimiser.init)(trained)


def stacked_update(task: TaskFunctions) -> Callable[..., Any]:
    """``task.update`` of one group over stacked tasks; the other tasks stay as they are."""

    def update(
        base: Params,
        trained: Trained,
        state: Any,
        step: Any,
        steps: Any,
        pace: Pace,
        tasks: Any,
        rows: Any,
        labels: Any,
    ) -> Any:
        def one(own: tuple[Trained, Any], steps: Any, rows: Any, labels: Any) -> Any:
            after, next_state, value = task.update(base, *own, step, steps, pace, rows, labels)
            return (after, next_state), value

        every = (trained, state)
        own, totals = jax.tree.map(lambda leaf: leaf.at[tasks].get(mode="clip"), (every, steps))
        after, values = jax.vmap(one)(own, totals, rows, labels)
        return *jax.tree.map(lambda leaf, mine: leaf.at[tasks].set(mine, mode="drop"), every, after), values

    return update


def _with_width(member: Member, width: int) -> Member:
    """The member with label sets of this width; the added labels do not count."""
    if member.head.problem != "multi-label":
        return member
    missing = (0, width - member.head.outputs)

    def widened(rows: Rows) -> Rows:
        targets = [np.pad(target, missing, constant_values=IGNORED) for target in rows.targets]
        return rows._replace(targets=targets)

    judged = widened(member.judged) if member.judged is not None else None
    return dataclasses.replace(member, rows=widened(member.rows), judged=judged)


def _widened(head: Head, width: int) -> dict[str, Any]:
    """The head's tensors with this many outputs; the added ones are never answers. Embedding heads are equally wide."""
    own = {name: jnp.asarray(array) for name, array in head.tensors.items()}
    if not head.outputs:
        return own
    missing = width - head.outputs
    kernel, bias = own["kernel"], own["bias"]
    return {
        **own,
        "kernel": jnp.pad(kernel, ((0, 0), (0, missing))),
        "bias": jnp.pad(bias, (0, missing), constant_values=IMPOSSIBLE),
    }


def _outcome(member: Member, best: _Best, at: int, losses: Sequence[float], rate: float | None) -> Outcome:
    own: Trained = jax.tree.map(lambda leaf: leaf[at], best.trained)
    outputs = member.head.outputs
    tensors = {name: np.asarray(array) for name, array in own["head"].items()}
    if outputs:
        tensors |= {"kernel": tensors["kernel"][:, :outputs], "bias": tensors["bias"][:outputs]}
    head = dataclasses.replace(member.head, tensors=tensors)
    return Outcome(
        own, member.recipe.finish(own["own"]), head, losses, best.loss(at), member.recipe.rate if rate is None else rate
    )


def head_kind(head: Head, rows: Rows) -> tuple[object, ...]:
    """What must be equal for tasks to be trained together: type and problem of the head, what it reads, the number of
    values (0 if outputs are labels), the layers of an embedding, and the kind of the targets."""
    outputs = head.outputs if head.problem == "regression" else 0
    layers = (head.dense, head.outputs) if head.type == "embedding" and head.tensors else ()
    activation = head.activation if head.dense or layers else ""
    pooling = "" if head.reads_tokens else head.pooling
    return head.type, head.problem, pooling, activation, outputs, layers, rows.targets[0].dtype.kind


def _check(members: Sequence[Member]) -> None:
    if not all(len(member.rows.tokens) for member in members):
        raise InvalidInput("tasks that are trained together must each have an example")
    first = members[0]
    for member in members:
        if _shape(member.recipe) != _shape(first.recipe):
            raise InvalidInput(
                "tasks that are trained together must have deltas of the same methods, settings and shapes, and equal "
                "tensors where they are not trained"
            )
        if member.recipe.rate != first.recipe.rate:
            raise InvalidInput("tasks that are trained together must have recipes of one learning rate")
        own, others = head_kind(member.head, member.rows), head_kind(first.head, first.rows)
        if own != others:
            raise InvalidInput(
                "tasks that are trained together must have heads of one type and problem, equally many values, and "
                f"pairs that are all rated or none: found {own} and {others}"
            )


def _check_batch(plans: Sequence[SettledPlan]) -> None:
    if len(found := sorted({own.batch for own in plans})) > 1:
        raise InvalidInput(
            f"tasks that are trained together must have batches of one size, found {found} by the number of their "
            "texts; give a batch"
        )


def _shape(recipe: Direct) -> list[tuple[object, ...]]:
    """What all tasks' deltas must have in common: every step computes with those of the first, but for their floats."""
    return [
        (
            each.method,
            dict(each.settings),
            {name: array.shape for name, array in each.tensors.items()},
            {
                name: np.asarray(array).tobytes()
                for name, array in each.tensors.items()
                if not np.issubdtype(array.dtype, np.floating)
            },
        )
        for each in recipe.deltas
    ]
