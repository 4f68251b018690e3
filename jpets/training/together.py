"""Many small tasks trained at once: one program over one backbone, which all of them share.

Every step runs one batch of each task. The shared products see the tokens of several tasks together, on an accelerator
of all of them; what is each task's own is batched beside them (``jax.vmap`` over the tasks' parameters alone).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpets.errors import InvalidInput
from jpets.model.encoder import Params, SplitEncoder
from jpets.training.batches import Rows
from jpets.training.fit import Pace, TaskFunctions, Trained, as_served
from jpets.training.groups import each_step
from jpets.training.methods import Direct
from jpets.training.plan import Plan
from jpets.training.run import Outcome, Step
from jpets.types import Head

ABSENT = -1e9
"""Bias of outputs that a task does not have: their probability is zero, and so is their gradient."""


@dataclasses.dataclass(frozen=True)
class Member:
    """One of the tasks: where its delta and head start, and its texts."""

    recipe: Direct
    head: Head
    rows: Rows


def train_together(
    encoder: SplitEncoder,
    base: Params,
    members: Sequence[Member],
    plan: Plan,
    *,
    pad_id: int = 0,
    report: Callable[[Step], None] = lambda step: None,
) -> list[Outcome]:
    """Each task's outcome, as ``run.train`` would give it; tasks with fewer batches rest when theirs are done.

    Their deltas must be of one method and shape, their heads of one kind. Raises ``InvalidInput``.
    """
    if not members:
        return []
    _check(members)
    width = max(member.head.outputs for member in members)
    head = dataclasses.replace(members[0].head, tensors=_widened(members[0].head, width))
    task = TaskFunctions(encoder, members[0].recipe, head, plan)
    trained, state = stacked_start(task, members)
    totals = np.array([plan.epochs * -(-len(member.rows.tokens) // plan.batch) for member in members], np.int32)
    base = as_served(base, members[0].recipe, plan)
    update = jax.jit(stacked_update(task), donate_argnums=(1, 2))
    losses: list[list[float]] = [[] for _ in members]
    for step, groups in enumerate(each_step([member.rows for member in members], plan, pad_id)):
        found = []
        for group in groups:
            trained, state, values = update(base, trained, state, np.int32(step), totals, task.pace, *group)
            found.append((group.tasks, values))
        for tasks, values in found:
            for at, value in zip(tasks.tolist(), np.asarray(values).tolist(), strict=True):
                if at < len(members):
                    losses[at].append(value)
        report(Step(step + 1, int(totals.max()), float(np.mean([own[-1] for own in losses]))))
    return [_outcome(member, trained, at, losses[at]) for at, member in enumerate(members)]


def stacked_start(task: TaskFunctions, members: Sequence[Member]) -> tuple[Trained, Any]:
    """(parameters, optimiser's state) before the first update, with a leading axis of tasks."""
    width = max(member.head.outputs for member in members)
    rng = np.random.default_rng(0)
    starts = [{"own": member.recipe.start(rng), "head": _widened(member.head, width)} for member in members]
    trained: Trained = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *starts)
    return trained, jax.vmap(task.optimiser.init)(trained)


def stacked_update(task: TaskFunctions) -> Callable[..., Any]:
    """``task.update`` of one group over stacked tasks; it leaves the others as they are."""

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


def _widened(head: Head, width: int) -> dict[str, Any]:
    """The head's tensors with outputs that it does not have, which answer nothing; of embeddings there are none."""
    own = {name: jnp.asarray(array) for name, array in head.tensors.items()}
    if not head.outputs:
        return own
    missing = width - head.outputs
    kernel, bias = own["kernel"], own["bias"]
    return {
        **own,
        "kernel": jnp.pad(kernel, ((0, 0), (0, missing))),
        "bias": jnp.pad(bias, (0, missing), constant_values=ABSENT),
    }


def _outcome(member: Member, trained: Trained, at: int, losses: Sequence[float]) -> Outcome:
    own: Trained = jax.tree.map(lambda leaf: leaf[at], trained)
    outputs = member.head.outputs
    tensors = {name: np.asarray(array) for name, array in own["head"].items()}
    if outputs:
        tensors |= {"kernel": tensors["kernel"][:, :outputs], "bias": tensors["bias"][:outputs]}
    head = dataclasses.replace(member.head, tensors=tensors)
    return Outcome(own, member.recipe.finish(own["own"]), head, losses, None)


def _check(members: Sequence[Member]) -> None:
    if not all(len(member.rows.tokens) for member in members):
        raise InvalidInput("tasks that are trained together must each have an example")
    first = members[0]
    for member in members:
        if _shape(member.recipe) != _shape(first.recipe):
            raise InvalidInput("tasks that are trained together must have deltas of the same methods and shapes")
        if (member.head.type, member.head.problem) != (first.head.type, first.head.problem):
            raise InvalidInput("tasks that are trained together must have heads of one type and problem")
        if member.head.problem != "single-label" and member.head.outputs != first.head.outputs:
            raise InvalidInput(f"tasks trained together on {first.head.problem} labels must have equally many")
        if member.rows.targets[0].dtype.kind != first.rows.targets[0].dtype.kind:
            raise InvalidInput("pairs of texts that are trained together must all be rated, or none of them")


def _shape(recipe: Direct) -> list[tuple[str, dict[str, tuple[int, ...]]]]:
    return [(each.method, {name: array.shape for name, array in each.tensors.items()}) for each in recipe.deltas]
