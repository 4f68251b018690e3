"""The engine's interface: answers, errors, tasks and programs that come and go."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
from support import (
    ENGINE_BUCKETS,
    ENGINE_SETTINGS,
    dense_answer,
    logits_of,
    make_head,
    make_task,
    method_tasks,
    paused,
    random_delta,
    shallow,
    tiny,
    wait_until,
)

from jpets.engine.engine import Engine
from jpets.errors import (
    InputTooLong,
    InvalidInput,
    InvalidTask,
    NotFinite,
    NotFound,
    OutOfSpace,
    Saturated,
    UnknownClass,
)
from jpets.types import Classification, Embedding, Head, Query, Task, Tokens

TEXT = "a library of functions for sparse matrices"
LABELLED = ["adapter", "bitfit", "mask", "diff", "several", "masked-lora"]


def tasks_by_name() -> dict[str, Task]:
    return {task.id: task for task in method_tasks(shallow())}


def like(name: str, task: Task) -> Task:
    return dataclasses.replace(task, id=name)


def test_one_call_mixes_every_task_and_the_bare_backbone(engine: Engine, all_at_once: None) -> None:
    tasks = tasks_by_name()
    results = engine.infer([*(Query(name, TEXT) for name in tasks), Query(None, TEXT)])
    for name, result in zip(tasks, results, strict=False):
        assert result.task == name
        assert result.error is None
        ids = engine.text.encode(Query(name, TEXT), tasks[name].preprocessing).ids
        assert result.tokens == len(ids)
        expected = dense_answer(shallow(), tasks[name], ids)["logits"]
        if tasks[name].head.type == "token-classification":
            assert isinstance(result, Tokens)
            np.testing.assert_allclose(result.logits, expected, atol=1e-4)
        else:
            assert isinstance(result, Classification)
            np.testing.assert_allclose(result.logits, expected[0], atol=1e-4)
            assert result.label == tasks[name].labels[int(expected[0].argmax())]
            assert result.probs.sum() == pytest.approx(1, abs=1e-5)
    bare = results[-1]
    assert isinstance(bare, Embedding)
    assert np.linalg.norm(bare.embedding) == pytest.approx(1, abs=1e-5)
    assert results[0].timing is not None
    assert {result.timing.program for result in results if result.timing} == {results[0].timing.program}


def test_single_and_mixed_answers_agree(engine: Engine) -> None:
    queries = [Query(name, f"{TEXT} {i}") for i, name in enumerate(LABELLED * 2)]
    together = engine.infer(queries)
    for query, result in zip(queries, together, strict=True):
        (alone,) = engine.infer([query])
        np.testing.assert_allclose(logits_of(alone), logits_of(result), atol=1e-4)


def test_what_is_wrong_with_one_query_is_in_its_own_result(engine: Engine) -> None:
    long = " ".join(["word"] * 200)
    results = engine.infer(
        [
            Query("nobody", TEXT),
            Query("mask", " \n"),
            Query("mask", long),
            Query("mask", long, truncate=True),
            Query("mask", input_ids=[1, 10**6]),
            Query("mask", input_ids=list(range(5, 80))),
            Query("mask"),
            Query("mask", "half a pair \ud800"),
            Query("mask", input_ids=[[1, 2], [3]]),  # type: ignore[list-item]
            Query("mask", TEXT),
        ]
    )
    kinds = [type(result.error) for result in results]
    expected = [NotFound, InvalidInput, InputTooLong, type(None), InvalidInput, InputTooLong]
    expected += [InvalidInput, InvalidInput, InvalidInput, type(None)]
    assert kinds == expected
    assert "402" in str(results[2].error)
    assert "64" in str(results[2].error)
    assert results[3].tokens == 64


def test_tasks_come_change_and_go(engine: Engine) -> None:
    tasks = tasks_by_name()
    with pytest.raises(NotFound):
        engine.remove_task("newcomer")
    engine.add_task(like("newcomer", tasks["adapter"]))
    (first,) = engine.infer([Query("newcomer", TEXT)])
    (original,) = engine.infer([Query("adapter", TEXT)])
    np.testing.assert_allclose(logits_of(first), logits_of(original), atol=1e-6)
    head = make_head(np.random.default_rng(99), 64, 3, two_layers=True)
    engine.add_task(dataclasses.replace(like("newcomer", tasks["adapter"]), head=head))
    (second,) = engine.infer([Query("newcomer", TEXT)])
    assert not np.allclose(logits_of(first), logits_of(second))
    engine.remove_task("newcomer")
    (gone,) = engine.infer([Query("newcomer", TEXT)])
    assert isinstance(gone.error, NotFound)


def test_removing_a_task_with_queries_in_flight(engine: Engine) -> None:
    used = engine.tasks.occupancy()
    engine.add_task(like("leaving", tasks_by_name()["diff"]))
    other = like("other", tasks_by_name()["diff"])
    with ThreadPoolExecutor() as pool, paused(engine):
        futures = engine.submit([Query("leaving", TEXT), Query("mask", TEXT)] * 5)
        engine.remove_task("leaving")
        added = pool.submit(engine.add_task, other)  # must not take over the leaving task's slots
        wait_until(lambda: engine.replica.staging.waiting)
    added.result(30)
    engine.remove_task("other")
    results = [future.result(30) for future in futures]
    assert all(result.error is None for result in results)
    (reference,) = engine.infer([Query("diff", TEXT)])
    for result in results[::2]:
        np.testing.assert_allclose(logits_of(result), logits_of(reference), atol=1e-4)
    assert engine.tasks.occupancy() == used


def test_tasks_that_do_not_fit_are_refused_and_change_nothing(engine: Engine) -> None:
    backbone, used = shallow(), engine.tasks.occupancy()
    head = make_head(np.random.default_rng(0), 64, 3)
    wide = make_task(backbone, "wide", [random_delta("lora", backbone.config, rank=40)], head)
    with pytest.raises(UnknownClass, match="lora/query:48"):
        engine.add_task(wide)
    foreign = dataclasses.replace(tasks_by_name()["mask"], backbone=tiny("tiny-distilbert").ref())
    with pytest.raises(InvalidTask, match="was made for backbone"):
        engine.add_task(foreign)
    unnamed = dataclasses.replace(tasks_by_name()["mask"], labels=())
    with pytest.raises(InvalidTask, match="0 labels for 6 outputs"):
        engine.add_task(unnamed)
    masks = dataclasses.replace(tasks_by_name()["mask"], deltas=tasks_by_name()["mask"].deltas * 2)
    with pytest.raises(InvalidTask, match="two mask deltas"):
        engine.add_task(masks)
    added = []
    with pytest.raises(OutOfSpace, match="no free slot"):
        for number in range(100):
            engine.add_task(like(f"extra-{number}", tasks_by_name()["bitfit"]))
            added.append(f"extra-{number}")
    assert added
    for name in added:
        engine.remove_task(name)
    assert engine.tasks.occupancy() == used


def test_a_task_of_nan_answers_with_an_error(engine: Engine) -> None:
    healthy = tasks_by_name()["adapter"]
    (delta,) = healthy.deltas
    broken = dataclasses.replace(delta, tensors={n: np.full_like(a, np.nan) for n, a in delta.tensors.items()})
    engine.add_task(dataclasses.replace(healthy, id="broken", deltas=(broken,)))
    sick, *others = engine.infer([Query("broken", TEXT), *(Query(name, TEXT) for name in LABELLED)])
    assert isinstance(sick.error, NotFinite)
    assert all(other.error is None for other in others)
    engine.remove_task("broken")


def test_many_threads_get_their_own_answers(engine: Engine) -> None:
    expected = {name: logits_of(engine.infer([Query(name, TEXT)])[0]) for name in LABELLED}
    wrong: list[str] = []

    def ask(name: str) -> None:
        for _ in range(10):
            (result,) = engine.infer([Query(name, TEXT)])
            if result.error or not np.allclose(logits_of(result), expected[name], atol=1e-4):
                wrong.append(name)

    threads = [threading.Thread(target=ask, args=(name,)) for name in LABELLED * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_prefetch_hooks_see_queries_before_they_run(engine: Engine) -> None:
    seen: list[str | None] = []
    hook = lambda pendings: seen.extend(pending.task for pending in pendings)  # noqa: E731
    engine.hooks.append(hook)
    engine.infer([Query("mask", TEXT), Query(None, TEXT)])
    engine.hooks.remove(hook)
    assert sorted(seen, key=str) == [None, "mask"]


def test_nothing_compiles_on_the_request_path(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    names = [*tasks_by_name(), None]
    for _ in range(40):
        size = int(rng.integers(1, 20))
        queries = [
            Query(
                names[int(rng.integers(len(names)))], input_ids=rng.integers(5, 800, int(rng.integers(1, 60))).tolist()
            )
            for _ in range(size)
        ]
        assert all(result.error is None for result in engine.infer(queries))
    assert engine.stats.request_path_compiles == 0


def test_batches_go_on_beside_an_arrived_programs_first_run(engine: Engine) -> None:
    known = engine.replica.programs[0]
    began, go_on = threading.Event(), threading.Event()

    def held(*arguments: object) -> object:
        began.set()
        assert go_on.wait(30)
        return known.compiled(*arguments)  # type: ignore[arg-type]

    arrived = dataclasses.replace(known, compiled=held)  # type: ignore[arg-type]
    with ThreadPoolExecutor() as pool:
        added = pool.submit(engine._programs.add, arrived)
        assert began.wait(30)
        try:
            assert all(result.error is None for result in engine.infer([Query(None, TEXT), Query("mask", TEXT)]))
            assert arrived not in engine.replica.programs
        finally:
            go_on.set()
        added.result(30)
    assert arrived in engine.replica.programs
    engine.replica.add_program(known)


def test_tasks_come_and_go_beside_first_runs(engine: Engine) -> None:
    """Writing a slot donates its bank's arrays, which a program in its first run may still use."""
    widest = max(engine.replica.programs, key=lambda program: len(program.key.variant.classes()))
    newcomer = like("newcomer", tasks_by_name()["several"])
    (expected,) = engine.infer([Query("several", TEXT)])
    with ThreadPoolExecutor() as pool:
        added = [pool.submit(engine._programs.add, dataclasses.replace(widest)) for _ in range(100)]
        while not all(future.done() for future in added):
            engine.add_task(newcomer)
            (result,) = engine.infer([Query("newcomer", TEXT)])
            np.testing.assert_allclose(logits_of(result), logits_of(expected), atol=1e-4)
            engine.remove_task("newcomer")
        for future in added:
            future.result()
    engine.replica.add_program(widest)


def test_closing_answers_everything(tmp_path: object) -> None:
    own = Engine(shallow(), [], ENGINE_SETTINGS, cache_dir=tmp_path, buckets=ENGINE_BUCKETS).start()  # type: ignore[arg-type]
    assert own.ready
    futures = own.submit([Query(None, TEXT)] * 200)
    own.close()
    done, pending = wait(futures, timeout=30)
    assert not pending
    kinds = {type(future.result().error) for future in done}
    assert kinds <= {type(None), Saturated}
    assert not own.ready
    with pytest.raises(Saturated):
        own.submit([Query(None, TEXT)])
    with pytest.raises(Saturated):
        own.add_task(make_task(shallow(), "late", [], Head("embedding")))
