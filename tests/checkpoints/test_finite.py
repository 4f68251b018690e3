"""Backbones that cannot be computed with are refused where they are read, by the name of the tensor."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import FIXTURES, tiny

from checkpoints.backbone import Backbone
from checkpoints.canonical import from_params
from checkpoints.finite import LARGEST, not_finite
from checkpoints.huggingface import read_backbone
from checkpoints.native import read_native, write_native
from checkpoints.source import load_backbone
from jpets.engine.results.results import row_result
from jpets.errors import InvalidBackbone, NotFinite
from jpets.types import Head, Task, Timing

TIMING = Timing(0.0, 0.0, "", "", False)


@pytest.mark.parametrize(
    ("name", "place", "value", "found"),
    [
        ("embeddings.word_embeddings.weight", 0, np.nan, "NaN"),  # of padding alone
        ("encoder.layer.2.output.dense.bias", 7, np.inf, "Inf"),
        ("embeddings.LayerNorm.weight", 1, -np.inf, "Inf"),
        ("pooler.dense.weight", 3, np.nan, "NaN"),
        ("encoder.layer.0.attention.self.query.weight", 0, 3.4e38, "3.4e[+]38"),  # Inf in bfloat16
    ],
)
def test_it_is_refused_by_name(name: str, place: int, value: float, found: str, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(FIXTURES / "tiny-bert", folder)
    stored = load_file(folder / "model.safetensors")
    stored[name][place] = value
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(InvalidBackbone, match=f"{name}: expected finite numbers, found {found};"):
        load_backbone(folder)


def test_overflow_of_half_precision_is_refused(bert: Any, save_hf: Callable[..., Path]) -> None:
    large = {name: array.copy() for name, array in bert.tensors.items()}
    large["encoder.layer.0.output.dense.weight"][0, 0] = 1e6
    with np.errstate(over="ignore"):
        halves = {name: array.astype(np.float16) for name, array in large.items()}
    with pytest.raises(InvalidBackbone, match=r"layer\.0\.output\.dense\.weight: expected finite numbers, found Inf"):
        read_backbone(save_hf(bert.settings, halves))


def test_many_are_counted(bert: Any, save_hf: Callable[..., Path]) -> None:
    broken = {name: np.full_like(array, np.nan) for name, array in bert.tensors.items()}
    with pytest.raises(InvalidBackbone, match=r"found NaN; and 36 more that are not finite") as refused:
        read_backbone(save_hf(bert.settings, broken))
    assert len(refused.value.message) < 500


def test_a_native_folder_of_before_is_refused(tmp_path: Path) -> None:
    params = {**tiny().params, "word": tiny().params["word"].copy()}
    params["word"][5, 5] = np.nan
    broken = Backbone("own", tiny().config, params, tiny().tokenizer_json, "sha256:")
    write_native(dataclasses.replace(broken, fingerprint=broken.computed_fingerprint()), tmp_path / "native")
    with pytest.raises(InvalidBackbone, match="word: expected finite numbers, found NaN"):
        read_native(tmp_path / "native")


def test_tensors_made_here_are_checked_too() -> None:
    tensors = dict(from_params(tiny().params, tiny().config))
    tensors["word"] = np.full_like(tensors["word"], np.inf)
    with pytest.raises(InvalidBackbone, match="word: expected finite"):
        Backbone.of_tensors("own", tiny().config, tensors, tiny().tokenizer_json)


def test_what_is_finite() -> None:
    assert not_finite(np.zeros((0, 3), np.float32)) is None
    assert not_finite(np.array([LARGEST, -LARGEST], np.float32)) is None
    assert np.isfinite(np.array([LARGEST], np.float32).astype(ml_dtypes.bfloat16)).all()
    assert not_finite(np.array([np.inf, np.nan])) == "NaN"


def test_the_answer_blames_a_task_only_where_there_is_one() -> None:
    nothing = np.full(4, np.nan, np.float32)
    plain = row_result(None, 3, TIMING, False, nothing, None)
    assert isinstance(plain.error, NotFinite) and "upload" not in plain.error.message
    assert "the backbone gave NaN or Inf" in plain.error.message
    for name, blamed in ((tiny().name, "the backbone gave"), ("own", "the task's parameters")):
        result = row_result(Task(name, tiny().ref(), (), Head("embedding")), 3, TIMING, False, nothing, None)
        assert result.error is not None and blamed in result.error.message
