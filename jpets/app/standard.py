"""Tasks of standard shapes: what a server makes room for before it has seen any task of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jpets.deltas import METHODS
from jpets.types import BackboneRef, Delta, Head, HeadType, LoadedBackbone, Pooling, Task

STANDARD_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "adapter": {"bottleneck": 64},
    "lora": {"rank": 8, "sites": ["query", "value"]},
    "bitfit": {},
    "mask": {},
    "diff": {"density": 0.005},
}
"""The sizes of PetS's Table 4: Houlsby adapters, LoRA on query and value, everything at all sites otherwise."""
SCALE = 0.02


def standard_tasks(backbone: LoadedBackbone) -> list[Task]:
    """One random task of each method, with the heads in use: 8 and 32 labels, 32 labels on tokens, two layers.

    Heads that answer questions fit where those of labels on tokens do.
    They are meant for ``Engine(reserve=...)``, which takes their shapes only.
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
    return [
        Task(f"standard-{name}", ref, (_delta(name, settings, backbone, rng),), head, _labels(head))
        for (name, settings), head in zip(STANDARD_SETTINGS.items(), heads, strict=True)
    ]


def _delta(name: str, settings: Mapping[str, Any], backbone: LoadedBackbone, rng: np.random.Generator) -> Delta:
    return METHODS[name].init(rng, settings, backbone.config, SCALE)


def _head(outputs: int, hidden: int, type: HeadType = "sequence-classification", two_layers: bool = False) -> Head:
    tensors = {"kernel": np.zeros((hidden, outputs), np.float32), "bias": np.zeros(outputs, np.float32)}
    if two_layers:
        tensors |= {"dense_kernel": np.zeros((hidden, hidden), np.float32), "dense_bias": np.zeros(hidden, np.float32)}
    pooling: Pooling = "cls"
    return Head(type, tensors, pooling=pooling)


def _labels(head: Head) -> tuple[str, ...]:
    return tuple(f"LABEL_{number}" for number in range(head.outputs))
