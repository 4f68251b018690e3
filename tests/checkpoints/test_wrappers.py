"""Checkpoints that were saved with what wrapped the model; refusals of many tensors stay short."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_model import biases, write_full
from safetensors.numpy import load_file, save_file
from support import tiny

from checkpoints.huggingface import read_backbone
from checkpoints.imports.heads import Wishes
from checkpoints.imports.task import read_model
from checkpoints.listing import listing
from checkpoints.wrappers import unwrapped
from jpets.errors import InvalidBackbone, InvalidTask

WRAPPERS = ["module.", "_orig_mod.", "model.", "module._orig_mod.", "model.module.", "auto_model.", "0.auto_model.",
            "_fsdp_wrapped_module.", "base_model.model."]  # fmt: skip


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_model_inside_is_read(wrapper: str, family: Any, save_hf: Callable[..., Path]) -> None:
    plain = read_backbone(save_hf(family.settings, family.tensors))
    wrapped = {wrapper + name: own for name, own in family.tensors.items()}
    assert read_backbone(save_hf(family.settings, wrapped, name="wrapped")).fingerprint == plain.fingerprint


@pytest.mark.parametrize("place", ["encoder._orig_mod.layer", "encoder.layer.0._checkpoint_wrapped_module."])
def test_wrappers_of_parts_are_taken_off(place: str, bert: Any, save_hf: Callable[..., Path]) -> None:
    plain = read_backbone(save_hf(bert.settings, bert.tensors))
    inner = place.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
    wrapped = {name.replace(inner, place): own for name, own in bert.tensors.items()}
    assert wrapped.keys() != bert.tensors.keys()
    assert read_backbone(save_hf(bert.settings, wrapped, name="wrapped")).fingerprint == plain.fingerprint


@pytest.mark.parametrize("wrapper", ["module.", "model.", "_orig_mod."])
def test_a_fine_tuned_model_is_read_with_its_head(wrapper: str, tmp_path: Path) -> None:
    expected = read_model(write_full(tmp_path, biases), tiny(), Wishes())
    stored = load_file(tmp_path / "model.safetensors")
    save_file({wrapper + name: own for name, own in stored.items()}, tmp_path / "model.safetensors")
    found = read_model(tmp_path, tiny(), Wishes())
    np.testing.assert_array_equal(found.head.tensors["kernel"], expected.head.tensors["kernel"])
    assert all(np.array_equal(found.tensors[name], own) for name, own in expected.tensors.items())


def test_what_is_no_wrapper_stays() -> None:
    names: Mapping[str, int] = {"module.a": 1, "b": 2}
    assert unwrapped(names) == names
    assert unwrapped({}) == {}
    with pytest.raises(InvalidBackbone, match="are one tensor of the model"):
        unwrapped({"a.b": 1, "_orig_mod.a.b": 2})


def test_refusals_of_many_tensors_say_kind_count_and_the_first_three(bert: Any, save_hf: Callable[..., Path]) -> None:
    word = "embeddings.word_embeddings.weight"
    with pytest.raises(InvalidBackbone, match=r"found nothing; and 33 more that are missing$") as refused:
        read_backbone(save_hf(bert.settings, {word: bert.tensors[word]}))
    assert refused.value.message.count("found nothing") == 3
    assert len(refused.value.message) < 500


def test_tensors_that_all_have_other_names_are_said_to_have(bert: Any, save_hf: Callable[..., Path]) -> None:
    other = {f"something.{name}": own for name, own in bert.tensors.items()}
    with pytest.raises(InvalidBackbone, match="with other names or shapes: 'something") as refused:
        read_backbone(save_hf(bert.settings, other))
    assert len(refused.value.message) < 500


def test_refusals_of_imports_are_as_short(tmp_path: Path) -> None:
    folder = write_full(tmp_path, biases)
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, **{f"other.{at}": np.zeros(3, np.float32) for at in range(100)}}, folder / "model.safetensors")
    with pytest.raises(
        InvalidTask, match=r"other\.1: not understood .*and 97 more that are not understood$"
    ) as refused:
        read_model(folder, tiny(), Wishes())
    assert len(refused.value.message) < 500


def test_kinds_of_problems_stand_together() -> None:
    few = [f"a{at}: expected [3], found nothing" for at in range(8)]
    assert listing(["r: expected int", *few]) == "; ".join(["r: expected int", *few])
    shapes = [f"b{at}: expected [3], found [4]" for at in range(9)]
    assert listing([*shapes, "r: expected int"]) == (
        "r: expected int; b0: expected [3], found [4]; b1: expected [3], found [4]; b2: expected [3], found [4]; "
        "and 6 more that are of other shapes"
    )
