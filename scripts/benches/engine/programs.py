"""``bench.py programs``: the standard programs as they are lowered for a platform. It needs no device of that platform.

A loop with a traced trip count asks the host before every step, and threads of a scatter whose indices may be alike
meet in atomic additions, so programs for accelerators have neither: the command fails if one has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any
from unittest import mock

import jax
import numpy as np
import typer
from jax._src.cudnn import fused_attention_stablehlo  # not public yet

from benches.shared import RandomBackbone, console, named_backbone, random_tasks, report
from jpets.config import BackboneConfig
from jpets.deltas import METHODS, class_method
from jpets.deltas.bank import lower_task
from jpets.deltas.operators import REFERENCES, Operators, usual_operators
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket, parse_bucket, widest
from jpets.engine.kernels.choosing import forced
from jpets.engine.kernels.operators import OPERATORS
from jpets.engine.programs.delta_order import Streams
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.program import Family, ProgramKey, trace_program
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.errors import InvalidInput
from pallas_kernels.gates import Device

FIVE = ("adapter", "lora", "bitfit", "mask", "diff")
BUCKETS = "128x32,32x128,4096:128x32+32x128,4096:32x32+32x128+8x512"
"""Rectangles, and packed mixtures of short and long rows as a server's menu has them."""
COLLECTIVES = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
CUDNN = 91000
"""The version that programs are lowered for."""
TENSOR = re.compile(r"tensor<((?:\d+x)*)(bf16|f\d+|u?i\d+)>")


@dataclasses.dataclass
class Lowered:
    """What one program does, calls of functions counted as often as they are made."""

    loops: int = 0
    scatters: int = 0
    shared_scatters: int = 0
    """Scatters whose indices may be alike."""
    arguments: int = 0
    largest: int = 0
    """Bytes of the largest result of an operation, if it is kept in memory at all."""
    largest_shape: str = ""
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    """Custom calls by name."""

    @property
    def passes(self) -> bool:
        return not self.loops and not self.shared_scatters


def read(lowered: jax.stages.Lowered) -> Lowered:
    """Counts in the StableHLO of a program."""
    functions = {str(f.attributes["sym_name"]).strip('"'): f for f in operations(lowered.compiler_ir("stablehlo"))}
    main = functions["main"]
    found = Lowered(arguments=len(main.regions[0].blocks[0].arguments))
    _count(main, functions, found)
    return found


def operations(parent: Any) -> Iterator[Any]:
    """The operations directly inside of one."""
    for region in parent.operation.regions:
        for block in region:
            for each in block:
                yield each.operation


def _count(parent: Any, functions: Mapping[str, Any], found: Lowered) -> None:
    for each in operations(parent):
        name = each.name.removeprefix("stablehlo.")
        if name == "while":
            found.loops += 1
        elif name == "scatter":
            found.scatters += 1
            found.shared_scatters += str(each.attributes["unique_indices"]) != "true"
        elif name == "custom_call":
            found.calls[str(each.attributes["call_target_name"]).strip('"')] += 1
        elif name == "func.call":
            _count(functions[str(each.attributes["callee"]).removeprefix("@")], functions, found)
        for result in each.results:
            if (size := tensor_bytes(str(result.type))) > found.largest:
                found.largest, found.largest_shape = size, str(result.type)
        _count(each, functions, found)


def collectives(family: Family, key: ProgramKey, devices: int) -> Counter[str]:
    """Those of a program that is split over as many CPU devices: XLA adds them when it compiles."""
    mesh, here = MeshSlice(jax.devices("cpu")[:devices], family.config.heads), usual_operators("cpu")
    text = trace_program(dataclasses.replace(family, operators=here), key, mesh).lower().compile().as_text()
    return Counter(COLLECTIVES.findall(text or ""))


def tensor_bytes(kind: str) -> int:
    """Bytes of an MLIR tensor type; 0 for another type."""
    match = TENSOR.match(kind)
    if match is None:
        return 0
    bits = int(re.sub(r"\D", "", match[2]))
    return math.prod(int(n) for n in match[1].split("x") if n) * -(-bits // 8)


def family_of(
    config: BackboneConfig, methods: Sequence[str], slots: int, operators: Operators, streams: Streams, dtype: str
) -> Family:
    """Banks of a usual task of each method, and of heads."""
    backbone = RandomBackbone("random", config, {"bias": np.zeros(config.bias_size(), np.float32)})
    tasks = random_tasks(backbone, methods, len(methods))
    keys = sorted({part.key for task in tasks for part in lower_task(task, config)})
    return Family(EncoderNetwork(config), dtype, tuple((key, slots) for key in keys), streams, operators)  # type: ignore[arg-type]


def keys_of(family: Family, buckets: Mapping[str, Bucket]) -> dict[str, ProgramKey]:
    """Programs with room for any mixture, with heavy classes and without them, by the bucket's name and theirs."""
    classes: list[ClassKey] = [key for key, _ in family.slots]
    variants = {"heavy" if heavy else "light": widest(classes, heavy=heavy) for heavy in (False, True)}
    if not any(class_method(key.method).kind == "heavy" for key in classes):
        del variants["heavy"]
    return {f"{b} {name}": ProgramKey(bucket, own) for b, bucket in buckets.items() for name, own in variants.items()}


def programs(
    platform: str = "cuda",
    backbone: str = "bert-base",
    methods: str = "five,all",
    buckets: str = BUCKETS,
    slots: int = 33,
    layers: int = 0,
    streams: int = 1,
    dtype: str = "bfloat16",
    devices: Annotated[int, typer.Option(help="more than 1: compile for as many CPU devices, count collectives")] = 1,
    candidates: Annotated[
        str,
        typer.Option(
            help="usual, a candidate wherever it can be, or operator=candidate,... in the place of usual ones"
        ),
    ] = "usual",
    capability: Annotated[str, typer.Option(help="compute capability of the GPU, for which kernels are chosen")] = "",
    json_out: Annotated[pathlib.Path | None, typer.Option("--json")] = None,
) -> None:
    """Loops, scatters, custom calls, arguments and the largest temporary of the standard programs for a platform.

    Fails if a program for an accelerator has a loop, or a scatter whose indices may be alike.
    """
    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
    config = named_backbone(backbone)
    if layers:
        config = dataclasses.replace(config, layers=layers)
    operators = chosen_operators(candidates, platform, capability)
    groups = {"five": FIVE, "all": tuple(METHODS)}
    shapes = {each: parse_bucket(each) for each in buckets.split(",")}
    figures: dict[str, dict[str, Any]] = {}
    broken = []
    for group in methods.split(","):
        family = family_of(config, groups.get(group, (group,)), slots, operators, Streams(streams), dtype)
        for name, key in keys_of(family, shapes).items():
            console.log(f"{group} {name}")
            with cudnn_found():
                own = read(trace_program(family, key).lower(lowering_platforms=(platform,)))
            figures[f"{group} {name}"] = _figures(own)
            if devices > 1:
                figures[f"{group} {name}"]["collectives"] = dict(collectives(family, key, devices))
            if not own.passes:
                broken.append(f"{group} {name}")
    settings = {"platform": platform, "backbone": backbone, "methods": methods, "buckets": buckets, "slots": slots}
    settings |= {
        "layers": layers,
        "candidates": candidates,
        "streams": streams,
        "dtype": dtype,
        "devices": devices,
        "operators": dict(operators.chosen),
    }
    report("programs", settings, figures, json_out)
    if platform != "cpu" and broken:
        console.print(f"fail: {len(broken)} of {len(figures)} programs loop or share scatters: {', '.join(broken)}")
        raise typer.Exit(1)
    console.print(f"pass: {len(figures)} programs")


def _has_cudnn() -> bool:
    """JAX's plugin for CUDA may be there without it."""
    try:
        fused_attention_stablehlo.check_cudnn_version()
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def cudnn_found() -> Iterator[None]:
    """Lets JAX lower calls of cuDNN, whose version it asks for, where there is none."""
    if _has_cudnn():
        yield
        return
    with mock.patch.object(fused_attention_stablehlo, "cuda_versions") as versions:
        versions.cudnn_get_version.return_value = CUDNN
        yield


def chosen_operators(candidates: str, platform: str, capability: str = "") -> Operators:
    """Raises ``typer.BadParameter`` for candidates that are unknown, or not for such a device."""
    if candidates == "reference":
        return REFERENCES
    usual = usual_operators(platform)
    if platform == "cuda":
        usual = usual.replaced(packed_attention="cudnn")
    if candidates == "usual":
        return usual
    try:
        if "=" not in candidates:
            major, minor = (int(part) for part in (capability or "0.0").split("."))
            device = Device("gpu" if platform == "cuda" else platform, "described GPU", (major, minor))
            return forced(usual, candidates, OPERATORS, device, 1)
        return usual.replaced(**dict(pair.split("=") for pair in candidates.split(",")))
    except (ValueError, InvalidInput) as error:
        raise typer.BadParameter(str(error)) from error


def _figures(own: Lowered) -> dict[str, Any]:
    return {
        "loops": own.loops,
        "scatters": own.scatters,
        "shared_scatters": own.shared_scatters,
        "custom_calls": dict(own.calls),
        "arguments": own.arguments,
        "largest_bytes": own.largest,
        "largest_shape": own.largest_shape,
    }
