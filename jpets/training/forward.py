"""One task over its own texts, by the functions that serve it; differentiable in all its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jpets.config import BackboneConfig
from jpets.deltas import HEAD, METHODS, in_merge_order
from jpets.deltas.fold import pooler_weight
from jpets.deltas.protocol import NO_LEAD, Lead
from jpets.deltas.sites import BoundClass
from jpets.deltas.view import HeadView, RowView, SlotView
from jpets.errors import InvalidInput
from jpets.model.batch import POOLINGS, PackedBatch, Rows
from jpets.model.encoder import Params, SplitEncoder, cast_params
from jpets.model.forward import bind_sites, encode, forward, read_out
from jpets.types import Delta, Head, Pooling
from pallas_kernels.numerics import take_rows
from pallas_kernels.packed_attention import AttentionGroup

HeadTensors = Mapping[str, Float[Array, " ..."]]
IMPOSSIBLE = -1e9
"""Logit of an impossible place: its probability and gradient are zero, and twice it is still finite in f32."""


class TextRows(NamedTuple):
    """Tokens of n texts, padded: ``ids`` and ``types`` [n, L], ``lengths`` [n]; ``levels`` and ``places`` [n, L] as
    ``Tokens`` has them, without which all tokens are counted."""

    ids: Int[Array, "n l"]
    types: Int[Array, "n l"]
    lengths: Int[Array, " n"]
    levels: Int[Array, "n l"] | None = None
    places: Int[Array, "n l"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Tokens of n texts, one text after the other: ``ids`` and ``types`` [t], ``lengths`` [n] of at most ``longest``,
    ``places`` [t] as ``Tokens`` has them.

    Tokens past the last text have no meaning.
    """

    ids: Int[Array, " t"]
    types: Int[Array, " t"]
    lengths: Int[Array, " n"]
    longest: int = dataclasses.field(metadata={"static": True})
    places: Int[Array, " t"]


InputRows = TextRows | PackedRows


class TaskOutputs(NamedTuple):
    """f32. ``logits`` [n, C], or [n, L, C] of a head on tokens. Values past a row's length have no meaning; if the
    answer is a place in the text, those places are impossible."""

    pooled: Float[Array, "n d"]
    logits: Float[Array, "n *l c"]

    @property
    def vectors(self) -> Float[Array, "n m"]:
        """The embeddings, before they get a length of 1."""
        return self.logits if self.logits.shape[-1] else self.pooled


def task_outputs(
    encoder: SplitEncoder,
    params: Params,
    deltas: Sequence[Delta],
    head: Head,
    tensors: HeadTensors,
    rows: InputRows,
    dtype: str = "float32",
) -> TaskOutputs:
    """The outputs of the task of ``deltas`` and ``head``; its head's ``tensors`` are separate, as they may be traced.

    L is the rows' length, or their ``longest``.
    """
    lead = sum((METHODS[delta.method].lead(delta) for delta in deltas), NO_LEAD)
    if isinstance(rows, PackedRows):
        batch = packed_batch(rows, head.pooling, encoder.config, lead)
    else:
        batch = rectangular_batch(rows, head.pooling, encoder.config, lead)
    params, bound = _bind(encoder.config, params, deltas, batch, dtype)
    if tensors:
        bound.append(_bind_head(head, tensors, batch))
    outputs = forward(encoder, cast_params(params, dtype), batch, bound)
    if not tensors:
        return TaskOutputs(outputs.pooled, jnp.zeros((batch.row_count, 0)))
    (logits,) = outputs.logits
    own = logits[..., : tensors["kernel"].shape[-1]]
    if not head.reads_tokens:
        return TaskOutputs(outputs.pooled, own[:, 0])
    (group,) = batch.groups
    each = group.rows(own[0])[:, lead.tokens :]
    if head.type == "question-answering":
        inside = jnp.arange(each.shape[1])[None, :, None] < rows.lengths[:, None, None]
        each = jnp.where(inside, each, IMPOSSIBLE)
    return TaskOutputs(outputs.pooled, each)


def hidden_states(
    encoder: SplitEncoder, params: Params, rows: TextRows, dtype: str = "float32"
) -> Float[Array, "n l d"]:
    """Final hidden states of the bare backbone, f32; values past a row's length have no meaning."""
    hidden = encode(encoder, cast_params(params, dtype), rectangular_batch(rows, "mean", encoder.config))
    return hidden.reshape(*rows.ids.shape, -1)


def states_of(encoder: SplitEncoder, params: Params, rows: TextRows, dtype: str) -> tuple[Float[Array, "n l d"], ...]:
    """What an encoder's layers get and its last one gives, f32."""
    cast = cast_params(params, dtype)
    batch = rectangular_batch(rows, "mean", encoder.config)
    states = encoder.bind(cast).hidden_states(batch, bind_sites(encoder, cast, batch))
    return tuple(each.reshape(*rows.ids.shape, -1) for each in states)


def pooled_states(
    encoder: SplitEncoder, params: Params, deltas: Sequence[Delta], pooling: Pooling, rows: TextRows, dtype: str
) -> list[Float[Array, "n d"]]:
    """The pooled embeddings, and the pooled output of each layer, f32: layer by layer what ``TaskOutputs.pooled`` is of
    the last one."""
    lead = sum((METHODS[delta.method].lead(delta) for delta in deltas), NO_LEAD)
    batch = rectangular_batch(rows, pooling, encoder.config, lead)
    params, bound = _bind(encoder.config, params, deltas, batch, dtype)
    cast = cast_params(params, dtype)
    sites, model = bind_sites(encoder, cast, batch, bound), encoder.bind(cast)
    return [read_out(model, state, batch, sites).pooled for state in model.hidden_states(batch, sites)]


def within(rows: TextRows) -> Bool[Array, "n l"]:
    """Which places have tokens."""
    return jnp.arange(rows.ids.shape[1])[None] < rows.lengths[:, None]


def acts_beside(delta: Delta) -> bool:
    """Whether a delta acts next to the weights; others are merged into them."""
    method = METHODS[delta.method]
    return method.kind != "heavy" and method.step != "bias"


def rectangular_batch(rows: TextRows, pooling: Pooling, config: BackboneConfig, lead: Lead = NO_LEAD) -> PackedBatch:
    """``rows``, with places for ``lead``'s virtual tokens before each, as the model takes a rectangular bucket; all are
    pooled alike."""
    places = ((0, 0), (lead.tokens, 0))
    ids = jnp.pad(rows.ids, places, constant_values=_no_token(config))
    types = jnp.pad(rows.types, places)
    count, length = ids.shape
    positions = jnp.tile(jnp.arange(length) + lead.first_position, count)
    if config.skips_padding and rows.places is not None and not lead.tokens:
        positions = _behind(rows.places.reshape(-1), lead, config)
    groups = (AttentionGroup(None, rows.lengths + lead.tokens),)
    firsts = _all_pooled(config, jnp.arange(count) * length, pooling)
    return PackedBatch({"ids": ids.reshape(-1), "types": types.reshape(-1)}, positions, groups, None, None, firsts)


def packed_batch(rows: PackedRows, pooling: Pooling, config: BackboneConfig, lead: Lead = NO_LEAD) -> PackedBatch:
    """``rows``, with places for ``lead``'s virtual tokens before each, as the model takes a packed bucket; all are
    pooled alike."""
    count, longest = len(rows.lengths), rows.longest + lead.tokens
    lengths = rows.lengths + lead.tokens
    size = len(rows.ids) + count * lead.tokens
    row = jnp.repeat(jnp.arange(count), lengths, total_repeat_length=size)  # tokens past the last row go with it
    first = jnp.cumsum(lengths) - lengths
    place = jnp.minimum(jnp.arange(size) - first[row], longest - 1)
    text = jnp.cumsum(rows.lengths) - rows.lengths
    source = jnp.maximum(text[row] + place - lead.tokens, 0)
    tokens = first[:, None] + jnp.minimum(jnp.arange(longest), lengths[:, None] - 1)
    none = (place < lead.tokens) | (jnp.arange(size) >= lengths.sum())  # past the last row: of no text a neighbour
    ids = jnp.where(none, _no_token(config), take_rows(rows.ids, source))
    types = jnp.where(none, 0, take_rows(rows.types, source))
    groups = (AttentionGroup(tokens, lengths),)
    cells = row * longest + place
    positions = place + lead.first_position
    if config.skips_padding and not lead.tokens:
        positions = _behind(rows.places, lead, config)
    return PackedBatch({"ids": ids, "types": types}, positions, groups, cells, row, _all_pooled(config, first, pooling))


def _behind(places: Int[Array, " t"], lead: Lead, config: BackboneConfig) -> Int[Array, " t"]:
    """Positions behind ``lead``, which has no virtual tokens; a token that takes none keeps its own."""
    return jnp.where(places == config.max_positions, places, places + lead.first_position)


def _no_token(config: BackboneConfig) -> int:
    """The id where there is no token of a text: of a text's neighbours in tables it is none."""
    return -1 if config.looks_up else 0


def _all_pooled(config: BackboneConfig, first_token: Int[Array, " n"], pooling: Pooling) -> Rows:
    """Raises ``InvalidInput`` where there is no pooler to pool by."""
    if pooling == "pooler" and not config.pooler:
        raise InvalidInput("pooling: this backbone has no pooler; take cls or mean")
    return Rows(first_token, jnp.full(len(first_token), POOLINGS.index(pooling)))


def _bind(
    config: BackboneConfig, params: Params, deltas: Sequence[Delta], batch: PackedBatch, dtype: str
) -> tuple[Params, list[BoundClass]]:
    """Parameters and classes for a batch of one task.

    Deltas that act next to the weights get banks of two slots, the no-op and the task; others are merged into them.
    """
    bound = []
    for delta in in_merge_order(deltas):
        method = METHODS[delta.method]
        if not acts_beside(delta):
            params = method.merge(delta, config, params)
            continue
        if (at_pooler := pooler_weight(delta)) is not None:  # an operator has none; a server folds it into the head
            params = method.merge(at_pooler, config, params)
        for part in method.lower(delta, config):
            specs = method.bank_arrays(part.key, config)
            bank = {name: _bank(jnp.asarray(array), specs[name].fill, dtype) for name, array in part.arrays.items()}
            view = SlotView(_own_slots(batch.row_count)) if method.kind == "row" else _every_token(batch)
            bound.append(BoundClass(part.key, bank, view, method))
    return params, bound


def _own_slots(count: int) -> Int[Array, " n"]:
    return jnp.ones(count, jnp.int32)


def _every_token(batch: PackedBatch) -> RowView:
    """All tokens as one row: so the task's numbers are read once, not for each text."""
    return RowView(jnp.int32(0), _own_slots(1), len(batch.ids))


def _bank(array: Array, fill: int, dtype: str) -> Array:
    """Two slots: one that changes nothing, and ``array``; floating-point numbers in ``dtype``."""
    own = array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array
    return jnp.stack([jnp.full_like(own, fill), own])


def _bind_head(head: Head, tensors: HeadTensors, batch: PackedBatch) -> BoundClass:
    shapes = {name: np.zeros(array.shape, np.float32) for name, array in tensors.items()}
    own = HEAD.contribution(Head(head.type, shapes, activation=head.activation))
    assert own is not None
    bank = {name: _bank(array[None], 0, "float32") for name, array in tensors.items()}
    count = batch.row_count
    view = _every_token(batch) if head.reads_tokens else HeadView(jnp.arange(count), _own_slots(count))
    return BoundClass(own.key, bank, view, HEAD)
