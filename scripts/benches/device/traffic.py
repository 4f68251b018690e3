"""``bench.py traffic``: what a macro-batch's program moves on a GPU that is only described.

XLA compiles for it without one, where JAX's plugin for CUDA is installed (``jax-cuda13-plugin``, ``jax-cuda13-pjrt``,
``nvidia-cuda-nvcc``, ``nvidia-nvvm``). It tunes nothing then, so products count by their arithmetic; what is fused,
what is copied, and the bytes are what a GPU would run.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import typer
from jax.experimental import topologies

from benches.device.hlo import Kernel, kernels_of
from benches.device.kernels import longest_run, rectangle
from benches.engine.programs import chosen_operators, cudnn_found, family_of
from benches.shared import console, named_backbone, report
from jpets.deltas import class_method
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import FULL, LEVELS, Bucket, Variant, capacity, make_variant
from jpets.engine.programs.delta_order import Streams
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.program import Family, ProgramKey, trace_program
from jpets.xla_flags import set_xla_flags

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 } runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.8e12, 790e12
"""The limits of ``docs/kernels.md``."""
UNTUNED = ("--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false")
"""There is nothing to tune on."""
LONGEST = 15


def exact_variant(family: Family, bucket: Bucket, tasks: int, length: int) -> Variant:
    """Of a batch in which each method has an equal part of the tasks."""
    methods = {key.method for key, _ in family.slots if class_method(key.method).kind != "head"}
    share = next(level for level in LEVELS if capacity(bucket, level) >= tasks / len(methods))

    def level(key: ClassKey) -> int:
        return share if class_method(key.method).kind in ("light", "heavy") else FULL

    return make_variant({key: level(key) for key, _ in family.slots}, longest_run(length))


def seconds_of(kernel: Kernel) -> float:
    """The least that a kernel can take."""
    return max(kernel.bytes / BYTES_PER_SECOND, kernel.flops / FLOPS_PER_SECOND)


def figures_of(kernels: Sequence[Kernel]) -> dict[str, Any]:
    groups: dict[str, float] = {}
    for kernel in kernels:
        groups[kernel.operation] = groups.get(kernel.operation, 0.0) + 1e3 * seconds_of(kernel)
    return {
        "kernels": len(kernels),
        "bytes": sum(kernel.bytes for kernel in kernels),
        "flops": sum(kernel.flops for kernel in kernels),
        "least_ms": sum(groups.values()),
        "ms": groups,
    }


def traffic(
    backbone: str = "bert-base",
    tasks: int = 128,
    length: int = 128,
    methods: str = "adapter,lora,bitfit,mask,diff,ia3,onebit,prefix,prompt",
    layers: Annotated[int, typer.Option(help="0: the backbone's own")] = 2,
    candidates: Annotated[str, typer.Option(help="as of bench.py programs")] = "usual",
    text: Annotated[pathlib.Path | None, typer.Option(help="folder for the optimised HLO")] = None,
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Kernels, bytes and least time of a batch of all tasks, and of the bare backbone, as compiled for an H200."""
    set_xla_flags()
    os.environ["XLA_FLAGS"] = " ".join([os.environ["XLA_FLAGS"], *UNTUNED])
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # cuDNN, which nothing calls here, may be absent
    jax.config.update("jax_platforms", "cpu")
    device = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1").devices[0]
    config = named_backbone(backbone)
    config = dataclasses.replace(config, layers=layers or config.layers)
    operators, names = chosen_operators(candidates, "cuda", "9.0"), methods.split(",")
    family = family_of(config, names, -(-tasks // len(names)) + 2, operators, Streams(1), "bfloat16")
    bucket = rectangle(tasks, length)
    figures: dict[str, Any] = {}
    for name, variant in {"pets": exact_variant(family, bucket, tasks, length), "backbone": Variant()}.items():
        with cudnn_found():
            traced = trace_program(family, ProgramKey(bucket, variant), MeshSlice([device], config.heads))
        compiled = traced.lower().compile().as_text() or ""
        kernels = list(kernels_of(compiled))
        figures[name] = figures_of(kernels)
        for each in sorted(kernels, key=seconds_of, reverse=True)[:LONGEST]:
            console.log(
                name, f"{1e6 * seconds_of(each):.1f} us", f"{each.bytes / 1e6:.1f} MB", each.operation, each.name
            )
        if text is not None:
            text.mkdir(parents=True, exist_ok=True)
            (text / f"{name}.hlo").write_text(compiled)
    settings = {"backbone": backbone, "tasks": tasks, "length": length, "methods": methods, "layers": layers}
    report("traffic", settings | {"candidates": candidates, "described": "NVIDIA H200"}, figures, json_out)
