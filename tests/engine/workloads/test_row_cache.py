"""Rows of tables that a device keeps, beside rows that are read from the tables themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Int, Shaped
from support import ENGINE_SETTINGS, shallow

from jpets.engine.device.memory import staged_rows
from jpets.engine.device.replica import Replica
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.program import Family
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.engine.workloads.row_cache import PIECES, RowCache
from jpets.errors import InvalidInput

SOURCE_ROWS, CAPACITY = 40, 12
BATCHES = st.lists(
    st.tuples(
        st.lists(st.integers(-1, SOURCE_ROWS - 1), min_size=1, max_size=CAPACITY),
        st.sampled_from(["", "", "", "moved", "failed", "fails"]),
    ),
    min_size=1,
    max_size=20,
)


class Device:
    """What ``WriteRows`` asks for, in host memory."""

    def __init__(self) -> None:
        self.held = np.zeros((CAPACITY, 2, 3), np.float32)
        self.fails = False
        self.sizes: list[int] = []

    def __call__(self, places: Int[np.ndarray, " k"], rows: Shaped[np.ndarray, "k p e"], *, anew: bool) -> None:
        self.sizes.append(len(rows))
        if anew:
            self.held = np.zeros_like(self.held)
        inside = places < len(self.held)
        if self.fails:
            self.held[:] = np.nan
            raise RuntimeError("the device failed")
        assert len(set(places.tolist())) == len(places), "each place is written once"
        self.held[places[inside]] = rows[inside]


class Tables:
    """Vectors whose rows come to mean others."""

    def __init__(self, rows: int = SOURCE_ROWS) -> None:
        self.values = np.random.default_rng(1).standard_normal((rows, 2, 3)).astype(np.float32)
        self.moved = 0

    def move(self) -> None:
        self.values += 1
        self.moved += 1


@settings(max_examples=60, deadline=None)
@given(BATCHES)
def test_a_batch_finds_what_its_rows_mean(batches: Sequence[tuple[Sequence[int], str]]) -> None:
    """Whatever left, came to mean something else, or was lost with the device before."""
    tables, device = Tables(), Device()
    cache = RowCache(tables.values, lambda: tables.moved, CAPACITY, device)
    for tokens, before in batches:
        rows = np.array(tokens, np.int32)
        if before == "moved":
            tables.move()
        if before == "failed":
            device.held[:] = np.nan
            cache.forget()
        device.fails = before == "fails"
        misses = cache.misses
        try:
            places = cache.places(rows)
        except RuntimeError:
            assert device.fails
            continue
        finally:
            device.fails = False
        if before == "fails" and cache.misses > misses:
            pytest.fail("what could not be written was taken for written")
        some = rows >= 0
        np.testing.assert_array_equal(places[~some], -1)
        np.testing.assert_array_equal(device.held[places[some]], tables.values[rows[some]])


def test_rows_that_no_batch_has_read_for_longest_leave() -> None:
    tables, device = Tables(), Device()
    cache = RowCache(tables.values, lambda: tables.moved, CAPACITY, device)
    batches = [range(6), range(6, 12), range(3), range(12, 15), range(3), range(9, 12)]
    for rows in batches:
        cache.places(np.array(rows, np.int32))
    assert (cache.hits, cache.misses) == (3 + 3 + 3, 6 + 6 + 3), "3, 4 and 5 left for 12, 13 and 14"


def test_many_rows_are_written_in_pieces_of_few_sizes() -> None:
    tables, device = Tables(3 * PIECES[-1]), Device()
    device.held = np.zeros((3 * PIECES[-1], 2, 3), np.float32)
    cache = RowCache(tables.values, lambda: 0, len(device.held), device)
    assert device.sizes == [*PIECES], "compiled before the first query"
    rows = np.arange(PIECES[-1] + PIECES[1] + 1, dtype=np.int32)
    places = cache.places(rows)
    assert device.sizes[len(PIECES) :] == [PIECES[-1], PIECES[2]]
    np.testing.assert_array_equal(device.held[places], tables.values[rows])


@pytest.mark.parametrize("devices", [1, 2])
def test_a_replica_has_what_was_written(devices: int) -> None:
    """On each of its devices, and after a batch that took the parameters of before."""
    config = dataclasses.replace(shallow().config, window=(1, 1), table_rows=CAPACITY)
    empty = np.zeros(config.table_shape, config.table_dtype)
    mesh = MeshSlice(jax.devices()[:devices], config.heads)
    replica = Replica(Family(EncoderNetwork(config), "float32", ()), {**shallow().params, "table": empty}, mesh)
    source = np.random.default_rng(2).standard_normal((SOURCE_ROWS, *config.table_shape[1:])).astype(empty.dtype)
    cache = RowCache(source, lambda: 0, CAPACITY, replica.write_rows)
    for rows in (np.arange(12), np.arange(20, 28), np.arange(4, 10)):
        copy = dict(replica.params)
        places = cache.places(rows.astype(np.int32))
        for shard in replica._with_table(copy)["table"].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data)[places], source[rows])


def test_a_device_has_rows_for_a_batch_in_any_case() -> None:
    config = dataclasses.replace(shallow().config, window=(1, 1))
    own = dataclasses.replace(ENGINE_SETTINGS, tables="staged", table_memory_gb=1e-6)
    row = 3 * config.hidden_size * 2
    assert staged_rows(own, config, "cpu", float("inf"), 128) == 128
    large = dataclasses.replace(own, table_memory_gb=1.0)
    assert staged_rows(large, config, "cpu", float("inf"), 128) == 10**9 // row
    assert staged_rows(large, config, "gpu", 8e8, 128) == 10**8 // row
    assert staged_rows(dataclasses.replace(large, tables="auto"), config, "gpu", 8e8, 128) == 10**8 // row
    assert staged_rows(dataclasses.replace(large, tables="auto"), config, "cpu", 8e8, 128) == 0
    assert staged_rows(large, shallow().config, "gpu", 8e8, 128) == 0
    with pytest.raises(InvalidInput, match="leave tables at auto"):
        staged_rows(dataclasses.replace(large, tables="mapped"), config, "gpu", 8e8, 128)
