"""Training by any objective: batches of any kind, frozen and trained parameters, checkpoints, early stopping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jpets.errors import InvalidInput
from jpets.training.fit import Pace, State, Trained, optimiser, rate_at, stepped
from jpets.training.plan import SettledPlan
from jpets.training.run import DIVERGED, Keeper, TrainingProgress, UpdateReport, judged

Batch = TypeVar("Batch")
Objective = Callable[[Any, Any, Batch, PRNGKeyArray], Float[Array, ""]]
"""The loss of (frozen parameters, trained parameters, a batch, a key of its own)."""


def fit_batches(
    objective: Objective[Batch],
    frozen: Any,
    trained: Trained,
    batch_at: Callable[[int, int], Batch],
    per_epoch: int,
    plan: SettledPlan,
    *,
    rate: float,
    judge: Callable[[Trained], float] | None = None,
    must_improve: bool = False,
    good_start: bool = False,
    keeper: Keeper | None = None,
    save_every: int = 100,
    report: Callable[[UpdateReport], None] = lambda step: None,
) -> tuple[Trained, list[float]]:
    """(``trained`` after the updates, losses). ``batch_at`` gives a batch by epoch and place in it; ``rate`` is what
    the plan's is by default.

    ``judge`` gives the held-out loss after each epoch: then the best parameters are returned, and training stops after
    ``plan.patience`` epochs without better ones. A killed run resumes from ``keeper``'s progress, with the same result.

    Where no held-out loss is finite, what training began with is returned; ``must_improve``: raises ``InvalidInput``.
    ``good_start``: so it is where no epoch is better.
    """
    rule, pace = optimiser(plan), Pace.of(plan, rate)
    total = plan.epochs * per_epoch

    def update(frozen: Any, trained: Trained, state: Any, step: Array, pace: Pace, batch: Batch) -> Any:
        key = jax.random.fold_in(pace.key, step)
        value, slopes = jax.value_and_grad(lambda own: objective(frozen, own, batch, key))(trained)
        return *stepped(rule, pace, slopes, state, trained, rate_at(step, jnp.int32(total), plan)), value

    jitted = jax.jit(update, donate_argnums=(1, 2))
    trained = jax.tree.map(jnp.array, trained)
    progress = TrainingProgress.at_start(State(trained, rule.init(trained), 0), total)
    if keeper is not None:
        progress = keeper.load(progress)
    if good_start and judge is not None and not progress.state.step:
        progress = judged(progress, judge(progress.state.trained))._replace(waited=progress.waited)
    while (step := progress.state.step) < total:
        epoch, at = divmod(step, per_epoch)
        own = progress.state
        after, state, value = jitted(frozen, own.trained, own.optimiser, np.int32(step), pace, batch_at(epoch, at))
        progress.losses[step] = float(value)
        progress = progress._replace(state=State(after, state, step + 1))
        report(UpdateReport(step + 1, total, float(value)))
        ends = at == per_epoch - 1
        if ends and judge is not None:
            progress = judged(progress, judge(after))
            if plan.patience is not None and progress.waited > plan.patience:
                break
        if keeper is not None and (ends or (step + 1) % save_every == 0):
            keeper.save(progress)
    if must_improve and not np.isfinite(progress.best_loss):
        raise InvalidInput(DIVERGED)
    final = progress.state.trained if judge is None else progress.best
    return final, progress.losses[: progress.state.step].tolist()
