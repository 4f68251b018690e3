"""The loss of each head: f32, the mean over the rows that count."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jaxtyping import Array, Bool, Float, Num

from jpets.training.forward import TaskOutputs
from jpets.types import Head

IGNORED = -100
"""Label of parts that do not count: special tokens, the later parts of words, and in a label set the labels of
another task."""


SHARPNESS = 20.0
"""Factor of cosines before the softmax over a batch's texts (the usual one of Sentence-Transformers)."""


Target = Num[np.ndarray, " ..."]
"""One row's target: see ``Labels``."""


class Labels(NamedTuple):
    """``targets``: classes [n], tags [n, L], starts and ends [n, 2] as integers; label sets or values [n, C] as floats;
    for pairs the numbers of their two texts as integers [n, 2], or their similarity (cosine) as floats [n].

    ``weights`` [n]: how much each row counts; 0 for one that only fills the batch.
    """

    targets: Num[Array, "n ..."]
    weights: Float[Array, " n"]


def mean_loss(head: Head, outputs: TaskOutputs, labels: Labels) -> Float[Array, ""]:
    """Softmax cross-entropy of classes, tags, starts and ends; sigmoid cross-entropy of label sets, and of an output
    that stands for its sigmoid; squared error.

    For pairs of texts: see ``pair_losses``.
    """
    rows = row_losses(head, outputs, labels)
    return (rows * labels.weights).sum() / jnp.maximum(labels.weights.sum(), 1e-9)


def row_losses(head: Head, outputs: TaskOutputs, labels: Labels) -> Float[Array, " n"]:
    """Each row's loss, tokens and outputs averaged."""
    logits, targets = outputs.logits, labels.targets
    if head.type == "embedding":
        return pair_losses(outputs.vectors, labels)
    if head.type == "question-answering":
        each = optax.softmax_cross_entropy_with_integer_labels(logits.swapaxes(1, 2), targets)
        return each.mean(-1)
    if head.reads_tokens:
        each = optax.softmax_cross_entropy_with_integer_labels(logits, _known(targets))
        return _mean_of_counted(each, targets)
    if head.is_score:
        return optax.sigmoid_binary_cross_entropy(logits, targets).mean(-1)
    if head.problem == "regression":
        return jnp.square(logits - targets).mean(-1)
    if head.problem == "multi-label":
        return _mean_of_counted(optax.sigmoid_binary_cross_entropy(logits, _known(targets)), targets)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def _known(targets: Array) -> Array:
    """Targets with a valid class in place of those that do not count."""
    return jnp.where(targets == IGNORED, 0, targets)


def _mean_of_counted(losses: Float[Array, "n c"], targets: Array) -> Float[Array, " n"]:
    counted = targets != IGNORED
    return jnp.where(counted, losses, 0).sum(-1) / jnp.maximum(counted.sum(-1), 1).astype(losses.dtype)


def pair_losses(vectors: Float[Array, "m d"], labels: Labels) -> Float[Array, " n"]:
    """Losses of n pairs; the first n rows are the first texts, the others the second ones.

    If the texts have numbers: which of the batch's seconds belongs to the first, by cross-entropy over their cosines
    (Henderson et al. 2017, section 4.4). Others that are no wrong answers are left out: copies of either text, and
    second texts of another pair with the same first. Else the squared error of the pair's cosine (Reimers and Gurevych
    2019, section 3).
    """
    n = len(labels.weights)
    unit = vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-6)
    first, second = unit[:n], unit[n:]
    if jnp.issubdtype(labels.targets.dtype, jnp.floating):
        return jnp.square((first * second).sum(-1) - labels.targets)
    cosines = jnp.matmul(first, second.T, precision=jax.lax.Precision.HIGHEST)
    firsts, seconds = labels.targets.T
    same = (firsts[:, None] == firsts[None]) | (seconds[:, None] == seconds[None])
    wrong = ~same & (firsts[:, None] != seconds[None]) & (labels.weights > 0)[None]
    taken = wrong | jnp.eye(n, dtype=bool)
    return optax.softmax_cross_entropy_with_integer_labels(
        jnp.where(taken, SHARPNESS * cosines, jnp.finfo(jnp.float32).min), jnp.arange(n)
    )


def state_distance(
    found: Float[Array, "n l d"], expected: Float[Array, "n l d"], within: Bool[Array, "n l"]
) -> Float[Array, ""]:
    """Squared error of hidden states as a part of the variance of what is expected, over all tokens ``within``."""
    weight = within[..., None].astype(jnp.float32)
    mean = (expected * weight).sum((0, 1)) / weight.sum()
    error = (jnp.square(found - expected) * weight).sum()
    return error / (jnp.square(expected - mean) * weight).sum()
