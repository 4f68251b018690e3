"""From n-gram layers and counted n-grams to a table."""

from __future__ import annotations

import functools
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpets.config import BackboneConfig
from jpets.errors import InvalidTable
from jpets.model.encoder import random_params
from jpets.plot.build import build_table, layers_digest, read_layers, root_keys, table_info, write_layers
from jpets.plot.layers import NGramLayers
from jpets.plot.ngrams import Window, grams_of, keys_of, ngrams
from jpets.plot.table import HEADER_BYTES, Table

CONFIG = BackboneConfig("bert", 50, 16, 3, 2, 32, 64)
IDS = np.array([5, 6, 7, 6, 5, 6, 9, 9], np.int32)


def made(size: int = 3) -> tuple[NGramLayers, dict]:
    own = NGramLayers(CONFIG, Window.of(size), 2)
    return own, jax.tree.map(np.asarray, own.start(random_params(CONFIG, 1)))


def test_layers_are_read_as_they_were_written(tmp_path: pathlib.Path) -> None:
    _, params = made()
    digest = write_layers(tmp_path, params)
    again = read_layers(tmp_path, digest, params["lower"]["word"])
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert layers_digest(again) == digest and [path.stem for path in tmp_path.iterdir()] == [digest]
    with pytest.raises(InvalidTable, match="damaged"):
        read_layers(tmp_path, digest, params["lower"]["word"] + 1)
    with pytest.raises(InvalidTable, match="missing or damaged"):
        read_layers(tmp_path, "0" * 64, params["lower"]["word"])
    (tmp_path / f"{digest}.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InvalidTable, match="missing or damaged"):
        read_layers(tmp_path, digest, params["lower"]["word"])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_root_has_all_that_a_text_may_fall_back_to(size: int) -> None:
    window = Window.of(size)
    frequent = np.unique(keys_of(ngrams(IDS, np.zeros(len(IDS), np.int8), window)))
    found = {tuple(gram) for gram in grams_of(root_keys(frequent, window, 50), size)}
    assert len(found) == len(root_keys(frequent, window, 50))
    for gram in grams_of(frequent, size):
        for before, after in [(window.before, window.after), *window.shorter]:
            kept = range(window.before - before, window.before + after + 1)
            assert tuple(id if place in kept else 0 for place, id in enumerate(gram)) in found
    for word in range(50):
        assert tuple(word + 1 if place == window.before else 0 for place in range(size)) in found


def test_a_table_holds_what_the_layers_compute_and_a_killed_build_goes_on(tmp_path: pathlib.Path) -> None:
    own, params = made()
    digest = layers_digest(params)
    keys = root_keys(np.unique(keys_of(ngrams(IDS, np.zeros(len(IDS), np.int8), own.window))), own.window, 50)

    def stop(what: str, done: int, of: int) -> None:
        if done >= 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_table(tmp_path, own, params, digest, keys, batch=8, report=stop)
    told: list[tuple[int, int]] = []
    path = build_table(
        tmp_path, own, params, digest, keys, batch=8, report=lambda what, done, of: told.append((done, of))
    )
    assert told[-1] == (len(keys), len(keys))
    table = Table(path, table_info(own, digest))
    table.check_all()
    np.testing.assert_array_equal(table.keys, keys)
    computed = own.vectors(jax.tree.map(jnp.asarray, params), jnp.asarray(grams_of(keys, 3), jnp.int32))
    np.testing.assert_allclose(table.values.astype(np.float32), computed, atol=0.02)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_table_that_was_finished_is_not_computed_again(tmp_path: pathlib.Path) -> None:
    """A run that was killed before it named the table finds it; a damaged one or one of other n-grams is of no use."""
    own, params = made()
    digest = layers_digest(params)
    keys = root_keys(np.unique(keys_of(ngrams(IDS, np.zeros(len(IDS), np.int8), own.window))), own.window, 50)
    told: list[int] = []
    build = functools.partial(
        build_table, tmp_path, own, params, digest, report=lambda what, done, of: told.append(done)
    )
    path = build(keys)
    os.utime(path, (0, 0))
    told.clear()
    assert build(keys) == path and not told
    assert path.stat().st_mtime > time.time() - 3600, "what no tree names goes when it is old"
    assert build(keys[:-1]) != path and told
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(b"other")
    told.clear()
    assert build(keys) == path and told
    Table(path, table_info(own, digest)).check_all()
