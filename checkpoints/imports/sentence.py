"""The embedding head that a checkpoint's folder asks for, by Sentence-Transformers' files where it has them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from checkpoints.backbone import Backbone
from checkpoints.imports.cross_encoder import is_cross_encoder
from checkpoints.imports.dense import read_dense
from checkpoints.imports.heads import Wishes
from checkpoints.imports.imported import Imported
from checkpoints.sentence import MODULES, check_case, read_sentence
from jpets.types import Head

SETFIT = ("model_head.pkl", "config_setfit.json")
"""Files of a classifier on a model's vectors, as SetFit keeps them."""


def is_sentence_folder(folder: Path) -> bool:
    """Whether it says how its model's hidden states become an embedding."""
    return (folder / MODULES).is_file() and not is_cross_encoder(folder)


def embedding_of(folder: Path, backbone: Backbone, wishes: Wishes, problems: list[str]) -> Imported:
    """The head with the pooling, layers and normalisation of the folder's modules, unless the user wishes others, and
    the folder's preprocessing of texts. Anything else that the folder asks for is a problem."""
    classifier = next((name for name in SETFIT if (folder / name).is_file()), None)
    if classifier is not None and wishes.head != "embedding":
        problems.append(f"{classifier}: SetFit's classifier is not imported; --head embedding takes the vectors")
    found = read_sentence(folder, backbone.config.max_positions, problems, wishes.pooling)
    if found is None:
        head = Head("embedding", pooling=wishes.pooling or "mean", normalize=bool(wishes.normalize))
        said = wishes.pooling is not None and wishes.normalize is not None
        scale = "normalised" if head.normalize else "not normalised"
        note = f"the folder does not say how it embeds: pooled by {head.pooling}, {scale}; see --pooling, --normalize"
        return Imported((), head, notes=() if said else (note,))
    check_case(found.lowercase, backbone.tokenizer_json, problems)
    normalize = found.rule.normalize if wishes.normalize is None else wishes.normalize
    head = Head("embedding", pooling=found.rule.pooling, normalize=normalize)
    if found.dense and not problems:
        tensors, activation = read_dense(folder, found.dense, backbone.config.hidden_size, problems)
        head = dataclasses.replace(head, tensors=tensors, activation=activation)
    return Imported((), head, notes=found.notes, preprocessing=found.rule.preprocessing)


def cut(imported: Imported, wishes: Wishes) -> Imported:
    """With the length that the user wishes texts to be cut to, if any, and the one of a pair that is cut."""
    rule = imported.preprocessing
    if wishes.max_length is not None:
        rule = dataclasses.replace(rule, max_length=wishes.max_length, truncation=True)
    if wishes.truncation_strategy is not None:
        rule = dataclasses.replace(rule, truncation_strategy=wishes.truncation_strategy)
    return dataclasses.replace(imported, preprocessing=rule)
