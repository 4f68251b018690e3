"""Changed folders of adapters: options that cannot be served are refused by name, those without effect are taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from imported_tasks import IMPORTS, imported
from safetensors.numpy import load_file, save_file

from checkpoints.imports import patterns
from checkpoints.imports.heads import Wishes
from jpets.errors import InvalidBackbone, InvalidTask

Edit = Callable[[Path], object]


def changed(file: str, **changes: Any) -> Edit:
    """Changes options of a file; AdapterHub's lie in its ``config``."""

    def edit(folder: Path) -> None:
        path = folder / file
        document = json.loads(path.read_text())
        document.get("config", document).update(changes)
        path.write_text(json.dumps(document))

    return edit


def settings(**changes: Any) -> Edit:
    return changed("adapter_config.json", **changes)


def head(**changes: Any) -> Edit:
    return changed("head_config.json", **changes)


def both(*edits: Edit) -> Edit:
    return lambda folder: [edit(folder) for edit in edits]


def tensors(change: Callable[[dict[str, np.ndarray]], object], files: str = "adapter*.safetensors") -> Edit:
    def edit(folder: Path) -> None:
        (path,) = (path for path in folder.glob(files))
        stored = load_file(path)
        change(stored)
        save_file(stored, path)

    return edit


def drop(end: str, files: str = "adapter*.safetensors") -> Edit:
    return tensors(lambda stored: [stored.pop(name) for name in list(stored) if name.endswith(end)], files)


def add(name: str, *shape: int, files: str = "adapter*.safetensors") -> Edit:
    return tensors(lambda stored: stored.update({name: np.ones(shape, np.float32)}), files)


HEAD = "model_head.safetensors"
A_MATRIX = "bert.encoder.layer.0.attention.self.query.lora_A.weight"
NOT_FINITE = tensors(lambda stored: stored.update({name: np.full_like(each, np.nan) for name, each in stored.items()}))


REFUSED: list[tuple[str, Edit, list[str]]] = [
    ("peft/lora", settings(use_dora=True), ["use_dora"]),
    ("peft/lora", settings(lora_bias=True, layer_replication=[[0, 2]]), ["lora_bias", "layer_replication"]),
    ("peft/lora", settings(init_lora_weights="pissa"), ["init_lora_weights", "pissa"]),
    ("peft/lora", settings(trainable_token_indices=[1, 2]), ["trainable_token_indices"]),
    ("peft/lora", settings(something_new={"a": 1}), ["something_new"]),
    ("peft/lora", settings(task_type="CAUSAL_LM"), ["task_type", "SEQ_CLS"]),
    ("peft/lora", settings(peft_type="VERA"), ["peft_type", "LORA"]),
    ("peft/lora", settings(r=8), ["lora_A", "expected [8, 64], found [4, 64]"]),
    ("peft/lora", settings(r="many"), ["r: expected int"]),
    ("peft/lora", settings(target_modules=["query", "value", "key"]), ["self.key.lora_A.weight", "found nothing"]),
    ("peft/lora", drop("query.lora_B.weight"), ["layer.0.attention.self.query.lora_B.weight", "found nothing"]),
    ("peft/lora", drop("classifier.weight"), ["classifier.weight: expected [any, 64], found nothing"]),
    (
        "peft/lora",
        tensors(lambda stored: stored.update({"base_model.model.bert.embeddings.extra": np.zeros(3, np.float32)})),
        ["bert.embeddings.extra: not understood"],
    ),
    ("peft/lora", NOT_FINITE, ["NaN"]),
    (
        "peft/lora",
        settings(rank_pattern={"query": "8"}, alpha_pattern={"value": None, "(": 3}),
        [
            "rank_pattern['query']: expected a whole number from 1 on",
            "alpha_pattern['value']: expected a number",
            "alpha_pattern['(']: expected a pattern",
        ],
    ),
    (
        "peft/lora",
        settings(r=-3, use_rslora="no", rank_pattern={"value": -3}),
        ["r: expected a whole number from 1 to", "use_rslora: expected bool", "rank_pattern['value']"],
    ),
    ("peft/ia3", settings(feedforward_modules=5), ["feedforward_modules: expected list or str"]),
    ("peft/ia3", settings(feedforward_modules=[5]), ["feedforward_modules: expected a list of str, found [5]"]),
    ("peft/prefix", settings(num_virtual_tokens=-1), ["num_virtual_tokens: expected a whole number from 1 to"]),
    ("peft/ia3", settings(feedforward_modules=["key"]), ["feedforward_modules", "key"]),
    ("peft/prefix", settings(num_virtual_tokens=7), ["prompt_embeddings", "expected [7, 384], found [5, 384]"]),
    ("adapters/seq-bn", settings(ln_before=True, use_gating=True), ["ln_before", "use_gating"]),
    ("adapters/seq-bn", settings(phm_layer=True), ["phm_layer"]),
    ("adapters/seq-bn", settings(inv_adapter="nice"), ["inv_adapter"]),
    ("adapters/seq-bn", settings(residual_before_ln="post_add"), ["residual_before_ln"]),
    ("adapters/seq-bn", settings(original_ln_after=False), ["original_ln_after"]),
    ("adapters/seq-bn", settings(architecture="union"), ["architecture", "prefix_tuning"]),
    ("adapters/seq-bn", settings(non_linearity="leakyrelu"), ["non_linearity", "leakyrelu"]),
    ("adapters/lora", settings(use_dora=True, vera_d=0.1), ["use_dora", "vera_d"]),
    ("adapters/lora", settings(composition_mode="other"), ["composition_mode"]),
    ("peft/lora", settings(r=10**400, lora_alpha=10**400), ["r: expected a whole number from 1 to", "lora_alpha: exp"]),
    ("peft/lora", settings(rank_pattern={"value": 10**12}), ["rank_pattern['value']: expected a whole number"]),
    ("peft/lora", settings(r=10**6), ["query.lora_A.weight: expected [1000000, 64], found [4, 64]"]),
    ("peft/prompt", settings(num_virtual_tokens=10**6), ["expected [1000000, 64]"]),
    ("adapters/seq-bn", settings(scaling=10**400), ["scaling"]),
    ("adapters/seq-bn", settings(mh_adapter=True), ["layer.0.attention.output.adapters", "found nothing"]),
    ("adapters/seq-bn", settings(output_adapter=False), ["mh_adapter, output_adapter all off"]),
    ("adapters/seq-bn", settings(leave_out=[1]), ["layer.1.output.adapters.own.adapter_down.0.weight: not understood"]),
    ("adapters/sizes", settings(leave_out=[]), ["layer.1.output.adapters", "found nothing"]),
    (
        "adapters/sizes",
        settings(mh_adapter=False),
        ["attention.output.adapters.own.adapter_down.0.bias: not understood"],
    ),
    ("adapters/lora", settings(r=-1, alpha=10**400), ["r: expected a whole number", "alpha: expected a number"]),
    ("adapters/lora", settings(attn_matrices=["q", "k", "v", "o"]), ["attn_matrices", "'o'"]),
    ("adapters/lora", drop("query.loras.own.lora_B"), ["query.loras.own.lora_B", "found nothing"]),
    ("adapters/prefix", settings(prefix_length=-1, bottleneck_size=0), ["prefix_length", "bottleneck_size"]),
    ("adapters/prefix-flat", settings(leave_out=[0, 1, 2]), ["leave_out"]),
    # all problems at once, options before the tensors that they spoil
    ("peft/lora", settings(r=8, task_type="CAUSAL_LM"), ["task_type", "expected [8, 64], found [4, 64]", "more"]),
    ("peft/lora", both(NOT_FINITE, settings(use_dora=True)), ["use_dora", "lora_A.weight: expected finite"]),
    (
        "adapters/seq-bn",
        both(settings(ln_before=True), head(activation_function="leakyrelu")),
        ["ln_before", "activation_function: expected null or one of gelu", "'leakyrelu'"],
    ),
    # tensors that are missing, or come twice, or belong to nothing
    ("peft/lora", drop("classifier.bias"), ["classifier.bias: expected [3], found nothing"]),
    ("adapters/seq-bn", drop("own.1.bias", HEAD), ["heads.own.1.bias: expected [64], found nothing"]),
    ("adapters/seq-bn", drop("own.4.bias", HEAD), ["heads.own.4.bias: expected [3], found nothing"]),
    ("adapters/seq-bn", head(bias=False), ["heads.own.4.bias: not understood"]),
    ("adapters/ia3", drop("own.1.bias", "*head*.safetensors"), ["heads.own.1.bias: expected [3], found nothing"]),
    ("adapters/seq-bn", add("heads.other.1.bias", 3, files=HEAD), ["heads.other.1.bias: not understood"]),
    (
        "peft/lora",
        add("classifier.weight", 3, 64),
        ["base_model.model.classifier.weight", "expected the same numbers as"],
    ),
    (
        "peft/lora",
        add("base_model.model.classifier.modules_to_save.weight", 3, 64),
        ["classifier.modules_to_save.weight", "expected the same numbers as"],
    ),
    ("peft/lora", add(A_MATRIX, 4, 64), [f"base_model.model.{A_MATRIX}", "expected the same numbers as"]),
    ("peft/lora", add("evil.original_module.x", 3), ["evil.original_module.x: not understood"]),
    (
        "peft/lora",
        add("base_model.model.bert.encoder.layer.0.original_module.x", 3),
        ["layer.0.original_module.x: not understood"],
    ),
    (
        "peft/lora",
        add("base_model.model.classifier.weight", 0, 64),
        ["classifier.weight: expected [any, 64], found [0, 64]"],
    ),
    # options of other types
    (
        "peft/lora",
        settings(target_modules=5, exclude_modules=5, layers_to_transform={"a": 0}, modules_to_save=5),
        [
            "target_modules: expected list or str, found 5",
            "exclude_modules: expected list or str, found 5",
            'layers_to_transform: expected int or list, found {"a": 0}',
            "modules_to_save: expected list, found 5",
        ],
    ),
    (
        "peft/lora",
        settings(target_modules=[5], exclude_modules="(", layers_to_transform=["0"], bias="some"),
        [
            "target_modules: expected a list of str, found [5]",
            "exclude_modules: expected names of modules or a pattern of them, found '('",
            'layers_to_transform: expected a list of int, found ["0"]',
            "bias: expected one of ['none', 'all', 'lora_only'], found \"some\"",
        ],
    ),
    (
        "adapters/seq-bn",
        both(
            settings(is_parallel="yes", original_ln_before="x", leave_out=["0"]),
            head(use_pooler="x", bias="x", label2id=5, activation_function=["x"]),
        ),
        [
            'is_parallel: expected bool, found "yes"',
            'original_ln_before: expected bool, found "x"',
            'leave_out: expected a list of int, found ["0"]',
            'use_pooler: expected bool, found "x"',
            'bias: expected bool, found "x"',
            "label2id: expected dict, found 5",
            'activation_function: expected str, found ["x"]',
        ],
    ),
    ("adapters/prefix-flat", settings(flat=1), ["flat: expected bool, found 1"]),
    ("adapters/seq-bn", head(label2id={"a": 0.5, "b": 1, "c": 2}), ["label2id: expected the numbers 0 to 2", "0.5"]),
    ("adapters/seq-bn", head(label2id={"a": True, "b": 0, "c": 2}), ["label2id: expected the numbers", "'True'"]),
    (
        "adapters/seq-bn",
        both(settings(ln_before=True), head(label2id={"a": 0, "": 1, "c": 2})),
        ["ln_before", "label2id: expected non-empty texts"],
    ),
    (
        "peft/lora",
        both(settings(use_dora=True, id2label={"0": "same", "1": "same", "2": ""}), drop("lora_A.weight")),
        ["use_dora", "id2label: expected non-empty texts", "id2label: expected each once, found 'same'", "lora_A"],
    ),
    ("adapters/seq-bn", head(label2id=[1, 2]), ["label2id: expected dict, found [1, 2]"]),
]


@pytest.mark.parametrize(("case", "edit", "named"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str, edit: Edit, named: list[str], tmp_path: Path) -> None:
    folder = tmp_path / case.partition("/")[2]
    shutil.copytree(IMPORTS / case, folder)
    edit(folder)
    with pytest.raises(InvalidTask) as refused:
        imported(folder)
    for each in named:
        assert each in refused.value.message


def renamed(old: str, new: str) -> Edit:
    def change(stored: dict[str, np.ndarray]) -> None:
        assert any(old in name for name in stored)
        for name in list(stored):
            stored[name.replace(old, new)] = stored.pop(name)

    return tensors(change)


TAKEN: list[tuple[str, Edit]] = [
    ("peft/lora-roberta", renamed(".modules_to_save.default.", ".modules_to_save.senti.")),
    ("peft/lora-electra", renamed(".modules_to_save.default.", ".modules_to_save.senti.")),
    ("adapters/seq-bn", add("heads.own2.1.bias", 3, files=HEAD)),
    ("adapters/seq-bn", head(activation_function="TANH")),
    ("adapters/seq-bn", head(label2id={"LABEL_0": "0", "LABEL_1": "1", "LABEL_2": 2})),
    ("adapters/double-seq-bn", head(activation_function="leakyrelu")),  # of a single layer: unused
]
"""Options that change nothing, in a case's folder."""


@pytest.mark.parametrize(("case", "edit"), TAKEN)
def test_what_has_no_effect_is_taken(case: str, edit: Edit, tmp_path: Path) -> None:
    folder = tmp_path / case.partition("/")[2]
    shutil.copytree(IMPORTS / case, folder)
    edit(folder)
    found, expected = imported(folder), imported(IMPORTS / case)
    assert (found.labels, found.head.activation) == (expected.labels, expected.head.activation)
    pairs = [(found.head.tensors, expected.head.tensors)]
    pairs += [(a.tensors, b.tensors) for a, b in zip(found.deltas, expected.deltas, strict=True)]
    for own, other in pairs:
        assert own.keys() == other.keys()
        assert all(np.array_equal(own[name], other[name]) for name in own)


def test_a_head_may_have_no_bias(tmp_path: Path) -> None:
    folder = tmp_path / "seq-bn"
    shutil.copytree(IMPORTS / "adapters" / "seq-bn", folder)
    both(head(bias=False), drop("own.4.bias", HEAD))(folder)
    found = imported(folder).head
    assert not found.tensors["bias"].any() and found.tensors["dense_bias"].any()


def test_a_prompt_is_as_wide_as_embeddings(tmp_path: Path) -> None:
    """Some models project embeddings to the width of their layers."""
    folder = tmp_path / "prompt-electra"
    shutil.copytree(IMPORTS / "peft" / "prompt", folder)
    stored = load_file(IMPORTS / "peft" / "lora-electra" / "adapter_model.safetensors")
    kept = {name.replace("model.", "", 1): own for name, own in stored.items() if ".classifier." in name}
    kept = {name: own for name, own in kept.items() if "_module" not in name and "to_save" not in name}
    save_file({**kept, "prompt_embeddings": np.ones((5, 32), np.float32)}, folder / "adapter_model.safetensors")
    (delta,) = imported(folder).deltas
    assert delta.tensors["embeddings/prompt"].shape == (1, 5, 32)


@pytest.mark.parametrize(
    ("case", "wishes", "named"),
    [
        ("adapters/seq-bn", Wishes(head="embedding"), "head: expected sequence-classification"),
        ("adapters/seq-bn", Wishes(head="token-classification"), "head: expected sequence-classification"),
        ("adapters/static-head", Wishes(head="question-answering"), "head: expected sequence-classification"),
        ("adapters/seq-bn", Wishes(pooling="mean"), "pooling: expected none for a head of type sequence-class"),
        ("peft/lora", Wishes(pooling="mean"), "pooling: expected none"),
        ("peft/lora-answers", Wishes(labels=("a", "b")), "labels: expected none for a head of type question-answ"),
        ("adapters/prefix-flat", Wishes(labels=("a", "b")), "labels: expected none"),
        ("peft/lora-token", Wishes(problem="regression"), "problem: expected none for a head of type token-class"),
    ],
)
def test_wishes_that_cannot_apply_are_refused(case: str, wishes: Wishes, named: str) -> None:
    with pytest.raises(InvalidTask, match=named):
        imported(IMPORTS / case, wishes=wishes)


def test_labels_that_do_not_fit_are_said_with_other_problems(tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    shutil.copytree(IMPORTS / "peft" / "lora", folder)
    settings(use_dora=True)(folder)
    with pytest.raises(InvalidTask, match=r"use_dora.*labels: expected 3, .* found 2"):
        imported(folder, wishes=Wishes(labels=("a", "b")))
    drop("classifier.weight")(folder)
    with pytest.raises(InvalidTask, match=r"classifier\.weight") as refused:
        imported(folder, wishes=Wishes(labels=("a", "b")))
    assert "labels" not in refused.value.message  # how many there should be is not known


@pytest.mark.parametrize(
    ("case", "missing"),
    [
        ("peft/lora-bias-all", "layer.0.attention.self.query.lora_B.weight"),
        ("peft/lora-roberta", "classifier.dense.weight"),
        ("adapters/seq-bn", "layer.0.output.adapters.own.adapter_down.0.weight"),
    ],
)
def test_one_problem_makes_no_others_of_what_is_understood(case: str, missing: str, tmp_path: Path) -> None:
    folder = tmp_path / case.partition("/")[2]
    shutil.copytree(IMPORTS / case, folder)
    drop(missing)(folder)
    with pytest.raises(InvalidTask, match=r"^[^;]*: expected [^;]* found nothing$"):
        imported(folder)


ENDLESS = r"(a|b|c|\w|\w\w|\.|\w\.)*\d\d"


@pytest.mark.parametrize("setting", [{"target_modules": ENDLESS}, {"rank_pattern": {ENDLESS: 4}}])
def test_a_pattern_without_end_is_refused(
    setting: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.2)
    folder = tmp_path / "lora"
    shutil.copytree(IMPORTS / "peft" / "lora", folder)
    settings(**setting)(folder)
    with pytest.raises(InvalidTask, match="takes too long"):
        imported(folder)


def test_a_pickle_that_runs_code_is_refused_unread(tmp_path: Path) -> None:
    folder = tmp_path / "lora-bin"
    shutil.copytree(IMPORTS / "peft" / "lora-bin", folder)
    ran = tmp_path / "ran"
    evil = f"cos\nsystem\n(S'touch {ran}'\ntR.".encode()
    path = folder / "adapter_model.bin"
    import zipfile

    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, evil if name.endswith("data.pkl") else data)
    with pytest.raises(InvalidBackbone, match="do not trust"):
        imported(folder)
    assert not ran.exists()


def test_labels_come_from_the_checkpoint_or_the_user() -> None:
    folder = IMPORTS / "peft" / "lora"
    assert imported(folder).labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert imported(folder, wishes=Wishes(labels=("x", "y", "z"))).labels == ("x", "y", "z")
    with pytest.raises(InvalidTask, match="labels: expected 3"):
        imported(folder, wishes=Wishes(labels=("x", "y")))


@pytest.mark.parametrize("targets", [["query", "value", "dense"], ".*(query|value|dense)"])
def test_a_model_without_a_pooler_has_no_deltas_there(targets: Any, tmp_path: Path) -> None:
    """Models with heads on tokens have none, though the backbone does and the settings' names fit it."""
    folder = tmp_path / "lora-token"
    shutil.copytree(IMPORTS / "peft" / "lora-token", folder)
    settings(target_modules=targets)(folder)

    def add(stored: dict[str, np.ndarray]) -> None:
        rank = next(array.shape[0] for name, array in stored.items() if name.endswith("lora_A.weight"))
        for layer in range(3):
            for module, (inputs, outputs) in {
                "attention.output": (64, 64),
                "intermediate": (64, 128),
                "output": (128, 64),
            }.items():
                name = f"base_model.model.bert.encoder.layer.{layer}.{module}.dense"
                stored[f"{name}.lora_A.weight"] = np.ones((rank, inputs), np.float32)
                stored[f"{name}.lora_B.weight"] = np.ones((outputs, rank), np.float32)

    tensors(add)(folder)
    (delta,) = imported(folder).deltas
    assert "pooler" not in delta.settings["sites"] and "ffn_in" in delta.settings["sites"]
