"""Tasks of the folders that other libraries wrote."""

from __future__ import annotations

from pathlib import Path

from support import FIXTURES, tiny

from checkpoints.imports.heads import Wishes
from checkpoints.imports.task import make_task, read_adapter
from checkpoints.task_file import read_task, task_to_bytes
from jpets.types import Task

IMPORTS = FIXTURES / "imports"


def backbone_of(case: str) -> str:
    family = case.rpartition("-")[2]
    return f"tiny-{family}" if family in ("distilbert", "roberta", "electra") else "tiny-bert"


def imported(folder: Path, name: str = "own", wishes: Wishes = Wishes()) -> Task:  # noqa: B008
    backbone = tiny(backbone_of(folder.name))
    found = read_adapter(folder, backbone, wishes)
    assert found is not None
    task = make_task(name, found, backbone)
    return read_task(task_to_bytes(task), id=name, config=backbone.config, backbone=backbone.ref())
