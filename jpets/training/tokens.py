"""Texts as token ids: padded to rectangles, or one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jpets.deltas.protocol import LEAST_ROOM, Lead
from jpets.errors import InputTooLong, InvalidInput
from jpets.tokenizing import TextEncoder, Tokens
from jpets.training.forward import PackedRows, TextRows
from jpets.types import LoadedBackbone, Preprocessing, Query

LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Lengths that rows are padded to: each has a program of its own."""


def text_encoder(backbone: LoadedBackbone, lead: Lead) -> TextEncoder:
    """Cuts texts where an engine does: as long as the backbone takes them behind ``lead``. Raises ``InvalidInput``
    where that leaves no room for a text."""
    places = backbone.config.max_positions
    room = lead.room(places, places)
    if room < LEAST_ROOM:
        raise InvalidInput(
            f"{lead.tokens} virtual tokens before a text, at position {lead.first_position}, leave {room} of {places} "
            f"tokens for it, {LEAST_ROOM} are needed; take fewer"
        )
    return TextEncoder.for_length(backbone, room)


def encoded(
    text: TextEncoder, query: Query, rule: Preprocessing, *, passage: bool = False, spelled: bool = False
) -> Tokens:
    """A text's tokens, as many as a server computes of it; of a text that a server refuses, as it is too long, those
    that are left where it is cut, whichever text of a pair that takes."""
    try:
        return text.encode(query, rule, passage=passage, spelled=spelled)
    except InputTooLong:
        query = dataclasses.replace(query, truncate=True)
        rule = dataclasses.replace(rule, truncation_strategy="longest_first")
        return text.encode(query, rule, passage=passage, spelled=spelled)


def padded_length(longest: int) -> int:
    """The padded length of a row."""
    return next((each for each in LENGTHS if each >= longest), longest)


def rectangle(tokens: Sequence[Tokens], length: int, pad_id: int) -> TextRows:
    """``tokens`` as rows of ``length``."""
    places = np.tile(np.arange(length, dtype=np.int32), (len(tokens), 1))
    ids = np.full((len(tokens), length), pad_id, np.int32)
    types = np.zeros((len(tokens), length), np.int32)
    for row, own in enumerate(tokens):
        ids[row, : len(own.ids)], types[row, : len(own.ids)] = own.ids, own.types
        if own.places is not None:
            places[row, : len(own.ids)] = own.places
    levels = None
    if any(own.levels is not None for own in tokens):
        levels = np.zeros((len(tokens), length), np.int8)
        for row, own in enumerate(tokens):
            if own.levels is not None:
                levels[row, : len(own.ids)] = own.levels
    lengths = jnp.asarray([len(own.ids) for own in tokens], jnp.int32)
    cut = None if levels is None else jnp.asarray(levels)
    return TextRows(jnp.asarray(ids), jnp.asarray(types), lengths, cut, jnp.asarray(places))


def packed(tokens: Sequence[Tokens], size: int, longest: int, pad_id: int) -> PackedRows:
    """``tokens`` one text after the other, filled up to ``size``."""
    ids, types, places = np.full(size, pad_id, np.int32), np.zeros(size, np.int32), np.zeros(size, np.int32)
    total = sum(len(own.ids) for own in tokens)
    ids[:total] = np.concatenate([own.ids for own in tokens])
    types[:total] = np.concatenate([own.types for own in tokens])
    places[:total] = np.concatenate([np.arange(len(own.ids)) if own.places is None else own.places for own in tokens])
    lengths = jnp.asarray([len(own.ids) for own in tokens], jnp.int32)
    return PackedRows(jnp.asarray(ids), jnp.asarray(types), lengths, longest, jnp.asarray(places))


def by_length(
    tokens: Sequence[Tokens], size: int, encoder: TextEncoder
) -> Iterator[tuple[Int[np.ndarray, " _"], TextRows]]:
    """(their numbers, rows) of up to ``size`` texts of similar length at a time; the last row is repeated to fill
    up."""
    order = np.argsort([len(own.ids) for own in tokens], kind="stable")
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        filled = [tokens[at] for at in [*chosen, *[chosen[-1]] * (size - len(chosen))]]
        yield chosen, rectangle(filled, padded_length(max(len(own.ids) for own in filled)), encoder.pad_id)
