"""Sentence-Transformers folders: as backbones, as fine-tuned models, as adapters. All by the library's own rules."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from sentence_folder import CLS, TINY, USUAL, cased, describe, sentence_folder, write
from support import FIXTURES, tiny

from checkpoints.backbone import Backbone
from checkpoints.imports.heads import Wishes
from checkpoints.imports.imported import Imported
from checkpoints.imports.task import base_model, extracted, make_task, read_adapter, read_model
from checkpoints.native import read_native, write_native
from checkpoints.source import load_backbone
from checkpoints.task_file import read_task, task_to_bytes
from jpets.errors import InvalidBackbone, InvalidTask
from jpets.tokenizing import TextEncoder
from jpets.types import BY_MEAN, EmbeddingRule, Preprocessing, Query

LORA = FIXTURES / "imports" / "peft" / "lora"
MEAN = {"pooling_mode_mean_tokens": True}
OWN = {"query": "query: "}
PROMPTED = {"prompts": OWN, "default_prompt_name": "query"}


def adapter_folder(folder: Path, inner: str = "", **how: Any) -> Path:
    """An adapter of the encoder in a Sentence-Transformers folder."""
    describe(folder, inner=inner, **how)
    settings = json.loads((LORA / "adapter_config.json").read_text())
    settings |= {"task_type": "FEATURE_EXTRACTION", "modules_to_save": None}
    write(folder / inner / "adapter_config.json", settings)
    stored = load_file(LORA / "adapter_model.safetensors")
    save_file(
        {name.replace(".bert.", "."): own for name, own in stored.items() if "classifier" not in name},
        folder / inner / "adapter_model.safetensors",
    )
    return folder


def imported_adapter(folder: Path, backbone: Backbone, wishes: Wishes = Wishes()) -> Imported:  # noqa: B008
    found = read_adapter(folder, backbone, wishes)
    assert found is not None
    return found


def rule_of(folder: Path) -> EmbeddingRule:
    return load_backbone(folder).embeds


POOLED: list[tuple[tuple[str, ...], dict[str, Any], tuple[str, bool]]] = [
    (USUAL, CLS, ("cls", True)),
    (USUAL[:2], CLS, ("cls", False)),
    (USUAL[:2], MEAN, ("mean", False)),
    (USUAL[:2], {"pooling_mode": "cls", **MEAN}, ("cls", False)),  # the flags of older versions count no more
    (USUAL, {"embedding_dimension": 64, "pooling_mode": ["cls"], "include_prompt": False}, ("cls", True)),
    (USUAL, {"pooling_mode_cls_token": False}, ("mean", True)),  # none: the library's default
    (USUAL, {"pooling_mode_mean_sqrt_len_tokens": True}, ("mean", True)),  # the same once it has length 1
    (("Transformer", "Pooling", "Dropout", "Normalize"), CLS, ("cls", True)),
    (("sentence_transformers.base.modules.transformer.Transformer", *USUAL[1:]), CLS, ("cls", True)),
]


@pytest.mark.parametrize(("modules", "pooling", "expected"), POOLED)
def test_pooling_and_normalisation_are_the_folders(
    modules: tuple[str, ...], pooling: dict[str, Any], expected: tuple[str, bool], tmp_path: Path
) -> None:
    folder = sentence_folder(tmp_path / "own", *modules, pooling=pooling)
    backbone = load_backbone(folder)
    assert (backbone.embeds.pooling, backbone.embeds.normalize) == expected
    assert backbone.fingerprint == tiny().fingerprint  # which tasks name
    for head in (
        read_model(folder, backbone, Wishes()).head,
        imported_adapter(adapter_folder(tmp_path / "adapter", modules=modules, pooling=pooling), backbone).head,
    ):
        assert (head.pooling, head.normalize) == expected


def test_a_folder_that_says_nothing_embeds_by_the_mean() -> None:
    assert tiny().embeds == BY_MEAN == EmbeddingRule("mean", True, Preprocessing())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"modules": (*USUAL[:2], "LayerNorm")}, "'LayerNorm' is not supported"),
    ({"modules": ("custom_st.Transformer", *USUAL[1:])}, "'custom_st.Transformer' is not supported"),
    ({"modules": ("Transformer", "Normalize", "Pooling")}, r"expected Transformer, Pooling, maybe some Dense and"),
    ({"modules": (*USUAL, "Dense")}, r"found \['Transformer', 'Pooling', 'Normalize', 'Dense'\]"),
    ({"modules": ("Transformer",)}, r"found \['Transformer'\]"),
    ({"pooling": {"pooling_mode_max_tokens": True}}, r"expected pooling_mode to be one of .*found \['max_tokens'\]"),
    ({"pooling": {"pooling_mode_lasttoken": True}}, r"found \['lasttoken'\]"),
    ({"pooling": {"pooling_mode_weightedmean_tokens": True}}, r"found \['weightedmean_tokens'\]"),
    ({"pooling": {**CLS, **MEAN}}, r"found \['cls_token', 'mean_tokens'\]"),
    ({"pooling": {"pooling_mode": ["mean", "max"]}}, r"found \['mean', 'max'\]"),
    ({"pooling": {"pooling_mode_mean_sqrt_len_tokens": True}, "modules": USUAL[:2]}, "mean_sqrt_len_tokens"),
    ({"pooling": {**CLS, "something_new": 3}}, "something_new: 3 is not supported"),
    (
        {"pooling": {**MEAN, "include_prompt": False}, "prompts": PROMPTED},
        "include_prompt must be true beside a default prompt",
    ),
    ({"prompts": {"prompts": {}, "default_prompt_name": "q"}}, "default_prompt_name 'q' is none of its prompts"),
    ({"prompts": {"prompts": {"q": 5}}}, "prompts must be texts"),
    ({"prompts": {"truncate_dim": 32}}, "truncate_dim is not supported, found 32"),
    ({"prompts": {"model_type": "SparseEncoder"}}, "model_type must be SentenceTransformer"),
    ({"settings": {"max_seq_length": -1}}, "max_seq_length: expected a whole number"),
    ({"settings": {"do_lower_case": "yes"}}, "do_lower_case: expected bool"),
    ({"settings": {"query_length": 32}}, "query_length: 32 is not supported"),
    ({"settings": {"transformer_task": "fill-mask"}}, "transformer_task: expected feature-extraction"),
    ({"settings": {"model_args": {"num_hidden_layers": 2}}}, "model_args: num_hidden_layers: 2 is not supported"),
]


@pytest.mark.parametrize(("how", "named"), REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(how: dict[str, Any], named: str, tmp_path: Path) -> None:
    modules = how.get("modules", USUAL)
    others = {name: own for name, own in how.items() if name != "modules"}
    folder = sentence_folder(tmp_path / "own", *modules, **others)
    with pytest.raises(InvalidBackbone, match=named):
        load_backbone(folder)
    with pytest.raises(InvalidTask, match=named):
        read_model(folder, tiny(), Wishes())
    with pytest.raises(InvalidTask, match=named):
        imported_adapter(adapter_folder(tmp_path / "adapter", modules=modules, **others), tiny())


@pytest.mark.parametrize("path", ["../1_Pooling", "/etc", "a/b", ".."])
def test_modules_lie_in_the_folder(path: str, tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "own")
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = path
    write(folder / "modules.json", modules)
    with pytest.raises(InvalidBackbone, match=r"modules\.json: expected the name of a folder"):
        load_backbone(folder)


@pytest.mark.parametrize("content", ["", "{}", "[5]", "[[", '[{"type": "Transformer"}]'])
def test_broken_modules_are_refused(content: str, tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "own")
    (folder / "modules.json").write_text(content)
    with pytest.raises(InvalidBackbone, match=r"modules\.json: expected"):
        load_backbone(folder)


LENGTHS: list[tuple[dict[str, Any] | None, dict[str, Any] | None, int]] = [
    ({"max_seq_length": 16}, None, 16),
    ({"max_seq_length": 16}, {"model_max_length": 32}, 16),
    ({"max_seq_length": None}, {"model_max_length": 32}, 32),
    (None, {"model_max_length": 32}, 32),
    ({"max_seq_length": 16, "tokenizer_args": {"model_max_length": 20}}, None, 20),
    ({"max_seq_length": 512}, None, 128),  # more than the model takes
    (None, {"model_max_length": 1e30}, 128),
    (None, {"max_len": 32}, 32),  # as older tokenizers call it
    (None, {"max_len": 32, "model_max_length": 48}, 48),
]


@pytest.mark.parametrize(("settings", "tokenizer", "expected"), LENGTHS)
def test_texts_are_cut_where_the_library_cuts_them(
    settings: dict[str, Any] | None, tokenizer: dict[str, Any] | None, expected: int, tmp_path: Path
) -> None:
    folder = sentence_folder(tmp_path / "own", settings=settings)
    if tokenizer is not None:
        write(folder / "tokenizer_config.json", tokenizer)
    rule = Preprocessing(expected, True)
    assert rule_of(folder).preprocessing == rule
    model = read_model(folder, tiny(), Wishes())
    assert make_task("own", extracted(model, []), tiny()).preprocessing == rule
    asked = read_model(folder, tiny(), Wishes(max_length=9))
    assert asked.preprocessing == Preprocessing(9, True)


def test_older_settings_are_named_after_the_family(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "own")
    write(folder / "sentence_roberta_config.json", {"max_seq_length": 12})
    assert rule_of(folder).preprocessing.max_length == 12


def test_the_default_prompt_stands_before_every_text_and_others_are_told(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "query: ", "passage": "passage: ", "none": ""}, "default_prompt_name": "query"}
    folder = sentence_folder(tmp_path / "own", prompts=prompts)
    assert rule_of(folder).preprocessing.prefix == "query: "
    model = read_model(folder, tiny(), Wishes())
    assert model.preprocessing.prefix == "query: " and model.preprocessing.prompts == prompts["prompts"]
    task = make_task("own", extracted(model, []), tiny())
    again = read_task(task_to_bytes(task), id="own", config=tiny().config, backbone=tiny().ref())
    assert again.preprocessing == task.preprocessing
    assert "it has 1 prompts that callers choose, 'passage' ('passage: ')" in model.notes[0]
    write(folder / "config_sentence_transformers.json", {**prompts, "default_prompt_name": None})
    assert rule_of(folder).preprocessing.prefix is None
    assert "it has 2 prompts" in read_model(folder, tiny(), Wishes()).notes[0]


def test_texts_lose_their_case_over_a_tokenizer_that_keeps_it(tmp_path: Path) -> None:
    folder = cased(sentence_folder(tmp_path / "own", settings={"do_lower_case": True}))
    backbone, plain = load_backbone(folder), load_backbone(cased(sentence_folder(tmp_path / "cased")))
    assert backbone.fingerprint not in (plain.fingerprint, tiny().fingerprint)

    def ids(own: Backbone, text: str) -> list[int]:
        return TextEncoder.of(own).encode(Query(None, text), Preprocessing()).ids.tolist()

    assert ids(backbone, "A Library") == ids(plain, "a library") != ids(plain, "A Library")
    assert read_model(folder, backbone, Wishes()).head.pooling == "cls"
    with pytest.raises(InvalidTask, match="do_lower_case: the backbone's tokenizer keeps the case"):
        read_model(folder, plain, Wishes())
    lowering = sentence_folder(tmp_path / "lowering", settings={"do_lower_case": True})
    assert load_backbone(lowering).fingerprint == tiny().fingerprint  # nothing to do


def test_a_model_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "own", inner="0_Transformer", settings={"max_seq_length": 16})
    backbone = load_backbone(folder)
    assert (backbone.name, backbone.fingerprint) == ("own", tiny().fingerprint)
    assert backbone.embeds == EmbeddingRule("cls", True, Preprocessing(16, True))
    assert read_model(folder, tiny(), Wishes()).head.pooling == "cls"


def test_a_classifier_of_setfit_is_not_taken_for_an_embedder(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "model")
    (folder / "config_setfit.json").write_text('{"labels": ["a", "b"]}')
    with pytest.raises(InvalidTask, match=r"config_setfit.json: SetFit's classifier is not imported; --head embedding"):
        read_model(folder, tiny(), Wishes())
    assert read_model(folder, tiny(), Wishes(head="embedding")).head.type == "embedding"


def test_prompts_that_are_not_pooled_are_not_offered(tmp_path: Path) -> None:
    pooling = {**CLS, "include_prompt": False}
    prompts = {"prompts": {"query": "query: "}}
    assert rule_of(sentence_folder(tmp_path / "own", pooling=pooling, prompts=prompts)).preprocessing.prompts is None
    folder = sentence_folder(tmp_path / "default", pooling=pooling, prompts=PROMPTED)
    with pytest.raises(InvalidTask, match="include_prompt must be true beside a default prompt"):
        read_model(folder, tiny(), Wishes(pooling="mean"))


@pytest.mark.parametrize("inner", ["", "0_Transformer"])
def test_an_adapter_is_embedded_as_its_folder_says(inner: str, tmp_path: Path) -> None:
    folder = adapter_folder(
        tmp_path / "own",
        inner,
        settings={"max_seq_length": 16},
        prompts=PROMPTED,
    )
    found = imported_adapter(folder, tiny())
    task = make_task("own", found, tiny())
    assert (task.head.pooling, task.head.normalize) == ("cls", True)
    assert task.preprocessing == Preprocessing(16, True, prefix="query: ", prompts=OWN)
    assert [delta.method for delta in task.deltas] == ["lora"]
    asked = imported_adapter(folder, tiny(), Wishes(pooling="mean", normalize=False, max_length=9))
    assert (asked.head.pooling, asked.head.normalize, asked.preprocessing.max_length) == ("mean", False, 9)
    assert base_model(folder)
    with pytest.raises(InvalidBackbone, match="found an adapter"):
        load_backbone(folder)


def test_a_guess_at_the_pooling_is_told(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "own")
    (folder / "modules.json").unlink()
    found = imported_adapter(folder, tiny())
    assert any("pooled by mean, not normalised; see --pooling, --normalize" in note for note in found.notes)
    said = imported_adapter(folder, tiny(), Wishes(pooling="cls", normalize=True))
    assert (said.head.pooling, said.head.normalize) == ("cls", True)
    assert not any("pooled" in note for note in said.notes)


def test_the_native_form_keeps_how_a_backbone_embeds(tmp_path: Path) -> None:
    backbone = load_backbone(sentence_folder(tmp_path / "own", settings={"max_seq_length": 16}, prompts=PROMPTED))
    write_native(backbone, tmp_path / "native")
    again = read_native(tmp_path / "native")
    assert (
        again.embeds
        == backbone.embeds
        == EmbeddingRule("cls", True, Preprocessing(16, True, prefix="query: ", prompts=OWN))
    )
    assert again.fingerprint == tiny().fingerprint
    manifest = json.loads((tmp_path / "native" / "backbone.json").read_text())
    del manifest["embeds"]
    write(tmp_path / "native" / "backbone.json", manifest)
    assert read_native(tmp_path / "native").embeds == BY_MEAN  # of before


def test_a_package_carries_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "tiny_sentences"
    sentence_folder(package / "model", inner="0_Transformer")
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert load_backbone("tiny-sentences").embeds.pooling == "cls"


def _published(folder: Path, hub: Path) -> Callable[..., str]:
    """A hub with one model: what is asked for, and no more, comes to ``hub``."""
    from huggingface_hub.utils._paths import filter_repo_objects

    def download(name: str, allow_patterns: list[str]) -> str:
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            (hub / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / file, hub / file)
        hub.mkdir(exist_ok=True)
        return str(hub)

    return download


def _shards(folder: Path, inner: str = "") -> None:
    stored = load_file(folder / inner / "model.safetensors")
    (folder / inner / "model.safetensors").unlink()
    names = sorted(stored)
    files = {f"model-0000{at + 1}-of-00002.safetensors": names[at::2] for at in range(2)}
    for file, own in files.items():
        save_file({name: stored[name] for name in own}, folder / inner / file)
    weight_map = {name: file for file, own in files.items() for name in own}
    write(folder / inner / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _pickled(folder: Path, inner: str = "") -> None:
    (folder / inner / "model.safetensors").unlink()
    shutil.copy(FIXTURES / "tiny-bert-bin" / "pytorch_model.bin", folder / inner)


@pytest.mark.parametrize("inner", ["", "0_Transformer"])
@pytest.mark.parametrize("stored", [None, _shards, _pickled])
def test_all_that_a_model_needs_comes_from_the_hub(
    stored: Callable[..., None] | None, inner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    folder = sentence_folder(tmp_path / "own", inner=inner, settings={"max_seq_length": 16}, prompts=PROMPTED)
    (folder / inner / "vocab.txt").write_text("[PAD]\n")
    for unwanted in ("onnx/model.onnx", "tf_model.h5", f"{inner or '1_Pooling'}/other.bin"):
        (folder / unwanted).parent.mkdir(exist_ok=True)
        (folder / unwanted).write_bytes(b"\0")
    if stored is not None:
        stored(folder, inner)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _published(folder, tmp_path / "hub"))
    backbone = load_backbone("someone/tiny-sentences")
    assert backbone.fingerprint == tiny().fingerprint
    assert backbone.embeds == EmbeddingRule("cls", True, Preprocessing(16, True, prefix="query: ", prompts=OWN))
    came = {path.name for path in (tmp_path / "hub").rglob("*") if path.is_file()}
    assert "vocab.txt" in came and not came & {"model.onnx", "tf_model.h5", "other.bin"}


def test_an_index_on_the_hub_cannot_name_files_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = sentence_folder(tmp_path / "own")
    _shards(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _published(folder, tmp_path / "hub"))
    with pytest.raises(InvalidBackbone, match="expected names of files in the folder"):
        load_backbone("someone/tiny-sentences")


def test_what_a_folder_lacks_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(TINY, folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InvalidBackbone, match="expected the model's tokenizer beside config"):
        load_backbone(folder)
