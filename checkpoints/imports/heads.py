"""Heads as Hugging Face models spell them: one row a family and head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from checkpoints.imports.unread import Unread
from checkpoints.settings import expect
from checkpoints.validation import name_errors
from jpets.config import BackboneConfig
from jpets.errors import InvalidTask
from jpets.types import UNLABELLED, Head, HeadType, Pooling, Problem, TruncationStrategy

PROBLEMS: Mapping[str, Problem] = MappingProxyType(
    {
        "single_label_classification": "single-label",
        "multi_label_classification": "multi-label",
        "regression": "regression",
    }
)
"""``problem_type`` of ``config.json``."""
MOST_DIGITS = 9
"""Of a label's number."""


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
    """The user's choices for a task, where its checkpoint makes none or others."""

    head: HeadType | None = None
    problem: Problem | None = None
    labels: tuple[str, ...] = ()
    pooling: Pooling | None = None
    """Of an embedding head, as ``normalize``."""
    normalize: bool | None = None
    max_length: int | None = None
    """Tokens that texts are cut to."""
    truncation_strategy: TruncationStrategy | None = None
    """Which text of a pair is cut."""


def read_linear(tensors: Unread, module: str, inputs: int, *, biased: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """(kernel [inputs, outputs], bias [outputs]) of a linear module; zeros where it is not ``biased``.

    ``inputs`` 0 is any number: it is not known where the layer before is missing.
    """
    kernel = tensors.take(f"{module}.weight", (None, inputs or None)).T
    outputs = kernel.shape[1]
    return kernel, tensors.take(f"{module}.bias", (outputs or None,)) if biased else np.zeros(outputs, np.float32)


def note_on_problem(head: Head, said: Problem | None) -> tuple[str, ...]:
    """A note where nothing has said what several outputs decide: a model of label sets would answer wrongly."""
    if said is not None or head.type != "sequence-classification" or head.outputs < 2:
        return ()
    return (
        f"the checkpoint does not say what its {head.outputs} outputs decide: they are taken for classes, of which a "
        "text has one; for sets of labels say --problem multi-label",
    )


def read_head(tensors: Unread, config: BackboneConfig, kind: HeadType, problem: Problem | None) -> Head:
    """The head of a model whose head modules have their usual names; not of an embedding, which has none.

    Without ``problem`` a single output for a text is a value, as it is in transformers' training; heads that read
    tokens have one problem, whatever a configuration says. Problems go to ``tensors.problems``.
    """
    if kind not in LAYOUTS[config.family]:
        raise InvalidTask(f"head: a {kind} head is read of a whole fine-tuned model alone; leave it out, or give one")
    layout = LAYOUTS[config.family][kind]
    own = {}
    inputs = config.hidden_size
    modules = [module for module in (layout.dense, layout.output) if module is not None]
    if not any(f"{module}.weight" in tensors for module in modules):
        tensors.problems.options.append(
            f"the folder holds no {kind} head ({', '.join(modules)}); save it with the head (PEFT: task_type, "
            "modules_to_save), or say --head embedding to do without"
        )
    if layout.dense is not None:
        own["dense_kernel"], own["dense_bias"] = read_linear(tensors, layout.dense, inputs)
        inputs = own["dense_kernel"].shape[1]
    own["kernel"], own["bias"] = read_linear(tensors, layout.output, inputs)
    if kind != "sequence-classification":
        problem = "single-label"
    elif problem is None:
        problem = "regression" if own["kernel"].shape[1] == 1 else "single-label"
    head = Head(kind, own, problem=problem, pooling=layout.pooling, activation=layout.activation)
    check_outputs(head, tensors.problems.options)
    return head


def check_outputs(head: Head, problems: list[str]) -> None:
    """A problem for a head that gives one answer whatever the text: of one class there is only one to choose."""
    if head.outputs != 1 or head.problem != "single-label" or head.type in UNLABELLED:
        return
    other = "; say --problem regression or multi-label" if head.type == "sequence-classification" else ""
    problems.append(f"expected several classes in a {head.type} head of single labels, found one output{other}")


def head_of_names(tensors: Unread, config: BackboneConfig) -> Sequence[HeadType]:
    """The head types whose modules are all among the tensors."""

    def there(layout: Layout) -> bool:
        return all(f"{module}.weight" in tensors for module in (layout.output, layout.dense) if module is not None)

    return [kind for kind, layout in LAYOUTS[config.family].items() if there(layout)]


def labels_of(head: Head, settings: Mapping[str, Any], wishes: Wishes, problems: list[str]) -> tuple[str, ...]:
    """Label names in the order of the outputs: the user's, else ``id2label``'s or ``label2id``'s, else LABEL_0 ..."""
    if head.type in UNLABELLED or not head.outputs:  # how many outputs there are is not known: the kernel is missing
        return ()
    if wishes.labels:
        if len(wishes.labels) != head.outputs:
            problems.append(f"labels: expected {head.outputs}, one for each output, found {len(wishes.labels)}")
        problems += name_errors(wishes.labels, "labels")
        return wishes.labels
    for option in ("num_labels", "_num_labels"):
        wrong = f"{option}: {settings.get(option)}, found a head of {head.outputs} outputs"
        if type(settings.get(option)) is int and settings[option] != head.outputs and wrong not in problems:
            problems.append(wrong)
    option, by_id = _by_id(settings, problems)
    if not by_id:
        return () if head.problem == "regression" else tuple(f"LABEL_{at}" for at in range(head.outputs))
    if set(by_id) != set(range(head.outputs)):
        problems.append(
            f"{option}: expected the numbers 0 to {head.outputs - 1}, found {str(list(by_id))[:80]}; give labels"
        )
        return ()
    labels = tuple(by_id[at] for at in range(head.outputs))
    problems += [f"{error}; give labels" for error in name_errors(labels, option)]
    return labels


def problem_of(settings: Mapping[str, Any], wishes: Wishes, problems: list[str]) -> Problem | None:
    """What a classifier decides: the user's wish, else what ``config.json`` says, if anything."""
    written = settings.get("problem_type")
    if wishes.problem is None and written is not None and str(written) not in PROBLEMS:
        problems.append(f"problem_type: expected one of {sorted(PROBLEMS)}, found {str(written)[:80]!r}")
    return wishes.problem or PROBLEMS.get(str(written))


def note_on_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """What the user is told where a checkpoint does not name its labels."""
    if not labels or any(label != f"LABEL_{at}" for at, label in enumerate(labels)):
        return ()
    return (f"the checkpoint does not name its {len(labels)} labels, which are {labels[0]} ... now; see --labels",)


def refuse_idle_wishes(head: Head, wishes: Wishes, problems: list[str]) -> None:
    """A problem for each wish that can have no effect on this head."""
    if wishes.head not in (None, head.type):
        problems.append(f"head: expected {head.type}, which the checkpoint holds, found {wishes.head}; leave it out")
    idle: list[tuple[str, object, bool]] = [
        ("problem", wishes.problem, head.type != "sequence-classification"),
        ("labels", len(wishes.labels), head.type in UNLABELLED),
        ("pooling", wishes.pooling, head.type != "embedding"),
        ("normalize", wishes.normalize is not None, head.type != "embedding"),
    ]
    problems += [
        f"{option}: expected none for a head of type {head.type}, found {found}; leave it out"
        for option, found, has_none in idle
        if found and has_none
    ]


def _by_id(settings: Mapping[str, Any], problems: list[str]) -> tuple[str, dict[int | str, str]]:
    """The option that says which label has which number, and what it says: ``id2label``, by which transformers answers;
    ``label2id`` where that is absent or has usual names."""
    to_label, to_id = (expect(settings, name, dict, {}, problems) for name in ("id2label", "label2id"))
    found = [
        ("id2label", {_number(at): str(label) for at, label in to_label.items()}),
        ("label2id", {_number(at): str(label) for label, at in to_id.items()}),
    ]
    named = [each for each in found if any(label != f"LABEL_{at}" for at, label in each[1].items())]
    return next(iter(named or [each for each in found if each[1]] or found))


def _number(at: Any) -> int | str:
    """A label's number, which JSON has in digits where it is a key; anything else as it is written."""
    text = str(at)
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else text
