"""Heads as Hugging Face models spell them: one row a family and head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from checkpoints.imports.unread import Unread
from jpets.config import BackboneConfig
from jpets.types import Head, HeadType, Pooling, Problem

PROBLEMS: Mapping[str, Problem] = MappingProxyType(
    {
        "single_label_classification": "single-label",
        "multi_label_classification": "multi-label",
        "regression": "regression",
    }
)
"""``problem_type`` of ``config.json``."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Modules of a head: ``output``, and before it ``dense`` and its activation where there are two layers."""

    output: str
    dense: str | None = None
    activation: str = "tanh"
    pooling: Pooling = "cls"


_TOKENS: Mapping[HeadType, Layout] = {
    "token-classification": Layout("classifier"),
    "question-answering": Layout("qa_outputs"),
}
_ROBERTA: Mapping[HeadType, Layout] = {
    "sequence-classification": Layout("classifier.out_proj", "classifier.dense", "tanh"),
    **_TOKENS,
}
LAYOUTS: Mapping[str, Mapping[HeadType, Layout]] = MappingProxyType(
    {
        "bert": {"sequence-classification": Layout("classifier", pooling="pooler"), **_TOKENS},
        "distilbert": {
            "sequence-classification": Layout("classifier", "pre_classifier", "relu"),
            **_TOKENS,
        },
        "roberta": _ROBERTA,
        "xlm-roberta": _ROBERTA,
        "camembert": _ROBERTA,
        "electra": {
            "sequence-classification": Layout("classifier.out_proj", "classifier.dense", "gelu"),
            **_TOKENS,
        },
    }
)
"""Family -> head type -> modules."""


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What the user says about a task where its checkpoint does not, or says something else."""

    head: HeadType | None = None
    problem: Problem | None = None
    labels: tuple[str, ...] = ()
    pooling: Pooling | None = None
    """Of an embedding head."""


def read_linear(tensors: Unread, module: str, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    """(kernel [inputs, outputs], bias [outputs]) of a linear module; zeros where it has no bias."""
    kernel = tensors.take(f"{module}.weight", (None, inputs)).T
    bias = f"{module}.bias"
    return kernel, tensors.take(bias, (kernel.shape[1],)) if bias in tensors else np.zeros(kernel.shape[1], np.float32)


def read_head(
    tensors: Unread, config: BackboneConfig, kind: HeadType, problem: Problem | None, pooling: Pooling | None
) -> Head:
    """The head of a model whose head modules have their usual names.

    Without ``problem`` a single output for a text is a value, as transformers has it. An embedding head has none;
    ``pooling`` is its own. Problems go to ``tensors.problems``.
    """
    if kind == "embedding":
        return Head("embedding", pooling=pooling or "mean")
    layout = LAYOUTS[config.family][kind]
    own = {}
    inputs = config.hidden_size
    if layout.dense is not None:
        own["dense_kernel"], own["dense_bias"] = read_linear(tensors, layout.dense, inputs)
        inputs = own["dense_kernel"].shape[1]
    own["kernel"], own["bias"] = read_linear(tensors, layout.output, inputs)
    if problem is None:
        is_value = kind == "sequence-classification" and own["kernel"].shape[1] == 1
        problem = "regression" if is_value else "single-label"
    return Head(kind, own, problem=problem, pooling=layout.pooling, activation=layout.activation)


def head_of_names(tensors: Unread, config: BackboneConfig) -> Sequence[HeadType]:
    """The head types whose modules are all among the tensors."""

    def there(layout: Layout) -> bool:
        return all(f"{module}.weight" in tensors for module in (layout.output, layout.dense) if module is not None)

    return [kind for kind, layout in LAYOUTS[config.family].items() if there(layout)]


def labels_of(head: Head, settings: Mapping[str, Any], wishes: Wishes, problems: list[str]) -> tuple[str, ...]:
    """Label names in the order of the outputs: the user's, else ``id2label``'s or ``label2id``'s, else LABEL_0 ..."""
    if head.type in ("embedding", "question-answering"):
        return ()
    if wishes.labels:
        return wishes.labels
    by_id = _by_id(settings)
    if by_id is None:
        return () if head.problem == "regression" else tuple(f"LABEL_{at}" for at in range(head.outputs))
    if sorted(by_id) != list(range(head.outputs)):
        problems.append(
            f"label2id: expected the numbers 0 to {head.outputs - 1}, found {sorted(by_id)[:20]}; give labels"
        )
        return tuple(f"LABEL_{at}" for at in range(head.outputs))
    return tuple(by_id[at] for at in range(head.outputs))


def _by_id(settings: Mapping[str, Any]) -> dict[int, str] | None:
    """By ``id2label``, which is what transformers answers by; by ``label2id`` where it is absent or has usual names."""
    to_id, to_label = settings.get("label2id"), settings.get("id2label")
    found = []
    try:
        if isinstance(to_label, dict) and to_label:
            found.append({int(at): str(label) for at, label in to_label.items()})
        if isinstance(to_id, dict) and to_id:
            found.append({int(at): str(label) for label, at in to_id.items()})
    except (TypeError, ValueError, OverflowError):
        return {}
    named = [own for own in found if any(label != f"LABEL_{at}" for at, label in own.items())]
    return next(iter(named or found), None)
