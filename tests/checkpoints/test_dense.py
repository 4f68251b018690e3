"""Dense modules of Sentence-Transformers folders, which become the layers of an embedding head."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from sentence_folder import USUAL, sentence_folder, write
from support import tiny

from checkpoints.imports.dense import MOST
from checkpoints.imports.heads import Wishes
from checkpoints.imports.task import extracted, make_task, read_model
from checkpoints.source import load_backbone
from checkpoints.task_file import read_task, task_to_bytes
from jpets.app.pretrained import Engine
from jpets.config import EngineSettings
from jpets.errors import InvalidBackbone, InvalidTask
from jpets.types import Embedding, Head, Query, Task

HIDDEN = tiny().config.hidden_size
FUNCTIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "Tanh": np.tanh,
    "Identity": lambda x: x,
    "ReLU": lambda x: np.maximum(x, 0),
}
TEXTS = ("a chess engine", "the library of functions", "soup")
Weights = tuple[np.ndarray, np.ndarray]


def dense_folder(
    folder: Path, layers: Sequence[tuple[str, int]], *, normalize: bool = True, biased: bool = True, **more: Any
) -> list[Weights]:
    """Writes a model with layers of (activation, numbers); their weights, as they multiply."""
    kinds = (*USUAL[:2], *["Dense"] * len(layers), *["Normalize"] * normalize)
    sentence_folder(folder, *kinds, settings={"max_seq_length": 16}, pooling={"pooling_mode": "mean"})
    rng, inputs, made = np.random.default_rng(3), HIDDEN, []
    for at, (activation, outputs) in enumerate(layers):
        place = folder / f"{at + 2}_Dense"
        place.mkdir()
        package = "linear" if activation == "Identity" else "activation"
        own = {"in_features": inputs, "out_features": outputs, "bias": biased}
        write(place / "config.json", {**own, "activation_function": f"torch.nn.modules.{package}.{activation}", **more})
        kernel = rng.normal(0, inputs**-0.5, (outputs, inputs)).astype(np.float32)
        bias = rng.normal(0, 0.3, outputs).astype(np.float32) * biased
        save_file({"linear.weight": kernel, **({"linear.bias": bias} if biased else {})}, place / "model.safetensors")
        made.append((kernel.T, bias))
        inputs = outputs
    return made


def dense_task(folder: Path) -> Task:
    return make_task("own", extracted(read_model(folder, tiny(), Wishes()), []), tiny())


SHAPES: list[tuple[list[tuple[str, int]], dict[str, Any], int]] = [
    ([("Tanh", 24)], {}, 0),
    ([("Tanh", 24)], {"normalize": False}, 0),
    ([("Identity", 96)], {"biased": False}, 0),
    ([("Identity", 40), ("Identity", 24)], {}, 0),  # become one layer
    ([("Identity", 40), ("ReLU", 24)], {}, 0),
    ([("ReLU", 40), ("Identity", 24)], {"module_input_name": "sentence_embedding", "use_residual": False}, 40),
    ([("Tanh", 40), ("Identity", 32), ("Identity", 24)], {}, 40),
]


def test_vectors_are_those_of_the_layers(tmp_path: Path) -> None:
    plain = Task("plain", tiny().ref(), (), Head("embedding", pooling="mean"))
    tasks, expected = [plain], []
    for at, (layers, how, dense) in enumerate(SHAPES):
        weights = dense_folder(tmp_path / str(at), layers, **how)
        task = dense_task(tmp_path / str(at))
        assert (task.head.outputs, task.head.dense, task.vector_size) == (layers[-1][1], dense, layers[-1][1])
        again = read_task(task_to_bytes(task), id=str(at), config=tiny().config, backbone=tiny().ref())
        tasks.append(again)
        expected.append((weights, layers, how.get("normalize", True)))
    settings = EngineSettings(dtype="float32", background_compile=False)
    with Engine.of_tasks(tiny(), tasks, settings) as engine:
        found = engine.start().infer([Query(task.id, text) for task in tasks for text in TEXTS])
    vectors = [own.embedding for own in found if isinstance(own, Embedding)]
    assert len(vectors) == len(found)
    pooled = np.stack(vectors[: len(TEXTS)])
    for at, (weights, layers, unit) in enumerate(expected, start=1):
        vector = pooled
        for (kernel, bias), (activation, _) in zip(weights, layers, strict=True):
            vector = FUNCTIONS[activation](vector @ kernel + bias)
        if unit:
            vector = vector / np.linalg.norm(vector, axis=-1, keepdims=True)
        np.testing.assert_allclose(np.stack(vectors[at * len(TEXTS) :][: len(TEXTS)]), vector, atol=1e-5)


REFUSED: list[tuple[list[tuple[str, int]], Mapping[str, Any], str]] = [
    ([("Tanh", 24), ("Tanh", 24)], {}, "expected one activation among the Dense modules, found tanh, tanh"),
    ([("Softplus", 24)], {}, r"2_Dense/config\.json: activation_function must be one of torch\.nn's"),
    ([("Tanh", 24)], {"activation_function": "os.system"}, "activation_function must be one of"),
    ([("Tanh", 24)], {"use_residual": True}, "use_residual must be False, found 'True'"),
    ([("Tanh", 24)], {"module_input_name": "token_embeddings"}, "module_input_name must be sentence_embedding"),
    ([("Tanh", 24)], {"in_features": 3}, "in_features must be 64, which comes before it, found 3"),
    ([("Tanh", 24)], {"something_new": 3}, "something_new: 3 is not supported for a Dense module"),
    ([("Tanh", 24)], {"bias": False}, r"2_Dense: linear\.bias: not understood"),
]


@pytest.mark.parametrize(("layers", "more", "named"), REFUSED)
def test_layers_of_another_kind_are_refused_by_name(
    layers: list[tuple[str, int]], more: dict[str, Any], named: str, tmp_path: Path
) -> None:
    dense_folder(tmp_path / "own", layers)
    file = tmp_path / "own" / "2_Dense" / "config.json"
    write(file, {**json.loads(file.read_text()), **more})
    with pytest.raises(InvalidTask, match=named):
        dense_task(tmp_path / "own")


@pytest.mark.parametrize("fault", ["shape", "numbers", "missing", "configuration"])
def test_broken_layers_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    dense_folder(tmp_path / "own", [("Tanh", 24)])
    place = tmp_path / "own" / "2_Dense"
    weights = {"linear.weight": np.zeros((24, HIDDEN), np.float32), "linear.bias": np.zeros(24, np.float32)}
    if fault == "missing":
        (place / "model.safetensors").unlink()
    elif fault == "configuration":
        (place / "config.json").unlink()
    elif fault == "shape":
        save_file(weights | {"linear.bias": np.zeros(5, np.float32)}, place / "model.safetensors")
    else:
        save_file(weights | {"linear.bias": np.full(24, np.nan, np.float32)}, place / "model.safetensors")
    named = {
        "shape": r"2_Dense: linear\.bias: expected \[24\], found \[5\]",
        "numbers": r"2_Dense: linear\.bias: expected finite numbers",
        "missing": "2_Dense: expected model.safetensors or pytorch_model.bin in the folder",
        "configuration": r"2_Dense: expected config\.json in the folder, found none",
    }[fault]
    with pytest.raises(InvalidTask, match=named):
        dense_task(tmp_path / "own")


def test_a_broken_layer_before_another_one(tmp_path: Path) -> None:
    dense_folder(tmp_path / "own", [("Identity", 40), ("Identity", 24)])
    (tmp_path / "own" / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(InvalidTask, match=r"2_Dense: expected model\.safetensors"):
        dense_task(tmp_path / "own")


def test_very_many_layers_are_not_read(tmp_path: Path) -> None:
    dense_folder(tmp_path / "own", [("Tanh", 24)])
    file = tmp_path / "own" / "modules.json"
    modules = json.loads(file.read_text())
    write(file, [*modules[:2], *[modules[2]] * (MOST + 1), modules[3]])
    with pytest.raises(InvalidTask, match=f"expected at most {MOST} Dense modules, found {MOST + 1}"):
        dense_task(tmp_path / "own")


def test_a_backbone_has_no_layers_of_its_own(tmp_path: Path) -> None:
    dense_folder(tmp_path / "own", [("Tanh", 24)])
    with pytest.raises(InvalidBackbone, match=r"found Dense, which tasks can have; for tasks alone"):
        load_backbone(tmp_path / "own")
