"""Programs as they are lowered for a GPU: no loop with a traced count, no scatter in which two threads could meet."""

from __future__ import annotations

import functools

import jax
import pytest
from bench import app
from benches.engine.programs import Lowered, chosen_operators, cudnn_found, family_of, keys_of, read, tensor_bytes
from support import shallow
from typer.testing import CliRunner

from jpets.deltas import METHODS
from jpets.deltas.operators import REFERENCES, Operators, usual_operators
from jpets.engine.batch.bucket import parse_bucket
from jpets.engine.programs.delta_order import Streams
from jpets.engine.programs.program import trace_program

FOR_GPU = chosen_operators("usual", "cuda")
BUCKETS = {"rectangular": "4x16", "packed": "64:4x16+1x32"}


@functools.cache
def lowered(name: str, operators: Operators, platform: str = "cuda") -> Lowered:
    family = family_of(shallow().config, tuple(METHODS), 4, operators, Streams(), "bfloat16")
    key = keys_of(family, {each: parse_bucket(text) for each, text in BUCKETS.items()})[name]
    with cudnn_found():
        return read(trace_program(family, key).lower(lowering_platforms=(platform,)))


@pytest.mark.parametrize("name", ["rectangular heavy", "packed heavy", "packed light"])
def test_a_program_for_a_gpu_neither_loops_nor_shares_scatters(name: str) -> None:
    found = lowered(name, FOR_GPU)
    assert found.passes and found.loops == found.shared_scatters == 0
    assert found.arguments > 20 and found.largest > 0
    groups = 2 if "packed" in name else 1
    assert found.calls == {"__cudnn$fmhaSoftmax": shallow().config.layers * groups}


def test_references_loop_once_for_each_site_of_a_heavy_class() -> None:
    """A CPU keeps them; so the counts can be other than 0."""
    config, heavy = shallow().config, [name for name, method in METHODS.items() if method.kind == "heavy"]
    found = lowered("packed heavy", REFERENCES)
    assert found.loops == 6 * config.layers * len(heavy)
    assert found.shared_scatters > 0 and not found.passes
    assert usual_operators("cpu") == REFERENCES


def test_calls_count_as_often_as_they_are_made() -> None:
    @jax.jit
    def twice(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, x.shape[0], lambda _, y: y.at[0].add(1), x)

    def run(x: jax.Array) -> jax.Array:
        return twice(twice(x).sum()[None] + x)

    found = read(jax.jit(run).trace(jax.ShapeDtypeStruct((3, 5), "float32")).lower(lowering_platforms=("cuda",)))
    assert (found.loops, found.scatters, found.arguments) == (2, 2, 1)
    assert (found.largest, found.largest_shape) == (60, "tensor<3x5xf32>")


def test_bytes_of_tensors() -> None:
    kinds = ("tensor<2x3xbf16>", "tensor<f32>", "tensor<7xi1>", "tensor<4xui16>", "!stablehlo.token")
    assert [tensor_bytes(kind) for kind in kinds] == [12, 4, 7, 8, 0]


@pytest.mark.parametrize(
    ("candidates", "capability", "code", "says"),
    [
        ("usual", "", 0, "pass: 2"),
        ("reference", "", 1, "fail: 1 of 2"),
        ("mosaic", "9.0", 0, "pass: 2"),
        ("mosaic", "10.0", 2, "mosaic cannot run here"),
        ("none", "9.0", 2, "no operator has a candidate"),
    ],
)
def test_the_command_fails_where_a_program_loops(candidates: str, capability: str, code: int, says: str) -> None:
    options = ["--backbone", "minilm-l6", "--layers", "1", "--methods", "mask", "--buckets", "2x8"]
    result = CliRunner().invoke(app, ["programs", *options, "--candidates", candidates, "--capability", capability])
    assert result.exit_code == code
    assert says in result.stderr
