"""``bench.py kernels``: every candidate of every operator on this device, as the engine tries them at its first start,
at a backbone's sizes; and ``bench.py choice``, the trials of a first start themselves, with their time."""

from __future__ import annotations

import dataclasses
import operator
import pathlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

import jax
import numpy as np
import typer

from benches.engine.programs import family_of
from benches.shared import console, named_backbone, report
from jpets.deltas.operators import usual_operators
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import HEAVY_RUNS, Bucket, make_variant
from jpets.engine.kernels.calls import Call, Candidate, Table
from jpets.engine.kernels.choosing import AUTO, choose
from jpets.engine.kernels.class_calls import class_calls, every_call
from jpets.engine.kernels.description import describe
from jpets.engine.kernels.operators import OPERATORS
from jpets.engine.kernels.trial import Outcome, Trials
from jpets.engine.programs.delta_order import Streams
from jpets.engine.programs.mesh import first_device
from jpets.engine.programs.program import Family, ProgramKey
from pallas_kernels.masked_matmul.mosaic import Tiles, masked_matmul_mosaic, sign_matmul_mosaic
from pallas_kernels.windows import combine_runs, replace

METHODS = "adapter,lora,mask,diff,onebit"
SIDE = 16
"""Of a structured difference's blocks, with the density of the usual one."""
TILES = (Tiles(tokens=64), Tiles(stages=2))
"""Of the kernels of bits, beside the usual ones."""


def bench_family(backbone: str, methods: str, layers: int = 1) -> Family:
    """A layer with the classes of usual tasks of these methods, and a difference in blocks beside one without."""
    config = dataclasses.replace(named_backbone(backbone), layers=layers)
    usual = usual_operators(jax.default_backend())
    family = family_of(config, methods.split(","), 2, usual, Streams(), "bfloat16")
    blocks = tuple(
        (dataclasses.replace(key, sites=blocked(key), options=(("block", str(SIDE)),)), count)
        for key, count in family.slots
        if key.method == "diff"
    )
    return dataclasses.replace(family, slots=(*family.slots, *blocks))


def blocked(key: ClassKey) -> tuple[tuple[str, int], ...]:
    return tuple((site, max(1, count // SIDE**2)) for site, count in key.sites)


def bench_program(family: Family, tasks: int, length: int) -> ProgramKey:
    """One query of each task, all of one length, in the longest runs."""
    return ProgramKey(rectangle(tasks, length), make_variant({}, longest_run(length)))


def rectangle(tasks: int, length: int) -> Bucket:
    return Bucket(tasks * length, ((tasks, length),))


def longest_run(length: int) -> int:
    """Of heavy classes, for rows of ``length`` tokens."""
    return max(size for size in HEAVY_RUNS if size <= max(length, HEAVY_RUNS[0]))


def with_tiles(table: Table) -> Table:
    """``table`` with further tile sizes of the kernels of bits."""

    def tuned(kernel: Callable[..., jax.Array], how: Callable[..., jax.Array], tiles: Tiles) -> Any:
        def compute(x: jax.Array, y: jax.Array, *operands: Any, **settings: Any) -> jax.Array:
            return combine_runs(y, how, kernel(x, *operands, **settings, tiles=tiles), operands[-1])

        return compute

    kernels = {"masked_matmul": (masked_matmul_mosaic, replace), "sign_matmul": (sign_matmul_mosaic, operator.add)}
    found = dict(table)
    for name, (kernel, how) in kernels.items():
        own, gate = found[name], found[name].candidates["mosaic"].gate
        more = {f"mosaic, {t.tokens} tokens, {t.stages} steps": Candidate(tuned(kernel, how, t), gate) for t in TILES}
        found[name] = dataclasses.replace(own, candidates={**own.candidates, **more})
    return found


def flops(call: Call) -> float:
    """Of a dense product of all tokens, the unit in which kernels of bits are compared; 0 for other operators."""
    if call.operator not in ("masked_matmul", "sign_matmul"):
        return 0.0
    x, y = call.operands[:2]
    return 2.0 * float(np.prod(x.shape)) * int(y.shape[1])


def kernels(
    backbone: str = "bert-base",
    tasks: int = 128,
    length: Annotated[int, typer.Option(help="tokens of each task")] = 128,
    methods: str = METHODS,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Times of one layer's operators, where all tokens are of one method's tasks, and speed relative to the reference.

    A candidate whose answer differs, or that the device cannot run, is named with the reason instead of a time.
    """
    family, device, table = bench_family(backbone, methods), first_device().devices[0], with_tiles(OPERATORS)
    figures: dict[str, dict[str, Any]] = {}
    for call in every_call(class_calls(family, bench_program(family, tasks, length))).values():
        own = table[call.operator]
        reasons = {name: own.refusal(name, describe(device), call) for name in own.candidates}
        trials = Trials(own, call, device)
        for name, reason in reasons.items():
            outcome = Outcome(out=reason) if reason else trials.outcome(name)
            if outcome is None or outcome.out:
                found: dict[str, Any] = {"error": "the device had no room" if outcome is None else outcome.out}
            else:
                found = {"ms": 1e3 * outcome.seconds, "reference_ratio": outcome.ratio}
                if work := flops(call):
                    found["tflops"] = work / outcome.seconds / 1e12
            figures[f"{call.operator} {call.shape}: {name}"] = found
            console.log(call.operator, call.shape, name, found)
    settings = {"backbone": backbone, "tasks": tasks, "length": length, "methods": methods}
    report("kernels", settings, figures, json_out)


def choice(
    backbone: str = "bert-base",
    tasks: int = 32,
    length: Annotated[int, typer.Option(help="tokens of each task")] = 32,
    methods: str = METHODS,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """The trials of a first start: their time, and how many shapes each candidate was chosen for, or was out for."""
    family = bench_family(backbone, methods)
    program, mesh = bench_program(family, tasks, length), first_device()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        chosen = choose(family, program, mesh, AUTO, pathlib.Path(folder))
    seconds = time.monotonic() - begun
    figures: dict[str, dict[str, Any]] = {"trials": {"seconds": seconds}}
    found = chosen.choice.found if chosen.choice is not None else {}
    for (name, shape), outcomes in found.items():
        for candidate, outcome in outcomes.items():
            figures[f"{name} {shape}: {candidate}"] = outcome._asdict()
            console.log(name, shape, candidate, str(outcome))
    count = Counter((name, candidate) for _, name, candidate in chosen.operators.entries())
    settings = {"backbone": backbone, "tasks": tasks, "length": length, "methods": methods}
    settings |= {"chosen": {f"{name} {candidate}": number for (name, candidate), number in count.items()}}
    report("choice", settings, figures, json_out)
