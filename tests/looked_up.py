"""A second kind of model, as small as can be: the host looks up a vector for each token, and the upper layer of an
encoder runs over them twice, in two batches. Nothing but this file and its row in ``WORKLOADS`` knows of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from support import make_head, make_task, random_delta, shallow

from jpets.config import BackboneConfig
from jpets.deltas import merge_deltas
from jpets.deltas.view import ClassView
from jpets.engine.batch.assembly import assemble
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.batch.rows import Row, TokenInput
from jpets.engine.programs.delta_order import Execution
from jpets.engine.programs.network import BankArrays, Network, Params, State
from jpets.engine.tasks.entries import Resident
from jpets.engine.workloads.encoder import EncoderWorkload
from jpets.engine.workloads.encoder_network import EncoderNetwork, bound_classes
from jpets.engine.workloads.workload import Again, Place
from jpets.model import forward
from jpets.model.batch import PackedBatch
from jpets.model.encoder import split
from jpets.types import LoadedBackbone, Query, Result, Task, Timing


class LookedUpOutputs(NamedTuple):
    read: forward.Outputs
    hidden: jax.Array
    batches: jax.Array
    """How many there were before."""


@dataclasses.dataclass(frozen=True)
class LookedUpNetwork(EncoderNetwork):
    kind: ClassVar[str] = "looked-up"

    @property
    def inputs(self) -> Mapping[str, TokenInput]:
        return {"vectors": TokenInput(np.float32, (self.config.hidden_size,))}

    def initial_state(self) -> State:
        return {"batches": jnp.zeros((), jnp.int32)}

    def run(
        self,
        bucket: Bucket,
        variant: Variant,
        execution: Execution,
        params: Params,
        banks: Sequence[BankArrays],
        state: State,
        batch: PackedBatch,
        views: Sequence[ClassView],
    ) -> tuple[State, Any]:
        bound = bound_classes(self.config, bucket, variant, execution, banks, views)
        encoder = split(self.config)
        sites, model = forward.bind_sites(encoder, params, batch, bound), encoder.bind(params)
        hidden = model.upper(self.config.layers - 1, batch.inputs["vectors"], batch, sites)
        read = forward.read_out(model, hidden, batch, sites, bound)
        return {"batches": state["batches"] + 1}, LookedUpOutputs(read, hidden, state["batches"])

    def outputs(self, variant: Variant) -> Any:
        return LookedUpOutputs(super().outputs(variant), 0, 0)  # type: ignore[arg-type]

    def sample(self, rng: np.random.Generator, length: int) -> Mapping[str, npt.NDArray[Any]]:
        return {"vectors": rng.standard_normal((length, self.config.hidden_size)).astype(np.float32)}


class LookedUpWorkload(EncoderWorkload):
    """A row comes as token ids; for its first step they are looked up, for its second it has vectors of its own."""

    def __init__(self, backbone: LoadedBackbone, longest: int, *, staged_rows: int = 0) -> None:
        super().__init__(backbone, longest, staged_rows=staged_rows)
        self.table = np.asarray(backbone.params["word"], np.float32)
        self.steps: list[int] = []
        """Batches before that of each step of each query."""

    @classmethod
    def make_network(cls, config: BackboneConfig) -> Network:
        return LookedUpNetwork(config)

    @property
    def inputs(self) -> Mapping[str, TokenInput]:
        return self.network.inputs

    def row(self, query: Query, resident: Resident | None) -> Row:
        row = super().row(query, resident)
        return dataclasses.replace(row, inputs={"ids": row.ids})

    def gathered(self, rows: Sequence[Row]) -> Sequence[Row]:
        return [
            dataclasses.replace(row, inputs={"vectors": self.table[row.ids]}) if "ids" in row.inputs else row
            for row in rows
        ]

    def result(self, task: Task | None, row: Row, outputs: Any, place: Place, timing: Timing) -> Result | Again:
        self.steps.append(int(outputs.batches))
        if "ids" in row.inputs:
            own = slice(place.first_token, place.first_token + row.length)
            return Again(dataclasses.replace(row, inputs={"vectors": outputs.hidden[own]}))
        return super().result(task, row, outputs.read, place, timing)


def two_tasks() -> list[Task]:
    """Of a light method and a heavy one."""
    config, rng = shallow().config, np.random.default_rng(3)
    return [
        make_task(shallow(), name, [random_delta(name, config, at)], make_head(rng, config.hidden_size, 3))
        for at, name in enumerate(("lora", "mask"))
    ]


def expected(task: Task, ids: np.ndarray) -> np.ndarray:
    """Logits, from merged weights and one row alone."""
    config = shallow().config
    params = merge_deltas(task.deltas, config, jax.tree.map(jnp.asarray, dict(shallow().params)))
    x = jnp.asarray(shallow().params["word"], jnp.float32)[ids]
    row, encoder = Row({}, {}, 0, len(ids)), split(config)
    batch = assemble([row], Bucket(len(ids), ((1, len(ids)),)), Variant(), {}).batch
    batch = jax.tree.map(jnp.asarray, batch)
    for _ in range(2):
        x = encoder.bind(params).upper(config.layers - 1, x, batch, forward.bind_sites(encoder, params, batch))
    pooled = {"cls": x[0], "mean": x.mean(0)}[task.head.pooling]
    return np.asarray(pooled @ task.head.tensors["kernel"] + task.head.tensors["bias"])
