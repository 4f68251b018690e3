"""N-gram layers: what training them computes, learns, and leaves alone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hierarchical import layers_of, model_of
from support import tiny

from jpets.model.encoder import split
from jpets.plot.lookup import OWN
from jpets.plot.ngrams import Window, ngrams, shortened
from jpets.tokenizing import Tokens
from jpets.training import batches, pretrain
from jpets.training.adapt import (
    Hierarchical,
    adapt,
    calibrated,
    hierarchical_states,
    start,
    text_ngrams,
    train_domain,
)
from jpets.training.batches import batch_order
from jpets.training.checkpoints import Checkpoints
from jpets.training.forward import TextRows, states_of
from jpets.training.plan import SettledPlan, TrainingPlan
from jpets.training.pretrain import Vocabulary
from jpets.training.run import UpdateReport
from jpets.training.tokens import rectangle

VOCABULARY = Vocabulary(800, 4, (0, 1, 2, 3, 4))
PLAN = TrainingPlan(epochs=8, batch=8, dtype="float32", rate=2e-3)


def texts(count: int = 24) -> list[Tokens]:
    rng = np.random.default_rng(0)
    one = rng.integers(5, 800, 12).astype(np.int32)
    return [Tokens(np.roll(one, number % 6), np.zeros(12, np.int32)) for number in range(count)]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ngrams_of_padded_texts_are_those_of_packed_ones(size: int) -> None:
    rng, window = np.random.default_rng(1), Window.of(size)
    ids, lengths = rng.integers(0, 90, (4, 9)).astype(np.int32), np.array([9, 1, 4, 0])
    found = np.asarray(text_ngrams(TextRows(jnp.asarray(ids), jnp.zeros_like(ids), jnp.asarray(lengths)), window))
    for row, length in enumerate(lengths):
        own = ids[row, :length]
        np.testing.assert_array_equal(found[row, :length], ngrams(own, np.zeros(length, np.int8), window))
    assert (found.sum(-1) > 0).all(), "also past a text's end: nothing attends to nothing"


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ngrams_are_cut_to_what_tables_will_hold(size: int) -> None:
    rng, window = np.random.default_rng(1), Window.of(size)
    ids, spans = rng.integers(0, 90, (3, 9)).astype(np.int32), [(window.before, window.after), *window.shorter]
    levels = rng.integers(OWN, len(spans), ids.shape).astype(np.int8)
    rows = TextRows(jnp.asarray(ids), jnp.zeros_like(ids), jnp.full(3, 9), jnp.asarray(levels))
    found = np.asarray(text_ngrams(rows, window))
    for row, token in np.ndindex(*ids.shape):
        grams = ngrams(ids[row], None, window)
        expected = shortened(grams, window, *spans[max(int(levels[row, token]), 0)])[token]
        np.testing.assert_array_equal(found[row, token], expected)


def test_a_domain_computes_its_own_ngrams_and_its_root_the_others() -> None:
    layers, base = layers_of(), jax.tree.map(jnp.asarray, model_of())
    other = jax.tree.map(jnp.asarray, model_of(seed=2)).ngrams
    ids = np.random.default_rng(2).integers(5, 800, (1, 8)).astype(np.int32)
    rows = TextRows(jnp.asarray(ids), jnp.zeros_like(ids), jnp.array([8]))

    def merged(levels: list[int], lower: Any, root: Any) -> np.ndarray:
        own = rows._replace(levels=jnp.array([levels], jnp.int8))
        return np.asarray(hierarchical_states(layers, Hierarchical(lower, base.upper), own, "float32", root)[0][0])

    ours, theirs = (merged([0] * 8, each, None) for each in (other, base.ngrams))
    both = merged([OWN] * 4 + [0] * 4, other, base.ngrams)
    np.testing.assert_allclose(both[:3], ours[:3], atol=1e-6)
    np.testing.assert_allclose(both[5:], theirs[5:], atol=1e-6)
    assert np.abs(both[4] - ours[4]).max() > 1e-3


def test_a_text_computes_the_same_beside_others_and_padding() -> None:
    layers, model = layers_of(), jax.tree.map(jnp.asarray, model_of())
    ids = np.random.default_rng(2).integers(5, 800, (2, 8)).astype(np.int32)
    rows = TextRows(jnp.asarray(ids), jnp.zeros_like(ids), jnp.array([8, 3]))
    both = hierarchical_states(layers, model, rows)
    short = TextRows(rows.ids[1:, :3], rows.types[1:, :3], rows.lengths[1:])
    for together, alone in zip(both, hierarchical_states(layers, model, short), strict=True):
        np.testing.assert_allclose(together[1, :3], alone[0], atol=1e-5)


def test_a_backbone_learns_to_do_with_ngrams() -> None:
    layers, base = layers_of(), dict(tiny().params)
    model, losses = adapt(layers, base, texts(), VOCABULARY, PLAN, guesses=0.01)
    assert losses[-1] < 0.8 * losses[0] and np.isfinite(losses).all()
    np.testing.assert_array_equal(model.upper["word"], base["word"])
    np.testing.assert_array_equal(model.ngrams["lower"]["word"], base["word"])
    position, token_type = np.asarray(model.upper["position"]), np.asarray(model.upper["token_type"])
    assert len({row.tobytes() for row in position[:12]}) == 12 and position[:12].all()
    np.testing.assert_array_equal(position[12:], np.broadcast_to(position[11], position[12:].shape))
    np.testing.assert_array_equal(token_type[1], token_type[0])


def test_it_begins_near_the_hidden_states_of_the_whole_backbone() -> None:
    """In the mean and spread of each number; nothing but the norm of the merged vectors is fitted."""
    layers, base = layers_of(), jax.tree.map(jnp.asarray, dict(tiny().params))
    begun = start(layers, base)
    own = calibrated(layers, base, begun, texts())
    rows = rectangle(texts(), 16, 0)
    expected = np.asarray(states_of(split(tiny().config), base, rows, "float32")[layers.count])[:, :12]
    errors = [
        np.square(np.asarray(hierarchical_states(layers, each, rows)[0])[:, :12] - expected).mean()
        for each in (begun, own)
    ]
    assert errors[1] < 0.8 * errors[0]
    jax.tree.map(np.testing.assert_array_equal, own.ngrams, begun.ngrams)


def test_a_domain_changes_the_ngram_layers_alone() -> None:
    layers, model, base = layers_of(), model_of(), dict(tiny().params)
    ngrams_, losses = train_domain(layers, model, base, texts(), VOCABULARY, PLAN, guesses=0.1)
    assert np.mean(losses[-4:]) < np.mean(losses[:4])
    assert not np.array_equal(ngrams_["lower"]["layers"][0]["qkv"], model.ngrams["lower"]["layers"][0]["qkv"])
    np.testing.assert_array_equal(ngrams_["lower"]["word"], model.ngrams["lower"]["word"])


@pytest.mark.parametrize("guesses", [0.0, 0.1])
def test_texts_that_fill_up_a_batch_count_for_nothing(guesses: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "CHOSEN", 1.0)  # whatever the draw, which a batch's size decides
    monkeypatch.setattr(pretrain, "MASKED", 1.0)
    layers, base = layers_of(), dict(tiny().params)
    given = [own._replace(ids=own.ids[: 4 + at], types=own.types[: 4 + at]) for at, own in enumerate(texts(3))]
    filled, full = (
        adapt(layers, base, given, VOCABULARY, dataclasses.replace(PLAN, batch=batch), guesses=guesses)
        for batch in (8, 3)
    )
    np.testing.assert_allclose(filled[1], full[1], rtol=1e-4)


def test_the_order_of_an_epoch_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = list[int]()

    def counted(lengths: Sequence[int], plan: SettledPlan, epoch: int) -> Any:
        epochs.append(epoch)
        return batch_order(lengths, plan, epoch)

    monkeypatch.setattr(batches, "batch_order", counted)
    ask = batches.orders([3, 1, 2, 9], SettledPlan(batch=2))
    found = [ask(epoch, at) for epoch, at in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    assert epochs == [0, 1]
    expected = [own for epoch in (0, 1) for own in batch_order([3, 1, 2, 9], SettledPlan(batch=2), epoch)]
    np.testing.assert_array_equal(found, expected)


def test_a_run_that_ended_early_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    """Also where it ended within an epoch, before a batch that has to be filled up."""
    plan = TrainingPlan(epochs=2, batch=10, dtype="float32")

    def run(folder: Path | None, stop: int | None = None) -> Hierarchical:
        def report(step: UpdateReport) -> None:
            if step.number == stop:
                raise KeyboardInterrupt

        with contextlib.ExitStack() as stack:
            keeper: Any = stack.enter_context(contextlib.closing(Checkpoints(folder))) if folder else None
            base = dict(tiny().params)
            return adapt(layers_of(), base, texts(), None, plan, keeper=keeper, save_every=2, report=report)[0]

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stop=3)
    jax.tree.map(np.testing.assert_array_equal, run(tmp_path), run(None))
