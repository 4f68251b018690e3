"""``bench.py kernels``: what a Hopper GPU may do faster, beside the references that serve, at a backbone's sizes."""

from __future__ import annotations

import functools
import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from benches.shared import console, interleave, named_backbone, paired_ratio, report
from pallas_kernels.low_rank import low_rank
from pallas_kernels.low_rank.mosaic import low_rank_mosaic
from pallas_kernels.masked_matmul import masked_matmul, sign_matmul
from pallas_kernels.masked_matmul.mosaic import Tiles, masked_matmul_mosaic, sign_matmul_mosaic
from pallas_kernels.packed_attention import AttentionGroup, packed_attention
from pallas_kernels.packed_attention.cudnn import packed_attention_cudnn
from pallas_kernels.sparse_matmul import block_sparse_matmul, pack_columns, sparse_matmul
from pallas_kernels.sparse_matmul.mosaic import block_sparse_matmul_mosaic, sparse_matmul_mosaic
from pallas_kernels.windows import Runs

TILES = (Tiles(), Tiles(rows=64), Tiles(columns=64), Tiles(stages=2), Tiles(stages=4))
DENSITY, SIDE, RANK = 0.005, 16, 64
"""Density of sparse differences, side of their blocks, and rank of adapters."""
SAME = 1e-2
"""Tolerance relative to the largest value: both sum products of bf16 in f32, in another order."""
Operands = Mapping[str, jax.Array]
Operator = Callable[[Operands, Runs], jax.Array]


def bank(shape: tuple[int, ...], rng: np.random.Generator) -> jax.Array:
    """16-bit numbers as banks hold them."""
    return jax.lax.bitcast_convert_type(jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16), jnp.uint16)


def entries(
    name: str, inputs: int, outputs: int, tasks: int, rng: np.random.Generator, shape: tuple[int, ...] = ()
) -> Operands:
    """Each task's places by column, and what is there: numbers, or blocks of ``shape``."""
    places = np.sort(rng.integers(0, inputs * outputs, (tasks, 1, round(DENSITY * inputs * outputs))))
    cols, ends = pack_columns(places // inputs, outputs)
    return {
        f"{name}rows": jnp.asarray(places % inputs, jnp.uint16),
        f"{name}cols": jnp.asarray(cols),
        f"{name}ends": jnp.asarray(ends),
        f"{name}values": bank((*places.shape, *shape), rng),
    }


def operands(inputs: int, outputs: int, tasks: int, length: int, rng: np.random.Generator) -> Operands:
    tokens = tasks * length
    return {
        **entries("", inputs, outputs, tasks, rng),
        **entries("block_", inputs // SIDE, outputs // SIDE, tasks, rng, (SIDE, SIDE)),
        "down": bank((tasks, 1, inputs, RANK), rng),
        "up": bank((tasks, 1, RANK, outputs), rng),
        "slots": jnp.arange(tasks, dtype=jnp.int32),
        "x": jnp.asarray(rng.standard_normal((tokens, inputs), np.float32), jnp.bfloat16),
        "y": jnp.zeros((tokens, outputs), jnp.float32),
        "w": jnp.asarray(rng.standard_normal((inputs, outputs), np.float32), jnp.bfloat16),
        "bits": jnp.asarray(rng.integers(0, 256, (tasks, 1, inputs, outputs // 8), np.uint8)),
        "scale": jnp.asarray(rng.random((tasks, 1, 1), np.float32)),
    }


def attentions(hidden: int, heads: int, tasks: int, length: int) -> tuple[Operands, Mapping[str, Operator]]:
    """Queries of ``length`` tokens of each task, in a rectangle."""
    rng = np.random.default_rng(0)
    parts = (jnp.asarray(rng.standard_normal((tasks * length, hidden), np.float32), jnp.bfloat16) for _ in range(3))
    own = dict(zip("qkv", parts, strict=True)) | {"lengths": jnp.full(tasks, length, jnp.int32)}

    def attention(compute: Any) -> Operator:
        def run(own: Operands, runs: Runs) -> jax.Array:
            del runs
            group = AttentionGroup(None, own["lengths"])
            found: jax.Array = compute(own["q"], own["k"], own["v"], (group,), None, heads)
            return found

        return run

    return own, {"reference": attention(packed_attention), "cudnn": attention(packed_attention_cudnn)}


def systems(tasks: int, length: int) -> Mapping[str, Mapping[str, Operator]]:
    """Systems by operator, then by what computes it."""

    def added(matmul: Any, name: str = "") -> Operator:
        parts = [f"{name}{part}" for part in ("rows", "cols", "ends", "values")]
        return lambda own, runs: matmul(own["x"], own["y"], *(own[part] for part in parts), runs, length, 0)

    def thin(matmul: Any) -> Operator:
        def run(own: Operands, runs: Runs) -> jax.Array:
            del runs
            x = own["x"].reshape(tasks, length, -1)
            found: jax.Array = matmul(x, own["down"], own["up"], own["slots"], 0, activation="relu")
            return found

        return run

    def masked(matmul: Any) -> Operator:
        return lambda own, runs: matmul(own["x"], own["y"], own["w"], own["bits"], runs, length, 0)

    def signed(matmul: Any) -> Operator:
        return lambda own, runs: matmul(own["x"], own["y"], own["bits"], own["scale"], runs, length, 0)

    def every(make: Callable[[Any], Operator], reference: Any, kernel: Any) -> Mapping[str, Operator]:
        tuned = {f"{t.rows}x{t.columns}, {t.stages} stages": make(functools.partial(kernel, tiles=t)) for t in TILES}
        return {"reference": make(reference)} | tuned

    return {
        "mask": every(masked, masked_matmul, masked_matmul_mosaic),
        "sign": every(signed, sign_matmul, sign_matmul_mosaic),
        "diff": {"reference": added(sparse_matmul), "mosaic": added(sparse_matmul_mosaic)},
        "block diff": {
            "reference": added(block_sparse_matmul, "block_"),
            "mosaic": added(block_sparse_matmul_mosaic, "block_"),
        },
        "low rank": {"reference": thin(low_rank), "mosaic": thin(low_rank_mosaic)},
    }


def compare(
    found: Mapping[str, Operator], own: Operands, runs: Runs, flops: float, rounds: int
) -> dict[str, dict[str, Any]]:
    """Figures of each system that gives the first one's answer; of the others the error."""
    figures: dict[str, dict[str, Any]] = {}
    compiled: dict[str, Callable[[], object]] = {}
    expected: jax.Array | None = None
    for name, compute in found.items():
        call = functools.partial(jax.jit(compute), own, runs)
        try:
            answer = jax.block_until_ready(call()).astype(jnp.float32)
        except (RuntimeError, ValueError) as error:  # the other systems may run
            figures[name] = {"error": str(error).strip().splitlines()[0][:200]}
            continue
        expected = answer if expected is None else expected
        if float(jnp.abs(answer - expected).max()) <= SAME * float(jnp.abs(expected).max()):
            compiled[name] = functools.partial(lambda call: jax.block_until_ready(call()), call)
        else:
            figures[name] = {"error": "its answer differs from the reference's"}
    seconds = interleave(compiled, rounds)
    for name, times in seconds.items():
        figures[name] = {
            "ms": 1e3 * statistics.median(times),
            "tflops": flops / statistics.median(times) / 1e12,
            "reference_ratio": paired_ratio(times, seconds["reference"]),
        }
    return figures


def kernels(
    backbone: str = "bert-base",
    tasks: int = 128,
    length: Annotated[int, typer.Option(help="tokens of each task")] = 128,
    rounds: int = 15,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Times of one layer's operators, where all tokens are of one method's tasks, and speed relative to the reference.

    A kernel whose answer differs, or that the device cannot run, is named with the error instead of a time.
    """
    if jax.default_backend() != "gpu":
        raise typer.BadParameter(f"these kernels are for a Hopper GPU; JAX found a {jax.default_backend()}")
    config, tokens = named_backbone(backbone), tasks * length
    hidden, wide = config.hidden_size, config.intermediate_size
    at = jnp.arange(tasks, dtype=jnp.int32)
    runs = Runs(jnp.int32(tasks), at, at * length, at * 0, at * 0 + length)
    figures: dict[str, dict[str, Any]] = {}

    def add(operator: str, found: Mapping[str, Operator], own: Operands, flops: float) -> None:
        for name, each in compare(found, own, runs, flops, rounds).items():
            figures[f"{operator}: {name}"] = each
            console.log(operator, name, each)

    for inputs, outputs in ((hidden, hidden), (hidden, wide), (wide, hidden)):
        own = operands(inputs, outputs, tasks, length, np.random.default_rng(0))
        dense = 2 * tokens * inputs * outputs
        shares = {"diff": DENSITY, "block diff": DENSITY, "low rank": RANK / inputs + RANK / outputs}
        for operator, found in systems(tasks, length).items():
            add(f"{operator} {inputs}x{outputs}", found, own, dense * shares.get(operator, 1))
    own, found = attentions(hidden, config.heads, tasks, length)
    add(f"attention {tasks}x{length}", found, own, 4 * tokens * length * hidden)
    settings = {"backbone": backbone, "tasks": tasks, "length": length, "rounds": rounds}
    report("kernels", settings, figures, json_out)
