"""Dense modules of a Sentence-Transformers folder: layers between the pooled vector and the embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from checkpoints.canonical import FloatArray
from checkpoints.imports.heads import read_linear
from checkpoints.imports.tensor_files import read_one_of
from checkpoints.imports.unread import Problems, Unread
from checkpoints.sentence import torch_class
from checkpoints.settings import expect, expect_count, names, read_json, unsupported
from checkpoints.tensors import SAFETENSORS, TORCH
from jpets.errors import InvalidBackbone, InvalidTask
from jpets.types import Tensors

CONFIG = "config.json"
KEYS = names("in_features out_features bias activation_function module_input_name module_output_name use_residual")
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"Tanh": "tanh", "Identity": "identity", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
)
"""By their classes in ``torch.nn``."""
DEFAULT = "torch.nn.modules.activation.Tanh"
VECTOR = "sentence_embedding"
MOST = 8
"""Modules of a folder."""


class _Layer(NamedTuple):
    kernel: FloatArray
    bias: FloatArray
    activation: str


def read_dense(folder: Path, places: Sequence[str], inputs: int, problems: list[str]) -> tuple[Tensors, str]:
    """The tensors of a head that does what the modules in the folders ``places`` do one after the other, and its
    activation. ``inputs`` are the numbers of a pooled vector.

    A layer without an activation is joined with the next one. Two layers may be left if the last has none.
    """
    if len(places) > MOST:
        problems.append(f"modules.json: expected at most {MOST} Dense modules, found {len(places)}")
        return {}, "identity"
    every: list[_Layer] = []
    for place in places:
        every.append(_read(folder / place, inputs, problems))
        inputs = every[-1].kernel.shape[1]
    if problems:
        return {}, "identity"
    layers = every[:1]
    for layer in every[1:]:
        layers = [*layers[:-1], _joined(layers[-1], layer)] if _linear(layers[-1]) else [*layers, layer]
    if len(layers) == 1:
        return {"kernel": layers[0].kernel, "bias": layers[0].bias}, layers[0].activation
    first, last = layers[0], layers[-1]
    if len(layers) > 2 or not _linear(last):
        found = ", ".join(layer.activation for layer in layers)
        problems.append(f"modules.json: expected one activation among the Dense modules, found {found}")
    dense = {"dense_kernel": first.kernel, "dense_bias": first.bias, "kernel": last.kernel, "bias": last.bias}
    return dense, first.activation


def _read(folder: Path, inputs: int, problems: list[str]) -> _Layer:
    try:
        return _read_files(folder, inputs, problems)
    except (InvalidTask, InvalidBackbone) as error:
        problems.append(f"{folder.name}: {error.message}")
        return _Layer(np.zeros((inputs, 0), np.float32), np.zeros(0, np.float32), "identity")


def _read_files(folder: Path, inputs: int, problems: list[str]) -> _Layer:
    settings, file = read_json(folder / CONFIG), f"{folder.name}/{CONFIG}"
    own = list(unsupported(settings, KEYS, "a Dense module"))
    for option, expected in (("module_input_name", VECTOR), ("module_output_name", VECTOR), ("use_residual", False)):
        if settings.get(option) not in (None, expected):
            own.append(f"{option} must be {expected}, found {str(settings[option])[:80]!r}")
    if expect_count(settings, "in_features", inputs, own) != inputs:
        own.append(f"in_features must be {inputs}, which comes before it, found {settings['in_features']}")
    written = settings.get("activation_function", DEFAULT)
    activation = ACTIVATIONS.get(torch_class(written) or "")
    if activation is None:
        own.append(f"activation_function must be one of torch.nn's {sorted(ACTIVATIONS)}, found {str(written)[:80]!r}")
    biased = expect(settings, "bias", bool, True, own)
    problems += [f"{file}: {each}" for each in own]
    found: list[str] = []
    tensors = Unread(read_one_of(folder, (SAFETENSORS, TORCH)), Problems(found, found))
    kernel, bias = read_linear(tensors, "linear", inputs, biased=biased)
    tensors.refuse_rest("not understood in a Dense module")
    problems += [f"{folder.name}: {each}" for each in found]
    return _Layer(kernel, bias, activation or "identity")


def _linear(layer: _Layer) -> bool:
    return layer.activation == "identity"


def _joined(first: _Layer, second: _Layer) -> _Layer:
    """Both as one layer, where the first has no activation."""
    wide = first.kernel.astype(np.float64), second.kernel.astype(np.float64)
    kernel, bias = wide[0] @ wide[1], first.bias @ wide[1] + second.bias
    return _Layer(kernel.astype(np.float32), bias.astype(np.float32), second.activation)
