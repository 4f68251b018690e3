"""The cost of delta work by kind (beta, PetS section 4.1), as dense tables."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from jpets.scheduling.costs.measured_profile import CostProfile
from jpets.scheduling.queue import BARE, Bools, Floats, Ints, Queue

ClassNames = tuple[str, ...]
"""The delta classes of a task, as the profile names them."""
SETUP_TOKENS = 50
"""Tokens with a heavy product as long as every step's fixed work for its weights (mask, CPU: 48 to 62)."""


RUNS = (32, 64, 128)
"""Tokens that one step over a heavy class may cover."""
LONGEST_RUN = 128
"""The same where a padded row is longer than ``RUNS`` says: its steps are as long as it is, up to this."""


class DeltaTables:
    """What a profile says of some kinds of tasks, up to ``rows`` rows, ``longest`` tokens of one of them and ``tokens``
    in all. A class that the profile does not know costs nothing.

    The last entry of every table, for the bare backbone (kind -1), is zero.
    """

    def __init__(
        self, profile: CostProfile, kinds: Sequence[ClassNames], *, rows: int, longest: int, tokens: int
    ) -> None:
        self._profile = profile
        self._kinds = [[name for name in kind if name in profile.beta] for kind in kinds]
        self._rows, self._longest, self._tokens = rows, longest, tokens
        self._heavy_names = [[name for name in kind if name in profile.heavy] for kind in self._kinds]
        self._by_run: dict[int, Floats] = {}

    @property
    def held_bytes(self) -> int:
        """Of the tables that were wanted so far."""
        return sum(own.nbytes for own in (*vars(self).values(), *self._by_run.values()) if isinstance(own, np.ndarray))

    @functools.cached_property
    def heavy(self) -> Bools:
        """Whether a kind has heavy deltas [kinds + 1]."""
        return np.array([*map(bool, self._heavy_names), False])

    @functools.cached_property
    def replaced(self) -> Floats:
        """The share of the shared part that a batch of one kind alone saves [kinds + 1]."""
        shares = self._profile.replaced
        return np.array([*(max((shares.get(name, 0.0) for name in kind), default=0.0) for kind in self._kinds), 0.0])

    @functools.cached_property
    def padded(self) -> Floats:
        """The cost of one task's padded rows [kinds + 1, rows + 1, longest + 1]."""
        return self._of_rows(self._kinds)

    @functools.cached_property
    def _heavy_padded(self) -> Floats:
        return self._of_rows(self._heavy_names)

    def _of_rows(self, kinds: Sequence[Sequence[str]]) -> Floats:
        table = np.zeros((len(kinds) + 1, self._rows + 1, self._longest + 1))
        n, length = np.arange(1, self._rows + 1), np.arange(self._longest + 1)
        for index, kind in enumerate(kinds):
            for name in kind:
                table[index, 1:] += self._profile.beta[name].at(n, length)
        return table

    @functools.cached_property
    def packed(self) -> Floats:
        """The cost of one task's packed tokens [kinds + 1, tokens + 1]."""
        return self._of_tokens(self._kinds)

    def _of_tokens(self, kinds: Sequence[Sequence[str]]) -> Floats:
        table = np.zeros((len(kinds) + 1, self._tokens + 1))
        for index, kind in enumerate(kinds):
            for name in kind:
                table[index] += self._profile.packed_delta_seconds(name, self._tokens)
        return table

    @functools.cached_property
    def _steps(self) -> Floats:
        """The seconds of a task, a step and a token [kinds + 1, 3] of heavy deltas; NaN if not all are known."""
        table = np.zeros((len(self._kinds) + 1, 3))
        for index, names in enumerate(self._heavy_names):
            for name in names:
                own = self._profile.steps.get(name)
                table[index] += (own.task, own.step, own.token) if own is not None else np.nan
        return table

    @functools.cached_property
    def _heavy_packed(self) -> Floats:
        return self._of_tokens(self._heavy_names)

    def of_tasks(self, batch: Ints, kind: Ints, rows: Ints, tokens: Ints, longest: Ints, padded_to: Ints) -> float:
        """The cost of all tasks of some batches. Entry i is one task in batch ``batch[i]``: its kind, the number of its
        rows, their tokens in all, and its longest row. ``padded_to`` [batches] is the length of a batch's rows, 0 where
        it is packed."""
        lengths = padded_to[batch]
        packed = lengths == 0
        stepped = self.heavy[kind] & np.isfinite(self._steps[kind, 0])
        whole = np.where(packed, self.packed[kind, tokens], self.padded[kind, rows, longest])
        heavy = np.where(packed, self._heavy_packed[kind, tokens], self._heavy_padded[kind, rows, longest])
        own, of = kind[stepped], batch[stepped]
        seconds = np.empty((len(RUNS), len(padded_to)))
        work = np.empty_like(seconds)
        for at, run in enumerate(RUNS):
            steps, size = _steps_of(run, rows[stepped], tokens[stepped], lengths[stepped])
            task, step, token = self._steps[own].T
            seconds[at] = np.bincount(of, weights=task + steps * (step + token * size), minlength=len(padded_to))
            work[at] = np.bincount(of, weights=steps * (SETUP_TOKENS + size), minlength=len(padded_to))
        one = work.argmin(axis=0)  # all tasks of a batch have steps of one length
        chosen = seconds[one, np.arange(len(padded_to))]
        return float((whole - np.where(stepped, heavy, 0.0)).sum() + chosen.sum())

    @functools.cached_property
    def heavy_least(self) -> Floats:
        """What one task's packed tokens [kinds + 1, tokens + 1] cost at least by heavy deltas, in runs of any length
        and divided among any batches."""
        tokens = np.arange(self._tokens + 1)
        each = np.minimum.accumulate(self._heavy_packed[:, 1:] / tokens[1:], axis=1)
        table = np.concatenate([np.zeros((len(each), 1)), each * tokens[1:]], axis=1)
        for index, (task, step, token) in enumerate(self._steps):
            if np.isfinite(task):  # each part has a step at least, and all of them have as many as the longest need
                whole = task + step + token * tokens[1:]
                table[index, 1:] = np.maximum(whole, (step / LONGEST_RUN + token) * tokens[1:])
        return table

    def heavy_by_run(self, run: int) -> Floats:
        """The cost of one task's packed tokens [kinds + 1, tokens + 1] by heavy deltas alone, in steps of ``run``
        tokens. Where the profile has no steps, it has the least over ``RUNS``."""
        if run not in self._by_run:
            tokens = np.maximum(np.arange(self._tokens + 1), 1)
            work = {size: -(-tokens // size) * (SETUP_TOKENS + size) for size in {run, *RUNS}}
            self._by_run[run] = self._heavy_packed * (work[run] / np.min(list(work.values()), axis=0))
            for index, names in enumerate(self._heavy_names):
                if names and all(name in self._profile.steps for name in names):
                    own = [self._profile.steps[name].seconds(np.arange(self._tokens + 1), run) for name in names]
                    self._by_run[run][index] = np.sum(own, axis=0)
        return self._by_run[run]


def _steps_of(run: int, rows: Ints, tokens: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """The steps of tasks and the tokens of a step, where about ``run`` are asked for: in padded rows of ``lengths``
    (0: packed) whole rows with the padding between them if a step is as long as a row, else row by row."""
    size = np.where(lengths == 0, run, np.minimum(lengths, LONGEST_RUN))
    whole = (lengths > 0) & (lengths <= run)
    size = np.where(whole, lengths * (run // np.maximum(lengths, 1)), size)
    mean = -(-tokens // rows)
    joined = np.where(lengths == 0, tokens, (rows - 1) * lengths + mean)
    return np.where(size >= lengths, -(-joined // size), rows * -(-mean // size)), size


def task_tokens(queue: Queue, queries: Ints) -> tuple[Ints, Ints]:
    """The kinds [m] and the tokens [m] of the m tasks of some queries of a queue."""
    tasks = queue.tasks[queries] - BARE
    tokens = np.bincount(tasks, weights=queue.lengths[queries]).astype(np.int_)
    kinds = np.empty(len(tokens), np.int_)
    kinds[tasks] = queue.kinds[queries]
    present = np.flatnonzero(tokens)
    return kinds[present], tokens[present]
