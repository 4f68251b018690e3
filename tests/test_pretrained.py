"""The engine by path and name, as the README shows it."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest
from support import dense_answer, method_tasks, shallow

import jpets
from checkpoints.task_file import write_task
from jpets.errors import InvalidTask
from jpets.types import Delta

TEXT = "a library of functions"


def narrower(delta: Delta) -> Delta:
    """As of a backbone of half the width."""
    return dataclasses.replace(
        delta, tensors={name: array[:, : array.shape[1] // 2] for name, array in delta.tensors.items()}
    )


def test_from_files_to_answers(shallow_folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    tasks = {task.id: task for task in method_tasks(shallow())}
    for name in ("adapter", "lora", "mask"):
        write_task(tasks[name], tmp_path / f"{name}.safetensors")
    with jpets.Engine.from_pretrained(
        shallow_folder,
        tasks=[tmp_path / "adapter.safetensors", str(tmp_path / "lora.safetensors")],
        dtype="float32",
        cache_dir=tmp_path / "cache",
        reserve=[tasks["mask"]],
        max_length=32,
        max_batch_tokens=64,
        background_compile=False,
    ) as engine:
        assert engine.ready
        engine.add_task(tmp_path / "mask.safetensors")
        results = engine.infer([jpets.Query(name, TEXT) for name in ("adapter", "lora", "mask", None)])
        ids = engine.text.encode(jpets.Query(None, TEXT), tasks["mask"].preprocessing).ids
        for name, result in zip(("adapter", "lora", "mask"), results, strict=False):
            expected = dense_answer(shallow(), tasks[name], ids)["logits"]
            assert isinstance(result, jpets.Classification | jpets.Tokens)
            np.testing.assert_allclose(result.logits.reshape(expected.shape), expected, atol=1e-4)
        assert isinstance(results[3], jpets.Embedding)
        (tmp_path / "broken.safetensors").write_bytes(b"nothing")
        with pytest.raises(InvalidTask):
            engine.add_task(tmp_path / "broken.safetensors")
        narrow = dataclasses.replace(tasks["lora"], id="narrow", deltas=(narrower(tasks["lora"].deltas[0]),))
        with pytest.raises(InvalidTask, match="delta/0"):  # it would be filled up with zeros
            engine.add_task(narrow)
        engine.remove_task("mask")
        (gone,) = engine.infer([jpets.Query("mask", TEXT)])
        assert isinstance(gone.error, jpets.JpetsError)
        assert gone.error.status == 404


def test_public_names() -> None:
    for name in jpets.__all__:
        assert getattr(jpets, name).__name__ == name
    with pytest.raises(AttributeError):
        jpets.nothing  # noqa: B018
