"""Encoders of the BERT family as programs use them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Int

from jpets.config import LINEAR_SITES, BackboneConfig, DType
from jpets.deltas import METHODS, class_method, merge_deltas
from jpets.deltas.bank import lower_task
from jpets.deltas.fold import fold_pooler
from jpets.deltas.merge import FUSED
from jpets.deltas.parts import by_device
from jpets.deltas.protocol import ClassKey, Contribution
from jpets.deltas.sites import BoundClass
from jpets.deltas.view import ClassView
from jpets.engine.batch.bucket import Bucket, Variant, capacity, replaces_weights, windowed
from jpets.engine.batch.rows import TokenInput
from jpets.engine.programs.delta_order import Execution, delta_order
from jpets.engine.programs.network import BankArrays, Link, Network, Params, State
from jpets.engine.workloads.encoder_chain import encoder_chain, link_params, run_link
from jpets.model.batch import PackedBatch
from jpets.model.encoder import SplitEncoder, cast_params, split
from jpets.model.forward import Outputs, forward, forward_above
from jpets.scheduling.costs.measured_profile import attention_cells
from jpets.types import Task

HEAVY_LOOP = 0.1
"""Cost of the loops over one heavy class without any row of it, as a share of the bare cost (measured on a CPU)."""
ATTENTION = 5
"""Time of a multiply-add in attention over one in a linear site (measured on a CPU); softmax is included."""
FEW_WORDS = 4096
"""Words of a network that is only measured: a token looks up one of them, however many there are."""
INPUTS = {"ids": TokenInput(), "types": TokenInput()}
SPLIT_AXES: Mapping[str, tuple[str | None, ...]] = {
    "qkv": ("hidden", "heads"),
    "attn_out": ("heads", "hidden"),
    "ffn_in": ("hidden", "columns"),
    "ffn_out": ("columns", "hidden"),
}


@dataclasses.dataclass(frozen=True)
class EncoderNetwork(Network):
    """It has more than 20 methods, as every ``Network``."""

    config: BackboneConfig
    kind: ClassVar[str] = "encoder"

    @property
    def inputs(self) -> Mapping[str, TokenInput]:
        return INPUTS

    @property
    def split_axes(self) -> Mapping[str, Sequence[str | None]]:
        return SPLIT_AXES

    @functools.cached_property
    def _encoder(self) -> SplitEncoder:
        """Taken apart once: every program that is loaded or traced needs it."""
        return split(self.config)

    @property
    def mapped(self) -> Sequence[str]:
        return ("table",) if self.config.table_rows else ()

    def cast(self, params: Params, dtype: DType) -> Params:
        if self.config.looks_up:  # no token comes as a word
            params = {name: own for name, own in params.items() if name != "word"}
        return cast_params(params, dtype)

    def arranged(self, params: Params, devices: int) -> Params:
        if devices == 1:
            return params
        layers = {
            at: {**own, "qkv": by_device(own["qkv"], len(FUSED), devices)} for at, own in params["layers"].items()
        }
        return {**params, "layers": layers}

    def abstract_params(self, dtype: DType) -> Params:
        return jax.eval_shape(functools.partial(self.cast, dtype=dtype), self._encoder.abstract_params())

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
    ) -> tuple[State, Outputs]:
        bound = bound_classes(self.config, bucket, variant, execution, banks, views)
        return state, forward(self._encoder, params, batch, bound, execution.operators)

    @property
    def has_trunk(self) -> bool:
        return not self.config.looks_up and type(self).run is EncoderNetwork.run

    def run_above(
        self,
        layers: int,
        below: PackedBatch,
        bucket: Bucket,
        variant: Variant,
        execution: Execution,
        params: Params,
        banks: Sequence[BankArrays],
        batch: PackedBatch,
        views: Sequence[ClassView],
    ) -> Outputs:
        bound = bound_classes(self.config, bucket, variant, execution, banks, views)
        return forward_above(self._encoder, params, layers, below, batch, bound, execution.operators)

    def chain(self, variant: Variant) -> Sequence[Link]:
        """Embeddings, each layer, and what is read of the last one. Layers on which the same classes act are one
        function, if every class says that its operators allow it.

        Without deltas a program is one function: XLA then compiles what layers have in common only once, so that all of
        MiniLM's take a second more than one, and each of its batches gains a tenth.
        """
        own_run = type(self).run is not EncoderNetwork.run
        methods = [class_method(key.method) for key in variant.classes()]
        plain = all(method.kind == "head" for method in methods)
        if own_run or plain or not all(method.shares_layers for method in methods):
            return ()
        return encoder_chain(self.config, variant)

    def link_params(self, link: Link, params: Params) -> Params:
        return link_params(link, params)

    def run_link(
        self,
        link: Link,
        bucket: Bucket,
        variant: Variant,
        execution: Execution,
        params: Params,
        banks: Sequence[BankArrays],
        carried: Any,
        moved: Int[Array, " m"],
        batch: PackedBatch,
        views: Sequence[ClassView],
    ) -> Any:
        bound = bound_classes(self.config, bucket, variant, execution, banks, views, link.classes, moved[1:])
        return run_link(link, self._encoder, params, carried, moved[0], batch, bound, execution.operators)

    def outputs(self, variant: Variant) -> Outputs:
        heads = sum(class_method(of.method).kind == "head" for of in variant.classes())
        return Outputs(0, 0, (0,) * heads)  # type: ignore[arg-type]

    def arithmetic(self, bucket: Bucket, variant: Variant, *, static_runs: bool = False) -> float:
        """Multiply-adds; those of attention are weighted. Products that the variant leaves out do not count."""
        d, layers = self.config.hidden_size, self.config.layers
        attention = ATTENTION * 2 * d * attention_cells(bucket.groups)
        total = layers * (bucket.tokens * self.config.layer_weights() + attention)
        heavy = [key for key in variant.classes() if class_method(key.method).kind == "heavy"]
        if static_runs:
            run = bucket.run(variant.run)
            rooms = (bucket.run_room(variant.run, variant.level(key)) * self._weights([key]) for key in heavy)
            total += run * sum(rooms)
        else:
            total = int(total * (1 + HEAVY_LOOP * len(heavy)))
        if variant.replaced:
            total -= bucket.tokens * self._weights([key for key in heavy if replaces_weights(key)])
        for key in variant.classes():
            if windowed(key):
                length = bucket.longest if bucket.rectangular else bucket.segment
                cells = capacity(bucket, variant.level(key)) * length
                total += cells * sum(2 * d * size for _, size in key.sites) * len(key.layers)
        return float(total)

    def _weights(self, classes: Iterable[ClassKey]) -> int:
        """Weights of the layers' sites where these classes act."""
        places = {
            (layer, site) for key in classes for site, _ in key.sites if site in LINEAR_SITES for layer in key.layers
        }
        return sum(math.prod(self.config.dims(site)) for _, site in places)

    def base_bias(self, params: Params) -> npt.NDArray[np.float32]:
        return np.asarray(params["bias"], np.float32)

    def lower(self, task: Task, params: Params) -> tuple[Task, Sequence[Contribution]]:
        folded = fold_pooler(task, self.config, params)
        return folded, lower_task(folded, self.config)

    def merge_target(self, params: Params) -> Params:
        return {"layers": params["layers"]}

    def merged(self, task: Task, params: Params, dtype: DType) -> Params:
        held = [delta for delta in task.deltas if METHODS[delta.method].in_copies]
        computed = {name: each for name, each in params.items() if name != "table"}  # which may be larger than a device
        merged = merge_deltas(held, self.config, jax.tree.map(jnp.asarray, computed))
        return cast_params(self.merge_target(merged), dtype)

    def shortened(self, layers: int) -> Self:
        words, rows = (min(FEW_WORDS, count) for count in (self.config.vocab_size, self.config.table_rows))
        config = dataclasses.replace(self.config, layers=layers, vocab_size=words, table_rows=rows)
        return dataclasses.replace(self, config=config)

    def sample(self, rng: np.random.Generator, length: int) -> Mapping[str, npt.NDArray[Any]]:
        most = min(FEW_WORDS, self.config.table_rows) if self.config.looks_up else self.config.vocab_size
        ids = rng.integers(0, most, length).astype(np.int32)
        return {"ids": ids, "types": np.zeros_like(ids)}


def bound_classes(
    config: BackboneConfig,
    bucket: Bucket,
    variant: Variant,
    execution: Execution,
    banks: Sequence[BankArrays],
    views: Sequence[ClassView],
    classes: Sequence[ClassKey] | None = None,
    moved: Sequence[int] | Int[Array, " c"] | None = None,
) -> list[BoundClass]:
    """The ``classes`` of a variant, by default all, with their banks and views, in the order in which they act;
    ``moved`` has ``BoundClass.moved`` of each."""
    classes = variant.classes() if classes is None else classes
    moved = [0] * len(classes) if moved is None else moved
    replaced = {of for of in variant.classes() if variant.replaced and replaces_weights(of)}
    bound = {
        of: BoundClass(
            of,
            bank,
            view,
            class_method(of.method),
            moved=moved[at],
            replaces=of in replaced,
            operators=execution.operators.of_class(str(of)),
        )
        for at, (of, bank, view) in enumerate(zip(classes, banks, views, strict=True))
    }
    turns = [turn for turn in delta_order(config, bucket, variant, execution.streams) if turn.key in bound]
    ordered = [dataclasses.replace(bound.pop(turn.key), stream=turn.stream) for turn in turns]
    return [*ordered, *bound.values()]
