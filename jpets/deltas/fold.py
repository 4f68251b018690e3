"""Weight deltas at the pooler, folded into the task's head before it is loaded.

The pooler runs once, on one vector a row. A task that changes its weight gets the changed pooler as the first layer of
a two-layer head, so the program needs no code for it.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jpets.config import BackboneConfig
from jpets.deltas import METHODS, merge_deltas
from jpets.deltas.merge import Params
from jpets.errors import InvalidTask
from jpets.types import Delta, Task


def fold_pooler(task: Task, config: BackboneConfig, params: Params) -> Task:
    """``task``; if a delta changes the pooler's weight and the head reads it, a task with that pooler in its head.

    Raises ``InvalidTask`` if the head already has two layers, or embeds, and for a group of students, whose deltas are
    not those of one encoder.
    """
    if task.students is not None:
        raise InvalidTask(f"task {task.id!r} is a group of students: its deltas do not act together; use its parts")
    if not folds_pooler(task):
        return task
    merged: Params = {"pooler": jnp.asarray(params["pooler"]), "bias": jnp.asarray(params["bias"]), "layers": {}}
    parts = [part for part in map(pooler_part, task.deltas) if part is not None]
    merged = merge_deltas(parts, config, merged)
    tensors = {
        **task.head.tensors,
        "dense_kernel": np.asarray(merged["pooler"], np.float32),
        "dense_bias": np.asarray(merged["bias"][config.bias_layout()[0, "pooler"]], np.float32),
    }
    head = dataclasses.replace(task.head, tensors=tensors, pooling="cls", activation="tanh")
    return dataclasses.replace(task, head=head)


def folds_pooler(task: Task) -> bool:
    """Whether a delta changes the weight of the pooler and the head reads it.

    Raises ``InvalidTask`` if the head already has two layers, or embeds.
    """
    changed = any(_changes_weight(delta) for delta in task.deltas)
    if not changed or task.head.pooling != "pooler" or task.head.reads_tokens:
        return False
    if task.head.dense or task.head.type == "embedding":
        found = "has two layers" if task.head.dense else "embeds"
        raise InvalidTask(
            "a delta on the pooler's weight needs a one-layer head for classes or values that reads the pooler; this "
            f"{task.head.type} head {found}"
        )
    return True


def pooler_weight(delta: Delta) -> Delta | None:
    """The part of a delta that changes the pooler's weight, as a delta of its own."""
    return pooler_part(delta) if _changes_weight(delta) else None


def pooler_part(delta: Delta) -> Delta | None:
    """The part of a delta that acts at the pooler, as a delta of its own."""
    tensors = {name: array for name, array in delta.tensors.items() if name.startswith("pooler/")}
    if not tensors:
        return None
    replaced = METHODS[delta.method].step == "bias"  # its sites are those of its biases
    settings = {**delta.settings, "sites": ["pooler"] if _changes_weight(delta) or replaced else []}
    if "bias_sites" in settings:
        settings["bias_sites"] = [site for site in settings["bias_sites"] if site == "pooler"]
    return Delta(delta.method, settings, tensors)


def _changes_weight(delta: Delta) -> bool:
    """Whether a delta has any tensor for the pooler besides its bias."""
    return any(name.startswith("pooler/") and not name.startswith("pooler/bias") for name in delta.tensors)
