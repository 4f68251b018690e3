"""One task over rectangles of its own texts, by the functions that serve it; differentiable in all its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpets.config import BackboneConfig
from jpets.deltas import HEAD, METHODS
from jpets.deltas.protocol import NO_LEAD, Lead
from jpets.deltas.sites import BoundClass
from jpets.deltas.view import HeadView, RowView, SlotView
from jpets.model.batch import POOLINGS, PackedBatch, Rows
from jpets.model.encoder import Params, SplitEncoder, cast_params
from jpets.model.forward import encode, forward
from jpets.types import Delta, Head, Pooling
from pallas_kernels.packed_attention import AttentionGroup

HeadTensors = Mapping[str, Array]


class TextRows(NamedTuple):
    """Tokens of n texts, padded: ``ids`` and ``types`` [n, L], ``lengths`` [n]."""

    ids: Int[Array, "n l"]
    types: Int[Array, "n l"]
    lengths: Int[Array, " n"]


class TaskOutputs(NamedTuple):
    """f32. ``logits`` [n, C], or [n, L, C] of a head on tokens (what stands past a row's length means nothing)."""

    pooled: Float[Array, "n d"]
    logits: Float[Array, "n *l c"]


def task_outputs(
    encoder: SplitEncoder,
    params: Params,
    deltas: Sequence[Delta],
    head: Head,
    tensors: HeadTensors,
    rows: TextRows,
    dtype: str = "float32",
) -> TaskOutputs:
    """What the task of ``deltas`` and ``head`` answers, its head's ``tensors`` given apart, as they may be traced."""
    lead = sum((METHODS[delta.method].lead(delta) for delta in deltas), NO_LEAD)
    rows = _led(rows, lead)
    count, length = rows.ids.shape
    params, bound = _bind(encoder.config, params, deltas, count, length, dtype)
    if tensors:
        bound.append(_bind_head(head, tensors, count, length))
    outputs = forward(encoder, cast_params(params, dtype), rectangular_batch(rows, head.pooling, lead), bound)
    if not tensors:
        return TaskOutputs(outputs.pooled, jnp.zeros((count, 0)))
    (logits,) = outputs.logits
    own = logits[..., : tensors["kernel"].shape[-1]]
    return TaskOutputs(outputs.pooled, own[:, lead.tokens :] if head.reads_tokens else own[:, 0])


def hidden_states(
    encoder: SplitEncoder, params: Params, rows: TextRows, dtype: str = "float32"
) -> Float[Array, "n l d"]:
    """Final hidden states of the bare backbone, f32; what stands past a row's length means nothing."""
    hidden = encode(encoder, cast_params(params, dtype), rectangular_batch(rows, "mean"))
    return hidden.reshape(*rows.ids.shape, -1)


def acts_beside(delta: Delta) -> bool:
    """Whether a delta acts beside the weights; others are merged into them."""
    method = METHODS[delta.method]
    return method.kind != "heavy" and method.step != "bias"


def _led(rows: TextRows, lead: Lead) -> TextRows:
    """``rows`` with places for virtual tokens before the texts'."""
    if not lead.tokens:
        return rows
    places = ((0, 0), (lead.tokens, 0))
    return TextRows(jnp.pad(rows.ids, places), jnp.pad(rows.types, places), rows.lengths + lead.tokens)


def rectangular_batch(rows: TextRows, pooling: Pooling, lead: Lead = NO_LEAD) -> PackedBatch:
    """``rows`` as the batch that the model takes: a rectangular bucket, all rows pooled alike.

    ``lead.tokens`` places for virtual tokens stand in the rows already.
    """
    count, length = rows.ids.shape
    positions = jnp.tile(jnp.arange(length) + lead.first_position, count)
    places = Rows(jnp.arange(count) * length, jnp.full(count, POOLINGS.index(pooling)))
    groups = (AttentionGroup(None, rows.lengths),)
    return PackedBatch(rows.ids.reshape(-1), positions, rows.types.reshape(-1), groups, None, None, places)


def _bind(
    config: BackboneConfig, params: Params, deltas: Sequence[Delta], rows: int, length: int, dtype: str
) -> tuple[Params, list[BoundClass]]:
    """Parameters and classes for ``rows`` rows of one task.

    Deltas that act beside the weights get banks of two slots, the no-op and the task; others are merged into them.
    """
    slots = jnp.ones(rows, jnp.int32)
    bound = []
    for delta in deltas:
        method = METHODS[delta.method]
        if not acts_beside(delta):
            params = method.merge(delta, config, params)
            continue
        for part in method.lower(delta, config):
            specs = method.bank_arrays(part.key, config)
            bank = {name: _bank(jnp.asarray(array), specs[name].fill, dtype) for name, array in part.arrays.items()}
            view = SlotView(slots) if method.kind == "row" else RowView(jnp.int32(0), slots, length)
            bound.append(BoundClass(part.key, bank, view, method))
    return params, bound


def _bank(array: Array, fill: int, dtype: str) -> Array:
    """Two slots: one that changes nothing, and ``array``; floating-point numbers in ``dtype``."""
    own = array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array
    return jnp.stack([jnp.full_like(own, fill), own])


def _bind_head(head: Head, tensors: HeadTensors, rows: int, length: int) -> BoundClass:
    shapes = {name: np.zeros(array.shape, np.float32) for name, array in tensors.items()}
    own = HEAD.contribution(Head(head.type, shapes, activation=head.activation))
    assert own is not None
    slots = jnp.ones(rows, jnp.int32)
    bank = {name: _bank(array[None], 0, "float32") for name, array in tensors.items()}
    view = RowView(jnp.int32(0), slots, length) if head.reads_tokens else HeadView(jnp.arange(rows), slots)
    return BoundClass(own.key, bank, view, HEAD)
