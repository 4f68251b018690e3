"""``bench.py lookup`` and ``bench.py hierarchical``: tables of n-gram vectors, and backbones that use them (HMI)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benches.engine.throughput import fitting_bucket
from benches.shared import (
    RandomBackbone,
    answers,
    console,
    draw_lengths,
    engine_cache,
    interleave,
    named_backbone,
    paired_ratio,
    random_backbone,
    random_tasks,
    report,
)
from jpets.config import EngineSettings, TableFormat
from jpets.engine.engine import Engine
from jpets.model.encoder import random_params
from jpets.model.merging import merged
from jpets.plot.domains import DomainTables
from jpets.plot.ngrams import MOST_IDS, Window, alone, keys_of, ngrams
from jpets.plot.table import TableInfo, TableWriter
from jpets.plot.tree import LAYERS, TABLES, Branch, Tree
from jpets.types import Query
from jpets.xla_flags import set_xla_flags

CHUNK = 1 << 14
"""Entries that are written at a time."""
DOMAIN = "domain"
ASKED = 0.25
"""Part of a table's entries that ``lookup`` asks for: with few, their vectors would stay in the caches."""


def write_random_tables(
    folder: pathlib.Path,
    grams: np.ndarray,
    words: int,
    width: int,
    window: Window,
    entries: int,
    kept_as: TableFormat = "bfloat16",
) -> DomainTables:
    """A root of all tokens alone, and a domain with ``grams`` and as many others as make ``entries``; the vectors are
    random."""
    for part in (TABLES, LAYERS):
        (folder / part).mkdir()
    rng = np.random.default_rng(0)
    others = rng.integers(1, min(words, MOST_IDS), (entries, window.size))
    keys = np.unique(keys_of(grams))
    more = np.setdiff1d(keys_of(others), keys)
    chosen = rng.permutation(len(more))[: max(0, entries - len(keys))]
    branches = {}
    for name, own in (
        ("", np.unique(keys_of(alone(words, window)))),
        (DOMAIN, np.sort(np.concatenate([keys, more[chosen]]))),
    ):
        info = TableInfo(f"{name:0<64}", window, width, kept_as)
        writer = TableWriter(folder / TABLES, info, own)
        values = rng.standard_normal((CHUNK, info.vectors, width), np.float32)
        for start in range(0, len(own), CHUNK):
            writer.append(values[: min(CHUNK, len(own) - start)])
        branches[name] = Branch(writer.finish().stem, info.layers)
    Tree(window, width, 1, branches[""], {DOMAIN: branches[DOMAIN]}, kept_as).write(folder)
    return DomainTables(folder, words)


def lookup(
    entries: int = 2_000_000,
    width: int = 384,
    ngram: int = 3,
    words: int = 30522,
    text: Annotated[int, typer.Option(help="tokens of a text")] = 64,
    texts: Annotated[int, typer.Option(help="texts of a batch")] = 64,
    values: Annotated[str, typer.Option(help="bfloat16 or float8")] = "bfloat16",
    one_core: Annotated[bool, typer.Option("--one-core/--all-cores")] = True,
    rounds: int = 15,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Tokens a second that are looked up, and that are gathered and merged, of texts whose n-grams a table has; and the
    seconds that opening it takes."""
    if one_core and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rng, window = np.random.default_rng(1), Window.of(ngram)
    kept_as: TableFormat = "float8" if values == "float8" else "bfloat16"
    count = max(8, round(ASKED * entries / (texts * text)))
    drawn = [rng.integers(0, words, (texts, text)).astype(np.int32) for _ in range(count)]
    grams = [ngrams(ids, None, window) for batch in drawn for ids in batch]
    with tempfile.TemporaryDirectory(prefix="jpets-tables-") as folder:
        path = pathlib.Path(folder)
        console.log(f"writing {entries:,} entries")
        tables = write_random_tables(path, np.concatenate(grams), words, width, window, entries, kept_as)
        for batch in drawn:  # vectors are compared with their digests when they are first looked up
            for ids in batch:
                tables.opened(DOMAIN).rows(ids)
        opening = []
        for _ in range(5):
            start = time.perf_counter()
            DomainTables(path, words)
            opening.append(time.perf_counter() - start)
        device = jax.local_devices(backend="cpu")[0]
        table = jax.device_put(tables.values, device, may_alias=True)
        text_of = jnp.repeat(jnp.arange(texts), text)
        merge = jax.jit(lambda table, rows: merged(table, rows, text_of, window.places, window.before, kept_as))
        number = iter(range(1 << 30))

        def of_each() -> np.ndarray:
            batch = drawn[next(number) % len(drawn)]
            return np.concatenate([tables.opened(DOMAIN).rows(ids) for ids in batch])

        def rows_of() -> np.ndarray:
            return tables.opened(DOMAIN).rows(drawn[next(number) % len(drawn)].reshape(-1), texts_of)

        texts_of = np.asarray(text_of)
        known = [rows_of() for _ in drawn]
        systems: dict[str, Callable[[], object]] = {
            "look-up, text by text": of_each,
            "look-up": rows_of,
            "gather and merge": lambda: merge(table, known[next(number) % len(known)]).block_until_ready(),
            "both": lambda: merge(table, rows_of()).block_until_ready(),
        }
        seconds = interleave(systems, rounds)
        size = sum(each.stat().st_size for each in (path / TABLES).iterdir())
    figures: dict[str, Any] = {
        name: {"tokens_per_second": texts * text / statistics.median(times)} for name, times in seconds.items()
    }
    figures["opening"] = {"seconds": statistics.median(opening), "bytes": size}
    settings = {
        "entries": entries,
        "width": width,
        "ngram": ngram,
        "text": text,
        "texts": texts,
        "values": kept_as,
        "one_core": one_core,
    }
    settings |= {"words": words, "asked": count * texts * text, "rounds": rounds}
    report("lookup", settings, figures, json_out)


def hierarchical(
    backbone: str = "bert-base",
    layers: Annotated[int | None, typer.Option(help="lower layers that tables stand for; by default half")] = None,
    ngram: int = 3,
    tasks: int = 32,
    per_task_batch: int = 1,
    length: int = 128,
    batches: Annotated[int, typer.Option(help="batches that wait at once: look-ups of one run beside another")] = 4,
    methods: str = "adapter,lora,bitfit,mask,diff",
    entries: int = 200_000,
    rounds: int = 9,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Queries a second of tasks with deltas in upper layers: over the whole network, over tables that programs read
    (``tables``) or of which the device keeps rows that the host sends (``staged``), and over the upper layers alone,
    without look-ups."""
    set_xla_flags()
    config, window = named_backbone(backbone), Window.of(ngram)
    count = layers or config.layers // 2
    upper = dataclasses.replace(config, layers=config.layers - count)
    lengths = draw_lengths(tasks * per_task_batch * batches, length, 0.0, config.max_positions)
    rng = np.random.default_rng(2)
    ids = [rng.integers(1000, min(config.vocab_size, 1 << 14), n).astype(np.int32) for n in lengths]
    grams = np.concatenate([ngrams(own, None, window) for own in ids])
    chosen = methods.split(",")
    whole = random_backbone(backbone)
    alone = RandomBackbone(f"{backbone}-upper", upper, jax.tree.map(np.asarray, random_params(upper)))
    with tempfile.TemporaryDirectory(prefix="jpets-tables-") as folder, contextlib.ExitStack() as caches:
        tables = write_random_tables(
            pathlib.Path(folder), grams, config.vocab_size, config.hidden_size, window, entries
        )
        table = jax.device_put(tables.values, jax.local_devices(backend="cpu")[0], may_alias=True)
        looking = dataclasses.replace(
            alone,
            name=f"{backbone}-tables",
            config=dataclasses.replace(upper, window=(window.before, window.after), table_rows=len(tables.values)),
            params={**alone.params, "table": table},
            tables=tables,
        )
        bucket = fitting_bucket(lengths[: tasks * per_task_batch])
        settings = EngineSettings(
            background_compile=False, max_batch_tokens=bucket.tokens, max_batch_rows=tasks * per_task_batch, slots=tasks
        )
        engines: dict[str, Engine] = {}
        queries: dict[str, Sequence[Query]] = {}
        known = {
            "whole": (whole, range(count, config.layers)),
            "tables": (looking, None),
            "staged": (looking, None),
            "upper": (alone, None),
        }
        try:
            for name, (own, of_layers) in known.items():
                made = random_tasks(own, chosen, tasks, of_layers)
                if own is looking:
                    assert own.tables is not None
                    full_name = own.tables.full_name(DOMAIN)
                    made = [
                        dataclasses.replace(
                            task, preprocessing=dataclasses.replace(task.preprocessing, domain=full_name)
                        )
                        for task in made
                    ]
                cache = caches.enter_context(engine_cache())
                place = dataclasses.replace(settings, tables="staged" if name == "staged" else "auto")
                engines[name] = Engine(own, made, place, cache_dir=cache, buckets=[bucket]).start()
                owners = [made[i // per_task_batch % tasks] for i in range(len(ids))]
                queries[name] = [Query(task.id, input_ids=row.tolist()) for task, row in zip(owners, ids, strict=True)]
                engines[name].specialise(queries[name][: tasks * per_task_batch])
                console.log(f"{name}: ready")
            seconds = interleave(
                {name: lambda name=name: answers(engines[name], queries[name]) for name in known},  # type: ignore[misc]
                rounds,
            )
        finally:
            for engine in engines.values():
                engine.close()
    figures: dict[str, Any] = {
        name: {"qps": len(ids) / statistics.median(times), "seconds": statistics.median(times)}
        for name, times in seconds.items()
    }
    for name in ("whole", "upper", "staged"):
        figures[name]["tables_ratio"] = paired_ratio(seconds["tables"], seconds[name])
    report(
        "hierarchical",
        {
            "backbone": backbone,
            "layers": count,
            "ngram": ngram,
            "tasks": tasks,
            "per_task_batch": per_task_batch,
            "length": length,
            "batches": batches,
            "methods": methods,
            "entries": entries,
            "rounds": rounds,
            "bucket": str(bucket),
        },
        figures,
        json_out,
    )
