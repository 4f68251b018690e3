"""Heads start at the answer that is best without reading a text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpets.training.batches import Rows
from jpets.training.forward import TaskOutputs
from jpets.training.heads import at_the_usual_answer, new_head
from jpets.training.losses import IGNORED, Labels, mean_loss
from jpets.training.metrics import scores
from jpets.types import Head, HeadType, Problem

HIDDEN = 8


def rows_of(targets: list[Any], dtype: Any, weights: list[float] | None = None) -> Rows:
    given = weights if weights is not None else [1.0] * len(targets)
    return Rows([], [np.array(each, dtype) for each in targets], np.array(given, np.float32))


def loss_of_bias(head: Head, rows: Rows, bias: Any) -> jax.Array:
    """The loss of a head that answers with its bias for any text."""
    shape = (*np.stack(rows.targets).shape, head.outputs) if head.reads_tokens else (len(rows.targets), head.outputs)
    outputs = TaskOutputs(jnp.zeros((len(rows.targets), HIDDEN)), jnp.broadcast_to(bias, shape))
    return mean_loss(head, outputs, Labels(jnp.asarray(np.stack(rows.targets)), jnp.asarray(rows.weights)))


SETS = [[0, 1, 0], [0, 0, 1], [0, 0, 1], [1, 0, 1]]
TAGS = [[0, 0, 1, IGNORED], [IGNORED, 2, 0, IGNORED], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("kind", "problem", "outputs", "rows"),
    [
        ("sequence-classification", "single-label", 3, rows_of([0, 0, 1, 2, 0], np.int32)),
        ("sequence-classification", "single-label", 2, rows_of([0, 0, 1], np.int32, [0.75, 0.75, 1.5])),
        ("sequence-classification", "multi-label", 3, rows_of(SETS, np.float32)),
        ("sequence-classification", "regression", 2, rows_of([[3.5, -1], [2, 40], [0.5, 7]], np.float32)),
        ("token-classification", "single-label", 3, rows_of(TAGS, np.int32)._replace(tags=True)),
    ],
)
def test_no_other_bias_answers_better_unread(kind: HeadType, problem: Problem, outputs: int, rows: Rows) -> None:
    head = at_the_usual_answer(new_head(kind, problem, outputs, HIDDEN), rows)
    slope = jax.grad(lambda bias: loss_of_bias(head, rows, bias))(jnp.asarray(head.tensors["bias"]))
    np.testing.assert_allclose(slope, 0, atol=1e-5)
    other = head.tensors["bias"] + np.arange(1, outputs + 1, dtype=np.float32) / 10
    assert loss_of_bias(head, rows, head.tensors["bias"]) < loss_of_bias(head, rows, other)


def test_one_label_that_is_there_or_not_is_scored_by_how_often_it_is_found() -> None:
    """Not by how often it is rightly missing."""
    head = new_head("sequence-classification", "multi-label", 1, HIDDEN)
    truth = [np.array([float(at < 2)]) for at in range(40)]
    for logits, f1 in (([-9.0] * 40, 0.0), ([9.0, -9.0, 9.0] + [-9.0] * 37, 0.5)):
        found = scores(head, ("toxic",), [np.array([each]) for each in logits], truth)
        assert found["f1_micro"] == found["f1_macro"] == f1


def test_a_value_is_what_pairs_are_ranked_by() -> None:
    """It was learnt as it is: its sigmoid is another number."""
    assert new_head("sequence-classification", "regression", 1, HIDDEN).relevance == "raw"
    for problem, outputs in (("regression", 2), ("single-label", 2), ("multi-label", 1)):
        head = new_head("sequence-classification", problem, outputs, HIDDEN)  # type: ignore[arg-type]
        assert head.relevance is None


def test_what_does_not_occur_is_unlikely_but_possible() -> None:
    sets = rows_of([[0, 1, 1], [0, 0, 1]], np.float32)
    head = at_the_usual_answer(new_head("sequence-classification", "multi-label", 3, HIDDEN), sets)
    np.testing.assert_allclose(jax.nn.sigmoid(head.tensors["bias"]), [0.25, 0.5, 0.75], rtol=1e-6)
    classes = at_the_usual_answer(
        new_head("sequence-classification", "single-label", 3, HIDDEN), rows_of([1, 1, 2, 2], np.int32)
    )
    shares = jax.nn.softmax(classes.tensors["bias"])
    assert 0 < shares[0] < shares[1] == shares[2]


def test_embeddings_and_answers_have_no_usual_one() -> None:
    embedding = new_head("embedding", "single-label", 0, HIDDEN)
    answers = new_head("question-answering", "single-label", 2, HIDDEN)
    spans = rows_of([[1, 2], [0, 0]], np.int32)
    assert at_the_usual_answer(embedding, rows_of([0, 1], np.int32)) is embedding
    assert at_the_usual_answer(answers, spans) is answers
