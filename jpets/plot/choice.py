"""Which n-grams of a corpus a table holds, and which of them layers are trained to find there."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Shaped

from jpets.files import STALE_SECONDS, sweep
from jpets.plot.counting import NgramCounter
from jpets.plot.lookup import among
from jpets.plot.ngrams import Window, keys_of, ngrams

RUNS = 100
"""Runs of neighbouring texts, of which every tenth is left out: texts that are nearly the same often are neighbours."""
ONE_OF = 10
COUNTS = "counts-"
"""Prefix of folders of counts."""


class Chosen(NamedTuple):
    """Sorted keys: those of a table, and those that a text finds while layers are trained."""

    table: Shaped[np.ndarray, " k"]
    training: Shaped[np.ndarray, " l"]


def left_out(count: int) -> Bool[np.ndarray, " texts"]:
    """A tenth of the texts, to see what a table finds of texts that it was not made of; none of fewer than ten."""
    chosen: Bool[np.ndarray, " texts"] = np.arange(count) * min(RUNS, count) // max(count, 1) % ONE_OF == ONE_OF - 1
    return chosen


def choose(
    texts: Iterable[Int[np.ndarray, " t"]],
    trained: Sequence[Int[np.ndarray, " u"]],
    window: Window,
    share: float,
    folder: Path,
) -> Chosen:
    """The most frequent n-grams of ``texts``, token ids of each: as few as make up ``share`` of all occurrences.

    ``trained`` are the same texts, cut to what is trained on. A table finds less of a text that it was not made of, so
    layers that learnt on texts found whole would not know what to do with the rest: of ``trained`` as much is found in
    ``training`` as of the texts left out in a table of the others. Raises ``InvalidInput``, ``OutOfSpace``.
    """
    out = left_out(len(trained))
    sweep(folder, COUNTS, STALE_SECONDS)  # which killed runs left
    with contextlib.ExitStack() as stack:
        every, others, cut = (
            NgramCounter(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=COUNTS, dir=folder))), window)
            for _ in range(3)
        )
        for ids, short, aside in zip(texts, trained, out, strict=True):
            grams = ngrams(ids, None, window)
            every.add(grams)
            cut.add(ngrams(short, None, window))
            if not aside:
                others.add(grams)
        table = every.most_frequent(share)
        if not out.any():
            return Chosen(table, table)
        known = others.most_frequent(share)
        found = [among(keys_of(ngrams(trained[at], None, window)), known) for at in np.flatnonzero(out).tolist()]
        return Chosen(table, cut.most_frequent(float(np.concatenate(found).mean())))
