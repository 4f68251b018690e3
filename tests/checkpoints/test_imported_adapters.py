"""Adapters of PEFT and AdapterHub: imported, they answer as in their own library."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from imported_tasks import IMPORTS, backbone_of, imported
from reference import LIVE_LENGTHS, LIVE_SEED
from support import ENGINE_SETTINGS, FIXTURES, logits_of, tiny

from checkpoints.imports.heads import Wishes
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.types import Query

ROWS, LENGTH = 8, 32
KEPT = {library: sorted(path.name for path in (IMPORTS / library).iterdir()) for library in ("peft", "adapters")}
LIVE = [name for name in KEPT if find_spec("torch") is not None and find_spec(name) is not None]
SOURCES = [(library, "kept") for library in KEPT] + [(library, "live") for library in LIVE]
ARGUMENTS: Mapping[str, Wishes] = {"multilabel": Wishes(labels=("a", "b", "c"))}
"""What a user gives beside the folder."""


def written(
    library: Literal["peft", "adapters"], source: str, folder: Path
) -> tuple[dict[str, np.ndarray], Mapping[str, tuple[Path, Any]]]:
    """(inputs, case -> its folder and logits), from the fixtures or made now."""
    if source == "kept":
        inputs = dict(np.load(FIXTURES / "tiny-bert" / "outputs.npz"))
        cases = {name: IMPORTS / library / name for name in KEPT[library]}
        return inputs, {name: (path, np.load(path / "outputs.npz")["logits"]) for name, path in cases.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own
        from fixtures import imported_models, reference_models

        tensors = reference_models.random_inputs(LIVE_LENGTHS, LIVE_SEED)
        found = {}
        for seed, name in enumerate(imported_models.PEFT if library == "peft" else imported_models.HUB):
            (folder / name).mkdir()
            found[name] = (folder / name, imported_models.write(library, name, folder / name, tensors, seed))
    return {name: tensor.numpy() for name, tensor in tensors.items()}, found


@pytest.mark.parametrize(("library", "source"), SOURCES)
def test_imported_tasks_answer_as_in_their_library(
    library: Literal["peft", "adapters"], source: str, tmp_path: Path
) -> None:
    inputs, cases = written(library, source, tmp_path)
    tasks = {name: imported(path, name, ARGUMENTS.get(name, Wishes())) for name, (path, _) in cases.items()}
    errors = {}
    for backbone in sorted(set(map(backbone_of, tasks))):
        own = [task for name, task in tasks.items() if backbone_of(name) == backbone]
        bucket = Bucket(ROWS * LENGTH, ((ROWS, LENGTH),))
        with Engine(tiny(backbone), own, ENGINE_SETTINGS, cache_dir=tmp_path, buckets=[bucket]).start() as engine:
            for task in own:
                virtual = any(delta.method in ("prompt", "prefix") for delta in task.deltas)
                typed = backbone in ("tiny-bert", "tiny-electra") and not (library == "peft" and virtual)
                errors[task.id] = error(engine, task.id, inputs, cases[task.id][1], typed=typed)
    assert {name: each for name, each in errors.items() if each > 1e-4} == {}
    assert len(errors) == len(cases) > 10


def error(engine: Engine, task: str, inputs: Mapping[str, np.ndarray], logits: np.ndarray, *, typed: bool) -> float:
    """The largest difference from the library's logits; PEFT ignores token types beside virtual tokens."""
    lengths = inputs["attention_mask"].sum(1)
    queries = [
        Query(task, input_ids=ids[:n].tolist(), token_type_ids=types[:n].tolist() if typed else None)
        for ids, types, n in zip(inputs["input_ids"], inputs["token_type_ids"], lengths, strict=True)
    ]
    worst, width = 0.0, inputs["input_ids"].shape[1]
    for row, result in enumerate(engine.infer(queries)):
        assert result.error is None, result.error
        found = logits_of(result)
        expected = logits[row] if found.ndim == 1 else logits[row, -width:][: len(found)]  # virtual tokens stand first
        worst = max(worst, float(np.abs(found - expected).max()))
    return worst
