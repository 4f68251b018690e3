"""AdapterHub's prediction heads: flexible ones of one or two layers, and those of plain Hugging Face models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from checkpoints.backbone import Backbone
from checkpoints.imports.heads import Wishes, labels_of, read_head, read_linear
from checkpoints.imports.settings import expect, names, read_json, unsupported
from checkpoints.imports.tensor_files import read_one_of
from checkpoints.imports.unread import Unread
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
KNOWN = names("head_type num_labels layers activation_function label2id use_pooler bias dropout_prob")


def read_hub_head(
    folder: Path, backbone: Backbone, wishes: Wishes, problems: list[str]
) -> tuple[Head, tuple[str, ...]]:
    """The head in an adapter's folder and its labels; an embedding head where there is none."""
    if not (folder / CONFIG).is_file():
        if wishes.head not in (None, "embedding"):
            problems.append(f"{CONFIG}: the folder holds no {wishes.head} head; save the adapter with its head")
        return Head("embedding", pooling=wishes.pooling or "mean"), ()
    document = read_json(folder / CONFIG)
    tensors = Unread(read_one_of(folder, FILES), problems)
    settings = document.get("config")
    if isinstance(settings, dict):
        head = _flexible(settings, str(document.get("name")), tensors, backbone, wishes)
    else:
        settings, model = document, str(document.get("model_class"))
        kind = next((head for end, head in CLASSES.items() if model.endswith(end)), None)
        if kind is None:
            problems.append(f"model_class: expected one that ends in {' or '.join(CLASSES)}, found {model[:80]!r}")
            return Head("embedding"), ()
        head = read_head(tensors, backbone.config, kind, wishes.problem, None)
    tensors.refuse_rest(f"not understood in a head for {backbone.config.family}")
    return head, labels_of(head, settings, wishes, problems)


def _flexible(settings: Mapping[str, Any], name: str, tensors: Unread, backbone: Backbone, wishes: Wishes) -> Head:
    """Linear layers with dropout and activations between them: numbers 1, and 4 or 3, of a sequence of modules."""
    problems, kind = tensors.problems, settings.get("head_type")
    problems += unsupported(settings, KNOWN, "a head")
    if not isinstance(kind, str) or kind not in FLEXIBLE:
        problems.append(f"head_type: expected one of {sorted(FLEXIBLE)}, found {kind!r}")
        return Head("embedding")
    head_type, problem = FLEXIBLE[kind]
    outputs, layers = (
        expect(settings, key, int, default, problems) for key, default in (("num_labels", 2), ("layers", 1))
    )
    if kind == "classification" and outputs == 1:
        problem = "regression"
    activation = settings.get("activation_function")
    if layers not in (1, 2):
        problems.append(f"layers: expected 1 or 2 in a head, found {layers}")
        return Head("embedding")
    own, inputs = {}, backbone.config.hidden_size
    if layers == 2:
        own["dense_kernel"], own["dense_bias"] = read_linear(tensors, f"heads.{name}.1", inputs)
    last = 1 if layers == 1 else 4 if activation else 3
    own["kernel"], own["bias"] = read_linear(tensors, f"heads.{name}.{last}", inputs)
    if own["kernel"].shape[1] != outputs:
        problems.append(f"num_labels: {outputs}, found a head of {own['kernel'].shape[1]} outputs")
    return Head(
        head_type,
        own,
        problem=wishes.problem or problem,
        pooling="pooler" if settings.get("use_pooler") else "cls",
        activation=str(activation or "identity"),
    )
