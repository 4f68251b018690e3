"""A small tree of tables: a root, and a domain ``games``."""

from __future__ import annotations

import contextlib
import os
import pathlib

import numpy as np

from jpets.plot.ngrams import Window, keys_of, ngrams
from jpets.plot.table import TableInfo, TableWriter
from jpets.plot.tree import TABLES, Branch, Tree

WORDS, WIDTH, WINDOW = 30, 16, Window.of(3)
ROOT, GAMES = "a" * 64, "b" * 64
IDS = np.array([7, 8, 9, 7], np.int32)


def written(folder: pathlib.Path, layers: str, grams: np.ndarray, seed: int, width: int = WIDTH) -> str:
    keys = np.unique(keys_of(grams))
    writer = TableWriter(folder / TABLES, TableInfo(layers, WINDOW, width), keys)
    values = np.random.default_rng(seed).standard_normal((len(keys), 3, width), np.float32)
    writer.append(values)
    return writer.finish().stem


def alone(words: int = WORDS) -> np.ndarray:
    found = np.zeros((words, 3), np.int64)
    found[:, 1] = np.arange(words) + 1
    return found


def grams(ids: np.ndarray = IDS) -> np.ndarray:
    return ngrams(ids, None, WINDOW)


def make_folder(place: pathlib.Path) -> pathlib.Path:
    """A tree whose domain ``games`` has the n-grams of ``IDS``."""
    (place / TABLES).mkdir()
    (place / "layers").mkdir()
    root, games = written(place, ROOT, alone(), 1), written(place, GAMES, grams(), 2)
    Tree(WINDOW, WIDTH, 1, Branch(root, ROOT), {"games": Branch(games, GAMES)}).write(place)
    return place


def open_places(path: pathlib.Path) -> int | None:
    """How often a table's file is mapped and open in this process; None where the system does not tell. Tables of other
    tests may have its name."""
    maps, files = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/self/fd")
    if not maps.exists():
        return None
    found = maps.read_text().count(str(path))
    for descriptor in files.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found += str(path) in os.readlink(descriptor)
    return found
