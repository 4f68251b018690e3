"""Sparse differences in whole blocks: the same answers as dense weights, fewer bytes, checked as they come in."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import Bench, dense_answer, device_params, make_head, make_task, random_delta, row_answer, shallow

from checkpoints.task_file import read_task, write_task
from jpets.config import NAMED_BACKBONES
from jpets.deltas import METHODS
from jpets.deltas.entries import diff_delta
from jpets.deltas.operators import usual_operators
from jpets.deltas.sites import BoundClass, Sites
from jpets.engine.batch.assembly import assemble
from jpets.engine.batch.bucket import FULL, Bucket, make_variant
from jpets.engine.batch.layout import Layout
from jpets.engine.workloads.encoder_network import INPUTS
from jpets.errors import InvalidTask
from jpets.types import Delta, Task
from pallas_kernels.sparse_matmul.columns import unpack_columns

BUCKET = Bucket(12 * 16, ((12, 16),))


def without_entries(delta: Delta, site: str) -> Delta:
    """As a search over all matrices may leave a site; its biases stay."""
    none = {f"{site}/{name}": delta.tensors[f"{site}/{name}"][:0] for name in ("rows", "cols", "values")}
    none[f"{site}/layer_offsets"] = np.zeros_like(delta.tensors[f"{site}/layer_offsets"])
    return dataclasses.replace(delta, tensors={**delta.tensors, **none})


def tasks() -> list[Task]:
    backbone, rng = shallow(), np.random.default_rng(0)
    deltas = [
        random_delta("diff", backbone.config, 1, density=0.5, block=16),
        random_delta("diff", backbone.config, 2, density=0.2, block=8, sites=["query", "ffn_out", "pooler"]),
        random_delta("diff", backbone.config, 3),
        without_entries(random_delta("diff", backbone.config, 4, block=4, sites=["attn_out"]), "attn_out"),
    ]
    pooled = ("mean", "pooler", "cls", "mean")
    heads = [make_head(rng, backbone.config.hidden_size, 3, pooling=pooling) for pooling in pooled]
    return [
        make_task(backbone, f"task-{at}", [d], head) for at, (d, head) in enumerate(zip(deltas, heads, strict=True))
    ]


def test_blocks_of_two_sizes_and_single_entries_share_a_batch() -> None:
    own, rng = Bench(shallow(), tasks()), np.random.default_rng(1)
    names = [*own.tasks, None, *own.tasks]
    rows = [own.row(name, rng.integers(5, 800, int(rng.integers(3, 17)))) for name in names]
    assembled, outputs = own.run(rows, BUCKET, make_variant(Layout(rows, BUCKET).needs))
    for query, (name, row) in enumerate(zip(names, rows, strict=True)):
        task = own.tasks[name] if name else None
        found = row_answer(assembled, outputs, query, 3 if task else 0)
        expected = dense_answer(own.backbone, task, row.ids)
        what = "logits" if task else "pooled"
        np.testing.assert_allclose(found[what].reshape(-1), expected[what].reshape(-1), atol=1e-4)


def test_blocks_and_single_entries_need_no_loop() -> None:
    """As on a GPU, at one site."""
    own, rng = Bench(shallow(), tasks()), np.random.default_rng(1)
    rows = [own.row(name, rng.integers(5, 800, int(rng.integers(3, 17)))) for name in [*own.tasks, None, *own.tasks]]
    variant = make_variant({key: FULL for key in own.banks if key.method == "diff"})
    views = jax.tree.map(jnp.asarray, assemble(rows, BUCKET, variant, INPUTS).views)
    d, weight = own.config.hidden_size, own.params["layers"][0]["attn_out"]
    x = jnp.asarray(rng.normal(size=(BUCKET.tokens, d)), jnp.float32)

    def outputs(platform: str) -> jax.Array:
        operators = usual_operators(platform)
        bound = [
            BoundClass(key, own.banks[key].arrays, view, METHODS["diff"], operators=operators)
            for key, view in zip(variant.classes(), views, strict=True)
        ]
        sites = Sites(own.config, own.params["bias"], BUCKET.rows, None, bound)
        (y,) = jax.jit(lambda x: sites.linear(0, ("attn_out",), x, weight))(x)
        return y

    assert len(variant.classes()) == 4
    np.testing.assert_allclose(outputs("gpu"), outputs("cpu"), atol=1e-4)
    bare = Sites(own.config, own.params["bias"], BUCKET.rows, None).linear(0, ("attn_out",), x, weight)[0]
    assert float(jnp.abs(outputs("cpu") - bare).max()) > 0.01


@pytest.mark.parametrize("block", [1, 16])
def test_profiles_measure_with_entries_as_full_as_a_tasks_and_in_their_order(block: int) -> None:
    config, method = shallow().config, METHODS["diff"]
    (part,) = (p for p in method.lower(random_delta("diff", config, 1, block=block), config) if p.key.method == "diff")
    typical = method.typical(part.key, config)
    assert typical is not None
    arrays = {name: np.asarray(array) for name, array in typical.arrays.items()}
    for site, count in part.key.sites:
        inputs, outputs = (size // block for size in config.dims(site))
        rows, cols, ends = (arrays[f"{site}/{name}"] for name in ("rows", "cols", "ends"))
        held = min(count, inputs * outputs)
        assert (ends[:, -1] == held).all()
        columns = np.asarray(unpack_columns(jnp.asarray(cols), jnp.asarray(ends)))[:, :held].astype(int)
        assert (columns < outputs).all() and (np.diff(columns * inputs + rows[:, :held].astype(int)) > 0).all()


def test_a_file_holds_blocks(tmp_path: pathlib.Path) -> None:
    task = tasks()[0]
    write_task(task, tmp_path / "blocks.safetensors")
    (delta,) = read_task(tmp_path / "blocks.safetensors").deltas
    assert delta.settings["block"] == 16
    assert delta.tensors.keys() == task.deltas[0].tensors.keys()
    for name, values in delta.tensors.items():
        np.testing.assert_array_equal(values, task.deltas[0].tensors[name])


def test_blocks_keep_whatever_is_not_zero() -> None:
    rng, config = np.random.default_rng(0), shallow().config
    shape = config.dims("query")
    dense = {at: np.where(rng.random(shape) < 0.002, rng.normal(size=shape), 0.0) for at in range(config.layers)}
    params = device_params(shallow())
    merged = [
        METHODS["diff"].merge(diff_delta({"query": dense}, {}, range(config.layers), block), config, params)
        for block in (1, 4)
    ]
    for at in range(config.layers):
        blocks, single = (np.asarray(each["layers"][at]["qkv"]) for each in merged)
        np.testing.assert_array_equal(blocks, single)


def test_blocks_take_fewer_bytes_than_single_entries() -> None:
    config, held = NAMED_BACKBONES["bert-base"], []
    for settings in ({}, {"block": 16}):
        delta = METHODS["diff"].init(np.random.default_rng(0), settings, config, 0.02)
        key = METHODS["diff"].lower(delta, config)[0].key
        held.append(sum(spec.nbytes for spec in METHODS["diff"].bank_arrays(key, config).values()))
    ends = 4 * 12 * (5 * 3 + 12)
    assert held[0] == 12 * (4 * 3072 + 2 * 12288) * 5 + ends
    assert held[1] == 12 * ((4 * 12 + 2 * 48) * (2 * 256 + 3) + 4 * 6)


def test_work_counts_every_number_of_a_block() -> None:
    config = NAMED_BACKBONES["bert-base"]
    delta = METHODS["diff"].init(np.random.default_rng(0), {"block": 16}, config, 0.02)
    key = METHODS["diff"].lower(delta, config)[0].key
    assert METHODS["diff"].work(key, config, 1024, 32).flops == 2 * 1024 * (4 * 12 + 2 * 48) * 256


@pytest.mark.parametrize("block", [0, -16, 5, 128, 16.0, "16", None])
def test_a_block_that_makes_no_sense(block: object) -> None:
    with pytest.raises(InvalidTask, match="block must be a whole number"):
        METHODS["diff"].tensors({"block": block}, shallow().config)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [("rows", 4, "must lie in"), ("cols", 9, "must lie in"), ("cols", 0, "sorted by column")],
)
def test_blocks_out_of_place(part: str, change: int, message: str) -> None:
    (delta,) = tasks()[0].deltas
    wrong = delta.tensors[f"query/{part}"].copy()
    wrong[-1] = change
    broken = dataclasses.replace(delta, tensors={**delta.tensors, f"query/{part}": wrong})
    with pytest.raises(InvalidTask, match=message):
        METHODS["diff"].check(broken, shallow().config)
