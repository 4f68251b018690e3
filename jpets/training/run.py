"""A whole training run: epochs, held-out scores, early stopping, and checkpoints from which a killed run resumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpets.deltas.recipe import Recipe
from jpets.errors import InvalidInput
from jpets.model.encoder import Params, SplitEncoder
from jpets.training.batches import Rows, batch_order, gather
from jpets.training.fit import State, Trained, Trainer
from jpets.training.forward import TextRows
from jpets.training.losses import Labels
from jpets.training.plan import SettledPlan, TrainingPlan, settled
from jpets.types import Delta, Head

DIVERGED = "the held-out loss is not finite: training diverged; try a lower rate"


class UpdateReport(NamedTuple):
    """The report of one update: its number, the total, and the batch's loss; and of a training in parts which part it
    belongs to."""

    number: int
    of: int
    loss: float
    stage: str = ""

    def within(self, stage: str) -> UpdateReport:
        """As that of a part of ``stage``."""
        return self._replace(stage=", ".join(filter(None, (stage, self.stage))))


class TrainingProgress(NamedTuple):
    """Everything that a run needs to resume: the state, the best parameters so far and their held-out loss.

    ``losses`` [steps] are the losses of the batches, NaN for those still to come.
    """

    state: State
    best: Trained
    best_loss: Float[np.ndarray, ""]
    waited: Int[np.ndarray, ""]
    """Epochs since the best parameters."""
    losses: Float[np.ndarray, " steps"]

    @classmethod
    def at_start(cls, state: State, steps: int) -> TrainingProgress:
        """Before the first of ``steps`` batches."""
        losses = np.full(steps, np.nan, np.float32)
        return cls(state, _copy(state.trained), np.array(np.inf), np.array(0), losses)


class Keeper(Protocol):
    """Stores a run's progress; ``load`` returns the newest, or ``first`` if there is none."""

    def load(self, first: TrainingProgress) -> TrainingProgress: ...
    def save(self, progress: TrainingProgress) -> None: ...


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run. ``held_out`` is the best parameters' mean loss on the held-out texts, None without any."""

    trained: Trained
    deltas: Sequence[Delta]
    head: Head
    losses: Sequence[float]
    held_out: float | None
    rate: float
    """Peak learning rate of the method's parameters."""


def train(
    encoder: SplitEncoder,
    base: Params,
    recipe: Recipe,
    head: Head,
    rows: Rows,
    plan: TrainingPlan,
    *,
    held_out: Rows | None = None,
    from_task: bool = False,
    keeper: Keeper | None = None,
    save_every: int = 100,
    pad_id: int = 0,
    devices: Sequence[jax.Device] = (),
    report: Callable[[UpdateReport], None] = lambda step: None,
) -> Outcome:
    """Trains ``recipe`` and ``head`` on ``rows``, and keeps the parameters that were best on ``held_out``, or else the
    last ones. ``from_task``: they begin as a task's, which stay if none are better.

    The same rows, plan and machine give the same numbers, also if the run was killed and resumed. Batches at the end
    that do not fill an update are left out.

    Raises ``InvalidInput`` if there are too few for one update.
    """
    lengths = [len(own.ids) for own in rows.tokens]
    plan = settled(plan, len(lengths))
    per_epoch = plan.per_epoch(len(lengths))
    total = plan.epochs * per_epoch
    check_batches(total, plan)
    trainer = Trainer(encoder, base, recipe, head, plan, total, devices)
    progress = TrainingProgress.at_start(trainer.start(), total)
    if keeper is not None:
        progress = keeper.load(progress)
        progress = progress._replace(state=trainer.placed(progress.state))
    if from_task and held_out is not None and progress.state.step == 0:
        losses = partial(trainer.losses, progress.state.trained)
        progress = judged(progress, mean_held_out(losses, held_out, plan.batch, pad_id))
    order: list[Any] = []
    while (step := progress.state.step) < total:
        epoch, at = divmod(step, per_epoch)
        if not order or at == 0:
            order = batch_order(lengths, plan, epoch)
        state, value = trainer.update(progress.state, *gather(rows, order[at], plan.batch, pad_id))
        progress.losses[step] = float(value)
        progress = progress._replace(state=state)
        report(UpdateReport(state.step, total, float(value)))
        if at == per_epoch - 1 and held_out is not None:
            losses = partial(trainer.losses, progress.state.trained)
            progress = judged(progress, mean_held_out(losses, held_out, plan.batch, pad_id))
            if plan.patience is not None and progress.waited > plan.patience:
                break
        if keeper is not None and (state.step % save_every == 0 or at == per_epoch - 1):
            keeper.save(progress)
    trained = progress.state.trained if held_out is None else progress.best
    tensors = {name: np.asarray(array) for name, array in trained["head"].items()}
    return Outcome(
        trained,
        recipe.finish(trained["own"]),
        dataclasses.replace(head, tensors=tensors),
        progress.losses[: progress.state.step].tolist(),
        float(progress.best_loss) if held_out is not None else None,
        recipe.rate if plan.rate is None else plan.rate,
    )


def check_batches(count: int, plan: SettledPlan) -> None:
    """Raises ``InvalidInput`` if this many batches are too few for an update."""
    if plan.accumulate > count:
        raise InvalidInput(
            f"{count} batches of {plan.batch} texts make no update of {plan.accumulate} batches: lower accumulate, or "
            "train for more epochs"
        )


def mean_held_out(
    losses: Callable[[TextRows, Labels], Float[Array, " n"]], rows: Rows, batch: int, pad_id: int = 0
) -> float:
    """Mean loss of the rows by their weights; ``losses`` of ``batch`` rows at a time."""
    total = 0.0
    for start in range(0, len(rows.tokens), batch):
        text, labels = gather(rows, np.arange(start, min(start + batch, len(rows.tokens))), batch, pad_id)
        total += float((losses(text, labels) * labels.weights).sum())
    return total / max(float(rows.weights.sum()), 1e-9)


def judged(progress: TrainingProgress, found: float) -> TrainingProgress:
    """``progress`` with the present parameters as the best ones, if their held-out loss is."""
    if found < progress.best_loss:
        best = _copy(progress.state.trained)
        return progress._replace(best=best, best_loss=np.array(found), waited=np.array(0))
    return progress._replace(waited=progress.waited + 1)


def _copy(trained: Trained) -> Trained:
    """A copy: later updates reuse the memory of the original."""
    return jax.tree.map(jnp.array, trained)
