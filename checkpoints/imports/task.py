"""From a checkpoint in another library's format to a task."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path

from checkpoints.backbone import Backbone
from checkpoints.huggingface import ADAPTER
from checkpoints.imports.adapterhub import is_adapterhub, read_adapterhub
from checkpoints.imports.cross_encoder import as_cross_encoder
from checkpoints.imports.full import FullModel, read_full
from checkpoints.imports.heads import Wishes
from checkpoints.imports.imported import Imported, revision_of
from checkpoints.imports.peft import read_peft
from checkpoints.imports.sentence import cut
from checkpoints.imports.tokens import check_tokenizer
from checkpoints.sentence import model_folder
from checkpoints.settings import read_json, read_optional
from checkpoints.tensors import READERS
from checkpoints.validation import refuse, validate
from jpets.errors import InvalidTask
from jpets.types import Delta, Preprocessing, Task


def read_adapter(folder: Path, backbone: Backbone, wishes: Wishes) -> Imported | None:
    """What a PEFT or AdapterHub folder holds; None for a folder of neither. Raises ``InvalidTask``."""
    inner = model_folder(folder)
    if not (inner / ADAPTER).is_file():
        return None
    _check_computes(backbone)
    read = read_adapterhub if is_adapterhub(read_json(inner / ADAPTER)) else read_peft
    model = read_optional(inner / "config.json")  # of the model that was tuned
    compared = check_tokenizer(folder, {"model_type": backbone.config.family, **model}, backbone.config, backbone)
    beside: tuple[str, ...] = ()
    if any((inner / name).is_file() for name in READERS):
        beside = (f"the folder holds its base model too, and {backbone.name!r} must hold the same weights",)
    found, problems = read(folder, backbone, wishes), list[str]()
    if found.head.type == "sequence-classification":
        found = as_cross_encoder(found, folder, model, backbone, problems)
    refuse(problems)
    return cut(
        dataclasses.replace(
            found, notes=(*compared.notes, *beside, *found.notes), preprocessing=compared.cut(found.preprocessing)
        ),
        wishes,
    )


def read_model(folder: Path, backbone: Backbone, wishes: Wishes) -> FullModel:
    """A fully fine-tuned checkpoint. Raises ``InvalidTask``, also for a folder that is no checkpoint."""
    check_model(folder)
    _check_computes(backbone)
    return read_full(folder, backbone, wishes)


def _check_computes(backbone: Backbone) -> None:
    """Raises ``InvalidTask`` for a backbone with tables: no other library trained anything on one."""
    if backbone.config.looks_up:
        raise InvalidTask(
            f"backbone {backbone.name!r} has tables for its lower layers: expected a task that was trained on it "
            "(jpets train), found one of another library"
        )


def check_model(folder: Path) -> None:
    """Raises ``InvalidTask`` for a folder that holds neither an adapter nor a model."""
    if not (model_folder(folder) / "config.json").is_file():
        raise InvalidTask(
            f"expected {ADAPTER} (PEFT, AdapterHub) or config.json (a fine-tuned model) in the folder, found neither"
        )


def base_model(folder: Path) -> str:
    """What an adapter's folder says that it was trained on. Raises ``InvalidTask``."""
    settings = read_optional(model_folder(folder) / ADAPTER)
    found = settings.get("base_model_name_or_path") or settings.get("model_name")
    if not isinstance(found, str) or not found:
        raise InvalidTask("the folder does not say which backbone it was trained on: give --backbone")
    if (revision := revision_of(settings)) is not None:
        raise InvalidTask(
            f"revision: expected none, or main, for a backbone that is found by its name, found {revision!r}; download "
            f"that revision of {found!r}, and give its folder as --backbone"
        )
    return found


def extracted(model: FullModel, deltas: Sequence[Delta]) -> Imported:
    """Deltas that were extracted from a fully fine-tuned model, with its head."""
    return Imported(tuple(deltas), model.head, model.labels, model.notes, model.preprocessing)


def make_task(id: str, imported: Imported, backbone: Backbone, preprocessing: Preprocessing | None = None) -> Task:
    """The checked task; with ``preprocessing`` instead of its own, if any. Raises ``InvalidTask``."""
    task = Task(
        id=id,
        backbone=backbone.ref(),
        deltas=imported.deltas,
        head=imported.head,
        labels=imported.labels,
        preprocessing=imported.preprocessing if preprocessing is None else preprocessing,
        created=datetime.date.today().isoformat(),
    )
    task = dataclasses.replace(task, deltas=tuple(delta for delta in task.deltas if delta.tensors))
    validate(task, backbone.config, backbone.ref())
    return task
