"""Several devices compute each batch together, and give the answers of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from benches.engine.collectives import collectives
from jax.sharding import NamedSharding, PartitionSpec
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, embedding_of, logits_of, method_tasks, shallow

from jpets.engine.engine import Engine
from jpets.engine.group.group import EngineGroup
from jpets.engine.programs.mesh import MeshSlice, first_device
from jpets.engine.workloads.encoder_network import SPLIT_AXES
from jpets.errors import InvalidInput
from jpets.types import Embedding, Query, Result, Task

TEXT = "a library of functions for sparse matrices"
BUCKETS = ENGINE_BUCKETS[1:]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mesh")


@pytest.fixture(scope="module")
def pair(cache: Path) -> Iterator[Engine]:
    """One engine on two devices."""
    tasks = method_tasks(shallow())
    devices = jax.local_devices()[:2]
    with Engine(shallow(), tasks, ENGINE_SETTINGS, cache_dir=cache, buckets=BUCKETS, devices=devices) as own:
        yield own.start()


def numbers(result: Result) -> np.ndarray:
    assert result.error is None, result.error
    return embedding_of(result) if isinstance(result, Embedding) else logits_of(result)


def test_answers_are_those_of_one_device(pair: Engine, engine: Engine) -> None:
    tasks: list[str | None] = [None, *(task.id for task in method_tasks(shallow()))]
    queries = [Query(task, f"{TEXT} {number}" * (1 + number % 3)) for task in tasks for number in range(3)]
    for ours, theirs in zip(pair.infer(queries), engine.infer(queries), strict=True):
        np.testing.assert_allclose(numbers(ours), numbers(theirs), atol=1e-4)


def test_two_sums_a_layer_and_nothing_else(pair: Engine) -> None:
    assert len(pair.replica.programs) > 1
    for program in pair.replica.programs:
        found = collectives(program.compiled.as_text() or "")
        assert found == {"all-reduce": 2 * pair.replica.family.config.layers}, program.label


def test_heads_and_columns_are_split(pair: Engine) -> None:
    layer = pair.replica.params["layers"][0]
    expected = {
        "qkv": PartitionSpec(None, "model"),
        "attn_out": PartitionSpec("model", None),
        "ffn_in": PartitionSpec(None, "model"),
        "ffn_out": PartitionSpec("model", None),
        "attn_norm": PartitionSpec(),
    }
    for name, spec in expected.items():
        sharding = layer[name].sharding
        assert isinstance(sharding, NamedSharding) and sharding.spec == spec, name
        assert sharding.device_set == set(jax.local_devices()[:2])
    half = layer["ffn_in"].addressable_shards[0].data
    assert half.shape == (layer["ffn_in"].shape[0], layer["ffn_in"].shape[1] // 2)


def test_banks_are_split_and_can_be_written_while_it_serves(pair: Engine, engine: Engine) -> None:
    split = [
        array
        for bank in pair.replica.banks.values()
        for array in bank.arrays.values()
        if array.addressable_shards[0].data.size < array.size
    ]
    assert split
    mine, whole = pair.memory.use(pair.replica.programs), engine.memory.use(engine.replica.programs)
    assert mine.backbone < whole.backbone and mine.banks < whole.banks, "bytes of each device"
    mask = next(task for task in method_tasks(shallow()) if task.id == "mask")
    again = dataclasses.replace(mask, id="again")
    pair.add_task(again)
    first, second = pair.infer([Query("mask", TEXT), Query("again", TEXT)])
    np.testing.assert_allclose(numbers(first), numbers(second), atol=1e-5)
    assert pair.export("again") is not None


def test_a_second_start_compiles_nothing(pair: Engine, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("jpets.engine.compilation.readiness.compile_program", compiles)
    (expected,) = pair.infer([Query("lora", TEXT)])
    devices = jax.local_devices()[:2]
    tasks: list[Task] = method_tasks(shallow())
    with Engine(shallow(), tasks, ENGINE_SETTINGS, cache_dir=cache, buckets=BUCKETS, devices=devices) as own:
        (found,) = own.start().infer([Query("lora", TEXT)])
    assert numbers(found).tobytes() == numbers(expected).tobytes()


def test_a_group_of_pairs(pair: Engine, cache: Path) -> None:
    tasks = [task for task in method_tasks(shallow()) if task.id in ("bitfit", "lora")]
    one, two, three, four = jax.local_devices()[:4]
    pairs = [(one, two), (three, four)]
    with EngineGroup(shallow(), pairs, ENGINE_SETTINGS, reserve=tasks, cache_dir=cache, buckets=BUCKETS) as group:
        group.start()
        for task in tasks:
            group.add_task(task)
        assert len(group.report().devices) == 2 and all(group.homes.counts())
        queries = [Query(task.id, TEXT) for task in tasks]
        for ours, theirs in zip(group.infer(queries), pair.infer(queries), strict=True):
            np.testing.assert_allclose(numbers(ours), numbers(theirs), atol=1e-5)


def test_what_cannot_be_split_is_on_every_device() -> None:
    pair, three = MeshSlice(jax.local_devices()[:2], 12), MeshSlice(jax.local_devices()[:3], 12)
    large = (6, 384, 1536)
    assert not pair.bank(large).is_fully_replicated and not three.bank(large).is_fully_replicated
    for odd in ((6, 4, 5000), (), (7,)):
        assert three.bank(odd).is_fully_replicated
    shapes = {
        "layers": {
            "qkv": jax.ShapeDtypeStruct((64, 64 * 3), np.float32),
            "ffn_norm": jax.ShapeDtypeStruct((64,), np.float32),
        }
    }
    assert not pair.params(shapes, SPLIT_AXES)["layers"]["qkv"].is_fully_replicated
    assert pair.params(shapes, SPLIT_AXES)["layers"]["ffn_norm"].is_fully_replicated
    with pytest.raises(InvalidInput, match="12 attention heads"):
        MeshSlice(jax.local_devices()[:4] + jax.local_devices()[:1], 12)
    assert first_device().devices == (jax.local_devices()[0],)
