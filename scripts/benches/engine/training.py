"""``bench training``: many small tasks trained together over one backbone, beside one after another."""

from __future__ import annotations

import pathlib
import statistics
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benches.shared import draw_lengths, interleave, paired_ratio, random_backbone, report
from jpets.config import DType
from jpets.model.encoder import split
from jpets.tokenizing import Tokens
from jpets.training.batches import Rows, each_batch
from jpets.training.fit import TaskFunctions, as_served
from jpets.training.groups import each_step
from jpets.training.heads import new_head
from jpets.training.methods import direct_recipe
from jpets.training.plan import SettledPlan, TrainingPlan
from jpets.training.process import set_up_training
from jpets.training.together import Member, stacked_start, stacked_update

LABELS = 4


def training(
    backbone: str = "minilm-l6",
    tasks: int = 16,
    batch: Annotated[int, typer.Option(help="texts of each task a step")] = 8,
    length: Annotated[int, typer.Option(help="mean tokens of a text, standard deviation a quarter of it")] = 32,
    method: str = "lora",
    steps: int = 4,
    rounds: int = 9,
    dtype: str = "bfloat16",
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Seconds of ``steps`` updates of every task, compiled before; and how far the losses of both ways differ."""
    set_up_training()
    loaded = random_backbone(backbone)
    config, encoder = loaded.config, split(loaded.config)
    plan = SettledPlan(epochs=1, batch=batch, dtype=DTYPES[dtype])
    lengths = draw_lengths(tasks * batch * steps, length, length / 4, config.max_positions)
    members = [_member(at, lengths[at::tasks], plan, config, loaded.params, method) for at in range(tasks)]
    task = TaskFunctions(encoder, members[0].recipe, members[0].head, plan)
    base = as_served(loaded.params, members[0].recipe, plan)
    one, every = (jax.jit(update, donate_argnums=(1, 2)) for update in (task.update, stacked_update(task)))
    groups = [
        (step, group)
        for step, own in enumerate(each_step([member.rows for member in members], plan, 0))
        for group in own
    ]
    own_batches = [list(each_batch(member.rows, plan, epoch=0)) for member in members]
    total, totals = np.int32(steps), np.full(tasks, steps, np.int32)
    starts = stacked_start(task, members)
    losses: dict[str, Any] = {}

    def together() -> None:
        trained, state = jax.tree.map(jnp.copy, starts)
        found = np.zeros((steps, tasks), np.float32)
        for step, group in groups:
            trained, state, values = every(base, trained, state, np.int32(step), totals, task.pace, *group)
            own = group.tasks < tasks
            found[step, group.tasks[own]] = np.asarray(values)[own]
        losses["together"] = found

    def apart() -> None:
        found = np.zeros((steps, tasks), np.float32)
        for at in range(tasks):
            trained, state = jax.tree.map(lambda leaf, at=at: leaf[at], starts)
            for step, (rows, labels) in enumerate(own_batches[at]):
                trained, state, value = one(base, trained, state, np.int32(step), total, task.pace, rows, labels)
                found[step, at] = value
        losses["apart"] = found

    seconds = interleave({"together": together, "apart": apart}, rounds)
    difference = np.abs(losses["together"] / losses["apart"] - 1).max()
    figures = {
        "together": {
            "seconds": statistics.median(seconds["together"]),
            "time_share": paired_ratio(seconds["apart"], seconds["together"]),
            "largest_loss_difference": float(difference),
        },
        "apart": {"seconds": statistics.median(seconds["apart"])},
    }
    settings = {
        "backbone": backbone,
        "tasks": tasks,
        "batch": batch,
        "length": length,
        "method": method,
        "steps": steps,
        "rounds": rounds,
        "dtype": dtype,
    }
    report("training", settings, figures, json_out)


DTYPES: dict[str, DType] = {"bfloat16": "bfloat16", "float32": "float32"}


def _member(seed: int, lengths: list[int], plan: TrainingPlan, config: Any, base: Any, method: str) -> Member:
    rng = np.random.default_rng(seed)
    tokens = [Tokens(rng.integers(1000, 2000, n).astype(np.int32), np.zeros(n, np.int32)) for n in lengths]
    targets = [np.array(rng.integers(0, LABELS), np.int32) for _ in lengths]
    head = new_head("sequence-classification", "single-label", LABELS, config.hidden_size, seed=seed)
    rows = Rows(tokens, targets, np.ones(len(tokens), np.float32))
    return Member(direct_recipe(method, {}, config, base, seed), head, rows)
