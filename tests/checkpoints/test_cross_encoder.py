"""Cross-encoders of Sentence-Transformers: how long pairs may be, and what of their one output ranks them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_model import write_full
from safetensors.numpy import load_file, save_file
from sentence_folder import cased, sentence_folder, write
from support import FIXTURES, tiny

from checkpoints.imports.full import FullModel
from checkpoints.imports.heads import Wishes
from checkpoints.imports.task import extracted, make_task, read_adapter, read_model
from checkpoints.source import load_backbone
from checkpoints.task_file import read_task, task_to_bytes
from checkpoints.validation import validate
from jpets.errors import InvalidTask
from jpets.types import Preprocessing

IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
TRANSFORMER = {
    "transformer_task": "sequence-classification",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "scores",
}


def same(name: str, tensor: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return tensor


def read(folder: Path, *, labels: int = 1, **settings: Any) -> FullModel:
    """A cross-encoder as the library saved it before version 5, when ``config.json`` alone told it."""
    return read_model(write_full(folder, same, labels=labels, id2label=None, **settings), tiny(), Wishes())


def with_modules(folder: Path, *, modules: tuple[str, ...] = ("Transformer",), **document: Any) -> Path:
    """As the library saves one since it lists the modules of cross-encoders too."""
    write_full(folder, same, labels=1, id2label=None)
    base = "sentence_transformers.base.modules.transformer."
    listed = [{"idx": at, "name": str(at), "path": "", "type": base + kind} for at, kind in enumerate(modules)]
    write(folder / "modules.json", listed)
    write(folder / "sentence_bert_config.json", TRANSFORMER)
    said: dict[str, Any] = {
        "model_type": "CrossEncoder",
        "activation_fn": IDENTITY,
        "prompts": {},
        "default_prompt_name": None,
    }
    write(folder / "config_sentence_transformers.json", said | document)
    return folder


SAID: list[tuple[dict[str, Any], str | None]] = [
    ({"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0"}}, "raw"),
    ({"sentence_transformers": {"activation_fn": SIGMOID}}, "sigmoid"),
    ({"sbert_ce_default_activation_function": IDENTITY}, "raw"),
    ({"sbert_ce_default_activation_function": "torch.nn.Sigmoid"}, "sigmoid"),
]


@pytest.mark.parametrize(("settings", "relevance"), SAID)
def test_the_one_output_is_read_as_the_model_says(
    settings: dict[str, Any], relevance: str | None, tmp_path: Path
) -> None:
    model = read(tmp_path / "own", **settings)
    assert (model.head.problem, model.head.relevance) == ("regression", relevance)
    assert model.preprocessing == Preprocessing(tiny().config.max_positions, True)
    task = make_task("own", extracted(model, []), tiny())
    again = read_task(task_to_bytes(task), id="own", config=tiny().config, backbone=tiny().ref())
    assert again.head.relevance == relevance and again.preprocessing.truncation


def test_another_classifier_stays_as_it_is(tmp_path: Path) -> None:
    """A single output that nobody says to be a value stands for its sigmoid, as in the pipeline."""
    for labels, relevance in ((1, "sigmoid"), (3, None)):
        model = read(tmp_path / str(labels), labels=labels)
        assert model.head.relevance == relevance and model.head.is_score == (labels == 1)
        assert model.preprocessing == Preprocessing()
    value = read(tmp_path / "value", labels=1, problem_type="regression")
    assert value.head.relevance is None and not value.head.is_score
    several = read(tmp_path / "several", labels=3, sentence_transformers={"activation_fn": IDENTITY})
    assert several.head.relevance is None and several.preprocessing.truncation


def test_the_librarys_own_files(tmp_path: Path) -> None:
    folder = with_modules(tmp_path / "own", prompts={"web": "query: "})
    write(folder / "tokenizer_config.json", {"model_max_length": 40})
    model = read_model(folder, tiny(), Wishes())
    assert (model.head.type, model.head.relevance) == ("sequence-classification", "raw")
    assert model.preprocessing == Preprocessing(40, True)
    assert any("'web' ('query: ')" in note for note in model.notes)
    assert read_model(folder, tiny(), Wishes(max_length=9)).preprocessing == Preprocessing(9, True)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"activation_fn": "torch.nn.modules.activation.Tanh"}, "activation_fn: expected torch.nn's Identity or"),
        ({"activation_fn": "os.system"}, r"found 'os\.system'"),
        ({"prompts": {"q": "a "}, "default_prompt_name": "q"}, "a cross-encoder's default prompt is not supported"),
        ({"modules": ("Transformer", "LogitScore")}, r"expected a Transformer alone in a cross-encoder, found"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(how: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidTask, match=named):
        read_model(with_modules(tmp_path / "own", **how), tiny(), Wishes())


def test_another_use_of_the_model_is_refused(tmp_path: Path) -> None:
    folder = with_modules(tmp_path / "own")
    write(folder / "sentence_bert_config.json", TRANSFORMER | {"transformer_task": "text-generation"})
    with pytest.raises(InvalidTask, match="transformer_task: expected sequence-classification"):
        read_model(folder, tiny(), Wishes())


def test_a_relevance_without_one_output_is_refused(tmp_path: Path) -> None:
    task = make_task("own", extracted(read(tmp_path / "own", labels=3), []), tiny())
    ranked = dataclasses.replace(task, head=dataclasses.replace(task.head, relevance="raw"))
    with pytest.raises(InvalidTask, match=r"head\.relevance: expected none but for one output for a text, found raw"):
        validate(ranked, tiny().config, tiny().ref())


def test_an_adapter_of_a_cross_encoder(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "imports" / "peft" / "lora", tmp_path / "own")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: own[:1] if "classifier" in name else own for name, own in tensors.items()}, file)
    plain = read_adapter(folder, tiny(), Wishes())
    said = {"model_type": "CrossEncoder", "activation_fn": IDENTITY}
    write(folder / "config_sentence_transformers.json", said)
    write(folder / "tokenizer_config.json", {"model_max_length": 40})
    found = read_adapter(folder, tiny(), Wishes())
    assert plain is not None and plain.head.relevance is None and plain.preprocessing == Preprocessing()
    assert found is not None and found.head.relevance == "raw" and found.preprocessing == Preprocessing(40, True)
    write(folder / "config_sentence_transformers.json", {**said, "prompts": {"q": "a"}, "default_prompt_name": "q"})
    with pytest.raises(InvalidTask, match="a cross-encoder's default prompt is not supported"):
        read_adapter(folder, tiny(), Wishes())


def test_texts_would_have_to_lose_their_case(tmp_path: Path) -> None:
    folder = with_modules(tmp_path / "own")
    write(folder / "sentence_bert_config.json", TRANSFORMER | {"do_lower_case": True})
    assert read_model(folder, tiny(), Wishes()).head.relevance == "raw"
    backbone = load_backbone(cased(sentence_folder(tmp_path / "cased")))
    with pytest.raises(InvalidTask, match="do_lower_case: the backbone's tokenizer keeps the case"):
        read_model(cased(folder), backbone, Wishes())
