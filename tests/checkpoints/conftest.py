"""Small backbones and tasks for these tests, made on the spot."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from checkpoints.canonical import canonical_shapes
from checkpoints.families import PARTS, tensor_names
from checkpoints.repository import Repository
from checkpoints.task_file import task_to_bytes
from jpets.config import BackboneConfig
from jpets.deltas import METHODS
from jpets.types import BackboneRef, Head, Task

Arrays = dict[str, np.ndarray]
BERT = BackboneConfig("bert", 40, 16, 2, 2, 32, 24, norm_eps=1e-6)
DISTILBERT = BackboneConfig("distilbert", 40, 16, 2, 2, 32, 24, type_vocab_size=0, pooler=False)
ROBERTA = BackboneConfig("roberta", 40, 16, 2, 2, 32, 24, type_vocab_size=1, norm_eps=1e-5)
ELECTRA = BackboneConfig("electra", 40, 16, 2, 2, 32, 24, norm_eps=1e-6, pooler=False, embedding_size=8)
FINGERPRINT = "sha256:" + "0123456789abcdef" * 4
BERT_SETTINGS = {
    "model_type": "bert",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
DISTILBERT_SETTINGS = {
    "model_type": "distilbert",
    "vocab_size": 40,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 24,
    "activation": "gelu",
}
ROBERTA_SETTINGS = {
    **BERT_SETTINGS,
    "model_type": "roberta",
    "max_position_embeddings": 26,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
ELECTRA_SETTINGS = {**BERT_SETTINGS, "model_type": "electra", "embedding_size": 8}


@dataclasses.dataclass(frozen=True)
class Family:
    """A family's config, its ``config.json`` and random tensors under the names that its checkpoints use."""

    config: BackboneConfig
    settings: dict[str, Any]
    tensors: Arrays


def random_family(config: BackboneConfig, settings: dict[str, Any]) -> Family:
    rng, shapes = np.random.default_rng(0), canonical_shapes(config)
    shapes["position"] = (settings["max_position_embeddings"], config.embedding_width)
    names = [row for row in tensor_names(config) if row[0] in shapes]
    tensors = {
        stored[0]: rng.standard_normal(shapes[name][::-1] if transposed else shapes[name], np.float32)
        for name, stored, transposed in names
    }
    return Family(config, settings, tensors)


@pytest.fixture
def bert() -> Family:
    return random_family(BERT, BERT_SETTINGS)


@pytest.fixture
def distilbert() -> Family:
    return random_family(DISTILBERT, DISTILBERT_SETTINGS)


@pytest.fixture
def roberta() -> Family:
    return random_family(ROBERTA, ROBERTA_SETTINGS)


@pytest.fixture
def electra() -> Family:
    return random_family(ELECTRA, ELECTRA_SETTINGS)


@pytest.fixture(params=["bert", "distilbert", "roberta", "electra"])
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    words = {word: at for at, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "one", "two"])}
    return tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]")).to_str()


@pytest.fixture
def save_hf(tmp_path: Path, tokenizer_json: str) -> Callable[..., Path]:
    """Writes a Hugging Face folder with safetensors and returns it."""

    def save(settings: dict[str, Any], tensors: Arrays, tokenizer: str = tokenizer_json, name: str = "model") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(settings))
        (folder / "tokenizer.json").write_text(tokenizer)
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder

    return save


@pytest.fixture(scope="session")
def config() -> BackboneConfig:
    return BERT


@pytest.fixture(scope="session")
def make_task(config: BackboneConfig) -> Callable[..., Task]:
    """A task with one delta of each method named."""

    def make(*methods: str, id: str = "sample", seed: int = 0, **changes: Any) -> Task:
        rng = np.random.default_rng(seed)
        settings: dict[str, dict[str, Any]] = {"adapter": {"bottleneck": 4}, "lora": {"rank": 2}}
        deltas = tuple(METHODS[name].init(rng, settings.get(name, {}), config, 0.02) for name in methods)
        head = Head(
            "sequence-classification",
            {"kernel": rng.standard_normal((16, 3), np.float32), "bias": np.zeros(3, np.float32)},
        )
        ref = BackboneRef("tiny", FINGERPRINT, "bert", 16, 2)
        task = Task(id, ref, deltas, head, ("no", "maybe", "yes"), created="2025-01-01T00:00:00Z")
        return dataclasses.replace(task, **changes)

    return make


def old_names(tensors: Arrays) -> Arrays:
    """The tensors with the LayerNorm names of checkpoints converted from TensorFlow."""
    (_, (weight, gamma)), (_, (bias, beta)) = PARTS["norm"]

    def rename(name: str) -> str:
        return name.replace(f"LayerNorm.{weight}", f"LayerNorm.{gamma}").replace(
            f"LayerNorm.{bias}", f"LayerNorm.{beta}"
        )

    return {rename(name): array for name, array in tensors.items()}


@pytest.fixture
def with_old_names() -> Callable[[Arrays], Arrays]:
    return old_names


@pytest.fixture(scope="module")
def files(make_task: Callable[..., Task]) -> list[bytes]:
    """Six different task files."""
    return [task_to_bytes(make_task("lora", seed=seed)) for seed in range(6)]


@pytest.fixture(params=["sqlite", "postgresql"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Repository]:
    """In a folder; its catalogue there too, or in PostgreSQL."""
    catalogue = request.getfixturevalue("schema") if request.param == "postgresql" else None
    opened = Repository.open(tmp_path / "repository", catalogue=catalogue)
    yield opened
    opened.close()


@pytest.fixture
def open_shared(schema: str, tmp_path: Path) -> Iterator[Callable[..., Repository]]:
    """Opens one repository in PostgreSQL as another machine does: the folder is its own."""
    opened: list[Repository] = []

    def open_it(name: str, catalogue: str = schema) -> Repository:
        opened.append(Repository.open(tmp_path / name, catalogue=catalogue, blobs=f"file://{tmp_path}/blobs"))
        return opened[-1]

    yield open_it
    for repository in opened:
        repository.close()
