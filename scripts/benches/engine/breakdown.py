"""``bench.py breakdown``: where the time of one macro-batch goes (PetS figure 9)."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benches.shared import answers, console, engine_cache, interleave, random_backbone, random_tasks, report
from jpets.config import LINEAR_SITES, BackboneConfig, EngineSettings
from jpets.deltas import METHODS
from jpets.engine.batch.bucket import Bucket
from jpets.engine.batch.rows import Row
from jpets.engine.device.replica import Replica
from jpets.engine.engine import Engine
from jpets.engine.planning.needs import Needs
from jpets.engine.programs.program import ProgramKey, compile_program, whole_family
from jpets.model.encoder import Params
from jpets.types import DEFAULT_TENANT, Query
from jpets.xla_flags import set_xla_flags
from pallas_kernels.numerics import dot
from pallas_kernels.packed_attention import AttentionGroup, packed_attention

Run = Callable[[], object]
DENSE_SIZE = (8192, 2048)
"""Rows and columns of the large product, on a GPU and on a CPU."""


def products_alone(config: BackboneConfig, params: Params, tokens: int) -> Run:
    """The shared products of all layers, each fed by the one before."""

    def function(layers: Params, x: jax.Array) -> jax.Array:
        for own in layers.values():
            wide = dot(x, own["qkv"])
            x = dot(dot(dot(wide[:, : config.hidden_size], own["attn_out"]), own["ffn_in"]), own["ffn_out"])
        return x

    x = jnp.ones((tokens, config.hidden_size), jnp.float32)
    compiled = jax.jit(function).lower(params["layers"], x).compile()
    return lambda: jax.block_until_ready(compiled(params["layers"], x))


def dense_alone(size: int) -> Run:
    """One large bf16 product: the rate that the device reaches with nothing else to do."""
    x, w = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in range(2))
    compiled = jax.jit(dot).lower(x, w).compile()  # of random numbers: a GPU is faster with ones
    return lambda: jax.block_until_ready(compiled(x, w))


def product_flops(config: BackboneConfig, tokens: int) -> int:
    """Floating-point operations of the shared products of one batch."""
    return 2 * tokens * config.layers * sum(math.prod(config.dims(site)) for site in LINEAR_SITES)


def attention_alone(config: BackboneConfig, rows: int, length: int) -> Run:
    """The attention of all layers, each fed by the one before."""
    group = AttentionGroup(None, jnp.full(rows, length, jnp.int32))

    def function(x: jax.Array) -> jax.Array:
        for _ in range(config.layers):
            x = packed_attention(x, x, x, (group,), None, config.heads)
        return x

    x = jnp.ones((rows * length, config.hidden_size), jnp.bfloat16)
    compiled = jax.jit(function).lower(x).compile()
    return lambda: jax.block_until_ready(compiled(x))


def program_run(replica: Replica, rows: Sequence[Row], bucket: Bucket) -> Run:
    """These rows in the program that fits them best, as one function, which the engine's is too."""
    variant = Needs(rows).variant(bucket, static_runs=replica.family.operators.static_runs)
    program = compile_program(whole_family(replica.family), ProgramKey(bucket, variant))
    assembled = replica.assemble(rows, program)
    return lambda: jax.block_until_ready(replica.dispatch(program, assembled))


def task_row(engine: Engine, query: Query) -> Row:
    resident = engine.tasks.get(DEFAULT_TENANT, query.task or "")
    assert resident is not None and query.input_ids is not None
    ids = np.array(query.input_ids, np.int32)
    return Row.of_tokens(ids, np.zeros_like(ids), resident.slots, 0)


def without(row: Row, method: str) -> Row:
    return dataclasses.replace(row, slots={key: slot for key, slot in row.slots.items() if key.method != method})


def shares_of(medians: dict[str, float], methods: Sequence[str]) -> dict[str, float]:
    """Shares of the whole: a method's is the time that the batch saves without it."""
    whole = medians["engine"]
    parts = {method: medians["batch"] - medians[f"without {method}"] for method in methods}
    parts |= {"products": medians["products"], "attention": medians["attention"]}
    parts["norms, embeddings, heads"] = medians["bare"] - medians["products"] - medians["attention"]
    parts["host"] = whole - medians["batch"]
    return {name: seconds / whole for name, seconds in parts.items()}


def breakdown(
    backbone: str = "bert-base",
    tasks: int = 32,
    per_task_batch: int = 1,
    length: int = 32,
    methods: str = "adapter,lora,bitfit,mask,diff",
    rounds: int = 15,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Shares of one batch's time: shared products, attention, the deltas by method, and the host's work."""
    set_xla_flags()
    loaded, names = random_backbone(backbone), methods.split(",")
    made = random_tasks(loaded, names, tasks)
    count = tasks * per_task_batch
    bucket = Bucket(count * length, ((count, length),))
    queries = [Query(made[i // per_task_batch].id, input_ids=list(range(1000, 1000 + length))) for i in range(count)]
    settings = EngineSettings(
        background_compile=False, max_batch_tokens=bucket.tokens, max_batch_rows=count, slots=tasks
    )
    with engine_cache() as cache:
        engine = Engine(loaded, made, settings, cache_dir=cache, buckets=[bucket])
        with engine.start(lambda what, done, total: console.log(f"{what} {done}/{total}")):
            engine.specialise(queries)
            replica = engine.replica
            rows = [task_row(engine, query) for query in queries]
            runs: dict[str, Run] = {"engine": functools.partial(answers, engine, queries)}
            runs["batch"] = program_run(replica, rows, bucket)
            for method in names:
                runs[f"without {method}"] = program_run(replica, [without(row, method) for row in rows], bucket)
            runs["bare"] = program_run(replica, [dataclasses.replace(row, slots={}) for row in rows], bucket)
            runs["products"] = products_alone(loaded.config, replica.params, bucket.tokens)
            runs["attention"] = attention_alone(loaded.config, count, length)
            size = DENSE_SIZE[jax.default_backend() == "cpu"]
            runs["dense"] = dense_alone(size)
            seconds = interleave(runs, rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    heavy = [method for method in names if METHODS[method].kind == "heavy"]
    figures: dict[str, Any] = {
        "pets": {
            "qps": count / medians["engine"],
            "seconds": medians["engine"],
            "heavy_seconds": sum(medians["batch"] - medians[f"without {method}"] for method in heavy),
            "shares": shares_of(medians, names),
            "backbone_flops_per_second": (rate := product_flops(loaded.config, bucket.tokens) / medians["bare"]),
            "dense_flops_per_second": (dense := 2 * size**3 / medians["dense"]),
            "backbone_of_dense": rate / dense,
        }
    }
    settings_used = {
        "backbone": backbone,
        "tasks": tasks,
        "per_task_batch": per_task_batch,
        "length": length,
        "methods": methods,
        "rounds": rounds,
        "medians": medians,
    }
    report("breakdown", settings_used, figures, json_out)
