"""Backbones whose lower layers are tables, through the engine, beside computing their n-gram layers."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import pytest
from hierarchical import IN_DOMAIN, MOST, Given, computed, opened, query_of, write_tables
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, FIXTURES, make_head, make_task, random_delta, shallow

from checkpoints.backbone import Backbone
from checkpoints.imports.heads import Wishes
from checkpoints.imports.task import read_adapter, read_model
from jpets.config import TableFormat, TablePlace
from jpets.engine.device.replica import Replica
from jpets.engine.engine import Engine
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.program import Family
from jpets.errors import InvalidTask
from jpets.types import Classification, Embedding, Head, Preprocessing, Query, Task

METHODS = ("adapter", "bitfit", "mask", "prefix", "prompt")
DOMAINS = (("games", IN_DOMAIN, 2), ("science", ("words of science",), 3))
TEXTS: Sequence[Given] = (
    "some text",
    ("some text", "other words of the domain"),
    "a text of the root",
    "A TEXT of the Root",
    "unheard words xyzzy",
    "a",
    "words of science and other words of the domain, which are many " * 8,
    "中文的词",
)
SEEDS: dict[str | None, int] = {None: 1, **{name: seed for name, _, seed in DOMAINS}}
OWN_TEXTS: dict[str | None, Sequence[str]] = {None: (), **{name: texts for name, texts, _ in DOMAINS}}


def task_of(backbone: Backbone, method: str, domain: str | None) -> Task:
    delta = random_delta(method, backbone.config, 5)
    head = make_head(np.random.default_rng(3), backbone.config.hidden_size, 3)
    assert backbone.tables is not None
    full_name = None if domain is None else backbone.tables.full_name(domain)
    longest = 40 if method in ("prefix", "prompt") else MOST
    rule = Preprocessing(truncation=True, max_length=longest, domain=full_name)
    return make_task(backbone, f"{method}-{domain or 'root'}", [delta], head, preprocessing=rule)


@pytest.fixture(
    scope="module",
    params=[
        "tiny-bert",
        "tiny-bert 2 normal",
        "tiny-bert 5",
        "tiny-roberta float8",
        "tiny-roberta staged",
        "tiny-roberta staged small float8 5",
        "tiny-roberta normal",
    ],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Engine, list[Task]]]:
    """Staged: as a device with memory of its own would get them; small: one that has rows for a batch alone; normal:
    looked up by normal forms; a number: tokens of an n-gram."""
    folder = tmp_path_factory.mktemp("tables")
    name, *how = request.param.split()
    place: TablePlace = "staged" if "staged" in how else "auto"
    room = 1e-6 if "small" in how else 0.01
    settings = dataclasses.replace(ENGINE_SETTINGS, tables=place, table_memory_gb=room)
    kept_as: TableFormat = "float8" if "float8" in how else "bfloat16"
    size = next((int(own) for own in how if own.isdigit()), 3)
    backbone = opened(write_tables(folder / "own", name, size, DOMAINS, kept_as, "normal" in how))
    methods = METHODS if request.param == "tiny-bert" else ("lora", "prompt")
    tasks = [task_of(backbone, method, domain) for method in methods for domain in (None, "games", "science")]
    with Engine(backbone, tasks, settings, cache_dir=folder / "cache", buckets=ENGINE_BUCKETS).start() as engine:
        yield name, engine, tasks


Served = tuple[str, Engine, list[Task]]


def test_answers_are_those_of_computing_the_ngram_layers(served: Served) -> None:
    """Of every method, and of tasks of three domains in one batch."""
    name, engine, tasks = served
    results = engine.infer([query_of(task.id, text) for task in tasks for text in TEXTS])
    for number, task in enumerate(tasks):
        domain = None if task.preprocessing.domain is None else task.preprocessing.domain.partition("@")[0]
        expected = computed(engine.backbone, name, task, TEXTS, OWN_TEXTS[domain], SEEDS[domain])
        own = results[number * len(TEXTS) :][: len(TEXTS)]
        found = [result.logits for result in own if isinstance(result, Classification)]
        np.testing.assert_allclose(found, expected, atol=2e-4, err_msg=task.id)


def test_a_text_of_any_length_has_no_neighbours_beside_it(served: Served) -> None:
    """One token, and as many as there are positions, alone and beside others."""
    _, engine, tasks = served
    rng = np.random.default_rng(1)
    queries = [Query(tasks[0].id, input_ids=rng.integers(5, 700, size).tolist()) for size in (1, 2, 40, 3, 17)]
    together = engine.infer(queries)
    for query, beside in zip(queries, together, strict=True):
        (alone,) = engine.infer([query])
        assert isinstance(alone, Classification) and isinstance(beside, Classification)
        np.testing.assert_allclose(alone.logits, beside.logits, atol=1e-5)


def test_an_empty_text_and_an_unknown_id_are_refused(served: Served) -> None:
    _, engine, tasks = served
    results = engine.infer([Query(tasks[0].id, " "), Query(tasks[0].id, input_ids=[10**6]), Query(tasks[0].id, "some")])
    assert [result.error.code if result.error else None for result in results] == [
        "invalid_input",
        "invalid_input",
        None,
    ]


def test_the_plain_backbone_embeds_by_the_root(served: Served) -> None:
    """As a task without deltas does that learnt in no domain, and otherwise than one of a domain."""
    _, engine, tasks = served
    found = {}
    for domain in (None, "games"):
        rule = next(each.preprocessing for each in tasks if (each.preprocessing.domain or "").startswith(domain or ""))
        rule = dataclasses.replace(rule if domain else tasks[0].preprocessing, domain=rule.domain if domain else None)
        head = Head("embedding", pooling="mean", normalize=True)
        task = Task(f"bare-{domain}", tasks[0].backbone, (), head, preprocessing=rule)
        engine.add_task(task)
        (answer,) = engine.infer([Query(task.id, "some text of the library")])
        assert isinstance(answer, Embedding)
        found[domain] = answer.embedding
    (plain,) = engine.infer([Query(None, "some text of the library")])
    assert isinstance(plain, Embedding)
    np.testing.assert_allclose(plain.embedding, found[None], atol=1e-5)
    assert np.abs(plain.embedding - found["games"]).max() > 1e-3


def test_a_task_of_a_domain_that_is_not_there_is_refused(served: Served) -> None:
    _, engine, tasks = served
    assert engine.backbone.tables is not None
    full_name = engine.backbone.tables.full_name("games")
    refused = {
        "cooking": "there is no domain",
        "games@000000000000": "train the task again",
        "games": f"such as '{full_name}'",
        "games@": "train the task again",
        full_name[:-1]: "train the task again",
    }
    for domain, said in refused.items():
        rule = dataclasses.replace(tasks[0].preprocessing, domain=domain)
        with pytest.raises(InvalidTask, match=said):
            engine.add_task(dataclasses.replace(tasks[0], id="other", preprocessing=rule))


@pytest.mark.parametrize("devices", [slice(1, 2), slice(0, 2)], ids=["another", "two"])
def test_no_device_has_a_copy_of_the_tables(served: Served, devices: slice) -> None:
    """They are far larger than any memory."""
    _, engine, _ = served
    network, own = engine.replica.family.network, engine.backbone
    assert own.tables is not None
    if engine.workload.row_cache is not None:
        assert engine.replica.params["table"].shape == network.config.table_shape
        assert network.config.table_rows < own.config.table_rows
        return
    replica = Replica(Family(network, "float32", ()), own.params, MeshSlice(jax.devices()[devices], 4))
    shards = replica.params["table"].addressable_shards
    places = {shard.data.unsafe_buffer_pointer() for shard in shards}
    assert places == {engine.replica.params["table"].unsafe_buffer_pointer()}
    assert len(shards) == len(jax.devices()[devices])


def test_what_others_trained_is_not_for_a_backbone_with_tables(served: Served) -> None:
    """An adapter for a backbone of as many layers would fit, and mean nothing."""
    _, engine, _ = served
    assert isinstance(engine.backbone, Backbone)
    with pytest.raises(InvalidTask, match="found one of another library"):
        read_adapter(FIXTURES / "peft-lora" / "r8-query-value", engine.backbone, Wishes())
    with pytest.raises(InvalidTask, match="found one of another library"):
        read_model(FIXTURES / "tiny-bert", engine.backbone, Wishes())


def test_a_task_of_a_domain_needs_a_backbone_with_tables(tmp_path: pathlib.Path) -> None:
    head = make_head(np.random.default_rng(3), 64, 3)
    task = make_task(shallow(), "own", [], head, preprocessing=Preprocessing(domain="games"))
    with pytest.raises(InvalidTask, match="this backbone has no tables"):
        Engine(shallow(), [task], ENGINE_SETTINGS, cache_dir=tmp_path).start()
