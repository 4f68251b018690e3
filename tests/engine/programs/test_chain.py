"""Programs whose layers are one compiled function: the same numbers as of one function for the whole network."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from support import Bench, light_or_mask_task, make_head, make_task, method_tasks, random_delta, shallow, tiny

from checkpoints.backbone import Backbone
from checkpoints.canonical import from_params
from jpets.config import BackboneConfig
from jpets.deltas.lora import Lora
from jpets.engine.batch.bucket import Bucket, Variant, widest
from jpets.engine.batch.rows import Row
from jpets.engine.device.replica import Replica
from jpets.engine.programs.chain import Chain
from jpets.engine.programs.mesh import first_device
from jpets.engine.programs.program import Family, Program, ProgramKey, chain_of, compile_program
from jpets.engine.programs.store import ProgramStore
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.model.encoder import random_params
from jpets.types import Task

PACKED = Bucket(288, ((22, 12), (2, 20)))
EQUAL = Bucket(16 * 20, ((20, 16),))


class Running:
    """Tasks on a device, and a row of each and one without a task."""

    def __init__(self, backbone: Backbone, tasks: Sequence[Task]) -> None:
        bench, config = Bench(backbone, tasks), backbone.config
        self.classes = tuple(bench.banks)
        slots = tuple((key, own.slots) for key, own in bench.banks.items())
        self.family = Family(EncoderNetwork(config), "float32", slots, chained=True)
        self.replica = Replica(self.family, backbone.params, first_device())
        for task in tasks:
            for key, slot, contents in bench.contents(task):
                self.replica.write({key: (slot, contents)})
        rng = np.random.default_rng(1)
        named: list[str | None] = [None, *(task.id for task in tasks)]
        lengths = [7 + at % 5 for at in range(len(named))]
        self.rows: list[Row] = [
            bench.row(each, rng.integers(5, config.vocab_size, length))
            for each, length in zip(named, lengths, strict=True)
        ]

    def key(self, bucket: Bucket) -> ProgramKey:
        return ProgramKey(bucket, widest(self.classes, heavy=True))

    def outputs(self, program: Program) -> Any:
        return jax.tree.map(np.asarray, self.replica.dispatch(program, self.replica.assemble(self.rows, program)))

    def whole(self, key: ProgramKey) -> Any:
        return self.outputs(compile_program(dataclasses.replace(self.family, chained=False), key))


def deep() -> Backbone:
    """A random backbone of four layers."""
    config = BackboneConfig("bert", 800, 64, 4, 4, 96, 64)
    tensors = from_params(jax.tree.map(np.asarray, random_params(config)), config)
    return Backbone.of_tensors("deep", config, tensors, shallow().tokenizer_json)


def in_layers(backbone: Backbone) -> list[Task]:
    """Tasks of some layers each, so that layers differ in the classes that act on them, or in the entries of these."""
    rng, config = np.random.default_rng(0), backbone.config
    chosen = {"lora": (1, 3), "adapter": (2, 3), "mask": (0, 3), "diff": (1,), "prefix": (0, 1, 3), "ia3": (3,)}
    return [
        make_task(backbone, name, [random_delta(name, config, at, layers=list(own))], make_head(rng, 64, 3))
        for at, (name, own) in enumerate(chosen.items())
    ] + [make_task(backbone, "bitfit", [random_delta("bitfit", config, 9)], make_head(rng, 64, 2, pooling="mean"))]


def same(ours: Any, whole: Any) -> None:
    for own, other in zip(jax.tree.leaves(ours), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(own, other, atol=2e-5)


@pytest.mark.parametrize("bucket", [PACKED, EQUAL], ids=["packed", "equal"])
@pytest.mark.parametrize("name", ["tiny-bert", "tiny-electra", "tiny-distilbert", "tiny-roberta"])
def test_all_methods(name: str, bucket: Bucket) -> None:
    backbone = tiny(name)
    running = Running(backbone, method_tasks(backbone))
    key = running.key(bucket)
    program = compile_program(running.family, key)
    assert [link.name for link in chain_of(running.family, key)] == ["embed", "layer 0", "read"]
    same(running.outputs(program), running.whole(key))


def test_layers_that_differ_in_their_classes() -> None:
    backbone = deep()
    running = Running(backbone, in_layers(backbone))
    key = running.key(PACKED)
    assert len(chain_of(running.family, key)) == 2 + 4
    same(running.outputs(compile_program(running.family, key)), running.whole(key))


def test_layers_that_differ_in_their_entries() -> None:
    """A class of layers 1 and 3 has two entries, and a function for both of them."""
    backbone = deep()
    lora, bitfit = (task for task in in_layers(backbone) if task.id in ("lora", "bitfit"))
    running = Running(backbone, [lora, bitfit])
    running.rows = [running.rows[at] for at in (0, 1, 2, 1, 1, 2)]
    key = running.key(PACKED)
    assert [link.name for link in chain_of(running.family, key)] == ["embed", "layer 0", "layer 1", "read"]
    same(running.outputs(compile_program(running.family, key)), running.whole(key))


def test_a_kept_chain_is_loaded(tmp_path: pathlib.Path) -> None:
    backbone = shallow()
    running = Running(backbone, method_tasks(backbone))
    store, key = ProgramStore(tmp_path, first_device()), running.key(EQUAL)
    program = compile_program(running.family, key)
    store.save(running.family, program)
    loaded = store.load(running.family, key)
    assert loaded is not None
    assert isinstance(loaded.compiled, Chain)
    assert store.load(dataclasses.replace(running.family, chained=False), key) is None
    for own, other in zip(*(jax.tree.leaves(running.outputs(p)) for p in (loaded, program)), strict=True):
        np.testing.assert_array_equal(own, other)


def test_memory_of_a_chain() -> None:
    """It needs no more at a time than the whole does, nor less than its largest array."""
    backbone = deep()
    running = Running(backbone, method_tasks(backbone))
    key = running.key(EQUAL)
    chain = compile_program(running.family, key).memory
    whole = compile_program(dataclasses.replace(running.family, chained=False), key).memory
    widest_array = 4 * EQUAL.tokens * backbone.config.intermediate_size
    assert widest_array < chain.temp_size_in_bytes < 2 * whole.temp_size_in_bytes
    assert chain.output_size_in_bytes == pytest.approx(whole.output_size_in_bytes, rel=0.1)


def test_a_method_that_asks_for_the_layer_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operators would compute every layer as the first: its programs are one function."""
    lora = light_or_mask_task(1)
    running = Running(shallow(), [lora])
    key = running.key(EQUAL)
    assert chain_of(running.family, key)
    monkeypatch.setattr(Lora, "shares_layers", False)
    assert not isinstance(compile_program(running.family, key).compiled, Chain)


def test_a_program_without_deltas_is_one_function() -> None:
    headed = dataclasses.replace(light_or_mask_task(1), deltas=())
    running = Running(shallow(), [headed])
    for key in (ProgramKey(EQUAL, Variant()), running.key(EQUAL)):
        assert not chain_of(running.family, key)
        assert not isinstance(compile_program(running.family, key).compiled, Chain)


class OwnNetwork(EncoderNetwork):
    """It computes something else than an encoder does."""

    def run(self, *arguments: Any) -> Any:
        raise NotImplementedError


def test_a_network_with_a_run_of_its_own_is_no_chain() -> None:
    assert not OwnNetwork(shallow().config).chain(Variant())
