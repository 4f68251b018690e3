"""The buckets that programs may be compiled for: a fixed ladder, and shapes of the mixtures of lengths that came."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jpets.engine.batch.bucket import Bucket
from jpets.scheduling.costs.exact_packing import length_ladder, priced_cells, rows_up
from jpets.scheduling.queue import Floats, Groups, Ints

SIZES = (1.0, 0.5, 0.25)
"""Tokens of the learnt shapes, as shares of the most that a batch may have."""
SPREAD = 0.7
"""Standard deviations of a batch's number of rows of some length for which a learnt shape has room. With more,
attention computes rows that are seldom there; with less, batches are full before their tokens are."""
SEEN = 4096
"""Lengths of the latest queries from which shapes are learnt."""
LEAST_SEEN = 256
BETTER = 0.93
"""Learnt shapes give way to others that cost less than this share of them."""


class Menu:
    """``cost`` is the arithmetic of a bucket without deltas, ``most_rows`` and ``most_tokens`` bound learnt shapes."""

    def __init__(
        self, buckets: Iterable[Bucket], cost: Callable[[Bucket], float], most_rows: int, most_tokens: int
    ) -> None:
        self._cost = cost
        self._most_rows = most_rows
        self._most_tokens = most_tokens
        self._fixed = sorted(buckets, key=cost)
        self._learnt: Sequence[Bucket] = ()
        self._lengths: Ints = np.zeros(0, np.int_)
        self._new = 0
        self.buckets: Sequence[Bucket] = tuple(self._fixed)
        """The cheapest first, but after learnt mixtures the ladder's own that are as large: for one batch, programs of
        both would be one too many. A new tuple at every change."""

    def learn(self, buckets: Iterable[Bucket]) -> None:
        """Begins with shapes that were learnt before."""
        self._learnt = tuple(dict.fromkeys(bucket for bucket in buckets if bucket not in self._fixed))
        least = min(map(self._cost, self._learnt), default=float("inf"))
        later = [bucket for bucket in self._fixed if not bucket.rectangular and self._cost(bucket) >= least]
        first = {*self._fixed, *self._learnt}.difference(later)
        self.buckets = (*sorted(first, key=self._cost), *later)

    def allows(self, bucket: Bucket) -> bool:
        """Whether a shape of an earlier start is within the limits of this one."""
        return bucket in self._fixed or bucket.tokens <= self._most_tokens

    @property
    def grows(self) -> bool:
        """Whether there may be other shapes than those that it was given."""
        return self._most_tokens > 0

    @property
    def main(self) -> Sequence[Bucket]:
        """The shapes that most batches should have, as far as it is known; all of a menu that was given."""
        return self._learnt if self.grows else self._fixed

    def saw(self, lengths: Ints) -> None:
        """Learns from the lengths [n] of queries that came, unless there is no room for learnt shapes."""
        if not self.grows:
            return
        self._lengths = np.concatenate([self._lengths, lengths])[-SEEN:]
        self._new += len(lengths)
        if self._new < LEAST_SEEN or self._new < len(self._lengths) // 4:
            return
        self._new = 0
        found = learn_buckets(self._lengths, self._most_rows, self._most_tokens)
        if not found:  # the longest of these texts fits no shape that may be learnt
            return
        if not self._learnt or self._efficiency(found) < BETTER * self._efficiency(self._learnt):
            self.learn(found)

    def _efficiency(self, buckets: Sequence[Bucket]) -> float:
        """Arithmetic of the best of these buckets for each query that it can be expected to hold."""
        return min(self._cost(bucket) / expected_rows(bucket, self._lengths) for bucket in buckets)


def learn_buckets(lengths: Ints, most_rows: int, most_tokens: int) -> Sequence[Bucket]:
    """Shapes for batches of queries with lengths like these [n]."""
    ladder = length_ladder(int(lengths.max()))
    upto = np.searchsorted(np.sort(lengths), ladder, side="right") / len(lengths)
    found = []
    for share in SIZES:
        tokens = int(share * most_tokens) // 64 * 64
        if tokens >= ladder[-1]:
            groups = _groups(ladder, min(most_rows, tokens / lengths.mean()) * upto)
            found.append(Bucket(min(tokens, sum(n * limit for n, limit in groups)), groups))
    return list(dict.fromkeys(found))


def _groups(ladder: Ints, expected: Floats) -> Groups:
    """The one to three groups with the fewest attention positions for about ``expected`` [s] rows of at most ``ladder``
    [s] tokens."""
    i, j = np.triu_indices(len(ladder))
    ends = np.stack([i, j, np.full_like(i, len(ladder) - 1)], axis=-1)
    usual = np.diff(expected[ends], axis=-1, prepend=0.0)
    rows = rows_up(np.ceil(usual + SPREAD * np.sqrt(usual)).astype(np.int_))
    best = int(priced_cells(rows, ladder[ends]).argmin())
    return tuple((int(n), int(ladder[end])) for n, end in zip(rows[best], ends[best], strict=True) if n)


def expected_rows(bucket: Bucket, lengths: Ints) -> float:
    """How many queries of lengths like these [n] a bucket can be expected to hold: until its tokens or the places of
    one group are taken."""
    n, mean = len(lengths), float(lengths.mean())
    most = min(float(bucket.rows), np.inf if bucket.rectangular else bucket.tokens / mean)
    before = 0
    for rows, limit in bucket.groups:
        upto = int((lengths <= limit).sum())
        if upto > before:
            most = min(most, rows * n / (upto - before))
        before = upto
    return max(most if before == n else most * before / n, 1e-3)
