"""The JSON document of a task file, and the heads that it declares."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from task_files import document_of, rebuild, same

from checkpoints.repository import Repository
from checkpoints.task_file import read_task, task_to_bytes
from checkpoints.validation import validate
from jpets.config import BackboneConfig
from jpets.errors import InvalidTask
from jpets.types import Head, Preprocessing, Task, TruncationStrategy

MakeTask = Callable[..., Task]

DOCUMENTS = [
    ({"format": 2}, "format"),
    ({"format": "1"}, "format"),
    ({"surprise": 1}, "surprise: Extra inputs"),
    ({"backbone": None}, "backbone: Field required"),
    ({"backbone": {"name": "tiny"}}, "backbone.fingerprint: Field required"),
    ({"backbone": [1]}, "backbone"),
    ({"deltas": {"method": "lora"}}, "deltas"),
    ({"deltas": [{}]}, "deltas.0.method: Field required"),
    ({"deltas": [{"method": "magic"}]}, "unknown delta method 'magic'"),
    ({"deltas": [{"method": "bitfit"}] * 17}, "at most 16"),
    ({"deltas": [{"method": "bitfit", "layers": [0, True]}]}, "deltas.0.layers"),
    ({"deltas": [{"method": "bitfit", "layers": [[0]]}]}, "deltas.0.layers"),
    ({"deltas": [{"method": "bitfit", "layers": 7}]}, "delta/0/bitfit: a setting has the wrong type"),
    ({"deltas": [{"method": "bitfit", "layers": [0, 9]}]}, "layers must be increasing numbers from 0 to 1"),
    ({"deltas": [{"method": "bitfit", "sites": True}]}, "delta/0/bitfit: a setting has the wrong type"),
    ({"deltas": [{"method": "bitfit", "sites": ["nowhere"]}]}, "sites must be some of"),
    ({"head": {"type": "poem"}}, "head.type"),
    ({"head": {"type": "sequence-classification", "problem": 1}}, "head.problem"),
    ({"head": {"type": "sequence-classification", "activation": "cosine"}}, "head.activation: expected one of"),
    ({"head": {"type": "sequence-classification", "normalize": "yes"}}, "head.normalize"),
    ({"head": {"type": "embedding"}}, "labels: expected none for a head of type embedding, found 3"),
    ({"labels": ["a", "b"]}, "labels: expected 3, one for each output of head/kernel, found 2"),
    ({"labels": None}, "labels: expected 3"),
    ({"labels": ["a", "b", 3]}, "labels.2"),
    ({"labels": ["a", "b", "a"]}, "labels: expected each once, found 'a'"),
    ({"labels": ["a", "b", " "]}, "labels: expected non-empty"),
    ({"labels": "abc"}, "labels"),
    ({"preprocessing": {"max_length": 25}}, "max_length: expected 2 to 24 tokens, found 25"),
    ({"preprocessing": {"max_length": 12.5}}, "preprocessing.max_length"),
    ({"preprocessing": {"truncation": 1}}, "preprocessing.truncation"),
    ({"preprocessing": {"template": "no place"}}, "template: expected {text}"),
    ({"preprocessing": {"template": "{text.__class__}{text}"}}, "template: expected {text}"),
    ({"preprocessing": {"template": "{text}" * 9}}, "template: expected at most 8 places"),
    ({"preprocessing": {"template": "{text}" + "a" * 70_000}}, "template: expected at most 8 places"),
    ({"preprocessing": {"thresholds": [0.5, 0.5, 0.5]}}, "thresholds: expected none"),
    ({"preprocessing": {"truncation_strategy": "do_not_truncate"}}, "preprocessing.truncation_strategy"),
    (
        {"preprocessing": {"truncation_strategy": "only_second", "template": "{text} {text_pair}"}},
        "truncation_strategy: expected longest_first or only_first beside a template",
    ),
    ({"preprocessing": {"speed": 1}}, "preprocessing.speed"),
    ({"created": 2025}, "created"),
]


@pytest.mark.parametrize(("change", "message"), DOCUMENTS)
def test_bad_documents(make_task: MakeTask, config: BackboneConfig, change: dict[str, Any], message: str) -> None:
    data = task_to_bytes(make_task("bitfit"))
    with pytest.raises(InvalidTask, match=message):
        read_task(rebuild(data, **change), id="sample", config=config)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "9" * 5000])
def test_numbers_that_json_should_not_hold(make_task: MakeTask, number: str) -> None:
    data = task_to_bytes(make_task("bitfit"))
    text = json.dumps({**document_of(data), "deltas": [{"method": "bitfit", "scale": "X"}]}).replace('"X"', number)
    with pytest.raises(InvalidTask):
        read_task(safetensors.numpy.save(safetensors.numpy.load(data), metadata={"jpets": text}), id="sample")


def test_lone_surrogates(make_task: MakeTask) -> None:
    with pytest.raises(InvalidTask):
        read_task(rebuild(task_to_bytes(make_task("bitfit")), description="\ud800"), id="sample")


def test_multi_label_and_regression(make_task: MakeTask, config: BackboneConfig) -> None:
    head = make_task().head
    multi = make_task("lora", head=dataclasses.replace(head, problem="multi-label"))
    validate(dataclasses.replace(multi, preprocessing=Preprocessing(thresholds=(0.1, 0.5, 0.9))), config)
    for thresholds in ((0.5,), (0.5, 0.5, 1.5)):
        with pytest.raises(InvalidTask, match="expected 3 numbers from 0 to 1"):
            validate(dataclasses.replace(multi, preprocessing=Preprocessing(thresholds=thresholds)), config)
    validate(make_task("lora", head=dataclasses.replace(head, problem="regression"), labels=()), config)
    embedding = make_task("lora", head=Head("embedding", pooling="mean", normalize=True), labels=())
    assert same(read_task(task_to_bytes(embedding), id="sample", config=config), embedding)
    with pytest.raises(InvalidTask, match="labels: expected none"):
        validate(dataclasses.replace(embedding, labels=("a",)), config)
    pooled = dataclasses.replace(embedding, head=Head("embedding", pooling="pooler"))
    validate(pooled, config)
    with pytest.raises(InvalidTask, match="which the backbone does not have"):
        validate(pooled, dataclasses.replace(config, pooler=False))


@pytest.mark.parametrize("strategy", get_args(TruncationStrategy))
def test_a_strategy_of_pairs_is_kept(make_task: MakeTask, config: BackboneConfig, strategy: TruncationStrategy) -> None:
    """The usual one is absent, so that earlier versions read the file."""
    rule = Preprocessing(truncation=True, truncation_strategy=strategy)
    task = make_task("lora", preprocessing=rule)
    data = task_to_bytes(task)
    assert same(read_task(data, id="sample", config=config), task)
    assert ("truncation_strategy" in document_of(data)["preprocessing"]) == (strategy != "longest_first")
    said = rebuild(data, preprocessing={"truncation": True, "truncation_strategy": strategy})
    assert same(read_task(said, id="sample", config=config), task)


def test_two_layer_head(make_task: MakeTask, config: BackboneConfig) -> None:
    shapes = {"dense_kernel": (16, 8), "dense_bias": (8,), "kernel": (8, 3), "bias": (3,)}
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    task = make_task("lora", head=Head("token-classification", tensors, activation="relu"))
    data = task_to_bytes(task)
    assert same(read_task(data, id="sample", config=config), task)
    for name, message in (
        ("dense_bias", r"head/dense_bias: expected \[8\], found nothing"),
        ("kernel", "head/kernel: expected .*, found nothing"),
        ("dense_kernel", r"head/dense_kernel: expected \[16, any\], found nothing"),
    ):
        with pytest.raises(InvalidTask, match=message):
            read_task(rebuild(data, {f"head/{name}": None}), id="sample", config=config)
    with pytest.raises(InvalidTask, match="empty"):
        empty = {"head/kernel": np.zeros((8, 0), np.float32), "head/bias": np.zeros(0, np.float32)}
        read_task(rebuild(data, empty, labels=[]), id="sample", config=config)
    with pytest.raises(InvalidTask, match=r"head/kernel: expected"):
        read_task(rebuild(data, {"head/kernel": np.ones((), np.float32)}), id="sample", config=config)


QUESTIONS = [
    ({}, {"labels": ["start", "end"]}, "labels: expected none for a head of type question-answering, found 2"),
    ({"head/kernel": np.ones((16, 3), np.float32)}, {}, r"head/kernel: expected 2 outputs, .* found 3"),
    ({"head/kernel": None}, {}, r"head/kernel: expected \[16, any\], found nothing"),
    ({}, {"preprocessing": {"template": "{text}?"}}, "template: expected {text_pair} too"),
    ({}, {"preprocessing": {"thresholds": [0.5, 0.5]}}, "thresholds: expected none for question-answering"),
]


def test_texts_that_answers_and_lists_repeat_are_bounded(repository: Repository, make_task: MakeTask) -> None:
    """What is stored already is read as before."""
    task = make_task("lora")
    for changed, named in (
        (dataclasses.replace(task, labels=("no", "maybe", "y" * 2000)), "labels: expected at most 1024 characters"),
        (dataclasses.replace(task, description="d" * (1 << 17)), "description: expected at most"),
        (
            dataclasses.replace(task, preprocessing=Preprocessing(prefix="p" * (1 << 17))),
            "preprocessing.prefix: expected",
        ),
        (
            dataclasses.replace(task, preprocessing=Preprocessing(prompts={"query": "p" * (1 << 17)})),
            r"preprocessing.prompts\['query'\]: expected",
        ),
    ):
        data = task_to_bytes(changed)
        assert read_task(data, id="sample").id == "sample"
        with pytest.raises(InvalidTask, match=named):
            repository.put("sample", data)
    assert repository.list() == ([], None)


def test_tokens_of_a_text_are_labelled_once(make_task: MakeTask) -> None:
    """Else offsets and words would be those of another place."""
    head = Head("token-classification", {"kernel": np.ones((16, 3), np.float32), "bias": np.ones(3, np.float32)})
    for template, fits in (("{text} | {text}", False), ("{text} | {text_pair}", True)):
        task = make_task("lora", head=head, preprocessing=Preprocessing(template=template))
        if fits:
            task_to_bytes(task)
            continue
        with pytest.raises(InvalidTask, match="template: expected each text once"):
            task_to_bytes(task)


@pytest.mark.parametrize("layers", [1, 2])
def test_question_answering(make_task: MakeTask, config: BackboneConfig, layers: int) -> None:
    sizes = {"kernel": (16 if layers == 1 else 8, 2), "bias": (2,)}
    sizes |= {"dense_kernel": (16, 8), "dense_bias": (8,)} if layers == 2 else {}
    tensors = {name: np.ones(size, np.float32) for name, size in sizes.items()}
    rule = Preprocessing(template="question: {text} context: {text_pair}")
    task = make_task("lora", head=Head("question-answering", tensors), labels=(), preprocessing=rule)
    assert same(read_task(task_to_bytes(task), id="sample", config=config), task)


@pytest.mark.parametrize(("tensors", "document", "message"), QUESTIONS)
def test_heads_that_answer_no_questions(
    make_task: MakeTask, config: BackboneConfig, tensors: dict[str, Any], document: dict[str, Any], message: str
) -> None:
    own = {"kernel": np.ones((16, 2), np.float32), "bias": np.ones(2, np.float32)}
    data = task_to_bytes(make_task("lora", head=Head("question-answering", own), labels=()))
    with pytest.raises(InvalidTask, match=message):
        read_task(rebuild(data, tensors, **document), id="sample", config=config)


def test_settings_that_json_cannot_hold(make_task: MakeTask) -> None:
    task = make_task("lora")
    delta = dataclasses.replace(task.deltas[0], settings={**task.deltas[0].settings, "callback": print})
    with pytest.raises(InvalidTask, match="settings must be numbers"):
        task_to_bytes(dataclasses.replace(task, deltas=(delta,)))
    delta = dataclasses.replace(
        task.deltas[0], settings={**task.deltas[0].settings, "layers": range(2), "x": np.int64(3)}
    )
    again = read_task(task_to_bytes(dataclasses.replace(task, deltas=(delta,))), id="sample")
    assert again.deltas[0].settings["layers"] == [0, 1]
