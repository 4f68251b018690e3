"""Adapters of PEFT and AdapterHub: imported, they answer as in their own library; what cannot be served is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import LIVE_LENGTHS, LIVE_SEED
from safetensors.numpy import load_file, save_file
from support import ENGINE_SETTINGS, FIXTURES, tiny

from checkpoints.imports import patterns
from checkpoints.imports.heads import Wishes
from checkpoints.imports.task import make_task, read_adapter
from checkpoints.task_file import read_task, task_to_bytes
from jpets.engine.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.errors import InvalidBackbone, InvalidTask
from jpets.types import Query, Task

IMPORTS = FIXTURES / "imports"
ROWS, LENGTH = 8, 32
KEPT = {library: sorted(path.name for path in (IMPORTS / library).iterdir()) for library in ("peft", "adapters")}
LIVE = [name for name in KEPT if find_spec("torch") is not None and find_spec(name) is not None]
SOURCES = [(library, "kept") for library in KEPT] + [(library, "live") for library in LIVE]
ARGUMENTS: Mapping[str, Wishes] = {"multilabel": Wishes(labels=("a", "b", "c"))}
"""What a user says beside the folder."""


def backbone_of(case: str) -> str:
    family = case.rpartition("-")[2]
    return f"tiny-{family}" if family in ("distilbert", "roberta", "electra") else "tiny-bert"


def imported(folder: Path, name: str = "own", wishes: Wishes = Wishes()) -> Task:  # noqa: B008
    backbone = tiny(backbone_of(folder.name))
    found = read_adapter(folder, backbone, wishes)
    assert found is not None
    task = make_task(name, found, backbone)
    return read_task(task_to_bytes(task), id=name, config=backbone.config, backbone=backbone.ref())


def written(library: str, source: str, folder: Path) -> tuple[dict[str, np.ndarray], Mapping[str, tuple[Path, Any]]]:
    """(inputs, case -> its folder and logits), from the fixtures or made now."""
    if source == "kept":
        inputs = dict(np.load(FIXTURES / "tiny-bert" / "outputs.npz"))
        cases = {name: IMPORTS / library / name for name in KEPT[library]}
        return inputs, {name: (path, np.load(path / "outputs.npz")["logits"]) for name, path in cases.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own
        import imported_models
        import reference_models

        tensors = reference_models.random_inputs(LIVE_LENGTHS, LIVE_SEED)
        found = {}
        for seed, name in enumerate(imported_models.PEFT if library == "peft" else imported_models.HUB):
            (folder / name).mkdir()
            found[name] = (folder / name, imported_models.write(library, name, folder / name, tensors, seed))
    return {name: tensor.numpy() for name, tensor in tensors.items()}, found


@pytest.mark.parametrize(("library", "source"), SOURCES)
def test_imported_tasks_answer_as_in_their_library(library: str, source: str, tmp_path: Path) -> None:
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
        found = result.logits  # type: ignore[attr-defined]
        expected = logits[row] if found.ndim == 1 else logits[row, -width:][: len(found)]  # virtual tokens stand first
        worst = max(worst, float(np.abs(found - expected).max()))
    return worst


Edit = Callable[[Path], None]


def settings(**changes: Any) -> Edit:
    """Changes ``adapter_config.json``; AdapterHub's options lie in its ``config``."""

    def edit(folder: Path) -> None:
        path = folder / "adapter_config.json"
        document = json.loads(path.read_text())
        document.get("config", document).update(changes)
        path.write_text(json.dumps(document))

    return edit


def tensors(change: Callable[[dict[str, np.ndarray]], None]) -> Edit:
    def edit(folder: Path) -> None:
        (path,) = (path for path in folder.glob("adapter*.safetensors"))
        stored = load_file(path)
        change(stored)
        save_file(stored, path)

    return edit


def drop(end: str) -> Edit:
    return tensors(lambda stored: [stored.pop(name) for name in list(stored) if name.endswith(end)] and None)


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
    ("peft/lora", tensors(lambda stored: [each.fill(np.nan) for each in stored.values()] and None), ["NaN"]),
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
    ("peft/ia3", settings(feedforward_modules=[5]), ["feedforward_modules: expected names"]),
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


def test_one_problem_makes_no_others_of_what_is_understood(tmp_path: Path) -> None:
    folder = tmp_path / "lora-bias-all"
    shutil.copytree(IMPORTS / "peft" / "lora-bias-all", folder)
    drop("layer.0.attention.self.query.lora_B.weight")(folder)
    with pytest.raises(InvalidTask, match=r"lora_B\.weight: expected .* found nothing") as refused:
        imported(folder)
    assert "bias" not in refused.value.message


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
