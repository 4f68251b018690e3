"""Building tables: n-gram layers on disk, and the vectors of counted n-grams (HMI section 5.1)."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Int, Shaped

from jpets.config import DType, TableFormat
from jpets.errors import InvalidTable
from jpets.files import STALE_SECONDS, write_atomic
from jpets.model.encoder import Params
from jpets.plot.layers import NGramLayers
from jpets.plot.ngrams import Window, alone, grams_of, keys_of, shortened
from jpets.plot.table import TableInfo, TableWriter, finished
from jpets.plot.tree import LAYERS_SUFFIX
from jpets.types import Progress

BATCH = 2048
"""N-grams that are computed at a time."""


def table_info(layers: NGramLayers, digest: str, kept_as: TableFormat = "bfloat16") -> TableInfo:
    return TableInfo(digest, layers.window, layers.config.hidden_size, kept_as)


def layers_digest(params: Params) -> str:
    """The digest of the parameters of n-gram layers: equal where, and only where, their vectors are."""
    found = hashlib.sha256(b"jpets n-gram layers 1\n")
    for name, array in sorted(_flat(params).items()):
        found.update(f"{name} {list(array.shape)}\n".encode())
        found.update(np.ascontiguousarray(array, "<f4").data)
    return found.hexdigest()


def write_layers(folder: Path, params: Params) -> str:
    """Writes the parameters of n-gram layers, but for the word embeddings, which a tree's layers share, into ``folder``
    under their digest, and returns it. Raises ``OutOfSpace``."""
    digest = layers_digest(params)
    path = folder / f"{digest}{LAYERS_SUFFIX}"
    own = {name: array for name, array in _flat(params).items() if name != "lower/word"}
    write_atomic(path, safetensors.numpy.save(own))
    return digest


def read_layers(folder: Path, digest: str, word: Any) -> Params:
    """What ``write_layers`` wrote, with the word embeddings. Raises ``InvalidTable``."""
    try:
        flat = safetensors.numpy.load((folder / f"{digest}{LAYERS_SUFFIX}").read_bytes())
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise InvalidTable("the n-gram layers of these tables are missing or damaged; make the root again") from error
    params: Params = {}
    for name, array in {**flat, "lower/word": np.asarray(word, np.float32)}.items():
        *path, last = name.split("/")
        branch: dict[Any, Any] = params
        for part in path:
            branch = branch.setdefault(int(part) if part.isdigit() else part, {})
        branch[last] = array
    if layers_digest(params) != digest:
        raise InvalidTable("the n-gram layers of these tables are damaged; make the root again")
    return params


def root_keys(
    frequent: Shaped[np.ndarray, " k"], window: Window, words: int, forms: Int[np.ndarray, " w"] | None = None
) -> Shaped[np.ndarray, " keys"]:
    """The sorted keys of a root table: frequent n-grams, what each falls back to, and every token alone; with ``forms``
    all of normal forms."""
    grams = grams_of(frequent, window.size)
    parts = [frequent, *(keys_of(shortened(grams, window, *own)) for own in window.shorter)]
    parts.append(keys_of(alone(words, window, forms)))
    return np.unique(np.concatenate(parts))


def build_table(
    folder: Path,
    layers: NGramLayers,
    params: Params,
    digest: str,
    keys: Shaped[np.ndarray, " keys"],
    *,
    kept_as: TableFormat = "bfloat16",
    dtype: DType = "float32",
    batch: int = BATCH,
    report: Progress = lambda what, done, of: None,
    named: Container[str] = (),
) -> Path:
    """The path of the table of these n-grams in ``folder``. A killed build goes on where it had made sure of its work,
    and one that had finished is not done again. Tables that are ``named`` in a tree are left as they are: servers map
    them.

    Raises ``Conflict`` while another process builds it, ``OutOfSpace``.
    """
    info = table_info(layers, digest, kept_as)
    if (path := finished(folder, info, keys)) is not None and (path.stem in named or _made_young(path)):
        return path
    writer = TableWriter(folder, info, keys)
    try:
        compute = jax.jit(functools.partial(layers.vectors, dtype=dtype))
        params = jax.tree.map(jnp.asarray, params)
        while (start := writer.written) < len(keys):
            grams = grams_of(keys[start : start + batch], layers.window.size)
            filled = np.zeros((batch, layers.window.size), np.int32)
            filled[: len(grams)] = grams
            filled[len(grams) :, layers.window.before] = 1
            writer.append(np.asarray(compute(params, filled))[: len(grams)])
            report("n-grams", writer.written, len(keys))
        return writer.finish()
    finally:
        writer.close()


def _made_young(path: Path) -> bool:
    """Whether the file is there, and stays for a while: what no tree names goes when it is old."""
    try:
        if time.time() - path.stat().st_mtime > STALE_SECONDS / 2:
            os.utime(path)
    except FileNotFoundError:  # another process swept it just now
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def _flat(params: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(params, dict):
        return {prefix: np.asarray(params, np.float32)}
    found: dict[str, Any] = {}
    for name, own in params.items():
        found |= _flat(own, f"{prefix}/{name}" if prefix else str(name))
    return found
