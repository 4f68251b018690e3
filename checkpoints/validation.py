"""What makes a task acceptable: checks over a task object, whether it came from a file or from a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import numpy as np

from checkpoints.fingerprint import FINGERPRINT
from jpets.config import BackboneConfig
from jpets.deltas import method_named
from jpets.deltas.fold import folds_pooler
from jpets.deltas.protocol import TensorSpec
from jpets.errors import InvalidTask
from jpets.templates import HOLES
from jpets.text_bounds import MOST_AROUND
from jpets.types import (
    QA_OUTPUTS,
    UNLABELLED,
    BackboneRef,
    Delta,
    Head,
    HeadType,
    Preprocessing,
    Task,
    Tensors,
    TruncationStrategy,
)

SHOWN_ERRORS = 12
AT_ONCE = 1 << 20
"""Numbers that are looked at together: what is computed of them is small beside a large tensor."""
HEAD_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh", "identity")
MOST_HOLES = 8
"""Places for texts in a template, which is filled for each query."""
KINDS: Mapping[str, tuple[str, ...]] = {
    "float": ("float32", "float16", "bfloat16"),
    "index": ("uint16", "int32", "uint32", "int64"),
    "bits": ("uint8",),
}
"""The dtypes that a tensor of each kind may have."""


def validate(task: Task, config: BackboneConfig | None = None, backbone: BackboneRef | str | None = None) -> None:
    """Raises ``InvalidTask`` naming what is wrong, what was expected and what was found.

    With ``config`` names and shapes are held against what the methods declare for that backbone; without it only what
    the task says about itself is checked. ``backbone`` is the reference or the fingerprint that the task must name.
    """
    validate_structure(task, config, backbone)
    validate_values(task, config)


def validate_structure(
    task: Task, config: BackboneConfig | None = None, backbone: BackboneRef | str | None = None
) -> None:
    """The part of ``validate`` that can be done before a tensor's numbers are converted. It reads none, unless
    something is wrong: then what is wrong with them is named too."""
    _check_backbone(task.backbone, config, backbone)
    errors = [
        *_head_errors(task, config),
        *_label_errors(task),
        *_preprocessing_errors(task, config),
        *_students_errors(task),
    ]
    for index, delta in enumerate(task.deltas):
        method_named(delta.method)
        if config is not None:
            errors += _delta_errors(delta, _place(index, delta), config)
    refuse([*errors, *(_not_finite(task) if errors else ())])


def validate_values(task: Task, config: BackboneConfig | None = None) -> None:
    """The rest of ``validate``."""
    refuse(_not_finite(task))
    for own in task.parts:
        folds_pooler(own)
    if config is not None:
        for index, delta in enumerate(task.deltas):
            _run_method_check(delta, index, config)


def _not_finite(task: Task) -> list[str]:
    places = [(_place(index, delta), delta.tensors) for index, delta in enumerate(task.deltas)]
    places.append(("head/", task.head.tensors))
    return [error for place, tensors in places for error in _finite_errors(tensors, place)]


def _place(index: int, delta: Delta) -> str:
    return f"delta/{index}/{delta.method}/"


def refuse(errors: list[str]) -> None:
    """Raises ``InvalidTask`` with all ``errors``, unless there are none."""
    if errors:
        more = [f"and {len(errors) - SHOWN_ERRORS} more"] if len(errors) > SHOWN_ERRORS else []
        raise InvalidTask("; ".join([error[:300] for error in errors[:SHOWN_ERRORS]] + more))


def _check_backbone(own: BackboneRef, config: BackboneConfig | None, expected: BackboneRef | str | None) -> None:
    if not FINGERPRINT.fullmatch(own.fingerprint):
        raise InvalidTask(f"backbone.fingerprint must be sha256: and 64 digits, found {own.fingerprint[:80]!r}")
    fingerprint = expected.fingerprint if isinstance(expected, BackboneRef) else expected
    if fingerprint is not None and own.fingerprint != fingerprint:
        raise InvalidTask(
            f"the task was made for backbone {own.name[:80]!r} with fingerprint {own.fingerprint}, "
            f"expected {fingerprint}; load that backbone or convert the task for this one"
        )
    if config is not None:
        found = {"family": own.family, "hidden_size": own.hidden_size, "layers": own.layers}
        wanted = {"family": config.family, "hidden_size": config.hidden_size, "layers": config.layers}
        refuse([f"backbone.{k}: expected {wanted[k]!r}, found {found[k]!r}" for k in found if found[k] != wanted[k]])


def _delta_errors(delta: Delta, place: str, config: BackboneConfig) -> list[str]:
    """Names, shapes and dtypes against what the method declares for these settings."""
    try:
        specs = method_named(delta.method).tensors(delta.settings, config)
    except InvalidTask as error:
        return [f"{place[:-1]}: {error}"]
    except (TypeError, AttributeError, KeyError, ValueError, IndexError) as error:
        # Methods take their settings as they are; a value of a wrong JSON type surfaces here.
        raise InvalidTask(f"{place[:-1]}: a setting has the wrong type ({type(error).__name__})") from error
    return list(tensor_errors(delta.tensors, specs, place))


def _run_method_check(delta: Delta, index: int, config: BackboneConfig) -> None:
    try:
        method_named(delta.method).check(delta, config)
    except InvalidTask as error:
        raise InvalidTask(f"delta/{index}: {str(error)[:300]}") from error
    except (TypeError, AttributeError, KeyError, ValueError, IndexError) as error:
        raise InvalidTask(f"delta/{index}: settings and tensors of {delta.method} do not fit each other") from error


def tensor_errors(tensors: Tensors, specs: Mapping[str, TensorSpec], place: str) -> Iterator[str]:
    """One line for each missing, unexpected, misshapen or mistyped tensor."""
    for name in sorted(specs.keys() - tensors.keys()):
        yield f"{place}{name}: expected {_shape(specs[name].shape)}, found nothing"
    for name in sorted(tensors.keys() - specs.keys()):
        yield f"{place}{name[:100]}: unexpected tensor {_shape(tensors[name].shape)}"
    for name in sorted(specs.keys() & tensors.keys()):
        spec, array = specs[name], tensors[name]
        fits = len(spec.shape) == array.ndim and all(
            want in (None, have) for want, have in zip(spec.shape, array.shape, strict=True)
        )
        if not fits:
            yield f"{place}{name}: expected {_shape(spec.shape)}, found {_shape(array.shape)}"
        if array.dtype.name not in KINDS[spec.kind]:
            yield f"{place}{name}: expected {' or '.join(KINDS[spec.kind])}, found {array.dtype.name}"
        elif spec.kind == "index" and array.size and int(array.min()) < 0:
            yield f"{place}{name}: expected numbers from 0, found {int(array.min())}"


def _finite_errors(tensors: Tensors, place: str) -> Iterator[str]:
    for name, array in tensors.items():
        if array.dtype.name not in KINDS["float"]:
            continue
        numbers = array.reshape(-1)
        for start in range(0, numbers.size, AT_ONCE):
            some = numbers[start : start + AT_ONCE]
            if not np.isfinite(some).all():
                yield f"{place}{name[:100]}: expected finite numbers, found {'NaN' if np.isnan(some).any() else 'Inf'}"
                break


def head_specs(head: Head, hidden_size: int | None, config: BackboneConfig | None = None) -> dict[str, TensorSpec]:
    """The tensors that a head of this kind and size has, on the backbone of ``config`` if that is known."""
    if head.type == "embedding" and not head.tensors:
        return {}
    outputs = _width(head.tensors, "kernel")
    if head.type == "fill-mask":
        width, words = (None, None) if config is None else (config.embedding_width, config.vocab_size)
        width = width or outputs
        own = {name: TensorSpec((width,)) for name in ("bias", "norm_weight", "norm_bias")}
        return {"kernel": TensorSpec((hidden_size, width)), **own, "decoder_bias": TensorSpec((words,))}
    dense = _width(head.tensors, "dense_kernel")
    if not any(name.startswith("dense_") for name in head.tensors):
        return {"kernel": TensorSpec((hidden_size, outputs)), "bias": TensorSpec((outputs,))}
    return {
        "dense_kernel": TensorSpec((hidden_size, dense)),
        "dense_bias": TensorSpec((dense,)),
        "kernel": TensorSpec((dense, outputs)),
        "bias": TensorSpec((outputs,)),
    }


def _width(tensors: Tensors, name: str) -> int | None:
    array = tensors.get(name)
    return int(array.shape[-1]) if array is not None and array.ndim else None


def _head_errors(task: Task, config: BackboneConfig | None) -> Iterator[str]:
    head = task.head
    hidden_size = config.hidden_size if config is not None else task.backbone.hidden_size
    yield from tensor_errors(head.tensors, head_specs(head, hidden_size, config), "head/")
    if head.type not in get_args(HeadType):
        yield f"head.type: expected one of {list(get_args(HeadType))}, found {head.type!r}"
    if any(array.size == 0 for array in head.tensors.values()):
        yield "head: expected at least one output, found an empty tensor"
    if head.activation not in HEAD_ACTIVATIONS:
        yield f"head.activation: expected one of {list(HEAD_ACTIVATIONS)}, found {head.activation[:80]!r}"
    outputs = _width(head.tensors, "kernel")
    if head.type == "question-answering" and outputs not in (None, QA_OUTPUTS):
        yield f"head/kernel: expected {QA_OUTPUTS} outputs, start and end of an answer, found {outputs}"
    if head.relevance is not None and (head.type, outputs) != ("sequence-classification", 1):
        yield f"head.relevance: expected none but for one output for a text, found {head.relevance}"
    if head.pooling == "pooler" and config is not None and not config.pooler:
        yield "head.pooling: expected cls or mean, found pooler, which the backbone does not have"


def _students_errors(task: Task) -> Iterator[str]:
    """A group of students has as many deltas of each, and a head that reads one vector of a text."""
    if (own := task.students) is None:
        return
    count = len(own.multipliers)
    if not task.deltas or len(task.deltas) % count:
        yield f"students: expected as many deltas for each of {count} students, found {len(task.deltas)}"
    if own.least > count:
        yield f"students.least: expected at most {count}, the number of students, found {own.least}"
    if own.scores and len(own.scores) != count:
        yield f"students.scores: expected {count}, one for each number of students, found {len(own.scores)}"
    if task.head.type != "sequence-classification" or task.head.dense:
        found = "one of two layers" if task.head.dense else task.head.type
        yield f"students: expected a head of one layer for whole texts, found {found}"


def _label_errors(task: Task) -> Iterator[str]:
    labels, outputs = task.labels, _width(task.head.tensors, "kernel") or 0
    if task.head.type in UNLABELLED:
        if labels:
            yield f"labels: expected none for a head of type {task.head.type}, found {len(labels)}"
        return
    optional = task.head.type == "sequence-classification" and task.head.problem == "regression"
    if len(labels) != outputs and not (optional and not labels):
        yield f"labels: expected {outputs}, one for each output of head/kernel, found {len(labels)}"
    yield from name_errors(labels, "labels")


def name_errors(labels: Sequence[str], option: str) -> Iterator[str]:
    """What is wrong with the names that an option gives to labels: each must be there, and be another one."""
    if not all(label.strip() for label in labels):
        yield f"{option}: expected non-empty texts, found an empty one"
    if len(set(labels)) != len(labels):
        counts = Counter(labels)
        twice = next(label for label in labels if counts[label] > 1)
        yield f"{option}: expected each once, found {twice[:80]!r} more than once"


def _preprocessing_errors(task: Task, config: BackboneConfig | None) -> Iterator[str]:
    own: Preprocessing = task.preprocessing
    longest = config.max_positions if config is not None else 1 << 20
    if own.max_length is not None and not 2 <= own.max_length <= longest:
        yield f"preprocessing.max_length: expected 2 to {longest} tokens, found {own.max_length}"
    if own.template is not None:
        rest, holes = HOLES.subn("", own.template)
        if "{text}" not in own.template or "{" in rest or "}" in rest:
            yield "preprocessing.template: expected {text}, maybe {text_pair}, and no other braces"
        elif holes > MOST_HOLES or len(rest) > MOST_AROUND:
            yield (
                f"preprocessing.template: expected at most {MOST_HOLES} places for texts and {MOST_AROUND} characters "
                f"around them, found {holes} and {len(rest)}"
            )
        elif task.head.type == "question-answering" and "{text_pair}" not in own.template:
            yield "preprocessing.template: expected {text_pair} too, the context of a question, found {text} only"
        elif task.head.type == "token-classification" and holes > len({*HOLES.findall(own.template)}):
            yield "preprocessing.template: expected each text once, as its tokens are labelled, found one several times"
    strategies = get_args(TruncationStrategy) if own.template is None else ("longest_first", "only_first")
    if own.truncation_strategy not in strategies:
        beside = "" if own.template is None else " beside a template, which makes one text of a pair"
        found = str(own.truncation_strategy)[:80]
        yield f"preprocessing.truncation_strategy: expected {' or '.join(strategies)}{beside}, found {found!r}"
    if own.prompts is not None and own.template is not None:
        yield "preprocessing.prompts: expected none beside a template, which sets its own text around a query's"
    if own.thresholds is not None:
        outputs = _width(task.head.tensors, "kernel") or 0
        if task.head.type != "sequence-classification" or task.head.problem != "multi-label":
            yield f"preprocessing.thresholds: expected none for {task.head.type} ({task.head.problem})"
        elif len(own.thresholds) != outputs or not all(0 <= each <= 1 for each in own.thresholds):
            yield f"preprocessing.thresholds: expected {outputs} numbers from 0 to 1, found {len(own.thresholds)}"


def _shape(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
