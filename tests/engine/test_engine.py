"""The engine as its callers see it: answers, errors, deadlines, cancellation, tasks that come and go."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait

import numpy as np
import pytest
from support import (
    ENGINE_BUCKETS,
    ENGINE_SETTINGS,
    dense_answer,
    make_head,
    make_task,
    method_tasks,
    random_delta,
    shallow,
    tiny,
    wait_until,
)

from jpets.engine import planner
from jpets.engine.assembly import Row
from jpets.engine.engine import Engine
from jpets.engine.host_loop import WINDOW
from jpets.engine.pending import Pending
from jpets.engine.planner import Plan, Planner
from jpets.errors import (
    DeadlineExceeded,
    EngineFailure,
    InputTooLong,
    InvalidInput,
    InvalidTask,
    NotFinite,
    NotFound,
    OutOfSpace,
    Saturated,
    UnknownClass,
)
from jpets.scheduling import ready
from jpets.types import Classification, Embedding, Head, Query, Task, Tokens

TEXT = "a library of functions for sparse matrices"
LABELLED = ["adapter", "bitfit", "mask", "diff", "several", "masked-lora"]


def tasks_by_name() -> dict[str, Task]:
    return {task.id: task for task in method_tasks(shallow())}


def like(name: str, task: Task) -> Task:
    return dataclasses.replace(task, id=name)


def test_one_call_mixes_every_task_and_the_bare_backbone(engine: Engine) -> None:
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
    assert {result.timing.executable for result in results if result.timing} == {results[0].timing.executable}


def test_single_and_mixed_answers_agree(engine: Engine) -> None:
    queries = [Query(name, f"{TEXT} {i}") for i, name in enumerate(LABELLED * 2)]
    together = engine.infer(queries)
    for query, result in zip(queries, together, strict=True):
        (alone,) = engine.infer([query])
        np.testing.assert_allclose(alone.logits, result.logits, atol=1e-4)


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


def test_a_past_deadline_is_never_computed(engine: Engine) -> None:
    before = engine.stats.real_tokens
    (result,) = engine.infer([Query("mask", TEXT)], deadline=-1.0)
    assert isinstance(result.error, DeadlineExceeded)
    assert engine.stats.real_tokens == before


def test_a_cancelled_query_is_dropped(engine: Engine) -> None:
    with paused(engine):
        first, second = engine.submit([Query("mask", TEXT), Query("mask", TEXT)])
        assert first.cancel()
    assert second.result(30).error is None
    with pytest.raises(CancelledError):
        first.result()


def test_what_was_cancelled_is_never_computed(engine: Engine) -> None:
    """90 of 100 leave while a batch runs: their places are free at once, and only the other ten are computed."""
    computed: list[object] = []
    cancelled = engine.stats.answers["cancelled"]
    with paused(engine):
        futures = engine.submit([Query(name, TEXT) for name in LABELLED[:5]] * 20, deadline=60.0)
        gone = [future for i, future in enumerate(futures) if i % 10]
        assert all(future.cancel() for future in gone)
        assert len(engine.pending) == 10
        assert engine.stats.answers["cancelled"] == cancelled + 90
        assert wait(gone, timeout=30).done == set(gone)
        engine.hooks.append(computed.extend)
    assert all(future.result(30).error is None for future in futures[::10])
    engine.hooks.remove(computed.extend)
    assert len(computed) == 10


def test_deadlines_pass_behind_the_window_too(engine: Engine) -> None:
    answered: list[bool] = []
    with paused(engine):
        others = engine.submit([Query(None, TEXT)] * (WINDOW + 50), priority=1)
        late = engine.submit([Query(None, TEXT)] * 20, deadline=-1.0)

        def look(pendings: Sequence[Pending]) -> None:
            answered.append(all(future.done() for future in late) and all(p.priority for p in pendings))

        engine.hooks.append(look)
    assert all(future.result(30).error is None for future in others)
    engine.hooks.remove(look)
    assert all(answered)
    assert all(isinstance(future.result(30).error, DeadlineExceeded) for future in late)


def test_a_client_that_leaves_while_its_batch_is_planned(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Planner.next_batch
    with paused(engine):
        futures = engine.submit([Query("mask", TEXT)] * 4)

        def leave(planner: Planner, waiting: Sequence[Pending], *, busy: bool = False) -> Plan:
            planned = plan(planner, waiting, busy=busy)
            futures[1].cancel()
            return planned

        monkeypatch.setattr(Planner, "next_batch", leave)
    assert [futures[i].result(30).error for i in (0, 2, 3)] == [None] * 3
    assert futures[1].cancelled()


def test_a_full_queue_refuses_whole_submissions(engine: Engine) -> None:
    many = [Query("mask", TEXT)] * 3000
    with paused(engine):
        accepted = engine.submit(many)
        with pytest.raises(Saturated, match="try again"):
            engine.submit(many)
        for future in accepted[1:]:
            future.cancel()
        assert len(engine.pending) == 1
    assert accepted[0].result(30).error is None


def test_tasks_come_change_and_go(engine: Engine) -> None:
    tasks = tasks_by_name()
    with pytest.raises(NotFound):
        engine.remove_task("newcomer")
    engine.add_task(like("newcomer", tasks["adapter"]))
    (first,) = engine.infer([Query("newcomer", TEXT)])
    (original,) = engine.infer([Query("adapter", TEXT)])
    np.testing.assert_allclose(first.logits, original.logits, atol=1e-6)
    head = make_head(np.random.default_rng(99), 64, 3, two_layers=True)
    engine.add_task(dataclasses.replace(like("newcomer", tasks["adapter"]), head=head))
    (second,) = engine.infer([Query("newcomer", TEXT)])
    assert not np.allclose(first.logits, second.logits)
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
        wait_until(lambda: engine.replica.has_staged)
    added.result(30)
    engine.remove_task("other")
    results = [future.result(30) for future in futures]
    assert all(result.error is None for result in results)
    (reference,) = engine.infer([Query("diff", TEXT)])
    for result in results[::2]:
        np.testing.assert_allclose(result.logits, reference.logits, atol=1e-4)
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
    expected = {name: engine.infer([Query(name, TEXT)])[0].logits for name in LABELLED}
    wrong: list[str] = []

    def ask(name: str) -> None:
        for _ in range(10):
            (result,) = engine.infer([Query(name, TEXT)])
            if result.error or not np.allclose(result.logits, expected[name], atol=1e-4):
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


def test_the_policys_batch_makes_room_for_another_tenant(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def pending(tenant: str, length: int) -> Pending:
        ids = np.full(length, 7, np.int32)
        return Pending(None, None, Row(ids, np.zeros_like(ids), {}, 0), None, 0, tenant)

    waiting = [pending("heavy", 12), pending("light", 5), *(pending("heavy", 12) for _ in range(20))]
    monkeypatch.setattr(
        ready, "cheapest_split", lambda lengths, shapes, most: [[0, *range(2, 15)], [1, *range(15, 22)]]
    )
    assert {p.number for p in engine._planner.next_batch(waiting).pendings} == {p.number for p in waiting[:14]}


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
        return known.compiled(*arguments)

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
    """Writing a slot donates its bank's arrays, which a program in its first run may have been handed."""
    widest = max(engine.replica.programs, key=lambda program: len(program.key.variant.classes()))
    newcomer = like("newcomer", tasks_by_name()["several"])
    (expected,) = engine.infer([Query("several", TEXT)])
    with ThreadPoolExecutor() as pool:
        added = [pool.submit(engine._programs.add, dataclasses.replace(widest)) for _ in range(100)]
        while not all(future.done() for future in added):
            engine.add_task(newcomer)
            (result,) = engine.infer([Query("newcomer", TEXT)])
            np.testing.assert_allclose(result.logits, expected.logits, atol=1e-4)
            engine.remove_task("newcomer")
        for future in added:
            future.result()
    engine.replica.add_program(widest)


def test_beside_a_flood_plans_are_made_ahead_and_never_old(engine: Engine) -> None:
    """Who comes while a batch runs is in the next plan, and everybody gets an answer of their own."""
    texts = [f"{TEXT} {number}" for number in range(5)]
    expected = [engine.infer([Query(None, text)])[0].embedding for text in texts]
    flood = engine.submit([Query(None, texts[i % 5]) for i in range(600)], tenant="flood")
    for number in range(40):
        (result,) = engine.infer([Query(None, texts[number % 5])], tenant="light")
        np.testing.assert_allclose(result.embedding, expected[number % 5], atol=1e-4)
        if number == 3:
            assert engine._loop._planner.contended()
            assert not all(future.done() for future in flood), "served out of turn"
            flood[-1].cancel()
    for number, future in enumerate(flood[:-1]):
        np.testing.assert_allclose(future.result(60).embedding, expected[number % 5], atol=1e-4)


def test_a_plan_that_cannot_be_made_costs_its_queries_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> list[int]:
        raise RuntimeError("no plan")

    with monkeypatch.context() as patched:
        patched.setattr(planner, "own_batch", broken)
        patched.setattr(planner, "short_batch", broken)
        flood = engine.submit([Query(None, TEXT)] * 600, tenant="flood")
        light = engine.infer([Query(None, TEXT)], tenant="light")
        wait(flood, 60)
    assert isinstance(light[0].error, EngineFailure)
    assert engine.live
    (result,) = engine.infer([Query(None, TEXT)])
    assert result.error is None


def test_fixed_batches_and_the_lazy_trigger(tmp_path: object) -> None:
    settings = dataclasses.replace(
        ENGINE_SETTINGS, policy="fixed", fixed_batch=3, trigger="lazy", lazy_wait=0.2, lazy_size=6, latency_target=100.0
    )
    with Engine(shallow(), [], settings, cache_dir=tmp_path, buckets=ENGINE_BUCKETS) as own:  # type: ignore[arg-type]
        own.start()
        results = own.infer([Query(None, TEXT)] * 6)
        assert all(result.error is None for result in results)
        assert own.stats.batches == 2
        (alone,) = own.infer([Query(None, TEXT)])  # fewer than lazy_size: starts when lazy_wait is over
        assert alone.error is None
        assert own.stats.batches == 3


def test_a_lazy_server_does_not_wait_past_a_deadline(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = dataclasses.replace(
        ENGINE_SETTINGS, trigger="lazy", lazy_wait=300.0, lazy_size=1000, latency_target=1000.0
    )
    monkeypatch.setattr(Planner, "predicted", lambda planner, waiting: 29.5)
    with Engine(shallow(), [], settings, cache_dir=tmp_path, buckets=ENGINE_BUCKETS) as own:  # type: ignore[arg-type]
        own.start()
        own.submit([Query(None, TEXT)])
        (hasty,) = own.submit([Query(None, TEXT)], deadline=30.0)
        assert hasty.result(60).error is None


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


class paused:
    """Holds the owner thread between two batches, so that what is submitted meanwhile waits."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._resume = threading.Event()
        self._held = threading.Event()

    def __enter__(self) -> None:
        def hold(pendings: object) -> None:
            self._held.set()
            self._resume.wait(30)

        self._hook = hold
        self._engine.hooks.append(hold)
        self._future = self._engine.submit([Query(None, TEXT)])[0]
        assert self._held.wait(30)

    def __exit__(self, *exception: object) -> None:
        self._engine.hooks.remove(self._hook)
        self._resume.set()
        self._future.result(30)
