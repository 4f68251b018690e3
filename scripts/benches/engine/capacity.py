"""``bench.py capacity``: tasks that fit a device (PetS table 5 and figure 10).

``bench.py memory``: the memory of running batches (TurboTransformers figures 6 and 7).
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Annotated, Any

import jax
import numpy as np
import typer

from benches.shared import RandomBackbone, console, random_backbone, random_tasks, report, usual_family
from jpets.config import BackboneConfig, DType
from jpets.deltas.bank import lower_task
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket, Variant, bucket_menu, widest
from jpets.engine.batch.rows import Row
from jpets.engine.device.memory import GIGABYTE, DeviceMemory, banks_bytes, param_bytes, slot_bytes, tree_bytes
from jpets.engine.device.replica import Replica
from jpets.engine.programs.mesh import first_device
from jpets.engine.programs.program import Program, ProgramKey, compile_program
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.scheduling.costs.memory_chunks import encoder_usages, greedy_by_size, place_in_chunks
from jpets.xla_flags import set_xla_flags

DTYPE: DType = "bfloat16"
MEGABYTE = 10**6
Cycle = Sequence[Collection[ClassKey]]
"""The delta classes of tasks that come in turn."""


def slots_of(cycle: Cycle, tasks: int) -> dict[ClassKey, int]:
    """Slots of each bank for so many tasks, slot 0 included."""
    counts: Counter[ClassKey] = Counter({key: 1 for keys in cycle for key in keys})
    for at, keys in enumerate(cycle):
        counts.update(dict.fromkeys(keys, len(range(at, tasks, len(cycle)))))
    return dict(sorted(counts.items()))


def most_tasks(cycle: Cycle, config: BackboneConfig, room: float) -> int:
    """The largest number of tasks whose banks take no more than ``room`` bytes."""
    each = sum(slot_bytes(key, config, DTYPE) for keys in cycle for key in keys) / len(cycle)
    tasks = int(room / each) + len(cycle)
    while tasks and banks_bytes(slots_of(cycle, tasks), config, DTYPE) > room:
        tasks -= 1
    return tasks


def classes_by_method(backbone: RandomBackbone, methods: Sequence[str]) -> dict[str, list[ClassKey]]:
    tasks = random_tasks(backbone, methods, len(methods))
    return {
        method: [part.key for part in lower_task(task, backbone.config)]
        for method, task in zip(methods, tasks, strict=True)
    }


def replica_of(backbone: RandomBackbone, slots: dict[ClassKey, int]) -> Replica:
    return Replica(usual_family(backbone.config, slots), backbone.params, first_device())


def run_once(replica: Replica, program: Program, cycle: Cycle, rows: int, length: int) -> float:
    """Seconds of one batch in which each row belongs to another task."""
    ids = np.arange(1000, 1000 + length, dtype=np.int32)
    slots = [dict.fromkeys(cycle[i % len(cycle)], 1 + i // len(cycle)) for i in range(rows)]
    assembled = replica.assemble([Row.of_tokens(ids, np.zeros_like(ids), own, 0) for own in slots], program)
    jax.block_until_ready(replica.dispatch(program, assembled))
    start = time.perf_counter()
    outputs = jax.block_until_ready(replica.dispatch(program, assembled))
    seconds = time.perf_counter() - start
    assert bool(np.asarray(outputs.finite)[np.asarray(assembled.order)].all())
    return seconds


def check_by_arrays(backbone: RandomBackbone, cycle: Cycle, program_key: ProgramKey, budget: float) -> dict[str, Any]:
    """Fills ``budget`` bytes with real banks, runs a batch, and compares the accounting with the arrays on the
    device."""
    there = jax.live_arrays()  # held, so that no other array gets one of their ids
    room = budget * 15 / 16 - param_bytes(EncoderNetwork(backbone.config), backbone.params, DTYPE)
    tasks = most_tasks(cycle, backbone.config, room)
    slots = slots_of(cycle, tasks)
    replica = replica_of(backbone, slots)
    known = {id(array) for array in there}
    live = sum(array.nbytes for array in jax.live_arrays() if id(array) not in known)
    program = compile_program(replica.family, program_key)
    memory = DeviceMemory(tree_bytes(replica.params), replica.bank_bytes(), budget, 1)
    use = memory.use([program])
    seconds = run_once(replica, program, cycle, program_key.bucket.rows, program_key.bucket.longest)
    counted = replica.device.memory_stats() or {}
    return {
        "check_tasks": tasks,
        "check_accounted": use.backbone + use.banks,
        "check_live": live,
        "check_peak": counted.get("peak_bytes_in_use"),
        "check_total": use.total,
        "working": use.working,
        "batch_seconds": seconds,
    }


def capacity(
    backbone: str = "bert-base",
    budget_gb: float = 32.0,
    rows: int = 32,
    length: int = 128,
    methods: str = "adapter,lora,bitfit,mask,diff",
    check_gb: Annotated[float, typer.Option(help="budget that is filled with real arrays, a batch running")] = 4.0,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Tasks that fit a budget of device memory beside a running batch, by method and mixed; bytes of a task."""
    set_xla_flags()
    loaded = random_backbone(backbone)
    config, budget = loaded.config, budget_gb * GIGABYTE
    classes = classes_by_method(loaded, methods.split(","))
    shared = param_bytes(EncoderNetwork(loaded.config), loaded.params, DTYPE)
    variant: Variant = widest({key for keys in classes.values() for key in keys}, heavy=True)
    key = ProgramKey(Bucket(rows * length, ((rows, length),)), variant)
    console.log(f"a batch of {rows} x {length} beside {check_gb:g} GB")
    checked = check_by_arrays(loaded, list(classes.values()), key, check_gb * GIGABYTE)
    room = budget - shared - checked["working"]
    figures: dict[str, Any] = {}
    cycles: dict[str, Cycle] = {method: [keys] for method, keys in classes.items()}
    for name, cycle in {**cycles, "mixed": list(classes.values())}.items():
        tasks = most_tasks(cycle, config, room)
        banks = banks_bytes(slots_of(cycle, tasks), config, DTYPE)
        figures[name] = {"tasks": tasks, "bytes_per_task": banks / tasks, "backbone": shared, "deltas": banks}
    copy = param_bytes(EncoderNetwork(loaded.config), {name: loaded.params[name] for name in ("layers", "bias")}, DTYPE)
    copies = int(room / copy)
    figures["seqs"] = {"tasks": copies, "bytes_per_task": copy, "backbone": shared, "deltas": copies * copy}
    for own in figures.values():
        own["working"] = checked["working"]
    figures["mixed"] |= checked
    settings = {
        "backbone": backbone,
        "budget_gb": budget_gb,
        "rows": rows,
        "length": length,
        "methods": methods,
        "check_gb": check_gb,
    }
    report("capacity", settings, figures, json_out)


def memory(
    backbone: str = "bert-base",
    requests: int = 50,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Working memory of single texts of random lengths (5 to 500) in f32: in chunks, in one arena, and as XLA compiles
    it. Chunks that are too large or not used go back (TurboTransformers); the arena and XLA's keep the most so far."""
    set_xla_flags()
    loaded = random_backbone(backbone)
    config = loaded.config
    lengths = [int(n) for n in np.random.default_rng(0).integers(5, 501, requests)]
    shape = {
        "layers": config.layers,
        "hidden": config.hidden_size,
        "heads": config.heads,
        "intermediate": config.intermediate_size,
        "rows": 1,
    }
    chunks: tuple[int, ...] = ()
    found: dict[str, list[tuple[int, int]]] = {"chunks": [], "arena": []}
    arena = 0
    for length in lengths:
        usages = encoder_usages(**shape, length=length)
        placed = place_in_chunks(usages, chunks)
        chunks = placed.chunks
        found["chunks"].append((placed.footprint, placed.allocated))
        _, needed = greedy_by_size(usages)
        found["arena"].append((needed, max(0, needed - arena)))
        arena = max(arena, needed)
    singles = [bucket for bucket in bucket_menu(512, 1024, 32) if bucket.rectangular and bucket.rows == 1]
    needs: dict[int, int] = {}
    family = dataclasses.replace(usual_family(config), dtype="float32")  # as the tensors that are placed
    for bucket in singles:
        console.log(f"compiling {bucket}")
        found_by_compiler = compile_program(family, ProgramKey(bucket, Variant())).memory
        needs[bucket.longest] = int(found_by_compiler.temp_size_in_bytes + found_by_compiler.output_size_in_bytes)
    sizes = [needs[min(longest for longest in needs if longest >= length)] for length in lengths]
    found["programs"] = [(size, max(0, size - max([0, *sizes[:at]]))) for at, size in enumerate(sizes)]
    figures = {
        name: {
            "largest_mb": max(size for size, _ in each) / MEGABYTE,
            "mean_mb": statistics.mean(size for size, _ in each) / MEGABYTE,
            "new_mb": statistics.mean(new for _, new in each) / MEGABYTE,
            "footprints": [size / MEGABYTE for size, _ in each],
        }
        for name, each in found.items()
    }
    report("memory", {"backbone": backbone, "requests": requests, "lengths": lengths}, figures, json_out)
