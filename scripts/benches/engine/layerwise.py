"""``bench.py layerwise``: fetching the deltas of a batch layer by layer while it runs (HMI section 6.3, figure 10).

Two ways to run a batch whose tasks are all missing. ``coarse``, the engine's way: every delta is copied, then one
program runs. ``layerwise``: each layer is a program of its own, and the deltas of the next layer are copied while it
runs. ``resident`` needs no copy; ``chained`` needs none either and has a program for each layer, to show their cost.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import jax
import numpy as np
import typer

from benches.shared import RandomBackbone, interleave, paired_ratio, random_backbone, random_tasks, report
from jpets.deltas import class_method
from jpets.deltas.bank import Bank, lower_task, slot_arrays
from jpets.deltas.protocol import ClassKey, Contribution
from jpets.deltas.sites import BoundClass
from jpets.deltas.view import ClassView
from jpets.engine.batch.assembly import assemble
from jpets.engine.batch.bucket import FULL, Bucket, make_variant
from jpets.engine.batch.rows import Row
from jpets.engine.programs.mesh import first_device
from jpets.engine.workloads.encoder_network import INPUTS
from jpets.model.batch import PackedBatch
from jpets.model.encoder import SplitEncoder, cast_params, split
from jpets.model.forward import bind_sites, encode
from jpets.types import Task
from jpets.xla_flags import set_xla_flags

DTYPE = "bfloat16"
SAME = 2e-2
"""Tolerance relative to the largest value: bf16 products in other programs round differently."""


class Part:
    """Some layers of one class: their bank, and what the missing tasks put into it, stacked [tasks, layers, ...]."""

    def __init__(self, backbone: RandomBackbone, deltas: Sequence[Contribution], layers: Sequence[int]) -> None:
        config = backbone.config
        self.key = dataclasses.replace(deltas[0].key, layers=tuple(layers))
        base = np.asarray(backbone.params["bias"], np.float32)
        self.bank = Bank(self.key, len(deltas) + 1, config, DTYPE, base, first_device().bank)
        slots = [slot_arrays(self._own(delta), self.key, config, DTYPE, base) for delta in deltas]
        self.contents = {name: np.stack([each[name] for each in slots]) for name in slots[0]}
        self._write = jax.jit(_write_slots, donate_argnums=0)

    def _own(self, delta: Contribution) -> Contribution:
        places = [delta.key.layers.index(layer) for layer in self.key.layers]
        return Contribution(self.key, {name: values[places] for name, values in delta.arrays.items()})

    def copy(self) -> Mapping[str, jax.Array]:
        """Copies the part to the device at once; returns when it is there."""
        return jax.block_until_ready(jax.device_put(self.contents))

    def write(self, copied: Mapping[str, jax.Array]) -> None:
        self.bank.arrays = self._write(self.bank.arrays, copied)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.contents.values())


def _write_slots(bank: dict[str, jax.Array], values: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Writes every task's slot at once, from slot 1."""
    return {name: bank[name].at[1 : len(values[name]) + 1].set(values[name]) for name in bank}


class Batch:
    """``rows`` rows of ``length`` tokens for each task, and both ways of running them."""

    def __init__(self, backbone: RandomBackbone, tasks: Sequence[Task], rows: int, length: int) -> None:
        config = backbone.config
        deltas = [lower_task(task, config)[0] for task in tasks]
        if len({delta.key for delta in deltas}) != 1 or class_method(deltas[0].key.method).kind == "row":
            raise typer.BadParameter("the tasks must have deltas of one class, which acts layer by layer")
        self.encoder: SplitEncoder = split(config)
        self.params = jax.device_put(cast_params(dict(backbone.params), DTYPE))
        self.whole = Part(backbone, deltas, range(config.layers))
        self.layers = [Part(backbone, deltas, [layer]) for layer in range(config.layers)]
        self.inputs, (self.view,) = self._assembled([self.whole.key], len(tasks), rows, length)
        _, self.views = self._assembled([part.key for part in self.layers], len(tasks), rows, length)
        self._run = jax.jit(functools.partial(_whole, self.encoder, self.whole.key))
        self._embed = jax.jit(functools.partial(_embed, self.encoder))
        self._layer = [
            jax.jit(functools.partial(_layer, self.encoder, part.key, at)) for at, part in enumerate(self.layers)
        ]
        self._copier = ThreadPoolExecutor(1)

    def _assembled(
        self, keys: Sequence[ClassKey], tasks: int, rows: int, length: int
    ) -> tuple[PackedBatch, tuple[ClassView, ...]]:
        ids = np.random.default_rng(0).integers(0, self.encoder.config.vocab_size, length).astype(np.int32)
        own = [Row.of_tokens(ids, np.zeros_like(ids), dict.fromkeys(keys, 1 + task), 0) for task in range(tasks)]
        total = tasks * rows
        bucket = Bucket(total * length, ((total, length),))
        found = assemble(own * rows, bucket, make_variant(dict.fromkeys(keys, FULL)), INPUTS)
        return jax.device_put(found.batch), jax.device_put(found.views)

    def coarse(self, *, resident: bool = False) -> jax.Array:
        if not resident:
            self.whole.write(self.whole.copy())
        hidden = self._run(self.params, self.inputs, self.whole.bank.arrays, self.view)
        return jax.block_until_ready(hidden)

    def layerwise(self, *, resident: bool = False) -> jax.Array:
        coming = [] if resident else [self._copier.submit(part.copy) for part in self.layers]
        hidden = self._embed(self.params, self.inputs)
        for at, (part, view) in enumerate(zip(self.layers, self.views, strict=True)):
            if coming:
                part.write(coming[at].result())
            hidden = self._layer[at](self.params, hidden, self.inputs, part.bank.arrays, view)
        return jax.block_until_ready(hidden)

    def check(self) -> None:
        """Both ways give the same hidden states."""
        expected, found = np.asarray(self.coarse()), np.asarray(self.layerwise())
        np.testing.assert_allclose(found, expected, atol=SAME * np.abs(expected).max(), rtol=0)


def _whole(
    encoder: SplitEncoder,
    key: ClassKey,
    params: Any,
    batch: PackedBatch,
    bank: Mapping[str, jax.Array],
    view: ClassView,
) -> jax.Array:
    return encode(encoder, params, batch, [BoundClass(key, bank, view, class_method(key.method))])


def _embed(encoder: SplitEncoder, params: Any, batch: PackedBatch) -> jax.Array:
    return encoder.bind(params).embed(batch, bind_sites(encoder, params, batch))


def _layer(
    encoder: SplitEncoder,
    key: ClassKey,
    at: int,
    params: Any,
    hidden: jax.Array,
    batch: PackedBatch,
    bank: Mapping[str, jax.Array],
    view: ClassView,
) -> jax.Array:
    sites = bind_sites(encoder, params, batch, [BoundClass(key, bank, view, class_method(key.method))])
    return encoder.bind(params).layers[at](at, hidden, batch, sites)


def layerwise(
    backbone: str = "bert-base",
    method: str = "adapter",
    missing: Annotated[str, typer.Option(help="tasks in the batch, all of them missing")] = "1,8,32",
    rows: Annotated[int, typer.Option(help="queries of each task")] = 1,
    length: int = 32,
    rounds: int = 9,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Milliseconds of a batch whose tasks are not on the device, fetched as a whole or layer by layer."""
    set_xla_flags()
    loaded = random_backbone(backbone)
    figures: dict[str, dict[str, Any]] = {}
    for count in map(int, missing.split(",")):
        batch = Batch(loaded, random_tasks(loaded, [method], count), rows, length)
        batch.check()
        seconds = interleave(
            {
                "resident": functools.partial(batch.coarse, resident=True),
                "chained": functools.partial(batch.layerwise, resident=True),
                "coarse": batch.coarse,
                "layerwise": batch.layerwise,
            },
            rounds,
        )
        figures[f"{count} missing"] = {
            "mb": batch.whole.nbytes / 1e6,
            **{f"{name}_ms": 1e3 * statistics.median(own) for name, own in seconds.items()},
            "chained_of_resident": paired_ratio(seconds["chained"], seconds["resident"]),
            "layerwise_of_coarse": paired_ratio(seconds["layerwise"], seconds["coarse"]),
        }
    settings = {"backbone": backbone, "method": method, "rows": rows, "length": length, "rounds": rounds}
    report("layerwise", settings, figures, json_out)
