"""Models of transformers that fill masks, as it saves them, and what it answered (``tests/fixtures/masked``)."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file
from support import FIXTURES, tiny

from checkpoints.imports.heads import Wishes
from checkpoints.imports.task import read_model
from jpets.types import Task

MASKED = FIXTURES / "masked"
MODELS = {
    "bert": "BertForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "electra": "ElectraForMaskedLM",
    "roberta": "RobertaForMaskedLM",
}


def masked_folder(folder: Path, family: str = "bert") -> Path:
    folder.mkdir()
    backbone = FIXTURES / f"tiny-{family}"
    config = json.loads((backbone / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [MODELS[family]]}))
    tensors = {f"{family}.{name}": own for name, own in load_file(backbone / "model.safetensors").items()}
    save_file(tensors | load_file(MASKED / family / "head.safetensors"), folder / "model.safetensors")
    return folder


def masked_task(folder: Path, id: str = "words") -> Task:
    """The task of tiny-bert's model, without deltas."""
    model = read_model(masked_folder(folder), tiny(), Wishes())
    return Task(id, tiny().ref(), (), model.head)
