"""A model whose programs compute nothing: with it, only the host's work for a batch takes time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from unittest.mock import patch

import jax
import jax.numpy as jnp

from benches.shared import LABELS, RandomBackbone
from jpets.config import BackboneConfig
from jpets.deltas import class_method
from jpets.deltas.view import ClassView
from jpets.engine.batch.bucket import Bucket, Variant
from jpets.engine.programs.delta_order import Execution
from jpets.engine.programs.network import BankArrays, Network, Params, State
from jpets.engine.workloads.encoder import EncoderWorkload
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.engine.workloads.registry import WORKLOADS
from jpets.model.batch import PackedBatch
from jpets.model.forward import Outputs

KIND = "null"


@dataclasses.dataclass(frozen=True)
class NullNetwork(EncoderNetwork):
    """Reads one number of each argument of an encoder's program, as the compiler removes arguments that are not used,
    and gives as many outputs. Pooled vectors, which queries with a head do not need, have length 1."""

    kind: ClassVar[str] = KIND

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
        leaves = jax.tree.leaves((params, banks, batch, views))
        one = jnp.isfinite(jnp.stack([leaf[(0,) * leaf.ndim].astype(jnp.float32) for leaf in leaves]).sum())
        heads = sum(class_method(key.method).kind == "head" for key in variant.classes())
        logits = tuple(jnp.full((bucket.rows, 1, LABELS), one, jnp.float32) for _ in range(heads))
        return state, Outputs(jnp.full((bucket.rows, 1), one, jnp.float32), jnp.full(bucket.rows, True), logits)


class NullWorkload(EncoderWorkload):
    @classmethod
    def make_network(cls, config: BackboneConfig) -> Network:
        return NullNetwork(config)


@contextlib.contextmanager
def null_backbone(backbone: RandomBackbone) -> Iterator[RandomBackbone]:
    """``backbone`` as one of a kind that computes nothing; the kind is known as long as the context is open."""
    with patch.dict(WORKLOADS, {KIND: NullWorkload}):
        yield dataclasses.replace(backbone, kind=KIND)
