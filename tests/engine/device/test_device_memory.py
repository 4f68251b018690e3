"""Device memory: exact accounting, a limit that holds, and batches without room on the device."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from no_memory import no_memory_beyond
from support import ENGINE_BUCKETS, ENGINE_SETTINGS, logits_of, method_tasks, shallow

from jpets.config import NAMED_BACKBONES
from jpets.deltas import METHODS
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket
from jpets.engine.device.classes import class_slots
from jpets.engine.device.memory import GIGABYTE, banks_bytes, fit_slots, param_bytes, slot_bytes, tree_bytes
from jpets.engine.engine import Engine
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.errors import OutOfSpace, Saturated
from jpets.types import Query
from jpets.xla_flags import set_xla_flags

TEXT = "a library of functions for sparse matrices"
BERT = NAMED_BACKBONES["bert-base"]
MOST_MB: dict[str, tuple[dict[str, Any], float]] = {
    "adapter": ({"bottleneck": 64}, 4.8),
    "mask": ({}, 10.8),
    "diff": ({"density": 0.005}, 2.7),
    "bitfit": ({}, 0.3),
    "lora": ({"rank": 8, "sites": ["query", "value"]}, 0.7),
}


@pytest.mark.parametrize("method", MOST_MB)
def test_bytes_of_a_bert_base_task(method: str) -> None:
    settings, most = MOST_MB[method]
    parts = METHODS[method].lower(METHODS[method].init(np.random.default_rng(0), settings, BERT, 0.02), BERT)
    sizes = {part.key.method: slot_bytes(part.key, BERT, "bfloat16") for part in parts}
    assert sizes.pop(method) <= most * 1e6
    assert sum(sizes.values()) <= MOST_MB["bitfit"][1] * 1e6  # a difference that changes biases has whole biases too


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accounting_equals_the_live_arrays(tmp_path: pathlib.Path, dtype: Any) -> None:
    there = jax.live_arrays()  # held, so that new arrays cannot get their ids
    settings = dataclasses.replace(ENGINE_SETTINGS, dtype=dtype)
    own = Engine(shallow(), method_tasks(shallow()), settings, cache_dir=tmp_path, buckets=ENGINE_BUCKETS)
    replica = own.replica
    known = {id(array) for array in there}
    live = sum(array.nbytes for array in jax.live_arrays() if id(array) not in known)
    use = own.memory.use([])
    assert use.backbone + use.banks == live
    assert (
        use.backbone
        == param_bytes(EncoderNetwork(shallow().config), shallow().params, dtype)
        == tree_bytes(replica.params)
    )
    assert use.banks == banks_bytes(dict(own.family.slots), own.family.config, dtype)
    assert use.working == 0


def test_what_programs_take_is_counted_once_they_are_there(engine: Engine) -> None:
    (largest,) = sorted(p.memory.temp_size_in_bytes for p in engine.replica.programs)[-1:]
    use = engine.memory.use(engine.replica.programs)
    assert use.working >= largest > 0
    assert use.total == use.backbone + use.banks + use.working


def test_a_limit_takes_free_slots_first() -> None:
    keys = [
        key
        for key, _ in class_slots(
            method_tasks(shallow()), [], {}, EncoderNetwork(shallow().config), dict(shallow().params), ENGINE_SETTINGS
        )
    ]
    one = {key: slot_bytes(key, shallow().config, "float32") for key in keys}
    least, wanted, parts = dict.fromkeys(keys, 3), dict.fromkeys(keys, 32), dict.fromkeys(keys, 1)
    for slots in (32, 16, 8, 4, 3):
        limit = (sum(one.values()) * slots + 1000) * 16 / 15 + 1
        assert fit_slots(least, wanted, parts, shallow().config, "float32", 1000, limit) == dict.fromkeys(keys, slots)
    with pytest.raises(OutOfSpace, match="raise the limit"):
        fit_slots(least, wanted, parts, shallow().config, "float32", 1000, sum(one.values()) * 3)
    assert fit_slots(least, wanted, parts, shallow().config, "float32", 1000, math.inf) == wanted


def test_under_a_limit_shared_classes_keep_their_parts() -> None:
    delta, head = ClassKey("lora", (("query", 8),), (0,)), ClassKey("head", (("outputs", 4),), (0,))
    sizes = {key: slot_bytes(key, shallow().config, "float32") for key in (delta, head)}
    limit = (sizes[delta] * 8 + sizes[head] * 24) * 16 / 15 + 1
    least, wanted, parts = {delta: 2, head: 2}, {delta: 32, head: 70}, {delta: 1, head: 3}
    assert fit_slots(least, wanted, parts, shallow().config, "float32", 0, limit) == {delta: 8, head: 24}


def test_the_limit_holds_or_the_engine_does_not_start(tmp_path: pathlib.Path) -> None:
    tasks = method_tasks(shallow())
    free = Engine(shallow(), tasks, ENGINE_SETTINGS, cache_dir=tmp_path, buckets=ENGINE_BUCKETS)
    arrays = free.memory.use([]).total
    tight = dataclasses.replace(ENGINE_SETTINGS, device_memory_gb=arrays / GIGABYTE)
    own = Engine(shallow(), tasks, tight, cache_dir=tmp_path, buckets=ENGINE_BUCKETS)
    assert own.memory.use([]).total <= arrays * 15 / 16
    with pytest.raises(OutOfSpace, match="known at start"):
        low = dataclasses.replace(ENGINE_SETTINGS, device_memory_gb=arrays / GIGABYTE / 8)
        Engine(shallow(), tasks, low, cache_dir=tmp_path, buckets=ENGINE_BUCKETS)
    none = dataclasses.replace(ENGINE_SETTINGS, slots=1, device_memory_gb=arrays / GIGABYTE)
    wide = Engine(shallow(), [], none, cache_dir=tmp_path, buckets=[Bucket(8192, ((64, 128),))])
    with pytest.raises(OutOfSpace, match="fewer tokens in a batch"):
        wide.start()


def test_a_task_without_a_slot_hears_its_own_number(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log has those of all others, which may be another tenant's."""
    tasks = {task.id: task for task in method_tasks(shallow())}
    settings = dataclasses.replace(ENGINE_SETTINGS, slots=1)
    own = Engine(shallow(), [], settings, reserve=[tasks["ia3"]], cache_dir=tmp_path, buckets=ENGINE_BUCKETS[:1])
    with own.start():
        own.add_task(tasks["ia3"])
        with pytest.raises(OutOfSpace, match=r"no free slot .* takes 0\.0 MB$"):
            own.add_task(dataclasses.replace(tasks["ia3"], id="another"))
    assert "GB (backbone 0.00, banks" in caplog.text


def test_under_a_limit_no_gpu_memory_is_taken_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    set_xla_flags()
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ
    set_xla_flags(preallocate=False)
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_a_batch_too_large_for_the_device_is_split(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, all_at_once: None, *, late: bool
) -> None:
    replica, before = engine.replica, engine.stats.out_of_memory
    expected = engine.infer([Query("mask", TEXT), Query("lora", TEXT)])
    monkeypatch.setattr(replica, "dispatch", no_memory_beyond(3, late)(replica.dispatch))
    results = engine.infer([Query(name, TEXT) for name in ("mask", "lora") * 5])
    for result, wanted in zip(results, expected * 5, strict=True):
        np.testing.assert_allclose(logits_of(result), logits_of(wanted), atol=1e-4)
    assert engine.stats.out_of_memory - before == 3  # ten rows, and twice five
    assert engine.live


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_a_split_batch_needs_no_second_place_in_flight(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    settings = dataclasses.replace(ENGINE_SETTINGS, in_flight=1)
    with Engine(shallow(), [], settings, cache_dir=tmp_path, buckets=ENGINE_BUCKETS[1:]) as own:
        replica = own.start().replica
        monkeypatch.setattr(replica, "dispatch", no_memory_beyond(3, late)(replica.dispatch))
        futures = [own.submit([Query(None, TEXT)] * 8) for _ in range(3)]
        assert all(future.result(60).error is None for some in futures for future in some)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_a_query_that_has_no_room_alone_is_turned_away_and_the_next_is_served(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    replica = engine.replica
    with monkeypatch.context() as broken:
        broken.setattr(replica, "dispatch", no_memory_beyond(0, late)(replica.dispatch))
        results = engine.infer([Query("mask", TEXT)] * 3)
    assert all(isinstance(result.error, Saturated) for result in results)
    (after,) = engine.infer([Query("mask", TEXT)])
    assert after.error is None
