"""Heads as a class of their own: banks of small output layers, each task with its own number of labels."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jpets.config import BackboneConfig
from jpets.deltas.protocol import ArraySpec, Bound, ClassKey, Contribution, Method, size_step
from jpets.deltas.view import HeadView, RowView, SegmentView
from jpets.types import Head
from pallas_kernels.low_rank import low_rank
from pallas_kernels.numerics import ACTIVATIONS, batched_dot, take_slots


class HeadClass(Method):
    """``sites``: outputs and, for two layers, the hidden size; ``options``: input, layers, activation."""

    name = "head"
    kind = "head"
    shares_layers = True

    def contribution(self, head: Head) -> Contribution | None:
        """The slot of a head; none for heads without tensors, which give the pooled vector."""
        if not head.tensors:
            return None
        reads = "tokens" if head.reads_tokens else "pooled"
        two = head.dense > 0
        key = ClassKey(
            "head",
            (("outputs", size_step(head.outputs)), *((("dense", size_step(head.dense)),) if two else ())),
            (0,),
            (
                ("reads", reads),
                ("layers", "2" if two else "1"),
                ("activation", head.activation if two or head.activates_outputs else "identity"),
            ),
        )
        own = {name: array for name, array in head.tensors.items() if name not in head.host_part}
        return Contribution(key, {name: np.asarray(array, np.float32)[None] for name, array in own.items()})

    def bank_arrays(self, key: ClassKey, config: BackboneConfig) -> Mapping[str, ArraySpec]:
        sizes, d = dict(key.sites), config.hidden_size
        outputs, dense = sizes["outputs"], sizes.get("dense")
        if dense is None:
            return {"kernel": ArraySpec((1, d, outputs)), "bias": ArraySpec((1, outputs), "float32")}
        return {
            "dense_kernel": ArraySpec((1, d, dense)),
            "dense_bias": ArraySpec((1, dense), "float32"),
            "kernel": ArraySpec((1, dense, outputs)),
            "bias": ArraySpec((1, outputs), "float32"),
        }


def apply_head(bound: Bound, hidden: Float[Array, "t d"], pooled: Float[Array, "n d"]) -> Float[Array, "g s c"]:
    """Logits, f32: [R, 1, C] for a class that reads pooled vectors, [G, S, C] (the view's segments) of one on
    tokens."""
    view, bank = bound.view, bound.bank
    if isinstance(view, HeadView):
        x = pooled.at[view.rows].get(mode="fill", fill_value=0)[:, None]
    else:
        assert isinstance(view, (RowView, SegmentView))
        x = view.segments(hidden)
    if "dense_kernel" in bank:
        return low_rank(
            x,
            bank["dense_kernel"],
            bank["kernel"],
            view.slots,
            0,
            activation=bound.key.option("activation"),
            down_bias=bank["dense_bias"],
            up_bias=bank["bias"],
            candidate=bound.operators["low_rank"],
        )
    y = batched_dot(x, take_slots(bank["kernel"], view.slots, 0))
    y = y + take_slots(bank["bias"], view.slots, 0).astype(jnp.float32)[:, None]
    return ACTIVATIONS[bound.key.option("activation")](y)
