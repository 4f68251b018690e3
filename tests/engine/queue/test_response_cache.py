"""The response cache: the same answers without a batch, and never another query's or an old one."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ENGINE_SETTINGS, logits_of, make_head, make_task, method_tasks, random_delta, shallow

from jpets.engine.batch.rows import Row
from jpets.engine.engine import Engine
from jpets.engine.queue.response_cache import ENTRY_BYTES, ResponseCache, ResponseKey, entry_bytes, response_key
from jpets.errors import InvalidInput, NotFinite, NotFound
from jpets.spelling import Spelling
from jpets.types import Embedding, Query, Result, Task, Tokens

TEXT = "a library of functions for sparse matrices"
NUMBERS = ("logits", "probs", "embedding")


@pytest.fixture
def fresh(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The shared engine with an empty cache."""
    monkeypatch.setattr(engine, "responses", ResponseCache(1 << 20))
    return engine


def ask(engine: Engine, query: Query, tenant: str = "default") -> tuple[Result, bool]:
    """The answer, and whether a batch was needed for it."""
    before = engine.responses.hits, engine.responses.misses
    (result,) = engine.infer([query], tenant=tenant)
    hits, misses = engine.responses.hits - before[0], engine.responses.misses - before[1]
    cached = result.timing is not None and result.timing.program == "cache"
    assert (hits, misses) in ([(1, 0)] if cached else [(0, 1), (0, 0)])  # a refused query is neither
    return result, not cached


def assert_equal(a: Result, b: Result) -> None:
    """Bit for bit, in everything except the timing."""
    assert type(a) is type(b)
    for name in vars(a).keys() - {"timing"}:
        left, right = getattr(a, name), getattr(b, name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype
            assert left.tobytes() == right.tobytes(), name
        elif isinstance(left, Spelling):
            np.testing.assert_array_equal(left.of_text, right.of_text)
        else:
            assert left == right, name


def small_task(name: str, seed: int = 0) -> Task:
    config = shallow().config
    head = make_head(np.random.default_rng(seed), config.hidden_size, 3)
    return make_task(shallow(), name, [random_delta("bitfit", config, seed)], head)


def test_a_hit_equals_the_miss_for_every_head(fresh: Engine) -> None:
    queries = [*(Query(task.id, TEXT) for task in method_tasks(shallow())), Query(None, TEXT)]
    first = fresh.infer(queries)
    used, batches, answered = fresh.tasks.occupancy(), fresh.stats.batches, fresh.stats.answers["ok"]
    again = fresh.infer(queries)
    assert fresh.stats.batches == batches
    assert fresh.stats.answers["ok"] == answered + len(queries)
    assert (fresh.responses.hits, fresh.responses.misses) == (len(queries), len(queries))
    for miss, hit in zip(first, again, strict=True):
        assert_equal(miss, hit)
        assert miss.timing is not None and miss.timing.program != "cache"
        assert hit.timing is not None
        assert (hit.timing.program, hit.timing.queued, hit.timing.computed) == ("cache", 0, 0)
    assert any(isinstance(hit, Tokens) and hit.entities for hit in again)
    assert fresh.tasks.occupancy() == used
    assert all(resident.queries == 0 for resident in fresh.tasks.all())


def test_hits_and_misses_mix_in_one_submission(fresh: Engine) -> None:
    ask(fresh, Query("mask", TEXT))
    results = fresh.infer([Query("diff", TEXT), Query("mask", TEXT), Query("nobody", TEXT), Query(None, TEXT)])
    assert [result.task for result in results] == ["diff", "mask", "nobody", None]
    cached = [result.timing is not None and result.timing.program == "cache" for result in results]
    assert cached == [False, True, False, False]


def test_what_tokenises_alike_is_alike(fresh: Engine) -> None:
    first, _ = ask(fresh, Query("mask", TEXT))
    spaced, computed = ask(fresh, Query("mask", f"  {TEXT.upper()}\n"))
    assert not computed
    ids = fresh.text.encode(Query("mask", TEXT), small_task("any").preprocessing).ids.tolist()
    numbers, computed = ask(fresh, Query("mask", input_ids=ids))
    assert not computed
    for other in (spaced, numbers):
        assert_equal(first, other)
    assert ask(fresh, Query("mask", input_ids=ids, token_type_ids=[1] * len(ids)))[1]
    assert ask(fresh, Query("mask", TEXT, "and a pair"))[1]
    assert ask(fresh, Query("diff", TEXT))[1]
    assert ask(fresh, Query(None, TEXT))[1]


def test_a_replaced_task_answers_anew(fresh: Engine) -> None:
    fresh.add_task(small_task("changing", 1), version=1)
    old, _ = ask(fresh, Query("changing", TEXT))
    assert not ask(fresh, Query("changing", TEXT))[1]
    fresh.add_task(small_task("changing", 2), version=1)  # the same id and version, other numbers
    new, computed = ask(fresh, Query("changing", TEXT))
    assert computed
    assert not np.allclose(logits_of(old), logits_of(new))
    fresh.remove_task("changing")
    assert isinstance(ask(fresh, Query("changing", TEXT))[0].error, NotFound)
    fresh.add_task(small_task("changing", 3), version=1)
    third, computed = ask(fresh, Query("changing", TEXT))
    assert computed
    assert not np.allclose(logits_of(new), logits_of(third))
    fresh.remove_task("changing")


def test_an_answer_of_a_task_replaced_meanwhile_is_not_the_new_one_s(fresh: Engine) -> None:
    fresh.add_task(small_task("racing", 1))

    def replace(pendings: object) -> None:
        """Between the query's submission and its batch; on the owner thread, which must not wait for itself."""
        fresh.hooks.clear()
        thread.start()

    thread = threading.Thread(target=lambda: fresh.add_task(small_task("racing", 2)))
    fresh.hooks.append(replace)
    old, _ = ask(fresh, Query("racing", TEXT))
    thread.join(30)
    new, computed = ask(fresh, Query("racing", TEXT))
    assert computed
    assert not np.allclose(logits_of(old), logits_of(new))
    fresh.remove_task("racing")


def test_tenants_share_nothing(fresh: Engine) -> None:
    fresh.add_task(small_task("own", 1), tenant="a")
    fresh.add_task(small_task("own", 1), tenant="b")
    for query in (Query("own", TEXT), Query(None, TEXT)):
        for tenant in ("a", "b"):
            assert ask(fresh, query, tenant)[1]
            assert not ask(fresh, query, tenant)[1]
    for tenant in ("a", "b"):
        fresh.remove_task("own", tenant=tenant)


def test_nobody_writes_into_the_cache(fresh: Engine) -> None:
    first, _ = ask(fresh, Query("mask", TEXT))
    expected = logits_of(first).copy()
    for _ in range(2):
        for name in NUMBERS:
            if hasattr(first, name):
                getattr(first, name)[:] = -1.0
        first, computed = ask(fresh, Query("mask", TEXT))
        assert not computed
        np.testing.assert_array_equal(logits_of(first), expected)


def test_errors_are_not_kept(fresh: Engine) -> None:
    healthy = small_task("healthy")
    (delta,) = healthy.deltas
    nan = {name: np.full_like(array, np.nan) for name, array in delta.tensors.items()}
    fresh.add_task(dataclasses.replace(healthy, id="broken", deltas=(dataclasses.replace(delta, tensors=nan),)))
    for query, kind in ((Query("broken", TEXT), NotFinite), (Query("mask", " "), InvalidInput)):
        for _ in range(2):
            result, computed = ask(fresh, query)
            assert isinstance(result.error, kind)
            assert computed
    assert fresh.responses.bytes == 0
    fresh.remove_task("broken")


def test_specialising_needs_the_queries_themselves(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(fresh, Query(None, TEXT))
    seen: list[Row] = []
    monkeypatch.setattr(fresh._planner, "ideal", seen.extend)
    fresh.specialise([Query(None, TEXT)])
    assert len(seen) == 1


def test_the_setting_is_in_mib(tmp_path: Path) -> None:
    settings = dataclasses.replace(ENGINE_SETTINGS, response_cache_mb=3)
    assert Engine(shallow(), [], settings, cache_dir=tmp_path).responses.budget == 3 << 20


def test_off_by_default(engine: Engine) -> None:
    first, second = (engine.infer([Query("mask", TEXT)])[0] for _ in range(2))
    assert second.timing is not None and second.timing.program != "cache"
    assert_equal(first, second)
    assert (engine.responses.hits, engine.responses.misses, engine.responses.bytes) == (0, 0, 0)


def embedding(size: int) -> Embedding:
    return Embedding(task=None, tokens=3, embedding=np.arange(size, dtype=np.float32))


def key(number: int, tenant: str = "a") -> ResponseKey:
    return response_key(tenant, None, Row.of_tokens(np.array([number], np.int32), np.zeros(1, np.int32), {}, 0))


def test_an_answer_larger_than_the_budget_is_not_kept() -> None:
    cache = ResponseCache(ENTRY_BYTES + 400)
    cache.keep(key(1), embedding(100))
    cache.keep(key(2), embedding(101))
    assert cache.get(key(1)) is not None
    assert cache.get(key(2)) is None
    assert cache.bytes == ENTRY_BYTES + 400


OPERATIONS = st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 400)), max_size=60)


@given(OPERATIONS, st.integers(0, 4 * ENTRY_BYTES))
def test_bytes_are_bounded_and_the_least_recently_used_leaves(
    operations: list[tuple[bool, int, int]], budget: int
) -> None:
    cache, model = ResponseCache(budget), OrderedDict[int, int]()
    for write, number, size in operations:
        if write:
            cache.keep(key(number), embedding(size))
            cost = entry_bytes(embedding(size))
            if cost <= budget:
                model.pop(number, None)
                while sum(map(entry_bytes, map(embedding, model.values()))) + cost > budget:
                    model.popitem(last=False)
                model[number] = size
        else:
            found = cache.get(key(number))
            assert (found is not None) == (number in model)
            if isinstance(found, Embedding):
                assert len(found.embedding) == model[number]
                model.move_to_end(number)
        assert cache.bytes == sum(map(entry_bytes, map(embedding, model.values()))) <= budget


def test_many_threads() -> None:
    cache = ResponseCache(8 * ENTRY_BYTES)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for number in map(int, rng.integers(0, 20, 500)):
            found = cache.get(key(number))
            if isinstance(found, Embedding) and len(found.embedding) != number:
                wrong.append(number)
            cache.keep(key(number), embedding(number))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.hits + cache.misses == 2000
    assert 0 < cache.bytes <= 8 * ENTRY_BYTES
