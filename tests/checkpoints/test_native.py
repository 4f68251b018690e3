from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import native
from checkpoints.backbone import Backbone
from checkpoints.huggingface import read_backbone
from checkpoints.native import read_native, write_native
from checkpoints.source import load_backbone
from jpets.errors import Conflict, InvalidBackbone, OutOfSpace


@pytest.fixture
def backbone(family: Any, save_hf: Callable[..., Path]) -> Backbone:
    return read_backbone(save_hf(family.settings, family.tensors))


def test_round_trip(backbone: Backbone, tmp_path: Path) -> None:
    import jax

    write_native(backbone, tmp_path / "native")
    again = load_backbone(tmp_path / "native")
    assert (again.name, again.config, again.fingerprint) == (backbone.name, backbone.config, backbone.fingerprint)
    assert again.tokenizer_json == backbone.tokenizer_json
    assert again.ref() == backbone.ref()
    jax.tree.map(np.testing.assert_array_equal, again.params, backbone.params)
    assert load_backbone(tmp_path / "native", "other").name == "other"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "native"]


def test_folder_of_before_embeddings_had_a_size(bert: Any, save_hf: Callable[..., Path], tmp_path: Path) -> None:
    backbone = read_backbone(save_hf(bert.settings, bert.tensors))
    write_native(backbone, tmp_path / "native")
    manifest = json.loads((tmp_path / "native" / "backbone.json").read_text())
    del manifest["config"]["embedding_size"]
    (tmp_path / "native" / "backbone.json").write_text(json.dumps(manifest))
    assert read_native(tmp_path / "native").config == backbone.config


def test_folder_of_before_padding_had_a_position(roberta: Any, save_hf: Callable[..., Path], tmp_path: Path) -> None:
    """Its checkpoint had zeros there, as those of the libraries have."""
    key = "embeddings.position_embeddings.weight"
    table = roberta.tensors[key].copy()
    table[1] = 0
    backbone = read_backbone(save_hf(roberta.settings, {**roberta.tensors, key: table}))
    params = {name: leaf for name, leaf in backbone.params.items() if name != "padding_position"}
    write_native(dataclasses.replace(backbone, params=params), tmp_path / "native")
    again = read_native(tmp_path / "native")
    assert again.fingerprint == backbone.fingerprint
    assert not again.params["padding_position"].any()


def test_existing_folder_is_kept(backbone: Backbone, tmp_path: Path) -> None:
    (tmp_path / "native").mkdir()
    with pytest.raises(Conflict, match="exists already"):
        write_native(backbone, tmp_path / "native")


def test_a_folder_that_comes_meanwhile_is_kept_and_the_tables_are_not_lost(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks_up = dataclasses.replace(backbone, config=dataclasses.replace(backbone.config, window=(1, 1)))
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "table").write_text("hours of work")
    monkeypatch.setattr(native, "_copy_tables", lambda plot, target: None)

    def come(*_: object) -> None:
        (tmp_path / "native" / "other").mkdir(parents=True)

    monkeypatch.setattr(native, "_save", come)
    with pytest.raises(Conflict, match="exists already"):
        write_native(looks_up, tmp_path / "native", tmp_path / "made")
    assert (tmp_path / "made" / "table").read_text() == "hours of work"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "model", "native"]


def test_full_disk_leaves_nothing(backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(native, "_save", full)
    with pytest.raises(OutOfSpace):
        write_native(backbone, tmp_path / "native")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_changed_parameters_are_noticed(backbone: Backbone, tmp_path: Path) -> None:
    params = {**backbone.params, "bias": backbone.params["bias"] + 1}
    write_native(dataclasses.replace(backbone, params=params), tmp_path / "native")
    with pytest.raises(InvalidBackbone, match="do not match the stored fingerprint"):
        read_native(tmp_path / "native")
    assert read_native(tmp_path / "native", verify=False).fingerprint == backbone.fingerprint


@pytest.mark.parametrize("damage", ["params", "tokenizer.json", "format", "config", "shape", "json"])
def test_damaged_folder(backbone: Backbone, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "native"
    write_native(backbone, folder)
    manifest = json.loads((folder / "backbone.json").read_text())
    if damage in ("params", "tokenizer.json"):
        (folder / damage).rename(tmp_path / "elsewhere")
    elif damage == "format":
        manifest["format"] = 2
    elif damage == "config":
        manifest["config"]["heads"] = "two"
    elif damage == "shape":
        manifest["config"]["vocab_size"] += 1
    text = "{" if damage == "json" else json.dumps(manifest)
    (folder / "backbone.json").write_text(text)
    with pytest.raises(InvalidBackbone) as caught:
        read_native(folder)
    assert str(tmp_path) not in caught.value.message
