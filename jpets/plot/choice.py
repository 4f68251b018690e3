"""Which n-grams of a corpus a table holds, and which of them layers are trained to find there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Shaped

from jpets.plot.counting import BUFFERED, NgramCounter
from jpets.plot.lookup import among
from jpets.plot.ngrams import Window, keys_of, ngrams
from jpets.plot.sealed import read_sealed, write_sealed

RUNS = 100
"""Runs of neighbouring texts, of which every tenth is left out: texts that are nearly the same often are neighbours."""
ONE_OF = 10
COUNTED = ("every", "others", "cut")
"""Folders of what is counted: of all texts, of those that are not left out, and of texts as they are trained on."""
CHOSEN = "chosen.keys"
"""The number of a table's keys, these, and those that are found in training."""


class Chosen(NamedTuple):
    """Sorted keys: those of a table, and those that a text finds while layers are trained."""

    table: Shaped[np.ndarray, " k"]
    training: Shaped[np.ndarray, " l"]


def left_out(count: int) -> Bool[np.ndarray, " texts"]:
    """A tenth of the texts, to see what a table finds of texts that it was not made of; none of fewer than ten."""
    chosen: Bool[np.ndarray, " texts"] = np.arange(count) * min(RUNS, count) // max(count, 1) % ONE_OF == ONE_OF - 1
    return chosen


def choose(
    texts: Callable[[int], Iterable[Int[np.ndarray, " t"]]],
    trained: Sequence[Int[np.ndarray, " u"]],
    window: Window,
    share: float,
    folder: Path,
    *,
    buffered: int = BUFFERED,
) -> Chosen:
    """The most frequent n-grams of ``texts``, token ids of each from a number on: as few as make up ``share`` of all
    occurrences.

    ``trained`` are the same texts, cut to what is trained on. A table finds less of a text that it was not made of, so
    layers that learnt on texts found whole would not know what to do with the rest: of ``trained`` as much is found in
    ``training`` as of the texts left out in a table of the others.

    ``folder`` is for these texts, this window and this share alone: a call that was killed goes on there with what it
    had counted, which it writes every ``buffered`` n-grams, and one that had ended is not done again. Raises
    ``InvalidInput``, ``OutOfSpace``.
    """
    path = folder / CHOSEN
    chosen = _read(path, window)
    if chosen is None:
        chosen = _counted(texts, trained, window, share, folder, buffered)
        write_sealed(path, [np.array([len(chosen.table)], np.int64), *chosen])
    for name in COUNTED:  # also those of a call that was killed just here
        shutil.rmtree(folder / name, ignore_errors=True)
    return chosen


def _counted(
    texts: Callable[[int], Iterable[Int[np.ndarray, " t"]]],
    trained: Sequence[Int[np.ndarray, " u"]],
    window: Window,
    share: float,
    folder: Path,
    buffered: int,
) -> Chosen:
    out = left_out(len(trained))
    every, others, cut = counters = [NgramCounter(folder / name, window, buffered=buffered) for name in COUNTED]
    start = min(own.texts for own in counters)
    rest = zip(texts(start), trained[start:], out[start:], strict=True)
    for number, (ids, short, aside) in enumerate(rest, start):
        grams = ngrams(ids, None, window)
        every.add(number, grams)
        others.add(number, grams[: 0 if aside else None])
        cut.add(number, ngrams(short, None, window))
    table = every.most_frequent(share)
    if not out.any():
        return Chosen(table, table)
    known = others.most_frequent(share)
    found = [among(keys_of(ngrams(trained[at], None, window)), known) for at in np.flatnonzero(out).tolist()]
    return Chosen(table, cut.most_frequent(float(np.concatenate(found).mean())))


def _read(path: Path, window: Window) -> Chosen | None:
    """What an earlier call had chosen, if its file is whole."""
    if (content := read_sealed(path)) is None:
        return None
    count = np.frombuffer(content, np.int64, 1)
    keys = np.frombuffer(content[count.nbytes :], window.key_dtype)
    return Chosen(keys[: count[0]], keys[count[0] :])
