"""What each head is trained to lower; f32, the mean over the rows that count."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jaxtyping import Array, Float

from jpets.training.forward import TaskOutputs
from jpets.types import Head

IGNORED = -100
"""Label of a token that does not count: special tokens, and the later parts of words."""


class Labels(NamedTuple):
    """``targets``: classes [n], tags [n, L], starts and ends [n, 2] as integers; label sets or values [n, C] as floats.

    ``weights`` [n]: how much each row counts; 0 for one that only fills up.
    """

    targets: Array
    weights: Float[Array, " n"]


def mean_loss(head: Head, outputs: TaskOutputs, labels: Labels) -> Float[Array, ""]:
    """Softmax cross-entropy of classes, tags, starts and ends; sigmoid cross-entropy of label sets; squared error."""
    rows = row_losses(head, outputs.logits, labels.targets)
    return (rows * labels.weights).sum() / jnp.maximum(labels.weights.sum(), 1e-9)


def row_losses(head: Head, logits: Array, targets: Array) -> Float[Array, " n"]:
    """Each row's loss, tokens and outputs averaged."""
    if head.type == "question-answering":
        each = optax.softmax_cross_entropy_with_integer_labels(logits.swapaxes(1, 2), targets)
        return each.mean(-1)
    if head.reads_tokens:
        counted = targets != IGNORED
        each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counted, targets, 0))
        return jnp.where(counted, each, 0).sum(-1) / jnp.maximum(counted.sum(-1), 1).astype(each.dtype)
    if head.problem == "regression":
        return jnp.square(logits - targets).mean(-1)
    if head.problem == "multi-label":
        return optax.sigmoid_binary_cross_entropy(logits, targets).mean(-1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)
