"""Tables that are damaged or replaced while an engine serves a backbone over them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from domain_tables import open_places
from hierarchical import IN_DOMAIN, computed, domain_layers, keys_of_texts, layers_of, opened, write_tables
from support import ENGINE_SETTINGS, make_head, make_task, paused, random_delta, wait_until

from checkpoints.native import PLOT
from jpets.config import TablePlace
from jpets.engine.engine import Engine
from jpets.plot.build import build_table, layers_digest
from jpets.plot.domains import DomainTables
from jpets.plot.table import HEADER_BYTES, SUFFIX
from jpets.plot.tree import TABLES, Tree
from jpets.types import Classification, Preprocessing, Query, Task

NAME, SEED = "tiny-bert", 2
NEW = "unheard words xyzzy"
"""A text that the domain's first table has nothing of."""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A backbone with a domain, ``games``."""
    return write_tables(tmp_path / "own", NAME, domains=[("games", IN_DOMAIN, SEED)])


@contextmanager
def served(folder: pathlib.Path, cache: pathlib.Path, tables: TablePlace = "auto") -> Iterator[tuple[Engine, Task]]:
    """An engine with tasks ``games`` and ``root``, and the first of them."""
    backbone = opened(folder)
    assert backbone.tables is not None
    delta = random_delta("lora", backbone.config, 5)
    head = make_head(np.random.default_rng(3), backbone.config.hidden_size, 3)
    names = {"games": backbone.tables.full_name("games"), "root": None}
    rules = {id: Preprocessing(truncation=True, max_length=40, domain=name) for id, name in names.items()}
    tasks = [make_task(backbone, id, [delta], head, preprocessing=rule) for id, rule in rules.items()]
    settings = dataclasses.replace(ENGINE_SETTINGS, response_cache_mb=1, tables=tables, table_memory_gb=0.01)
    with Engine(backbone, tasks, settings, cache_dir=cache).start() as engine:
        yield engine, tasks[0]


def table_of(folder: pathlib.Path) -> pathlib.Path:
    """That of the domain."""
    return folder / PLOT / TABLES / f"{Tree.read(folder / PLOT).domains['games'].table}{SUFFIX}"


def replace(engine: Engine, folder: pathlib.Path, texts: Sequence[str]) -> None:
    """The domain's table by one of the n-grams of these texts, by the same layers."""
    layers, params = layers_of(NAME), domain_layers(NAME, 3, SEED)
    digest, keys = layers_digest(params), keys_of_texts(NAME, texts, layers)
    path = build_table(folder / PLOT / TABLES, layers, params, digest, keys, batch=256)
    assert engine.backbone.tables is not None
    engine.backbone.tables.add("games", {"table": path.stem, "layers": digest, "details": {}}, same_layers=True)


def asked(engine: Engine, *queries: Query) -> list[np.ndarray]:
    results = engine.infer(queries)
    assert not [result.error for result in results if result.error]
    return [result.logits for result in results if isinstance(result, Classification)]


def test_a_damaged_vector_fails_the_texts_that_need_it_alone(folder: pathlib.Path, program_cache: pathlib.Path) -> None:
    """Among others in their batch, also of their task."""
    path = table_of(folder)
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES] ^= 255
    path.unlink()
    path.write_bytes(content)
    sound = [Query("root", IN_DOMAIN[0]), Query("games", input_ids=[300, 301, 302]), Query("root", NEW)]
    with served(folder, program_cache) as (engine, _):
        alone = [asked(engine, query)[0] for query in sound]
        engine.responses.budget = 0
        queries = [Query("games", IN_DOMAIN[0]), *sound, Query("games", IN_DOMAIN[1])]
        for _ in range(2):
            first, *others, last = engine.infer(queries)
            for failed in (first, last):
                assert failed.error is not None and failed.error.code == "engine_failure"
                assert "block 0 of the table is damaged" in failed.error.message
            found = [each.logits for each in others if isinstance(each, Classification)]
            np.testing.assert_allclose(found, alone, atol=1e-5)


def test_an_answer_of_a_table_that_was_replaced_is_not_given_again(
    folder: pathlib.Path, program_cache: pathlib.Path
) -> None:
    with served(folder, program_cache) as (engine, task):
        first, again = (asked(engine, Query("games", NEW))[0] for _ in range(2))
        assert engine.responses.hits == 1 and (first == again).all()
        texts = (*IN_DOMAIN, NEW)
        replace(engine, folder, texts)
        (found,) = asked(engine, Query("games", NEW))
        assert engine.responses.hits == 1
        expected = computed(engine.backbone, NAME, task, [NEW], texts, SEED)
        np.testing.assert_allclose([found], expected, atol=2e-4)
        assert np.abs(found - first).max() > 1e-3


def test_a_text_that_waits_while_its_table_is_replaced_is_answered_by_that_table(
    folder: pathlib.Path, program_cache: pathlib.Path
) -> None:
    """Which is then let go of, although another one has come."""
    texts = (*IN_DOMAIN, NEW)
    with served(folder, program_cache) as (engine, task):
        tables = engine.backbone.tables
        assert isinstance(tables, DomainTables)
        asked(engine, Query("games", IN_DOMAIN[0]))
        engine.responses.budget = 0
        usual, old = tables._arena.free, table_of(folder)
        with paused(engine):
            waiting = engine.submit([Query("games", text) for text in texts])
            replace(engine, folder, texts)
            old.unlink()
            both = tables._arena.free
        found = [future.result(60) for future in waiting]
        logits = [each.logits for each in found if isinstance(each, Classification)]
        np.testing.assert_allclose(logits, computed(engine.backbone, NAME, task, texts, IN_DOMAIN, SEED), atol=2e-4)
        wait_until(lambda: tables._arena.free > both and not open_places(old))
        assert both < usual
        newer = asked(engine, *(Query("games", text) for text in texts))
        np.testing.assert_allclose(newer, computed(engine.backbone, NAME, task, texts, texts, SEED), atol=2e-4)
        assert np.abs(newer[-1] - logits[-1]).max() > 1e-3


def has_moved(tables: DomainTables, times: int) -> bool:
    return tables.moved >= times


@pytest.mark.parametrize("place", ["mapped", "staged"])
def test_a_table_in_the_place_of_one_that_left_is_not_taken_for_it(
    folder: pathlib.Path, program_cache: pathlib.Path, place: TablePlace
) -> None:
    """Rows of it may be on the device by the same numbers."""
    texts: tuple[str, ...] = IN_DOMAIN
    with served(folder, program_cache, place) as (engine, task):
        tables = engine.backbone.tables
        assert isinstance(tables, DomainTables)
        engine.responses.budget = 0
        for more in (NEW, "a game of chess with sounds", "zzz other aaa words"):
            moved, texts = tables.moved + 1, (*texts, more)
            replace(engine, folder, texts)
            wait_until(partial(has_moved, tables, moved))
            expected = computed(engine.backbone, NAME, task, texts, texts, SEED)
            for _ in range(2):
                found = asked(engine, *(Query("games", text) for text in texts))
                np.testing.assert_allclose(found, expected, atol=2e-4)
        report = engine.report().devices[0].rows
        assert (report.hits > 0) == (report.misses > 0) == (place == "staged")
