"""Exact packed shapes: tokens and attention groups that fit a batch's own lengths.

Linear sites see packed tokens without padding, so lengths need not be alike; attention pads within at most three groups
of like lengths.
"""

from __future__ import annotations

import numpy as np

from jpets.scheduling.queue import Floats, Groups, Ints

TOKEN_STEP = 64
GROUP_LENGTHS = np.array([8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256, 320, 384, 448, 512])
"""Lengths that an attention group may have: a plan must not need too many programs."""
GROUP_PRICE = 0.1
"""A further attention group must save this share of the attention positions."""


def fill(lengths: Ints, apart: Ints, budget: int, rows: int) -> Ints:
    """Each query's batch [n]: neighbours, as many as ``budget`` tokens and ``rows`` take.

    A batch also ends where ``apart`` [n] changes.
    """
    ends = np.cumsum(lengths)
    borders = np.append(np.flatnonzero(np.diff(apart)) + 1, len(lengths))
    batch = np.zeros(len(lengths), np.int_)
    first = number = 0
    while first < len(lengths):
        before = ends[first - 1] if first else 0
        border = int(borders[np.searchsorted(borders, first, side="right")])
        end = min(int(np.searchsorted(ends, before + budget, side="right")), first + rows, border)
        batch[first:end] = number
        first, number = end, number + 1
    return batch


def rounded_tokens(lengths: Ints, batch: Ints) -> Ints:
    """The tokens of each batch's shape."""
    sums = np.bincount(batch, weights=lengths).astype(np.int_)
    return -(-sums // TOKEN_STEP) * TOKEN_STEP


def attention_groups(lengths: Ints, batch: Ints) -> list[Groups]:
    """For each batch the one to three groups with the fewest attention positions, sum of N L^2.

    A row belongs to the shortest group that is long enough. Lengths and numbers of rows come from ladders.
    """
    ladder = length_ladder(int(lengths.max()))
    steps, count = len(ladder), int(batch.max()) + 1
    taken = np.bincount(batch * steps + np.searchsorted(ladder, lengths), minlength=count * steps).reshape(count, steps)
    upto = np.pad(taken.cumsum(1), ((0, 0), (1, 0)))  # [B, S + 1]: rows of the first s steps
    last = steps - (taken[:, ::-1] > 0).argmax(1)
    i, j = np.triu_indices(steps + 1)  # ends of the first two groups; i == 0 or i == j: the group is empty
    sizes = np.stack([upto[:, i], upto[:, j] - upto[:, i], upto[np.arange(count), last][:, None] - upto[:, j]], axis=-1)
    ends = np.append(0, ladder)
    lengths_at = np.stack(np.broadcast_arrays(ends[i][None], ends[j][None], ends[last][:, None]), axis=-1)
    rows = rows_up(np.maximum(sizes, 0))
    cells = priced_cells(rows, lengths_at)
    cells[j[None, :] > last[:, None]] = np.inf
    chosen = cells.argmin(1)
    return [
        tuple((int(n), int(length)) for n, length in zip(rows[b, c], lengths_at[b, c], strict=True) if n)
        for b, c in enumerate(chosen)
    ]


def priced_cells(rows: Ints, lengths: Ints) -> Floats:
    """Attention positions [...] of groups of so many rows of these lengths [..., 3], with the price of each further
    group."""
    cells: Floats = (rows * lengths.astype(float) ** 2).sum(-1) * (1 + GROUP_PRICE * ((rows > 0).sum(-1) - 1))
    return cells


def rows_up(rows: Ints) -> Ints:
    """Rows that a group gets: the next sixteenth of a power of two, at most an eighth too many."""
    step = 2 ** np.maximum(np.ceil(np.log2(np.maximum(rows, 1))).astype(np.int_) - 4, 0)
    return -(-rows // step) * step


def length_ladder(longest: int) -> Ints:
    """Lengths [s] that groups may have, up to the first that takes ``longest`` tokens; past the ladder's end, that is a
    multiple of 64."""
    at = int(np.searchsorted(GROUP_LENGTHS, longest))
    last = int(GROUP_LENGTHS[at]) if at < len(GROUP_LENGTHS) else -(-longest // 64) * 64
    return np.append(GROUP_LENGTHS[:at], last)
