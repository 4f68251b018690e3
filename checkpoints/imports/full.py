"""Fully fine-tuned Hugging Face checkpoints of a backbone that is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from checkpoints.backbone import Backbone
from checkpoints.canonical import FloatArray, canonical_shapes, from_params
from checkpoints.families import FAMILIES, encoder_prefix, tensor_names
from checkpoints.huggingface import convert, family_of, read_config, read_settings, unused_positions
from checkpoints.imports.cross_encoder import as_cross_encoder
from checkpoints.imports.heads import (
    Wishes,
    head_of_names,
    labels_of,
    note_on_labels,
    problem_of,
    read_head,
    refuse_idle_wishes,
)
from checkpoints.imports.imported import PLAIN, Imported
from checkpoints.imports.masked import read_masked_head
from checkpoints.imports.sentence import cut, embedding_of, is_sentence_folder
from checkpoints.imports.tokens import check_tokenizer
from checkpoints.imports.unread import Problems, Unread
from checkpoints.sentence import model_folder
from checkpoints.tensors import read_tensors
from checkpoints.validation import refuse
from checkpoints.wrappers import unwrapped
from jpets.config import BackboneConfig
from jpets.errors import InvalidTask
from jpets.types import Head, HeadType, Preprocessing

BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
"""What older checkpoints carry beside parameters."""
PRETRAINING = (
    "cls.predictions.", "cls.seq_relationship.", "lm_head.", "vocab_transform.", "vocab_layer_norm.",
    "vocab_projector.", "generator_predictions.", "generator_lm_head.", "discriminator_predictions.",
)  # fmt: skip
"""Heads of pretraining: of these tasks read the ones that fill masks alone."""
ARCHITECTURES: Mapping[str, HeadType] = {
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "Model": "embedding",
}
"""What follows a family's name in an entry of ``architectures`` -> head."""
MODELS = ("Bert", "DistilBert", "Roberta", "XLMRoberta", "Camembert", "Electra")

Stored = Mapping[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class FullModel:
    """``tensors`` of the encoder under canonical names, all that the backbone has."""

    tensors: Mapping[str, FloatArray]
    head: Head
    labels: tuple[str, ...]
    notes: tuple[str, ...] = ()
    preprocessing: Preprocessing = PLAIN


def read_full(folder: Path, backbone: Backbone, wishes: Wishes) -> FullModel:
    """Raises ``InvalidTask`` for a checkpoint of another architecture, ``InvalidBackbone`` for one that is broken."""
    inner = model_folder(folder)
    settings = read_settings(inner)
    family = family_of(settings)
    config = read_config(settings, family, backbone.config.pooler)
    config = dataclasses.replace(config, usual_length=backbone.config.usual_length)  # set for texts, not the model
    mine, theirs = backbone.config.to_dict(), config.to_dict()
    refuse(
        [
            f"config.json: {key} is {theirs[key]!r}, the backbone's is {mine[key]!r}"
            for key in mine
            if mine[key] != theirs[key]
        ]
    )
    compared = check_tokenizer(folder, settings, config, backbone)
    stored = unwrapped(read_tensors(inner))
    prefix = encoder_prefix(stored, family)
    pooled = all(f"{prefix}{module}.weight" in stored for _, module, _ in FAMILIES[family].pooler)
    own_config = dataclasses.replace(config, pooler=config.pooler and pooled)
    tensors = convert(stored, own_config, prefix, unused_positions(settings, family))
    if config.pooler and not pooled:  # a model whose head reads tokens has none: the backbone's stays
        base = from_params(backbone.params, config)
        tensors |= {name: base[name] for name in base if name.startswith("pooler/")}
    problems = Problems(
        tensors=[f"{name}: expected finite numbers" for name, array in tensors.items() if not np.isfinite(array).all()]
    )
    rest = Unread(_without_known(stored, config, prefix), problems)
    kind = wishes.head or ("embedding" if is_sentence_folder(folder) else _head_type(settings, rest, config))
    problem = problem_of(settings, wishes, problems.options)
    if kind == "embedding":
        found = embedding_of(folder, backbone, wishes, problems.options)
        if wishes.head is None and not is_sentence_folder(folder):
            _expect_no_labels(settings, problems.options)
    elif kind == "fill-mask":
        pretrained = Unread({name: own for name, own in stored.items() if name.startswith(PRETRAINING)}, problems)
        words = from_params(backbone.params, config)["word"]
        found = Imported((), read_masked_head(pretrained, config, tensors["word"], words), ())
    else:
        head = read_head(rest, backbone.config, kind, problem)
        if problem is None and head.problem == "regression":  # its training would have written that it learnt a value
            head = dataclasses.replace(head, relevance="sigmoid")
        labels = labels_of(head, settings, wishes, problems.options)
        found = Imported((), head, labels, note_on_labels(labels))
        if kind == "sequence-classification":
            found = as_cross_encoder(found, folder, settings, backbone, problems.options)
    rest.refuse_rest(f"not understood in a {family} checkpoint with a {kind} head")
    refuse_idle_wishes(found.head, wishes, problems.options)
    problems.refuse()
    found = cut(found, wishes)
    return FullModel(
        tensors, found.head, found.labels, (*compared.notes, *found.notes), compared.cut(found.preprocessing)
    )


def _expect_no_labels(settings: Mapping[str, Any], problems: list[str]) -> None:
    """A problem for a model without a head whose configuration is a classifier's: the head was not saved."""
    named = settings.get("id2label")
    labels = [str(label) for at, label in named.items() if label != f"LABEL_{at}"] if isinstance(named, dict) else []
    said = f"names labels ({', '.join(labels[:3])[:120]})" if labels else "names a problem_type"
    if labels or settings.get("problem_type") is not None:
        problems.append(
            f"config.json {said}, but the folder holds no head; save the model with its head, or say --head embedding"
        )


def _without_known(stored: Stored, config: BackboneConfig, prefix: str) -> Stored:
    """The tensors without those that ``convert`` takes, the pooler's, which not every head reads, and those that no
    task reads."""
    shapes, known = canonical_shapes(config), {prefix + each for each in BUFFERS}
    for place, candidates, _ in tensor_names(config):
        if place in shapes or place.startswith("pooler/"):
            known |= set([prefix + each for each in candidates if prefix + each in stored][:1])
    return {name: own for name, own in stored.items() if name not in known and not name.startswith(PRETRAINING)}


def _head_type(settings: Mapping[str, object], rest: Unread, config: BackboneConfig) -> HeadType:
    architectures = settings.get("architectures")
    if isinstance(architectures, list) and architectures:
        for end, kind in ARCHITECTURES.items():
            if architectures[0] in [f"{own}{end}" for own in MODELS]:
                return kind
        raise InvalidTask(
            f"config.json: architectures must be a model's name and one of {sorted(ARCHITECTURES)}, found "
            f"{str(architectures[0])[:80]!r}; say which head"
        )
    found = head_of_names(rest, config)
    if len(found) > 1:
        raise InvalidTask(
            f"config.json names no architecture, and the head may be {' or '.join(found)}: say which head"
        )
    return found[0] if found else "embedding"
