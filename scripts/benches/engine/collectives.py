"""Collectives of programs that several devices compute together, counted in what the compiler made of them.

``python -m benches.engine.collectives --devices 2 [options]`` from ``scripts``: the devices are parts of the CPU.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from jpets.config import BackboneConfig
    from jpets.deltas.protocol import ClassKey

NAMES = ("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "reduce-scatter")
CALL = re.compile(rf"\b({'|'.join(NAMES)})(?:-start)?\(")
"""A collective's name before its operands, in the text of an HLO module. An asynchronous one has a start and an end."""
LIGHT = ("adapter", "lora", "bitfit")


def collectives(text: str) -> Counter[str]:
    """How many collectives of each name there are in a compiled program's text (``Compiled.as_text()``). One in the
    body of a loop counts once."""
    return Counter(CALL.findall(text))


def classes_of(config: BackboneConfig, methods: Iterable[str]) -> list[ClassKey]:
    """The classes of a usual task of each method, and of its head."""
    import numpy as np

    from benches.shared import RandomBackbone, random_tasks
    from jpets.deltas.bank import lower_task

    backbone = RandomBackbone("random", config, {"bias": np.zeros(config.bias_size(), np.float32)})
    tasks = random_tasks(backbone, list(methods), len(list(methods)))
    return sorted({part.key for task in tasks for part in lower_task(task, config)})


def program_collectives(
    config: BackboneConfig, methods: Sequence[str], devices: int, bucket: str, dtype: str = "float32"
) -> Counter[str]:
    """``collectives`` of the program with room for any mixture of these methods, on the first ``devices`` devices."""
    import jax

    from jpets.engine.batch.bucket import parse_bucket, widest
    from jpets.engine.programs.mesh import MeshSlice
    from jpets.engine.programs.program import Family, ProgramKey, compile_program
    from jpets.engine.workloads.encoder_network import EncoderNetwork

    keys = classes_of(config, methods)
    family = Family(EncoderNetwork(config), dtype, tuple((key, 9) for key in keys))  # type: ignore[arg-type]
    mesh = MeshSlice(jax.local_devices()[:devices], config.heads)
    program = compile_program(family, ProgramKey(parse_bucket(bucket), widest(keys, heavy=True)), mesh)
    return collectives(program.compiled.as_text() or "")


def main(
    devices: int = 2,
    backbone: str = "minilm-l6",
    layers: int = 2,
    buckets: str = "8x32,256:8x16+4x64",
    dtype: str = "float32",
) -> None:
    """Collectives of the programs for the bare backbone, the light methods, and all methods, by bucket."""
    os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
    from benches.shared import console, named_backbone
    from jpets.deltas import METHODS

    config = dataclasses.replace(named_backbone(backbone), layers=layers)
    groups = {"bare": (), "light": LIGHT, "all": tuple(METHODS), **{name: (name,) for name in METHODS}}
    for bucket in buckets.split(","):
        for name, methods in groups.items():
            found = program_collectives(config, methods, devices, bucket, dtype)
            console.print(f"{devices} devices, {layers} layers, {bucket}, {name}: {dict(found)}")


if __name__ == "__main__":
    typer.run(main)
