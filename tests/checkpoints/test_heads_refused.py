"""Heads that were not saved, or that answer the same whatever the text, are refused by name; the user is told what a
checkpoint does not say of its labels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_model import biases, write_full
from safetensors.numpy import load_file, save_file
from support import FIXTURES, tiny

from checkpoints.imports.heads import Wishes
from checkpoints.imports.imported import Imported
from checkpoints.imports.task import read_adapter, read_model
from jpets.errors import InvalidTask

IMPORTS = FIXTURES / "imports"
UNTYPED: dict[str, Any] = {"task_type": None, "id2label": None}


def adapter(folder: Path, case: str = "peft/lora", *, headless: bool = False, **settings: Any) -> Path:
    shutil.copytree(IMPORTS / case, folder)
    document = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(document | settings))
    if headless:
        stored = load_file(folder / "adapter_model.safetensors")
        kept = {name: own for name, own in stored.items() if "classifier" not in name and "qa_outputs" not in name}
        save_file(kept, folder / "adapter_model.safetensors")
    return folder


def read(folder: Path, wishes: Wishes = Wishes()) -> Imported:  # noqa: B008
    found = read_adapter(folder, tiny(), wishes)
    assert found is not None
    return found


def tuned(model: str) -> dict[str, Any]:
    return {"auto_mapping": {"base_model_class": model, "parent_library": "transformers.models.bert.modeling_bert"}}


@pytest.mark.parametrize(
    "model",
    ["BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering", "BertForMaskedLM"],
)
def test_an_adapter_whose_head_was_not_saved_gives_no_embeddings(model: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "own", headless=True, **UNTYPED, **tuned(model))
    with pytest.raises(InvalidTask, match=f"trained in a {model}.*say --head embedding"):
        read(folder)
    assert read(folder, Wishes(head="embedding")).head.type == "embedding"


@pytest.mark.parametrize("task_type", ["SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS"])
def test_a_task_type_without_its_head_is_refused_with_what_to_do(task_type: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "own", headless=True, task_type=task_type)
    with pytest.raises(InvalidTask, match=r"the folder holds no .* head .*say --head embedding"):
        read(folder)


def test_the_class_that_was_tuned_says_which_head_there_is(tmp_path: Path) -> None:
    for case, model, kind in (
        ("lora", "BertForSequenceClassification", "sequence-classification"),
        ("lora-token", "BertForTokenClassification", "token-classification"),
    ):
        assert read(adapter(tmp_path / case, f"peft/{case}", **UNTYPED, **tuned(model))).head.type == kind
    folder = adapter(tmp_path / "own", headless=True, **UNTYPED, **tuned("BertModel"))
    assert read(folder).head.type == "embedding"


@pytest.mark.parametrize("said", [{"id2label": {"0": "bad", "1": "good"}}, {"problem_type": "regression"}])
def test_a_model_whose_head_was_not_saved_gives_no_embeddings(said: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(FIXTURES / "tiny-bert", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | said))
    with pytest.raises(InvalidTask, match=r"config\.json names .*but the folder holds no head"):
        read_model(folder, tiny(), Wishes())
    assert read_model(folder, tiny(), Wishes(head="embedding")).head.type == "embedding"
    (folder / "config.json").write_text(json.dumps(config | {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}))
    assert read_model(folder, tiny(), Wishes()).head.type == "embedding"  # every configuration has these


ONE = {"id2label": {"0": "only"}, "labels": 1}


@pytest.mark.parametrize(
    ("settings", "wishes"),
    [
        ({**ONE, "problem_type": "single_label_classification"}, Wishes()),
        (ONE, Wishes(problem="single-label")),
        ({**ONE, "architectures": ["BertForTokenClassification"]}, Wishes()),
        ({**ONE, "architectures": ["BertForTokenClassification"], "problem_type": "regression"}, Wishes()),
    ],
)
def test_one_class_is_no_choice(settings: dict[str, Any], wishes: Wishes, tmp_path: Path) -> None:
    with pytest.raises(InvalidTask, match=r"expected several classes .* found one output"):
        read_model(write_full(tmp_path, biases, **settings), tiny(), wishes)


def test_one_output_of_an_adapter_is_a_value_unless_it_is_said_to_be_a_class(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "own")
    stored = load_file(folder / "adapter_model.safetensors")
    for name in stored:
        if "classifier" in name:
            stored[name] = np.ascontiguousarray(stored[name][:1])
    save_file(stored, folder / "adapter_model.safetensors")
    assert read(folder).head.problem == "regression"
    assert read(folder, Wishes(problem="multi-label")).head.problem == "multi-label"
    with pytest.raises(InvalidTask, match="expected several classes"):
        read(folder, Wishes(problem="single-label"))


@pytest.mark.parametrize("option", ["num_labels", "_num_labels"])
def test_a_number_of_labels_that_is_not_the_heads_is_refused(option: str, tmp_path: Path) -> None:
    folder = write_full(tmp_path, biases, **{option: 5}, id2label=None)
    with pytest.raises(InvalidTask, match=f"{option}: 5, found a head of 3 outputs"):
        read_model(folder, tiny(), Wishes())
    assert read_model(folder, tiny(), Wishes(labels=("a", "b", "c"))).labels == ("a", "b", "c")
    with pytest.raises(InvalidTask, match="id2label: expected the numbers 0 to 2"):
        read_model(write_full(tmp_path, biases, id2label={"0": "a", "1": "b"}), tiny(), Wishes())


def test_values_may_be_several_and_heads_on_tokens_have_one_problem(tmp_path: Path) -> None:
    """The library has the same rule."""
    values = read_model(write_full(tmp_path / "values", biases, problem_type="regression"), tiny(), Wishes())
    assert (values.head.problem, values.head.outputs) == ("regression", 3)
    settings: dict[str, Any] = {
        "problem_type": "multi_label_classification",
        "architectures": ["BertForTokenClassification"],
    }
    tokens = read_model(write_full(tmp_path / "tokens", biases, **settings), tiny(), Wishes())
    assert (tokens.head.type, tokens.head.problem) == ("token-classification", "single-label")


@pytest.mark.parametrize("case", ["peft/lora", "peft/lora-token", "adapters/seq-bn"])
def test_labels_without_names_are_told(case: str) -> None:
    found = read(IMPORTS / case)
    unnamed = found.labels[0] == "LABEL_0"
    assert any("does not name its" in note and "--labels" in note for note in found.notes) == unnamed
    assert unnamed or case.startswith("adapters")
    named = read(IMPORTS / case, Wishes(labels=tuple("abcdefgh"[: found.head.outputs])))
    assert not any("does not name its" in note for note in named.notes)


def test_labels_of_a_model_without_names_are_told(tmp_path: Path) -> None:
    model = read_model(write_full(tmp_path, biases, id2label=None), tiny(), Wishes())
    assert "does not name its 3 labels" in model.notes[0]
    assert read_model(write_full(tmp_path, biases), tiny(), Wishes()).notes == ()


def test_an_adapterhub_folder_without_a_head_says_what_it_becomes(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "own", "adapters/seq-bn")
    (folder / "head_config.json").unlink()
    found = read(folder)
    assert found.head.type == "embedding" and "the folder holds no head" in found.notes[0]
    with pytest.raises(InvalidTask, match="the folder holds no sequence-classification head"):
        read(folder, Wishes(head="sequence-classification"))


@pytest.mark.parametrize("wish", [True, False])
def test_normalisation_is_wished_of_embeddings_alone(wish: bool, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "own", headless=True, task_type="FEATURE_EXTRACTION")
    assert read(folder, Wishes(normalize=wish)).head.normalize == wish
    with pytest.raises(InvalidTask, match="normalize: expected none for a head of type sequence-class"):
        read(IMPORTS / "peft" / "lora", Wishes(normalize=wish))


@pytest.mark.parametrize("written", ["other", ["multi_label_classification"], {}])
def test_a_problem_type_that_is_none_is_refused(written: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidTask, match="problem_type: expected one of"):
        read_model(write_full(tmp_path, biases, problem_type=written), tiny(), Wishes())


def test_an_adapter_beside_its_model_says_so(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "own")
    assert not any("holds its base model too" in note for note in read(folder).notes)
    shutil.copy(FIXTURES / "tiny-bert" / "model.safetensors", folder)
    assert any("holds its base model too, and 'tiny-bert' must" in note for note in read(folder).notes)


def test_a_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    folder = write_full(tmp_path, biases)
    document = json.loads((folder / "tokenizer.json").read_text())
    vocab = document["model"]["vocab"]
    (a, b) = list(vocab)[100:102]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(InvalidTask, match="2 tokens have other numbers than in the backbone 'tiny-bert'"):
        read_model(folder, tiny(), Wishes())
    (folder / "tokenizer.json").unlink()
    assert read_model(folder, tiny(), Wishes()).head.outputs == 3


def test_adapters_of_a_wrapper_without_token_types_learnt_without(tmp_path: Path) -> None:
    """PEFT's class for question answering takes token types and does not hand them on, that for features where a
    prompt or prefix was tuned."""
    cases = {path.name: json.loads((path / "adapter_config.json").read_text()) for path in (IMPORTS / "peft").iterdir()}
    kinds = {name: settings.get("task_type") for name, settings in cases.items()}
    assert "QUESTION_ANS" in kinds.values() and "SEQ_CLS" in kinds.values()
    for name, kind in kinds.items():
        if cases[name].get("base_model_name_or_path") != cases["lora"].get("base_model_name_or_path"):
            continue
        found = read(adapter(tmp_path / name, f"peft/{name}"))
        assert found.preprocessing.one_type == (kind == "QUESTION_ANS"), name
    for case, without in (("lora", False), ("prompt", True), ("prefix", True), ("p-tuning", True)):
        path = adapter(tmp_path / f"{case}-vectors", f"peft/{case}", headless=True, task_type="FEATURE_EXTRACTION")
        found = read(path)
        assert found.head.type == "embedding" and found.preprocessing.one_type == without, case
