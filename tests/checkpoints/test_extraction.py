"""Deltas extracted from fully fine-tuned checkpoints: what they keep, and that they answer as the model did."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from full_model import Change, biases, everything, ranked, weights_alone, write_full
from safetensors.numpy import load_file, save_file
from support import FIXTURES, dense_answer, tiny

from checkpoints.canonical import from_params
from checkpoints.huggingface import read_backbone
from checkpoints.imports.extract import Extraction, extract, losses
from checkpoints.imports.full import FullModel
from checkpoints.imports.heads import Wishes
from checkpoints.imports.imported import Imported
from checkpoints.imports.task import extracted, make_task, read_model
from checkpoints.tokenizer_comparison import differences, sets_space
from jpets.app.jobs.extraction import AUTO
from jpets.errors import InvalidBackbone, InvalidTask
from jpets.types import Task

IDS = np.array([2, 77, 301, 44, 9, 250, 3])
FILE = "model.safetensors"
PLACE = "layers/1/ffn_in/weight"


def read(folder: Path, change: Change) -> FullModel:
    return read_model(write_full(folder, change), tiny(), Wishes())


def task_of(model: FullModel, how: Extraction) -> Task:
    return make_task("own", extracted(model, extract(model.tensors, tiny(), how)), tiny())


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (biases, Extraction("bitfit")),
        (weights_alone, Extraction("diff", density=1.0)),
        (weights_alone, Extraction("lora", rank=64)),
        (ranked(3), Extraction("lora", rank=3)),
        (ranked(5), Extraction("lora", energy=1.0)),
    ],
)
def test_what_a_method_can_hold_answers_as_the_model(change: Change, how: Extraction, tmp_path: Path) -> None:
    model = read(tmp_path, change)
    task = task_of(model, how)
    own = make_task("own", Imported((), model.head, model.labels), tiny())
    expected = dense_answer(read_backbone(tmp_path), own, IDS)["logits"]
    assert np.abs(expected - dense_answer(tiny(), own, IDS)["logits"]).max() > 0.05
    np.testing.assert_allclose(dense_answer(tiny(), task, IDS)["logits"], expected, atol=1e-4)
    assert max(losses(model.tensors, tiny(), task.deltas).values()) < 1e-4
    assert task.labels == ("name-0", "name-1", "name-2")


def difference(model: FullModel, name: str = PLACE) -> np.ndarray:
    return model.tensors[name] - from_params(tiny().params, tiny().config)[name]


def test_a_rank_loses_what_the_singular_values_say(tmp_path: Path) -> None:
    model = read(tmp_path, weights_alone)
    values = np.linalg.svd(difference(model).astype(np.float64), compute_uv=False)
    lost = losses(model.tensors, tiny(), extract(model.tensors, tiny(), Extraction("lora", rank=7)))
    assert lost[PLACE] == pytest.approx(np.sqrt((values[7:] ** 2).sum() / (values**2).sum()), rel=1e-4)
    (lora, _) = extract(model.tensors, tiny(), Extraction("lora", energy=0.8))
    shares = np.cumsum(values**2) / (values**2).sum()
    assert lora.settings["ranks"]["ffn_in"][1] == int((shares < 0.8).sum()) + 1


@pytest.mark.parametrize("per_matrix", [False, True])
def test_the_largest_differences_are_kept(per_matrix: bool, tmp_path: Path) -> None:
    model = read(tmp_path, weights_alone)
    how = Extraction("diff", density=0.01, per_matrix=per_matrix)
    (diff, _) = extract(model.tensors, tiny(), how)
    own = difference(model)
    every = [
        difference(model, name) for name in model.tensors if name.endswith("/weight") and model.tensors[name].ndim == 2
    ]
    limit = np.sort(np.abs(own if per_matrix else np.concatenate([each.ravel() for each in every])).ravel())
    limit = limit[limit.size - round(0.01 * limit.size)]
    start, end = diff.tensors["ffn_in/layer_offsets"][1:3]
    kept = np.zeros_like(own)
    rows, cols = diff.tensors["ffn_in/rows"][start:end], diff.tensors["ffn_in/cols"][start:end]
    kept[rows, cols] = diff.tensors["ffn_in/values"][start:end]
    np.testing.assert_array_equal(kept, np.where(np.abs(own) >= limit, own, 0))


def test_blocks_are_kept_whole(tmp_path: Path) -> None:
    model = read(tmp_path, weights_alone)
    (diff, _) = extract(model.tensors, tiny(), Extraction("diff", density=0.05, block=16, per_matrix=True))
    own = difference(model)
    tiles = own.reshape(4, 16, 8, 16).swapaxes(1, 2)
    start, end = diff.tensors["ffn_in/layer_offsets"][1:3]
    assert end - start == round(0.05 * 32)
    norms = np.linalg.norm(tiles, axis=(2, 3))
    places = np.stack([diff.tensors["ffn_in/rows"], diff.tensors["ffn_in/cols"]], 1)[start:end]
    found = {(int(row), int(col)) for row, col in places}
    best = np.argsort(norms.ravel())[-int(end - start) :]
    assert found == {(int(at) // 8, int(at) % 8) for at in best}
    np.testing.assert_array_equal(
        diff.tensors["ffn_in/values"][start], tiles[min(found, key=lambda at: (at[1], at[0]))]
    )


def test_onebit_keeps_signs_and_mean_magnitudes(tmp_path: Path) -> None:
    model = read(tmp_path, weights_alone)
    (onebit, _) = extract(model.tensors, tiny(), Extraction("onebit"))
    assert onebit.tensors["ffn_in/scale"][1] == pytest.approx(np.abs(difference(model)).mean(), rel=1e-5)
    lost = losses(model.tensors, tiny(), [onebit])
    assert lost[PLACE] == pytest.approx(np.sqrt(1 - 2 / np.pi), abs=0.05)  # of normal differences


def test_the_smallest_extraction_is_the_one_of_fewest_bytes(tmp_path: Path) -> None:
    model = read(tmp_path, weights_alone)

    def taken(how: Extraction) -> int:
        first, *_ = extract(model.tensors, tiny(), how)
        return 0 if how.method == "bitfit" else sum(array.nbytes for array in first.tensors.values())

    for how in (*AUTO, Extraction("diff", density=0.1, block=16)):
        assert taken(how) == pytest.approx(how.stored_bytes(tiny().config), rel=0.25, abs=2000), how
    first, second, *_ = sorted(AUTO, key=lambda how: how.stored_bytes(tiny().config))
    assert (first.method, second) == ("bitfit", Extraction("diff", density=0.001))


def test_what_no_delta_holds_is_reported_as_lost(tmp_path: Path) -> None:
    model = read(tmp_path, everything)
    lost = losses(model.tensors, tiny(), extract(model.tensors, tiny(), Extraction("diff", density=1.0)))
    assert lost["word"] == lost["layers/0/attn_norm/scale"] == 1.0
    assert lost["layers/0/attn_norm/bias"] < 1e-4 and lost[PLACE] < 1e-4


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hidden_act": "relu", "layer_norm_eps": 1e-5}, ["activation", "norm_eps"]),
        ({"vocab_size": 900}, ["vocab_size is 900, the backbone's is 800"]),
        ({"architectures": ["BertForMultipleChoice"]}, ["BertForMultipleChoice", "say which head"]),
        ({"architectures": ["MyBertForSequenceClassification"]}, ["MyBert", "say which head"]),
        ({"problem_type": "ordinal_regression"}, ["problem_type", "ordinal_regression"]),
    ],
)
def test_another_architecture_is_refused(settings: dict[str, Any], named: list[str], tmp_path: Path) -> None:
    with pytest.raises(InvalidTask) as refused:
        read_model(write_full(tmp_path, biases, **settings), tiny(), Wishes())
    for each in named:
        assert each in refused.value.message


def test_a_head_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    folder = write_full(tmp_path, biases)
    stored = load_file(folder / "model.safetensors")
    del stored["classifier.weight"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(InvalidTask, match=r"classifier\.weight: expected \[any, 64\], found nothing"):
        read_model(folder, tiny(), Wishes())


def test_tensors_that_are_not_understood_are_refused_and_those_of_pretraining_are_not(tmp_path: Path) -> None:
    folder = write_full(tmp_path, biases)
    stored = load_file(folder / "model.safetensors")
    stored["cls.predictions.bias"] = np.zeros(800, np.float32)
    save_file(stored, folder / "model.safetensors")
    assert read_model(folder, tiny(), Wishes()).head.outputs == 3
    save_file({**stored, "classifier.scale": np.ones(3, np.float32)}, folder / "model.safetensors")
    with pytest.raises(InvalidTask, match=r"classifier\.scale: not understood"):
        read_model(folder, tiny(), Wishes())


def beside(folder: Path, **tensors: np.ndarray) -> Path:
    """Adds tensors to those of a folder."""
    save_file({**load_file(folder / "model.safetensors"), **tensors}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["bert.foo.weight", "bert.encoder.layer.3.output.dense.bias", "evil.position_ids"])
def test_no_tensor_of_the_encoder_is_lost_unseen(name: str, tmp_path: Path) -> None:
    folder = beside(write_full(tmp_path, biases), **{name: np.zeros(64, np.float32)})
    with pytest.raises(InvalidTask, match=rf"{name}: not understood"):
        read_model(folder, tiny(), Wishes())


WITHOUT_EFFECT: list[tuple[str, str, list[str]]] = [
    ("tiny-bert", "bert", ["embeddings.position_ids", "cls.seq_relationship.bias"]),
    ("tiny-roberta", "roberta", ["embeddings.position_ids", "embeddings.token_type_ids", "lm_head.decoder.bias"]),
    ("tiny-distilbert", "distilbert", ["embeddings.position_ids", "vocab_transform.weight", "vocab_projector.bias"]),
    ("tiny-electra", "electra", ["embeddings.position_ids", "discriminator_predictions.dense.bias"]),
]
"""Backbone, its model's prefix, and tensors of older checkpoints and of pretraining."""


@pytest.mark.parametrize(("backbone", "prefix", "names"), WITHOUT_EFFECT)
@pytest.mark.parametrize("whole", [False, True])
def test_what_has_no_effect_is_taken(backbone: str, prefix: str, names: list[str], whole: bool, tmp_path: Path) -> None:
    """``whole``: a model without a head, whose names have no prefix."""
    folder = tmp_path / backbone
    shutil.copytree(FIXTURES / backbone, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": None}))
    start = "" if whole else f"{prefix}."
    stored = {start + name.removeprefix(f"{prefix}."): own for name, own in load_file(folder / FILE).items()}
    added = [start + name if name.startswith("embeddings.") else name for name in names]
    save_file({**stored, **{name: np.zeros(3, np.float32) for name in added}}, folder / FILE)
    assert read_model(folder, tiny(backbone), Wishes(head="embedding")).head.type == "embedding"


def sentence_folder(folder: Path, *kinds: str, **pooling: object) -> Path:
    """A folder as Sentence-Transformers saves it, with modules of ``kinds`` behind the model."""
    write_full(folder, biases, architectures=["BertModel"])
    stored = load_file(folder / "model.safetensors")
    save_file({name: own for name, own in stored.items() if name.startswith("bert.")}, folder / "model.safetensors")
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{at}_{kind}"} for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_embeddings_are_pooled_as_the_folder_says(tmp_path: Path) -> None:
    kinds = ("Transformer", "Pooling", "Normalize")
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": True}
    head = read_model(sentence_folder(tmp_path / "cls", *kinds, **flags), tiny(), Wishes()).head
    assert (head.type, head.pooling, head.normalize) == ("embedding", "cls", True)
    assert read_model(tmp_path / "cls", tiny(), Wishes(pooling="mean")).head.pooling == "mean"
    head = read_model(sentence_folder(tmp_path / "mean", *kinds[:2], pooling_mode="mean"), tiny(), Wishes()).head
    assert (head.pooling, head.normalize) == ("mean", False)
    with pytest.raises(InvalidTask, match=r"'LayerNorm' is not supported.*found \['max_tokens'\]"):
        folder = sentence_folder(tmp_path / "max", *kinds[:2], "LayerNorm", pooling_mode_max_tokens=True)
        read_model(folder, tiny(), Wishes())


def test_labels_are_those_that_transformers_answers_by(tmp_path: Path) -> None:
    usual = {f"LABEL_{at}": at for at in range(3)}
    for names, numbers, expected in (
        ({"0": "a", "1": "b", "2": "c"}, usual, "abc"),
        ({"0": "a", "1": "b", "2": "c"}, {"c": 0, "b": 1, "a": 2}, "abc"),
        ({str(at): name for name, at in usual.items()}, {"c": 0, "b": 1, "a": 2}, "cba"),
    ):
        model = read_model(write_full(tmp_path, biases, id2label=names, label2id=numbers), tiny(), Wishes())
        assert "".join(model.labels) == expected
    with pytest.raises(InvalidTask, match="label2id: expected the numbers"):
        read_model(write_full(tmp_path, biases, id2label=None, label2id={"a": 1e999}), tiny(), Wishes())


def test_problems_and_labels_follow_the_configuration(tmp_path: Path) -> None:
    model = read_model(write_full(tmp_path, biases, problem_type="multi_label_classification"), tiny(), Wishes())
    assert (model.head.problem, model.head.pooling, model.labels[0]) == ("multi-label", "pooler", "name-0")


def test_one_output_is_a_value(tmp_path: Path) -> None:
    model = read_model(write_full(tmp_path, biases, labels=1), tiny(), Wishes())
    assert (model.head.problem, model.head.outputs) == ("regression", 1)
    asked = read_model(tmp_path, tiny(), Wishes(problem="multi-label"))
    assert asked.head.problem == "multi-label"


def test_a_model_with_a_nan_is_refused(tmp_path: Path) -> None:
    folder = write_full(tmp_path, biases)
    stored = load_file(folder / "model.safetensors")
    stored["bert.encoder.layer.1.intermediate.dense.weight"][3, 5] = np.nan
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(InvalidTask, match="layers/1/ffn_in/weight: expected finite numbers"):
        read_model(folder, tiny(), Wishes())


def shard(folder: Path, *, second: str = "b.safetensors") -> Path:
    """Splits a folder's tensors in two files with an index."""
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(stored)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: stored[name] for name in own}, folder / file)
    weight_map = {name: file if file[0] == "a" else second for file, own in parts.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_are_read_and_stay_in_their_folder(tmp_path: Path) -> None:
    whole = read(tmp_path / "whole", biases)
    parts = read_model(shard(write_full(tmp_path / "parts", biases)), tiny(), Wishes())
    np.testing.assert_array_equal(parts.tensors[PLACE], whole.tensors[PLACE])
    for name in ("../b.safetensors", "/etc/passwd", "missing.safetensors"):
        with pytest.raises(InvalidBackbone, match=r"index\.json: expected"):
            read_model(shard(write_full(tmp_path / "bad", biases), second=name), tiny(), Wishes())


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("tokenizer_config.json", {"do_lower_case": False}, "normalizer"),
        ("tokenizer_config.json", {"truncation_side": "left"}, "truncation's direction"),
        ("tokenizer_config.json", {"tokenize_chinese_chars": False}, "normalizer"),
    ],
)
def test_a_model_whose_tokenizer_acts_differently_is_refused(
    tmp_path: Path, file: str, change: dict[str, Any], named: str
) -> None:
    """Its vocabulary is the backbone's, and so was every number compared."""
    folder = write_full(tmp_path, biases)
    path = folder / file
    document = json.loads(path.read_text()) if path.is_file() else {"tokenizer_class": "BertTokenizer"}
    path.write_text(json.dumps(document | change))
    with pytest.raises(InvalidTask, match=f"the tokenizer's {named}: expected what the backbone"):
        read_model(folder, tiny(), Wishes())


@pytest.mark.parametrize("stored", ["model", "backbone"])
def test_padding_and_truncation_that_a_tokenizer_was_saved_with_do_not_matter(tmp_path: Path, stored: str) -> None:
    """As the usual call of a training loop leaves them: queries are cut and padded otherwise."""
    folder, backbone = write_full(tmp_path, biases), tiny()
    padded = tokenizers.Tokenizer.from_str(backbone.tokenizer_json)
    padded.enable_padding(length=64)
    padded.enable_truncation(32)
    if stored == "model":
        (folder / "tokenizer.json").write_text(padded.to_str())
    else:
        backbone = dataclasses.replace(backbone, tokenizer_json=padded.to_str())
    assert read_model(folder, backbone, Wishes()).head.outputs == 3


def test_a_space_before_a_text_is_told(tmp_path: Path) -> None:
    """Taggers have it: their texts were divided into words."""
    backbone = tiny("tiny-roberta")
    document = json.loads(backbone.tokenizer_json)
    document["pre_tokenizer"]["add_prefix_space"] = not document["pre_tokenizer"]["add_prefix_space"]
    other = json.dumps(document)
    assert differences(other, backbone.tokenizer_json, 0) == []
    assert sets_space(other) != sets_space(backbone.tokenizer_json)
