"""One text and many tasks: layers in which the tasks do not differ are computed once."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from unittest import mock

import numpy as np
import pytest
from support import ENGINE_SETTINGS, embedding_of, logits_of, make_head, make_task, random_delta, shallow, wait_until

from jpets.deltas import METHODS, first_layer
from jpets.engine.batch.bucket import Variant
from jpets.engine.engine import Engine
from jpets.engine.planning.placing import Placer
from jpets.engine.programs.program import Program, ProgramKey, key_from_json, key_to_json
from jpets.engine.queue.pending import Pending
from jpets.types import Delta, Embedding, Query, Result, Task

BACKBONE = shallow(layers=3)
CONFIG = BACKBONE.config
UPPER = {"layers": [1, 2]}
INSIDE = ["query", "value", "attn_out", "ffn_in", "ffn_norm"]
TEXT = "the library of functions"
IDS = [2, 9, 17, 30, 3]


def task(name: str, *deltas: Delta, seed: int = 0) -> Task:
    return make_task(BACKBONE, name, deltas, make_head(np.random.default_rng(seed), CONFIG.hidden_size, 3))


def upper(method: str, seed: int = 0) -> Delta:
    more = {"sites": INSIDE} if method == "bitfit" else {}
    return random_delta(method, CONFIG, seed, **UPPER, **more)


METHODS_HERE = ("lora", "adapter", "mask", "diff", "ia3", "bitfit", "onebit")
TASKS = [task(method, upper(method, 7), seed=at) for at, method in enumerate(METHODS_HERE)]
OTHERS = [task("frozen", seed=20), task("whole", random_delta("lora", CONFIG, 3), seed=21)]
NAMES = [*METHODS_HERE, "frozen"]


@pytest.mark.parametrize(
    ("deltas", "first"),
    [
        ([], 3),
        ([upper("lora")], 1),
        ([random_delta("lora", CONFIG, layers=[2])], 2),
        ([upper("adapter"), random_delta("lora", CONFIG, layers=[2])], 1),
        ([upper("bitfit")], 1),
        ([random_delta("bitfit", CONFIG, layers=[2])], 0),
        ([random_delta("bitfit", CONFIG, sites=["pooler"])], 3),
        ([random_delta("prompt", CONFIG)], 0),
        ([random_delta("prefix", CONFIG)], 0),
        ([random_delta("mask", CONFIG)], 0),
    ],
)
def test_the_first_layer_of_a_task(deltas: Sequence[Delta], first: int) -> None:
    assert first_layer(task("some", *deltas), CONFIG) == first


def test_every_method_says_where_it_begins() -> None:
    """A method that acts in the first layer must never be said to act above it."""
    for name in METHODS:
        assert first_layer(task("some", random_delta(name, CONFIG)), CONFIG) == 0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(
        BACKBONE, [*TASKS, *OTHERS], ENGINE_SETTINGS, cache_dir=tmp_path_factory.mktemp("cache")
    ).start() as own:
        yield own


def asked(names: Sequence[str | None], **text: object) -> list[Query]:
    return [Query(name, **(text or {"text": TEXT})) for name in names]  # type: ignore[arg-type]


def ready(engine: Engine, names: Sequence[str | None]) -> Program:
    """The program for one text and these tasks, which is taken to need no time, unlike others of its kind."""
    key = engine.specialise(asked(names))
    assert key is not None and key.trunk is not None
    for other in engine.replica.programs:
        other.seconds = 10.0 if other.key.trunk is not None else other.seconds
    program = next(program for program in engine.replica.programs if program.key == key)
    program.seconds = 1e-9
    return program


def same(found: Sequence[Result], expected: Sequence[Result]) -> None:
    for own, other in zip(found, expected, strict=True):
        assert own.error is None and own.task == other.task and own.tokens == other.tokens
        if isinstance(own, Embedding):
            np.testing.assert_allclose(embedding_of(own), embedding_of(other), atol=2e-5)
        else:
            np.testing.assert_allclose(logits_of(own), logits_of(other), atol=2e-4)


def shared(results: Sequence[Result]) -> list[int]:
    return [result.timing.shared_layers for result in results if result.timing is not None]


@pytest.mark.parametrize("text", [{"text": TEXT}, {"input_ids": IDS}, {"text": "who?", "text_pair": TEXT}])
def test_answers_are_those_of_each_task_alone(engine: Engine, text: dict[str, object]) -> None:
    program = ready(engine, NAMES)
    assert program.key.trunk is not None and program.key.trunk.layers == 1
    alone = [engine.infer([query])[0] for query in asked(NAMES, **text)]
    together = engine.infer(asked(NAMES, **text))
    same(together, alone)
    assert shared(together) == [1] * len(NAMES) and shared(alone) == [0] * len(NAMES)


def test_heads_alone_share_all_layers(engine: Engine) -> None:
    program = ready(engine, ["frozen", None])
    assert program.key.trunk is not None and program.key.trunk.layers == CONFIG.layers
    alone = [engine.infer([query])[0] for query in asked(["frozen", None])]
    together = engine.infer(asked(["frozen", None]))
    same(together, alone)
    assert shared(together) == [CONFIG.layers] * 2


def test_a_task_from_the_first_layer_on_runs_apart(engine: Engine) -> None:
    ready(engine, NAMES)
    names = ["whole", *NAMES, "no-such"]
    results = engine.infer(asked(names))
    assert results[-1].error is not None
    assert [r.timing.shared_layers if r.timing else 0 for r in results] == [0, *[1] * len(NAMES), 0]


def test_queries_of_other_texts_and_of_one_task_share_nothing(engine: Engine) -> None:
    ready(engine, NAMES)
    assert shared(engine.infer([Query("lora", TEXT), Query("mask", "another text")])) == [0, 0]
    assert shared(engine.infer([Query("lora", TEXT), Query("lora", TEXT)])) == [0, 0]
    both = engine.infer([*asked(NAMES), *asked(NAMES, text="another text")])
    assert shared(both) == [1] * 2 * len(NAMES)
    same(both[len(NAMES) :], [engine.infer([query])[0] for query in asked(NAMES, text="another text")])


def test_it_is_left_where_it_would_take_longer(engine: Engine) -> None:
    program = ready(engine, NAMES)
    program.seconds = 10.0
    assert shared(engine.infer(asked(NAMES))) == [0] * len(NAMES)


def test_clients_that_leave_narrow_the_plan(engine: Engine) -> None:
    """No program for mixtures need take so many rows of one text."""
    program = ready(engine, NAMES)
    waiting = [engine.intake.prepare(query, None, 0, "default") for query in asked(NAMES)]
    pendings = [item for item in waiting if isinstance(item, Pending)]
    engine._submissions.share(pendings)
    plan = engine._planner.next_batch(pendings)
    assert plan.program is program and plan.shared_layers == 1 and len(plan.pendings) == len(NAMES)
    fewer = engine._planner.narrowed(plan, pendings[2:5])
    assert fewer.program is program and fewer.below is plan.below
    assert [row is own.row for row, own in zip(fewer.rows, pendings[2:5], strict=True)] == [True] * 3
    engine.intake.give_back(waiting)


def test_mixtures_ask_for_no_program_of_one_text(engine: Engine) -> None:
    """However much texts with several tasks miss it: rows of different texts cannot run in it."""
    key = ready(engine, NAMES).key

    assert key.trunk is not None
    missed = dataclasses.replace(key, trunk=dataclasses.replace(key.trunk, layers=2))  # not there
    compiling = mock.Mock(missed=lambda: [missed], barred=lambda key: False)
    placer = Placer(engine.replica, engine._planner._placer._predictions, engine.menu, compiling)
    texts = ("a", "of", "the", "is", "in", "some", "text")
    pendings = [
        engine.intake.prepare(Query(name, text), None, 0, "default") for name, text in zip(NAMES, texts, strict=False)
    ]
    plan = placer.place([item for item in pendings if isinstance(item, Pending)])
    assert plan.wanted is not None and plan.wanted.trunk is None
    engine.intake.give_back(pendings)


def test_it_is_estimated_by_its_layers(engine: Engine) -> None:
    key = ready(engine, NAMES).key
    assert key.trunk is not None
    whole, lone = (
        engine.costs.of_arithmetic(engine.costs._arithmetic(own))
        for own in (ProgramKey(key.bucket, key.variant), ProgramKey(key.trunk.bucket, Variant()))
    )
    found = engine.costs.of_arithmetic(engine.costs._arithmetic(key))
    assert found == pytest.approx(whole * 2 / 3 + lone / 3)


def test_long_texts_take_several_batches(engine: Engine) -> None:
    long = " ".join(["library"] * 40)
    names = NAMES[:4]
    results = engine.infer(asked(names, text=long))
    same(results, [engine.infer([query])[0] for query in asked(names, text=long)])


@pytest.mark.usefixtures("learning_costs")
def test_programs_come_with_the_traffic_and_with_the_next_start(tmp_path: pathlib.Path) -> None:
    settings = dataclasses.replace(ENGINE_SETTINGS, background_compile=True, max_length=32, max_batch_tokens=64)
    names = [own.id for own in TASKS[:2]]
    with Engine(BACKBONE, TASKS[:2], settings, cache_dir=tmp_path).start() as engine:
        wait_until(lambda: not engine.compiler.waiting)
        for program in engine.replica.programs:
            program.seconds = program.best = 1.0  # as on a machine where it pays
        engine.compiler.compile_seconds = 1e-3

        def has_come() -> bool:
            engine.infer(asked(names))
            return any(program.key.trunk is not None for program in engine.replica.programs)

        wait_until(has_come)
        program = next(program for program in engine.replica.programs if program.key.trunk is not None)
        program.seconds = 1e-9
        assert shared(engine.infer(asked(names))) == [1, 1]
        assert key_from_json(key_to_json(program.key)) == program.key
    with Engine(BACKBONE, TASKS[:2], settings, cache_dir=tmp_path).start() as again:
        wait_until(lambda: any(own.key == program.key for own in again.replica.programs))


def test_the_papers_policies_share_nothing(tmp_path: pathlib.Path) -> None:
    settings = dataclasses.replace(ENGINE_SETTINGS, policy="coordinated")
    with Engine(BACKBONE, TASKS[:2], settings, cache_dir=tmp_path).start() as engine:
        key = engine.specialise(asked([own.id for own in TASKS[:2]]))
        assert key is not None and key.trunk is None
