"""One update after the other: AdamW with warm-up and decay on a recipe's parameters and a head's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jpets.deltas.recipe import Recipe, Tree
from jpets.errors import InvalidInput
from jpets.model.encoder import Params, SplitEncoder, cast_params
from jpets.training.forward import InputRows, TextRows, task_outputs
from jpets.training.losses import Labels, mean_loss, row_losses
from jpets.training.plan import SettledPlan, TrainingPlan
from jpets.types import Head

DATA = "data"
Trained = dict[str, Tree]
"""``own``: the recipe's parameters; ``head``: the head's tensors."""


class State(NamedTuple):
    """Everything that changes while training."""

    trained: Trained
    optimiser: Any
    step: int


class Pace(NamedTuple):
    """Arguments of an update that it is not compiled for: peak learning rates, and the key of random numbers."""

    own: np.float32
    head: np.float32
    key: PRNGKeyArray

    @classmethod
    def of(cls, plan: TrainingPlan, usual: float) -> Pace:
        """``usual`` is the rate of the method's parameters if the plan has none."""
        own = usual if plan.rate is None else plan.rate
        return cls(np.float32(own), np.float32(plan.head_rate), jax.random.key(plan.seed))


class TaskFunctions:
    """One task's update and losses as pure functions: ``jit`` or ``vmap`` them."""

    def __init__(self, encoder: SplitEncoder, recipe: Recipe, head: Head, plan: TrainingPlan) -> None:
        self._encoder, self._recipe, self._head, self._plan = encoder, recipe, head, plan
        self.pace = Pace.of(plan, recipe.rate)
        self.optimiser = optimiser(plan)

    def update(
        self,
        base: Params,
        trained: Trained,
        state: Any,
        step: Int[Array, ""],
        steps: Int[Array, ""],
        pace: Pace,
        rows: InputRows,
        labels: Labels,
    ) -> tuple[Trained, Any, Float[Array, ""]]:
        """(parameters, optimiser's state, loss before) after batch ``step`` of ``steps``."""
        key = jax.random.fold_in(pace.key, step)

        def objective(own: Trained) -> Float[Array, ""]:
            outputs = self._outputs(base, own, rows, key)
            return mean_loss(self._head, outputs, labels) + self._recipe.penalty(own["own"])

        value, slopes = jax.value_and_grad(objective)(trained)
        share = rate_at(step, steps, self._plan)
        return *stepped(self.optimiser, pace, slopes, state, trained, share), value

    def losses(self, base: Params, trained: Trained, rows: InputRows, labels: Labels) -> Float[Array, " n"]:
        """Each row's loss, without anything random."""
        return row_losses(self._head, self._outputs(base, trained, rows, None), labels)

    def _outputs(self, base: Params, trained: Mapping[str, Tree], rows: InputRows, key: Array | None) -> Any:
        params, deltas = self._recipe.vary(base, trained["own"], key)
        return task_outputs(self._encoder, params, deltas, self._head, trained["head"], rows, self._plan.dtype)


class Trainer:
    """One recipe and one head over one backbone.

    With several ``devices`` each takes a part of every batch, so their number must divide its size; parameters are on
    all.
    """

    def __init__(
        self,
        encoder: SplitEncoder,
        base: Params,
        recipe: Recipe,
        head: Head,
        plan: SettledPlan,
        steps: int,
        devices: Sequence[jax.Device] = (),
    ) -> None:
        self.recipe, self.head, self.plan = recipe, head, plan
        devices = list(devices) or jax.local_devices()[:1]
        _check_tables(base, devices)
        mesh = jax.sharding.Mesh(np.array(devices), (DATA,))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._parted = NamedSharding(mesh, PartitionSpec(DATA))
        self._base = jax.device_put(as_served(base, recipe, plan), self._everywhere)
        self._steps = np.int32(steps)
        self._task = TaskFunctions(encoder, recipe, head, plan)
        self._update = jax.jit(self._task.update, donate_argnums=(1, 2))
        self._measure = jax.jit(self._task.losses)

    def start(self) -> State:
        """The state before the first update."""
        own = self.recipe.start(np.random.default_rng(self.plan.seed))
        head = {name: jnp.array(array, jnp.float32) for name, array in self.head.tensors.items()}
        trained = {"own": jax.tree.map(jnp.array, own), "head": head}  # copies: updates reuse their memory
        return self.placed(State(trained, self._task.optimiser.init(trained), 0))

    def placed(self, state: State) -> State:
        """``state`` on the devices."""
        trained, own = jax.device_put((state.trained, state.optimiser), self._everywhere)
        return State(trained, own, state.step)

    def update(self, state: State, rows: TextRows, labels: Labels) -> tuple[State, Float[Array, ""]]:
        """The next state, and the batch's loss before it; ``state`` is donated."""
        rows, labels = jax.device_put((rows, labels), self._parted)
        trained, optimiser, value = self._update(
            self._base, state.trained, state.optimiser, np.int32(state.step), self._steps, self._task.pace, rows, labels
        )
        return State(trained, optimiser, state.step + 1), value

    def losses(self, trained: Trained, rows: TextRows, labels: Labels) -> Float[Array, " n"]:
        """Each row's loss as served: nothing is random."""
        return self._measure(self._base, trained, *jax.device_put((rows, labels), self._parted))


def _check_tables(base: Params, devices: Sequence[jax.Device]) -> None:
    """Raises ``InvalidInput`` where a device would get a copy of the tables, which are larger than its memory."""
    found = ", ".join(map(str, devices))
    if "table" in base and (len(devices) > 1 or devices[0].platform != "cpu"):
        raise InvalidInput(
            f"a backbone with tables is trained on by one CPU device, found {found}: set JAX_PLATFORMS=cpu, or leave "
            "devices out"
        )


def as_served(base: Params, recipe: Recipe, plan: TrainingPlan) -> Params:
    """The backbone's weights cast once to the forward pass's format, if a recipe does not change them."""
    params: Params = jax.tree.map(jnp.asarray, base)
    if not recipe.keeps_weights:
        return params
    return {**cast_params(params, plan.dtype), "bias": params["bias"]}


def optimiser(plan: TrainingPlan) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) at a rate of one: ``rate_at`` scales each step."""

    def chain() -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(plan.clip), optax.adamw(1.0, weight_decay=plan.weight_decay))

    both = optax.multi_transform({"own": chain(), "head": chain()}, {"own": "own", "head": "head"})
    return optax.MultiSteps(both, plan.accumulate).gradient_transformation() if plan.accumulate > 1 else both


def stepped(
    rule: optax.GradientTransformation,
    pace: Pace,
    slopes: Trained,
    state: Any,
    trained: Trained,
    share: Float[Array, ""],
) -> tuple[Trained, Any]:
    """(parameters, optimiser's state) after a step at ``share`` of the peak rate of each part."""
    with jax.numpy_dtype_promotion("standard"):  # which optax expects
        changes, state = rule.update(slopes, state, trained)
    peaks = {"own": pace.own, "head": pace.head}
    scaled = {
        part: jax.tree.map(lambda change, far=share * peak: change * far, changes[part]) for part, peak in peaks.items()
    }
    return optax.apply_updates(trained, scaled), state


def rate_at(step: Int[Array, ""], steps: Int[Array, ""], plan: TrainingPlan) -> Float[Array, ""]:
    """Share of the peak rate in batch ``step`` of ``steps``: it rises, then falls as a cosine. It is never zero: with
    few texts there may be a single update."""
    at = (step // plan.accumulate).astype(jnp.float32)
    last = (steps // plan.accumulate).astype(jnp.float32)
    warm = jnp.round(plan.warm_up * last)
    falling = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip((at - warm) / jnp.maximum(last - warm, 1), 0, 1)))
    return jnp.where(at < warm, (at + 1) / (warm + 1), falling)
