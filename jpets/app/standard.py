"""Tasks of standard shapes: a server makes room for them before it has seen any task of its own."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import numpy as np

from jpets.deltas import METHODS
from jpets.errors import InvalidTask
from jpets.types import BackboneRef, Delta, Head, HeadType, LoadedBackbone, Pooling, Task

log = logging.getLogger(__name__)
SCALE = 0.02


def standard_methods() -> Sequence[str]:
    """The methods with ``usual`` settings that a server makes room for: the sizes of PetS's Table 4."""
    return [name for name, method in METHODS.items() if method.standard]


def standard_tasks(backbone: LoadedBackbone) -> list[Task]:
    """One random task of each method that the backbone can have, with the common heads: 8 and 32 labels, 32 labels on
    tokens, two layers.

    Heads that answer questions fit where those of labels on tokens do.
    They are meant for ``Engine(reserve=...)``, which uses only their shapes.
    """
    config = backbone.config
    rng = np.random.default_rng(0)
    ref = BackboneRef.of(backbone)
    heads = [
        _head(8, config.hidden_size),
        _head(32, config.hidden_size),
        _head(32, config.hidden_size, "token-classification"),
        _head(8, config.hidden_size, two_layers=True),
        Head("embedding"),
    ]
    deltas: dict[str, Delta] = {}
    for name in standard_methods():
        try:
            deltas[name] = METHODS[name].init(rng, METHODS[name].usual, config, SCALE)
        except InvalidTask as error:
            log.warning("no room is made for a method: %s", error)
    return [
        Task(f"standard-{name}", ref, (delta,), head, _labels(head))
        for (name, delta), head in zip(deltas.items(), itertools.cycle(heads), strict=False)
    ]


def _head(outputs: int, hidden: int, type: HeadType = "sequence-classification", two_layers: bool = False) -> Head:
    tensors = {"kernel": np.zeros((hidden, outputs), np.float32), "bias": np.zeros(outputs, np.float32)}
    if two_layers:
        tensors |= {"dense_kernel": np.zeros((hidden, hidden), np.float32), "dense_bias": np.zeros(hidden, np.float32)}
    pooling: Pooling = "cls"
    return Head(type, tensors, pooling=pooling)


def _labels(head: Head) -> tuple[str, ...]:
    return tuple(f"LABEL_{number}" for number in range(head.outputs))
