"""Fully fine-tuned checkpoints of ``tiny-bert``, as Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from support import FIXTURES

TINY = FIXTURES / "tiny-bert"
Change = Callable[[str, np.ndarray, np.random.Generator], np.ndarray]


def write_full(folder: Path, change: Change, *, labels: int = 3, seed: int = 5, **settings: Any) -> Path:
    """``change(name, tensor, rng)`` gives each tensor of the encoder; a random head stands above it."""
    rng = np.random.default_rng(seed)
    base = load_file(TINY / "model.safetensors")
    tensors = {f"bert.{name}": change(name, tensor, rng).astype(np.float32) for name, tensor in base.items()}
    tensors["classifier.weight"] = rng.normal(0, 0.3, (labels, 64)).astype(np.float32)
    tensors["classifier.bias"] = rng.normal(0, 0.3, labels).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((TINY / "config.json").read_text())
    names = {str(at): f"name-{at}" for at in range(labels)}
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": names, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    save_file(tensors, folder / "model.safetensors")
    return folder


def biases(name: str, tensor: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Only biases change."""
    return tensor + rng.normal(0, 0.1, tensor.shape) if name.endswith("bias") else tensor


def is_weight(name: str) -> bool:
    return name.endswith("weight") and (".dense." in name or ".self." in name)


def ranked(rank: int) -> Change:
    """Biases change, and weights by a matrix of ``rank``."""

    def change(name: str, tensor: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if is_weight(name):
            out, inputs = tensor.shape
            return tensor + rng.normal(0, 0.3, (out, rank)) @ rng.normal(0, 0.1, (rank, inputs))
        return biases(name, tensor, rng)

    return change


def everything(name: str, tensor: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Every weight and bias changes, embeddings and norms' scales too."""
    return tensor + rng.normal(0, 0.03, tensor.shape)


def weights_alone(name: str, tensor: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return tensor + rng.normal(0, 0.05, tensor.shape) if is_weight(name) else biases(name, tensor, rng)
