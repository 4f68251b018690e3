"""``bench.py fanout``: many tasks on one text, with the layers below their deltas computed once, beside an ordinary
batch of the same queries, and beside whole models of ``transformers`` in turn."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import typer

from benches.engine.runtimes import DTYPES, bert_config, torch_device
from benches.engine.throughput import task_queries
from benches.shared import console, engine_cache, interleave, paired_ratio, random_backbone, random_tasks, report
from jpets.config import BackboneConfig, EngineSettings, Policy
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.types import Query
from jpets.xla_flags import set_xla_flags

POLICIES: dict[str, Policy] = {"fanout": "auto", "ordinary": "packed"}
"""Only ``auto`` has texts share layers; both run all queries as one batch."""


def whole_models(config: BackboneConfig, count: int, ids: Sequence[int], dtype: str) -> Callable[[], object]:
    """A run of so many fine-tuned models of this size in turn, with PyTorch, on a GPU where jpets has one."""
    if importlib.util.find_spec("torch") is None:
        raise typer.BadParameter("--systems transformers: expected PyTorch (pip install torch==2.13.0)")
    import torch
    import transformers

    shape, where = bert_config(config, num_labels=4), (torch_device(), getattr(torch, dtype))
    models = [transformers.BertForSequenceClassification(shape).eval().to(*where) for _ in range(count)]
    tokens = torch.tensor([list(ids)]).to(where[0])

    def run() -> object:
        with torch.inference_mode():
            return [model(input_ids=tokens).logits.float().cpu().numpy() for model in models]

    return run


def answered(engine: Engine, queries: Sequence[Query], *, shared: bool) -> Callable[[], object]:
    """A run of the queries, which have to share layers, or not."""

    def run() -> object:
        results = engine.infer(queries)
        layers = {result.timing.shared_layers if result.timing is not None else 0 for result in results}
        if (0 in layers) == shared or any(result.error is not None for result in results):
            raise RuntimeError(f"expected queries that {'share' if shared else 'do not share'} layers, found {layers}")
        return results

    return run


def fanout(
    backbone: str = "minilm-l6",
    tasks: int = 32,
    length: int = 32,
    methods: str = "adapter,lora",
    systems: Annotated[str, typer.Option(help="of fanout, ordinary and transformers")] = "fanout,ordinary",
    rounds: int = 15,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Seconds of one text for many tasks whose deltas are in the upper half of the layers."""
    set_xla_flags()
    loaded, chosen = random_backbone(backbone), systems.split(",")
    layers = range(loaded.config.layers // 2, loaded.config.layers)
    made = random_tasks(loaded, methods.split(","), tasks, layers)
    ids = list(range(1000, 1000 + length))
    queries = task_queries(made, [ids] * tasks)
    bucket = Bucket(tasks * length, ((tasks, length),))
    running: dict[str, Callable[[], object]] = {}
    with contextlib.ExitStack() as stack:
        for name in (name for name in chosen if name in POLICIES):
            settings = EngineSettings(
                background_compile=False,
                max_batch_tokens=bucket.tokens,
                max_batch_rows=tasks,
                slots=tasks,
                policy=POLICIES[name],
            )
            cache = stack.enter_context(engine_cache())
            engine = Engine(loaded, made, settings, cache_dir=cache, buckets=[bucket])
            stack.enter_context(engine.start(lambda what, done, total: console.log(f"{what} {done}/{total}")))
            engine.specialise(queries)
            running[name] = answered(engine, queries, shared=name == "fanout")
        if "transformers" in chosen:
            for dtype in DTYPES:
                running[f"transformers {dtype}"] = whole_models(loaded.config, tasks, ids, dtype)
        seconds = interleave(running, rounds)
    figures: dict[str, Any] = {
        name: {"seconds": float(np.median(own)), "times_fanout": paired_ratio(seconds["fanout"], own)}
        for name, own in seconds.items()
    }
    settings_of = {"backbone": backbone, "tasks": tasks, "length": length, "methods": methods, "rounds": rounds}
    report("fanout", settings_of, figures, json_out)
