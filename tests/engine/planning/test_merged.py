"""Merged copies of hot tasks: the same answers, within a budget, gone when they must be."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from no_memory import no_memory_beyond
from support import (
    ENGINE_BUCKETS,
    ENGINE_SETTINGS,
    logits_of,
    make_head,
    make_task,
    method_tasks,
    random_delta,
    shallow,
    wait_until,
)

from jpets.config import EngineSettings
from jpets.deltas import class_method
from jpets.engine.batch.bucket import FULL, make_variant
from jpets.engine.costs.figures import ClassFigures, Figures
from jpets.engine.device.memory import tree_bytes
from jpets.engine.engine import Engine
from jpets.engine.planning.merged import MergedCopies
from jpets.engine.programs.program import ProgramKey, compile_program
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.scheduling.costs.measured_profile import Grid
from jpets.types import Query, Task

TEXT = "a library of functions for sparse matrices"
HEAVY = ("mask", "diff", "onebit", "several", "masked-lora")
DEAR, CHEAP = 10.0, 0.0


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Programs are compiled once."""
    return tmp_path_factory.mktemp("merged")


def figures_of(engine: Engine, seconds: float) -> Figures:
    """Heavy rows take this many seconds, whatever their number."""
    axis = np.array([1, 1000])
    grid = Grid(axis, axis, np.full((2, 2), seconds))
    heavy = [str(key) for key, _ in engine.family.slots if class_method(key.method).kind == "heavy"]
    return Figures(classes=dict.fromkeys(heavy, ClassFigures(grid)))


def few_tasks() -> list[Task]:
    return [task for task in method_tasks(shallow()) if task.id in ("mask", "diff", "bitfit")]


@contextlib.contextmanager
def serving(
    folder: pathlib.Path, tasks: list[Task], copies: float, seconds: float = DEAR, **more: Any
) -> Iterator[Engine]:
    """An engine with these costs and room for this many copies."""
    settings: EngineSettings = dataclasses.replace(ENGINE_SETTINGS, **more)
    shape = Engine(shallow(), tasks, settings, cache_dir=folder, buckets=ENGINE_BUCKETS[1:])
    shape.profile.add(figures_of(shape, seconds))
    one = tree_bytes(shape.replica.params["layers"])
    settings = dataclasses.replace(settings, merged_memory_gb=copies * one / 1e9)
    with Engine(shallow(), tasks, settings, cache_dir=folder, buckets=ENGINE_BUCKETS[1:]) as own:
        yield own.start()


def copies_of(engine: Engine) -> MergedCopies:
    return engine.merged


def merged_names(engine: Engine) -> set[str]:
    return {resident.task.id for resident in copies_of(engine).copies}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_stay_when_tasks_are_merged(cache: pathlib.Path, dtype: str) -> None:
    tasks = [task for task in method_tasks(shallow()) if task.id in HEAVY] if dtype == "float32" else few_tasks()
    heavy = {task.id for task in tasks}.intersection(HEAVY)
    queries = [Query(task.id, TEXT) for task in tasks] * 2 + [Query(None, TEXT)]
    with serving(cache, tasks, 20.5, dtype=dtype) as engine:
        before = engine.infer(queries)
        batches = engine.stats.batches
        wait_until(lambda: merged_names(engine) == heavy)
        after = engine.infer(queries)
        assert engine.stats.batches - batches > len(heavy)
    scale = 1e-4 if dtype == "float32" else 0.1
    for old, new in zip(before, after, strict=True):
        assert old.error is None and new.error is None
        if old.task is not None:
            np.testing.assert_allclose(logits_of(new), logits_of(old), atol=scale)


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_a_hot_low_rank_task_runs_on_its_copy(cache: pathlib.Path, dtype: str, atol: float) -> None:
    tasks = [task for task in method_tasks(shallow()) if task.id in ("lora", "bitfit")]
    query = Query("lora", TEXT)
    with serving(cache, tasks, 20.5, CHEAP, dtype=dtype) as engine:
        for program in engine.replica.programs:
            program.seconds = DEAR
        heads = {key: FULL for key, _ in engine.family.slots if class_method(key.method).kind == "head"}
        program = compile_program(engine.family, ProgramKey(ENGINE_BUCKETS[1], make_variant(heads)))
        program.seconds = 0.1
        (before,) = engine.infer([query])
        engine._programs.add(program)
        wait_until(lambda: bool(engine.infer([query])) and merged_names(engine) == {"lora"})
        (after,) = engine.infer([query])
    assert after.timing is not None and after.timing.program == program.label
    np.testing.assert_allclose(logits_of(after), logits_of(before), atol=atol)


def test_what_is_no_faster_is_not_merged(cache: pathlib.Path) -> None:
    with serving(cache, few_tasks(), 20.5, CHEAP) as engine:
        for _ in range(3):
            engine.infer([Query(name, TEXT) for name in ("mask", "diff", "bitfit")] + [Query(None, TEXT)] * 8)
        assert not copies_of(engine)._saved and not merged_names(engine)


def test_without_a_budget_nothing_is_merged(engine: Engine) -> None:
    engine.infer([Query("mask", TEXT)] * 3)
    assert not copies_of(engine).enabled and not copies_of(engine).copies


def test_the_budget_holds_and_the_hotter_task_gets_the_place(cache: pathlib.Path) -> None:
    with serving(cache, few_tasks(), 1.5) as engine:
        engine.infer([Query("mask", TEXT)])
        wait_until(lambda: merged_names(engine) == {"mask"})
        use = engine.memory.use(engine.replica.programs)
        assert use.merged == tree_bytes(engine.replica.params["layers"])
        for _ in range(8):
            engine.infer([Query("diff", TEXT)])
        wait_until(lambda: merged_names(engine) == {"diff"})


def test_two_versions_of_a_task_may_be_compared() -> None:
    first, second = few_tasks(), few_tasks()
    for one, other in zip(first, second, strict=True):
        assert one != other and one.head != other.head and one.deltas != other.deltas
    assert len({*first, *second}) == 2 * len(first)


def test_a_copy_goes_with_its_task(cache: pathlib.Path) -> None:
    with serving(cache, few_tasks(), 20.5) as engine:
        engine.infer([Query("mask", TEXT)])
        wait_until(lambda: merged_names(engine) == {"mask"})
        rng = np.random.default_rng(1)
        other = make_task(shallow(), "mask", [random_delta("mask", shallow().config, 99)], make_head(rng, 64, 5))
        engine.add_task(other)
        (fresh,) = engine.infer([Query("mask", TEXT)])
        assert len(logits_of(fresh)) == 5
        wait_until(lambda: [r.task for r in copies_of(engine).copies] == [other])
        (merged,) = engine.infer([Query("mask", TEXT)])
        np.testing.assert_allclose(logits_of(merged), logits_of(fresh), atol=1e-4)
        engine.remove_task("mask")
        engine.infer([Query("diff", TEXT)])
        wait_until(lambda: merged_names(engine) == {"diff"})


def test_copies_leave_when_the_device_has_no_memory(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(cache, few_tasks(), 20.5) as engine:
        engine.infer([Query("mask", TEXT)])
        wait_until(lambda: merged_names(engine) == {"mask"})
        replica = engine.replica
        with monkeypatch.context() as broken:
            broken.setattr(replica, "dispatch", no_memory_beyond(3, late=False)(replica.dispatch))
            results = engine.infer([Query("bitfit", TEXT)] * 8)
        assert all(result.error is None for result in results)
        assert not copies_of(engine).copies and engine.memory.merged == 0


def test_merged_layers_share_what_no_delta_changes() -> None:
    (task,) = [task for task in method_tasks(shallow()) if task.id == "mask"]
    params = jax.tree.map(np.asarray, dict(shallow().params))
    layers = EncoderNetwork(shallow().config).merged(task, params, "float32")["layers"]
    for at, own in layers.items():
        zeros = sum(int((np.asarray(own[site]) == 0).sum()) for site in ("qkv", "attn_out", "ffn_in", "ffn_out"))
        assert zeros > 0
        np.testing.assert_array_equal(own["attn_norm"], params["layers"][at]["attn_norm"])
