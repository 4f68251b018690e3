"""Batches of several tasks side by side, packed into few shapes, and the answers of a packed batch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import shallow

from jpets.deltas import METHODS
from jpets.model.encoder import random_params, split
from jpets.tokenizing import Tokens
from jpets.training.batches import Rows
from jpets.training.forward import InputRows, task_outputs
from jpets.training.groups import PROGRAMS, Shape, best_shapes, each_step
from jpets.training.heads import new_head
from jpets.training.losses import Labels, row_losses
from jpets.training.plan import SettledPlan
from jpets.training.tokens import packed, rectangle
from jpets.types import Delta, Head

CONFIG = dataclasses.replace(shallow().config, layers=1)
PLAN = SettledPlan(epochs=2, batch=8, dtype="float32", seed=1)
LENGTHS = (5, 12, 1, 9)


def texts(lengths: Sequence[int]) -> list[Tokens]:
    rng = np.random.default_rng(0)
    return [Tokens(rng.integers(5, 90, n).astype(np.int32), rng.integers(0, 2, n).astype(np.int32)) for n in lengths]


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    return random_params(CONFIG)


def head_of(kind: Any) -> Head:
    if kind != "two-layer":
        return new_head(kind, "single-label", 2, CONFIG.hidden_size)
    rng, d = np.random.default_rng(4), CONFIG.hidden_size
    shapes = {"dense_kernel": (d, d), "dense_bias": (d,), "kernel": (d, 3), "bias": (3,)}
    tensors = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    return Head("sequence-classification", tensors, activation="tanh", pooling="cls")


CASES = [
    ("adapter", "embedding"),
    ("bitfit", "sequence-classification"),  # merged, like all deltas that do not act next to the weights
    ("ia3", "sequence-classification"),
    ("lora", "token-classification"),
    ("prefix", "two-layer"),
    ("prompt", "question-answering"),
]


@pytest.mark.parametrize(("method", "kind"), CASES)
def test_packed_texts_have_the_answers_and_slopes_of_padded_ones(method: str, kind: str, base: dict[str, Any]) -> None:
    start = METHODS[method].init(np.random.default_rng(3), {}, CONFIG, 0.1)
    settings = {**start.settings, "first_position": 3} if method == "prefix" else start.settings
    head, encoder, longest = head_of(kind), split(CONFIG), max(LENGTHS)

    @jax.jit
    @jax.value_and_grad
    def summed(trained: Any, rows: Any) -> Any:
        delta = Delta(method, settings, trained["own"])
        pooled, logits = task_outputs(encoder, base, [delta], head, trained["head"], rows)
        if head.reads_tokens:
            real = jnp.arange(longest) < jnp.array(LENGTHS)[:, None]
            logits = jnp.where(real[..., None], logits[:, :longest], 0)
        return sum((jnp.linspace(0.1, 1, part.size) * jnp.sin(part.reshape(-1))).sum() for part in (pooled, logits))

    trained = jax.tree.map(jnp.asarray, {"own": dict(start.tensors), "head": dict(head.tensors)})
    given = texts(LENGTHS)
    expected = summed(trained, rectangle(given, 16, pad_id=7))
    found = summed(trained, packed(given, sum(LENGTHS) + 9, longest, pad_id=11))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


def test_the_loss_of_an_answer_is_that_of_any_padding(base: dict[str, Any]) -> None:
    head, encoder, given = head_of("question-answering"), split(CONFIG), texts(LENGTHS)
    tensors = {name: 10 * jnp.asarray(array) for name, array in head.tensors.items()}
    labels = Labels(jnp.zeros((len(LENGTHS), 2), jnp.int32), jnp.ones(len(LENGTHS)))
    padded = [rectangle(given, length, pad_id=7) for length in (max(LENGTHS), 48)]
    every: list[InputRows] = [*padded, packed(given, sum(LENGTHS) + 9, 48, pad_id=11)]
    expected, *found = (
        row_losses(head, task_outputs(encoder, base, [], head, tensors, rows), labels) for rows in every
    )
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=1e-5)


needs = st.builds(Shape, st.integers(1, 200), st.integers(1, 60))


@given(st.lists(needs, min_size=1, max_size=9), st.integers(1, 4))
def test_shapes_are_those_of_fewest_places(found: list[Shape], most: int) -> None:
    def places(bounds: Sequence[int]) -> float:
        return sum(next((bound for bound in bounds if bound >= need.tokens), np.inf) for need in found)

    shapes = best_shapes(found, most)
    assert len(shapes) <= most and shapes == sorted(set(shapes))
    for need in found:
        taken = next(each for each in shapes if each.tokens >= need.tokens)
        assert taken.longest >= need.longest
        assert taken.longest < 8 + max(each.longest for each in found)
    sizes = {8 * -(-need.tokens // 8) for need in found}
    tried = (sorted(own) for n in range(1, most + 1) for own in itertools.combinations(sizes, min(n, len(sizes))))
    assert places([each.tokens for each in shapes]) == min(map(places, tried))


def test_groups_hold_each_task_that_has_a_batch_and_all_its_tokens() -> None:
    rng = np.random.default_rng(0)
    counts, data = (5, 30, 16, 9, 12, 24), []
    for count in counts:
        own = texts(rng.integers(4, 60, count).tolist())
        data.append(Rows(own, [text.ids for text in own], np.ones(count, np.float32), tags=True))
    steps, shapes = list(each_step(data, PLAN, pad_id=3)), set()
    assert len(steps) == PLAN.epochs * 4
    seen = np.zeros(len(counts), int)
    for step, groups in enumerate(steps):
        present = [at for group in groups for at in group.tasks.tolist() if at < len(data)]
        assert sorted(present) == [at for at, n in enumerate(counts) if step < PLAN.epochs * -(-n // PLAN.batch)]
        for group in groups:
            ids, lengths, targets = (
                np.asarray(each) for each in (group.rows.ids, group.rows.lengths, group.labels.targets)
            )
            assert ids.shape[0] == lengths.shape[0] == 4 and lengths.shape[1] == PLAN.batch
            assert lengths.max() <= group.rows.longest == targets.shape[2]
            shapes.add((ids.shape[1], group.rows.longest))
            for at, own, rows, tags, weights in zip(
                group.tasks, ids, lengths, targets, group.labels.weights, strict=True
            ):
                assert rows.sum() <= len(own) and np.all(own[rows.sum() :] == 3)
                real = np.asarray(weights) > 0
                assert np.all(rows[~real] == 1) and np.array_equal((tags[real] >= 0).sum(1), rows[real])
                if at < len(data):
                    seen[at] += rows[real].sum()
    assert seen.tolist() == [PLAN.epochs * sum(len(own.ids) for own in rows.tokens) for rows in data]
    assert 3 < len(shapes) <= PROGRAMS
