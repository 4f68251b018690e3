"""AdapterHub's prediction heads: flexible ones of one or two layers, and those of plain Hugging Face models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checkpoints.backbone import Backbone
from checkpoints.imports.heads import (
    Wishes,
    check_outputs,
    labels_of,
    note_on_labels,
    note_on_problem,
    read_head,
    read_linear,
    refuse_idle_wishes,
)
from checkpoints.imports.imported import Imported
from checkpoints.imports.sentence import embedding_of, is_sentence_folder
from checkpoints.imports.tensor_files import read_one_of
from checkpoints.imports.unread import Problems, Unread
from checkpoints.settings import expect, names, read_json, unsupported
from checkpoints.validation import HEAD_ACTIVATIONS
from jpets.types import Head, HeadType, Problem

CONFIG = "head_config.json"
FILES = ("model_head.safetensors", "pytorch_model_head.bin")
FLEXIBLE: Mapping[str, tuple[HeadType, Problem]] = MappingProxyType(
    {
        "classification": ("sequence-classification", "single-label"),
        "multilabel_classification": ("sequence-classification", "multi-label"),
        "tagging": ("token-classification", "single-label"),
        "question_answering": ("question-answering", "single-label"),
    }
)
"""``head_type`` -> our head and problem."""
CLASSES: Mapping[str, HeadType] = MappingProxyType(
    {
        "ForSequenceClassification": "sequence-classification",
        "ForTokenClassification": "token-classification",
        "ForQuestionAnswering": "question-answering",
    }
)
"""End of ``model_class`` -> our head, where the model is one of transformers' own."""
WITHOUT_HEAD = "the folder holds no head: the task gives embeddings; for labels save the adapter with its head"
KNOWN = names("head_type num_labels layers activation_function label2id use_pooler bias dropout_prob")


def read_hub_head(folder: Path, backbone: Backbone, wishes: Wishes, problems: Problems) -> Imported:
    """The head in an adapter's folder and its labels, without deltas; an embedding head, and a note, where there is
    none."""
    if not (folder / CONFIG).is_file():
        if wishes.head not in (None, "embedding"):
            problems.options.append(f"{CONFIG}: the folder holds no {wishes.head} head; save the adapter with its head")
            return Imported((), Head("embedding"))
        found = embedding_of(folder, backbone, wishes, problems.options)
        refuse_idle_wishes(found.head, wishes, problems.options)
        if wishes.head is None and not is_sentence_folder(folder):
            found = dataclasses.replace(found, notes=(WITHOUT_HEAD, *found.notes))
        return found
    document = read_json(folder / CONFIG)
    tensors = Unread(read_one_of(folder, FILES), problems)
    settings = document.get("config")
    if isinstance(settings, dict):
        head = _flexible(settings, str(document.get("name")), tensors, backbone, wishes)
    else:
        settings, head = document, _static(str(document.get("model_class")), tensors, backbone, wishes)
    if head is None:
        return Imported((), Head("embedding"))
    tensors.refuse_rest(f"not understood in a head for {backbone.config.family}")
    refuse_idle_wishes(head, wishes, problems.options)
    labels = labels_of(head, settings, wishes, problems.options)
    noted = note_on_problem(head, wishes.problem) if settings is document else ()  # flexible heads say it
    return Imported((), head, labels, (*note_on_labels(labels), *noted))


def _static(model: str, tensors: Unread, backbone: Backbone, wishes: Wishes) -> Head | None:
    """The head of a model of transformers' own; None, which is a problem, of another model."""
    kind = next((head for end, head in CLASSES.items() if model.endswith(end)), None)
    if kind is not None:
        return read_head(tensors, backbone.config, kind, wishes.problem)
    tensors.problems.options.append(
        f"model_class: expected one that ends in {' or '.join(CLASSES)}, found {model[:80]!r}"
    )
    return None


def _flexible(
    settings: Mapping[str, Any], name: str, tensors: Unread, backbone: Backbone, wishes: Wishes
) -> Head | None:
    """Linear layers with dropout and activations between them: numbers 1, and 4 or 3, of a sequence of modules.

    None, which is a problem, for a head of another kind.
    """
    problems, kind = tensors.problems.options, settings.get("head_type")
    problems += unsupported(settings, KNOWN, "a head")
    if not isinstance(kind, str) or kind not in FLEXIBLE:
        problems.append(f"head_type: expected one of {sorted(FLEXIBLE)}, found {kind!r}")
        return None
    head_type, problem = FLEXIBLE[kind]
    outputs, layers = (
        expect(settings, key, int, default, problems) for key, default in (("num_labels", 2), ("layers", 1))
    )
    if kind == "classification" and outputs == 1:
        problem = "regression"
    pooled, biased = (
        expect(settings, key, bool, default, problems) for key, default in (("use_pooler", False), ("bias", True))
    )
    if layers not in (1, 2):
        problems.append(f"layers: expected 1 or 2 in a head, found {layers}")
        return None
    _drop_others(tensors, name)
    head = Head(head_type, problem=wishes.problem or problem, pooling="pooler" if pooled else "cls")
    own, inputs = {}, backbone.config.hidden_size
    if layers == 2:
        own["dense_kernel"], own["dense_bias"] = read_linear(tensors, f"heads.{name}.1", inputs)
        head = dataclasses.replace(head, activation=_activation(settings, problems))
    last = 1 if layers == 1 else 4 if settings.get("activation_function") else 3
    own["kernel"], own["bias"] = read_linear(tensors, f"heads.{name}.{last}", inputs, biased=biased)
    if own["kernel"].shape[1] not in (0, outputs):
        problems.append(f"num_labels: {outputs}, found a head of {own['kernel'].shape[1]} outputs")
    head = dataclasses.replace(head, tensors=own)
    check_outputs(head, problems)
    return head


def _activation(settings: Mapping[str, Any], problems: list[str]) -> str:
    """What stands between two layers; the library takes its name in any case."""
    activation = str(expect(settings, "activation_function", str, "", problems)).lower() or "identity"
    if activation not in HEAD_ACTIVATIONS:
        expected = ", ".join(HEAD_ACTIVATIONS)
        problems.append(f"activation_function: expected null or one of {expected}, found {activation[:80]!r}")
    return activation


def _drop_others(tensors: Unread, name: str) -> None:
    """Drops heads whose names begin like this head's: the library saves them with it."""
    for each in tensors.names:
        if each.startswith(f"heads.{name}") and not each.startswith(f"heads.{name}."):
            tensors.drop(each)
