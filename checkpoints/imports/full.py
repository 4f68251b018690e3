"""Fully fine-tuned Hugging Face checkpoints of a backbone that is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from checkpoints.backbone import Backbone
from checkpoints.canonical import FloatArray, from_params
from checkpoints.families import FAMILIES
from checkpoints.huggingface import convert, family_of, read_config, read_settings, unused_positions
from checkpoints.imports.heads import PROBLEMS, Wishes, head_of_names, labels_of, read_head
from checkpoints.imports.sentence import embedding_head
from checkpoints.imports.unread import Unread
from checkpoints.tensors import read_tensors
from checkpoints.validation import refuse
from jpets.config import BackboneConfig
from jpets.errors import InvalidTask
from jpets.types import Head, HeadType

HARMLESS = ("position_ids", "embeddings.token_type_ids")
"""Ends of buffers that older checkpoints carry."""
ENCODER = ("embeddings.", "embeddings_project.", "encoder.", "transformer.", "pooler.")
"""Where a model without a head has its modules."""
PRETRAINING = ("cls.", "lm_head.", "vocab_", "generator_", "discriminator_")
"""Heads that no task reads."""
ARCHITECTURES: Mapping[str, HeadType] = {
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "Model": "embedding",
}
"""What follows a family's name in an entry of ``architectures`` -> head."""
MODELS = ("Bert", "DistilBert", "Roberta", "XLMRoberta", "Camembert", "Electra")


@dataclasses.dataclass(frozen=True)
class FullModel:
    """``tensors`` of the encoder under canonical names, all that the backbone has."""

    tensors: Mapping[str, FloatArray]
    head: Head
    labels: tuple[str, ...]


def read_full(folder: Path, backbone: Backbone, wishes: Wishes) -> FullModel:
    """Raises ``InvalidTask`` for a checkpoint of another architecture, ``InvalidBackbone`` for one that is broken."""
    settings = read_settings(folder)
    family = family_of(settings)
    config = read_config(settings, family, backbone.config.pooler)
    mine, theirs = backbone.config.to_dict(), config.to_dict()
    refuse(
        [
            f"config.json: {key} is {theirs[key]!r}, the backbone's is {mine[key]!r}"
            for key in mine
            if mine[key] != theirs[key]
        ]
    )
    own = f"{FAMILIES[family].prefix}."
    stored = dict(read_tensors(folder))
    prefix = own if any(key.startswith(own) for key in stored) else ""
    pooled = all(f"{prefix}{module}.weight" in stored for _, module, _ in FAMILIES[family].pooler)
    own_config = dataclasses.replace(config, pooler=config.pooler and pooled)
    tensors = convert(stored, own_config, prefix, unused_positions(settings, family))
    if config.pooler and not pooled:  # a model whose head reads tokens has none: the backbone's stays
        base = from_params(backbone.params, config)
        tensors |= {name: base[name] for name in base if name.startswith("pooler/")}
    problems = [f"{name}: expected finite numbers" for name, array in tensors.items() if not np.isfinite(array).all()]
    rest = Unread({name: array for name, array in stored.items() if not _is_no_heads(name, prefix)}, problems)
    kind = wishes.head or _head_type(settings, rest, config)
    problem = wishes.problem or PROBLEMS.get(str(settings.get("problem_type")), None)
    if problem is None and settings.get("problem_type") is not None:
        problems.append(
            f"problem_type: expected one of {sorted(PROBLEMS)}, found {str(settings['problem_type'])[:80]!r}"
        )
    head = read_head(rest, backbone.config, kind, problem, wishes.pooling)
    if kind == "embedding":
        head = embedding_head(folder, head, wishes.pooling, problems)
    rest.refuse_rest(f"not understood in a {family} checkpoint with a {kind} head")
    labels = labels_of(head, settings, wishes, problems)
    refuse(problems)
    return FullModel(tensors, head, labels)


def _is_no_heads(name: str, prefix: str) -> bool:
    """Whether a tensor is the encoder's or of pretraining alone."""
    return name.startswith((prefix,) if prefix else ENCODER) or name.endswith(HARMLESS) or name.startswith(PRETRAINING)


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
