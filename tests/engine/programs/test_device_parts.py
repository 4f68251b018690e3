"""Programs on several devices: what these send to each other, and what rows get, against dense weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from benches.engine.collectives import collectives
from support import Bench, dense_answer, make_head, make_task, method_tasks, random_delta, row_answer, shallow

from checkpoints.backbone import Backbone
from checkpoints.canonical import from_params
from jpets.config import BackboneConfig
from jpets.deltas.parts import regroup_planes
from jpets.engine.batch.bucket import Bucket, widest
from jpets.engine.device.replica import Replica
from jpets.engine.programs.mesh import MeshSlice
from jpets.engine.programs.program import Family, ProgramKey, compile_program
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.model.encoder import random_params
from jpets.types import Task
from pallas_kernels.masked_matmul import pack_planes

BUCKET = Bucket(160, ((14, 12),))


def of_shape(heads: int, columns: int) -> Backbone:
    """A random backbone of one layer, 48 wide, whose bit planes have 6 bytes a row."""
    config = BackboneConfig("bert", 800, 48, 1, heads, columns, 64)
    tensors = from_params(jax.tree.map(np.asarray, random_params(config)), config)
    return Backbone.of_tensors("odd", config, tensors, shallow().tokenizer_json)


def tasks_of(backbone: Backbone, methods: Sequence[str]) -> list[Task]:
    rng, config = np.random.default_rng(0), backbone.config
    return [
        make_task(backbone, method, [random_delta(method, config, at)], make_head(rng, config.hidden_size, 3))
        for at, method in enumerate(methods)
    ]


def run(backbone: Backbone, tasks: Sequence[Task], devices: int) -> Counter[str]:
    """Compares each task's row, and one without a task, with ``dense_answer``; gives the collectives."""
    bench, config = Bench(backbone, tasks), backbone.config
    family = Family(EncoderNetwork(config), "float32", tuple((key, own.slots) for key, own in bench.banks.items()))
    mesh = MeshSlice(jax.local_devices()[:devices], config.heads)
    replica = Replica(family, backbone.params, mesh)
    for task in tasks:
        for key, slot, contents in bench.contents(task):
            replica.write({key: (slot, contents)})
            for name, array in replica.read({key: slot})[key].items():
                np.testing.assert_array_equal(array, contents[name])
    program = compile_program(family, ProgramKey(BUCKET, widest(bench.banks, heavy=True)), mesh)
    rng = np.random.default_rng(1)
    named: list[str | None] = [None, *(task.id for task in tasks)]
    rows = [bench.row(each, rng.integers(5, config.vocab_size, 7 + at % 5)) for at, each in enumerate(named)]
    assembled = replica.assemble(rows, program)
    outputs = jax.tree.map(np.asarray, replica.dispatch(program, assembled))
    for query, (chosen, row) in enumerate(zip(named, rows, strict=True)):
        own_task = bench.tasks[chosen] if chosen is not None else None
        answer = row_answer(assembled, outputs, query, own_task.head.outputs if own_task else 0)
        expected = dense_answer(backbone, own_task, row.ids[row.lead.tokens :])
        what = "pooled" if own_task is None else "logits"
        np.testing.assert_allclose(answer[what], expected[what], atol=1e-4, err_msg=str(chosen))
    return collectives(program.compiled.as_text() or "")


def test_all_methods_on_four_devices() -> None:
    one_layer = shallow(layers=1)
    assert run(one_layer, method_tasks(one_layer), 4) == {"all-reduce": 2}


def test_sizes_that_cannot_be_split_evenly() -> None:
    """Four devices cannot share the 6 bytes of a row of bits, and three cannot share 40 columns."""
    bits, columns = of_shape(heads=4, columns=40), of_shape(heads=6, columns=40)
    assert run(bits, tasks_of(bits, ["mask", "onebit"]), 4) == {"all-reduce": 2}
    assert run(columns, tasks_of(columns, ["lora", "diff", "ia3"]), 3) == {"all-reduce": 1}


def test_planes_of_groups_of_columns() -> None:
    mask = np.random.default_rng(0).random((2, 5, 48)) < 0.5
    bits = regroup_planes(jnp.asarray(pack_planes(mask)), 1, 3)
    for at, own in enumerate(np.split(mask, 3, axis=-1)):
        np.testing.assert_array_equal(bits[..., 2 * at : 2 * at + 2], pack_planes(own))
    np.testing.assert_array_equal(regroup_planes(bits, 3, 1), pack_planes(mask))
