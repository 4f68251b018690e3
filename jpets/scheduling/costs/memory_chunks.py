"""Sequence-length-aware memory (TurboTransformers section 4.2, Algorithms 1 and 2).

Tensors that a computation needs for a while are placed in chunks, which are kept from one computation to the next.
Tensors that are never needed at the same time share bytes. Nothing here allocates: sizes in, places out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

DEFAULT_CHUNK = 2 * 2**20
"""Bytes of the smallest chunk (the paper's)."""
K_SCALE = 1.2
"""A chunk for a larger tensor has so many times the tensor's size."""


class Usage(NamedTuple):
    """``size`` bytes, needed from operator ``first_op`` to operator ``last_op``, both included."""

    first_op: int
    last_op: int
    size: int


class Place(NamedTuple):
    """Where a tensor lies: number of the chunk, and bytes from its start."""

    chunk: int
    offset: int


class Placement(NamedTuple):
    """``places`` in the order of the usages; ``chunks`` are the sizes of those in use, ``allocated`` the new bytes."""

    places: tuple[Place, ...]
    chunks: tuple[int, ...]
    allocated: int

    @property
    def footprint(self) -> int:
        return sum(self.chunks)


class _Held(NamedTuple):
    """A tensor in a chunk; sorts by offset."""

    offset: int
    usage: Usage


def place_in_chunks(usages: Sequence[Usage], chunks: Sequence[int] = ()) -> Placement:
    """Algorithm 1: the largest first, each in the first of ``chunks`` that has a gap for it, else in a new one.

    Chunks that nothing uses are released. Raises ``ValueError`` on a negative size or a life that ends before it began.
    """
    for usage in usages:
        if usage.size < 0 or usage.last_op < usage.first_op:
            raise ValueError(f"a usage needs size >= 0 and last_op >= first_op, got {usage}")
    sizes = list(chunks)
    held: list[list[_Held]] = [[] for _ in sizes]
    found: dict[int, Place] = {}
    for number in sorted(range(len(usages)), key=lambda i: -usages[i].size):
        usage = usages[number]
        for chunk, size in enumerate(sizes):
            offset = find_gap(usage, size, held[chunk])
            if offset is not None:
                break
        else:
            chunk, offset = len(sizes), 0
            sizes.append(max(DEFAULT_CHUNK, math.ceil(usage.size * K_SCALE)))
            held.append([])
        held[chunk] = sorted([*held[chunk], _Held(offset, usage)])
        found[number] = Place(chunk, offset)
    kept = [chunk for chunk, own in enumerate(held) if own]
    renumbered = {chunk: at for at, chunk in enumerate(kept)}
    places = tuple(Place(renumbered[found[i].chunk], found[i].offset) for i in range(len(usages)))
    new = sum(sizes[chunk] for chunk in kept if chunk >= len(chunks))
    return Placement(places, tuple(sizes[chunk] for chunk in kept), new)


def find_gap(usage: Usage, chunk_size: float, held: Sequence[tuple[int, Usage]]) -> int | None:
    """Algorithm 2: offset of the smallest gap for ``usage`` between those in ``held`` (by offset) that live at that
    time.

    None where there is none. Line 17 of the listing must ask for at least the size, not at most.
    """
    smallest, previous = math.inf, 0
    best: int | None = None
    for offset, other in held:
        if max(usage.first_op, other.first_op) <= min(usage.last_op, other.last_op):
            gap = offset - previous
            if usage.size <= gap < smallest:
                smallest, best = gap, previous
            previous = max(previous, offset + other.size)
    if best is None and chunk_size - previous >= usage.size:
        best = previous
    return best


def greedy_by_size(usages: Sequence[Usage]) -> tuple[tuple[int, ...], int]:
    """Greedy by Size for Offset Calculation: (offsets in one arena, its size). What the paper compares with."""
    held: list[_Held] = []
    offsets = [0] * len(usages)
    for number in sorted(range(len(usages)), key=lambda i: -usages[i].size):
        offset = find_gap(usages[number], math.inf, held)
        assert offset is not None
        offsets[number] = offset
        held = sorted([*held, _Held(offset, usages[number])])
    return tuple(offsets), max((offset + usages[i].size for i, offset in enumerate(offsets)), default=0)


def working_bytes(needs: Sequence[int], at_a_time: int) -> int:
    """Bytes of chunks in which any ``at_a_time`` runs of these computations can go on at once, also of the same one.

    ``needs`` are the bytes of one run of each. With so many places for the largest run, every run has a place.
    """
    return place_in_chunks([Usage(0, 0, max(needs))] * at_a_time).footprint if needs else 0


def encoder_usages(*, layers: int, hidden: int, heads: int, intermediate: int, rows: int, length: int) -> list[Usage]:
    """The intermediate tensors of a padded f32 encoder batch, its non-GEMM parts fused kernel by kernel (figure 3).

    Operators of a layer: 0 query, key and value; 1 their split by heads; 2 scores; 3 context; 4 its transpose;
    5 attention's output; 6 residual and norm; 7 feed-forward; 8 its output; 9 residual and norm.
    """
    state = 4 * rows * length * hidden
    usages = [Usage(0, 6, state)]  # the embeddings
    for layer in range(layers):
        at = 10 * layer
        last = at + 10 + 6 if layer + 1 < layers else at + 9
        usages += [
            Usage(at, at + 1, 3 * state),
            *(Usage(at + 1, at + until, state) for until in (2, 2, 3)),
            Usage(at + 2, at + 3, 4 * rows * heads * length * length),
            Usage(at + 3, at + 4, state),
            Usage(at + 4, at + 5, state),
            Usage(at + 5, at + 6, state),
            Usage(at + 6, at + 9, state),
            Usage(at + 7, at + 8, 4 * rows * length * intermediate),
            Usage(at + 8, at + 9, state),
            Usage(at + 9, last, state),
        ]
    return usages
