"""``bench.py scaling``: the same batch with few and with many tasks loaded, and with one and with many tasks in it."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

from benches.shared import (
    RandomBackbone,
    answers,
    console,
    engine_cache,
    interleave,
    paired_ratio,
    random_backbone,
    random_tasks,
    report,
)
from jpets.config import EngineSettings
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.types import Query, Task
from jpets.xla_flags import set_xla_flags


@contextlib.contextmanager
def loaded_engine(backbone: RandomBackbone, tasks: Sequence[Task], bucket: Bucket) -> Iterator[Engine]:
    """An engine with all of these tasks on its device."""
    settings = EngineSettings(
        background_compile=False, max_batch_tokens=bucket.tokens, max_batch_rows=bucket.rows, slots=1
    )
    with engine_cache() as cache:
        engine = Engine(backbone, tasks, settings, cache_dir=cache, buckets=[bucket])
        with engine.start(lambda what, done, total: None):
            console.log(f"{len(tasks)} tasks: {engine.report().devices[0].memory}")
            yield engine


def scaling(
    backbone: str = "bert-base",
    few: int = 32,
    many: int = 1024,
    length: int = 32,
    methods: str = "adapter,lora,bitfit",
    rounds: int = 15,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Queries a second of one batch: of ``few`` tasks, with ``many`` loaded, and of one task a method."""
    set_xla_flags()
    model, names = random_backbone(backbone), methods.split(",")
    made = random_tasks(model, names, many)
    bucket, ids = Bucket(few * length, ((few, length),)), list(range(1000, 1000 + length))
    spread = [made[(at * (many // few) // len(names)) * len(names) + at % len(names)] for at in range(few)]
    rest = [task for task in made if task not in spread]
    with contextlib.ExitStack() as engines:
        small = engines.enter_context(loaded_engine(model, spread, bucket))
        large = engines.enter_context(loaded_engine(model, [*spread, *rest], bucket))
        mixed = [Query(task.id, input_ids=ids) for task in spread]
        alike = [Query(spread[at % len(names)].id, input_ids=ids) for at in range(few)]
        runs: dict[str, Callable[[], object]] = {}
        for name, engine, queries in (("few", small, mixed), ("many", large, mixed), ("one-each", small, alike)):
            engine.specialise(queries)
            runs[name] = functools.partial(answers, engine, queries)
        seconds = interleave(runs, rounds)
    figures: dict[str, Any] = {}
    for name, times in seconds.items():
        figures[name] = {"qps": few / statistics.median(times), "seconds": statistics.median(times)}
    figures["many"]["over_few"] = paired_ratio(seconds["many"], seconds["few"])
    figures["few"]["over_one_each"] = paired_ratio(seconds["few"], seconds["one-each"])
    settings = {"backbone": backbone, "few": few, "many": many, "length": length, "methods": methods, "rounds": rounds}
    report("scaling", settings, figures, json_out)
